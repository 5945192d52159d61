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
    Temporary,
)
from legroom.model.entry import (
    Entry,
    EntryArray,
    EntryTable,
    EntryUser,
    Reaped,
    Shortfall,
    StoreRoom,
    Verification,
)
from legroom.model.measured import Measured, Transport, Trial
from legroom.model.sample import (
    Alarm,
    AlarmLevel,
    AlarmSpan,
    Annotations,
    EntryRow,
    Mark,
    Moment,
    PoolPoint,
    ProcessRow,
    Sample,
)
from legroom.model.settings import Lever, Settings
from legroom.model.workload import (
    Fit,
    Loader,
    Need,
    Plan,
    PlanRow,
    Problem,
    Sharing,
    ShmSizes,
    Term,
    Workload,
)

__all__ = [
    "Alarm",
    "AlarmLevel",
    "AlarmSpan",
    "Annotations",
    "Box",
    "CgroupLevel",
    "Cpu",
    "Disk",
    "Entry",
    "EntryArray",
    "EntryRow",
    "EntryTable",
    "EntryUser",
    "Finding",
    "Fit",
    "Gpu",
    "GpuProcess",
    "Gpus",
    "Job",
    "Leftover",
    "Lever",
    "Limits",
    "Loader",
    "LoaderSettings",
    "Mark",
    "Measured",
    "Memory",
    "MemoryEvents",
    "Moment",
    "Need",
    "Place",
    "PlaceKind",
    "Plan",
    "PlanRow",
    "Pool",
    "PoolPoint",
    "Pressure",
    "Problem",
    "Process",
    "ProcessRow",
    "Reaped",
    "Sample",
    "Settings",
    "Severity",
    "Sharing",
    "Shm",
    "ShmSizes",
    "Shortfall",
    "StoreRoom",
    "Swap",
    "Temporary",
    "Term",
    "Transport",
    "Trial",
    "Verification",
    "Workload",
]
