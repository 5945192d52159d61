"""Samples of staged and of real processes; what is read seldom says how old it is; who is watched stays watched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_machine import MB, FakeMachine

from legroom.errors import NoSuchProcess, NothingMatches, UsageError
from legroom.monitor.process_selection import (
    ProcessSelection,
    matching_processes,
    process_tree,
    this_process,
    user_processes,
)
from legroom.monitor.take_watch_sample import RateLimit, Sampler, cache_entries
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.nvml import NvmlSession
from legroom.probe.process_and_limits import ProcessTable, status_of
from legroom.records.machine import Gpu, GpuProcess, Gpus, Pool, Process
from legroom.records.watch_sample import GroupRow, Sample


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    staged = FakeMachine(tmp_path, used=16 * MB)
    staged.text("/proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 400000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n")
    staged.text("/proc/vmstat", "pswpin 1\npswpout 2\noom_kill 0\n")
    staged.text("/proc/self/cgroup", "")
    return staged


def _take(sampler: Sampler) -> Sample:
    found = sampler.take()
    assert found is not None
    return found


def test_a_sample_has_the_pools_and_the_tree(machine: FakeMachine) -> None:
    machine.process(10, 1, ["bash"])
    machine.process(20, 10, ["python", "train.py"], shmem=2048, pss=700)
    machine.process(21, 20, ["python", "worker"], shmem=1024, pss=300)
    machine.process(30, 1, ["other"])
    host = machine.host
    table = ProcessTable(host)
    clock = Clock()
    sampler = Sampler(process_tree(20, table.refresh()), host=host, clock=clock, table=table)
    first = _take(sampler)
    assert [(row.pid, row.rss_shmem, row.swap) for row in first.processes] == [
        (20, 2048 << 10, 7 << 10),
        (21, 1024 << 10, 7 << 10),
    ]
    assert first.processes[0].pss == 700 << 10 and first.processes[0].pss_at == 0.0 and first.processes[0].born is None
    pools = {one.name: one for one in first.pools}
    assert pools["shm"].used == 16 * MB and pools["ram"].size == 1_000_000 << 10 and pools["swap"].size == 0
    assert first.swap_in is None  # a rate needs two looks
    # A newcomer, one that ended, one that grew.
    machine.process(22, 20, ["python", "late"], shmem=1)
    machine.text(
        "/proc/20/status", (machine.root / "proc/20/status").read_text().replace("RssShmem:\t2048", "RssShmem:\t4096")
    )
    (machine.root / "proc/21/status").unlink()
    clock.now += 5
    second = _take(sampler)
    assert [(row.pid, row.rss_shmem, row.born) for row in second.processes] == [
        (20, 4096 << 10, None),
        (22, 1 << 10, 5.0),
    ]


def test_an_idle_process_is_one_object_in_all_samples(machine: FakeMachine) -> None:
    machine.process(20, 1, pss=700)
    host = machine.host
    clock = Clock()
    sampler = Sampler(process_tree(20, ProcessTable(host).refresh()), host=host, clock=clock)
    _take(sampler)  # reads PSS, which is not due again while the clock stands still
    one, two = _take(sampler), _take(sampler)
    assert one.processes[0] is two.processes[0]


def test_pss_is_read_in_turns_within_its_time_budget(machine: FakeMachine) -> None:
    for pid in range(100, 140):
        machine.process(pid, 1 if pid == 100 else 100, pss=pid)
    host = machine.host
    clock = Clock()
    sampler = Sampler(
        process_tree(100, ProcessTable(host).refresh()), host=host, clock=clock, interval=1e-6
    )  # room for one a sample
    ages: list[set[int]] = []
    for _ in range(60):
        found = _take(sampler)
        ages.append({row.pid for row in found.processes if row.pss_at is not None})
        clock.now += 10_000.0  # long after the next is due, also where a reading had to wait seconds for a core
    assert len(ages[0]) == 1 and all(len(after) - len(before) <= 1 for before, after in pairwise(ages))
    assert len(ages[-1]) == 40  # everybody gets a turn
    assert len({row.pss_at for row in found.processes}) == 40
    oldest = min(row.pss_at for row in found.processes if row.pss_at is not None)
    assert found.clock - oldest <= 41 * 10_000.0


def test_gpus_are_queried_within_their_time_budget_and_joined_by_pid(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.process(20)
    machine.process(21, 20)
    asked: list[int] = []

    def cards(host: Host) -> Gpus:
        asked.append(1)
        time.sleep(0.05)  # at 0.3 % of the time: not again for 16 s
        users = (GpuProcess(20, 3 * MB, "python"), GpuProcess(21, None, "python"), GpuProcess(99, MB, None))
        used = [Gpu(n, "card", f"uuid{n}", 80 * MB, 8 * MB, 72 * MB, users) for n in range(2)]
        return Gpus(tuple(used), 2, "580", "NVML")

    monkeypatch.setattr("legroom.monitor.take_watch_sample.gpus", cards)
    host = machine.host
    clock = Clock()
    sampler = Sampler(process_tree(20, ProcessTable(host).refresh()), host=host, clock=clock)
    first = _take(sampler)
    assert {row.pid: row.gpu for row in first.processes} == {20: 6 * MB, 21: None}
    assert [one.name for one in first.pools if one.name.startswith("gpu")] == ["gpu0", "gpu1"]
    clock.now += 1
    second = _take(sampler)
    assert second.gpu_at == 0.0 and second.clock == 1.0 and len(asked) == 1
    assert second.processes[0].gpu == 6 * MB  # as last read, and gpu_at says when
    sampler.close()


def test_a_disk_or_driver_that_does_not_answer_delays_no_sample(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.process(20)
    module, answer, clock = "legroom.monitor.take_watch_sample", threading.Event(), Clock()
    card = Gpu(0, "card", "uuid", 80 * MB, 8 * MB, 72 * MB, ())
    monkeypatch.setattr(f"{module}.gpus", lambda host: answer.wait(60) and Gpus((card,), 1, "580", "NVML"))
    monkeypatch.setattr(f"{module}.disk_pool", lambda disks: answer.wait(60) and Pool("disk", 8, 6, 2, "test"))
    monkeypatch.setattr(f"{module}._FIRST_PATIENCE", 0.01, raising=False)
    sampler = Sampler(process_tree(20, ProcessTable(machine.host).refresh()), host=machine.host, clock=clock)

    def pools() -> dict[str, tuple[int | None, str | None]]:
        clock.now += 60
        return {one.name: (one.used, one.reason) for one in _take(sampler).pools if one.name in ("disk", "gpu0")}

    assert pools() == {"disk": (None, "no answer yet")}
    answer.set()
    deadline = time.monotonic() + 60
    while pools() != {"disk": (6, None), "gpu0": (8 * MB, None)}:
        assert time.monotonic() < deadline
    answer.clear()
    pools()  # both are due again
    assert set(pools().values()) == {(None, "no answer for more than 10 s")}
    answer.set()
    sampler.close()


def test_an_answer_of_another_version_is_unknown_and_ends_no_watch(machine: FakeMachine) -> None:
    machine.process(20)
    unreadable: dict[str, tuple[GroupRow, ...]] = {}
    selection = process_tree(20, ProcessTable(machine.host).refresh())
    sampler = Sampler(selection, host=machine.host, groups=lambda: unreadable["trainers"], entries=lambda: ())
    assert (_take(sampler).groups, _take(sampler).entries) == (None, ())
    sampler.close()


class _Nvml:
    def __init__(self, works: bool = True) -> None:
        self.count, self.works = 0, works

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.works:
            raise RuntimeError("no driver")
        self.count += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.count -= 1


def test_the_driver_is_held_once_and_given_back() -> None:
    nvml = _Nvml()
    hold = NvmlSession(nvml)
    hold.open()
    hold.open()
    assert nvml.count == 1
    hold.close()
    hold.close()
    assert nvml.count == 0
    broken = NvmlSession(_Nvml(works=False))
    broken.open()
    assert not broken.held
    broken.close()


def test_a_time_budget() -> None:
    ration = RateLimit(0.01, min_gap=0.5)
    assert ration.due(0.0)
    ration.spent(10.0, 0.1)
    assert not ration.due(19.9) and ration.due(20.0)
    ration.spent(20.0, 0.0)
    assert not ration.due(20.4) and ration.due(20.5)


# Who is watched.


def _everybody(*rows: tuple[int, int]) -> dict[int, Process]:
    return {pid: Process(pid, parent, f"python {pid}", 1000) for pid, parent in rows}


def test_an_orphan_stays_watched() -> None:
    there = _everybody((1, 0), (20, 1), (21, 20), (22, 21), (30, 1))
    targets = process_tree(20, there)
    assert targets.choose(there) == [20, 21, 22] and targets.scope == "20"
    assert targets.choose(_everybody((1, 0), (22, 1), (30, 1))) == [22] and targets.scope == "22"
    assert targets.choose(_everybody((1, 0), (22, 1), (23, 22))) == [22, 23]
    assert targets.choose(_everybody((1, 0), (30, 1))) == [] and targets.ends


def test_matching_waits_for_the_next_run(machine: FakeMachine) -> None:
    there = _everybody((1, 0), (20, 1), (21, 20))
    targets = matching_processes(machine.host, "python 20", there)
    assert targets.choose(there) == [20, 21] and not targets.ends
    assert targets.choose(_everybody((1, 0))) == []
    assert targets.scope == "self"  # a dead process has no cgroup to look at
    with pytest.raises(NothingMatches):
        matching_processes(machine.host, "nothing", there, wait=False)
    before = matching_processes(machine.host, "python 40", there)
    assert before.choose(there) == [] and before.choose(_everybody((1, 0), (40, 1))) == [40]
    with pytest.raises(UsageError):
        matching_processes(machine.host, "(", there)
    with pytest.raises(NoSuchProcess):
        process_tree(99, there)


def test_mine_is_by_user(machine: FakeMachine) -> None:
    there = _everybody((20, 1), (21, 1))
    there[21] = Process(21, 1, "theirs", 0)
    assert user_processes(machine.host).choose(there) == [20]
    machine.uid = None  # type: ignore[assignment]
    with pytest.raises(UsageError):
        user_processes(machine.host)


def test_this_process_is_left_out_by_its_pid_in_the_proc_that_is_read(machine: FakeMachine) -> None:
    there = _everybody((1, 0), (20, 1), (4711, 1), (os.getpid(), 20))
    host, proc = machine.host, machine.root / "proc"
    (proc / "self").rename(proc / "4711")
    (proc / "self").symlink_to("4711")  # in a container, with the /proc of the machine under --root
    for targets in (process_tree(20, there, host), matching_processes(host, "python 20", there)):
        assert targets.choose(there) == sorted({20, os.getpid()})
    assert {os.getpid(), 4711} - set(user_processes(host).choose(there)) == {4711}


def test_rings_of_reused_numbers_do_not_hang() -> None:
    there = _everybody((20, 21), (21, 20))
    assert ProcessSelection("x", lambda _: (20,)).choose(there) == [20, 21]


def test_a_roster_reads_newcomers_whole_and_the_others_in_turn(machine: FakeMachine) -> None:
    for pid in range(10, 40):
        machine.process(pid)
    table = ProcessTable(machine.host)
    for _ in range(6):
        assert len(table.refresh()) == 30
    read: list[str] = []
    real = type(table.host).text

    class Counting(Host):
        def text(self, path: str) -> str | None:
            read.append(path)
            return real(self, path)

    table.host = Counting(table.host.root, table.host.env, table.host.platform, table.host.recording)
    machine.process(50)
    (machine.root / "proc/11/status").write_text("")  # ended, and a zombie keeps its number
    assert 50 in table.refresh()
    assert len({path for path in read if path.endswith("status")}) <= 10
    for _ in range(8):
        found = table.refresh()
    assert 11 not in found and len(found) == 30
    assert status_of(table.host, Process(11, 1, "x", 0)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ourselves_and_a_child_for_real() -> None:
    sampler = Sampler(this_process(Host()), interval=0.1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = _take(sampler)
        assert {os.getpid(), child.pid} <= {row.pid for row in found.processes}
        me = next(row for row in found.processes if row.pid == os.getpid())
        assert me.rss is not None and me.rss > MB and found.cost is not None
        child.communicate(b"\n")
    sampler.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_watch_of_a_process_ends_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        sampler = Sampler(process_tree(child.pid, ProcessTable(Host()).refresh()), interval=0.1)
        assert _take(sampler).processes
        child.communicate(b"\n")
    assert _take(sampler).processes == ()  # the last one: the counters of its cgroup after its end
    assert sampler.take() is None
    sampler.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_zombie_ends_it_too() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        sampler = Sampler(process_tree(child.pid, ProcessTable(Host()).refresh()), interval=0.1)
        assert _take(sampler).processes
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
        assert _take(sampler).processes == ()
        assert sampler.take() is None
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def test_elsewhere_pools_and_processes_are_unknown_with_a_reason() -> None:
    host = Host(platform="darwin")
    found = _take(Sampler(this_process(host), host=host))
    shm = found.pool("shm")
    assert shm is not None and shm.size is None and shm.reason and found.notes


def test_pss_is_read_first_of_large_and_of_growing_processes(machine: FakeMachine) -> None:
    for pid in range(100, 140):
        machine.process(pid, 1 if pid == 100 else 100, pss=pid)

    def resize(pid: int, rss: int) -> None:
        status = machine.root / f"proc/{pid}/status"
        status.write_text(re.sub(r"VmRSS:\t\d+", f"VmRSS:\t{rss}", status.read_text()))

    resize(135, 700_000)
    resize(130, 500_000)
    host, clock = machine.host, Clock()
    sampler = Sampler(process_tree(100, ProcessTable(host).refresh()), host=host, clock=clock, interval=1e-6)
    read: list[set[int]] = []
    for number in range(50):
        if number == 46:
            resize(120, 300_000)
        found = _take(sampler)
        read.append({row.pid for row in found.processes if row.pss_at == found.clock})
        clock.now += 10_000.0
    assert 135 in read[0] and 130 in read[2]
    assert {pid for pids in read[:46] for pid in pids} == set(range(100, 140))  # the others have turns too
    assert 120 in read[46] | read[47]


def test_a_frozen_object_without_a_name_is_shown_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        SimpleNamespace(key="754eada291bd00-frozen", sources=(), attributes=named, backing="shm", bytes=1, in_use=False)
        for named in ({}, {"name": "coco-train"})
    ]
    monkeypatch.setattr("legroom.cache.list_and_verify.entries", lambda: found)
    assert [row.source for row in cache_entries()] == ["754eada291bd", "coco-train"]
