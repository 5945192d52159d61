"""Memory pressure: the machine's and the cgroup's, and nothing where the kernel says nothing."""

from __future__ import annotations

import math

import pytest
from fake_host import NAMES, FakeHost, mount, tree
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import parse_pressure, pressure

# tree: (scope, some over 10 and 60 seconds, full over 10 and 60 seconds)
CALM = (0.0, 0.0, 0.0, 0.0)
EXPECTED: dict[str, list[tuple[object, ...]]] = {
    "bare-v2": [("machine", *CALM), ("cgroup", *CALM)],
    "docker-v1": [],  # Linux 4.19
    "docker-v2": [("machine", 0.1, 0.05, 0.0, 0.0), ("cgroup", 3.2, 1.1, 2.7, 0.9)],
    "hybrid": [("machine", *CALM)],  # in the unified hierarchy it lives in the root group
    "kubernetes-ancestor": [("machine", *CALM), ("cgroup", 11.0, 7.5, 9.0, 6.0)],
    "masked-proc": [],
    "no-cgroup": [],
    "podman-v2": [("machine", *CALM), ("cgroup", *CALM)],
    "slurm": [("machine", 0.5, 0.2, 0.0, 0.0), ("cgroup", 1.5, 0.75, 1.25, 0.5)],
    "swap-on": [("machine", 42.17, 30.02, 38.55, 26.4), ("cgroup", 55.0, 41.0, 52.5, 38.0)],
    "v1-unlimited": [("machine", *CALM)],
    "wsl": [("machine", *CALM), ("cgroup", *CALM)],
}


@pytest.mark.parametrize("name", NAMES)
def test_every_tree(name: str) -> None:
    found = [
        (one.scope, one.some_avg10, one.some_avg60, one.full_avg10, one.full_avg60) for one in pressure(tree(name))
    ]
    assert found == EXPECTED[name]


def test_sources_are_the_files() -> None:
    machine, own = pressure(tree("docker-v2"))
    assert (machine.source, own.source) == ("/proc/pressure/memory", "/sys/fs/cgroup/memory.pressure")


def test_another_process_s_group() -> None:
    assert pressure(tree("swap-on"), "9002")[1].some_avg10 == 55.0


LINES = "some avg10=1.50 avg60=2.00 avg300=3.00 total=9\nfull avg10=0.50 avg60=1.00 avg300=1.00 total=4\n"


def test_lines_are_read() -> None:
    assert parse_pressure(LINES) == {"some": (1.5, 2.0), "full": (0.5, 1.0)}


@pytest.mark.parametrize("bad", ["nan", "inf", "-1", "", "x", "1.0.0"])
def test_what_is_no_share_is_left_out(bad: str) -> None:
    assert parse_pressure(f"some avg10={bad} avg60=1.0\n") == {}


def test_half_a_file_is_no_record() -> None:
    assert pressure(FakeHost(files={"/proc/pressure/memory": LINES.splitlines()[0]})) == ()


def test_a_group_above_one_s_own_is_not_taken_for_it() -> None:
    files = {
        "/proc/self/cgroup": "0::/gone\n",
        "/proc/self/mountinfo": mount("/c"),
        "/c/memory.max": "max",
        "/c/memory.pressure": LINES,
    }
    assert pressure(FakeHost(files=files)) == ()


@given(st.binary(max_size=200))
def test_no_content_raises(content: bytes) -> None:
    files = {
        "/proc/pressure/memory": content,
        "/proc/self/cgroup": "0::/",
        "/proc/self/mountinfo": mount("/c"),
        "/c/memory.max": "max",
        "/c/memory.pressure": content,
    }
    for one in pressure(FakeHost(files=files)):
        assert math.isfinite(one.some_avg10)


def test_the_live_machine() -> None:
    for one in pressure(Host()):
        assert 0 <= one.full_avg60 <= 100 and 0 <= one.some_avg60 <= 100


def test_every_tree_is_expected() -> None:
    assert set(EXPECTED) == set(NAMES)
