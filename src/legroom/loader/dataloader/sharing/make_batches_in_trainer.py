"""Batches that a trainer makes itself, equal bit by bit to those of the group.

A trainer that is alone makes them with workers, as without ``share``. One that waits for its group makes the first ones
in this process; if the group does not come back within seconds, it starts workers for the rest of the epoch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from legroom.advice.memory_need import SPARE
from legroom.errors import BudgetTooSmall, WorkerDied
from legroom.loader.dataloader import resume
from legroom.loader.dataloader.epoch_iterator import Progress, WorkerState
from legroom.loader.dataloader.pin_memory import map_batch
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import (
    Orders,
    Position,
    SeededDataset,
    SeededStream,
    generators_restored,
    like_a_worker,
)  # fmt: skip
from legroom.loader.measure_process_memory import free_memory_now
from legroom.messages import say
from legroom.units import format_size

_WAIT_S = 5.0  # before workers are started
_WAIT_BATCHES = 4
_MEMORY_WAIT_S = 1.0  # for other trainers to free theirs
_CHECKED = 1 << 20  # bytes of a batch, from which on free memory is checked before the next one
DEATHS = 3  # of workers at one batch, before it is an error: fewer may be an accident
StartLoader = Callable[..., Any]  # makes an ordinary loader, with the arguments that say what it loads


class RestOfEpoch:
    """A batch sampler: what a SeededDataset is asked for, from one position to the end of its epoch."""

    def __init__(self, orders: Orders, start: Position) -> None:
        self._orders, self.start = orders, start

    def __iter__(self) -> Iterator[list[Any]]:
        epoch, first = self.start
        for number in range(first, len(self._orders.of(epoch))):
            yield self._orders.items((epoch, number))

    def __len__(self) -> int:
        return len(self._orders.of(self.start[0])) - self.start[1]


class _Workers:
    """Takes batches from workers of this trainer's own, and starts them again when one is killed."""

    def __init__(self) -> None:
        self._inner: Any = None
        self._next: Position | None = None  # what the workers deliver next
        self._failed: Position | None = None  # a worker died while this batch was made
        self._deaths = 0  # so often

    @property
    def workers(self) -> Any:
        """The iterator that has the workers; None if there are none."""
        return self._inner

    def another(self) -> Self:
        """The same, with workers of its own."""
        made = copy.copy(self)
        made.rejoined()
        return made

    def start(self, position: Position, state: StreamState | None = None) -> None:
        """Start workers at a position; ``state``: of a stream there."""
        raise NotImplementedError

    def state_after(self, state: StreamState | None, sent: tuple[int, bytes, int | None] | None) -> StreamState | None:
        """The state of a stream after a batch, with what was sent with that."""
        return None

    def _take(self, position: Position, after: Position, state: StreamState | None = None) -> Any:
        """The next batch of the workers, which is the one at ``position``; StopIteration if there is none."""
        while True:
            if self._inner is None:
                self.start(position, state)
            self._next = after  # before it is taken: after an interruption, workers start again at this batch
            try:
                return next(self._inner)
            except WorkerDied:
                self.stop()
                self._deaths = self._deaths + 1 if self._failed == position else 1
                self._failed = position
                if self._deaths == DEATHS:
                    self._failed = None
                    raise

    def end_epoch(self) -> None:
        """The epoch is over, or was left."""
        self.stop()

    def rejoined(self) -> None:
        """The group has the batches again: end the workers."""
        self.stop()

    def stop(self) -> None:
        """End the workers."""
        self._inner = self._next = None


def tensor_bytes(batch: Any) -> int:
    """Bytes of the tensors and arrays of a batch."""
    total = 0

    def count(one: Any) -> Any:
        nonlocal total
        size = getattr(one, "nbytes", None)
        total += size if isinstance(size, int) else 0
        return one if isinstance(size, int) else None

    map_batch(batch, count)
    return total


