"""Alarms of a supervised job: its readings judged by the rules of a watch, told once, kept and drawn."""

from __future__ import annotations

from pathlib import Path

from legroom.probe.host_files_and_syscalls import Host
from legroom.records.failure import Attempt, Reading, SupervisedRun
from legroom.records.finding_and_alarm import Alarm
from legroom.records.loader_settings_and_flags import LoaderSettings
from legroom.records.machine import Level
from legroom.rescue.cgroup_and_oom_victims import JobCgroup
from legroom.rescue.job_sampling import JobAlarms, JobSampler
from legroom.rescue.run_report import run_object, run_page
from legroom.system.processes_and_threads import ExitStatus

MB = 1 << 20
SIZE = 4000 * MB
TRAINER = 4711


class Job:
    """A training on a recorded machine, looked at second by second."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 0.0
        (root / "proc" / str(TRAINER)).mkdir(parents=True)
        (root / f"proc/{TRAINER}/cmdline").write_bytes(b"python\0train.py\0")
        host = Host(root=root, recording={})
        self.readings = JobSampler(host, JobCgroup(None, None, False), lambda: [TRAINER], clock=lambda: self.now)
        self.readings.begin()
        self.alarms = JobAlarms(self.readings)

    def hold(self, seconds: float, used: float) -> tuple[Alarm, ...]:
        """What is told at that age with so much in use."""
        self.now = seconds
        free = (SIZE - int(used)) // 1024
        (self.root / "proc/meminfo").write_text(f"MemTotal: {SIZE // 1024} kB\nMemAvailable: {free} kB\n")
        (self.root / f"proc/{TRAINER}/status").write_text(
            f"Name:\tpython\nState:\tR (running)\nPPid:\t1\nVmRSS:\t{int(used) // 1024} kB\n"
        )
        reading = self.readings.sample()
        return () if reading is None else self.alarms.update(reading)


def test_a_leak_is_reported_in_time_and_once_for_each_level(tmp_path: Path) -> None:
    job = Job(tmp_path)
    told = [(second, alarm) for second in range(395) for alarm in job.hold(second, second * 10 * MB)]
    filling = [(second, alarm) for second, alarm in told if alarm.code == "ram-filling"]
    assert [alarm.level for _, alarm in filling] in (["warning", "critical"], ["critical"])
    second, first = filling[0]
    assert 400 - second >= 30
    assert first.message.startswith("ram full in about ")
    assert f"from pid {TRAINER} (python train.py)" in first.message
    assert first.pids == (TRAINER,)
    assert all(alarm.since == when for when, alarm in told)  # counted from the start
    assert [alarm for _, alarm in told] == list(job.alarms.raised)
    assert {alarm.code for _, alarm in told} == {"ram-filling", "ram-near-limit"}


def test_a_warm_up_is_not_reported(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for second in range(600):
        assert job.hold(second, 0.6 * SIZE * (1 - 2.0 ** (-second / 30))) == ()


def test_descriptors_are_reported_as_a_level_and_never_as_bytes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    folder = tmp_path / f"proc/{TRAINER}/fd"
    folder.mkdir()
    (folder.parent / "limits").write_text("Max open files            100                  100            files\n")
    told = []
    for second in range(95):
        (folder / str(second)).touch()
        told += job.hold(second, 100 * MB)
    assert [alarm.code for alarm in told] == ["fds-nearly-out"] * len(told) and told
    assert told[0].message == "fds is 80% full: 20 of 100 left"


def test_the_report_keeps_and_draws_them() -> None:
    alarm = Alarm("ram-filling", "ram", "warning", "ram full, from pid 1 (<b>)", 12.0, {"growth": 5}, (1,))
    readings = tuple(Reading(float(when), {"ram": Level(when, 20)}) for when in range(20))
    attempt = Attempt(1, ("x",), LoaderSettings(), ExitStatus(0), 20.0, readings=readings, alarms=(alarm, alarm))
    run = SupervisedRun(("x",), (attempt,), 0.0, "a process group")
    kept = run_object(run)["attempts"][0]["alarms"]
    assert [(one["code"], one["since"], one["pids"]) for one in kept] == [("ram-filling", 12.0, (1,))] * 2
    shown = run_page(run)
    assert "ram full, from pid 1 (&lt;b&gt;)" in shown
    assert ">1–2</text>" in shown  # two of one moment share a label
