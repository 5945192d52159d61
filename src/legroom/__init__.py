"""Memory room for training.

The public names, each imported when it is first used, so that ``import legroom`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module

from legroom.version import VERSION

# By its name checkers take it as true; importing typing's would take ten times as long as all the rest here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from legroom import gpu
    from legroom.errors import LegroomError
    from legroom.loader.batches.open_data import open
    from legroom.loader.collate import collate
    from legroom.loader.dataloader import DataLoader
    from legroom.loader.planning import plan
    from legroom.loader.preflight import check
    from legroom.loader.stream.stream_dataset import stream
    from legroom.loader.tune.tuning import tune
    from legroom.monitor.script import watch
    from legroom.probe.snapshot import snapshot
    from legroom.records import Box

__version__ = VERSION

__all__ = [
    "Box",
    "DataLoader",
    "LegroomError",
    "__version__",
    "check",
    "collate",
    "gpu",
    "open",
    "plan",
    "snapshot",
    "stream",
    "tune",
    "watch",
]

_HOMES = {
    "DataLoader": "legroom.loader.dataloader",
    "collate": "legroom.loader.collate",
    "check": "legroom.loader.preflight",
    "plan": "legroom.loader.planning",
    "Box": "legroom.records",
    "LegroomError": "legroom.errors",
    "gpu": "legroom.gpu",
    "open": "legroom.loader.batches.open_data",
    "snapshot": "legroom.probe.snapshot",
    "stream": "legroom.loader.stream.stream_dataset",
    "tune": "legroom.loader.tune.tuning",
    "watch": "legroom.monitor.script",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'legroom' has no attribute {name!r}")
    module = import_module(home)
    # A package is a name of its own; anything else lies in its module.
    value = globals()[name] = module if home == f"legroom.{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
