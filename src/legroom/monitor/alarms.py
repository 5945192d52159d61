"""Which alarms stand: the rules asked at every sample, and held so that nothing flickers.

Covers: how often a rule must speak before it is believed, and be silent before its alarm ends.
Does not cover: the rules (rules_now.py, rules_trend.py), telling anybody (the outputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from legroom.budget import rules_gpu, rules_machine, rules_ram, rules_shm
from legroom.model import Alarm, AlarmLevel, Moment, Pool, ProcessRow, Sample
from legroom.model.advice import scope_name
from legroom.monitor.sample_history import History
from legroom.monitor.trend import (
    GrowingProcesses,
    Trend,
    describe_growth,
    find_trend,
    growing_processes,
    held_by_new_processes,
)
from legroom.units import format_duration, format_size
from legroom.words import counted, joined, listed, phrase, say

_TREND_AFTER = 3  # samples in a row; how things stand needs one
_ENDS_AFTER = 8  # samples without a word from the rule
_WORSE = ("warning", "critical")


def raised_alarms(history: History, standing: ActiveAlarms = frozenset()) -> tuple[Alarm, ...]:
    """What every rule says of the history as it is: a pure function of its arguments."""
    rules = (*LEVEL_RULES, *TREND_RULES)
    return tuple(alarm for rule in rules for alarm in rule(history, standing))


@dataclass(frozen=True, slots=True)
class _Held:
    alarm: Alarm
    heard: int = 1  # samples in a row, until it is believed
    silent: int = 0

    @property
    def believed(self) -> bool:
        needed = _TREND_AFTER if self.alarm.code.endswith("-filling") else 1
        return self.heard >= needed


@dataclass
class AlarmTracker:
    """The history and the alarms that stand; fed one sample at a time."""

    history: History = field(default_factory=History)
    _held: dict[tuple[str, str | None], _Held] = field(default_factory=dict)

    def judge(self) -> Moment:
        """The moment that the newest sample of the history makes."""
        sample = self.history.latest
        if sample is None:
            raise ValueError(say("there is no sample to judge"))
        before = {key: held.alarm for key, held in self._held.items() if held.believed}
        said = {alarm.key: alarm for alarm in raised_alarms(self.history, frozenset(before))}
        held: dict[tuple[str, str | None], _Held] = {}
        for key, old in self._held.items():
            now = said.pop(key, None)
            if now is not None:
                # The message and the numbers are today's; the beginning stays, and a level does not fall back
                # before the alarm ends, or it would be told again at every wobble.
                worst = max(now.level, old.alarm.level, key=_WORSE.index) if old.believed else now.level
                held[key] = _Held(replace(now, since=old.alarm.since, level=worst), old.heard + 1)
            elif old.believed and old.silent + 1 < _ENDS_AFTER:
                held[key] = replace(old, silent=old.silent + 1)
        held |= {key: _Held(alarm) for key, alarm in said.items()}
        self._held = held
        after = {key: one.alarm for key, one in held.items() if one.believed}
        begun = [
            alarm
            for key, alarm in after.items()
            if key not in before or _WORSE.index(alarm.level) > _WORSE.index(before[key].level)
        ]
        return Moment(
            sample,
            tuple(sorted(after.values(), key=lambda alarm: (-_WORSE.index(alarm.level), alarm.since))),
            tuple(begun),
            tuple(alarm for key, alarm in before.items() if key not in after),
        )


ActiveAlarms = frozenset[tuple[str, str | None]]

EASE = 0.05  # of a pool: how far it must fall below its threshold before its alarm ends
_FDS_NEAR, _FDS_OUT = 0.80, 0.95
_LOOKS = 3  # samples in a row in which swap must move
_QUIET = 6  # samples in a row in which it must not, before that alarm ends
_LATELY = 10  # samples over which counters are compared and growth is looked for
_MOST_NAMED = 3  # processes named in one alarm
_THRASH = 1 << 20  # bytes a second, in and out at once
_BINDS = 0.85  # share of the limit that cannot be reclaimed: below, hits of it are page cache being dropped


def levels(history: History, standing: ActiveAlarms) -> Iterator[Alarm]:
    """Pools that are nearly full."""
    recent = history.samples.last(_LATELY + 1)
    if not recent:
        return
    sample = recent[-1]
    for pool in (*sample.pools, *_descriptors(sample)):
        code, bars = _bars(pool)
        share = _share(pool)
        if code is None or share is None or pool.size is None or pool.free is None:
            continue
        ease = EASE if (code, pool.name) in standing else 0.0
        level: AlarmLevel = "critical" if share >= bars[1] else "warning"
        if share < bars[0] - ease:
            continue
        free = str(pool.free) if pool.name == "fds" else format_size(pool.free)
        size = str(pool.size) if pool.name == "fds" else format_size(pool.size)
        yield Alarm(
            code,
            pool.name,
            level,
            say(
                "{pool} is {share:.0%} full: {free} of {size} left",
                pool=pool.name,
                share=share,
                free=free,
                size=size,
            ),
            sample.when,
            {"share": round(share, 4), "free": pool.free, "size": pool.size},
            growing_processes(recent[0], sample, pool.name).pids,
        )


def moving_swap(history: History, standing: ActiveAlarms) -> Iterator[Alarm]:
    """Pages in swap cost nothing while they lie there; these come and go."""
    code = "swap-moving"
    recent = history.samples.last(_QUIET)
    moves = [_moving(sample) for sample in recent]
    enough = any(moves) if (code, "swap") in standing else len(moves) >= _LOOKS and all(moves[-_LOOKS:])
    if not enough:
        return
    sample = recent[-1]
    rates = [(one.swap_in or 0.0, one.swap_out or 0.0) for one in recent[-_LOOKS:]]
    thrash = all(min(pair) >= _THRASH for pair in rates)
    swap_in, swap_out = (sum(column) / len(rates) for column in zip(*rates, strict=True))
    who = growing_processes(recent[0], sample, "swap")
    yield Alarm(
        code,
        "swap",
        "critical" if thrash else "warning",
        say(
            "swap is moving: {inward}/s in, {outward}/s out; what is thrown out is needed again at once"
            if thrash
            else "swap is moving: {inward}/s in, {outward}/s out",
            inward=format_size(int(swap_in)),
            outward=format_size(int(swap_out)),
        ),
        sample.when,
        {"in_per_second": round(swap_in), "out_per_second": round(swap_out)},
        who.pids,
    )


def pressure(history: History, standing: ActiveAlarms) -> Iterator[Alarm]:
    """Tasks that stand still waiting for memory (PSI)."""
    sample = history.latest
    worst = (
        max(sample.pressure, key=lambda one: (one.full_avg10, one.some_avg10), default=None)
        if sample
        else None
    )
    if sample is None or worst is None:
        return
    ease = 0.5 if ("memory-pressure", None) in standing else 1.0
    if worst.some_avg10 < rules_ram.STALL * ease and worst.full_avg10 < rules_ram.HARD_STALL * ease:
        return
    yield Alarm(
        "memory-pressure",
        None,
        "critical" if worst.full_avg10 >= rules_ram.HARD_STALL else "warning",
        say(
            "tasks wait for memory: some {some:.0f} %, all of them {full:.0f} % of the last 10 s ({scope})",
            some=worst.some_avg10,
            full=worst.full_avg10,
            scope=scope_name(worst.scope),
        ),
        sample.when,
        {"some_avg10": worst.some_avg10, "full_avg10": worst.full_avg10, "source": worst.source},
    )


def counters(history: History, standing: ActiveAlarms) -> Iterator[Alarm]:
    """What the kernel counts: kills, hits of the limit, throttling."""
    recent = history.samples.last(_LATELY + 1)
    if len(recent) < 2:
        return
    sample = recent[-1]
    before, after = recent[0].events, sample.events
    yield from _oom_kills(recent)
    if before.source != after.source:
        return  # another cgroup's counters: nothing to compare
    hits, brakes = (_rise(getattr(before, name), getattr(after, name)) for name in ("at_limit", "throttled"))
    over: dict[str, int | float | str] = {
        "over_seconds": round(sample.clock - recent[0].clock, 1),
        "source": after.source,
    }
    if hits:
        ram = sample.pool("ram")
        share = None if ram is None else _share(ram)
        binds = share is not None and share >= _BINDS
        message = say(
            "the cgroup's memory limit was hit {count} times in {seconds:.0f} s, and little can be reclaimed"
            if binds
            else "the cgroup's memory limit was hit {count} times in {seconds:.0f} s; page cache gave way so far",
            count=hits,
            seconds=over["over_seconds"],
        )
        who = growing_processes(recent[0], sample, "ram").pids
        yield Alarm(
            "limit-hit",
            "ram",
            "critical" if binds else "warning",
            message,
            sample.when,
            {"hits": hits, **over},
            who,
        )
    if brakes:
        message = say("the kernel slows this cgroup down at memory.high: {count} times", count=brakes)
        yield Alarm("ram-throttled", "ram", "warning", message, sample.when, {"throttled": brakes, **over})


def _oom_kills(recent: Sequence[Sample]) -> Iterator[Alarm]:
    """Kills counted in the watched processes' own cgroup; and, less surely, kills elsewhere while one of them ended.

    A process may have been in a cgroup below the one that is read, or its cgroup may be gone with it: then only the
    machine's count rises, and whose death it counts is not known.
    """
    sample, lost = recent[-1], _lost(recent)
    events = [one.events for one in recent]
    kills = sum(
        _rise(before.oom_kills, after.oom_kills)
        for before, after in pairwise(events)
        if before.source == after.source
    )
    anywhere = _rise(events[0].machine_oom_kills, events[-1].machine_oom_kills)
    evidence: dict[str, int | float | str] = {
        "kills": kills or anywhere,
        "over_seconds": round(sample.clock - recent[0].clock, 1),
        "source": events[-1].source,
    }
    pids = tuple(row.pid for row in lost)
    if kills:
        if events[-1].scope == "cgroup":
            one = phrase("the OOM killer ended {count} process in this cgroup")
            many = phrase("the OOM killer ended {count} processes in this cgroup")
        else:
            one = phrase("the OOM killer ended {count} process on this machine")
            many = phrase("the OOM killer ended {count} processes on this machine")
        parts = [counted(kills, one, many)]
        if lost:
            parts.append(say("gone since then: {names}", names=_named(lost)))
        yield Alarm("oom-kill", "ram", "critical", joined(parts), sample.when, evidence, pids)
    elif anywhere and lost and events[-1].scope == "cgroup":
        one = phrase("the OOM killer ended {count} process on this machine")
        many = phrase("the OOM killer ended {count} processes on this machine")
        message = say(
            "{kills} while {names} ended; the count of the watched cgroup did not rise, so it may have been another "
            "process",
            kills=counted(anywhere, one, many),
            names=_named(lost),
        )
        yield Alarm("oom-kill", "ram", "warning", message, sample.when, evidence, pids)


def _lost(recent: Sequence[Sample]) -> list[ProcessRow]:
    """The processes that were there in one of these samples and are not in the last, the largest first."""
    seen = {row.pid: row for one in recent[:-1] for row in one.processes}
    there = {row.pid for row in recent[-1].processes}
    return sorted(
        (row for pid, row in seen.items() if pid not in there), key=lambda row: row.host or 0, reverse=True
    )


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


LEVEL_RULES = (levels, moving_swap, pressure, counters)


def _bars(pool: Pool) -> tuple[str | None, tuple[float, float]]:
    """The code of a pool's level alarm, and the shares from which it is a warning and critical."""
    if pool.name == "shm":
        return "shm-nearly-full", (rules_shm.NEARLY_FULL, rules_shm.ABOUT_TO_FAIL)
    if pool.name == "ram":
        return "ram-near-limit", (1 - rules_ram.NEAR, 1 - rules_ram.AT_THE_EDGE)
    if pool.name.startswith("gpu"):
        return "gpu-nearly-full", (rules_gpu.NEARLY_FULL, rules_gpu.FULL)
    if pool.name == "fds":
        return "fds-nearly-out", (_FDS_NEAR, _FDS_OUT)
    if pool.name == "disk" and pool.size:
        return "disk-low", (1 - rules_machine.DISK_LOW / pool.size, 1 - rules_machine.DISK_OUT / pool.size)
    return None, (2.0, 2.0)


