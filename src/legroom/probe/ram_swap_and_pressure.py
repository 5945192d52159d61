"""RAM under every cgroup limit, swap and its traffic, and memory pressure (PSI).

Page cache and reclaimable slab count as usage until the kernel needs them. So the usage that matters is what cannot be
reclaimed. A limit applies to its cgroup with everything below it: free memory is the least over all levels and the
machine.

A rate of swapping needs two readings. ``read_swap_counters`` takes the first and ``swap`` the second, so that the
caller's other work is the interval. If that was too short, ``swap`` waits for the rest.
"""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass

from legroom.messages import joined, say
from legroom.probe.filesystems_and_cgroups import UNIFIED, Cgroup, Version, cgroup
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.machine import CgroupLevel, Memory, MemoryEvents, Pool, Pressure, Swap

_MEMINFO = "/proc/meminfo"
_VMSTAT = "/proc/vmstat"
_NO_LIMIT = 1 << 62  # v1 writes the largest multiple of a page below 2**63 where there is no limit
_LIMIT = re.compile(r"\s*(?:[0-9]+|max)\s*", re.A)
_ABOVE = "/.."  # suffix of the path of a level that is known only from its child


def memory(host: Host, pid: str = "self") -> Memory:
    """RAM for ``pid``: the machine's, every cgroup limit above it, and the counters."""
    if host.platform != "linux":
        return _elsewhere(host)
    return _memory(host, cgroup(host, "memory", pid), complete=True)


def memory_in(host: Host, group: Cgroup) -> Memory:
    """RAM for processes in that cgroup: levels with a limit only, no counters; a third of ``memory``'s time."""
    return _memory(host, group, complete=False)


def _memory(host: Host, group: Cgroup, *, complete: bool) -> Memory:
    info = host.table(_MEMINFO)
    total, available = info.get("MemTotal"), info.get("MemAvailable")
    reasons = [] if total is not None and available is not None else [_missing(host, total, available)]
    levels = _levels(host, group, limited=not complete)
    reasons += [host.why(file) for file in _nonsense(host, group)]
    if complete and group.reason is not None:
        reasons.append(group.reason)
    elif complete and not levels and not group.is_root:
        reasons.append(say("{path} has no memory controller", path=group.chain[0]))
    peak = "memory.max_usage_in_bytes" if group.version == "v1" else "memory.peak"
    own = levels[:1] if complete else []
    return Memory(
        total=total,
        available=available,
        cgroup=group.version if levels else None,
        levels=tuple(levels),
        above_hidden=group.above_hidden,
        events=_events(host, group.version, levels)
        if complete
        else MemoryEvents(None, None, None, "machine", _MEMINFO),
        peak=host.number(f"{own[0].path}/{peak}") if own else None,
        source=", ".join((_MEMINFO, *(f"{level.path}/memory.*" for level in own))),
        reason=joined(reasons) or None,
    )


def _levels(host: Host, group: Cgroup, *, limited: bool = False) -> list[CgroupLevel]:
    """All levels, or those ``limited`` and the last, which may show a limit above it."""
    if group.version is None:
        return []
    read = _level_v1 if group.version == "v1" else _level_v2
    # A cgroup without any of the files (v2's real root, controller off) limits nothing.
    name = "memory.limit_in_bytes" if group.version == "v1" else "memory.max"
    chain = [
        path
        for path in group.chain
        if not limited or path == group.chain[-1] or _bound(host.number(f"{path}/{name}")) is not None
    ]
    levels = [level for path in chain if (level := read(host, path)) != CgroupLevel(path)]
    if group.version == "v1" and (above := _above_v1(host, levels)) is not None:
        levels.append(above)
    return levels


def events_of(host: Host, memory: Memory) -> MemoryEvents:
    """The counters now, of the cgroups that ``memory`` was read from.

    A process that has ended is in no cgroup any more; its kill is counted in the cgroup it was in.
    """
    return _events(host, memory.cgroup, list(memory.levels))


def limit_file(memory: Memory, level: CgroupLevel) -> str:
    """The file that a level's limit was read from."""
    if level.path.endswith(_ABOVE):
        return f"{level.path.removesuffix(_ABOVE)}/memory.stat (hierarchical_memory_limit)"
    return f"{level.path}/{'memory.limit_in_bytes' if memory.cgroup == 'v1' else 'memory.max'}"


@dataclass(frozen=True, slots=True)
class RamBound:
    """The machine's RAM or one cgroup limit: its size, what is used and free, and the files that show it."""

    size: int | None
    used: int | None
    room: int | None
    size_from: str
    room_from: str


