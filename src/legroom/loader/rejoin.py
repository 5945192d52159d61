"""Going on in the middle of a dataset that is iterated over: what happens in a worker.

Covers: bringing the dataset to where it stood, keeping the workers' turn. Does not cover: what is known of it
(progress.py), the loader (dataloader.py).

torch takes batches from the workers in turn and begins with the first. Where it was another one's turn, those before it
give a batch of nothing first, which is dropped; one whose share was over gives none at all. For that the dataset's next
iterator, and only that one, is another: torch asks for it right after ``worker_init_fn``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

from legroom.loader.arena import door as arena_door
from legroom.loader.progress import END, LEAVE, STOP

Init = Callable[[int], None]


class Nothing:
    """A sample, and a batch, that only keeps a turn; the same object in every process."""

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()


class TurnKept:
    """A collate function that leaves batches of nothing as they are."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, samples: Any) -> Any:
        if samples is NOTHING or (isinstance(samples, list) and samples and samples[0] is NOTHING):
            return NOTHING
        return self.fn(samples)


class Rejoined:
    """A ``worker_init_fn`` around the user's that brings a worker's dataset to where it stood."""

    def __init__(
        self,
        before: Init | None,
        notes: Mapping[int, Mapping[str, Any]],
        keep_turn: Collection[int],
        batch_size: int | None,
    ) -> None:
        self._before, self._notes, self._keep_turn = before, notes, frozenset(keep_turn)
        self._samples = 1 if batch_size is None else batch_size

    def __call__(self, worker: int) -> None:
        from torch.utils.data import get_worker_info

        if self._before is not None:
            self._before(worker)
        info: Any = get_worker_info()
        if worker in self._notes and not bring(info.dataset, self._notes[worker]):
            next_iterator(info.dataset, lambda _: iter(()))
            came = arena_door.here()
            if worker == 0 and came is not None:
                came.open()  # it will show nothing
        elif worker in self._keep_turn:
            next_iterator(info.dataset, lambda again: chain(repeat(NOTHING, self._samples), iter(again)))


def bring(dataset: Any, note: Mapping[str, Any]) -> bool:
    """Bring a dataset to where it stood; whether it has anything left to give in this pass."""
    dataset.load_state_dict(note["state"])
    for step in note["then"]:
        if step == END:
            deque(iter(dataset), maxlen=0)
        elif step == LEAVE:
            iter(dataset)
    return STOP not in note["then"]


def next_iterator(dataset: Any, made: Callable[[Any], Iterator[Any]]) -> None:
    """Have ``made(dataset)`` in place of the dataset's next iterator, and its own again after that.

    The class's ``__iter__`` is another for that one call, in this process.
    """
    kind = type(dataset)
    own, plain = kind.__dict__.get("__iter__"), kind.__iter__

    def once(self: Any) -> Any:
        if self is not dataset:
            return plain(self)
        if own is None:
            del kind.__iter__
        else:
            kind.__iter__ = own
        return made(dataset)

    kind.__iter__ = once
