"""``state_dict`` and ``load_state_dict`` of a DataLoader: resuming in the middle of an epoch.

The order of a map-style dataset is drawn from torch's generators at the start of an epoch. So the state holds their
states at that moment, and which batches were returned since. To resume, the order is drawn again and these batches are
left out, without loading a sample of them. Of an IterableDataset only its own ``state_dict`` shows how far it has come;
without one, the batches that were returned are made again and dropped.

Before the order, torch draws a number for the seeds of the workers from the same generator, whenever workers start.
Persistent workers start once. If they start again only because a run was interrupted, that number must not be drawn, or
every later order would differ.

Random numbers that samples draw in workers continue from the seeds at the start of the epoch, not from where the
workers of the interrupted run were.

torch takes batches from the workers of an IterableDataset in turn, beginning with the first. If it was another worker's
turn, those before it return a placeholder batch first, which is dropped. A worker whose share was complete returns
nothing. For that the resumed epoch iterates over a wrapper around the dataset (``ResumedDataset``).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from legroom.errors import UsageError
from legroom.loader.dataloader.epoch_iterator import END, LEAVE, PLACEHOLDER, STOP, Progress, WorkerState
from legroom.messages import counted, phrase, say

if TYPE_CHECKING:
    import torch

VERSION = 2
_DEFAULT = "default"  # torch's global generator, which the program uses too
_FIELDS = {
    "begun", "yielded", "beyond", "batch_size", "num_workers", "generators", "seeded", "lasting", "turn", "workers",
}  # fmt: skip


def state_of(loader: Any, progress: Progress | None, iterable: bool, seeded: bool) -> dict[str, Any]:
    """The loader's state, as plain values and tensors. ``seeded``: no later epoch draws a number for seeds."""
    begun = progress is not None and not progress.complete
    state: dict[str, Any] = {
        "version": VERSION,
        "begun": begun,
        "yielded": 0,
        "beyond": [],
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "generators": {name: one for name, one in generator_states(loader).items() if name != _DEFAULT},
        "seeded": seeded,
        "lasting": seeded,
        "turn": 0,
        "workers": {},
    }
    if progress is not None and begun:
        _check_resumable(loader, progress, iterable)
        state |= {
            "yielded": progress.yielded,
            "beyond": sorted(progress.beyond),
            "generators": dict(progress.generators),
            "seeded": progress.seeded,
            "turn": progress.turn if in_order(loader) else 0,
        }
    if iterable and loader.num_workers == 0:
        if (state_dict := dataset_state_dict(loader.dataset)) is not None:
            # Not what the dataset says now: a batch that was interrupted has moved it on.
            ended, kept = progress.dataset if progress is not None and begun else (False, None)
            found = state_dict() if kept is None else pickle.loads(kept)
            state["workers"] = {0: {"state": found, "then": [STOP] if ended else []}}
    elif progress is not None and not progress.stateless and (begun or loader.persistent_workers):
        workers = progress.workers if begun else states_after(progress)
        state["workers"] = saved_workers(workers)
    return state


def saved_workers(workers: Mapping[int, WorkerState]) -> dict[int, dict[str, Any]]:
    """What is known of each worker, as a part of the loader's state."""
    return {number: {"state": pickle.loads(one.state), "then": list(one.then)} for number, one in workers.items()}


def read_workers(saved: Mapping[Any, Mapping[str, Any]]) -> dict[int, WorkerState]:
    """The reverse."""
    return {int(number): WorkerState(pickle.dumps(one["state"]), tuple(one["then"])) for number, one in saved.items()}


def dataset_state_dict(dataset: Any) -> Callable[[], Any] | None:
    """The ``state_dict`` method by which a dataset reports its position; None if it has none.

    That of a torch.nn.Module holds weights, not a position.
    """
    from torch.nn import Module

    save, load = (getattr(dataset, name, None) for name in ("state_dict", "load_state_dict"))
    if not callable(save) or not callable(load):
        return None
    return None if getattr(save, "__func__", None) is Module.state_dict else save


def states_after(progress: Progress | None) -> dict[int, WorkerState]:
    """The states of the same workers when they begin another epoch."""
    if progress is None or progress.stateless:
        return {}
    return {worker: one.after_epoch(progress.complete) for worker, one in progress.workers.items()}


def in_order(loader: Any) -> bool:
    """Whether batches are returned in the order of the sampler."""
    return loader.num_workers == 0 or getattr(loader, "in_order", True)


