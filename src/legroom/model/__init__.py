"""The nouns: frozen records, the only things that cross from one layer to another.

Covers: what is known about a box at one moment, and what is said about it. Does not cover: reading it
(probe), judging it (budget), printing it (cli).

Unknown is not zero. A number that could not be read is None, and ``reason`` beside it says why in words;
nothing downstream may turn that None into a figure.
"""

from __future__ import annotations

from legroom.model.advice import (
    Finding,
    Job,
    LoaderSettings,
    Severity,
)
from legroom.model.box import (
    Box,
    CgroupLevel,
    Cpu,
    Disk,
    Gpu,
    GpuProcess,
    Gpus,
    Leftover,
    Limits,
    Memory,
    MemoryEvents,
    Place,
    PlaceKind,
    Pool,
    Pressure,
    Process,
    Shm,
    Swap,
)
from legroom.model.entry import (
    Entry,
    EntryArray,
    EntryTable,
    EntryUser,
    Reaped,
    StoreRoom,
    Verification,
)

__all__ = [
    "Box",
    "CgroupLevel",
    "Cpu",
    "Disk",
    "Entry",
    "EntryArray",
    "EntryTable",
    "EntryUser",
    "Finding",
    "Gpu",
    "GpuProcess",
    "Gpus",
    "Job",
    "Leftover",
    "Limits",
    "LoaderSettings",
    "Memory",
    "MemoryEvents",
    "Place",
    "PlaceKind",
    "Pool",
    "Pressure",
    "Process",
    "Reaped",
    "Severity",
    "Shm",
    "StoreRoom",
    "Swap",
    "Verification",
]
