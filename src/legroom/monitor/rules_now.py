"""Alarms on how things stand: levels, moving swap, pressure, the cgroup's own counters. Pure.

Covers: one function a rule, from the history and the alarms that stand already. Does not cover: where things are
going (rules_trend.py), how long an alarm is held (alarms.py).

An alarm that stands is judged by a lower bar than a new one, so that a level which wavers around its threshold
is one alarm and not twenty. The thresholds themselves are those of `legroom doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from legroom.budget import rules_gpu, rules_machine, rules_ram, rules_shm
from legroom.model import Alarm, AlarmLevel, Pool, ProcessRow, Sample
from legroom.model.advice import scope_name
from legroom.monitor.growth import growers
from legroom.monitor.history import History
from legroom.units import format_size
from legroom.words import counted, joined, listed, phrase, say

Standing = frozenset[tuple[str, str | None]]

EASE = 0.05  # of a pool: how far it must fall below its threshold before its alarm ends
_FDS_NEAR, _FDS_OUT = 0.80, 0.95
_LOOKS = 3  # samples in a row in which swap must move
_QUIET = 6  # samples in a row in which it must not, before that alarm ends
_LATELY = 10  # samples over which counters are compared and growth is looked for
_MOST_NAMED = 3  # processes named in one alarm
_THRASH = 1 << 20  # bytes a second, in and out at once
_BINDS = 0.85  # share of the limit that cannot be reclaimed: below, hits of it are page cache being dropped


def levels(history: History, standing: Standing) -> Iterator[Alarm]:
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
            growers(recent[0], sample, pool.name).pids,
        )


def moving_swap(history: History, standing: Standing) -> Iterator[Alarm]:
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
    who = growers(recent[0], sample, "swap")
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


def pressure(history: History, standing: Standing) -> Iterator[Alarm]:
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


def counters(history: History, standing: Standing) -> Iterator[Alarm]:
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
        who = growers(recent[0], sample, "ram").pids
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


RULES = (levels, moving_swap, pressure, counters)


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
