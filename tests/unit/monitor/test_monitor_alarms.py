"""Alarms on how things stand, and how long each is held."""

from __future__ import annotations

from typing import Any

import pytest
from monitor_samples import GB, MB, codes, moments, pool, row, sample

from legroom.monitor.alarms import RULES
from legroom.monitor.history_and_trend import History
from legroom.records.machine import MemoryEvents, Pool, Pressure
from legroom.records.watch_sample import Moment, ProcessRow, Sample


def _run(samples: list[Any]) -> list[Moment]:
    return list(moments(samples))


@pytest.mark.parametrize(
    ("name", "share", "code", "level"),
    [
        ("shm", 0.79, None, None),
        ("shm", 0.80, "shm-nearly-full", "warning"),
        ("shm", 0.95, "shm-nearly-full", "critical"),
        ("ram", 0.89, None, None),
        ("ram", 0.91, "ram-near-limit", "warning"),
        ("ram", 0.98, "ram-near-limit", "critical"),
        ("gpu0", 0.89, None, None),
        ("gpu1", 0.90, "gpu-nearly-full", "warning"),
        ("gpu0", 0.975, "gpu-nearly-full", "critical"),
        ("swap", 0.99, None, None),  # full of what nobody needs is no alarm
    ],
)
def test_levels(name: str, share: float, code: str | None, level: str | None) -> None:
    last = _run([sample(0, pool(name, 10 * GB, share * 10 * GB + 1))])[-1]
    assert [(a.code, a.pool, a.level) for a in last.alarms] == ([(code, name, level)] if code else [])


def test_a_disk_is_judged_by_what_is_left() -> None:
    assert codes(_run([sample(0, pool("disk", 1000 * GB, 997 * GB))])[-1]) == set()
    low = _run([sample(0, pool("disk", 1000 * GB, 998.5 * GB))])[-1]
    assert codes(low) == {"disk-low"} and low.alarms[0].level == "warning"


def test_descriptors_of_the_process_nearest_its_limit() -> None:
    rows = (row(1, fds=900, fd_limit=4096), row(2, fds=1000, fd_limit=1024), row(3))
    last = _run([sample(0, processes=rows)])[-1]
    assert [(a.code, a.level) for a in last.alarms] == [("fds-nearly-out", "critical")]
    assert "24 of 1024 left" in last.alarms[0].message


def test_unknown_is_no_alarm() -> None:
    unknown = Pool("shm", None, None, None, "statvfs", "no /dev/shm here")
    half = Pool("ram", 8 * GB, None, None, "meminfo", "cannot read the usage")
    nothing = MemoryEvents(None, None, None, "machine", "x")
    run = _run([sample(n, unknown, half, swap_in=None, swap_out=None, events=nothing) for n in range(100)])
    assert all(moment.alarms == () for moment in run)


def test_a_level_that_wavers_is_one_alarm() -> None:
    shares = [0.79, 0.81, 0.79, 0.805, 0.78, 0.80] * 20
    run = _run([sample(n, pool("shm", 100 * MB, share * 100 * MB)) for n, share in enumerate(shares)])
    assert sum(len(moment.begun) for moment in run) == 1
    assert sum(len(moment.ended) for moment in run) == 0
    # Since when stays; the numbers are today's.
    assert run[-1].alarms[0].since == run[1].sample.when


def test_it_ends_when_the_level_has_fallen_and_stays_so() -> None:
    shares = [0.85] * 5 + [0.5] * 20
    run = _run([sample(n, pool("shm", 100 * MB, share * 100 * MB)) for n, share in enumerate(shares)])
    ended = [place for place, moment in enumerate(run) if moment.ended]
    assert len(ended) == 1 and 5 < ended[0] < 20
    assert run[-1].alarms == ()


def test_getting_worse_is_reported_again() -> None:
    shares = [0.85] * 5 + [0.96] * 5 + [0.85] * 5
    run = _run([sample(n, pool("shm", 100 * MB, share * 100 * MB)) for n, share in enumerate(shares)])
    assert [[a.level for a in m.begun] for m in run if m.begun] == [["warning"], ["critical"]]