def ram_pool(memory: Memory) -> Pool:
    """The pool: the smallest limit as its size, the least free memory of all levels."""
    bounds = ram_bounds(memory)
    sized = [(bound.size, bound) for bound in bounds if bound.size is not None]
    if not sized:
        reason = memory.reason or say("cannot read the machine's RAM or any limit")
        return Pool("ram", None, None, None, memory.source, reason)
    # Of equal limits the fullest one matters.
    size, tight = min(sized, key=lambda pair: (pair[0], -1 if pair[1].room is None else pair[1].room))
    # If the usage is unknown, a limit above the machine's RAM changes nothing; a lower one might.
    ceiling = memory.total if memory.total is not None else _NO_LIMIT
    for bound in bounds:
        if bound.room is None and (bound.size is None or bound.size <= ceiling):
            reason = say("cannot read the usage for the limit in {file}", file=bound.size_from)
            return Pool("ram", size, tight.used, None, tight.size_from, memory.reason or reason)
    free, where = min((bound.room, bound.room_from) for bound in bounds if bound.room is not None)
    source = tight.size_from
    if free != tight.room:
        source = say("{size}; free is limited by {free}", size=source, free=where)
    return Pool("ram", size, tight.used, free, source)


def free_memory(host: Host | None = None, *, with_swap: bool = False) -> tuple[int | None, str]:
    """(free, source): bytes that can be allocated under all limits; (None, reason) if unknown.

    ``with_swap`` adds free swap, for callers that prefer a slow machine to a killed process.
    """
    host = host or Host()
    now = memory(host)
    pool = ram_pool(now)
    if pool.free is None:
        return None, pool.reason or pool.source
    if not with_swap:
        return pool.free, pool.source
    no_rates = SwapCounters(0.0, None, None)  # swap() would wait for an interval
    return pool.free + (swap_pool(swap(host, now, no_rates)).free or 0), pool.source


def ram_bounds(memory: Memory) -> list[RamBound]:
    """The machine, and every level that has a limit."""
    used = None
    if memory.total is not None and memory.available is not None:
        used = max(0, memory.total - memory.available)
    size_from = room_from = memory.source
    if memory.source.startswith(_MEMINFO):
        size_from, room_from = f"{_MEMINFO} (MemTotal)", f"{_MEMINFO} (MemAvailable)"
    bounds = [RamBound(memory.total, used, memory.available, size_from, room_from)]
    for level in memory.levels:
        if level.limit is not None:
            file = limit_file(memory, level)
            bounds.append(RamBound(level.limit, level.unreclaimable, level.room, file, file))
    return bounds


def _level_v2(host: Host, path: str) -> CgroupLevel:
    usage = host.number(f"{path}/memory.current")
    stat = host.table(f"{path}/memory.stat")
    return CgroupLevel(
        path=path,
        limit=_bound(host.number(f"{path}/memory.max")),
        high=_bound(host.number(f"{path}/memory.high")),
        usage=usage,
        unreclaimable=_unreclaimable(usage, stat, ""),
        swap_limit=_bound(host.number(f"{path}/memory.swap.max")),
        swap_used=host.number(f"{path}/memory.swap.current"),
        shmem=None if usage is None else stat.get("shmem"),
    )


def _level_v1(host: Host, path: str) -> CgroupLevel:
    usage = host.number(f"{path}/memory.usage_in_bytes")
    limit = _bound(host.number(f"{path}/memory.limit_in_bytes"))
    both = _bound(host.number(f"{path}/memory.memsw.limit_in_bytes"))
    stat = host.table(f"{path}/memory.stat")
    return CgroupLevel(
        path=path,
        limit=limit,
        usage=usage,
        unreclaimable=_unreclaimable(usage, stat, "total_"),
        swap_limit=max(0, both - (limit or 0)) if both is not None else None,
        swap_used=stat.get("total_swap"),
        shmem=None if usage is None else stat.get("total_shmem"),
    )


def _above_v1(host: Host, levels: list[CgroupLevel]) -> CgroupLevel | None:
    """v1 shows the smallest limit of all ancestors even if a container hides them."""
    if not levels:
        return None
    top = levels[-1]
    limit = _bound(host.table(f"{top.path}/memory.stat").get("hierarchical_memory_limit"))
    if limit is None or limit >= (top.limit or _NO_LIMIT):
        return None
    return CgroupLevel(f"{top.path}{_ABOVE}", limit, usage=top.usage, unreclaimable=top.unreclaimable)


def _nonsense(host: Host, group: Cgroup) -> list[str]:
    """Limit files with invalid content: there, None does not mean "no limit"."""
    name = "memory.limit_in_bytes" if group.version == "v1" else "memory.max"
    texts = {file: host.text(file) for file in (f"{path}/{name}" for path in group.chain)}
    return [file for file, text in texts.items() if text is not None and not _LIMIT.fullmatch(text)]


