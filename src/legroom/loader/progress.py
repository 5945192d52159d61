"""How far a pass over a loader has come.

Covers: counting what was given out, also out of order, and what each worker's dataset said about itself. Does not
cover: the state that is saved of it (resume.py), going on from one (rest.py, rejoin.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import count
from typing import Any

from legroom.loader.torch_internals import batches_ordered, batches_under_way

# What a worker has to do with its dataset, once it has the saved state, before it draws anything.
END = "end"  # the pass that the state was taken in ended by itself: iterate to its end
LEAVE = "leave"  # that pass was left: ask for an iterator and leave it
STOP = "stop"  # its share of this pass is over, and the state was taken after that: give nothing


def position_of(dataset: Any) -> Callable[[], Any] | None:
    """The ``state_dict`` by which a dataset tells how far it has come; None where it has none.

    That of a torch.nn.Module holds weights, not a position.
    """
    from torch.nn import Module

    found, back = (getattr(dataset, name, None) for name in ("state_dict", "load_state_dict"))
    if not callable(found) or not callable(back):
        return None
    return None if getattr(found, "__func__", None) is Module.state_dict else found


class Note:
    """What is known of the dataset in one worker."""

    __slots__ = ("state", "then")

    def __init__(self, state: bytes, then: tuple[str, ...] = ()) -> None:
        self.state = state  # pickled, after the last batch of it that was given out
        self.then = then

    def a_pass_later(self, over: bool) -> Note:
        """The note when the same workers begin another pass."""
        if self.then[-1:] == (STOP,):
            return Note(self.state)
        return Note(self.state, (*self.then, END if over else LEAVE))


class Progress:
    """One pass: where it began and what has been given out since."""

    def __init__(
        self,
        generators: dict[str, Any],
        yielded: int = 0,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        beyond: Collection[int] = (),
        seeded: bool = False,
        workers: dict[int, Note] | None = None,
        turn: int = 0,
    ) -> None:
        self.generators = generators  # their states when the pass began
        self.yielded = yielded
        self._batch_size, self._num_workers = batch_size, num_workers
        self.beyond = set(beyond)  # numbers of batches that were given out before one that precedes them
        self.seeded = seeded  # it took no number for the workers' seeds: an earlier pass had
        self.workers = workers or {}
        self.turn = turn  # the worker whose batch comes next, where they come in order
        self.silent = False  # a batch of a worker came without its dataset's state
        self.unnumbered = False  # batches come out of order, and nobody tells which
        self.ended = False  # without workers: the dataset has nothing left
        self.over = False

    @property
    def first_left(self) -> int:
        """The number of the first batch that has not been given out."""
        return self.yielded - len(self.beyond)

    def gave(self, numbers: Collection[int] | None) -> None:
        """A batch was given out: the next one, or those of these numbers."""
        if numbers is None:
            self.yielded += 1
            return
        first = self.first_left
        self.yielded += len(numbers)
        self.beyond.update(numbers)
        while first in self.beyond:
            self.beyond.remove(first)
            first += 1

    def heard(self, said: tuple[int, bytes, int | None] | None) -> None:
        """What came with it: the worker, its dataset's state, how many samples the batch was made of."""
        if said is None:
            self.silent = True
            return
        worker, state, samples = said
        # torch fills a batch until the dataset ends: where it is short, the state is one after the end.
        short = self._batch_size is not None and samples is not None and samples < self._batch_size
        self.workers[worker] = Note(state, (STOP,) if short else ())
        self.turn = (worker + 1) % self._num_workers


class Scattered:
    """Which batches have been given out by an iterator of torch's that gives them as they come.

    It keeps the numbers of those on their way; one that is gone from there has been given out.
    """

    def __init__(self, inner: Any, progress: Progress) -> None:
        self._inner = inner
        self._left = left(progress.first_left, frozenset(progress.beyond))
        self._sent = 0
        self._on_their_way: dict[int, int] = {}  # torch's number of a batch → its place in the epoch's order

    @staticmethod
    def possible(inner: Any) -> bool:
        """Whether this torch keeps them where they are looked for."""
        return batches_ordered(inner) is not None and batches_under_way(inner) is not None

    def gone(self) -> list[int]:
        """The numbers of the batches that left since this was last asked."""
        while self._sent < (batches_ordered(self._inner) or 0):
            self._on_their_way[self._sent] = next(self._left)
            self._sent += 1
        waiting = batches_under_way(self._inner) or ()
        left_now = [number for number in self._on_their_way if number not in waiting]
        return [self._on_their_way.pop(number) for number in left_now]


def left(first: int, beyond: Collection[int]) -> Iterator[int]:
    """The numbers of the batches that have not been given out, without end."""
    return (number for number in count(first) if number not in beyond)
