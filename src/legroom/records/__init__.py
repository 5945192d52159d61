"""Frozen records, the only things that cross from one layer to another.

machine       the machine at one moment: memory pools, limits, processes, GPUs
findings      findings, a running job and what limits it, safe DataLoader settings
workload      what a job does and takes: loaders, needs, plans, measurements
settings      settings chosen for a job, with overrides and the environment variable
cache_entry   entries of the cache, what was removed, verification
gpu_usage     GPU limits, accounts, batch-size searches and estimates
watch_sample  samples, alarms and annotations of `legroom watch`
failure       evidence, verdicts and attempts of `legroom run`

Unknown is not zero: a number that could not be read is None, with the reason beside it, and no code may turn it into a
figure.
"""

from __future__ import annotations

from legroom.records.cache_entry import (
    Entry,
    EntryArray,
    EntryTable,
    EntryUser,
    Reaped,
    Shortfall,
    StoreRoom,
    Verification,
)
from legroom.records.findings import Finding, Job, LoaderSettings, Severity
from legroom.records.machine import (
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
from legroom.records.settings import Lever, Settings
from legroom.records.watch_sample import (
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
from legroom.records.workload import (
    Fit,
    Loader,
    Measured,
    Need,
    Plan,
    PlanRow,
    Problem,
    Sharing,
    ShmSizes,
    Term,
    Transport,
    Trial,
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
