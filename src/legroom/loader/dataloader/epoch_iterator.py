"""One epoch of a DataLoader: takes batches from torch's iterator, opens them, and counts them for ``state_dict``.

Ownership: torch's iterator owns the worker processes and ends them when it is deleted, which happens with the Epoch.
The loader holds neither, so a loop that is left with ``break`` ends its workers as with torch.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from legroom.errors import BudgetTooSmall, UsageError
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
    index_drawn,
    release_frames,
)  # fmt: skip
from legroom.messages import say

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
    beyond: dict[int, None] = field(default_factory=dict)  # numbers of batches that were returned before an earlier one
    seeded: bool = False  # it drew no number for the workers' seeds: an earlier epoch did
    workers: dict[int, WorkerState] = field(default_factory=dict)
    turn: int = 0  # the worker whose batch is next, if they are in order
    stateless: bool = False  # a batch arrived without the state of its dataset
    unnumbered: bool = False  # batches are out of order, and their numbers are unknown
    # Without workers, after the last batch that was returned: whether the dataset has ended, and its pickled state.
    dataset: tuple[bool, bytes | None] = (False, None)
    complete: bool = False

    @property
    def first_left(self) -> int:
        """The number of the first batch that was not returned."""
        return self.yielded - len(self.beyond)

    def beyond_after_first(self) -> dict[int, None]:
        """The numbers beyond, when the first batch that is left has been returned too."""
        rest, first = dict(self.beyond), self.first_left + 1
        while first in rest:
            del rest[first]
            first += 1
        return rest

    def workers_after(self, received: tuple[int, bytes, int | None]) -> tuple[dict[int, WorkerState], int]:
        """The workers and the next turn, after what was sent with a batch: worker, its dataset's state, samples."""
        worker, state, samples = received
        # torch fills a batch until the dataset ends: if it is short, the state is one after the end.
        short = self.batch_size is not None and samples is not None and samples < self.batch_size
        known = WorkerState(state, (STOP,) if short else ())
        return {**self.workers, worker: known}, (worker + 1) % self.num_workers

    def add_state(self, received: tuple[int, bytes, int | None] | None) -> None:
        """What was sent with a batch that was returned."""
        if received is None:
            self.stateless = True
        else:
            self.workers, self.turn = self.workers_after(received)


class InOrder:
    """Which batch was returned, where some before it were returned earlier, or failed."""

    def __init__(self, remaining: Iterator[int]) -> None:
        self._remaining = remaining

    def returned(self) -> list[int]:
        """The number of the batch that was returned, or failed."""
        return [next(self._remaining)]


class OutOfOrder:
    """Which batches were returned by an iterator with ``in_order=False``, or by one whose batches may fail.

    torch keeps the numbers of the batches in flight; one that has left them was returned, or failed.
    """

    def __init__(self, inner: Any, remaining: Iterator[int]) -> None:
        self._inner, self._remaining = inner, remaining
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
        iterable: bool = False,
        in_order: bool = True,
        save_dataset: Callable[[], Any] | None = None,
    ) -> None:
        """``save_dataset``: without workers, the ``state_dict`` of an IterableDataset."""
        self._inner, self._group, self._progress, self._pinner = inner, workers, progress, pinner
        self._report, self._admission = report_torch_transport, admission
        self._begun_at = progress.first_left, frozenset(progress.beyond)
        self._iterable = iterable
        # What knows the numbers of batches; None: each is the first of those that are left, or they are unknown.
        self._numbers: InOrder | OutOfOrder | None = None
        if not iterable and not in_order:
            progress.unnumbered = not OutOfOrder.supported(inner)
            self._numbers = None if progress.unnumbered else OutOfOrder(inner, remaining_numbers(*self._begun_at))
        elif not iterable and progress.beyond:
            self._numbers = InOrder(remaining_numbers(*self._begun_at))
        self._save_dataset = save_dataset
        progress.dataset = False, self._dataset_state()
        self._interrupted = False  # a batch was taken from torch's iterator, or lost there, and not returned
        self._unused: dict[int, None] = {}
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
        if self._interrupted:
            raise UsageError(
                say("this loop was interrupted, and has lost the batch that was next"),
                why=say("torch does not make a batch again that it has given out"),
                fix=(say("resume in a new loop: loader.load_state_dict(loader.state_dict()), then iter(loader)"),),
            )
        self._interrupted = True
        progress, batch = self._progress, self._take()
        numbers = None if self._numbers is None else self._numbers.returned()
        workers, turn, stateless = progress.workers, progress.turn, progress.stateless
        if isinstance(batch, ReceivedBatch):
            if batch.note is not None:
                self._report(batch.note)
            if batch.state is None:
                stateless = True
            else:
                workers, turn = progress.workers_after(batch.state)
            batch = batch.open(self._pinner)
        if self._pinner is not None:
            batch = pin_batch(batch)
        dataset = progress.dataset
        if self._group is None and self._iterable:
            dataset = dataset_ended(self._inner), self._dataset_state()
        number, beyond, later = 0, progress.beyond, self._unused
        if numbers is not None:
            number = numbers[-1]
            if number == progress.first_left:
                beyond = progress.beyond_after_first()
            else:
                later = beyond
        # That it is returned is noted by the last instruction: a state taken after an error or an interruption,
        # wherever it strikes, begins with this batch.
        noted, to = (None, beyond, progress.yielded + 1, workers, turn, stateless, dataset, False), progress
        later[number], to.beyond, to.yielded, to.workers, to.turn, to.stateless, to.dataset, self._interrupted = noted
        return batch

    def _dataset_state(self) -> bytes | None:
        """The state of a dataset that this process iterates over: a batch that is interrupted has moved it on."""
        if self._save_dataset is None:
            return None
        try:
            return pickle.dumps(self._save_dataset())
        except Exception:  # it cannot be kept: ``state_dict`` asks the dataset again
            self._save_dataset = None
            return None

    def take_unopened(self) -> Any:
        """The next batch as it arrived: a ReceivedBatch, or the batch if it was not sent in a slot."""
        item = self._take()
        self._progress.yielded += 1
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
            self._progress.complete, self._interrupted = True, False
            forget_ended_workers()
            raise
        except Exception as problem:
            self._leave_out_failed(problem)
            self._interrupted = False  # as with torch, the next batch may be taken
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

    def _leave_out_failed(self, problem: Exception) -> None:
        """A batch failed, or none was taken: the numbers of later ones do not depend on how many were returned."""
        if self._iterable or self._progress.unnumbered:
            return
        if self._group is None:
            if not index_drawn(problem):
                return
            if self._numbers is None:
                self._numbers = InOrder(remaining_numbers(self._progress.first_left, ()))
        elif self._numbers is None or isinstance(self._numbers, InOrder):
            if not OutOfOrder.supported(self._inner):
                return
            self._numbers = OutOfOrder(self._inner, remaining_numbers(*self._begun_at))
        self._numbers.returned()

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
