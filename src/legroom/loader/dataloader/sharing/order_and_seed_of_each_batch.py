"""The order and the random numbers of a group: functions of its seed, the epoch and the number of the batch.

With ``share=``, the generators of torch, ``random`` and NumPy are seeded before each batch. So a batch is the same
whichever process makes it, with any number of workers. The order of an epoch is drawn from generators that are seeded
the same way. The program's own generators are restored after each use.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from legroom.loader.dataloader.resume import DatasetProxy

if TYPE_CHECKING:
    import torch

Position = tuple[int, int]  # epoch, number of the batch in it

_BITS = 63  # torch takes a signed number of 64 bits
_MOST_SAMPLERS = 8  # one in another
_BLOCK = 4096  # batches
_MOST_EMPTY = 1000  # epochs without batches, one after the other
_ORDER = -1  # instead of the number of a batch: the seed of the order


def name_seed(name: str) -> int:
    """The seed of a group whose trainers give no generator."""
    return _number(f"group {name}")


def batch_seed(seed: int, position: Position) -> int:
    """The seed for one batch of a group."""
    return _number(f"batch {seed} {position[0]} {position[1]}")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> (64 - _BITS)


def seed_generators(seed: int) -> None:
    """Seed the global generators of this process, of the CPU alone."""
    import torch

    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Within it, the global generators may be seeded; they are restored afterwards."""
    import torch

    kept = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


@contextmanager
def like_a_worker() -> Iterator[None]:
    """Within it, torch computes with one thread, as in a worker: sums over several threads differ in the last bits."""
    import torch

    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class SeededDataset(DatasetProxy):
    """A dataset that is asked for a seed and the indices of a batch: ``[seed, index, …]``."""

    def __init__(self, dataset: Any, batched: bool) -> None:
        super().__init__(dataset, _batched=batched)

    def __getitems__(self, items: list[Any]) -> Any:
        """The samples of a batch; without automatic batching, the one sample."""
        seed, *indices = items
        seed_generators(seed)
        if not self._batched:
            return self._dataset[indices[0]]
        many = getattr(self._dataset, "__getitems__", None)
        return many(indices) if many else [self._dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]


