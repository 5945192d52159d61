"""One epoch of a DataLoader: takes batches from torch's iterator, opens them, and counts them for ``state_dict``.

Ownership: torch's iterator owns the worker processes and ends them when it is deleted, which happens with the Epoch.
The loader holds neither, so a loop that is left with ``break`` ends its workers as with torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from legroom.errors import BudgetTooSmall
from legroom.loader.dataloader.admit_workers_by_memory import Admission
from legroom.loader.dataloader.explain_worker_crash import WorkerGroup
from legroom.loader.dataloader.pin_memory import pin_batch
from legroom.loader.dataloader.receive import (
    Pinner,
    ReceivedBatch,
    forget_ended_workers,
    forget_with,
    unopened,
)  # fmt: skip
from legroom.loader.dataloader.torch_internals import (
    batches_in_flight,
    batches_ordered,
    dataset_ended,
    release_frames,
)  # fmt: skip

# What a worker must do with its dataset after load_state_dict, before it loads anything.
END = "end"  # the epoch that the state was taken in was complete: iterate to its end
LEAVE = "leave"  # that epoch was left early: make an iterator and drop it
STOP = "stop"  # the state was taken after the end of its share of this epoch: return nothing


class Placeholder:
    """A sample, and a batch, that only keeps the order of the workers; the same object in every process."""

    def __reduce__(self) -> str:
        return "PLACEHOLDER"


PLACEHOLDER = Placeholder()


class WorkerState(NamedTuple):
    """What is known of the dataset in one worker."""

    state: bytes  # pickled, after its last batch that was returned
    then: tuple[str, ...] = ()

    def after_epoch(self, complete: bool) -> WorkerState:
        """The state when the same workers begin another epoch."""
        if self.then[-1:] == (STOP,):
            return WorkerState(self.state)
        return WorkerState(self.state, (*self.then, END if complete else LEAVE))


@dataclass(eq=False)
class Progress:
    """Where an epoch began, and which batches were returned since."""

    generators: dict[str, Any]  # their states when the epoch began
    yielded: int = 0
    _: KW_ONLY
    batch_size: int | None = None
    num_workers: int = 0
    beyond: set[int] = field(default_factory=set)  # numbers of batches that were returned before an earlier one
    seeded: bool = False  # it drew no number for the workers' seeds: an earlier epoch did
    workers: dict[int, WorkerState] = field(default_factory=dict)
    turn: int = 0  # the worker whose batch is next, if they are in order
    stateless: bool = False  # a batch arrived without the state of its dataset
    unnumbered: bool = False  # batches are out of order, and their numbers are unknown
    dataset_ended: bool = False  # without workers: the dataset has no samples left
    complete: bool = False

    @property
    def first_left(self) -> int:
        """The number of the first batch that was not returned."""
        return self.yielded - len(self.beyond)

    def add(self, numbers: Collection[int] | None) -> None:
        """A batch was returned: the next one, or those with these numbers."""
        if numbers is None:
            self.yielded += 1
            return
        first = self.first_left
        self.yielded += len(numbers)
        self.beyond.update(numbers)
        while first in self.beyond:
            self.beyond.remove(first)
            first += 1

    def add_state(self, received: tuple[int, bytes, int | None] | None) -> None:
        """What was sent with the batch: worker, state of its dataset, number of samples."""
        if received is None:
            self.stateless = True
            return
        worker, state, samples = received
        # torch fills a batch until the dataset ends: if it is short, the state is one after the end.
        short = self.batch_size is not None and samples is not None and samples < self.batch_size
        self.workers[worker] = WorkerState(state, (STOP,) if short else ())
        self.turn = (worker + 1) % self.num_workers


class OutOfOrder:
    """Which batches were returned by an iterator with ``in_order=False``.

    torch keeps the numbers of the batches in flight; one that has left them was returned.
    """

    def __init__(self, inner: Any, progress: Progress) -> None:
        self._inner = inner
        self._remaining = remaining_numbers(progress.first_left, frozenset(progress.beyond))
        self._sent = 0
        self._in_flight: dict[int, int] = {}  # torch's number of a batch → its number in the epoch

    @staticmethod
    def supported(inner: Any) -> bool:
        """Whether this torch version shows the numbers."""
        return batches_ordered(inner) is not None and batches_in_flight(inner) is not None

    def returned(self) -> list[int]:
        """The numbers of the batches that were returned since the last call."""
        while self._sent < (batches_ordered(self._inner) or 0):
            self._in_flight[self._sent] = next(self._remaining)
            self._sent += 1
        waiting = batches_in_flight(self._inner) or ()
        gone = [number for number in self._in_flight if number not in waiting]
        return [self._in_flight.pop(number) for number in gone]


def remaining_numbers(first: int, beyond: Collection[int]) -> Iterator[int]:
    """The numbers of the batches that were not returned, without end."""
    return (number for number in count(first) if number not in beyond)


class Epoch:
    """An iterator over batches.

    Everything else is done by torch's iterator inside: to other code this is one of torch's, with ``_workers`` and all
    its attributes, also for ``isinstance``.
    """

    def __init__(
        self,
        inner: Iterator[Any],
        workers: WorkerGroup | None,
        progress: Progress,
        pinner: Pinner | None,
        report_torch_transport: Callable[[str], None],
        *,
        persistent: bool,
        admission: Admission | None = None,
        out_of_order: OutOfOrder | None = None,
    ) -> None:
        self._inner, self._group, self._progress, self._pinner = inner, workers, progress, pinner
        self._report, self._admission = report_torch_transport, admission
        self._out_of_order = out_of_order
        self._persistent = persistent  # the workers continue after this epoch
        self._pid = os.getpid()
        if workers is not None:
            forget_with(inner, workers.pids)

    def __iter__(self) -> Epoch:
        return self

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not set yet, or deleted
            raise AttributeError(name)
        found = getattr(self._inner, name)
        return partial(self._shut_down, found) if name == "_shutdown_workers" else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._inner.__reduce_ex__(protocol)  # raises torch's error

    def _shut_down(self, shutdown_workers: Callable[[], None]) -> None:
        self._close_admission()
        shutdown_workers()
        forget_ended_workers()

    def _close_admission(self) -> None:
        """Delay no worker that waits to start."""
        if self._admission is not None:
            self._admission.close()

    def __next__(self) -> Any:
        item = self._take()
        self._progress.add(None if self._out_of_order is None else self._out_of_order.returned())
        if self._group is None:
            self._progress.dataset_ended = dataset_ended(self._inner)
        if not isinstance(item, ReceivedBatch):
            return item if self._pinner is None else pin_batch(item)
        if item.note is not None:
            self._report(item.note)
        self._progress.add_state(item.state)
        batch = item.open(self._pinner)
        return batch if self._pinner is None else pin_batch(batch)

    def take_unopened(self) -> Any:
        """The next batch as it arrived: a ReceivedBatch, or the batch if it was not sent in a slot."""
        item = self._take()
        self._progress.add(None)
        return item

    def skip(self, batches: int) -> None:
        """Make so many batches and drop them; they were returned before."""
        for _ in range(batches):
            try:
                self._take()
            except StopIteration:
                return

    def _take(self) -> Any:
        admission, self._admission = self._admission, None  # needed for the first batch only
        try:
            with unopened():
                item = next(self._inner)
                while item is PLACEHOLDER:
                    item = next(self._inner)
                return item
        except StopIteration:
            self._progress.complete = True
            forget_ended_workers()
            raise
        except Exception as problem:
            if self._out_of_order is not None:
                self._out_of_order.returned()  # it failed, and was not returned
            release_frames(problem)  # else the workers live until the next garbage collection
            better = self._explained(problem, admission)
            if better is None:
                raise
            try:
                raise better from (None if isinstance(better, BudgetTooSmall) else problem)
            finally:
                del better  # for the same reason
        finally:
            if admission is not None:
                admission.admit()

    def _explained(self, problem: Exception, admission: Admission | None) -> Exception | None:
        """An error with the reason: why memory is not enough, or why a worker crashed."""
        # The first worker ends with BudgetTooSmall, with a MemoryError while it loads samples, or by exiting.
        if admission is not None and (refused := admission.error()) is not None:
            return refused
        if isinstance(problem, RuntimeError) and self._group is not None:
            return self._group.explain(problem)
        return None

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():  # torch ends the workers then
            return
        group = getattr(self, "_group", None)
        if group is None or self._persistent or os.getpid() != self._pid:
            return
        self._close_admission()
        del self._inner  # ends the workers
