"""Checkpoints from which a training goes on as if nothing had happened.

    checkpoint.save("last.pt", model=model, optimizer=optimizer, batches=batches, step=step)
    kept = checkpoint.restore("last.pt", model=model, optimizer=optimizer, batches=batches)   # None: there is none

Covers: the state of everything that has ``state_dict`` (models, optimizers, schedulers, ``data.batches``,
``legroom.stream``, ``legroom.DataLoader``), plain values, the random generators; a file that is whole or not there.
Does not cover: when to save, which files to keep, states divided among ranks: each rank saves its own file.

The file is written beside its place, brought to the disk, and renamed: whoever is killed meanwhile leaves the one
before. It holds tensors and plain values only and is loaded as such, so that a file from elsewhere runs no code.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

from legroom.errors import UnreadableSource, UsageError
from legroom.words import listed, say

VERSION = 1
_KIND = "legroom_checkpoint"


def save(path: str | os.PathLike[str], **parts: Any) -> None:
    """Write the checkpoint: states of parts that have one, the others as they are, and the random generators.

    Args:
        path: The file; it is replaced as a whole, or not at all.
        **parts: By name: models, optimizers, schedulers, batches, streams and loaders, and plain values.
    """
    import torch

    states = {name: part.state_dict() for name, part in parts.items() if _has_state(part)}
    values = {name: part for name, part in parts.items() if name not in states}
    place = Path(path)
    scratch = place.with_name(f".{place.name}.part")  # one name: what a killed save left is written over
    try:
        with scratch.open("wb") as file:
            torch.save({_KIND: VERSION, "states": states, "values": values, "random": _random()}, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(place)
    finally:
        scratch.unlink(missing_ok=True)
    _settle(place.parent)


def restore(path: str | os.PathLike[str], **parts: Any) -> dict[str, Any] | None:
    """Bring the parts and the random generators to where they were; the plain values, or None without such a file.

    Args:
        path: The file that ``save`` wrote.
        **parts: What was saved under the same names, to be brought back.
    """
    import torch

    place = Path(path)
    if not place.exists():
        return None
    try:
        kept = torch.load(place, map_location="cpu", weights_only=True)
    except Exception as problem:  # zip, pickle, torch: each says it in its own way
        raise UnreadableSource(
            say("{path} cannot be read as a checkpoint", path=place),
            why=str(problem).partition("\n")[0],
            fix=(say("remove it to begin anew"),),
        ) from problem
    if not isinstance(kept, dict) or kept.get(_KIND) != VERSION:
        raise UsageError(
            say("{path} is no checkpoint of this kind", path=place),
            why=say("it should hold {kind}={version}", kind=_KIND, version=VERSION),
            fix=(say("load it with what wrote it"),),
        )
    there, here = (listed(sorted(names)) for names in (kept["states"], parts))
    if there != here:
        raise UsageError(
            say("{path} holds other parts than are to be restored", path=place),
            why=say("there: {there}; here: {here}", there=there, here=here),
            fix=(say("name the same parts as when it was saved"),),
        )
    for name, part in parts.items():
        part.load_state_dict(kept["states"][name])
    _reset(kept["random"])
    values: dict[str, Any] = kept["values"]
    return values


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _random() -> dict[str, Any]:
    """Every generator that this program can have drawn from."""
    import torch

    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = (name, keys.tolist(), *rest)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def _reset(states: dict[str, Any]) -> None:
    import torch

    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


def _settle(folder: Path) -> None:
    """The rename itself reaches the disk with its directory; where directories cannot be opened, it does so later."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(opened)
    except OSError:
        pass  # some filesystems cannot
    finally:
        os.close(opened)
