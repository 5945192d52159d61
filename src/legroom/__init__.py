"""Memory room for training.

The public names, each imported when it is first used, so that ``import legroom`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legroom.cache.open import open
    from legroom.errors import LegroomError
    from legroom.model import Box
    from legroom.probe.box import snapshot

__version__ = "0.1.0.dev0"

__all__ = ["Box", "LegroomError", "__version__", "open", "snapshot"]

_HOMES = {
    "Box": "legroom.model",
    "LegroomError": "legroom.errors",
    "open": "legroom.cache.open",
    "snapshot": "legroom.probe.box",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'legroom' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
