"""Samples to feed a watch with: a healthy machine, and one thing changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from legroom.monitor.watch_loop import MomentStream
from legroom.records.machine import MemoryEvents, Pool
from legroom.records.watch_sample import Moment, ProcessRow, Sample

MB, GB = 1 << 20, 1 << 30
START = 1_760_000_000.0


def pool(name: str, size: int, used: float) -> Pool:
    """A pool with so much used."""
    return Pool(name, size, int(used), max(0, size - int(used)), f"test {name}")


def sample(clock: float = 0.0, *pools: Pool, interval: float = 1.0, **changes: Any) -> Sample:
    """One sample; pools that are not given are roomy."""
    given = {one.name for one in pools}
    roomy = [pool("shm", 8 * GB, 0), pool("ram", 64 * GB, 8 * GB)]
    values: dict[str, Any] = {
        "when": START + clock,
        "clock": clock,
        "interval": interval,
        "watched": "a test",
        "pools": (*pools, *(one for one in roomy if one.name not in given)),
        "processes": (),
        "swap_in": 0.0,
        "swap_out": 0.0,
        "pressure": (),
        "events": MemoryEvents(0, 0, 0, "cgroup", "memory.events"),
        **changes,
    }
    return Sample(**values)


def row(pid: int, parent: int = 1, *, rss: float = 0, shmem: float = 0, **more: Any) -> ProcessRow:
    """One process."""
    return ProcessRow(pid, parent, more.pop("command", f"python train.py {pid}"), int(rss), int(shmem), 0, **more)


def moments(samples: Iterable[Sample]) -> Iterator[Moment]:
    """What a watch makes of them."""
    return iter(MomentStream(samples))


def codes(moment: Moment) -> set[str]:
    """The alarms that stand."""
    return {alarm.code for alarm in moment.alarms}
