"""``data.batches(…)``: the loop over batches, its state_dict, and the thread that gathers the next batch.

A Batches may be looped over any number of times. Each loop is an epoch with its own order: the epoch that was set,
or the next one counted by the Data. The position advances when a batch is returned, not when it is prefetched, so a
state_dict taken inside the loop covers exactly the batches that the loop has seen.

A state is a dict of plain values. Its position counts the rows of the epoch's order that all ranks together have
received. So rank 0's state, which never has fewer batches than another rank's, serves every rank, also with another
world size or batch size.

The next batch is gathered while the consumer works on the current one, where that saves time. A thread lives for one
batch and ends by itself. Nothing has to be stopped when a loop is left early, at an exception, at Ctrl-C or at exit.
Starting a thread costs 0.05 ms.

Prefetching pays where both sides take time. For a consumer that does nothing with a batch it costs a quarter (batches
of 12 MB): another buffer is filled, which is not in the CPU cache. A consumer whose step takes as long as the copy
gains half. So both times are measured, in every loop anew.

A consumer that takes less time than starting a thread gets its next batches from a generator, without being measured:
8 of them, then 16, at the most 64. Small batches are gathered together there, up to 16 at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from legroom.errors import UsageError
from legroom.loader.batches.batch_settings import BatchSettings, columns_of, gatherer_for, windows_of
from legroom.loader.batches.cpu_gather import Batch, Column, Gatherer, HostGatherer, Task
from legroom.loader.batches.state_dict import EpochPosition, Fingerprint, as_dict, from_dict
from legroom.loader.rank_sampler import ChosenRows, RankSampler, choose_rows, permutation, process_group, rank_and_world
from legroom.messages import say
from legroom.system import training_step_listeners
from legroom.system.argument_checks import check_integer
from legroom.system.processes_and_threads import room_for_threads

if TYPE_CHECKING:
    from legroom.loader.batches.legroom_open import Data


NDArray = np.ndarray[Any, Any]


@dataclass(slots=True)
class _EpochProgress:
    """How far a loop has come; it outlives the loop, which ``break`` drops."""

    epoch: int
    given_out: int  # rows of its order
    done: bool = False


class Batches:
    """Batches of a Data: dicts of column names to tensors or arrays. ``len`` is the number of batches in an epoch."""

    def __init__(self, data: Data, settings: BatchSettings) -> None:
        settings = settings.checked()
        length, windows = settings.sequence_length, None
        columns: Mapping[str, Column]
        if length is None:
            columns = columns_of(data, settings.keys)
        else:
            tokens = windows_of(data, length, settings.stride)
            columns = {"tokens": tokens}
            windows = [length, settings.stride or length, str(tokens.dtype)]
        total, entry = len(next(iter(columns.values()))), data.info
        chosen = self._chosen = choose_rows(settings.rows, total)
        self._data = data
        self._settings = settings = replace(settings, rows=None if chosen is None else chosen.rows)
        self._fingerprint = Fingerprint(
            rows=total if chosen is None else chosen.count,
            shuffle=settings.shuffle,
            seed=settings.seed,
            digest=None if entry.digest is None else f"{entry.hash}:{entry.digest}",
            columns=_shown(columns),
            windows=windows,
            chosen=None if chosen is None else chosen.identity,
        )
        rank, world_size = rank_and_world(settings.rank, settings.world_size, os.environ, process_group())
        self.sampler = RankSampler(
            rows=self._fingerprint.rows,
            batch_size=settings.batch_size,
            drop_last=settings.drop_last,
            rank=rank,
            world_size=world_size,
            uneven=settings.uneven,
        )
        self._gatherer = gatherer_for(data, columns, settings)
        self._orders = EpochOrders(self.sampler.rows, settings.seed, chosen) if settings.shuffle else None
        # Whether the last batches of an epoch begin the first ones of the next epoch, until that was in vain once.
        self._begins_next_epoch = settings.shuffle and settings.device is not None
        self._begun: _EpochBatches | None = None
        self._epoch = settings.epoch  # None: the Data counts
        self._resume: EpochPosition | None = None
        self._progress: _EpochProgress | None = None

    @property
    def path(self) -> str:
        """The path of the rows, such as cpu or cuda-copy-engine (batch_settings.py lists them)."""
        return self._gatherer.path

    @property
    def why(self) -> str:
        """Why this path was chosen."""
        return self._gatherer.why

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        position, upcoming, begins_next = self._next_position(), self._begun, self._begins_next_epoch
        if upcoming is None or upcoming.start != position:
            begins_next = begins_next and upcoming is None
            order = self._orders.take(position.epoch) if self._orders is not None else None
            upcoming = _EpochBatches(self.sampler, order, position, self._chosen)
        progress = _EpochProgress(position.epoch, position.position)
        begin_next = self._begin_next_epoch if begins_next else None
        loop = _Loop(upcoming, self._gatherer, self._settings.transform, progress, self._orders, begin_next)
        # Only shuffled loops count: a rank that evaluates more often than others must keep the same epoch.
        counts = self._epoch is None and self._settings.shuffle
        following, data = position.epoch + 1 if counts else self._data.next_epoch, self._data
        # The last instruction: an interruption before it leaves the position to the next loop.
        data.next_epoch, self._progress, self._resume, self._begun, self._begins_next_epoch = (
            following, progress, None, None, begins_next,
        )  # fmt: skip
        return loop

    def _begin_next_epoch(self, epoch: int) -> _EpochBatches | None:
        """The batches of the epoch after this one, if its order is known: the next loop probably wants them."""
        if self._begun is None and self._orders is not None:
            order = self._orders.known(epoch + 1)
            if order is not None:
                self._begun = _EpochBatches(self.sampler, order, EpochPosition(epoch + 1))
        return self._begun

    def set_epoch(self, epoch: int) -> None:
        """Use the order of that epoch for every loop from now on."""
        self._epoch = check_integer("epoch", epoch, 0)
        self._progress = None
        if self._resume is not None and self._resume.epoch != self._epoch:
            self._resume = None

    def state_dict(self) -> dict[str, Any]:
        """The position of the latest loop: ``load_state_dict`` resumes with the batch after it."""
        progress = self._progress
        if progress is None or progress.done:
            return as_dict(self._next_position(), self._fingerprint)
        return as_dict(EpochPosition(progress.epoch, progress.given_out), self._fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there in the next loop; a state of other data or of another order is refused."""
        position = from_dict(state, self._fingerprint)
        epoch = None if self._epoch is None else position.epoch
        self._resume, self._progress, self._epoch = position, None, epoch

    def __reduce__(self) -> tuple[object, ...]:
        # The other process finds out its own rank and starts at the beginning.
        return Batches, (self._data, replace(self._settings, epoch=self._epoch))

    def _next_position(self) -> EpochPosition:
        if self._resume is not None:
            return self._resume
        return EpochPosition(self._data.next_epoch if self._epoch is None else self._epoch)


