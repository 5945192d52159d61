"""Alarm rules and their thresholds, and which alarms are active.

Each rule is a pure function of the history and the active alarms. Thresholds are those of `legroom doctor`; an active
alarm has a lower one, so that a level which wavers around its threshold raises one alarm. Whether growth is a leak is
decided in history_and_trend.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from legroom.advice import findings, findings_copy_on_write, findings_shm
from legroom.messages import counted, joined, listed, phrase, say
from legroom.monitor.history_and_trend import (
    GrowingProcesses,
    History,
    Trend,
    describe_growth,
    find_trend,
    growing_processes,
    held_by_new_processes,
)
from legroom.records.finding_and_alarm import Alarm, AlarmLevel
from legroom.records.machine import Pool, scope_name
from legroom.records.watch_sample import Moment, ProcessRow, Sample
from legroom.units import format_duration, format_size

ActiveAlarms = frozenset[tuple[str, str | None]]  # keys of alarms

# How long an alarm takes to begin and to end, in samples.
_TREND_BEGINS_AFTER = 3  # in a row; the other rules need one
_ENDS_AFTER = 8  # in a row without it
_LEVELS = ("warning", "critical")

_HYSTERESIS = 0.05  # of a pool: how far it must fall below its threshold before the alarm ends
_FDS_WARNING, _FDS_CRITICAL = 0.80, 0.95
_SWAP_BEGINS_AFTER = 3  # samples in a row with swap traffic
_SWAP_ENDS_AFTER = 6  # samples in a row without
_THRASHING = 1 << 20  # bytes a second, in and out at once
_RECENT = 10  # samples over which counters and processes are compared
_HARD_TO_RECLAIM = 0.85  # share of the limit in use; below, hits of the limit only drop page cache
_MOST_NAMED = 3  # processes named in one alarm
_CRITICAL_INTERVALS = 60  # a pool that is full sooner is critical
_COPIED = 64 << 20  # bytes that one worker has copied: a garbage collection in a worker copies 40 MB of torch, once
_COPY_SAMPLES = 240  # in which the readings of a worker are looked for
_STARTUP_PATIENCE = 4.0  # times longer must growth last when new processes cause it
_STARTUP_SHARE = 0.6  # of the growth, held by new processes


@dataclass(frozen=True, slots=True)
class _Tracked:
    alarm: Alarm
    raised: int = 1  # samples in a row before it became active
    missing: int = 0  # samples in a row without it

    @property
    def active(self) -> bool:
        needed = _TREND_BEGINS_AFTER if self.alarm.code.endswith("-filling") else 1
        return self.raised >= needed


@dataclass
class AlarmTracker:
    """Decides at each sample which alarms are active, begin and end."""

    history: History = field(default_factory=History)
    _tracked: dict[tuple[str, str | None], _Tracked] = field(default_factory=dict)

    def add(self, sample: Sample) -> Moment:
        """Add a sample to the history and evaluate the rules."""
        self.history.add(sample)
        before = {key: one.alarm for key, one in self._tracked.items() if one.active}
        active = frozenset(before)
        raised = {alarm.key: alarm for rule in RULES for alarm in rule(self.history, active)}
        tracked: dict[tuple[str, str | None], _Tracked] = {}
        for key, old in self._tracked.items():
            now = raised.pop(key, None)
            if now is not None:
                # Message and numbers are the newest; the start stays. The level does not fall before the alarm ends,
                # or it would be reported again whenever it rises.
                level = max(now.level, old.alarm.level, key=_LEVELS.index) if old.active else now.level
                tracked[key] = _Tracked(replace(now, since=old.alarm.since, level=level), old.raised + 1)
            elif old.active and old.missing + 1 < _ENDS_AFTER:
                tracked[key] = replace(old, missing=old.missing + 1)
        tracked |= {key: _Tracked(alarm) for key, alarm in raised.items()}
        self._tracked = tracked
        after = {key: one.alarm for key, one in tracked.items() if one.active}
        begun = [
            alarm
            for key, alarm in after.items()
            if key not in before or _LEVELS.index(alarm.level) > _LEVELS.index(before[key].level)
        ]
        return Moment(
            sample,
            tuple(sorted(after.values(), key=lambda alarm: (-_LEVELS.index(alarm.level), alarm.since))),
            tuple(begun),
            tuple(alarm for key, alarm in before.items() if key not in after),
        )


def pool_levels(history: History, active: ActiveAlarms) -> Iterator[Alarm]:
    """Pools that are nearly full."""
    recent = history.samples.last(_RECENT + 1)
    if not recent:
        return
    sample = recent[-1]
    for pool in (*sample.pools, *_descriptors(sample)):
        code, warning, critical = _thresholds(pool)
        share = _used_share(pool)
        if code is None or share is None or pool.size is None or pool.free is None:
            continue
        if share < warning - (_HYSTERESIS if (code, pool.name) in active else 0.0):
            continue
        level: AlarmLevel = "critical" if share >= critical else "warning"
        free = str(pool.free) if pool.name == "fds" else format_size(pool.free)
        size = str(pool.size) if pool.name == "fds" else format_size(pool.size)
        yield Alarm(
            code,
            pool.name,
            level,
            say("{pool} is {share:.0%} full: {free} of {size} left", pool=pool.name, share=share, free=free, size=size),
            sample.when,
            {"share": round(share, 4), "free": pool.free, "size": pool.size},
            growing_processes(recent[0], sample, pool.name).pids,
        )


def swap_traffic(history: History, active: ActiveAlarms) -> Iterator[Alarm]:
    """Pages that move to and from swap. Pages that only lie there cost nothing."""
    code = "swap-moving"
    recent = history.samples.last(_SWAP_ENDS_AFTER)
    traffic = [(sample.swap_in or 0.0) + (sample.swap_out or 0.0) >= findings.MOVING for sample in recent]
    if (code, "swap") in active:
        enough = any(traffic)
    else:
        enough = len(traffic) >= _SWAP_BEGINS_AFTER and all(traffic[-_SWAP_BEGINS_AFTER:])
    if not enough:
        return
    sample = recent[-1]
    rates = [(one.swap_in or 0.0, one.swap_out or 0.0) for one in recent[-_SWAP_BEGINS_AFTER:]]
    thrashing = all(min(pair) >= _THRASHING for pair in rates)
    swap_in, swap_out = (sum(column) / len(rates) for column in zip(*rates, strict=True))
    yield Alarm(
        code,
        "swap",
        "critical" if thrashing else "warning",
        say(
            "swap is thrashing: {inward}/s in, {outward}/s out"
            if thrashing
            else "swap traffic: {inward}/s in, {outward}/s out",
            inward=format_size(int(swap_in)),
            outward=format_size(int(swap_out)),
        ),
        sample.when,
        {"in_per_second": round(swap_in), "out_per_second": round(swap_out)},
        growing_processes(recent[0], sample, "swap").pids,
    )


def memory_pressure(history: History, active: ActiveAlarms) -> Iterator[Alarm]:
    """Tasks stalled on memory (PSI)."""
    sample = history.latest
    if sample is None or not sample.pressure:
        return
    worst = max(sample.pressure, key=lambda one: (one.full_avg10, one.some_avg10))
    factor = 0.5 if ("memory-pressure", None) in active else 1.0
    if worst.some_avg10 < findings.STALL * factor and worst.full_avg10 < findings.HARD_STALL * factor:
        return
    yield Alarm(
        "memory-pressure",
        None,
        "critical" if worst.full_avg10 >= findings.HARD_STALL else "warning",
        say(
            "tasks stalled on memory in the last 10 s: some {some:.0f}%, all {full:.0f}% of the time ({scope})",
            some=worst.some_avg10,
            full=worst.full_avg10,
            scope=scope_name(worst.scope),
        ),
        sample.when,
        {"some_avg10": worst.some_avg10, "full_avg10": worst.full_avg10, "source": worst.source},
    )


def cgroup_counters(history: History, active: ActiveAlarms) -> Iterator[Alarm]:
    """Hits of the memory limit and throttling, as the kernel counts them."""
    recent = history.samples.last(_RECENT + 1)
    if len(recent) < 2:
        return
    sample = recent[-1]
    before, after = recent[0].events, sample.events
    if before.source != after.source:
        return  # counters of another cgroup
    seconds = round(sample.clock - recent[0].clock, 1)
    over: dict[str, int | float | str] = {"over_seconds": seconds, "source": after.source}
    if hits := _increase(before.at_limit, after.at_limit):
        ram = sample.pool("ram")
        share = None if ram is None else _used_share(ram)
        critical = share is not None and share >= _HARD_TO_RECLAIM
        message = say(
            "memory limit of the cgroup hit {count}× in {seconds:.0f} s; little memory can be reclaimed"
            if critical
            else "memory limit of the cgroup hit {count}× in {seconds:.0f} s; only page cache was dropped so far",
            count=hits,
            seconds=seconds,
        )
        pids = growing_processes(recent[0], sample, "ram").pids
        level: AlarmLevel = "critical" if critical else "warning"
        yield Alarm("limit-hit", "ram", level, message, sample.when, {"hits": hits, **over}, pids)
    if throttled := _increase(before.throttled, after.throttled):
        message = say("the kernel throttled this cgroup {count}× at memory.high", count=throttled)
        yield Alarm("ram-throttled", "ram", "warning", message, sample.when, {"throttled": throttled, **over})


def oom_kills(history: History, active: ActiveAlarms) -> Iterator[Alarm]:
    """OOM kills in the watched cgroup; with less certainty, kills elsewhere while a watched process ended.

    A process may have been in a cgroup below the one that is read, or its cgroup may be gone with it. Then only the
    machine's count rises, and which process it counts is unknown.
    """
    recent = history.samples.last(_RECENT + 1)
    if len(recent) < 2:
        return
    sample, ended = recent[-1], _ended_processes(recent)
    events = [one.events for one in recent]
    in_cgroup = events[-1].scope == "cgroup"
    rises = [
        _increase(before.oom_kills, after.oom_kills) if before.source == after.source else 0
        for before, after in pairwise(events)
    ]
    kills = sum(rises)
    if kills and kills == rises[-1] and not ended:
        return  # counted before the victim was gone: the next sample says which process it was
    on_machine = _increase(events[0].machine_oom_kills, events[-1].machine_oom_kills)
    evidence: dict[str, int | float | str] = {
        "kills": kills or on_machine,
        "over_seconds": round(sample.clock - recent[0].clock, 1),
        "source": events[-1].source,
    }
    pids = tuple(row.pid for row in ended)
    if kills:
        parts = [_killed_in_cgroup(kills) if in_cgroup else _killed_on_machine(kills)]
        if ended:
            parts.append(say("ended since then: {names}", names=_named(ended)))
        yield Alarm("oom-kill", "ram", "critical", joined(parts), sample.when, evidence, pids)
    elif on_machine and ended and in_cgroup:
        message = say(
            "{kills} while {names} ended; the count of the watched cgroup did not rise, so another process may have "
            "been killed",
            kills=_killed_on_machine(on_machine),
            names=_named(ended),
        )
        yield Alarm("oom-kill", "ram", "warning", message, sample.when, evidence, pids)


def filling_pools(history: History, active: ActiveAlarms) -> Iterator[Alarm]:
    """Pools that grow steadily, with the time until they are full."""
    sample = history.latest
    if sample is None:
        return
    for pool in sample.pools:
        found = find_trend(history.free_over_time(pool.name), sample.interval)
        if found is None:
            continue
        before = history.at(sample.clock - found.window) or sample
        if not _starting_up(before, sample, pool.name, found):
            yield _filling(pool.name, sample, found, growing_processes(before, sample, pool.name))


def workers_copy_dataset(history: History, active: ActiveAlarms) -> Iterator[Alarm]:
    """Forked workers that copy their parent's memory page by page while they read Python objects in it."""
    recent = history.samples.last(_COPY_SAMPLES)
    if not recent:
        return
    sample = recent[-1]
    rates: dict[int, dict[int, float]] = {}
    copied: dict[int, int] = {}
    for row in sample.processes:
        if row.copied is None:
            continue
        points = {
            before.copied_at: before.copied
            for one in recent
            for before in one.processes
            if before.pid == row.pid and before.copied is not None and before.copied_at is not None
        }
        rate = findings_copy_on_write.copy_rate(sorted(points.items()), least=_COPIED)
        if rate is not None:
            rates.setdefault(row.parent, {})[row.pid] = rate
            copied[row.parent] = max(row.copied, copied.get(row.parent, 0))
    for parent, found in rates.items():
        rate = sum(found.values()) / len(found)
        workers = sum(1 for row in sample.processes if row.parent == parent)
        message = say(
            "{workers} of pid {pid} copy memory they share with it, {rate} each: Python objects that they read. Freeze "
            "the dataset's lists and dicts (legroom.freeze_dataset)",
            workers=counted(workers, phrase("{count} worker"), phrase("{count} workers")), pid=parent, rate=_rate(rate),
        )  # fmt: skip
        evidence: dict[str, int | float | str] = {
            "bytes_per_second": round(rate),
            "copied": copied[parent],
            "workers": workers,
            "parent": parent,
        }
        yield Alarm(findings_copy_on_write.CODE, "ram", "warning", message, sample.when, evidence, tuple(found))


