"""Limits of a process, and the pools made of them."""

from __future__ import annotations

import gc
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import fds_pool, limits, pinned_pool
from legroom.records.machine import Limits, Pool

TREES = Path(__file__).parents[2] / "trees"
RAM = Pool("ram", 8 << 30, 3 << 30, 5 << 30, "/proc/meminfo")


def bounds(**given: Any) -> Limits:
    values: dict[str, Any] = {
        "nofile_soft": 1024, "nofile_hard": 4096, "memlock_soft": 65536, "open_fds": 4, "source": "test",
    }  # fmt: skip
    return Limits(**(values | given))


def test_a_recorded_machine() -> None:
    found = limits(Host.at(TREES / "bare-v2"))
    assert (found.nofile_soft, found.nofile_hard, found.memlock_soft) == (1024, 1048576, 8388608)
    assert (found.open_fds, found.overcommit, found.reason) == (4, 0, None)


def test_no_bound_is_none_and_reported() -> None:
    found = limits(Host.at(TREES / "slurm"))
    assert found.memlock_soft is None and found.reason == "RLIMIT_MEMLOCK is unlimited"


def test_what_cannot_be_read_is_none_and_reported() -> None:
    found = limits(Host.at(TREES / "masked-proc"))
    assert found.nofile_soft is found.nofile_hard is found.memlock_soft is found.open_fds is found.overcommit is None
    for word in ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "open descriptors", "overcommit_memory"):
        assert word in (found.reason or "")


@pytest.mark.parametrize("nonsense", [{"nofile": "x"}, {"nofile": [1]}, {"nofile": ["a", "b"]}, {"nofile": 3}, []])
def test_nonsense_in_a_recording_raises_nothing(tmp_path: Path, nonsense: Any) -> None:
    found = limits(Host(root=tmp_path, recording={"rlimits": nonsense}))
    assert found.nofile_soft is None and found.reason


def test_the_live_process_is_counted_without_the_counting() -> None:
    def opened() -> int:
        count = 0
        for fd in range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)):
            try:
                os.fstat(fd)
                count += 1
            except OSError:
                continue
        return count

    found = limits(Host())
    assert (found.nofile_soft, found.nofile_hard) == resource.getrlimit(resource.RLIMIT_NOFILE)
    hear, tell = os.pipe()
    gc.disable()  # also in the child: a collection would close what earlier tests left open
    pid = os.fork()  # without the threads of this process, which open and close files
    if pid == 0:
        try:
            counts = [limits(Host()).open_fds, opened()]
            os.pipe()
            os.write(tell, json.dumps([*counts, limits(Host()).open_fds, opened()]).encode())
        finally:
            os._exit(0)
    gc.enable()
    os.close(tell)
    with os.fdopen(hear) as told:
        first, by_hand, second, again = json.load(told)
    os.waitpid(pid, 0)
    assert first == by_hand and second == again == first + 2


def test_a_lowered_limit_is_seen() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert limits(Host()).nofile_soft == soft - 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_elsewhere_descriptors_are_looked_for_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "dev/fd").mkdir(parents=True)
    for name in ("0", "1", "2", "x"):
        (tmp_path / "dev/fd" / name).touch()
    found = limits(Host(root=tmp_path, platform="darwin", recording={"rlimits": {"nofile": [256, -1]}}))
    assert (found.open_fds, found.nofile_soft, found.nofile_hard) == (3, 256, None)
    assert "overcommit" not in (found.reason or "")


def test_descriptors_are_each_processs_own() -> None:
    pool = fds_pool(bounds())
    assert (pool.name, pool.size, pool.used, pool.free) == ("fds", 1024, None, None)
    assert "no process was given" in (pool.reason or "")
    assert (
        fds_pool(bounds(nofile_soft=None, reason="RLIMIT_NOFILE is unlimited")).reason == "RLIMIT_NOFILE is unlimited"
    )


def test_pinned_memory_comes_out_of_ram() -> None:
    pool = pinned_pool(RAM, bounds())
    assert (pool.name, pool.size, pool.used, pool.free) == ("pinned", RAM.size, None, RAM.free)
    assert "/proc/meminfo" in pool.source
    assert "64 KB" in (pool.reason or "") and "does not limit" in (pool.reason or "")
    assert "no RLIMIT_MEMLOCK" in (pinned_pool(RAM, bounds(memlock_soft=None)).reason or "")


def test_unknown_ram_is_unknown_pinned() -> None:
    pool = pinned_pool(Pool("ram", None, None, None, "nowhere", "masked"), bounds())
    assert pool.size is pool.used is pool.free is None
