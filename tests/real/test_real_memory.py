"""Memory, swap and CPU probes against real cgroups, namespaces and a real swap file."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rigs

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import cpu
from legroom.probe.ram_swap_and_pressure import memory, ram_pool, read_swap_counters, swap, swap_pool

MB = 1 << 20

# Holds the bytes it is told to, says so, and stays until its standard input closes.
HOLD = "import sys; held = bytearray(int(sys.argv[1])); held[::4096] = b'x' * len(held[::4096]); print(flush=True); sys.stdin.read()"

# What a process sees of its own group.
LOOK = """
import json
from legroom.probe.filesystems_and_cgroups import cgroup
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory, ram_pool
group, ram = cgroup(Host(), "memory"), memory(Host())
print(json.dumps({"chain": group.chain, "hidden": group.above_hidden, "reason": group.reason,
                  "limits": [level.limit for level in ram.levels], "size": ram_pool(ram).size}))
"""


@contextlib.contextmanager
def _holding(group: rigs.Cgroup, size: int, inside: str = "") -> Iterator[str]:
    """A process in the group (or in one below it) that holds ``size`` bytes; its pid as text."""
    place = rigs.Cgroup(group.path / inside, group.version)
    command = place.command([sys.executable, "-c", HOLD, str(size)])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        yield str(process.pid)  # sh became it
        process.communicate()


@pytest.mark.real("cgroup")
def test_a_process_s_own_limit_and_use() -> None:
    with rigs.memory_cgroup(256 * MB) as group, _holding(group, 64 * MB) as pid:
        ram = memory(Host(), pid)
        assert ram.cgroup == group.version
        own = ram.levels[0]
        assert (own.path, own.limit) == (str(group.path), 256 * MB)
        assert own.unreclaimable is not None and 64 * MB <= own.unreclaimable < 128 * MB
        pool = ram_pool(ram)
        assert pool.size == 256 * MB and pool.free == own.room
        assert str(group.path) in pool.source
        assert ram.peak is None or ram.peak >= 64 * MB  # v2 has it since Linux 5.19


@pytest.mark.real("cgroup")
def test_page_cache_is_usage_but_leaves_the_room(tmp_path: Path) -> None:
    file = Path("/var/tmp") / f"legroom-test-cache-{os.getpid()}"
    try:
        with rigs.memory_cgroup(256 * MB) as group:
            # The writer is in the group, so the page cache is charged to it.
            fill = f"dd if=/dev/zero of={file} bs=1M count=96 conv=fsync 2>{tmp_path}/err"
            subprocess.run(group.command(["sh", "-c", fill]), check=True)
            with _holding(group, 1 * MB) as pid:
                own = memory(Host(), pid).levels[0]
        assert own.usage is not None and own.unreclaimable is not None
        assert own.usage >= 90 * MB
        assert own.unreclaimable < 48 * MB
    finally:
        file.unlink(missing_ok=True)


@pytest.mark.real("cgroup")
def test_a_limit_on_the_group_above_counts() -> None:
    with rigs.memory_cgroup(200 * MB) as group:
        if group.version == "v2":
            (group.path / "cgroup.subtree_control").write_text("+memory")
        below = group.path / "below"
        below.mkdir()
        try:
            with _holding(group, 32 * MB, "below") as pid:
                ram = memory(Host(), pid)
                assert [level.limit for level in ram.levels[:2]] == [None, 200 * MB]
                assert ram_pool(ram).size == 200 * MB
                assert ram.events.oom_kills == 0
        finally:
            rigs._empty_and_remove(below)


@pytest.mark.real("cgroup")
@pytest.mark.parametrize("extra", [0, None], ids=["no-swap", "any-swap"])
def test_an_oom_kill_is_counted(extra: int | None) -> None:
    with rigs.memory_cgroup(64 * MB, swap=extra) as group, _holding(group, 1 * MB) as pid:
        before = memory(Host(), pid).events
        assert (before.oom_kills, before.scope) == (0, "cgroup")
        greedy = group.command([sys.executable, "-c", HOLD, str(256 * MB)])
        assert subprocess.run(greedy, stdin=subprocess.DEVNULL, capture_output=True).returncode == -9
        after = memory(Host(), pid).events
        assert after.oom_kills == group.oom_kills() >= 1
        if group.version == "v1" and extra == 0 and after.at_limit is None:
            return  # the kernel does not count hits of memory and swap together, and that is not a zero
        assert after.at_limit is not None and after.at_limit > (before.at_limit or 0)


def _look(group: rigs.Cgroup, prepare: str, *namespaces: str) -> dict[str, Any]:
    """What a process in the group sees after ``prepare`` in namespaces of its own."""
    inner = ["sh", "-c", f'{prepare} && exec "$@"', "sh", sys.executable, "-c", LOOK]
    command = group.command(["unshare", "--mount", "--propagation", "private", *namespaces, *inner])
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _hierarchy(group: rigs.Cgroup) -> tuple[Path, str]:
    """Where the memory hierarchy is mounted, and the options that mount it once more."""
    return group.path.parent, "-t cgroup -o memory" if group.version == "v1" else "-t cgroup2"


@pytest.mark.real("cgroup", "mount")
def test_a_bind_mount_of_the_group_alone_as_docker_makes_it() -> None:
    with rigs.memory_cgroup(128 * MB) as group:
        top, _ = _hierarchy(group)
        seen = _look(group, f"mount --bind {group.path} {top}")
    assert seen["chain"] == [str(top)]
    assert (seen["hidden"], seen["reason"]) == (True, None)
    assert (seen["limits"], seen["size"]) == ([128 * MB], 128 * MB)


@pytest.mark.real("cgroup", "mount")
def test_a_private_cgroup_namespace() -> None:
    with rigs.memory_cgroup(128 * MB) as group:
        top, options = _hierarchy(group)
        seen = _look(group, f"umount {top} && mount {options} cgroup {top}", "--cgroup")
    assert seen["chain"] == [str(top)]
    assert (seen["hidden"], seen["reason"]) == (True, None)
    assert (seen["limits"], seen["size"]) == ([128 * MB], 128 * MB)


@pytest.mark.real("cgroup", "mount")
def test_a_namespace_below_an_older_mount_is_unknown() -> None:
    with rigs.memory_cgroup(128 * MB) as group:
        top, _ = _hierarchy(group)
        seen = _look(group, "true", "--cgroup")
    assert seen["chain"] == [str(top)]
    assert "hides the path of this cgroup below" in seen["reason"]


@pytest.mark.real("cgroup", "swap")
def test_swap_moves_and_is_bounded_by_the_group() -> None:
    host = Host()
    with rigs.swap_file(256 * MB), rigs.memory_cgroup(64 * MB, swap=192 * MB) as group:
        counters = read_swap_counters(host)
        with _holding(group, 128 * MB) as pid:
            ram = memory(host, pid)
            found = swap(host, ram, counters)
        assert found.total is not None and found.total >= 255 * MB
        assert found.used is not None and found.used >= 48 * MB
        assert found.out_rate is not None and found.out_rate > 0
        assert found.interval is not None and found.interval >= 0.1
        if ram.levels[0].swap_limit is None:  # a kernel without swap accounting
            return
        assert ram.levels[0].swap_limit == 192 * MB
        assert found.cgroup_used is not None and found.cgroup_used >= 48 * MB
        pool = swap_pool(found)
        assert pool.size == 192 * MB and pool.used == found.cgroup_used


@pytest.mark.real("swap")
def test_a_still_machine_with_swap_waits_for_its_interval() -> None:
    with rigs.swap_file(16 * MB):
        began = time.monotonic()
        found = swap(Host(), memory(Host()), read_swap_counters(Host()))
        assert time.monotonic() - began >= 0.1
        assert found.in_rate is not None and found.total is not None and found.total >= 15 * MB


@pytest.mark.real("cgroup")
def test_the_smallest_cpu_quota_over_the_levels() -> None:
    v2 = Path("/sys/fs/cgroup/cgroup.controllers")
    top = v2.parent if v2.exists() else Path("/sys/fs/cgroup/cpu")
    outer = top / f"legroom-test-cpu-{os.getpid()}"
    if v2.exists():
        (top / "cgroup.subtree_control").write_text("+cpu")
    outer.mkdir()
    try:
        if v2.exists():
            (outer / "cgroup.subtree_control").write_text("+cpu")
            (outer / "cpu.max").write_text("50000 100000")
        else:
            (outer / "cpu.cfs_quota_us").write_text("50000")
        (outer / "inner").mkdir()
        try:
            place = rigs.Cgroup(outer / "inner", "v2" if v2.exists() else "v1")
            with subprocess.Popen(place.command(["cat"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(b"\n")
                process.stdin.flush()
                assert process.stdout.readline() == b"\n"  # it has moved into the group
                found = cpu(Host(), str(process.pid))
                process.communicate()
        finally:
            rigs._empty_and_remove(outer / "inner")
    finally:
        rigs._empty_and_remove(outer)
    assert found.quota == 0.5
    assert str(outer) in found.source