def _share(pool: Pool) -> float | None:
    """How full: by what is free, because another bound than the size may be what is near."""
    if not pool.size or pool.free is None:
        return None
    return 1 - pool.free / pool.size


def _descriptors(sample: Sample) -> Iterator[Pool]:
    """The descriptors of the process nearest its own limit."""
    known = [(row.fds, row.fd_limit) for row in sample.processes if row.fds is not None and row.fd_limit]
    if known:
        used, limit = max(known, key=lambda pair: pair[0] / pair[1])
        yield Pool("fds", limit, used, max(0, limit - used), "/proc/<pid>/fd")


def _moving(sample: Sample) -> bool:
    return (sample.swap_in or 0.0) + (sample.swap_out or 0.0) >= rules_ram.MOVING


def _rise(before: int | None, after: int | None) -> int:
    return 0 if before is None or after is None else max(0, after - before)


CRITICAL = 60  # intervals that are left
_PATIENCE = 4.0  # how much fuller a pool must get when it is new processes that fill it
_MOSTLY = 0.6


def filling(history: History, standing: ActiveAlarms) -> Iterator[Alarm]:
    """Pools that will be full, and when."""
    sample = history.latest
    if sample is None:
        return
    for pool in sample.pools:
        found = find_trend(history.course(pool.name), sample.interval)
        if found is None:
            continue
        before = history.at(sample.clock - found.window) or sample
        if _starting_up(before, sample, pool.name, found):
            continue
        yield _alarm(pool.name, sample, found, growing_processes(before, sample, pool.name))


