"""Swap: amounts, rates over an interval, and the pool that a cgroup leaves of it."""

from __future__ import annotations

import sys

import pytest
from fake_host import NAMES, FakeHost, tree
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory, read_swap_counters, swap, swap_pool
from legroom.records.machine import CgroupLevel, Memory, MemoryEvents, Swap

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30

# tree: total and used of the machine, the cgroup's limit, the pool's (size, used, free)
EXPECTED = {
    "bare-v2": (0, 0, None, (0, 0, 0)),
    "docker-v1": (0, 0, None, (0, 0, 0)),
    "docker-v2": (0, 0, 0, (0, 0, 0)),
    "hybrid": (0, 0, 1 * GB, (0, 0, 0)),
    "kubernetes-ancestor": (0, 0, 0, (0, 0, 0)),
    "masked-proc": (None, None, None, (None, None, None)),
    "no-cgroup": (0, 0, None, (0, 0, 0)),
    "podman-v2": (0, 0, 2 * GB, (0, 0, 0)),
    "slurm": (0, 0, 0, (0, 0, 0)),
    "swap-on": (16777212 * KB, 8 * GB, 10 * GB, (10 * GB, 7 * GB, 3 * GB)),
    "v1-unlimited": (0, 0, None, (0, 0, 0)),
    "wsl": (4 * GB, 0, None, (4 * GB, 0, 4 * GB)),
}


def _swap(host: Host) -> Swap:
    return swap(host, memory(host), read_swap_counters(host))


@pytest.mark.parametrize("name", NAMES)
def test_every_tree(name: str) -> None:
    total, used, limit, pool = EXPECTED[name]
    found = _swap(tree(name))
    assert (found.total, found.used, found.cgroup_limit) == (total, used, limit)
    made = swap_pool(found)
    assert (made.size, made.used, made.free) == pool
    assert (made.reason is None) == (made.size is not None)


def test_rates_come_from_the_second_reading() -> None:
    found = _swap(tree("swap-on"))
    assert found.interval == 0.1
    assert found.in_rate == pytest.approx(2560 * 4096 / 0.1)
    assert found.out_rate == pytest.approx(5120 * 4096 / 0.1)


def test_a_recording_of_one_moment_has_no_rate() -> None:
    found = _swap(tree("wsl"))
    assert (found.in_rate, found.out_rate, found.interval) == (None, None, None)


@pytest.mark.parametrize("later", [{"pswpin": "many"}, {"pswpin": -3}, {}, [], None, {"pswpin": 10**40}])
@pytest.mark.parametrize("interval", [0.1, 0, -1, None, "soon", float("nan")])
def test_an_odd_second_reading_gives_no_rate(later: object, interval: object) -> None:
    recording = {"vmstat_later": later, "interval": interval}
    host = FakeHost(recording=recording, files={"/proc/vmstat": "pswpin 5\npswpout 5\n"})
    assert _swap(host).in_rate is None


def test_counters_that_went_back_are_not_a_negative_rate() -> None:
    recording = {"vmstat_later": {"pswpin": 1, "pswpout": 1}, "interval": 1}
    host = FakeHost(recording=recording, files={"/proc/vmstat": "pswpin 5\npswpout 5\n"})
    assert _swap(host).in_rate == 0


def _of(total: int | None, used: int | None, limit: int | None, own: int | None) -> Swap:
    return Swap(total, used, None, None, None, limit, "somewhere", None, own)


def test_the_pool_is_the_tighter_of_machine_and_cgroup() -> None:
    pools = {
        _of(100, 30, None, None): (100, 30, 70),
        _of(100, 30, 500, 20): (100, 30, 70),
        _of(100, 30, 50, 20): (50, 20, 30),
        _of(100, 95, 50, 20): (50, 20, 5),  # the others have left only five
        _of(100, 30, 0, None): (0, 0, 0),
        _of(None, None, 0, None): (0, 0, 0),
        _of(100, 30, 50, None): (50, None, None),
        _of(None, None, 50, 20): (50, 20, None),
    }
    for given_swap, want in pools.items():
        pool = swap_pool(given_swap)
        assert (pool.size, pool.used, pool.free) == want, given_swap
        assert (pool.reason is None) == (None not in want)


def test_the_tightest_level_counts_and_of_equals_the_fullest() -> None:
    levels = (
        CgroupLevel("/c/a/b", swap_limit=9 * MB, swap_used=1 * MB),
        CgroupLevel("/c/a", swap_limit=5 * MB, swap_used=1 * MB),
        CgroupLevel("/c", swap_limit=5 * MB, swap_used=3 * MB),
    )
    events = MemoryEvents(None, None, None, "machine", "")
    ram = Memory(None, None, "v2", levels, False, events, None, "")
    host = FakeHost(files={"/proc/meminfo": "SwapTotal: 1048576 kB\nSwapFree: 1048576 kB\n"})
    found = swap(host, ram, read_swap_counters(host))
    assert (found.cgroup_limit, found.cgroup_used) == (5 * MB, 3 * MB)
    assert found.source.endswith(", /c/memory.swap.max")
    assert swap_pool(found).free == 2 * MB


def test_other_platforms_ask_psutil() -> None:
    for platform in ("darwin", "win32"):
        found = _swap(Host(platform=platform))
        assert found.total is not None and found.used is not None
        assert (found.in_rate is None) == (platform == "win32")
    recorded = _swap(FakeHost(platform="darwin"))
    assert recorded.total is None and recorded.reason and "darwin" in recorded.reason


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_no_content_raises(meminfo: bytes, vmstat: bytes) -> None:
    pool = swap_pool(_swap(FakeHost(files={"/proc/meminfo": meminfo, "/proc/vmstat": vmstat})))
    assert pool.size is not None or pool.reason


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_live_machine() -> None:
    found = _swap(Host())
    assert found.total is not None and found.used is not None and 0 <= found.used <= found.total
    if found.in_rate is not None:
        assert found.interval is not None and found.interval > 0
        assert found.total == 0 or found.interval >= 0.1


def test_every_tree_is_expected() -> None:
    assert set(EXPECTED) == set(NAMES)