def _check_resumable(loader: Any, progress: Progress, iterable: bool) -> None:
    if in_order(loader) or progress.yielded == 0:
        return
    if iterable and (progress.stateless or not progress.workers):
        why = say(
            "with in_order=False batches are returned as they arrive, and without a state_dict of the dataset it is "
            "unknown which ones were"
        )
    elif not iterable and progress.unnumbered:
        why = say(
            "with in_order=False batches are returned as they arrive, and this torch version does not show which ones "
            "were"
        )
    else:
        return
    raise UsageError(
        say("cannot save a state from which this epoch could be resumed"),
        why=why,
        fix=(say("use in_order=True"), say("or call state_dict() between two epochs")),
    )


def check_state(
    state: Mapping[str, Any], version: object = VERSION, fields: Collection[str] = _FIELDS, what: str | None = None
) -> dict[str, Any]:
    """The state; UsageError if ``state_dict`` of a loader of that version did not return it."""
    try:
        if version == VERSION and str(state["version"]).startswith("share-"):
            why = say("it is the state of a loader with share=, which has another order and other seeds")
        elif state["version"] != version:
            why = say("its version is {found!r}, supported is {known!r}", found=state["version"], known=version)
        elif missing := set(fields) - state.keys():
            why = say("it has no {names}", names=", ".join(sorted(missing)))
        elif int(state["yielded"]) >= 0 and isinstance(state["generators"], Mapping):
            return dict(state)
        else:
            why = say("'yielded' must be an integer ≥ 0 and 'generators' a dict")
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        why = f"{problem!r}"
    raise UsageError(
        what or say("this is not the state of a legroom.DataLoader"), why=why,
        fix=(say("pass what its state_dict() returned"),),
    )  # fmt: skip


def fit_state(loader: Any, state: dict[str, Any], iterable: bool) -> dict[str, Any]:
    """The state as this loader can resume from it; UsageError if it cannot."""
    if not iterable:
        return _in_batches_of(loader, state)
    then, now = int(state["num_workers"]), loader.num_workers
    known = bool(state["workers"])
    begun = state["begun"] and state["yielded"] > 0
    if (begun or known) and max(1, then) != max(1, now):  # one worker loads the same share as no worker
        raise UsageError(
            say("cannot resume with num_workers={now}: the state has num_workers={then}", now=now, then=then),
            why=say("each worker loads a share of an IterableDataset, and the shares depend on num_workers"),
            fix=(
                say("use num_workers={then} until the epoch is complete", then=then),
                say("or start the epoch again, without load_state_dict"),
                say("map-style datasets and data.batches resume with any number of workers"),
            ),
        )
    if begun and not known:
        if state["batch_size"] != loader.batch_size:
            fix = say("use batch_size={then} until the epoch is complete", then=state["batch_size"])
            raise _other_batch_size(loader, state, fix)
        if not in_order(loader):
            raise UsageError(
                say("cannot resume with in_order=False"),
                why=say("the dataset has no state_dict: its first batches must be made again and dropped"),
                fix=(say("use in_order=True until the epoch is complete"),),
            )
    return state


