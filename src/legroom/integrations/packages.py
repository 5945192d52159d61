"""Frameworks that may not be installed. Covers: importing one, or saying which to install. Does not cover: using it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from legroom.errors import MissingPackage
from legroom.words import say


def framework(module: str, package: str) -> Any:
    """Import a framework's module, or MissingPackage with the package to install."""
    try:
        return import_module(module)
    except ImportError as problem:
        raise MissingPackage(
            say("this callback needs {package}", package=package),
            why=str(problem),
            fix=(say("pip install {package}", package=package),),
        ) from problem
