"""Imports a dataset that is named ``module:object`` or ``file.py:object``, and finds out what kind it is.

A DataLoader stands for its dataset, with the settings that it was made with.

The import runs in a child process (measure_in_child.py, dataloader_trial.py), where it can do no harm.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, ismodule, signature
from pathlib import Path
from typing import Any, TypeGuard

from legroom.errors import BatchSizeNeeded, DatasetFailed, LegroomError, MissingKey, UsageError
from legroom.loader.measure.dataloader_trial import traceback_tail
from legroom.messages import listed, phrase, say
from legroom.system.lazy_and_optional_imports import require

_SHOWN = 10  # names of a module that are listed if the requested one is missing


def split_name(spec: str, *, collate: bool = False) -> tuple[str, str]:
    """Module or file, and the dotted name of the object in it; ``collate``: it is to be a collate function."""
    home, colon, name = spec.rpartition(":")
    if not colon or not home or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            say(
                "{spec!r} is not the name of a collate function"
                if collate
                else "{spec!r} is not the name of a dataset",
                spec=spec,
            ),
            why=say("a name is a module or a file, a colon, and an object in it"),
            fix=(
                say(
                    "for example data.faces:collate or train.py:collate"
                    if collate
                    else "for example data.faces:train_set or train.py:make_dataset"
                ),
            ),
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
    """A dataset, and the DataLoader that it was given as, if it was."""

    dataset: Any
    collate_fn: Callable[[Any], Any] | None  # None: torch's default_collate
    loader: Any = None

    @property
    def settings(self) -> dict[str, Any] | None:
        """The DataLoader's settings as JSON has them; None without a DataLoader."""
        return None if self.loader is None else loader_settings(self.loader)

    def rows(self) -> int | None:
        """Samples in an epoch of one rank, if a sampler of the user decides that; None: as many as the dataset has."""
        sampler = None if self.loader is None else _own_sampler(self.loader)
        if sampler is None:
            return None
        count = length(sampler)
        if count is None:
            return None
        if sampler is self.loader.batch_sampler:
            size = getattr(sampler, "batch_size", None)
            return count * size if _is_size(size) else None
        return count

    def trial_arguments(self, batch_size: int, kind: str) -> dict[str, Any]:
        """What a DataLoader with batches of this size takes over of the one that was given: no plain setting."""
        if self.loader is None:
            return {}
        found: dict[str, Any] = {"worker_init_fn": self.loader.worker_init_fn}
        if kind == "legroom" and _is_legrooms(self.loader):
            found["memory_budget"] = self.loader.memory_budget
        sampler = _own_sampler(self.loader)
        if sampler is not None and sampler is self.loader.batch_sampler:
            if getattr(sampler, "batch_size", None) == batch_size:
                return {**found, "batch_sampler": sampler}
        elif sampler is not None:
            found["sampler"] = sampler
        return {**found, "drop_last": _drops_last(self.loader)}


def open_loader(thing: Any, collate_fn: Callable[[Any], Any] | None = None) -> FoundDataset:
    """The dataset of a DataLoader, or the thing itself; a given collate function replaces that of the DataLoader."""
    torch_data = sys.modules.get("torch.utils.data")  # a DataLoader exists only where torch is imported
    if torch_data is None or not isinstance(thing, torch_data.DataLoader):
        return FoundDataset(thing, collate_fn)
    return FoundDataset(thing.dataset, collate_fn or _own_collate(thing), thing)


def _own_collate(loader: Any) -> Callable[[Any], Any] | None:
    """The collate function that the DataLoader was given; None: the default."""
    from torch.utils.data import default_collate, default_convert

    own: Any = loader.collate_fn
    if _is_legrooms(loader):  # which wraps it
        own = getattr(own, "fn", own)
    return None if own in (default_collate, default_convert) else own


def _is_legrooms(loader: Any) -> bool:
    return hasattr(loader, "memory_budget")


def loader_settings(loader: Any) -> dict[str, Any]:
    """The settings of a DataLoader by the name of the argument; functions and samplers by their own names."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    context, sampler = loader.multiprocessing_context, _own_sampler(loader)
    batches = sampler is not None and sampler is loader.batch_sampler
    return {
        "batch_size": int(size) if _is_size(size) else None,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
        "persistent_workers": bool(loader.persistent_workers),
        "pin_memory": bool(loader.pin_memory),
        "start_method": None if context is None else context.get_start_method(),
        "loader": "legroom" if _is_legrooms(loader) else "torch",
        "drop_last": _drops_last(loader),
        "batch_sampler": name_of(sampler) if batches else None,
        "sampler": None if batches else name_of(sampler),
        "worker_init_fn": name_of(loader.worker_init_fn),
        "collate_fn": name_of(_own_collate(loader)),
    }


def _drops_last(loader: Any) -> bool:
    if loader.batch_size is not None:
        return bool(loader.drop_last)
    return bool(getattr(loader.batch_sampler, "drop_last", False))


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def name_of(thing: Any) -> Any:
    """A plain setting as it is, a function by its name, any other object by that of its class."""
    if thing is None or isinstance(thing, (bool, int, str)):
        return thing
    return str(getattr(thing, "__name__", type(thing).__name__))


def _own_sampler(loader: Any) -> Any:
    """The sampler or batch sampler that decides which samples an epoch has; None: each of the dataset once."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    if is_iterable(loader.dataset):
        return None
    sampler = loader.sampler
    if loader.batch_size is None:
        if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
            return loader.batch_sampler
        sampler = getattr(loader.batch_sampler, "sampler", None)
    if sampler is None or type(sampler) is SequentialSampler:
        return None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length(loader.dataset):
        return None
    return sampler


def chosen_batch_size(given: int | None, settings: Mapping[str, Any] | None) -> int:
    """The batch size: given, or that of the DataLoader with these settings."""
    if given is not None:
        return given
    if settings is None:
        raise BatchSizeNeeded(
            say("the batch size is missing"),
            why=say("only a DataLoader has one, and this is not a DataLoader"),
            fix=(say("pass batch_size="),),
        )
    if settings["batch_size"] is not None:
        return int(settings["batch_size"])
    if settings["batch_sampler"] is not None:
        raise BatchSizeNeeded(
            say("the DataLoader has a batch_sampler without a batch_size"),
            why=say("{name} decides how many samples a batch has", name=settings["batch_sampler"]),
            fix=(say("pass the number of samples in its largest batch: batch_size="),),
        )
    raise BatchSizeNeeded(
        say("the DataLoader makes no batches: its batch_size is None"),
        why=say("its dataset returns whole batches"),
        fix=(say("pass the dataset instead, with a batch size of 1 and a collate_fn that returns its one sample"),),
    )


def find_dataset(spec: str, collate: str | None) -> FoundDataset:
    """The dataset of a name: the object, what it returns when called without arguments, or that of a DataLoader."""
    thing = import_object(spec)
    if isinstance(thing, type) or (callable(thing) and not _draws(thing)):
        thing = _called(thing, spec)
    chosen = import_object(collate) if collate else None
    require("torch.utils.data", "torch", phrase("measuring a dataset"))
    found = open_loader(thing, chosen)
    if found.loader is not None:
        return found
    if not _draws(thing):
        raise CannotImport(
            say("{spec} is not a dataset", spec=spec),
            why=say("an object of type {kind} has neither __getitem__ nor __iter__", kind=type(thing).__name__),
            fix=(say("pass a dataset, a function that returns one, or a DataLoader"),),
        )
    return found


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
