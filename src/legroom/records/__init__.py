"""Frozen records: the only data that is passed between layers.

- machine: the machine at one moment: memory pools, limits, processes, GPUs
- finding_and_alarm: a finding about the machine or a job, an alarm of `legroom watch`
- workload: what a job does and takes: loaders, needs, plans, measurements; a running job
- loader_settings_and_flags: DataLoader settings under torch's names, from the environment or a script's command line
- settings_and_overrides: settings chosen for a job, with reasons and overrides
- cache_entry: entries of the cache, what was removed, verification
- node_results: what happened on each node of a cluster
- gpu_results: GPU limits, accounts, batch-size searches and estimates
- memory_growth: the lines that make memory grow, as `legroom leak` found them
- watch_sample: samples and annotations of `legroom watch`; which alarms were active when
- failure: evidence, verdicts and attempts of `legroom run`

Unknown is not zero: a number that could not be read is None, with the reason beside it, and no code may turn it into a
figure.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from legroom.records.finding_and_alarm import Alarm, AlarmLevel, Finding, Severity
    from legroom.records.loader_settings_and_flags import (
        CompleteLoaderSettings,
        LoaderKind,
        LoaderSettings,
        SafeSettings,
    )
    from legroom.records.machine import (
        Available,
        CgroupLevel,
        Cpu,
        Disk,
        Gpu,
        GpuProcess,
        Gpus,
        Leftover,
        Limits,
        Machine,
        Memory,
        MemoryEvents,
        Pool,
        Pressure,
        Process,
        RuntimeEnvironment,
        RuntimeKind,
        Shm,
        Swap,
        Temporary,
    )
    from legroom.records.settings_and_overrides import Lever, Settings
    from legroom.records.watch_sample import (
        AlarmSpan,
        Annotations,
        EntryRow,
        GpuCopyRow,
        GroupRow,
        GrowthRow,
        Mark,
        Moment,
        PoolPoint,
        ProcessRow,
        ProcessSteps,
        Sample,
        TrainerRow,
    )
    from legroom.records.workload import (
        CopiedAttribute,
        Fit,
        Job,
        LoaderTrial,
        Measured,
        Need,
        Plan,
        PlannedLoader,
        PlanRow,
        Problem,
        Sharing,
        ShmSizes,
        Term,
        Transport,
        Workload,
    )

__all__ = [
    "Alarm",
    "AlarmLevel",
    "AlarmSpan",
    "Annotations",
    "Available",
    "CgroupLevel",
    "CompleteLoaderSettings",
    "CopiedAttribute",
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
    "GpuCopyRow",
    "GpuProcess",
    "Gpus",
    "GroupRow",
    "GrowthRow",
    "Job",
    "Leftover",
    "Lever",
    "Limits",
    "LoaderKind",
    "LoaderSettings",
    "LoaderTrial",
    "Machine",
    "Mark",
    "Measured",
    "Memory",
    "MemoryEvents",
    "Moment",
    "Need",
    "Plan",
    "PlanRow",
    "PlannedLoader",
    "Pool",
    "PoolPoint",
    "Pressure",
    "Problem",
    "Process",
    "ProcessRow",
    "ProcessSteps",
    "Reaped",
    "RuntimeEnvironment",
    "RuntimeKind",
    "SafeSettings",
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
    "TrainerRow",
    "Transport",
    "Verification",
    "Workload",
]


def __getattr__(name: str) -> object:
    # For users. Legroom itself imports from the modules: making the classes of all takes 40 ms.
    if name in __all__:
        for module in pkgutil.iter_modules(__path__, f"{__name__}."):
            if hasattr(found := import_module(module.name), name):
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
