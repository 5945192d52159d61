"""RAM and its limits: what each recorded machine must say, which level binds, and nonsense."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_host import NAMES, FakeHost, mount, tree
from hypothesis import example, given
from hypothesis import strategies as st

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory, ram_pool
from legroom.records.machine import CgroupLevel, Memory, MemoryEvents

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
TOP = "/sys/fs/cgroup"
JOB = f"{TOP}/system.slice/slurmstepd.scope/job_481516"
POD = f"{TOP}/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f1c2d3e_4a5b_6c7d_8e9f_a0b1c2d3e4f5.slice"
HYBRID = f"{TOP}/memory/jobs/cbe5e45303d195625ba4d1d4f7dda41e"
SERVICE = f"{TOP}/user.slice/user-1000.slice/user@1000.service/app.slice/train.service"
TOTAL, AVAILABLE = "/proc/meminfo (MemTotal)", "/proc/meminfo (MemAvailable)"


class Expected(NamedTuple):
    """What one machine must say."""

    total: int
    available: int | None
    limits: list[int | None]  # own level first
    unreclaimable: int | None  # of one's own level
    events: tuple[int | None, int | None, int | None, str]  # kills, at limit, throttled, scope
    peak: int | None
    pool: tuple[int, int | None, int | None]  # size, used, free
    source: str


EXPECTED = {
    "bare-v2": Expected(
        65777384 * KB, 48211340 * KB, [None] * 3, 12 * GB + 312 * MB, (0, 0, 0, "cgroup"), 29 * GB,
        (65777384 * KB, 17566044 * KB, 48211340 * KB), TOTAL,
    ),
    "docker-v1": Expected(
        131918628 * KB, 101211340 * KB, [8 * GB], 4608 * MB, (1, 1290, None, "cgroup"), 8 * GB,
        (8 * GB, 4608 * MB, 3584 * MB), f"{TOP}/memory/memory.limit_in_bytes",
    ),
    "docker-v2": Expected(
        263856384 * KB, 201211340 * KB, [8 * GB], 3520 * MB, (2, 17, 0, "cgroup"), 7 * GB,
        (8 * GB, 3520 * MB, 4672 * MB), f"{TOP}/memory.max",
    ),
    "hybrid": Expected(
        24684100 * KB, 22250608 * KB, [2 * GB, None, None], 900 * MB, (0, 0, None, "cgroup"), 1800 * MB,
        (2 * GB, 900 * MB, 1148 * MB), f"{HYBRID}/memory.limit_in_bytes",
    ),
    "kubernetes-ancestor": Expected(
        131918628 * KB, 71211340 * KB, [None, 4 * GB, None, 122 * GB], 2582 * MB, (3, 40, 0, "cgroup"), None,
        (4 * GB, 2850 * MB, 1246 * MB), f"{POD}/memory.max",
    ),
    "masked-proc": Expected(
        16384000 * KB, None, [None], None, (None, None, None, "machine"), None,
        (16384000 * KB, None, None), TOTAL,
    ),
    "no-cgroup": Expected(
        16384000 * KB, 10240000 * KB, [], None, (7, None, None, "machine"), None,
        (16384000 * KB, 6144000 * KB, 10240000 * KB), TOTAL,
    ),
    "podman-v2": Expected(
        32888692 * KB, 21211340 * KB, [2 * GB], 640 * MB, (0, 0, 0, "cgroup"), 1000 * MB,
        (2 * GB, 640 * MB, 1408 * MB), f"{TOP}/memory.max",
    ),
    "slurm": Expected(
        527928180 * KB, 421211340 * KB, [None, None, None, 32 * GB, None, None], 20 * GB - 264 * MB,
        (1, 5, 0, "cgroup"), None,
        (32 * GB, 20 * GB - 256 * MB, 12 * GB + 256 * MB), f"{JOB}/memory.max",
    ),
    "swap-on": Expected(
        32768000 * KB, 1201120 * KB, [28 * GB, None, None, None, None], 26 * GB - 364 * MB,
        (0, 0, 91233, "cgroup"), 27 * GB,
        (28 * GB, 26 * GB - 364 * MB, 1201120 * KB), f"{SERVICE}/memory.max; free is limited by {AVAILABLE}",
    ),
    "v1-unlimited": Expected(
        32888692 * KB, 24211340 * KB, [None] * 4, 6 * GB, (0, 0, None, "cgroup"), 15 * GB,
        (32888692 * KB, 8677352 * KB, 24211340 * KB), TOTAL,
    ),
    "wsl": Expected(
        16374012 * KB, 14211340 * KB, [None], 230 * MB, (0, 0, 0, "cgroup"), None,
        (16374012 * KB, 2162672 * KB, 14211340 * KB), TOTAL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_tree(name: str) -> None:
    want = EXPECTED[name]
    found = memory(tree(name))
    assert (found.total, found.available) == (want.total, want.available)
    assert [level.limit for level in found.levels] == want.limits
    assert (found.levels[0].unreclaimable if found.levels else None) == want.unreclaimable
    events = found.events
    assert (events.oom_kills, events.at_limit, events.throttled, events.scope) == want.events
    assert found.peak == want.peak
    pool = ram_pool(found)
    assert (pool.size, pool.used, pool.free) == want.pool
    assert pool.source == want.source
    assert (pool.reason is None) == (pool.free is not None and pool.used is not None)


def test_throttling_and_swap_of_a_level() -> None:
    own = memory(tree("swap-on")).levels[0]
    assert (own.high, own.swap_limit, own.swap_used) == (26 * GB, 10 * GB, 7 * GB)
    assert memory(tree("hybrid")).levels[0].swap_limit == 1 * GB  # memory and swap together: 3 GB


def test_kills_are_one_s_own_group_s_and_hits_are_the_limit_s() -> None:
    events = memory(tree("kubernetes-ancestor")).events
    assert events.source.split(", ")[1] == f"{POD}/memory.events.local"
    older = memory(FakeHost(files=_v2_files({"memory.max": "9", "memory.events": "max 2\noom_kill 5\n"}))).events
    assert (older.oom_kills, older.at_limit, older.source) == (5, 2, "/c/memory.events")


def test_another_process() -> None:
    assert memory(tree("bare-v2"), "8101").levels[0].path.endswith("session-3.scope")


def test_masked_files_are_named() -> None:
    found = memory(tree("masked-proc"))
    assert found.reason is not None
    for part in ("MemAvailable", "/app/memory.max", "/sys/fs/cgroup/memory.max"):
        assert part in found.reason


def test_no_cgroup_is_reported() -> None:
    found = memory(tree("no-cgroup"))
    assert found.cgroup is None and found.reason == "/proc/self/cgroup does not exist"
    assert found.events.source == "/proc/vmstat"


# Layouts that no tree has.


def _v2_files(files: dict[str, str], total: int = 1000 * KB, available: int = 900 * KB) -> dict[str, str]:
    return {
        "/proc/meminfo": f"MemTotal: {total // KB} kB\nMemAvailable: {available // KB} kB\n",
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": mount("/c"),
        **{f"/c/{name}": content for name, content in files.items()},
    }


def _v1_files(files: dict[str, str]) -> dict[str, str]:
    return _v2_files(files, 64 * GB, 32 * GB) | {
        "/proc/self/cgroup": "4:memory:/pod/x\n",
        "/proc/self/mountinfo": mount("/c", "/pod/x", "cgroup", "rw,memory"),
    }


@pytest.mark.parametrize(
    "text", ["9223372036854771712", "9223372036854710272", "9223372036854775807", "18446744073709551615"]
)
def test_the_values_of_v1_for_no_limit(text: str) -> None:
    found = memory(FakeHost(files=_v1_files({"memory.limit_in_bytes": text, "memory.usage_in_bytes": "5"})))
    assert found.levels[0].limit is None and found.reason is None


def test_v1_shows_a_hidden_limit_above() -> None:
    stat = "hierarchical_memory_limit 2147483648\ntotal_inactive_file 10\ntotal_active_file 5\n"
    files = _v1_files({"memory.limit_in_bytes": str(8 * GB), "memory.usage_in_bytes": "1015", "memory.stat": stat})
    found = memory(FakeHost(files=files))
    assert [level.limit for level in found.levels] == [8 * GB, 2 * GB]
    assert found.above_hidden is True
    pool = ram_pool(found)
    assert (pool.size, pool.used, pool.free) == (2 * GB, 1000, 2 * GB - 1000)
    assert pool.source == "/c/memory.stat (hierarchical_memory_limit)"


@pytest.mark.parametrize(
    ("failcnt", "joint", "memsw", "hits"),
    [
        ("3", None, None, 3),
        ("3", "4", "200", 7),
        ("0", "0", "200", 0),
        ("0", "0", "100", None),
        (None, None, None, None),
    ],
)
def test_v1_hits_of_the_limit(failcnt: str | None, joint: str | None, memsw: str | None, hits: int | None) -> None:
    said = {"memory.failcnt": failcnt, "memory.memsw.failcnt": joint, "memory.memsw.limit_in_bytes": memsw}
    files = {name: text for name, text in said.items() if text is not None}
    files |= {"memory.limit_in_bytes": "100", "memory.oom_control": "oom_kill 1\n"}
    events = memory(FakeHost(files=_v1_files(files))).events
    assert (events.oom_kills, events.at_limit) == (1, hits)


def test_a_group_without_the_controller_is_no_limit_but_is_reported() -> None:
    found = memory(FakeHost(files=_v2_files({"cgroup.type": "domain"})))
    assert (found.cgroup, found.levels) == (None, ())
    assert found.reason == "/c has no memory controller"


def test_v2_s_real_root_is_nothing_to_remark() -> None:
    found = memory(FakeHost(files=_v2_files({"cgroup.procs": "1"})))
    assert (found.levels, found.above_hidden, found.reason) == ((), False, None)


def test_a_limit_above_the_machine_does_not_bind() -> None:
    stat = "inactive_file 0\nactive_file 0\n"
    files = _v2_files({"memory.max": str(GB), "memory.current": str(GB - 5), "memory.stat": stat})
    pool = ram_pool(memory(FakeHost(files=files)))
    assert pool.size == 1000 * KB
    assert (pool.free, pool.source) == (5, f"{TOTAL}; free is limited by /c/memory.max")
    # Where the use below such a limit is unknown, the machine's own figures stand.
    unknown = ram_pool(memory(FakeHost(files=_v2_files({"memory.max": str(GB)}))))
    assert (unknown.free, unknown.source) == (900 * KB, TOTAL)


def test_a_binding_limit_with_unknown_use_leaves_free_unknown() -> None:
    pool = ram_pool(memory(FakeHost(files=_v2_files({"memory.max": "4096", "memory.current": "100"}))))
    assert (pool.size, pool.used, pool.free) == (4096, None, None)
    assert pool.reason == "cannot read the usage for the limit in /c/memory.max"


def test_of_equal_limits_the_fuller_level_counts() -> None:
    own, pod = CgroupLevel("/c/p/x", 100, unreclaimable=10), CgroupLevel("/c/p", 100, unreclaimable=60)
    pool = ram_pool(_memory(1000, 900, own, pod))
    assert (pool.size, pool.used, pool.free, pool.source) == (100, 60, 40, "/c/p/memory.max")


def test_a_looser_level_that_is_fuller_bounds_what_is_free() -> None:
    own, pod = CgroupLevel("/c/p/x", 100, unreclaimable=10), CgroupLevel("/c/p", 200, unreclaimable=170)
    pool = ram_pool(_memory(1000, 900, own, pod))
    assert (pool.size, pool.used, pool.free) == (100, 10, 30)
    assert pool.source == "/c/p/x/memory.max; free is limited by /c/p/memory.max"


def test_nothing_known_is_unknown() -> None:
    pool = ram_pool(_memory(None, None))
    assert (pool.size, pool.used, pool.free) == (None, None, None) and pool.reason


def test_usage_below_its_own_cache_is_zero_not_negative() -> None:
    stat = "inactive_file 80\nactive_file 80\n"
    files = _v2_files({"memory.current": "100", "memory.stat": stat})
    assert memory(FakeHost(files=files)).levels[0].unreclaimable == 0


def test_other_platforms_ask_psutil() -> None:
    found = memory(Host(platform="darwin"))
    assert found.total and found.available and found.levels == ()
    assert found.events.oom_kills is None
    pool = ram_pool(found)
    assert pool.size == found.total and pool.source == "psutil.virtual_memory"
    recorded = ram_pool(memory(FakeHost(platform="win32")))
    assert recorded.size is None and recorded.reason and "win32" in recorded.reason


def _memory(total: int | None, available: int | None, *levels: CgroupLevel) -> Memory:
    events = MemoryEvents(None, None, None, "machine", "")
    return Memory(total, available, "v2", levels, False, events, None, "/proc/meminfo")


_bytes_or_none = st.none() | st.integers(0, 1 << 40)
_levels = st.builds(
    CgroupLevel, path=st.sampled_from(["/a", "/a/b", "/a/.."]), limit=_bytes_or_none, unreclaimable=_bytes_or_none
)


@given(_bytes_or_none, _bytes_or_none, st.lists(_levels, max_size=4))
def test_the_pool_never_promises_more_than_any_bound(
    total: int | None, available: int | None, levels: list[CgroupLevel]
) -> None:
    pool = ram_pool(_memory(total, available, *levels))
    limits = [level.limit for level in levels if level.limit is not None]
    bounds = limits + ([total] if total is not None else [])
    assert pool.size == min(bounds, default=None)
    if pool.free is not None:
        assert available is not None and pool.reason is None
        assert pool.free == min([available, *(level.room for level in levels if level.room is not None)])
    else:
        assert pool.reason


_FILES = [
    "/proc/meminfo", "/proc/vmstat", "/proc/self/cgroup", "/c/memory.max", "/c/memory.high", "/c/memory.current",
    "/c/memory.stat", "/c/memory.events", "/c/memory.events.local", "/c/memory.swap.max", "/c/memory.peak",
    "/c/memory.limit_in_bytes", "/c/memory.usage_in_bytes", "/c/memory.oom_control", "/c/memory.failcnt",
    "/c/memory.memsw.limit_in_bytes", "/c/memory.max_usage_in_bytes",
]  # fmt: skip
_noise = st.binary(max_size=60) | st.sampled_from(
    [
        b"max",
        b"-1",
        b"64",
        b"9" * 5000,
        b"inactive_file 1\nactive_file 2\n",
        b"total_inactive_file 1\ntotal_active_file 1",
    ]
)
_LAYOUTS = [(b"0::/", mount("/c")), (b"4:memory:/", mount("/c", "/", "cgroup", "rw,memory"))]


@given(st.dictionaries(st.sampled_from(_FILES), _noise), st.sampled_from(_LAYOUTS))
def test_no_content_raises(files: dict[str, bytes], layout: tuple[bytes, str]) -> None:
    membership, mounts = layout
    host = FakeHost(files={"/proc/self/cgroup": membership, **files, "/proc/self/mountinfo": mounts})
    pool = ram_pool(memory(host))
    assert pool.size is None or pool.size >= 0
    assert pool.free is None or pool.free >= 0
    assert pool.free is not None or pool.reason


@given(st.integers() | st.none() | st.text() | st.floats())
@example("0\x1f")  # which split() takes for a space and int() does not
def test_an_amount_is_a_number_a_counter_can_hold(value: object) -> None:
    host = FakeHost(files={"/n": f"{value}", "/t": f"x {value}\ny {value} kB\n"})
    for found, unit in ((host.number("/n"), 1), (host.table("/t").get("x"), 1), (host.table("/t").get("y"), 1024)):
        assert found is None or (found == int(" ".join(str(value).split())) * unit and 0 <= found < 1 << 64)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_live_machine() -> None:
    found = memory(Host())
    assert found.total and found.available and found.available <= found.total
    pool = ram_pool(found)
    assert pool.size is not None and 0 < pool.size <= found.total
    limits = [level.limit for level in found.levels if level.limit is not None]
    assert pool.size == min([found.total, *limits])
    assert all(Path(level.path).exists() for level in found.levels)


def test_every_tree_is_expected() -> None:
    assert set(EXPECTED) == set(NAMES)