RULES = (pool_levels, swap_traffic, memory_pressure, oom_kills, cgroup_counters, workers_copy_dataset, filling_pools)


def _thresholds(pool: Pool) -> tuple[str | None, float, float]:
    """The code of a pool's level alarm, and the used shares from which it is a warning and critical."""
    if pool.name == "shm":
        return "shm-nearly-full", findings_shm.NEARLY_FULL, findings_shm.ABOUT_TO_FAIL
    if pool.name == "ram":
        return "ram-near-limit", 1 - findings.NEAR, 1 - findings.AT_THE_EDGE
    if pool.name.startswith("gpu"):
        return "gpu-nearly-full", findings.NEARLY_FULL, findings.FULL
    if pool.name == "fds":
        return "fds-nearly-out", _FDS_WARNING, _FDS_CRITICAL
    if pool.name == "disk" and pool.size:
        return "disk-low", 1 - findings.DISK_LOW / pool.size, 1 - findings.DISK_OUT / pool.size
    return None, 2.0, 2.0


def _used_share(pool: Pool) -> float | None:
    """By what is free, because a tighter limit than the size may apply."""
    if not pool.size or pool.free is None:
        return None
    return 1 - pool.free / pool.size


def _descriptors(sample: Sample) -> Iterator[Pool]:
    """File descriptors of the process nearest its limit, as a pool."""
    known = [(row.fds, row.fd_limit) for row in sample.processes if row.fds is not None and row.fd_limit]
    if known:
        used, limit = max(known, key=lambda pair: pair[0] / pair[1])
        yield Pool("fds", limit, used, max(0, limit - used), "/proc/<pid>/fd")


