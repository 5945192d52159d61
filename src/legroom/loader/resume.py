"""Going on in the middle of an epoch: where it stood, and the rest of it.

Covers: what a loader's state holds, replaying the order, skipping what has been given out. Does not cover: the loader
(dataloader.py).

The order of a map-style dataset is drawn at the start of an epoch from torch's generators. So their states at that
moment, and how many batches have been given out since, are all there is to remember: the order is drawn again and its
beginning left out, without reading a sample of it. Of an IterableDataset only its own ``state_dict`` can tell; without
one, the batches given out are produced again and dropped.

Random numbers that samples draw in workers go on from the seeds of the epoch's start, not from where the interrupted
run's workers stood.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from legroom.errors import UsageError
from legroom.words import say

if TYPE_CHECKING:
    import torch

VERSION = 1
_DEFAULT = "default"  # torch's own generator, which the program uses too


class Progress:
    """How far one pass over a loader has come."""

    def __init__(
        self, generators: dict[str, Any], yielded: int = 0, workers: dict[int, bytes] | None = None
    ) -> None:
        self.generators = generators  # their states when the pass began
        self.yielded = yielded
        self.workers = workers or {}  # the dataset's state in each worker after its last batch given out
        self.over = False


def generators(loader: Any) -> dict[str, torch.Generator]:
    """Every generator an epoch's order may be drawn from, each once."""
    import torch

    inner = getattr(loader.batch_sampler, "sampler", None)
    found = {
        "loader": loader.generator,
        "sampler": getattr(loader.sampler, "generator", None),
        "inner": getattr(inner, "generator", None),
    }
    named = {name: one for name, one in found.items() if isinstance(one, torch.Generator)}
    once = {id(one): name for name, one in reversed(named.items())}
    kept = {name: one for name, one in named.items() if once[id(one)] == name}
    if loader.generator is None:
        kept[_DEFAULT] = torch.default_generator
    return kept


def remember(loader: Any) -> dict[str, Any]:
    """The states of all of them now."""
    return {name: one.get_state() for name, one in generators(loader).items()}


def state_of(loader: Any, progress: Progress | None, iterable: bool) -> dict[str, Any]:
    """The loader's state, of plain values and tensors."""
    if progress is None or progress.over:
        drawn = {name: state for name, state in remember(loader).items() if name != _DEFAULT}
        return {
            "version": VERSION,
            "begun": False,
            "yielded": 0,
            "batch_size": loader.batch_size,
            "generators": drawn,
            "workers": {},
            "dataset": None,
        }
    state: dict[str, Any] = {
        "version": VERSION,
        "begun": True,
        "yielded": progress.yielded,
        "batch_size": loader.batch_size,
        "generators": dict(progress.generators),
        "workers": {worker: pickle.loads(one) for worker, one in progress.workers.items()},
        "dataset": None,
    }
    if iterable and loader.num_workers == 0 and callable(getattr(loader.dataset, "state_dict", None)):
        state["dataset"] = loader.dataset.state_dict()
    return state


def checked(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state, or an error where it is none of ours."""
    try:
        if (
            state["version"] == VERSION
            and int(state["yielded"]) >= 0
            and isinstance(state["generators"], Mapping)
        ):
            return dict(state)
        why = say("version {found!r} where {known} is known", found=state["version"], known=VERSION)
    except (KeyError, TypeError, ValueError) as problem:
        why = say("{problem!r}", problem=problem)
    raise UsageError(
        say("this is not the state of a legroom.DataLoader"),
        why=why,
        fix=(say("give what its state_dict() returned"),),
    )


def in_batches_of(loader: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state counted in this loader's batches: a training that died may go on with smaller ones."""
    then, now = state.get("batch_size"), loader.batch_size
    if then is None or now is None or then == now:
        return state
    samples = int(state["yielded"]) * then
    if samples % now:
        raise UsageError(
            say("cannot go on with batches of {now}", now=now),
            why=say("{samples} samples were given out, in batches of {then}", samples=samples, then=then),
            fix=(say("use a batch size that divides {then}", then=then),),
        )
    return {**state, "yielded": samples // now, "batch_size": now}


def restore(loader: Any, states: Mapping[str, Any]) -> None:
    """Set the generators; torch's own is the program's and left alone."""
    for name, one in generators(loader).items():
        if name in states and name != _DEFAULT:
            one.set_state(states[name])


@contextmanager
def replayed(loader: Any, states: Mapping[str, Any]) -> Iterator[None]:
    """Draw again what was drawn when the epoch began; what the program draws itself goes on as if nothing was."""
    import torch

    restore(loader, states)
    now = torch.default_generator.get_state()
    if _DEFAULT in states:
        torch.default_generator.set_state(states[_DEFAULT])
    try:
        yield
    finally:
        torch.default_generator.set_state(now)


class Rest:
    """A sampler without its beginning."""

    def __init__(self, whole: Any, skip: int) -> None:
        self._whole, self._skip = whole, skip
        self.latest: _RestIterator | None = None

    def __iter__(self) -> _RestIterator:
        self.latest = _RestIterator(self._whole, self._skip)
        return self.latest

    def __len__(self) -> int:
        return max(0, len(self._whole) - self._skip)


class _RestIterator:
    def __init__(self, whole: Any, skip: int) -> None:
        self._whole, self._skip = whole, skip
        self._order: Iterator[Any] | None = None

    def prepare(self) -> Iterator[Any]:
        """Draw the order now."""
        if self._order is None:
            self._order = iter(self._whole)
            for _ in range(self._skip):
                if next(self._order, self) is self:
                    break
        return self._order

    def __iter__(self) -> _RestIterator:
        return self

    def __next__(self) -> Any:
        return next(self.prepare())


class Restored:
    """A worker_init_fn that brings the worker's dataset to where it stood."""

    def __init__(self, before: Callable[[int], None] | None, states: Mapping[int, Any]) -> None:
        self._before, self._states = before, states

    def __call__(self, worker: int) -> None:
        from torch.utils.data import get_worker_info

        if self._before is not None:
            self._before(worker)
        info: Any = get_worker_info()
        if worker in self._states:
            info.dataset.load_state_dict(self._states[worker])
