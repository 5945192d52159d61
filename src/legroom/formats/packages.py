"""Optional packages, and the words for one that is not installed.

Covers: pyarrow and zarr. Does not cover: hdf5plugin, which single datasets need and hdf5_filters.py looks for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from legroom.errors import MissingPackage
from legroom.words import say


def require(package: str, extra: str, what: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return import_module(package)
    except ImportError as problem:
        raise MissingPackage(
            say("reading {what} needs the package {package}", what=what, package=package.partition(".")[0]),
            why=str(problem),
            fix=(say("pip install 'legroom[{extra}]'", extra=extra),),
        ) from problem