class OwnBatches(_Workers):
    """Batches of a map-style dataset."""

    def __init__(
        self, dataset: Any, batched: bool, collate_fn: Any, orders: Orders, start: StartLoader,
        fresh: Callable[[], Any] | None = None, *, persistent: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._dataset, self._collate, self._orders = SeededDataset(dataset, batched), collate_fn, orders
        self._start_loader, self._batched = start, batched
        self._fresh = fresh  # a copy of the dataset from before it was used; None where there is none
        self._used_here = False  # files that the dataset has opened here must not be inherited by workers
        self._persistent = persistent
        self._loader: Any = None
        self._rest: RestOfEpoch | None = None
        self._bytes = 0  # of the last batch that was made here
        self._since: float | None = None  # when the first of these batches was made
        self._count = 0

    def make(
        self, position: Position, state: StreamState | None, *, alone: bool, expected: bool
    ) -> tuple[Any, StreamState | None]:
        """The batch at a position, and no state.

        ``alone``: no other trainer is there. ``expected``: a producer will soon make the batches.
        """
        return self._made(position, alone=alone, expected=expected), None

    def _made(self, position: Position, *, alone: bool, expected: bool) -> Any:
        if self._inner is not None and self._next == position:
            return self._taken(position)
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        self._count += 1
        self._leave_epoch()
        if alone or (not expected and self._count > _WAIT_BATCHES and now > self._since + _WAIT_S):
            self.start(position)
            return self._taken(position)
        return self.make_here(position)

    def _taken(self, position: Position) -> Any:
        try:
            return self._take(position, self._orders.after(position))
        except StopIteration:
            self.stop()
            return self.make_here(position)

    def make_here(self, position: Position) -> Any:
        """The batch, made in this process."""
        self._used_here = True
        self._check_memory()
        with generators_restored(), like_a_worker():
            batch = self._collate(self._dataset.__getitems__(self._orders.items(position)))
        self._bytes = tensor_bytes(batch)
        return batch

    def _check_memory(self) -> None:
        """Raise if another batch does not fit: a cgroup kills without an error.

        Its samples and the batch exist at once, and another trainer may be about to make one too.
        """
        until = time.monotonic() + _MEMORY_WAIT_S
        while True:
            memory = free_memory_now() if self._bytes >= _CHECKED else None
            if memory is None or memory.free >= 4 * self._bytes + SPARE:
                return
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        raise BudgetTooSmall(
            say("not enough free memory to make a batch in the training process"),
            why=say(
                "its samples and the batch take {need}, and as much must stay free for another trainer. "
                "{free} are free ({source})",
                need=format_size(2 * self._bytes), free=format_size(memory.free), source=memory.source,
            ),
            fix=(say("raise the memory limit"), say("use fewer trainers or a smaller batch")),
        )  # fmt: skip

    def start(self, position: Position, state: StreamState | None = None) -> None:
        """Start workers at a position, or let those that persist begin there."""
        self._inner = None
        loader, self._loader = self._loader, None  # workers whose start is interrupted are not used again
        if loader is None:
            dataset = self._dataset
            if self._used_here and self._fresh is not None and (fresh := self._fresh()) is not None:
                dataset = SeededDataset(fresh, self._batched)
            self._rest = RestOfEpoch(self._orders, position)
            loader = self._start_loader(dataset, batch_sampler=self._rest, persistent_workers=self._persistent)
        assert self._rest is not None
        self._rest.start = position
        self._inner, self._next, self._loader = iter(loader), position, loader

    def _leave_epoch(self) -> None:
        self._inner = self._next = None
        if not self._persistent:
            self._loader = None

    def rejoined(self) -> None:
        """The group has the batches again: end the workers."""
        self._since, self._count = None, 0
        self.stop()

    def end_epoch(self) -> None:
        """Persistent workers wait for the next epoch; others end."""
        self._since, self._count = None, 0
        self._leave_epoch()

    def stop(self) -> None:
        """End the workers."""
        super().stop()
        self._loader = None


class OwnStream(_Workers):
    """Batches of an IterableDataset with a ``state_dict``, always made by workers: its position is in them."""

    def __init__(
        self, dataset: Any, batch_size: int | None, drop_last: bool, num_workers: int, seed: int, start: StartLoader
    ) -> None:
        super().__init__()
        self._dataset, self._start_loader = dataset, start
        self._seed, self._size, self._drop_last, self._num_workers = seed, batch_size, drop_last, num_workers
        self.progress = self.new_progress((0, 0))  # in a producer: the states of the workers after the last batch

    def new_progress(self, position: Position, state: StreamState | None = None) -> Progress:
        """What is known at a position: nothing, or a state that was taken there."""
        turn, workers = (0, {}) if state is None else state
        return Progress({}, position[1], batch_size=self._size, num_workers=self._num_workers, turn=turn,
                        workers=dict(workers))  # fmt: skip

    def make(
        self, position: Position, state: StreamState | None, *, alone: bool, expected: bool
    ) -> tuple[Any, StreamState | None]:
        """The batch at a position, where the workers have this state, and the one after it.

        StopIteration at the end of the epoch.
        """
        if self._next != position:
            self.stop()
        batch = self._take(position, (position[0], position[1] + 1), state)
        of: Progress = self._inner._progress
        return batch, stream_state(of)

    def state_after(self, state: StreamState | None, sent: tuple[int, bytes, int | None] | None) -> StreamState | None:
        """See the base class."""
        progress = self.new_progress((0, 0), state)
        progress.add_state(sent)
        return stream_state(progress)

    def start(self, position: Position, state: StreamState | None = None) -> None:
        """Start workers for the rest of an epoch, with the states that are known at this position."""
        import torch

        epoch, number = position
        seeded = SeededStream(self._dataset, self._seed, epoch, self._size)
        generator = torch.Generator().manual_seed(self._seed ^ epoch)  # of the workers' seeds, the same everywhere
        loader = self._start_loader(seeded, batch_size=self._size, drop_last=self._drop_last, generator=generator)
        turn, known = state or (0, {})
        if number:
            loader.load_state_dict({
                "version": resume.VERSION, "begun": True, "yielded": number, "beyond": [], "batch_size": self._size,
                "num_workers": self._num_workers, "generators": {}, "seeded": False, "lasting": False,
                "turn": turn, "workers": resume.saved_workers(known),
            })  # fmt: skip
        self._inner, self._next = iter(loader), position


StreamState = tuple[int, Mapping[int, WorkerState]]  # whose turn it is; what is known of each worker


def stream_state(progress: Progress) -> StreamState:
    """What a stream continues with."""
    return progress.turn, progress.workers
