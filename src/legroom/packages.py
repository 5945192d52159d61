"""Optional packages: import one, or raise MissingPackage with the command that installs it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from legroom.errors import MissingPackage
from legroom.words import say


def require(
    module: str, extra: str, what: str, *, package: str | None = None, instead: Sequence[str] = ()
) -> Any:
    """The module, which ``what`` needs.

    Args:
        module: What to import: ``pyarrow.parquet``.
        extra: The extra of Legroom that installs it; unused where ``package`` is given.
        what: What it is needed for, for the error: ``reading Parquet``.
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