_LEAST_PREPARED, _MOST_PREPARED = 5_000, 1 << 24  # rows of an order that a thread computes: 0.1 ms, 128 MB


class _EpochBatches:
    """The batches of one epoch that are next: each one's place in the order, and its rows.

    An interruption anywhere loses none: the place of the next batch is that after the last one in ``next``, or, where
    there is none, the position that the loop has come to.
    """

    def __init__(
        self, sampler: RankSampler, order: NDArray | None, start: EpochPosition, chosen: ChosenRows | None = None
    ) -> None:
        """``order``: None for rows in the order of the data, or of ``chosen``."""
        self.start = start
        if order is None and chosen is not None and chosen.numbers is not None:
            order = chosen.numbers
        self._sampler, self._order, self._chosen = sampler, order, chosen
        self.rows = sampler.rows
        self._size, self.step = sampler.batch_size, sampler.batch_size * sampler.world_size
        self._before = sampler.rank * sampler.batch_size  # rows of a step that other ranks get before this one
        self._last_whole = sampler.rows - self.step if order is not None else -1
        self.next: deque[tuple[int, NDArray]] = deque()  # the position after a batch, and its rows

    def add(self, position: int) -> bool:
        """Add the batch after the last one, or the one at this position; False: the epoch has no more."""
        at = self.next[-1][0] if self.next else position
        if at <= self._last_whole and self._order is not None:  # as the sampler's step, in less time: for small batches
            first = at + self._before
            self.next.append((at + self.step, self._order[first : first + self._size]))
            return True
        step = self._sampler.step(at)
        if step is None:
            return False
        self.next.append((step.after, self._rows_between(step.first, step.last)))
        return True

    def drop_until(self, position: int) -> None:
        """Drop the batches that have been handed out."""
        while self.next and self.next[0][0] <= position:
            self.next.popleft()

    def whole_batches(self, position: int, most: int) -> NDArray | None:
        """The rows of the next whole batches, a line for each; None: there is none, or ``next`` has some."""
        count = min(most, (self.rows - position) // self.step)
        if self.next or count < 1:
            return None
        rows = self._rows_between(position, position + count * self.step).reshape(count, self.step)
        return rows[:, self._before : self._before + self._size]

    def _rows_between(self, first: int, last: int) -> NDArray:
        if self._order is not None and last <= len(self._order):
            return self._order[first:last]
        positions = np.arange(first, last, dtype=np.int64) % self._sampler.rows
        if self._order is not None:
            return self._order[positions]
        return positions if self._chosen is None else self._chosen.at(positions)


class _Loop:
    """One epoch; the next call retries a batch that failed or was interrupted."""

    def __init__(
        self,
        upcoming: _EpochBatches,
        gatherer: Gatherer,
        transform: Callable[[dict[str, Any]], Any] | None,
        progress: _EpochProgress,
        orders: EpochOrders | None,
        begin_next_epoch: Callable[[int], _EpochBatches | None] | None,
    ) -> None:
        # The batch that is returned next, and those that are prefetched behind it.
        self._upcoming, self._step = upcoming, upcoming.step
        self._host = Prefetcher(gatherer) if isinstance(gatherer, HostGatherer) else None
        self._gatherer: Gatherer | Prefetcher = self._host or gatherer
        self._transform, self._progress, self._orders = transform, progress, orders
        self._begin_next_epoch = begin_next_epoch
        self._run: Iterator[Any] = iter(())  # the next batches of a fast consumer
        self._half = (upcoming.rows + 1) // 2 if orders is not None else sys.maxsize  # rows: the next order is prepared

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # In each way to a batch, that it is given out is noted by the last instruction: after an error or an
        # interruption, also one of the listeners, the same batch comes again.
        try:
            while True:
                for batch in self._run:  # little is done here: these batches may be small
                    if training_step_listeners.listeners:
                        training_step_listeners.batch_taken()
                    self._progress.given_out += self._step
                    return batch
                if self._host is None or not self._start_run(self._host):
                    break
        except BaseException:
            self._run = iter(())  # the failed batch, and those behind it, are gathered again
            raise
        return self._next_measured()

    def _start_run(self, host: Prefetcher) -> bool:
        """Take the next batches of a fast consumer; False: it may be slow, or has no whole batch left."""
        if not host.unmeasured:
            return False
        group, position = host.gatherer.group, self._progress.given_out
        most = min(host.unmeasured * group, max(group, _MOST_NUMBERS // self._step))
        left = self._half - position
        if left > 0:
            most = min(most, -(-left // self._step))  # no further than to the middle
        else:
            self._prepare_next_order()
        self._upcoming.drop_until(position)
        rows = self._upcoming.whole_batches(position, most)
        if rows is None:
            return False
        host.unmeasured -= -(-len(rows) // group)
        run: Iterator[Any] = host.gatherer.gather_run(rows)
        self._run = run if self._transform is None else map(self._transformed, run)
        return True

    def _next_measured(self) -> Any:
        upcoming, gatherer, progress = self._upcoming, self._gatherer, self._progress
        upcoming.drop_until(progress.given_out)
        if not upcoming.next and not upcoming.add(progress.given_out):
            progress.done = True
            raise StopIteration
        after, rows = upcoming.next[0]
        batch: Any = gatherer.gather(rows)
        if gatherer.ahead:
            self._prefetch(gatherer.ahead)
        if self._transform is not None:
            batch = self._transformed(batch)
        if after >= self._half:
            self._prepare_next_order()
        if training_step_listeners.listeners:
            training_step_listeners.batch_taken()
        progress.given_out = after
        return batch

    def _transformed(self, batch: Batch) -> Any:
        """In the consumer's thread, so that its random numbers come in the same order in every run."""
        assert self._transform is not None
        try:
            return self._transform(batch)
        except StopIteration as problem:  # it would end the loop as if the epoch had no more batches
            raise RuntimeError("transform raised StopIteration") from problem

    def _prepare_next_order(self) -> None:
        """Have the order of the next epoch computed: half of this one is given out."""
        self._half = sys.maxsize
        if self._orders is not None:
            self._orders.prepare(self._progress.epoch + 1)

    def _prefetch(self, ahead: int) -> None:
        """Begin batches until as many are ahead as the gatherer takes, in the next epoch too where that is known.

        Otherwise the first batch of every epoch would be waited for: 4 % of an epoch of 14 batches of 33 MB.
        """
        this = self._upcoming
        waiting = this.next
        while len(waiting) <= ahead and this.add(self._progress.given_out):
            self._gatherer.begin(waiting[-1][1])
        if len(waiting) <= ahead and self._begin_next_epoch is not None:
            following = self._begin_next_epoch(this.start.epoch)
            while following is not None and len(this.next) + len(following.next) <= ahead and following.add(0):
                self._gatherer.begin(following.next[-1][1])

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            say("a loop over batches cannot be pickled"),
            why=say("it is an epoch in progress in this process"),
            fix=(
                say("send batches.state_dict() and load it in the other process"),
                say("or send the Data: the other process attaches to the shared copy"),
            ),
        )


class EpochOrders:
    """The order of each epoch. That of the next one is computed in a thread, in the second half of an epoch.

    Computing it takes about 20 ns a row: with rows of 2 kB and a fast training step, a fifth of the time of an epoch.
    """

    def __init__(self, rows: int, seed: int, chosen: ChosenRows | None = None) -> None:
        self._rows, self._seed, self._chosen = rows, seed, chosen
        self._next: tuple[int, int, Task[NDArray]] | None = None  # epoch, and the process that computes
        self._known: tuple[int, NDArray] | None = None  # by ``known``

    def take(self, epoch: int) -> NDArray:
        """The order of an epoch, which is waited for if it is being computed."""
        known, self._known = self._known, None
        if known is not None and known[0] == epoch:
            return known[1]
        following, self._next = self._next, None
        if following is not None and following[:2] == (epoch, os.getpid()):
            with suppress(MemoryError):  # computed again below, when there may be more
                return following[2].result()
        return _order(self._rows, self._seed, epoch, self._chosen)

    def known(self, epoch: int) -> NDArray | None:
        """The order of an epoch, if it is ready or takes no time; ``take`` returns the same."""
        if self._known is not None and self._known[0] == epoch:
            return self._known[1]
        ready = self._next is not None and self._next[:2] == (epoch, os.getpid()) and self._next[2].ready
        if not ready and self._rows >= _LEAST_PREPARED:
            return None
        self._known = epoch, self.take(epoch)
        return self._known[1]

    def prepare(self, epoch: int) -> None:
        """Compute the order of an epoch in a thread, unless it is too small or too large for that."""
        if not _LEAST_PREPARED <= self._rows <= _MOST_PREPARED or not room_for_threads(1):
            return
        task = Task(partial(_order, self._rows, self._seed, epoch, self._chosen))
        if task.start():
            self._next = epoch, os.getpid(), task


def _order(rows: int, seed: int, epoch: int, chosen: ChosenRows | None) -> NDArray:
    order = permutation(rows, seed, epoch)
    if chosen is not None:
        order = chosen.at(order)
        order.flags.writeable = False  # as that of all rows
    return order


def _shown(columns: Mapping[str, Column]) -> list[str]:
    """The columns with types and shapes. Not translated: they are compared with states of other runs."""
    return sorted(
        f"{name} {getattr(column, 'dtype', 'ragged')}{list(column.shape)}" for name, column in columns.items()
    )


_HANDOVER = 1e-4  # seconds: starting a thread and waiting for it
_COLDER = 0.25  # of a copy's time: the cost of filling a third buffer, which is not in the CPU cache
_LEAST_MEASURED = 3  # batches
_REMEMBERED = 9
_UNMEASURED, _MOST_UNMEASURED = 8, 64  # batches or groups between two measurements of a fast consumer
_MOST_NUMBERS = 1 << 16  # of rows of all ranks that are looked up at once for them: 512 kB


def prefetch_pays(gathering: float, consuming: float) -> bool:
    """Whether doing both at once saves more seconds than it costs."""
    return min(gathering, consuming) > _HANDOVER + _COLDER * gathering


class Prefetcher:
    """Wraps a gatherer, which may be called from any thread, for one consumer."""

    def __init__(self, gatherer: HostGatherer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.gatherer = gatherer
        self.ahead = 0  # 1 as long as ``_slow`` is not 0: a fast consumer's next batch is not looked up in advance
        # How many of the next batches or groups a fast consumer may be given without ``gather``, which reads the clock.
        self.unmeasured = 0
        self._next_unmeasured = _UNMEASURED
        self._gather, self._background, self._clock = gatherer.gather, gatherer.gather_on_one_core, clock
        self._gathering: deque[float] = deque(maxlen=_REMEMBERED)
        self._consuming: deque[float] = deque(maxlen=_REMEMBERED)
        self._slow = 0  # how many of the next batches still remember a consumer that took longer than a hand-over
        self._returned: float | None = None
        self._pending: tuple[NDArray, int, Task[tuple[Batch, float]]] | None = None  # rows, and the process

    def gather(self, rows: NDArray) -> Batch:
        asked, returned = self._clock(), self._returned
        is_fast = returned is not None and not self._is_slow(asked - returned)
        pending, self._pending = self._pending, None
        # A forked child has the task but not its thread.
        if pending is not None and pending[0] is rows and pending[1] == os.getpid():
            batch, seconds = pending[2].result()
            self._gathering.append(seconds)
            self._returned = self._clock()
        else:
            batch = self._gather(rows)
            self._returned = self._clock()
            self._gathering.append(self._returned - asked)
        if is_fast:
            self.unmeasured, self._returned = self._next_unmeasured, None
            self._next_unmeasured = min(2 * self._next_unmeasured, _MOST_UNMEASURED)
        return batch

    def _is_slow(self, seconds: float) -> bool:
        """Whether this time of the consumer, or one of the last nine, was longer than a hand-over."""
        self._consuming.append(seconds)
        if seconds >= _HANDOVER:
            self._slow, self._next_unmeasured = _REMEMBERED, _UNMEASURED
        elif self._slow:
            self._slow -= 1
        self.ahead = min(self._slow, 1)
        return self._slow > 0

    def begin(self, rows: NDArray) -> None:
        """Start gathering these rows where measurements show that it pays."""
        if not self._slow or len(self._consuming) < _LEAST_MEASURED:
            return  # the first check saves a fast consumer the two medians
        if not prefetch_pays(median(self._gathering), median(self._consuming)):
            return
        if not room_for_threads(1):  # its thread could end before it begins, and the batch would never come
            return
        task = Task(partial(_timed, self._background, self._clock, rows))
        if not task.start():
            return  # the batch is gathered when it is asked for
        self._pending = rows, os.getpid(), task
        self._returned = self._clock()


def _timed(gather: Callable[[NDArray], Batch], clock: Callable[[], float], rows: NDArray) -> tuple[Batch, float]:
    """The batch of these rows, and the seconds that gathering took."""
    start = clock()
    batch = gather(rows)
    return batch, clock() - start