def _starting_up(before: Sample, after: Sample, pool: str, found: Trend) -> bool:
    """Whether the growth is processes that came one after another: workers being started, most likely."""
    born = held_by_new_processes(before, after, pool)
    return born >= _MOSTLY * found.growth and found.window < _PATIENCE * 2 * found.full_in


def _alarm(pool: str, sample: Sample, found: Trend, who: GrowingProcesses) -> Alarm:
    return Alarm(
        f"{pool.rstrip('0123456789')}-filling",
        pool,
        "critical" if found.full_in <= CRITICAL * sample.interval else "warning",
        say(
            "{pool} full in about {time} at {rate}, {who}",
            pool=pool,
            time=_about(found.full_in),
            rate=_rate(found.rate),
            who=describe_growth(who, found.growth),
        ),
        sample.when,
        {
            "full_in_seconds": round(found.full_in, 1),
            "bytes_per_second": round(found.rate),
            "over_seconds": round(found.window, 1),
            "growth": round(found.growth),
        },
        who.pids,
    )


def _rate(per_second: float) -> str:
    """By the minute, as leaks are spoken of; by the hour where that reads as next to nothing."""
    if per_second * 60 >= 1 << 20:
        return say("{size}/min", size=format_size(int(per_second * 60)))
    return say("{size}/h", size=format_size(int(per_second * 3600)))


def _about(seconds: float) -> str:
    """No more digits than the forecast is worth."""
    if seconds >= 90:
        return format_duration(round(seconds / 60) * 60)
    return format_duration(round(seconds / 5) * 5 if seconds >= 20 else max(1, round(seconds)))


TREND_RULES = (filling,)
