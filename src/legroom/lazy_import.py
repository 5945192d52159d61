"""Modules that are imported at first use: whole before any fork.

A thread that imports holds the module's lock. A child forked in that moment has the lock too, held by a thread it does
not have: its own import of the module would wait for ever. Forks wait for these imports instead.

For Legroom's own modules only. Packages such as h5py take locks of their own before a fork; a fork that holds those and
waits for their import would never end.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from types import ModuleType

importing = threading.RLock()  # held by every import at first use, and by a fork

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=importing.acquire, after_in_parent=importing.release, after_in_child=importing.release
    )


def lazily(name: str) -> ModuleType:
    """The module of that name, imported now where it has not been."""
    with importing:
        return import_module(name)