def _increase(before: int | None, after: int | None) -> int:
    return 0 if before is None or after is None else max(0, after - before)


def _ended_processes(recent: Sequence[Sample]) -> list[ProcessRow]:
    """Processes of these samples that are not in the last one, with the last size that is known, the largest first."""
    seen: dict[int, ProcessRow] = {}
    for row in (row for one in recent[:-1] for row in one.processes):
        # A process that is exiting has no memory any more, and RSS is missing from its status.
        if row.host is not None or row.pid not in seen:
            seen[row.pid] = row
    alive = {row.pid for row in recent[-1].processes}
    return sorted((row for pid, row in seen.items() if pid not in alive), key=lambda row: row.host or 0, reverse=True)


def _killed_in_cgroup(count: int) -> str:
    one = phrase("the OOM killer killed {count} process in this cgroup")
    many = phrase("the OOM killer killed {count} processes in this cgroup")
    return counted(count, one, many)


def _killed_on_machine(count: int) -> str:
    one = phrase("the OOM killer killed {count} process on this machine")
    many = phrase("the OOM killer killed {count} processes on this machine")
    return counted(count, one, many)


def _named(rows: Sequence[ProcessRow]) -> str:
    names = [
        say(
            "pid {pid} ({command}), {size} when last seen",
            pid=row.pid,
            command=row.command[:60],
            size=say("size unknown") if row.host is None else format_size(row.host),
        )
        for row in rows[:_MOST_NAMED]
    ]
    more = len(rows) - len(names)
    if more > 0:
        names.append(say("{count} more", count=more))
    return listed(names)


