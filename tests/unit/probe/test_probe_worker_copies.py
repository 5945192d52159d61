"""Real forked workers: what they copy by reading is in their rows, and what they write to is not.

Each parent is a process of its own, with much freed memory: the test process itself would be read with all that earlier
tests have left in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from legroom.advice.findings_copy_on_write import copy_rate, finding_of_readings
from legroom.probe import copy_on_write, memory_of_running_jobs
from legroom.probe.copy_on_write import WorkerCopies
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import process_at
from legroom.records.watch_sample import ProcessRow
from legroom.records.workload import Job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads this machine's /proc")
MB = 1 << 20
READING = ("records", "names")
WRITING = ("arrays", "own objects")


class Parent(NamedTuple):
    pid: int
    worker: int
    process: subprocess.Popen[str]

    def step(self, _: float = 0.0) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def job(self) -> Job:
        found = [process for one in self[:2] if (process := process_at(Host(), one)) is not None]
        return Job(self.pid, found[0].command, tuple(found), {}, {}, {}, ())


@contextmanager
def parent(kind: str, megabytes: int = 64) -> Iterator[Parent]:
    script = Path(__file__).with_name("copying_parent.py")
    line = [sys.executable, os.fspath(script), kind, str(megabytes)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield Parent(process.pid, int(process.stdout.readline()), process)
        finally:
            process.stdin.close()
            process.kill()


@pytest.mark.parametrize("kind", READING + WRITING)
def test_rows_of_workers_show_what_they_copied_by_reading(kind: str) -> None:
    with parent(kind) as job:
        copies = WorkerCopies(Host())
        rows = [ProcessRow(job.pid, 1, "x"), ProcessRow(job.worker, job.pid, "x"), ProcessRow(1, 0, "init")]
        assert copies.update(rows, 0.0)[job.worker].copied == 0
        assert copies.update(rows, 1.0) == {}  # not yet due
        points = [(0.0, 0)]
        for turn in range(1, 9):
            job.step()
            found = copies.update(rows, 1000.0 * turn)
            assert set(found) == {job.worker} and found[job.worker].copied_at == 1000.0 * turn
            points.append((1000.0 * turn, found[job.worker].copied or 0))
        found_rates = [copy_rate(points[:end]) for end in range(4, len(points) + 1)]
        if kind in READING:
            assert all(found_rates) and points[-1][1] > 10 * MB
        else:
            assert not any(found_rates) and points[-1][1] < 4 * MB, points
        other = [rows[0], ProcessRow(job.worker, job.pid, "another command")]
        assert copies.update([rows[0]], 9000.0) == {} and copies.update(other, 19000.0) == {}


@pytest.mark.parametrize("kind", ("records", "arrays"))
def test_a_few_readings_of_a_job_with_a_large_parent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_of_running_jobs, "_YOUNG", -1.0)
    with parent(kind, 600) as job:
        ((pid, workers, points, unread),) = memory_of_running_jobs.copies_over_time(Host(), [job.job()], job.step)
        assert (pid, workers, set(points), unread) == (job.pid, 1, {job.worker}, None)
        found = finding_of_readings(pid, workers, points)
        if kind == "arrays":
            assert found is None, points
        else:
            assert found is not None and f"1 worker of process {job.pid}" in found.message


def test_memory_that_may_not_be_read_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel forbids reading the memory of another process (Yama), reading and writing look the same."""
    monkeypatch.setattr(memory_of_running_jobs, "_YOUNG", -1.0)
    monkeypatch.setattr(copy_on_write, "_MUCH", 1 << 20)
    with parent("records", 600) as job:
        reader = copy_on_write.CopyReader(Host(), job.pid, compare=True)
        reader.read([job.worker], 0.0)

        def refused(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(copy_on_write, "_memory", refused)
        job.step()
        (found,) = reader.read([job.worker], 1.0)
        assert found.copied and found.only_read is None and str(job.worker) in (found.reason or "")
        ((*seen, unread),) = memory_of_running_jobs.copies_over_time(Host(), [job.job()], job.step)
        told = finding_of_readings(*seen, unread)
        assert told is not None and told.severity == "info" and "perhaps the dataset" in told.message
        assert str(job.worker) in told.why and "sudo legroom doctor" in told.fix[0]
        rows = [ProcessRow(job.pid, 1, "x"), ProcessRow(job.worker, job.pid, "x")]
        copies = WorkerCopies(Host())
        copies.update(rows, 0.0)
        job.step()
        assert copies.update(rows, 1000.0) == {} and str(job.worker) in (copies.unread or "")


def test_a_young_worker_and_a_job_without_workers_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_of_running_jobs, "_YOUNG", 600.0)
    with parent("records") as job:
        assert memory_of_running_jobs.copies_over_time(Host(), [job.job()], lambda _: None) == []
        alone = [process for process in job.job().processes if process.pid == job.pid]
        without = Job(job.pid, alone[0].command, tuple(alone), {}, {}, {}, ())
        assert memory_of_running_jobs.copies_over_time(Host(), [without], lambda _: None) == []
