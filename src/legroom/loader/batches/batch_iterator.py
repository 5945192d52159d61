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
class _Progress:
    """How far a loop has come; outlives the loop, which ``break`` drops."""

    place: EpochPosition
    done: bool = False


class Batches:
    """Batches of a Data: dicts of column names to tensors or arrays. ``len`` is the batches of a whole epoch."""

    def __init__(self, data: Data, settings: BatchSettings) -> None:
        settings.check()
        self._data, self._settings = data, settings
        columns = columns_of(data, settings.keys)
        self._fingerprint = fingerprint(data.info, columns, shuffle=settings.shuffle, seed=settings.seed)
        rank, world_size = rank_and_world(settings.rank, settings.world_size, os.environ, process_group())
        self.share = RankSampler(
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
        self._progress: _Progress | None = None

    @property
    def path(self) -> str:
        """The way that rows take: cpu, cuda-registered, cuda-pinned, cuda-copy or cuda-resident."""
        return self._gatherer.path

    @property
    def why(self) -> str:
        """Why they take it."""
        return self._gatherer.why

    def __len__(self) -> int:
        return len(self.share)

    def __iter__(self) -> Iterator[Any]:
        place, self._resume = self._next_place(), None
        if self._epoch is None and self._settings.shuffle:
            # Loops without an order do not count: one rank may evaluate more than another and must not drift apart.
            self._data.next_epoch = place.epoch + 1
        self._progress = _Progress(place)
        seed = self._settings.seed
        order = permutation(self.share.rows, seed, place.epoch) if self._settings.shuffle else None
        gatherer = self._gatherer
        if isinstance(gatherer, HostGatherer):
            gatherer = Prefetcher(gatherer, gatherer.gather_aside)
        return _Loop(self.share, order, gatherer, self._settings.transform, self._progress)

    def set_epoch(self, epoch: int) -> None:
        """Every loop from now on has the order of that epoch, until another is set."""
        self._epoch = check_integer("epoch", epoch, 0)
        self._progress = None
        if self._resume is not None and self._resume.epoch != self._epoch:
            self._resume = None

    def state_dict(self) -> dict[str, Any]:
        """Where the latest loop stands: what ``load_state_dict`` needs to go on with the batch after it."""
        going = self._progress
        place = self._next_place() if going is None or going.done else going.place
        return as_dict(place, self._fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next loop goes on from there; a state of other data or of another order is refused."""
        self._resume = from_dict(state, self._fingerprint)
        self._progress = None
        if self._epoch is not None:
            self._epoch = self._resume.epoch

    def __reduce__(self) -> tuple[object, ...]:
        # Another process finds out for itself which rank it is, and begins at the beginning.
        return Batches, (self._data, replace(self._settings, epoch=self._epoch))

    def _next_place(self) -> EpochPosition:
        if self._resume is not None:
            return self._resume
        return EpochPosition(self._data.next_epoch if self._epoch is None else self._epoch)


class _Loop:
    """One pass; a batch that could not be made or was interrupted is made again by the next call."""

    def __init__(
        self,
        share: RankSampler,
        order: NDArray | None,
        gatherer: Gatherer,
        transform: Callable[[dict[str, Any]], Any] | None,
        progress: _Progress,
    ) -> None:
        self._share, self._order, self._gatherer = share, order, gatherer
        self._transform, self._progress = transform, progress
        self._step = share.step(progress.place.position)
        self._rows = self._rows_of(self._step)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._step is None or self._rows is None:
            self._progress.done = True
            raise StopIteration
        batch: Any = self._gatherer.gather(self._rows)
        following = self._share.step(self._step.after)
        rows = self._rows_of(following)
        if rows is not None:
            self._gatherer.begin(rows)
        if self._transform is not None:
            # In the consumer's thread: what it draws at random then comes in the same order in every run.
            batch = self._transform(batch)
        self._progress.place = EpochPosition(self._progress.place.epoch, self._step.after)
        self._step, self._rows = following, rows
        return batch

    def _rows_of(self, step: SampledBatch | None) -> NDArray | None:
        if step is None:
            return None
        if self._order is not None and step.last <= len(self._order):
            return self._order[step.first : step.last]
        places = np.arange(step.first, step.last, dtype=np.int64) % self._share.rows
        return places if self._order is None else self._order[places]

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            say("a loop over batches cannot be pickled"),
            why=say("it is in the middle of an epoch of this process"),
            fix=(
                say("keep batches.state_dict() and load it there"),
                say("send the data: they are attached by name"),
            ),
        )