def _in_batches_of(loader: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state in batches of this loader's size: a failed run may be resumed with a smaller one."""
    then, now = state["batch_size"], loader.batch_size
    if then == now or not state["yielded"]:
        return state
    beyond = list(state["beyond"])
    first = int(state["yielded"]) - len(beyond)
    if then is None or now is None:
        fix = say("use batch_size={then} until the epoch is complete", then=then)
        raise _other_batch_size(loader, state, fix)
    if first * then % now or (beyond and then % now):
        raise _other_batch_size(loader, state, say("use a batch size that divides {then}", then=then))
    parts = then // now
    beyond = [number * parts + part for number in beyond for part in range(parts)]
    return {**state, "yielded": first * then // now + len(beyond), "beyond": beyond, "batch_size": now}


def _other_batch_size(loader: Any, state: Mapping[str, Any], fix: str) -> UsageError:
    then, now, yielded = state["batch_size"], loader.batch_size, int(state["yielded"])
    if then is None or now is None:
        count = counted(yielded, phrase("{count} batch"), phrase("{count} batches"))
        why = say("returned before: {count}, with batch_size={then}", count=count, then=then)
    else:
        count = counted(yielded * then, phrase("{count} sample"), phrase("{count} samples"))
        why = say("returned before: {count}, with batch_size={then}", count=count, then=then)
    return UsageError(say("cannot resume with batch_size={now}", now=now), why=why, fix=(fix,))


# torch's generators


def generators(loader: Any) -> dict[str, torch.Generator]:
    """Every generator from which the order of an epoch may be drawn, each once."""
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
    kept[_DEFAULT] = torch.default_generator  # a sampler may draw from it although the loader has its own
    return kept


def generator_states(loader: Any) -> dict[str, Any]:
    """The current states of all of them."""
    return {name: one.get_state() for name, one in generators(loader).items()}


def separate_generator(loader: Any) -> torch.Generator | None:
    """A generator for the workers' seeds that draws nothing from the generator of the order."""
    import torch

    if loader.generator is None and torch.get_default_device().type != "cpu":
        return None  # torch draws from the device's generator, which no order on the CPU depends on
    source = torch.default_generator if loader.generator is None else loader.generator
    copy = torch.Generator(device=source.device)
    copy.set_state(source.get_state())
    return copy


def restore_generators(loader: Any, states: Mapping[str, Any]) -> None:
    """Set the generators, but not torch's global one, which belongs to the program."""
    for name, one in generators(loader).items():
        if name in states and name != _DEFAULT:
            one.set_state(states[name])


@contextmanager
def replay_generators(loader: Any, states: Mapping[str, Any]) -> Iterator[None]:
    """Within it, draw what was drawn when the epoch began; torch's global generator is restored afterwards."""
    import torch

    restore_generators(loader, states)
    now = torch.default_generator.get_state()
    if _DEFAULT in states:
        torch.default_generator.set_state(states[_DEFAULT])
    try:
        yield
    finally:
        torch.default_generator.set_state(now)


# Map-style datasets


class RemainingSampler:
    """A sampler without the batches that were returned; from the next epoch on it is complete."""

    def __init__(self, sampler: Any, first: int, beyond: Collection[int] = ()) -> None:
        self._sampler = sampler
        self._first, self._beyond = first, frozenset(beyond)
        self._begun = False
        self._latest: _RemainingIterator | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._first, self._beyond = 0, frozenset()
            return iter(self._sampler)
        # torch makes two iterators if there are workers, before and after it draws their seeds. A sampler that draws
        # in __iter__ must be called as often.
        self._latest = _RemainingIterator(iter(self._sampler), self._first, self._beyond)
        return self._latest

    def __len__(self) -> int:
        total = len(self._sampler)
        return max(0, total - self._first - sum(number < total for number in self._beyond))

    def begin(self) -> None:
        """Draw the order now, if that was not done; later iterators are complete."""
        self._begun = True
        if self._latest is not None:
            self._latest.skip()
            self._latest = None


class _RemainingIterator:
    def __init__(self, order: Iterator[Any], first: int, beyond: frozenset[int]) -> None:
        self._order, self._first, self._beyond = order, first, beyond
        self._at = 0

    def skip(self) -> None:
        while self._at < self._first and next(self._order, self) is not self:
            self._at += 1

    def __iter__(self) -> _RemainingIterator:
        return self

    def __next__(self) -> Any:
        self.skip()
        while self._at in self._beyond:
            next(self._order)
            self._at += 1
        self._at += 1
        return next(self._order)


# IterableDatasets


def restore_dataset(dataset: Any, saved: Mapping[str, Any]) -> bool:
    """Restore the position of a dataset; whether it has anything left in this epoch."""
    dataset.load_state_dict(saved["state"])
    for step in saved["then"]:
        if step == END:
            deque(iter(dataset), maxlen=0)
        elif step == LEAVE:
            iter(dataset)
    return STOP not in saved["then"]


class DatasetProxy:
    """Stands for a user's dataset in a worker, and changes how it is read.

    To other code it is the dataset: attributes are read from it and set on it, also for ``isinstance``. Subclasses keep
    their own fields in ``vars(self)``.
    """

    _dataset: Any

    def __init__(self, dataset: Any, **fields: Any) -> None:
        vars(self).update(_dataset=dataset, **fields)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._dataset.__class__  # not type(): it may be a proxy too

    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in vars(self):  # not set yet
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _dataset_proxy, (type(self), vars(self))


def _dataset_proxy(kind: type[DatasetProxy], fields: dict[str, Any]) -> DatasetProxy:
    found = kind.__new__(kind)
    vars(found).update(fields)
    return found


class ResumedDataset(DatasetProxy):
    """An IterableDataset whose first iterator, in each worker, continues where the saved state was taken."""

    def __init__(
        self, dataset: Any, saved: Mapping[int, Mapping[str, Any]], keep_turn: Collection[int], batch_size: int | None
    ) -> None:
        placeholders = 1 if batch_size is None else batch_size
        super().__init__(dataset, _saved=saved, _keep_turn=keep_turn, _count=placeholders, _begun=False)

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is None or self._begun:
            return iter(self._dataset)
        vars(self)["_begun"] = True
        if info.id in self._saved and not restore_dataset(self._dataset, self._saved[info.id]):
            return iter(())
        samples: Iterator[Any] = iter(self._dataset)
        return chain(repeat(PLACEHOLDER, self._count), samples) if info.id in self._keep_turn else samples


class PlaceholderCollate:
    """A collate function that passes placeholder batches on."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, samples: Any) -> Any:
        if samples is PLACEHOLDER or (isinstance(samples, list) and samples and samples[0] is PLACEHOLDER):
            return PLACEHOLDER
        return self.fn(samples)