class SeededStream(DatasetProxy):
    """An IterableDataset with a ``state_dict``: the generators are seeded before each batch of a worker.

    The seed depends on the epoch, the worker and the number of its batch, which is part of the state.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int, batch_size: int | None) -> None:
        super().__init__(dataset, _seed=seed, _epoch=epoch, _size=batch_size or 1, _batches=0, _loaded=False)

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        worker = 0 if info is None else info.id
        if not self._loaded:
            self._tell_epoch()
        seed_generators(self._seed_of(worker, self._batches))
        samples = iter(self._dataset)
        while True:
            seed_generators(self._seed_of(worker, self._batches))
            vars(self)["_batches"] += 1
            for _ in range(self._size):
                try:
                    sample = next(samples)
                except StopIteration:
                    return
                yield sample

    def _seed_of(self, worker: int, batch: int) -> int:
        return _number(f"stream {self._seed} {self._epoch} {worker} {batch}")

    def _tell_epoch(self) -> None:
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch."""
        return {"batches": self._batches, "dataset": self._dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._tell_epoch()
        self._dataset.load_state_dict(state["dataset"])
        vars(self).update(_batches=state["batches"], _loaded=True)


class Order:
    """The indices of every batch of one epoch, taken from the sampler in blocks.

    Integers are kept as an array: a fifth of the memory of lists.
    """

    def __init__(self, batches: Iterable[Any], batched: bool) -> None:
        self._rows: list[list[Any]] | None = None
        indices, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        remaining = iter(batches)
        while block := list(islice(remaining, _BLOCK)):
            rows = block if batched else [[one] for one in block]
            if self._rows is None and (integers := _integers(rows)) is not None:
                indices.append(integers)
                lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
                continue
            if self._rows is None:  # all before were integers
                before = iter(np.concatenate(indices).tolist())
                self._rows = [list(islice(before, length)) for length in np.concatenate(lengths).tolist()]
            self._rows += map(list, rows)
        self._flat = np.concatenate(indices)
        self._ends = np.cumsum(np.concatenate(lengths))
        self._count = len(self._ends) if self._rows is None else len(self._rows)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> list[Any]:
        if self._rows is not None:
            return self._rows[number]
        start = int(self._ends[number - 1]) if number else 0
        found: list[Any] = self._flat[start : int(self._ends[number])].tolist()
        return found

    @property
    def digest(self) -> str:
        """The same for equal orders in every process."""
        if self._rows is not None:
            return hashlib.sha256(repr(self._rows).encode()).hexdigest()
        return hashlib.sha256(self._flat.tobytes() + self._ends.tobytes()).hexdigest()


def _integers(rows: list[Any]) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    if set(map(type, chain.from_iterable(rows))) <= {int}:
        with suppress(OverflowError):  # of more than 64 bits
            return np.fromiter(chain.from_iterable(rows), np.int64)
    return None


class Orders:
    """The orders of the epochs of a group, by a sampler; the last two are kept."""

    def __init__(self, sampler: Any, batched: bool, seed: int, generator: Any = None) -> None:
        self._sampler, self._batched, self._seed = sampler, batched, seed
        self._generator = generator
        self._kept: dict[int, Order] = {}
        self._lock = threading.Lock()  # a producer has two threads

    def of(self, epoch: int) -> Order:
        """The order of an epoch."""
        with self._lock:
            if epoch not in self._kept:
                while len(self._kept) >= 2:
                    del self._kept[next(iter(self._kept))]
                self._kept[epoch] = self.draw(epoch)
            return self._kept[epoch]

    def forget(self) -> None:
        """Draw all orders again when they are needed."""
        with self._lock:
            self._kept.clear()

    def draw(self, epoch: int) -> Order:
        """Draw the order of an epoch; the sampler and all generators are left as they were."""
        seed = batch_seed(self._seed, (epoch, _ORDER))
        nested = samplers(self._sampler)
        own = _generators([self._generator, *(getattr(one, "generator", None) for one in nested)])
        states = [(one, one.get_state()) for one in own]
        epochs = [(one, one.epoch) for one in nested if counts_epochs(one)]
        with generators_restored():
            try:
                seed_generators(seed)
                for one in own:
                    one.manual_seed(seed)
                for one, _ in epochs:
                    one.set_epoch(epoch)
                return Order(self._sampler, self._batched)
            finally:
                for one, state in states:
                    one.set_state(state)
                for one, before in epochs:
                    one.set_epoch(before)

    def items(self, position: Position) -> list[Any]:
        """What a SeededDataset is asked for: the seed and the indices of a batch."""
        return [batch_seed(self._seed, position), *self.of(position[0])[position[1]]]

    def after(self, position: Position) -> Position:
        """The next position, in the next epoch after the last batch of one."""
        return position_after(position, lambda epoch: len(self.of(epoch)))


class Endless:
    """A batch sampler without end: what a SeededDataset is asked for, from a position on."""

    def __init__(self, orders: Orders, start: Position) -> None:
        self._orders, self._start = orders, start

    def __iter__(self) -> Iterator[list[Any]]:
        position = self._start
        while True:
            yield self._orders.items(position)
            position = self._orders.after(position)


def position_after(position: Position, length: Callable[[int], int]) -> Position:
    """The next position in a sequence of epochs of some lengths. A sampler may have epochs without batches."""
    epoch, number = position
    if number + 1 < length(epoch):
        return epoch, number + 1
    later = range(epoch + 1, epoch + 1 + _MOST_EMPTY)
    return next((one for one in later if length(one)), epoch + 1), 0


def samplers(outermost: Any) -> list[Any]:
    """A sampler and those that it takes its indices from."""
    found: list[Any] = []
    todo = [outermost]
    while todo and len(found) < _MOST_SAMPLERS:
        one = todo.pop(0)
        if one is not None and not any(one is other for other in found):
            found.append(one)
            todo += [getattr(one, "batch_sampler", None), getattr(one, "sampler", None)]
    return found


def counts_epochs(sampler: Any) -> TypeGuard[Any]:
    """Whether it is a sampler that is told the epoch, as DistributedSampler is."""
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)


def _generators(found: list[Any]) -> list[torch.Generator]:
    import torch

    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