def _unreclaimable(usage: int | None, stat: dict[str, int], prefix: str) -> int | None:
    inactive, active = stat.get(f"{prefix}inactive_file"), stat.get(f"{prefix}active_file")
    if usage is None or inactive is None or active is None:
        return None
    slab = stat.get(f"{prefix}slab_reclaimable") or 0  # v1 does not report it
    return max(0, usage - inactive - active - slab)  # the two files are not read at one instant


def _events(host: Host, version: Version | None, levels: list[CgroupLevel]) -> MemoryEvents:
    """Kills in the process's own cgroup; hits of the smallest limit and smallest ``high`` at any level."""
    levels = [level for level in levels if not level.path.endswith(_ABOVE)]
    everywhere = host.table(_VMSTAT).get("oom_kill")
    if levels:
        tight = min(levels, key=lambda level: level.limit if level.limit is not None else _NO_LIMIT)
        slow = min(levels, key=lambda level: level.high if level.high is not None else _NO_LIMIT)
        own = levels[0].path
        throttled = None
        if version == "v1":
            file, hits = f"{own}/memory.oom_control", f"{tight.path}/memory.failcnt"
            at_limit = _hits_v1(host, tight)
        else:
            file, hits = _events_v2(host, own), _events_v2(host, tight.path)
            at_limit = host.table(hits).get("max")
            throttled = host.table(_events_v2(host, slow.path)).get("high")
        kills = host.table(file).get("oom_kill")
        if any(count is not None for count in (kills, at_limit, throttled)):
            source = file if hits == file else f"{file}, {hits}"
            return MemoryEvents(kills, at_limit, throttled, "cgroup", source, everywhere)
    return MemoryEvents(everywhere, None, None, "machine", _VMSTAT, everywhere)


def _hits_v1(host: Host, level: CgroupLevel) -> int | None:
    """How often memory, or memory plus swap, reached its limit."""
    names = ("memory.failcnt", "memory.memsw.failcnt")
    fails = [count for name in names if (count := host.number(f"{level.path}/{name}")) is not None]
    # Without swap the joint limit is reached, and Linux 6.18 does not count that:
    # a zero then means unknown, even after a kill.
    uncounted = level.limit is not None and level.swap_limit == 0
    return sum(fails) if any(fails) or (fails and not uncounted) else None


def _events_v2(host: Host, path: str) -> str:
    """The cgroup's own counters if the kernel has them (5.2), else including its descendants."""
    local = f"{path}/memory.events.local"
    return local if host.exists(local) else f"{path}/memory.events"


def _elsewhere(host: Host) -> Memory:
    """macOS and Windows: no cgroups; psutil gives the rest."""
    nothing = MemoryEvents(None, None, None, "machine", host.platform)
    if not host.live:
        reason = say("a recording of {platform} has no RAM figures", platform=host.platform)
        return Memory(None, None, None, (), None, nothing, None, "recording.json", reason)
    import psutil

    now = psutil.virtual_memory()
    return Memory(now.total, now.available, None, (), False, nothing, None, "psutil.virtual_memory")


def _missing(host: Host, total: int | None, available: int | None) -> str:
    if total is None and available is None:
        return host.why(_MEMINFO)
    return say("{file} has no {name}", file=_MEMINFO, name="MemTotal" if total is None else "MemAvailable")


def _bound(value: int | None) -> int | None:
    return value if value is not None and value < _NO_LIMIT else None


_LIMIT_FILES = {"v1": "memory.memsw.limit_in_bytes", "v2": "memory.swap.max"}
_PAGE = 4096  # of a recording without it
_LEAST_INTERVAL = 0.1  # seconds; over less, one burst of pages would look like thrashing


@dataclass(frozen=True, slots=True)
class SwapCounters:
    """Bytes swapped in and out since the machine started, and when that was read."""

    when: float  # time.monotonic()
    swapped_in: int | None
    swapped_out: int | None


def read_swap_counters(host: Host) -> SwapCounters:
    """The first of the two readings."""
    if host.platform == "linux":
        return _counters(host, host.table(_VMSTAT))
    inward = outward = None
    if host.platform == "darwin" and host.live:  # elsewhere psutil returns zeros
        import psutil

        now = psutil.swap_memory()
        inward, outward = now.sin, now.sout
    return SwapCounters(time.monotonic(), inward, outward)


def swap(host: Host, memory: Memory, started: SwapCounters) -> Swap:
    """The second reading: amounts now, and the rates since ``started``."""
    total, used, source, reason = _amounts(host)
    later, interval = _later(host, started, moving=total != 0)
    tight = _tightest(memory)
    return Swap(
        total=total,
        used=used,
        in_rate=rate(started.swapped_in, later.swapped_in, interval),
        out_rate=rate(started.swapped_out, later.swapped_out, interval),
        interval=interval,
        cgroup_limit=tight.swap_limit if tight else None,
        source=source if tight is None else f"{source}, {tight.path}/{_LIMIT_FILES[memory.cgroup or 'v2']}",
        reason=reason,
        cgroup_used=tight.swap_used if tight else None,
    )


