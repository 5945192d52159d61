"""Imports at first use, optional packages, and their versions.

A thread that imports holds the module's lock. A child forked at that moment inherits the lock, held by a thread that
it does not have, and its own import of the module waits for ever. So a fork waits for `lazy_import` to finish.

`lazy_import` is for Legroom's own modules only. Packages such as h5py take locks of their own before a fork: a fork
that holds those and waits for their import would never end. A fork runs what was registered last first: `logging`,
whose lock any module takes that asks for a logger, is imported here so that a fork takes its lock after this one.
Hooks that are registered while a fork waits run after it without having run before it, and would release a lock that is
not held: `concurrent.futures.thread`, which many modules import, is here for that reason. What is imported next may be
a package with such hooks, so a fork that has waited goes first.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - registers its lock before import_lock, as logging does
import logging  # noqa: F401
import os
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from legroom.errors import MissingPackage
from legroom.messages import say

# What each extra installs, as in pyproject.toml, which a test compares. Advice names these packages,
# which is right for every installation: how to name an extra depends on where Legroom was installed from.
EXTRAS = {
    "torch": "torch",
    "parquet": "pyarrow",
    "zarr": "zarr",
    "hash": "blake3 xxhash",
    "plugins": "hdf5plugin",
    "watch": "textual",
    "plot": "matplotlib",
    "remote": "aiohttp fsspec s3fs",
    "ray": "ray",
}
import_lock = threading.RLock()  # held by every import at first use, and by a fork
_forks: list[int] = []  # an item for each fork that waits for the lock, or has it


def _before_fork() -> None:
    _forks.append(1)
    import_lock.acquire()


def _after_fork() -> None:
    if _forks:  # none in a fork that had begun when this was registered
        import_lock.release()
        _forks.pop()


def _after_fork_in_child() -> None:
    if _forks:
        import_lock.release()
    _forks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def lazy_import(name: str) -> ModuleType:
    """Import one of Legroom's modules now, unless it is imported already."""
    with import_lock:
        found = import_module(name)
    _let_forks_pass()
    return found


def _let_forks_pass() -> None:
    while _forks and not import_lock._is_owned():  # type: ignore[attr-defined]
        time.sleep(0.001)


def package_version(name: str) -> str | None:
    """The version of an installed package, by its metadata; nothing is imported."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError, OSError):
        return None


def require(module: str, extra: str, what: str, *, package: str | None = None, instead: Sequence[str] = ()) -> Any:
    """Import an optional package, or raise MissingPackage with the command that installs it.

    Args:
        module: What to import: ``pyarrow.parquet``.
        extra: The extra of Legroom that needs it, for the packages in ``EXTRAS``; unused where ``package`` is given.
        what: What needs it, for the error: ``phrase("reading Parquet")``.
        package: What pip installs, where no extra of Legroom has it: ``transformers``.
        instead: Ways to do without it, templates as well.
    """
    _let_forks_pass()
    try:
        return import_module(module)
    except ImportError as problem:
        raise MissingPackage(
            say("the package {package} is needed for {what}", package=module.partition(".")[0], what=say(what)),
            why=str(problem),
            fix=(f"pip install {package or EXTRAS[extra]}", *map(say, instead)),
        ) from problem
