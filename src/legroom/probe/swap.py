"""Swap: how much there is, how much is used, and whether pages move now.

Covers: /proc/meminfo, the two counters of /proc/vmstat over an interval, the cgroups' swap limits.
Does not cover: which process is swapped out (process.py) or whether it hurts (pressure.py).

A rate needs two readings. ``start`` takes the first and ``swap`` the second, so that the caller's other work is
the interval; where that was too short to say anything, ``swap`` waits for the rest of it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from legroom.model import CgroupLevel, Memory, Pool, Swap
from legroom.probe.host import Host
from legroom.probe.memory import amount
from legroom.words import say

_MEMINFO = "/proc/meminfo"
_VMSTAT = "/proc/vmstat"
_LIMIT_FILES = {"v1": "memory.memsw.limit_in_bytes", "v2": "memory.swap.max"}
_PAGE = 4096  # of a recording that does not say
_LEAST_INTERVAL = 0.1  # seconds; over less, one burst of pages would read as a storm


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes swapped in and out since the machine started, and when that was read."""

    when: float  # time.monotonic()
    swapped_in: int | None
    swapped_out: int | None


def start(host: Host) -> Counters:
    """The first of the two readings."""
    if host.platform == "linux":
        return _counters(host, host.table(_VMSTAT))
    inward = outward = None
    if host.platform == "darwin" and host.live:  # elsewhere psutil writes zeros that count nothing
        import psutil

        now = psutil.swap_memory()
        inward, outward = now.sin, now.sout
    return Counters(time.monotonic(), inward, outward)


def swap(host: Host, memory: Memory, started: Counters) -> Swap:
    """The second reading: amounts now, and the rates since ``started``."""
    total, used, source, reason = _amounts(host)
    later, interval = _later(host, started, moving=total != 0)
    tight = _tightest(memory)
    return Swap(
        total=total,
        used=used,
        in_rate=_rate(started.swapped_in, later.swapped_in, interval),
        out_rate=_rate(started.swapped_out, later.swapped_out, interval),
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
        total, free = amount(info.get("SwapTotal")), amount(info.get("SwapFree"))
        source = f"{_MEMINFO}, {_VMSTAT}"
        if total is not None and free is not None:
            return total, max(0, total - free), source, None
        name = "SwapTotal" if total is None else "SwapFree"
        reason = say("{file} has no {name}", file=_MEMINFO, name=name) if info else host.why(_MEMINFO)
        return total, None, source, reason
    if not host.live:
        reason = say("a recording of {platform} says nothing about swap", platform=host.platform)
        return None, None, "recording.json", reason
    import psutil

    now = psutil.swap_memory()
    return now.total, now.used, "psutil.swap_memory", None


def swap_pool(swap: Swap) -> Pool:
    """The pool: the machine's swap, or what the cgroup may use of it. No swap is a size of zero, not unknown."""
    size, used = swap.total, swap.used
    free = size - used if size is not None and used is not None else None
    limit = swap.cgroup_limit
    if limit is not None and (size is None or limit < size):
        size, used = limit, swap.cgroup_used
        own = max(0, limit - used) if used is not None else None
        if limit == 0:  # nothing can be in it, whatever else is unknown
            used = free = 0
        elif own is None or free is None:
            free = None
        else:
            free = min(free, own)
    reason = None
    if size is None or used is None or free is None:
        reason = swap.reason or say("how much of the swap is used could not be read")
    return Pool("swap", size, used, free, swap.source, reason)


def _tightest(memory: Memory) -> CgroupLevel | None:
    """The level with the smallest swap limit; of equals the one that has used most of it."""
    limited = [level for level in memory.levels if level.swap_limit is not None]
    return min(limited, key=lambda level: (level.swap_limit or 0, -(level.swap_used or 0)), default=None)


def _later(host: Host, started: Counters, *, moving: bool) -> tuple[Counters, float | None]:
    """The counters after the interval, and its length; None where there is none to speak of."""
    if host.recording is not None:
        table, interval = host.recording.get("vmstat_later"), host.recording.get("interval")
        if not isinstance(table, dict) or not isinstance(interval, (int, float)):
            return started, None
        return _counters(host, table), float(interval)
    if started.swapped_in is None:
        return started, None
    rest = _LEAST_INTERVAL - (time.monotonic() - started.when)
    if moving and rest > 0:
        time.sleep(rest)
    later = start(host)
    return later, later.when - started.when


def _counters(host: Host, table: dict[str, int]) -> Counters:
    if not host.live:
        page = _PAGE
    else:
        page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else _PAGE
    pages = [amount(table.get(name)) for name in ("pswpin", "pswpout")]
    inward, outward = (count * page if count is not None else None for count in pages)
    return Counters(time.monotonic(), inward, outward)


def _rate(before: int | None, after: int | None, interval: float | None) -> float | None:
    if before is None or after is None or interval is None or not interval > 0:
        return None
    return max(0, after - before) / interval
