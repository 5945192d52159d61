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

# ruff: noqa: F403, F405
from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legroom.records.cache_entry import *
    from legroom.records.failure import *
    from legroom.records.finding_and_alarm import *
    from legroom.records.gpu_results import *
    from legroom.records.loader_settings_and_flags import *
    from legroom.records.machine import *
    from legroom.records.memory_growth import *
    from legroom.records.node_results import *
    from legroom.records.settings_and_overrides import *
    from legroom.records.watch_sample import *
    from legroom.records.workload import *


def __getattr__(name: str) -> object:
    # For users. Legroom itself imports from the modules: making the classes of all takes 40 ms.
    if name[:1].isupper():
        for module in pkgutil.iter_modules(__path__, f"{__name__}."):
            if hasattr(found := import_module(module.name), name):
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
