"""How large the demo may be on this machine: a pure decision.

Covers: rows of data, trainings, torch or numpy, steps by the pace that was measured, the batch that a small /dev/shm
cannot hold. Does not cover: reading the machine (show.py).

What one process takes is only guessed here, generously, to stay clear of other people's memory; what the demo shows of
memory it measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from legroom.demo.dataset import ROW_BYTES
from legroom.errors import NoRoom
from legroom.units import format_size
from legroom.words import say

Engine = Literal["torch", "numpy"]

_MB = 1 << 20
TRAININGS = 4
_FEWEST = 2  # one training shares with nobody
_LARGEST, _LARGEST_QUICK, _SMALLEST = 512 * _MB, 96 * _MB, 8 * _MB
_SHARE = 0.8  # of what is free
_OWN = 90 * _MB  # the demo itself, its picture included
_TRAINING: dict[Engine, int] = {"torch": 180 * _MB, "numpy": 36 * _MB}  # with its supervisor, without data
_LOADERS = 700 * _MB  # torch, its workers, and batches on their way
_DISK_COPIES = 3  # the file, the shared copy, and room to spare
_QUEUED = 5  # batches that torch's loader with two workers keeps in /dev/shm, at least
_TOO_MUCH = 1.5  # times /dev/shm
_LARGEST_TRIED = 256 * _MB  # a /dev/shm beyond this is not filled for show
_STEPS = (40, 20_000)


@dataclass(frozen=True, slots=True)
class Scale:
    """What the demo will do."""

    engine: Engine
    rows: int
    trainings: int
    quick: bool
    loaders: str | None = None  # why torch's loader is not tried
    notes: tuple[str, ...] = ()  # what is smaller than it would be elsewhere, and why

    @property
    def data_bytes(self) -> int:
        return self.rows * ROW_BYTES


def least_disk() -> int:
    """The room without which there is no demo."""
    return _DISK_COPIES * _SMALLEST


def scale(
    ram: int | None, disk: int, *, why_no_torch: str | None, quick: bool, in_memory: bool = False
) -> Scale:
    """What fits: ``ram`` and ``disk`` are the bytes that are free; ``in_memory``: the disk is memory too."""
    largest = _LARGEST_QUICK if quick else _LARGEST
    notes: list[str] = []
    if ram is None:
        notes.append(say("how much memory is free is not known: the demo stays small"))
        ram = 4 * _LARGEST_QUICK + _OWN
    engine: Engine = "torch" if why_no_torch is None else "numpy"
    loaders = why_no_torch
    if engine == "torch" and _data(ram, engine, TRAININGS, in_memory) < _SMALLEST:
        engine = "numpy"
        loaders = say("too little memory for torch: {free} free", free=format_size(ram))
        notes.append(say("{why}; the trainings use numpy", why=loaders))
    elif engine == "torch" and ram < _LOADERS:
        loaders = say("too little memory for loaders with workers: {free} free", free=format_size(ram))
        notes.append(loaders)
    trainings = next(
        (n for n in range(TRAININGS, _FEWEST - 1, -1) if _data(ram, engine, n, in_memory) >= _SMALLEST), 0
    )
    if not trainings:
        raise NoRoom(
            say("too little memory for the demo: {free} free", free=format_size(ram)),
            why=say("two trainings on {data} need about {need}",
                    data=format_size(_SMALLEST), need=format_size(_need(engine, _FEWEST, in_memory))),
            fix=(say("run it where more memory is free; see what bounds it here:\nlegroom doctor"),),
        )  # fmt: skip
    if trainings < TRAININGS:
        notes.append(say("{count} trainings instead of {all}: {free} of memory are free",
                         count=trainings, all=TRAININGS, free=format_size(ram)))  # fmt: skip
    data = min(largest, _data(ram, engine, trainings, in_memory), disk // _DISK_COPIES)
    if data < largest:
        notes.append(say("{data} of data instead of {largest}: {ram} of memory and {disk} of disk are free",
                         data=format_size(data), largest=format_size(largest), ram=format_size(ram),
                         disk=format_size(disk)))  # fmt: skip
    return Scale(engine, data // ROW_BYTES, trainings, quick, loaders, tuple(notes))


def steps_for(rate: float, seconds: float) -> int:
    """Steps that take about so long at that pace."""
    least, most = _STEPS
    return round(min(most, max(least, rate * seconds)))


def rows_too_many(shm_size: int | None, shm_free: int | None) -> int | None:
    """Rows of float images in a batch of which torch's loader cannot keep as many as it wants; None: not for show."""
    if shm_size is None or shm_free is None or shm_size > _LARGEST_TRIED:
        return None
    return max(1, int(shm_size * _TOO_MUCH / _QUEUED / (4 * ROW_BYTES)))


def _data(ram: int, engine: Engine, trainings: int, in_memory: bool) -> int:
    """The largest data of which every training may hold a copy."""
    left = (ram - _OWN) * _SHARE - trainings * _TRAINING[engine]
    return int(left / _copies(trainings, in_memory))


def _need(engine: Engine, trainings: int, in_memory: bool) -> int:
    held = trainings * _TRAINING[engine] + _copies(trainings, in_memory) * _SMALLEST
    return int(held / _SHARE + _OWN)


def _copies(trainings: int, in_memory: bool) -> int:
    return trainings + (_DISK_COPIES if in_memory else 0)
