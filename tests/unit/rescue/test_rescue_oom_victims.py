"""An OOM counter that others share: whose process a kill took is told by who is gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from legroom.probe.host_files_and_syscalls import Host
from legroom.rescue.cgroup_and_oom_victims import JobCgroup, OomVictims
from legroom.rescue.find_failures_in_log import killed_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")


class Group:
    """A shared group with real processes, and a counter and a listing that are written by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kills = folder, 0
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.write()

    def start(self, *, group: int = 0, program: str = "sleep") -> int:
        environment = {**os.environ, "RANK": "1"} if group else dict(os.environ)
        process = subprocess.Popen([program, "60"], process_group=group, env=environment)
        self.running[process.pid] = process
        self.write()
        return process.pid

    def end(self, *pids: int) -> None:
        for pid in pids:
            process = self.running.pop(pid)
            process.kill()
            process.wait()
        self.write()

    def write(self) -> None:
        (self.folder / "memory.oom_control").write_text(f"oom_kill_disable 0\noom_kill {self.kills}\n")
        (self.folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in self.running))

    def watched(self, *, own: bool = False) -> OomVictims:
        return OomVictims(Host(), JobCgroup(str(self.folder), "v1", own))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    found = Group(tmp_path)
    yield found
    found.end(*found.running)


def _job(group: Group) -> tuple[OomVictims, int, int, int]:
    """A job of two processes beside another process."""
    another = group.start()
    watched = group.watched()
    watched.begin()
    main = group.start()
    watched.root = main
    worker = group.start(group=main)
    watched.update(1.0, 0)
    watched.measure([main, worker])
    return watched, main, worker, another


def test_the_job_lost_a_process(group: Group) -> None:
    watched, main, worker, _ = _job(group)
    group.kills += 1
    group.end(worker)
    watched.update(2.0, 0)
    assert watched.kills == 1 and watched.taken() == (1, 0)
    (victim,) = watched.victims()
    assert victim.pid == worker and victim.command == "sleep 60" and victim.rss
    assert watched.before_end(10.0) == 8.0
    assert victim.rank == 1
    (survivor,) = watched.beside()
    assert survivor.pid == main and survivor.rss and survivor.rank is None


def test_another_lost_a_process(group: Group) -> None:
    watched, _, _, another = _job(group)
    group.kills += 1
    group.end(another)
    watched.update(2.0, 0)
    assert watched.taken() == (0, 1) and watched.victims() == () and watched.before_end(9.0) is None


def test_both_or_neither_is_not_known(group: Group) -> None:
    watched, _, worker, another = _job(group)
    group.kills += 2
    group.end(worker, another)
    watched.update(2.0, 0)
    group.kills += 1
    group.write()
    watched.update(5.0, 0)
    assert watched.kills == 3 and watched.taken() == (0, 0)


def test_a_process_that_takes_its_time_to_go_is_the_victim_and_a_later_one_is_not(group: Group) -> None:
    watched, main, worker, _ = _job(group)
    group.kills += 1
    group.write()
    watched.update(2.0, 0)
    assert watched.taken() == (0, 0)
    group.end(worker)
    watched.update(2.3, 0)
    group.end(main)
    watched.update(2.4, 0)
    assert watched.taken() == (1, 0) and [one.pid for one in watched.victims()] == [worker]


def test_processes_that_end_while_nothing_is_killed_are_no_victims(group: Group) -> None:
    watched, _, worker, _ = _job(group)
    group.end(worker)
    watched.update(2.0, 0)
    group.kills += 1
    group.write()
    watched.update(5.0, 0)
    assert watched.taken() == (0, 0) and watched.victims() == ()


def test_a_job_that_keeps_on_writing_went_on(group: Group) -> None:
    watched, _, worker, _ = _job(group)
    group.kills += 1
    group.end(worker)
    watched.update(2.0, 10)
    for step, when in enumerate((3.0, 4.0, 5.0)):
        watched.update(when, 20 + step)
    assert watched.went_on(10.0)
    assert not watched.went_on(5.5)  # what it writes at its end is about its end
    watched.update(20.0, 30)
    assert watched.went_on(30.0)


