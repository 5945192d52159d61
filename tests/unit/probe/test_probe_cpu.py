"""CPUs and quotas: the smallest quota over the levels, whatever the layout."""

from __future__ import annotations

import os
import sys

import pytest
from fake_host import NAMES, FakeHost, mount, tree
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import cpu

EXPECTED: dict[str, tuple[int | None, float | None]] = {
    "bare-v2": (16, None),
    "docker-v1": (32, 4.0),
    "docker-v2": (64, 2.5),
    "hybrid": (2, None),
    "kubernetes-ancestor": (32, 2.0),  # the pod's two, not the container's four
    "masked-proc": (None, None),
    "no-cgroup": (4, None),
    "podman-v2": (16, None),
    "slurm": (8, None),
    "swap-on": (12, None),
    "v1-unlimited": (12, None),
    "wsl": (8, None),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_tree(name: str) -> None:
    found = cpu(tree(name))
    assert (found.affinity, found.quota) == EXPECTED[name]


def test_the_source_names_the_group_that_limits() -> None:
    assert cpu(tree("kubernetes-ancestor")).source.endswith("a0b1c2d3e4f5.slice/cpu.max")
    assert cpu(tree("docker-v1")).source == "sched_getaffinity, /sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"


def test_another_process_s_affinity() -> None:
    found = cpu(tree("docker-v2"), "32")
    assert (found.affinity, found.quota) == (64, 2.5)
    assert found.source.startswith("/proc/32/status")
    assert cpu(tree("masked-proc"), "12").affinity is None
    assert cpu(tree("bare-v2"), "31337").affinity is None


@pytest.mark.parametrize(("mask", "count"), [("3", 2), ("ff,00000000", 8), ("0", None), ("zz", None), ("", None)])
def test_masks(mask: str, count: int | None) -> None:
    host = FakeHost(files={"/proc/7/status": f"Name:\tx\nCpus_allowed:\t{mask}\n"})
    assert cpu(host, "7").affinity == count


def _quota(text: str | bytes) -> float | None:
    files = {"/proc/self/cgroup": "0::/", "/proc/self/mountinfo": mount("/c"), "/c/cpu.max": text}
    return cpu(FakeHost(files=files)).quota


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("150000 100000\n", 1.5),
        ("max 100000\n", None),
        ("max", None),
        ("100000 0", None),
        ("0 100000", None),
        ("-5 100000", None),
        ("100000", None),
        ("1 2 3", None),
        ("9" * 400 + " 1", None),
    ],
)
def test_cpu_max(text: str, quota: float | None) -> None:
    assert _quota(text) == quota


@given(st.binary(max_size=40) | st.from_regex(rb"-?[0-9]{1,30} -?[0-9]{1,30}", fullmatch=True))
def test_no_content_raises(content: bytes) -> None:
    quota = _quota(content)
    assert quota is None or quota > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_live_machine() -> None:
    own = cpu(Host())
    assert own.affinity == len(os.sched_getaffinity(0))
    assert cpu(Host(), str(os.getpid())).affinity == own.affinity
    assert own.quota is None or own.quota > 0


def test_every_tree_is_expected() -> None:
    assert set(EXPECTED) == set(NAMES)
