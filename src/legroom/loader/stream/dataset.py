"""The stream itself: a loop over batches, its epochs, stopping and going on.

Covers: what a Stream does once it is made. Does not cover: making one (stream.py), decoding (stream/parquet.py,
stream/ipc.py), who reads what (stream/shard.py), shuffling and cutting (stream/flow.py).

A stream owns nothing but facts about its files; each loop opens them one at a time and closes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from legroom.errors import BudgetTooSmall, NoLength
from legroom.loader.stream import state as stream_state
from legroom.loader.stream.as_torch import iterable_class, this_worker, torch_class
from legroom.loader.stream.batch import converter, object_bytes
from legroom.loader.stream.catalog import Catalog
from legroom.loader.stream.flow import Chunk, Mark, Progress, batches, dropped, window_order, windows
from legroom.loader.stream.ipc import copied
from legroom.loader.stream.read import Reader, read_pieces
from legroom.loader.stream.room import Room, too_small
from legroom.loader.stream.settings import StreamSettings
from legroom.loader.stream.shard import (
    Piece,
    Shard,
    batch_count,
    epoch_order,
    pieces,
    rank_stretch,
    worker_stretch,
)
from legroom.system.argument_checks import check_integer
from legroom.words import say

THREADS_FROM = 128 << 20  # below, what threads keep for themselves would be too much of the bound


class Stream:
    """Batches of a stream; ``len`` is the batches of one rank's epoch. Made by ``legroom.stream``."""

    def __init__(
        self,
        catalog: Catalog,
        settings: StreamSettings,
        room: Room,
        sizes: list[int],
        counted: bool,
        epoch: int | None,
    ) -> None:
        self.catalog, self.settings, self.room = catalog, settings, room
        self._sizes, self._counted, self._epoch = sizes, counted, epoch
        self._next_epoch = 0
        self._resume: _Place | None = None
        self._going: _Place | None = None
        self._facts = {
            "data": catalog.digest,
            "filters": None if catalog.condition is None else str(catalog.condition),
            **settings.order(),
        }

    @property
    def schema(self) -> Any:
        """The Arrow schema of the batches."""
        return self.catalog.schema

    def __len__(self) -> int:
        if self.catalog.condition is not None and not self._counted:
            raise NoLength(
                say("the number of batches is not known"),
                why=say("only reading tells how many rows pass the filters"),
                fix=(say("loop over it"), say("len() is known without filters")),
            )
        settings = self.settings
        first, last = rank_stretch(sum(self._sizes), settings.rank, settings.world_size, settings.uneven)
        return batch_count(last - first, settings.batch_size, settings.drop_last)

    def __iter__(self) -> Iterator[Any]:
        shard = Shard(self.settings.rank, self.settings.world_size, *this_worker())
        place, self._resume = self._resume or _Place(self._current_epoch(), shard), None
        stream_state.require_shard(place.shard, shard)
        if self._epoch is None:
            self._next_epoch = place.epoch + 1
        self._going = place
        return self._loop(place)

    def set_epoch(self, epoch: int) -> None:
        """Every loop from now on has the order of that epoch, until another is set."""
        self._epoch = check_integer("epoch", epoch, 0)
        self._going = None
        if self._resume is not None and self._resume.epoch != epoch:
            self._resume = None

    def state_dict(self) -> dict[str, Any]:
        """Where the latest loop stands: what ``load_state_dict`` needs to go on with the batch after it."""
        place = self._going or self._resume
        if place is None or place.done:
            place = _Place(
                self._current_epoch(), Shard(self.settings.rank, self.settings.world_size, *this_worker())
            )
        return stream_state.pack(self._facts, place.epoch, place.shard, place.position, place.batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next loop goes on from there; a state of other data or settings is refused."""
        self._resume = _Place(*stream_state.unpack(state, self._facts))
        self._going = None
        if self._epoch is not None:
            self._epoch = self._resume.epoch

    def dataset(self) -> Any:
        """This stream as a torch IterableDataset; where torch was imported before the stream was made, it is one."""
        return _remake(torch_class(Stream), self._state())

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self._state(),)

    def _state(self) -> tuple[Any, ...]:
        made = (self.catalog, self.settings, self.room, self._sizes, self._counted, self._epoch)
        return made, self._next_epoch, self._resume

    def _current_epoch(self) -> int:
        return self._next_epoch if self._epoch is None else self._epoch

    def _plan(self, epoch: int, shard: Shard) -> list[Piece]:
        """The rows that this shard reads in that epoch."""
        settings = self.settings
        order = epoch_order(len(self._sizes), settings.seed, epoch, settings.shuffle_groups)
        first, last = rank_stretch(sum(self._sizes), shard.rank, shard.world_size, settings.uneven)
        # Before filtering nobody knows which rows make the last, short batch.
        exact = self.catalog.condition is None or self._counted
        first, last = worker_stretch(
            first, last, shard.worker, shard.workers, settings.batch_size, settings.drop_last and exact
        )
        return pieces(self._sizes, order, first, last)

    def _loop(self, place: _Place) -> Iterator[Any]:
        settings, shard = self.settings, place.shard
        alone = shard.workers == 1
        # Workers decode side by side already. What leaves one is pickled, and a slice pickles all it is a slice of.
        threads = alone and settings.memory >= THREADS_FROM
        as_is = settings.form == "arrow" and alone
        convert = copied if settings.form == "arrow" else self._converted
        reader = Reader(
            self.catalog, self.catalog.read_columns, self.room, settings.batch_size, threads=threads
        )
        try:
            chunks = self._chunks(reader, place)
            for batch, progress in batches(
                chunks, settings.batch_size, self.room.batch, self._too_large, drop_last=settings.drop_last
            ):
                made = batch if as_is else convert(batch)
                del batch
                place.progress, place.batches = progress, place.batches + 1
                yield made
                del made
            place.done = True
        finally:
            reader.close()

    def _converted(self, batch: Any) -> Any:
        if self.settings.form == "python" and (size := object_bytes(batch)) > self.room.batch:
            raise self._too_large(batch.num_rows, size)
        return converter(self.settings.form)(batch)

    def _chunks(self, reader: Reader, place: _Place) -> Iterator[Chunk]:
        """The shard's rows from that place on, in the order in which they are handed out."""
        plan, mark = self._plan(place.epoch, place.shard), place.position or Mark()
        chunks = read_pieces(reader, self.catalog, plan, mark, counted=self._counted)
        chunks = dropped(chunks, mark.skip)
        if self.settings.shuffle_buffer:
            shard = place.shard
            order = window_order(self.settings.seed, place.epoch, shard.rank, shard.worker)
            chunks = windows(chunks, self.settings.shuffle_buffer, self.room.window, order, mark.window)
        return dropped(chunks, mark.taken)

    def _too_large(self, rows: int, nbytes: int) -> BudgetTooSmall:
        settings = self.settings
        expected = nbytes * settings.batch_size // max(1, rows)
        return too_small(settings.memory, replace(self.room.demand, batch=expected))


class _Place:
    """How far a loop has come; outlives the loop, which ``break`` drops."""

    def __init__(self, epoch: int, shard: Shard, start: Mark | None = None, batches: int = 0) -> None:
        self.epoch, self.shard, self.batches = epoch, shard, batches
        self._start = start
        self.progress: Progress | None = None
        self.done = False

    @property
    def position(self) -> Mark | None:
        """Where to go on; None: at the beginning."""
        return self._start if self.progress is None else self.progress.position()


def _remake(kind: type[Stream], state: tuple[Any, ...]) -> Stream:
    made, next_epoch, resume = state
    again = kind(*made)
    again._next_epoch, again._resume = next_epoch, resume
    return again


def _unpickled(state: tuple[Any, ...]) -> Stream:
    return _remake(iterable_class(Stream), state)