def test_a_group_that_cannot_be_listed_attributes_nothing(group: Group) -> None:
    watched, _, worker, _ = _job(group)
    group.kills += 1
    group.end(worker)
    (group.folder / "cgroup.procs").unlink()
    watched.update(2.0, 0)
    assert watched.kills == 1 and watched.taken() == (0, 0)


def test_a_group_of_which_only_a_part_is_listed_attributes_nothing(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process may have been killed as well: it was not looked at."""
    monkeypatch.setattr("legroom.rescue.cgroup_and_oom_victims._MOST", 2)
    watched, _, worker, _ = _job(group)
    group.kills += 1
    group.end(worker)
    watched.update(2.0, 0)
    assert watched.kills == 1 and watched.taken() == (0, 0)
    assert [one.pid for one in watched.victims()] == [worker]


def test_a_job_has_a_loader_while_one_of_its_processes_is_a_worker(group: Group, tmp_path: Path) -> None:
    named = shutil.copy(shutil.which("sleep") or "", tmp_path / "pt_data_worker")  # as torch calls its workers
    watched, main, worker, _ = _job(group)
    assert not watched.loader
    another = group.start(program=named)
    watched.update(2.0, 0)
    watched.measure([main, worker])
    assert not watched.loader  # another job's
    own = group.start(group=main, program=named)
    watched.update(3.0, 0)
    watched.measure([main, worker, own])
    assert watched.loader and watched.torch_workers
    assert not watched.children  # of a Python process; these are of a shell
    group.end(own)
    watched.update(4.0, 0)
    watched.measure([main, worker])
    assert not watched.loader and another in group.running


def test_a_group_that_the_job_made_below_its_own_counts_also_when_it_is_removed(tmp_path: Path) -> None:
    group = Group(tmp_path)
    watched = group.watched(own=True)
    watched.begin()
    inner = tmp_path / "trial"
    inner.mkdir()
    (inner / "cgroup.procs").write_text("")
    (inner / "memory.oom_control").write_text("oom_kill 1\n")
    watched.update(1.0, 0)
    (inner / "memory.oom_control").unlink()
    (inner / "cgroup.procs").unlink()
    inner.rmdir()
    watched.update(2.0, 0)
    assert watched.kills == 1 and watched.taken() == (1, 0)


def test_what_the_kernel_log_shows_of_each_victim() -> None:
    lines = (
        "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a,task=python,pid=9,uid=0",
        "Memory cgroup out of memory: Killed process 9 (python) total-vm:9kB, anon-rss:2048kB, file-rss:1kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a,task=python,pid=11,uid=0",
    )
    assert killed_in(lines) == {9: 2 << 20, 11: None}


def test_the_memory_of_a_process_that_exits_is_that_of_the_sample_before(group: Group) -> None:
    watched = group.watched(own=True)
    pid = group.start()
    watched.measure([pid])
    before = watched._known[pid].rss
    group.running[pid].kill()  # not waited for: its entry in /proc stays, with no memory
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/statm").read_text().split()[1] != "0" and time.monotonic() < deadline:
        time.sleep(0.01)
    watched.measure([pid])
    assert before and watched._known[pid].rss == before


def test_the_first_python_process_of_a_job_trains_before_it_has_workers(group: Group) -> None:
    """Killed while it loads its data, it has no workers by which it could be told; lowering theirs would not help."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    shell = subprocess.Popen(["sh", "-c", f'"{sys.executable}" -c "{script}" & wait'], process_group=0)
    try:
        trainer = _child_of(shell.pid, "import subprocess")
        child = _child_of(trainer, "import time")
        watched = group.watched(own=True)
        watched.root = shell.pid
        watched.measure([shell.pid, trainer, child])
        roles = {pid: seen.role for pid, seen in watched._known.items()}
        assert roles == {shell.pid: None, trainer: "main", child: None}
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def _child_of(pid: int, code: str) -> int:
    """The child of that process which runs ``code``: before its exec a child has its parent's command line."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            if len(words) > 2 and words[1] == "-c" and words[2].startswith(code):
                return int(child)
        time.sleep(0.01)
    raise AssertionError(f"{pid} started no such program")
