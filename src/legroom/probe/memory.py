"""RAM: the machine's, and what the memory cgroups leave of it.

Covers: /proc/meminfo; every cgroup from one's own to the topmost visible, v1 and v2; their counters; the pool
that follows from all of them. Does not cover: finding the groups (cgroup.py), swap's own pool (swap.py).

Page cache and reclaimable slab count as usage until the kernel wants them back, so the use that matters is what
cannot be reclaimed. A limit bites at the level that has it, with everything below that level counted: the room
is the least over all levels and the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from legroom.model import CgroupLevel, Memory, MemoryEvents, Pool
from legroom.probe.cgroup import Group, Version, cgroup
from legroom.probe.host import Host
from legroom.words import joined, say

_MEMINFO = "/proc/meminfo"
_VMSTAT = "/proc/vmstat"
_NO_LIMIT = 1 << 62  # v1 writes the largest multiple of a page below 2**63 where there is no limit
_LIMIT = re.compile(r"\s*(?:[0-9]+|max)\s*", re.A)
_ABOVE = "/.."  # ends the path of a level that is known from below only


def memory(host: Host, pid: str = "self") -> Memory:
    """What RAM there is for ``pid``: the machine's, every limit on the way up, and the counters."""
    if host.platform != "linux":
        return _elsewhere(host)
    info = host.table(_MEMINFO)
    total, available = amount(info.get("MemTotal")), amount(info.get("MemAvailable"))
    reasons = [] if total is not None and available is not None else [_missing(host, total, available)]
    group = cgroup(host, "memory", pid)
    levels: list[CgroupLevel] = []
    if group.version is not None:
        read = _level_v1 if group.version == "v1" else _level_v2
        # A group without any of the files (v2's real root, the controller switched off) limits nothing.
        levels = [level for path in group.chain if (level := read(host, path)) != CgroupLevel(path)]
        if group.version == "v1" and (above := _above_v1(host, levels)) is not None:
            levels.append(above)
    reasons += [host.why(file) for file in _nonsense(host, group)]
    if group.reason is not None:
        reasons.append(group.reason)
    elif not levels and not group.is_root:
        reasons.append(say("{path} has no memory controller", path=group.chain[0]))
    peak = "memory.max_usage_in_bytes" if group.version == "v1" else "memory.peak"
    return Memory(
        total=total,
        available=available,
        cgroup=group.version if levels else None,
        levels=tuple(levels),
        above_hidden=group.above_hidden,
        events=_events(host, group.version, levels),
        peak=_count(host, f"{levels[0].path}/{peak}") if levels else None,
        source=", ".join((_MEMINFO, *(f"{level.path}/memory.*" for level in levels[:1]))),
        reason=joined(reasons) or None,
    )


def events_of(host: Host, memory: Memory) -> MemoryEvents:
    """The counters of the groups that ``memory`` was read from, as they are now.

    A process that has ended is in no group any more, and what killed it is counted in the group it was in.
    """
    return _events(host, memory.cgroup, list(memory.levels))


def level_at(host: Host, version: Version, path: str) -> CgroupLevel:
    """One group read again: a tenth of what finding it and all above it costs."""
    return _level_v1(host, path) if version == "v1" else _level_v2(host, path)


def limit_file(memory: Memory, level: CgroupLevel) -> str:
    """The file that a level's limit was read from."""
    if level.path.endswith(_ABOVE):
        return f"{level.path.removesuffix(_ABOVE)}/memory.stat (hierarchical_memory_limit)"
    return f"{level.path}/{'memory.limit_in_bytes' if memory.cgroup == 'v1' else 'memory.max'}"


@dataclass(frozen=True, slots=True)
class _Bound:
    size: int | None
    used: int | None
    room: int | None
    size_from: str
    room_from: str


def ram_pool(memory: Memory) -> Pool:
    """The pool: as large as the tightest bound, as free as the fullest level leaves it."""
    bounds = _bounds(memory)
    sized = [(bound.size, bound) for bound in bounds if bound.size is not None]
    if not sized:
        reason = memory.reason or say("neither the machine's RAM nor a limit could be read")
        return Pool("ram", None, None, None, memory.source, reason)
    # Of equal bounds the fullest is the one that bites.
    size, tight = min(sized, key=lambda pair: (pair[0], -1 if pair[1].room is None else pair[1].room))
    # Where the use is unknown, a limit above the machine's RAM takes nothing away; a lower one might.
    ceiling = memory.total if memory.total is not None else _NO_LIMIT
    for bound in bounds:
        if bound.room is None and (bound.size is None or bound.size <= ceiling):
            reason = say("no use could be read beside {file}", file=bound.size_from)
            return Pool("ram", size, tight.used, None, tight.size_from, memory.reason or reason)
    free, where = min((bound.room, bound.room_from) for bound in bounds if bound.room is not None)
    source = tight.size_from
    if free != tight.room:
        source = say("{size}; free is bounded by {free}", size=source, free=where)
    return Pool("ram", size, tight.used, free, source)


def _bounds(memory: Memory) -> list[_Bound]:
    """The machine, and every level that has a limit."""
    used = None
    if memory.total is not None and memory.available is not None:
        used = max(0, memory.total - memory.available)
    size_from = room_from = memory.source
    if memory.source.startswith(_MEMINFO):
        size_from, room_from = f"{_MEMINFO} (MemTotal)", f"{_MEMINFO} (MemAvailable)"
    bounds = [_Bound(memory.total, used, memory.available, size_from, room_from)]
    for level in memory.levels:
        if level.limit is not None:
            file = limit_file(memory, level)
            bounds.append(_Bound(level.limit, level.unreclaimable, level.room, file, file))
    return bounds