def test_swap_that_is_used_is_silent_and_swap_that_moves_is_not() -> None:
    full = pool("swap", GB, GB)
    assert all(m.alarms == () for m in _run([sample(n, full) for n in range(20)]))
    burst = [sample(n, full, swap_in=50.0 * MB if n in (4, 5) else 0.0) for n in range(20)]
    assert all(m.alarms == () for m in _run(burst))  # one look back into swap
    moving = _run([sample(n, full, swap_in=3.0 * MB if n >= 4 else 0.0) for n in range(12)])
    assert codes(moving[5]) == set() and codes(moving[-1]) == {"swap-moving"}
    assert moving[-1].alarms[0].level == "warning"
    thrash = _run([sample(n, full, swap_in=30.0 * MB, swap_out=25.0 * MB) for n in range(12)])
    assert thrash[-1].alarms[0].level == "critical" and "30 MB/s in" in thrash[-1].alarms[0].message


def test_swap_names_whose_pages_go() -> None:
    def rows(n: int) -> tuple[Any, ...]:
        from dataclasses import replace

        return (replace(row(7), swap=n * MB), replace(row(8), swap=5 * MB))

    run = _run([sample(n, pool("swap", GB, n * MB), swap_out=3.0 * MB, processes=rows(n)) for n in range(10)])
    assert run[-1].alarms[0].pids == (7,)


def test_pressure() -> None:
    def psi(some: float, full: float) -> tuple[Pressure, ...]:
        return (
            Pressure("machine", 0.0, 0, 0, 0, "/proc/pressure/memory"),
            Pressure("cgroup", some, 0, full, 0, "memory.pressure"),
        )

    run = _run(
        [sample(n, pressure=psi(some, full)) for n, (some, full) in enumerate([(5, 0), (15, 0), (8, 0), (30, 20)])]
    )
    assert [[(a.code, a.level) for a in m.alarms] for m in run] == [
        [],
        [("memory-pressure", "warning")],
        [("memory-pressure", "warning")],
        [("memory-pressure", "critical")],
    ]


