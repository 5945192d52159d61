"""A whole watch of a made-up training, for what shows watches: shm leaks, two cards, workers, marks, hostile names."""

from __future__ import annotations

import math
from collections.abc import Iterator

from legroom.monitor.watch_loop import MomentStream
from legroom.records.machine import MemoryEvents, Pool, Pressure
from legroom.records.watch_sample import Annotations, EntryRow, Mark, Moment, ProcessRow, Sample

MB, GB = 1 << 20, 1 << 30
START = 1_760_000_000.0
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


def samples(count: int = 300, interval: float = 1.0, start: float = START) -> Iterator[Sample]:
    """So many samples; /dev/shm of 64 MB fills evenly over the last two thirds of 300 of them."""
    for number in range(count):
        yield _sample(number, number * interval, interval, start)


def moments(count: int = 300, interval: float = 1.0, start: float = START) -> Iterator[Moment]:
    """What a watch makes of them."""
    return iter(MomentStream(samples(count, interval, start)))


def _sample(number: int, clock: float, interval: float, start: float) -> Sample:
    part = number / 300
    shm = min(64 * MB, int((4 + 58 * max(0.0, part - 0.3) / 0.7 + math.sin(number / 9)) * MB))
    ram = int((9 + 6 * (1 - math.exp(-number / 40)) + 0.3 * math.sin(number / 7)) * GB)
    pools = (
        _pool("shm", 64 * MB, shm),
        _pool("ram", 32 * GB, ram),
        _pool("swap", 8 * GB, int((0.2 + part) * GB)),
        Pool("disk", None, None, None, "statvfs", "the store's directory may not be read"),
        _pool("gpu0", 24 * GB, int((18 + 4 * (1 - math.exp(-number / 20))) * GB)),
        _pool("gpu1", 24 * GB, int((2 + (12 if number % 80 > 30 else 0)) * GB)),
    )
    epoch = number // 75
    mark = (Mark(start + clock, f"epoch {epoch + 1}"),) if number % 75 == 0 else ()
    said = Annotations(
        {"data": 3 * GB, "prefetch": 180 * MB, "model": int(1.4 * GB), "optimizer": int(2.8 * GB)},
        f"epoch {epoch + 1}",
        mark,
        number * 4,
        3.97 if number > 1 else None,
    )
    return Sample(
        when=start + clock,
        clock=clock,
        interval=interval,
        watched="process 4711 (python train.py --batch 32) and its children",
        pools=pools,
        processes=_processes(number, clock, shm),
        swap_in=4096.0 * (number % 3),
        swap_out=0.0,
        pressure=(Pressure("machine", 1.5, 0.8, 0.2, 0.1, "/proc/pressure/memory"),),
        events=MemoryEvents(0, 3, None, "cgroup", "memory.events"),
        said=said,
        entries=(
            EntryRow("9b1f0c", "/data/train_256.h5", "shm", 3 * GB, True),
            EntryRow("77ac21", "/data/val_256.h5", "disk", 412 * MB, None),
        ),
        gpu_at=clock,
        cost=0.004,
    )


def _processes(number: int, clock: float, shm: int) -> tuple[ProcessRow, ...]:
    main = ProcessRow(
        4711, 1, "python train.py --batch 32 --num_workers 4 --data /data/train_256.h5", 5 * GB, shm // 2, 12 * MB,
        int(4.1 * GB), clock - number % 12, 88, 1024, 20 * GB,
    )  # fmt: skip
    workers = tuple(
        ProcessRow(4712 + one, 4711, f"python train.py (worker {one})", GB + one * 90 * MB, shm // 8, 0,
                   600 * MB + one * 50 * MB, clock - (number + one) % 12, 30, 1024)
        for one in range(4)
    )  # fmt: skip
    hostile = ProcessRow(4800, 1, HOSTILE, 40 * MB, 0, 0)
    hidden = ProcessRow(4801, 1, "somebody else's", None, None, None, None, clock)
    return (main, *workers, hostile, hidden)


def _pool(name: str, size: int, used: int) -> Pool:
    return Pool(name, size, used, size - used, f"a made-up {name}")
