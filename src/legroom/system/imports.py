"""Imports at first use, and optional packages.

A thread that imports holds the module's lock. A child forked at that moment inherits the lock, held by a thread that
it does not have, and its own import of the module waits for ever. So a fork waits for `lazy_import` to finish.

`lazy_import` is for Legroom's own modules only. Packages such as h5py take locks of their own before a fork: a fork
that holds those and waits for their import would never end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from legroom.errors import MissingPackage
from legroom.words import say

import_lock = threading.RLock()  # held by every import at first use, and by a fork

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=import_lock.acquire, after_in_parent=import_lock.release, after_in_child=import_lock.release
    )


def lazy_import(name: str) -> ModuleType:
    """Import one of Legroom's modules now, unless it is imported already."""
    with import_lock:
        return import_module(name)


def require(
    module: str, extra: str, what: str, *, package: str | None = None, instead: Sequence[str] = ()
) -> Any:
    """Import an optional package, or raise MissingPackage with the command that installs it.

    Args:
        module: What to import: ``pyarrow.parquet``.
        extra: The extra of Legroom that installs it; unused where ``package`` is given.
        what: What needs it, for the error: ``reading Parquet``.
        package: What pip installs, where no extra of Legroom has it: ``transformers``.
        instead: Ways to do without it.
    """
    try:
        return import_module(module)
    except ImportError as problem:
        raise MissingPackage(
            say("the package {package} is needed for {what}", package=module.partition(".")[0], what=what),
            why=str(problem),
            fix=(f"pip install {package}" if package else f"pip install 'legroom[{extra}]'", *instead),
        ) from problem
