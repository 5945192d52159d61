"""``Batches``: the loop that ``data.batches(…)`` returns.

A Batches may be looped over any number of times. Each loop is an epoch with its own order: the epoch that was set,
or the next one counted by the Data. The position advances when a batch is returned, not when it is prefetched, so a
state_dict taken inside the loop covers exactly the batches that the loop has seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from legroom.errors import UsageError
from legroom.loader.batches.batch_arguments import BatchSettings, columns_of
from legroom.loader.batches.batch_state import EpochPosition, as_dict, fingerprint, from_dict
from legroom.loader.batches.gather import Gatherer, HostGatherer
from legroom.loader.batches.prefetch import Prefetcher
from legroom.loader.batches.transfer_path import gatherer_for
from legroom.loader.ranks import process_group, rank_and_world
from legroom.loader.sampling import RankSampler, SampledBatch, permutation
from legroom.system.argument_checks import check_integer
from legroom.words import say

if TYPE_CHECKING:
    from legroom.loader.batches.open_data import Data

NDArray = np.ndarray[Any, Any]


@dataclass(slots=True)
class _EpochProgress:
    """How far a loop has come; it outlives the loop, which ``break`` drops."""

    position: EpochPosition
    done: bool = False


class Batches:
    """Batches of a Data: dicts of column names to tensors or arrays. ``len`` is the number of batches in an epoch."""

    def __init__(self, data: Data, settings: BatchSettings) -> None:
        settings.check()
        self._data, self._settings = data, settings
        columns = columns_of(data, settings.keys)
        self._fingerprint = fingerprint(data.info, columns, shuffle=settings.shuffle, seed=settings.seed)
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
        self._epoch = settings.epoch  # None: the Data counts
        self._resume: EpochPosition | None = None
        self._progress: _EpochProgress | None = None

    @property
    def path(self) -> str:
        """The path of the rows: cpu, cuda-registered, cuda-pinned, cuda-copy or cuda-resident."""
        return self._gatherer.path

    @property
    def why(self) -> str:
        """Why this path was chosen."""
        return self._gatherer.why

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        position, self._resume = self._next_position(), None
        if self._epoch is None and self._settings.shuffle:
            # Only shuffled loops count: a rank that evaluates more often than others must keep the same epoch.
            self._data.next_epoch = position.epoch + 1
        self._progress = _EpochProgress(position)
        seed = self._settings.seed
        order = permutation(self.sampler.rows, seed, position.epoch) if self._settings.shuffle else None
        gatherer = self._gatherer
        if isinstance(gatherer, HostGatherer):
            gatherer = Prefetcher(gatherer, gatherer.gather_on_one_core)
        return _Loop(self.sampler, order, gatherer, self._settings.transform, self._progress)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of that epoch for every loop from now on."""
        self._epoch = check_integer("epoch", epoch, 0)
        self._progress = None
        if self._resume is not None and self._resume.epoch != self._epoch:
            self._resume = None

    def state_dict(self) -> dict[str, Any]:
        """The position of the latest loop: ``load_state_dict`` resumes with the batch after it."""
        progress = self._progress
        position = self._next_position() if progress is None or progress.done else progress.position
        return as_dict(position, self._fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there in the next loop; a state of other data or of another order is refused."""
        self._resume = from_dict(state, self._fingerprint)
        self._progress = None
        if self._epoch is not None:
            self._epoch = self._resume.epoch

    def __reduce__(self) -> tuple[object, ...]:
        # The other process finds out its own rank and starts at the beginning.
        return Batches, (self._data, replace(self._settings, epoch=self._epoch))

    def _next_position(self) -> EpochPosition:
        if self._resume is not None:
            return self._resume
        return EpochPosition(self._data.next_epoch if self._epoch is None else self._epoch)


class _Loop:
    """One epoch; the next call retries a batch that failed or was interrupted."""

    def __init__(
        self,
        sampler: RankSampler,
        order: NDArray | None,
        gatherer: Gatherer,
        transform: Callable[[dict[str, Any]], Any] | None,
        progress: _EpochProgress,
    ) -> None:
        self._sampler, self._order, self._gatherer = sampler, order, gatherer
        self._transform, self._progress = transform, progress
        self._step = sampler.step(progress.position.position)
        self._rows = self._rows_of(self._step)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._step is None or self._rows is None:
            self._progress.done = True
            raise StopIteration
        batch: Any = self._gatherer.gather(self._rows)
        following = self._sampler.step(self._step.after)
        rows = self._rows_of(following)
        if rows is not None:
            self._gatherer.begin(rows)
        if self._transform is not None:
            # In the consumer's thread, so that its random numbers come in the same order in every run.
            batch = self._transform(batch)
        self._progress.position = EpochPosition(self._progress.position.epoch, self._step.after)
        self._step, self._rows = following, rows
        return batch

    def _rows_of(self, step: SampledBatch | None) -> NDArray | None:
        if step is None:
            return None
        if self._order is not None and step.last <= len(self._order):
            return self._order[step.first : step.last]
        positions = np.arange(step.first, step.last, dtype=np.int64) % self._sampler.rows
        return positions if self._order is None else self._order[positions]

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            say("a loop over batches cannot be pickled"),
            why=say("it is an epoch in progress in this process"),
            fix=(
                say("send batches.state_dict() and load it in the other process"),
                say("or send the Data: the other process attaches to the shared copy"),
            ),
        )
