"""Save and restore a training run.

    checkpoint.save("last.pt", model=model, optimizer=optimizer, batches=batches, step=step)
    kept = checkpoint.restore("last.pt", model=model, optimizer=optimizer, batches=batches)  # None: no such file

A checkpoint holds the state of everything with ``state_dict`` (models, optimizers, schedulers, ``data.batches``,
``legroom.stream``, ``legroom.DataLoader``), plain values and the random generators. Each rank saves its own file.

The file is written under a temporary name, synced and renamed: a process killed meanwhile leaves the previous one. It
holds tensors and plain values only and is loaded as such, so that a file from elsewhere cannot run code.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legroom.errors import UnreadableSource, UsageError
from legroom.messages import listed, say
from legroom.system.argument_checks import check_arguments

VERSION = 1
_KIND = "legroom_checkpoint"


def save(path: str | os.PathLike[str], **parts: Any) -> None:
    """Write a checkpoint: the state of parts that have one, other parts as they are, and the random generators.

    Args:
        path: The file; it is replaced completely or not at all.
        **parts: Models, optimizers, schedulers, batches, streams, loaders and plain values, by name.
    """
    import torch

    check_arguments(save, locals())
    states = {name: part.state_dict() for name, part in parts.items() if _has_state(part)}
    values = {name: part for name, part in parts.items() if name not in states}
    target = Path(path)
    scratch = target.with_name(f".{target.name}.part")  # a fixed name: overwrites what a killed save left
    try:
        with scratch.open("wb") as file:
            torch.save({_KIND: VERSION, "states": states, "values": values, "random": _random_states()}, file)
            file.flush()
            os.fsync(file.fileno())
        _require_loadable(scratch, {**states, **values})
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    _sync_folder(target.parent)


def restore(path: str | os.PathLike[str], **parts: Any) -> dict[str, Any] | None:
    """Restore the parts and the random generators; returns the plain values, or None if there is no such file.

    Args:
        path: The file that ``save`` wrote.
        **parts: The parts to restore, under the names they were saved with.
    """
    import torch

    check_arguments(restore, locals())
    target = Path(path)
    if not target.exists():
        return None
    try:
        kept = torch.load(target, map_location="cpu", weights_only=True)
    except Exception as problem:  # zip, pickle and torch raise different exceptions
        raise UnreadableSource(
            say("cannot load the checkpoint {path}", path=target),
            why=_why_refused(problem),
            fix=(say("restore an earlier checkpoint, or remove this one to start from scratch"),),
        ) from problem
    if not isinstance(kept, dict) or kept.get(_KIND) != VERSION:
        raise UsageError(
            say("{path} is not a Legroom checkpoint", path=target),
            why=say("it does not contain {kind}={version}", kind=_KIND, version=VERSION),
            fix=(say("load it with the program that wrote it"),),
        )
    there, here = (listed(sorted(names)) for names in (kept["states"], parts))
    if there != here:
        raise UsageError(
            say("the parts to restore do not match those in {path}", path=target),
            why=say("saved: {there}; to restore: {here}", there=there, here=here),
            fix=(say("pass the same names as to save()"),),
        )
    for name, part in parts.items():
        part.load_state_dict(kept["states"][name])
    _restore_random_states(kept["random"])
    values: dict[str, Any] = kept["values"]
    return values


def _require_loadable(path: Path, parts: Mapping[str, Any]) -> None:
    """UsageError if `restore` would refuse what was written. The tensors are mapped, not read."""
    problem = _refusal(path, mmap=True)
    if problem is None:
        return
    refused = [name for name, part in parts.items() if _refusal(_written(part)) is not None]
    raise UsageError(
        say("this checkpoint could not be restored: {names}", names=listed(refused or sorted(parts))),
        why=problem,
        fix=(say("pass tensors and plain values: for example float(x), x.tolist(), str(path)"),),
    )


def _written(part: Any) -> io.BytesIO:
    import torch

    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    return file


def _refusal(file: Path | io.BytesIO, *, mmap: bool = False) -> str | None:
    """Why torch does not load it without running code, or None."""
    import torch

    try:
        torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as problem:
        return _why_refused(problem)
    return None


def _why_refused(problem: Exception) -> str:
    """The type that torch refuses, which its message names after a paragraph of advice."""
    name = re.search(r"GLOBAL ([\w.]+)", str(problem))
    return say("{kind} is not a plain value", kind=name[1]) if name else str(problem).partition("\n")[0]


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _random_states() -> dict[str, Any]:
    """The states of all random generators that this program may use."""
    import torch

    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = (name, keys.tolist(), *rest)
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def _restore_random_states(states: dict[str, Any]) -> None:
    import torch

    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


def _sync_folder(folder: Path) -> None:
    """Sync the directory, so that the rename is on disk; skipped where directories cannot be opened."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(opened)
    except OSError:
        pass  # not supported by some filesystems
    finally:
        os.close(opened)