def _level_v2(host: Host, path: str) -> CgroupLevel:
    usage = _count(host, f"{path}/memory.current")
    return CgroupLevel(
        path=path,
        limit=_bound(_count(host, f"{path}/memory.max")),
        high=_bound(_count(host, f"{path}/memory.high")),
        usage=usage,
        unreclaimable=_unreclaimable(usage, host.table(f"{path}/memory.stat"), ""),
        swap_limit=_bound(_count(host, f"{path}/memory.swap.max")),
        swap_used=_count(host, f"{path}/memory.swap.current"),
    )


def _level_v1(host: Host, path: str) -> CgroupLevel:
    usage = _count(host, f"{path}/memory.usage_in_bytes")
    limit = _bound(_count(host, f"{path}/memory.limit_in_bytes"))
    both = _bound(_count(host, f"{path}/memory.memsw.limit_in_bytes"))
    stat = host.table(f"{path}/memory.stat")
    return CgroupLevel(
        path=path,
        limit=limit,
        usage=usage,
        unreclaimable=_unreclaimable(usage, stat, "total_"),
        swap_limit=max(0, both - (limit or 0)) if both is not None else None,
        swap_used=amount(stat.get("total_swap")),
    )


def _above_v1(host: Host, levels: list[CgroupLevel]) -> CgroupLevel | None:
    """v1 tells the tightest limit of all ancestors even where a container hides them."""
    if not levels:
        return None
    top = levels[-1]
    limit = _bound(amount(host.table(f"{top.path}/memory.stat").get("hierarchical_memory_limit")))
    if limit is None or limit >= (top.limit or _NO_LIMIT):
        return None
    return CgroupLevel(f"{top.path}{_ABOVE}", limit, usage=top.usage, unreclaimable=top.unreclaimable)


def _nonsense(host: Host, group: Group) -> list[str]:
    """Limit files that say neither a number nor that there is none: there, None does not mean "no limit"."""
    name = "memory.limit_in_bytes" if group.version == "v1" else "memory.max"
    texts = {file: host.text(file) for file in (f"{path}/{name}" for path in group.chain)}
    return [file for file, text in texts.items() if text is not None and not _LIMIT.fullmatch(text)]


def _unreclaimable(usage: int | None, stat: dict[str, int], prefix: str) -> int | None:
    inactive, active = amount(stat.get(f"{prefix}inactive_file")), amount(stat.get(f"{prefix}active_file"))
    if usage is None or inactive is None or active is None:
        return None
    slab = amount(stat.get(f"{prefix}slab_reclaimable")) or 0  # v1 does not tell it apart
    return max(0, usage - inactive - active - slab)  # the two files are not read at one instant


def _events(host: Host, version: Version | None, levels: list[CgroupLevel]) -> MemoryEvents:
    """Kills in one's own group; hits of the tightest limit and of the tightest ``high`` wherever those are."""
    levels = [level for level in levels if not level.path.endswith(_ABOVE)]
    everywhere = amount(host.table(_VMSTAT).get("oom_kill"))
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
            at_limit = amount(host.table(hits).get("max"))
            throttled = amount(host.table(_events_v2(host, slow.path)).get("high"))
        kills = amount(host.table(file).get("oom_kill"))
        if any(count is not None for count in (kills, at_limit, throttled)):
            source = file if hits == file else f"{file}, {hits}"
            return MemoryEvents(kills, at_limit, throttled, "cgroup", source, everywhere)
    return MemoryEvents(everywhere, None, None, "machine", _VMSTAT, everywhere)


def _hits_v1(host: Host, level: CgroupLevel) -> int | None:
    """How often memory, or memory and swap together, met its limit."""
    names = ("memory.failcnt", "memory.memsw.failcnt")
    fails = [count for name in names if (count := _count(host, f"{level.path}/{name}")) is not None]
    # Where no swap is allowed on top, it is the joint limit that is met, and Linux 6.18 does not count that:
    # a zero then says nothing, even after a kill.
    uncounted = level.limit is not None and level.swap_limit == 0
    return sum(fails) if any(fails) or (fails and not uncounted) else None


def _events_v2(host: Host, path: str) -> str:
    """The counters of the group alone where the kernel keeps them (5.2), else with its descendants'."""
    local = f"{path}/memory.events.local"
    return local if host.exists(local) else f"{path}/memory.events"


def _elsewhere(host: Host) -> Memory:
    """macOS and Windows: no cgroups, and psutil knows the rest."""
    nothing = MemoryEvents(None, None, None, "machine", host.platform)
    if not host.live:
        reason = say("a recording of {platform} says nothing about RAM", platform=host.platform)
        return Memory(None, None, None, (), None, nothing, None, "recording.json", reason)
    import psutil

    now = psutil.virtual_memory()
    return Memory(now.total, now.available, None, (), False, nothing, None, "psutil.virtual_memory")


def _missing(host: Host, total: int | None, available: int | None) -> str:
    if total is None and available is None:
        return host.why(_MEMINFO)
    return say("{file} has no {name}", file=_MEMINFO, name="MemTotal" if total is None else "MemAvailable")


def _count(host: Host, path: str) -> int | None:
    return amount(host.number(path))


def amount(value: object) -> int | None:
    """A number of bytes, pages or events; what no counter of the kernel's can hold is nonsense, not a number."""
    return value if isinstance(value, int) and 0 <= value < 1 << 64 else None


def _bound(value: int | None) -> int | None:
    return value if value is not None and value < _NO_LIMIT else None