def _starting_up(before: Sample, after: Sample, pool: str, found: Trend) -> bool:
    """Whether new processes hold most of the growth: probably workers that start one after another."""
    new = held_by_new_processes(before, after, pool)
    return new >= _STARTUP_SHARE * found.growth and found.window < _STARTUP_PATIENCE * 2 * found.full_in


def _filling(pool: str, sample: Sample, found: Trend, growing: GrowingProcesses) -> Alarm:
    return Alarm(
        f"{pool.rstrip('0123456789')}-filling",
        pool,
        "critical" if found.full_in <= _CRITICAL_INTERVALS * sample.interval else "warning",
        say(
            "{pool} full in about {time} at {rate}, {who}",
            pool=pool,
            time=_rounded(found.full_in),
            rate=_rate(found.rate),
            who=describe_growth(growing, found.growth),
        ),
        sample.when,
        {
            "full_in_seconds": round(found.full_in, 1),
            "bytes_per_second": round(found.rate),
            "over_seconds": round(found.window, 1),
            "growth": round(found.growth),
        },
        growing.pids,
    )


def _rate(per_second: float) -> str:
    """Per minute, or per hour below 1 MB a minute."""
    if per_second * 60 >= 1 << 20:
        return say("{size}/min", size=format_size(int(per_second * 60)))
    return say("{size}/h", size=format_size(int(per_second * 3600)))


def _rounded(seconds: float) -> str:
    """A time without more digits than the forecast is worth."""
    if seconds >= 90:
        return format_duration(round(seconds / 60) * 60)
    return format_duration(round(seconds / 5) * 5 if seconds >= 20 else max(1, round(seconds)))
