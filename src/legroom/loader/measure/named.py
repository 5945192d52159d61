"""A dataset named on the command line: ``module:object`` or ``file.py:object``.

Covers: reading the name, importing it, and what the object may be. Does not cover: running any of it safely, which is
the child's job (measure/child.py) and its watcher's (apart.py).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import ismodule
from pathlib import Path
from typing import Any

from legroom.errors import MissingKey, UsageError
from legroom.system.imports import require
from legroom.words import listed, say

_SHOWN = 10  # names of a module, where one that is asked for is not there


def split(spec: str) -> tuple[str, str]:
    """Module or file, and the object's dotted name in it."""
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            say("cannot read {spec!r} as the name of a dataset", spec=spec),
            why=say("it is a module or a file, a colon, and an object in it"),
            fix=(say("write it like data.faces:train_set or train.py:make_dataset"),),
        )
    return home, name


def load(spec: str) -> Any:
    """The object itself; importing may do anything at all."""
    home, name = split(spec)
    found: Any = _module(home)
    where = home
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise _no_object(where, part, found) from None
        where += ("." if ":" in where else ":") + part
    return found


def _no_object(where: str, name: str, found: Any) -> MissingKey:
    there = [one for one in dir(found) if not one.startswith("_") and not ismodule(getattr(found, one, None))]
    near = difflib.get_close_matches(name, there, n=3, cutoff=0.5)
    return MissingKey(
        say("{where} has no {key!r}", where=where, key=name),
        why=say("it holds {shown}", shown=listed(there[:_SHOWN]) or say("nothing")),
        fix=tuple(say("did you mean {near!r}?", near=one) for one in near)
        or (say("name an object of it, as module:object"),),
    )


def _no_module(home: str) -> MissingKey:
    return MissingKey(
        say("there is no module {home}", home=home),
        why=say("it is looked for from {cwd} on", cwd=os.getcwd()),
        fix=(say("go to the directory it lies in, or name its file: path/to/data.py:train_set"),),
    )


def _module(home: str) -> Any:
    if not home.endswith(".py"):
        try:
            return importlib.import_module(home)
        except ModuleNotFoundError as problem:
            # One that it imports is another matter.
            if problem.name is None or not (home + ".").startswith(problem.name + "."):
                raise
            raise _no_module(home) from None
    path = Path(home).resolve()
    if not path.exists():
        raise _no_module(home)
    # Not __main__: a script's own guard keeps its training from starting. Workers that are spawned import by name.
    name = path.stem
    described = importlib.util.spec_from_file_location(name, path)
    if described is None or described.loader is None:
        raise ImportError(say("cannot import {home}", home=home))
    module = importlib.util.module_from_spec(described)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    described.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class Found:
    """A dataset and the collate that goes with it; None: torch's own."""

    dataset: Any
    collate_fn: Callable[[Any], Any] | None


def resolve(spec: str, collate: str | None) -> Found:
    """The dataset behind a name: the object, what it returns when called without arguments, or a loader's own."""
    thing = load(spec)
    if isinstance(thing, type) or (callable(thing) and not _draws(thing)):
        thing = thing()
    chosen = load(collate) if collate else None
    if isinstance(thing, require("torch.utils.data", "torch", say("drawing from a dataset")).DataLoader):
        return Found(thing.dataset, chosen or thing.collate_fn)
    if not _draws(thing):
        raise TypeError(
            say(
                "{spec} is a {kind}, which has neither __getitem__ nor __iter__",
                spec=spec,
                kind=type(thing).__name__,
            )
        )
    return Found(thing, chosen)


def _draws(thing: Any) -> bool:
    return any(hasattr(type(thing), name) for name in ("__getitem__", "__getitems__", "__iter__"))
