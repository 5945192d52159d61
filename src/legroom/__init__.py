"""Memory tools for PyTorch training.

The public names, each imported when it is first used, so that ``import legroom`` costs nothing. Packages,
from the top layer down:

__main__      `python -m legroom`
testing       tests for readers of data formats, to subclass
cli           the command line: one file per command
demo          `legroom demo`
integrations  adapters for Lightning, Hugging Face, Accelerate, DeepSpeed and Ray
report        the bundle of `legroom report`
rescue        `legroom run`: supervise a job, diagnose why it failed, retry with lower settings
leak          `legroom leak`: which lines make memory grow
loader        the DataLoader, data.batches, streams; check, plan, tune
monitor       `legroom watch`: samples, alarms, outputs
cache         one copy of a dataset for all processes
gpu           GPU memory: limit, account, batch size, out-of-memory
advice        pure decisions: findings, fixes, memory needs, settings
probe         read facts about this machine
formats       read data files
charts        charts and pages
remote        read objects over HTTP and from object stores
records       frozen records that pass between layers
system        what several packages need of the operating system and of Python
units         sizes and durations as text, and back
errors        every error with its code
messages      message templates, languages, text columns
version       the version
"""

from __future__ import annotations

import sys

from legroom.version import VERSION

if "threading" in sys.modules:
    # A child forked while another thread imports cannot import the same: see there. Not imported otherwise, because it
    # takes 10 ms of `legroom --help`.
    from legroom.system import lazy_and_optional_imports as _imports  # noqa: F401

# Type checkers treat this name as true; importing typing would take ten times as long as the rest here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from legroom import errors as errors
    from legroom import gpu, leak
    from legroom.cache.freeze import freeze, freeze_dataset
    from legroom.errors import LegroomError
    from legroom.loader.batches.legroom_open import Data, open
    from legroom.loader.dataloader.collate import collate
    from legroom.loader.dataloader.dataloader import DataLoader
    from legroom.loader.legroom_check import check
    from legroom.loader.legroom_plan import plan
    from legroom.loader.shared_model_weights import weights
    from legroom.loader.stream.stream_dataset import stream
    from legroom.loader.tune.legroom_tune import tune
    from legroom.monitor.watch_in_script import watch
    from legroom.probe.legroom_available import available
    from legroom.probe.snapshot import snapshot
    from legroom.records.machine import Machine
    from legroom.system.training_step_listeners import step

__version__ = VERSION

__all__ = [
    "Data",
    "DataLoader",
    "LegroomError",
    "Machine",
    "__version__",
    "available",
    "check",
    "collate",
    "freeze",
    "freeze_dataset",
    "gpu",
    "leak",
    "open",
    "plan",
    "snapshot",
    "step",
    "stream",
    "tune",
    "watch",
    "weights",
]

_HOMES = {
    "Data": "legroom.loader.batches.legroom_open",
    "DataLoader": "legroom.loader.dataloader.dataloader",
    "collate": "legroom.loader.dataloader.collate",
    "check": "legroom.loader.legroom_check",
    "plan": "legroom.loader.legroom_plan",
    "available": "legroom.probe.legroom_available",
    "freeze": "legroom.cache.freeze",
    "freeze_dataset": "legroom.cache.freeze",
    "Machine": "legroom.records.machine",
    "LegroomError": "legroom.errors",
    "gpu": "legroom.gpu",
    "leak": "legroom.leak",
    "open": "legroom.loader.batches.legroom_open",
    "snapshot": "legroom.probe.snapshot",
    "step": "legroom.system.training_step_listeners",
    "stream": "legroom.loader.stream.stream_dataset",
    "tune": "legroom.loader.tune.legroom_tune",
    "watch": "legroom.monitor.watch_in_script",
    "weights": "legroom.loader.shared_model_weights",
}


def __getattr__(name: str) -> object:
    home = "legroom.errors" if name == "errors" else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'legroom' has no attribute {name!r}")
    from legroom.system.lazy_and_optional_imports import lazy_import

    module = lazy_import(home)
    # A package is itself the public name; anything else is an attribute of its module.
    value = globals()[name] = module if home == f"legroom.{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