def test_counters_that_rise() -> None:
    def events(kills: int, hits: int, high: int) -> MemoryEvents:
        return MemoryEvents(kills, hits, high, "cgroup", "memory.events")

    still = _run([sample(n, events=events(3, 1000, 50)) for n in range(20)])
    assert all(m.alarms == () for m in still)  # what happened before is no news
    hits = _run([sample(n, pool("ram", GB, GB // 2), events=events(0, n * 7, 0)) for n in range(5)])
    assert [(a.code, a.level) for a in hits[-1].alarms] == [("limit-hit", "warning")]
    tight = _run([sample(n, pool("ram", GB, 0.88 * GB), events=events(0, n * 7, 0)) for n in range(5)])
    assert ("limit-hit", "critical") in {(a.code, a.level) for a in tight[-1].alarms}
    slowed = _run([sample(n, events=events(0, 0, n)) for n in range(5)])
    assert codes(slowed[-1]) == {"ram-throttled"}
    killed = _run([sample(n, events=events(int(n >= 3), 0, 0)) for n in range(5)])
    assert [(a.code, a.level) for a in killed[4].begun] == [("oom-kill", "critical")]


def test_counters_of_another_cgroup_are_not_compared() -> None:
    samples = [sample(n, events=MemoryEvents(n, n, n, "cgroup", f"group{n}/memory.events")) for n in range(9)]
    assert all(m.alarms == () for m in _run(samples))


def test_a_kill_names_who_is_gone_and_one_elsewhere_is_not_claimed() -> None:
    def at(n: int, own: int | None, anywhere: int, alive: bool, source: str = "memory.events") -> Sample:
        rows = (ProcessRow(7, 1, "python train.py", 900 * MB),) if alive else ()
        return sample(n, events=MemoryEvents(own, 0, 0, "cgroup", source, anywhere), processes=rows)

    own = _run([at(0, 0, 5, True), at(1, 0, 5, True), at(2, 1, 6, False)])[-1].begun
    assert [(a.code, a.level, a.pids) for a in own] == [("oom-kill", "critical", (7,))]
    assert "pid 7 (python train.py), 900 MB when last seen" in own[0].message
    # Another group's counters came in between: the kill was counted before they did.
    moved = _run([at(0, 0, 5, True), at(1, 1, 6, True), at(2, 0, 6, True, "other/memory.events")])
    assert [a.level for a in moved[2].begun] == ["critical"]
    # Counted while the victim was still there: one sample later it is known.
    late = _run([at(0, 0, 5, True), at(1, 1, 6, True), at(2, 1, 6, False)])
    assert late[1].begun == () and [(a.level, a.pids) for a in late[2].begun] == [("critical", (7,))]
    # Its own group counted nothing, or is gone: a process was killed, and which one is not known.
    for after in (0, None):
        elsewhere = _run([at(0, 0, 5, True), at(1, after, 6, False)])[-1].begun
        assert [(a.code, a.level) for a in elsewhere] == [("oom-kill", "warning")]
        assert "another process may have been killed" in elsewhere[0].message
    # A kill elsewhere while everything watched is still there is none of ours.
    assert _run([at(0, 0, 5, True), at(1, 0, 6, True)])[-1].alarms == ()


def test_rules_are_pure() -> None:
    history = History()
    for n in range(50):
        history.add(sample(n, pool("shm", 100 * MB, 90 * MB)))
    once, again = ([alarm for rule in RULES for alarm in rule(history, frozenset())] for _ in range(2))
    assert once == again


def _copying(copied: list[int | None]) -> list[Moment]:
    """A training process with two workers, of which one is read every five samples."""
    samples = []
    for clock in range(5 * len(copied)):
        size = copied[clock // 5]
        known = {} if size is None else {"copied": size * MB, "copied_at": float(clock - clock % 5)}
        workers = [
            ProcessRow(11, 10, "python train.py", rss=GB, **known),
            ProcessRow(12, 10, "python train.py", rss=GB),
        ]
        samples.append(sample(clock, processes=(ProcessRow(10, 1, "python train.py", rss=GB), *workers)))
    return _run(samples)


def test_workers_that_copy_the_dataset() -> None:
    last = _copying([0, 30, 60, 90, 120])[-1]
    (alarm,) = [one for one in last.alarms if one.code == "workers-copy-dataset"]
    assert alarm.level == "warning" and alarm.pids == (11,) and "2 workers of pid 10" in alarm.message
    assert "360 MB/min" in alarm.message and "legroom.freeze_dataset" in alarm.message
    assert alarm.evidence == {"bytes_per_second": 6 * MB, "copied": 120 * MB, "workers": 2, "parent": 10}


@pytest.mark.parametrize("copied", [[None] * 6, [0, 0, 0, 0], [0, 2, 2, 2, 2], [0, 40, 80, 80, 80], [0, 20, 40, 60]])
def test_workers_that_start_or_collect_garbage_copy_no_dataset(copied: list[int | None]) -> None:
    assert "workers-copy-dataset" not in {alarm.code for moment in _copying(copied) for alarm in moment.alarms}


def test_a_killed_process_is_listed_with_its_last_known_size() -> None:
    """RSS is missing while the kernel takes a killed process apart."""

    def at(clock: float, kills: int, *rows: ProcessRow) -> Sample:
        return sample(clock, processes=rows, events=MemoryEvents(kills, 0, 0, "cgroup", "memory.events"))

    exiting = ProcessRow(7, 1, "python train.py", None)
    seen = [at(0, 0, row(7, rss=9 * GB), row(8, rss=MB)), at(1, 0, exiting, row(8, rss=MB)), at(2, 1)]
    (alarm,) = list(moments(seen))[-1].begun
    assert alarm.pids[0] == 7 and "9 GB when last seen" in alarm.message