def _amounts(host: Host) -> tuple[int | None, int | None, str, str | None]:
    """(total, used, where it was read, why it could not be)."""
    if host.platform == "linux":
        info = host.table(_MEMINFO)
        total, free = info.get("SwapTotal"), info.get("SwapFree")
        source = f"{_MEMINFO}, {_VMSTAT}"
        if total is not None and free is not None:
            return total, max(0, total - free), source, None
        name = "SwapTotal" if total is None else "SwapFree"
        reason = say("{file} has no {name}", file=_MEMINFO, name=name) if info else host.why(_MEMINFO)
        return total, None, source, reason
    if not host.live:
        reason = say("a recording of {platform} has no swap figures", platform=host.platform)
        return None, None, "recording.json", reason
    import psutil

    now = psutil.swap_memory()
    return now.total, now.used, "psutil.swap_memory", None


def swap_pool(swap: Swap) -> Pool:
    """The pool: the machine's swap, or the cgroup's share. No swap is size 0, not unknown."""
    size, used = swap.total, swap.used
    free = size - used if size is not None and used is not None else None
    limit = swap.cgroup_limit
    if limit is not None and (size is None or limit < size):
        size, used = limit, swap.cgroup_used
        own = max(0, limit - used) if used is not None else None
        if limit == 0:  # it is empty, whatever else is unknown
            used = free = 0
        elif own is None or free is None:
            free = None
        else:
            free = min(free, own)
    reason = None
    if size is None or used is None or free is None:
        reason = swap.reason or say("cannot read swap usage")
    return Pool("swap", size, used, free, swap.source, reason)


def _tightest(memory: Memory) -> CgroupLevel | None:
    """The level with the smallest swap limit; of equal ones the one with most swap used."""
    limited = [level for level in memory.levels if level.swap_limit is not None]
    return min(limited, key=lambda level: (level.swap_limit or 0, -(level.swap_used or 0)), default=None)


def _later(host: Host, started: SwapCounters, *, moving: bool) -> tuple[SwapCounters, float | None]:
    """The counters after the interval, and its length; None if it is too short."""
    if host.recording is not None:
        table, interval = host.recording.get("vmstat_later"), host.recording.get("interval")
        if not isinstance(table, dict) or not isinstance(interval, (int, float)):
            return started, None
        counts = {name: count for name, count in table.items() if isinstance(count, int) and 0 <= count < 1 << 64}
        return _counters(host, counts), float(interval)
    if started.swapped_in is None:
        return started, None
    rest = _LEAST_INTERVAL - (time.monotonic() - started.when)
    if moving and rest > 0:
        time.sleep(rest)
    later = read_swap_counters(host)
    return later, later.when - started.when


def _counters(host: Host, table: dict[str, int]) -> SwapCounters:
    if not host.live:
        page = _PAGE
    else:
        page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else _PAGE
    pages = [table.get(name) for name in ("pswpin", "pswpout")]
    inward, outward = (count * page if count is not None else None for count in pages)
    return SwapCounters(time.monotonic(), inward, outward)


def rate(before: int | None, after: int | None, interval: float | None) -> float | None:
    """Per second; None if that is unknown."""
    if before is None or after is None or interval is None or not interval > 0:
        return None
    return max(0, after - before) / interval


_PRESSURE = "/proc/pressure/memory"


def pressure(host: Host, pid: str = "self") -> tuple[Pressure, ...]:
    """The pressure of the machine and of ``pid``'s cgroup, where readable."""
    found = [_pressure_of(host, "machine", _PRESSURE)]
    group = cgroup(host, UNIFIED, pid)
    if group.chain and not group.is_root and group.reason is None:  # the root's file repeats the machine's
        found.append(_pressure_of(host, "cgroup", f"{group.chain[0]}/memory.pressure"))
    return tuple(record for record in found if record is not None)


def _pressure_of(host: Host, scope: str, file: str) -> Pressure | None:
    text = host.text(file)
    rows = parse_pressure(text) if text is not None else {}
    some, full = rows.get("some"), rows.get("full")
    if some is None or full is None:
        return None
    return Pressure(scope, *some, *full, source=file)


def parse_pressure(text: str) -> dict[str, tuple[float, float]]:
    """The 10 and 60 second averages, in percent, of each line that has both."""
    rows: dict[str, tuple[float, float]] = {}
    for line in text.split("\n"):
        name, _, rest = line.partition(" ")
        pairs = dict(word.split("=", 1) for word in rest.split() if "=" in word)
        try:
            averages = float(pairs["avg10"]), float(pairs["avg60"])
        except (KeyError, ValueError):
            continue
        if all(math.isfinite(average) and average >= 0 for average in averages):
            rows[name] = averages
    return rows
