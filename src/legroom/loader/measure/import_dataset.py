"""Imports a dataset that is named ``module:object`` or ``file.py:object``, and finds out what kind it is.

The import runs in a child process (measure_dataset_in_child.py, dataloader_trial.py), where it can do no harm.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, ismodule, signature
from pathlib import Path
from typing import Any

from legroom.errors import DatasetFailed, LegroomError, MissingKey, UsageError
from legroom.loader.measure.dataloader_trial import traceback_tail
from legroom.messages import listed, phrase, say
from legroom.system.lazy_and_optional_imports import require

_SHOWN = 10  # names of a module that are listed if the requested one is missing


def split_name(spec: str) -> tuple[str, str]:
    """Module or file, and the dotted name of the object in it."""
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            say("{spec!r} is not the name of a dataset", spec=spec),
            why=say("a name is a module or a file, a colon, and an object in it"),
            fix=(say("for example data.faces:train_set or train.py:make_dataset"),),
        )
    return home, name


def import_object(spec: str) -> Any:
    """Import the object; the module may run any code."""
    home, name = split_name(spec)
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
        why=say("its names are: {shown}", shown=listed(there[:_SHOWN]) or say("none")),
        fix=tuple(say("did you mean {near!r}?", near=one) for one in near)
        or (say("pass module:object with an object of this module"),),
    )


def _no_file(home: str) -> MissingKey:
    return MissingKey(
        say("there is no file {home}", home=home),
        why=say("the current directory is {cwd}", cwd=os.getcwd()),
        fix=(say("check the path: path/to/data.py:train_set, relative to the current directory"),),
    )


def _no_module(home: str) -> MissingKey:
    return MissingKey(
        say("there is no module {home}", home=home),
        why=say("the current directory is {cwd}", cwd=os.getcwd()),
        fix=(say("change to the directory of the module, or pass its file: path/to/data.py:train_set"),),
    )


class CannotImport(Exception):
    """A module that cannot be imported, or an object in it that is not a dataset and makes none; nothing was loaded."""

    def __init__(self, what: str, *, why: str, fix: tuple[str, ...]) -> None:
        self.error = DatasetFailed(what, why=why, fix=fix)
        super().__init__(str(self.error))


def _why(problem: BaseException) -> str:
    return "\n".join(traceback_tail(problem))


def _module(home: str) -> Any:
    """The module; what its own code raises is a CannotImport that shows the lines of that code."""
    try:
        return _imported(home)
    except LegroomError:  # also one of legroom.open in that module: it says what to do
        raise
    except SystemExit as problem:
        fix = say("a module that exits while it is imported needs an `if __name__ == '__main__':` guard")
        raise CannotImport(_import_failed(home), why=_why(problem), fix=(fix,)) from problem
    except Exception as problem:  # any exception of the user's code
        raise CannotImport(_import_failed(home), why=_why(problem), fix=(_import_fix(home, problem),)) from problem


def _import_failed(home: str) -> str:
    return say("importing {home} failed", home=home)


def _import_fix(home: str, problem: Exception) -> str:
    if isinstance(problem, ModuleNotFoundError) and problem.name:
        return say("install {name} for {python}, or add its directory to PYTHONPATH",
                   name=problem.name.partition(".")[0], python=sys.executable)  # fmt: skip
    if isinstance(problem, SyntaxError) and problem.filename:
        return say("correct the syntax at {place}", place=f"{problem.filename}:{problem.lineno}")
    folder, name = ("", home) if not home.endswith(".py") else (os.path.dirname(home) or ".", Path(home).stem)
    set_path = f"PYTHONPATH={shlex.quote(folder)} " if folder else ""
    return say("first make the import work by itself:\n{command_line}",
               command_line=f"{set_path}python -c {shlex.quote(f'import {name}')}")  # fmt: skip


def _imported(home: str) -> Any:
    if not home.endswith(".py"):
        try:
            return importlib.import_module(home)
        except ModuleNotFoundError as problem:
            # Not a module that it imports.
            if problem.name is None or not (home + ".").startswith(problem.name + "."):
                raise
            raise _no_module(home) from None
    path = Path(home).resolve()
    if not path.exists():
        raise _no_file(home)
    # Not __main__: so a script's guard keeps its training from starting. Spawned workers import it by name.
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
class FoundDataset:
    """A dataset and its collate function; None: torch's default_collate."""

    dataset: Any
    collate_fn: Callable[[Any], Any] | None


def find_dataset(spec: str, collate: str | None) -> FoundDataset:
    """The dataset of a name: the object, what it returns when called without arguments, or that of a DataLoader."""
    thing = import_object(spec)
    if isinstance(thing, type) or (callable(thing) and not _draws(thing)):
        thing = _called(thing, spec)
    chosen = import_object(collate) if collate else None
    if isinstance(thing, require("torch.utils.data", "torch", phrase("measuring a dataset")).DataLoader):
        return FoundDataset(thing.dataset, chosen or thing.collate_fn)
    if not _draws(thing):
        raise CannotImport(
            say("{spec} is not a dataset", spec=spec),
            why=say("an object of type {kind} has neither __getitem__ nor __iter__", kind=type(thing).__name__),
            fix=(say("pass a dataset, a function that returns one, or a DataLoader"),),
        )
    return FoundDataset(thing, chosen)


def _called(factory: Callable[..., Any], spec: str) -> Any:
    """What a function or class returns that takes no arguments."""
    try:
        needed = [
            parameter.name for parameter in signature(factory).parameters.values()
            if parameter.default is Parameter.empty
            and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        ]  # fmt: skip
    except (TypeError, ValueError):  # of native code, which does not say
        needed = []
    if needed:
        raise CannotImport(
            say("{spec} cannot be called without arguments", spec=spec),
            why=say("it requires: {names}", names=listed(needed)),
            fix=(say("pass a function without required arguments that returns the dataset"),),
        )
    try:
        return factory()
    except LegroomError:
        raise
    except (Exception, SystemExit) as problem:  # any exception of the user's code
        home, name = split_name(spec)
        fix = say("first make {name}() of {home} work by itself", name=name, home=home)
        raise CannotImport(say("calling {spec} failed", spec=spec), why=_why(problem), fix=(fix,)) from problem


def _draws(thing: Any) -> bool:
    return any(hasattr(type(thing), name) for name in ("__getitem__", "__getitems__", "__iter__"))


def length(dataset: Any) -> int | None:
    """Number of samples; None if the dataset does not define it."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
    except Exception:
        if is_iterable(dataset):  # a DataLoader never calls it
            return None
        raise


def is_iterable(dataset: Any) -> bool:
    """Whether it can only be iterated over: torch's IterableDataset has a ``__getitem__`` too, which raises."""
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):
        return True
    return not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__")
