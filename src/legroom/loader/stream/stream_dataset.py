"""``legroom.stream``: batches from Parquet and Arrow files of any size, within a memory limit.

The limit holds for each process that loops: every DataLoader worker has its own. A Stream holds only metadata of its
files; each loop opens them one at a time and closes them. Its state_dict holds numbers and strings only, never rows, so
JSON, pickle and torch.save can store it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from legroom.errors import BudgetTooSmall, NoLength, UsageError
from legroom.loader.rank_sampler import Uneven, process_group, rank_and_world, warn_of_no_batches
from legroom.loader.stream.convert_batches import COPIES, Format, converter, object_bytes
from legroom.loader.stream.parquet_row_groups import leaf_count
from legroom.loader.stream.shard_and_shuffle import (
    BatchProgress,
    Shard,
    ShardPiece,
    ShardReader,
    StreamPosition,
    batch_count,
    batches,
    count_rows,
    dropped,
    epoch_order,
    pieces,
    rank_range,
    read_pieces,
    window_order,
    windows,
    worker_range,
)
from legroom.loader.stream.stream_files import Catalog, Paths, copied, expand, read_catalog
from legroom.loader.stream.stream_memory import MemoryDivision, StreamDemand, divide, too_small
from legroom.messages import phrase, say
from legroom.system.argument_checks import check_arguments, check_integer
from legroom.system.lazy_and_optional_imports import require
from legroom.units import parse_size

_VERSION = 1


def pack(
    settings: Mapping[str, Any], epoch: int, shard: Shard, position: StreamPosition | None, count: int
) -> dict[str, Any]:
    """The state after ``count`` batches of that epoch; ``position`` None: it has not begun."""
    return {
        "legroom_stream": _VERSION,
        "settings": dict(settings),
        "epoch": epoch,
        "batches": count,
        "shard": asdict(shard),
        "position": None if position is None else asdict(position),
    }


def unpack(state: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[int, Shard, StreamPosition | None, int]:
    """(epoch, shard, position, batches) of a state that was saved with this stream."""
    if not isinstance(state, Mapping) or state.get("legroom_stream") != _VERSION:
        raise UsageError(
            say("this is not a state_dict of a stream, or of another format version"),
            why=say("it must contain legroom_stream={version}", version=_VERSION),
            fix=(say("load the result of stream.state_dict()"),),
        )
    saved = state.get("settings", {})
    for name in settings:
        if saved.get(name) != settings[name]:
            raise UsageError(
                say("the state was saved with another stream"),
                why=say(
                    "{name} was {then!r} and is {now!r}",
                    name=say("the data (their files, rows or columns)") if name == "data" else name,
                    then=saved.get(name),
                    now=settings[name],
                ),
                fix=(
                    say("create the stream with the same files and settings"),
                    say("or restart the epoch: do not call load_state_dict"),
                ),
            )
    try:
        saved_position = state["position"]
        position = None if saved_position is None else StreamPosition(**saved_position)
        return int(state["epoch"]), Shard(**state["shard"]), position, int(state["batches"])
    except (KeyError, TypeError, ValueError) as problem:
        raise UsageError(
            say("this state of a stream is incomplete"),
            why=repr(problem),
            fix=(say("save it again with state_dict()"),),
        ) from problem


def require_shard(saved: Shard, here: Shard) -> None:
    """Refuse to resume a shard that another worker was reading."""
    if saved != here:
        raise UsageError(
            say("the state was saved by another DataLoader worker"),
            why=say(
                "saved by worker {worker} of {workers}, loaded by worker {now} of {of}",
                worker=saved.worker, workers=saved.workers, now=here.worker, of=here.workers,
            ),
            fix=(say("save and load one state per worker, with the same number of workers"),),
        )  # fmt: skip


def stream(
    paths: Paths,
    columns: str | Iterable[str] | None = None,
    batch_size: int = 1024,
    memory: str | int = "256MB",
    shuffle_buffer: int = 0,
    seed: int = 0,
    *,
    epoch: int | None = None,
    filters: Any = None,
    format: Format = "arrow",
    rank: int | None = None,
    world_size: int | None = None,
    uneven: Uneven = "pad",
    drop_last: bool = False,
    shuffle_groups: bool | None = None,
) -> Stream:
    """Batches of rows from Parquet and Arrow files, within a memory limit.

    Args:
        paths: A file, a directory, a pattern (``"*.parquet"``), a range (``"{000..127}.parquet"``), or a list of them.
        columns: The columns to read, in the order wanted; None reads all.
        batch_size: Rows per batch; only a rank's last one may have fewer.
        memory: How much this process may grow while it loops, in bytes or as ``"256MB"``.
        shuffle_buffer: Number of consecutive rows that are shuffled among themselves; 0: none.
        seed: Seed of every order.
        epoch: Epoch number; None: each new loop uses the next one.
        filters: Row filters, as for ``pyarrow.parquet.read_table``.
        format: ``"arrow"``, ``"numpy"``, ``"torch"`` or ``"python"``: what a batch is.
        rank: Rank of this process; None: torch.distributed's, or the launcher's.
        world_size: Number of ranks; None: likewise.
        uneven: Rows that do not divide evenly among the ranks: ``"pad"``, ``"drop"`` or ``"all"``.
        drop_last: Drop a batch smaller than ``batch_size``. If a rank has fewer rows than that, there are no batches,
            and a warning is logged.
        shuffle_groups: Shuffle the order of files and row groups; None: where there is a shuffle buffer.
    """
    check_arguments(stream, locals(), ("columns", "batch_size", "memory", "seed"))
    rank, world_size = rank_and_world(rank, world_size, os.environ, process_group())
    settings = StreamSettings(
        batch_size=check_integer("batch_size", batch_size, 1),
        memory=parse_size(memory),
        shuffle_buffer=check_integer("shuffle_buffer", shuffle_buffer, 0),
        shuffle_groups=bool(shuffle_buffer) if shuffle_groups is None else bool(shuffle_groups),
        seed=check_integer("seed", seed, 0),
        form=format,
        rank=rank,
        world_size=world_size,
        uneven=uneven,
        drop_last=bool(drop_last),
    )
    converter(format)
    if epoch is not None:
        epoch = check_integer("epoch", epoch, 0)
    catalog = read_catalog(expand(paths), columns, filters)
    division = _divide_memory(catalog, settings)
    # Ranks of equal length need the number of rows that pass; otherwise rows are divided before filtering.
    counted = catalog.condition is not None and world_size > 1 and uneven != "all"
    if counted:
        sizes = _count(catalog, settings, division)
    else:
        sizes = [group.rows for group in catalog.groups]
    made: Stream = iterable_class(Stream)(catalog, settings, division, sizes, counted, epoch)
    if sum(sizes) and (catalog.condition is None or counted) and not len(made):
        warn_of_no_batches(sum(sizes), settings.batch_size, world_size, uneven)
    return made


def _divide_memory(catalog: Catalog, settings: StreamSettings) -> MemoryDivision:
    """Divide the memory limit by the row sizes in the first file."""
    stored = leaf_count(catalog.schema) + len(catalog.read_columns) - len(catalog.columns)
    unknown = StreamDemand(None, COPIES[settings.form], None if settings.shuffle_buffer else 0, max(1, stored))
    tried = divide(settings.memory, unknown)
    reader = ShardReader(catalog, catalog.read_columns, tried, settings.batch_size, threads=False)
    try:
        known = [reader.source(0).row_bytes(group.index) for group in catalog.groups if group.file == 0]
    finally:
        reader.close()
    if not known or None in known:
        return tried
    row = max(size or 0 for size in known)
    batch = row * min(settings.batch_size, catalog.rows)
    return divide(settings.memory, replace(unknown, batch=batch, window=row * settings.shuffle_buffer))


def _count(catalog: Catalog, settings: StreamSettings, division: MemoryDivision) -> list[int]:
    needed = catalog.condition.columns if catalog.condition is not None else ()
    reader = ShardReader(catalog, needed, division, settings.batch_size, threads=settings.memory >= THREADS_FROM)
    try:
        return count_rows(reader, catalog)
    finally:
        reader.close()


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The arguments of ``legroom.stream``, checked."""

    batch_size: int
    memory: int
    shuffle_buffer: int
    shuffle_groups: bool
    seed: int
    form: Format
    rank: int
    world_size: int
    uneven: Uneven
    drop_last: bool

    def order(self) -> dict[str, Any]:
        """The settings that determine which rows come when: a saved state is valid only if all of them are equal."""
        found = asdict(self)
        limits = {"memory": found.pop("memory"), "format": found.pop("form")}
        # A shuffle buffer that is full in bytes before it is full in rows depends on the memory limit.
        return found | limits if self.shuffle_buffer else found


THREADS_FROM = 128 << 20  # below, the memory of decoding threads would be too much of the limit


class Stream:
    """Batches of a stream, as ``legroom.stream`` returns it; ``len`` is the number of batches of one rank."""

    def __init__(
        self,
        catalog: Catalog,
        settings: StreamSettings,
        division: MemoryDivision,
        sizes: list[int],
        counted: bool,
        epoch: int | None,
    ) -> None:
        self.catalog, self.settings, self.memory_division = catalog, settings, division
        self._sizes, self._counted, self._epoch = sizes, counted, epoch
        self._next_epoch = 0
        self._resume: _LoopState | None = None
        self._current: _LoopState | None = None
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
                say("the number of batches is unknown"),
                why=say("how many rows pass the filters is known only after reading"),
                fix=(say("loop over it"), say("len() works without filters")),
            )
        settings = self.settings
        first, last = rank_range(sum(self._sizes), settings.rank, settings.world_size, settings.uneven)
        return batch_count(last - first, settings.batch_size, settings.drop_last)

    def __iter__(self) -> Iterator[Any]:
        shard = Shard(self.settings.rank, self.settings.world_size, *this_worker())
        state = self._resume or _LoopState(self._current_epoch(), shard)
        require_shard(state.shard, shard)
        batch, following = _Loop(self, state), state.epoch + 1 if self._epoch is None else self._next_epoch
        # The last instruction: an interruption, or an error, before it leaves the position to the next loop.
        self._current, self._resume, self._next_epoch = state, None, following
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Use the order of that epoch for every loop from now on."""
        self._epoch = check_integer("epoch", epoch, 0)
        self._current = None
        if self._resume is not None and self._resume.epoch != self._epoch:
            self._resume = None

    def state_dict(self) -> dict[str, Any]:
        """The position of the latest loop: ``load_state_dict`` resumes with the batch after it."""
        loop = self._current or self._resume
        if loop is None or loop.done:
            loop = _LoopState(
                self._current_epoch(), Shard(self.settings.rank, self.settings.world_size, *this_worker())
            )
        return pack(self._facts, loop.epoch, loop.shard, loop.position, loop.batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there in the next loop; a state of other data or settings is refused."""
        resume = _LoopState(*unpack(state, self._facts))
        epoch = None if self._epoch is None else resume.epoch
        self._resume, self._current, self._epoch = resume, None, epoch

    def dataset(self) -> Any:
        """This stream as a torch IterableDataset; it is one already if torch was imported before it was created."""
        return _remake(torch_class(Stream), self._state())

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self._state(),)

    def _state(self) -> tuple[Any, ...]:
        made = (self.catalog, self.settings, self.memory_division, self._sizes, self._counted, self._epoch)
        return made, self._next_epoch, self._resume

    def _current_epoch(self) -> int:
        return self._next_epoch if self._epoch is None else self._epoch

    def _plan(self, epoch: int, shard: Shard) -> list[ShardPiece]:
        """The rows that this shard reads in that epoch."""
        settings = self.settings
        order = epoch_order(len(self._sizes), settings.seed, epoch, settings.shuffle_groups)
        first, last = rank_range(sum(self._sizes), shard.rank, shard.world_size, settings.uneven)
        # Before filtering it is unknown which rows form the last, short batch.
        exact = self.catalog.condition is None or self._counted
        first, last = worker_range(
            first, last, shard.worker, shard.workers, settings.batch_size, settings.drop_last and exact
        )
        return pieces(self._sizes, order, first, last)

    def _reader(self, shard: Shard) -> ShardReader:
        # Workers decode in parallel already.
        threads = shard.workers == 1 and self.settings.memory >= THREADS_FROM
        return ShardReader(
            self.catalog, self.catalog.read_columns, self.memory_division, self.settings.batch_size, threads=threads
        )

    def _conversion(self, shard: Shard) -> Callable[[Any], Any] | None:
        if self.settings.form != "arrow":
            return partial(self._converted, converter(self.settings.form))
        # Batches of workers are pickled, and a slice pickles the whole batch behind it.
        return None if shard.workers == 1 else copied

    def _converted(self, convert: Callable[[Any], Any], batch: Any) -> Any:
        if self.settings.form == "python" and (size := object_bytes(batch)) > self.memory_division.batch:
            raise self._too_large(batch.num_rows, size)
        return convert(batch)

    def _batches(self, reader: ShardReader, loop: _LoopState) -> Generator[tuple[Any, BatchProgress], None, None]:
        """The shard's batches from that position on, not converted, each with the progress after it."""
        plan, position = self._plan(loop.epoch, loop.shard), loop.position or StreamPosition()
        chunks = read_pieces(reader, self.catalog, plan, position, counted=self._counted)
        chunks = dropped(chunks, position.skip)
        settings, division = self.settings, self.memory_division
        if settings.shuffle_buffer:
            shard = loop.shard
            order = window_order(settings.seed, loop.epoch, shard.rank, shard.worker)
            chunks = windows(chunks, settings.shuffle_buffer, division.window, order, position.window)
        chunks = dropped(chunks, position.taken)
        return batches(chunks, settings.batch_size, division.batch, self._too_large, drop_last=settings.drop_last)

    def _too_large(self, rows: int, nbytes: int) -> BudgetTooSmall:
        settings = self.settings
        expected = nbytes * settings.batch_size // max(1, rows)
        return too_small(settings.memory, replace(self.memory_division.demand, batch=expected))


class _Loop:
    """One epoch; the next call retries a batch that failed or was interrupted.

    It reads on only where the last call returned a batch. After any other call it reads again, from its state.
    """

    def __init__(self, stream: Stream, state: _LoopState) -> None:
        self._stream, self._state = stream, state
        self._convert = stream._conversion(state.shard)
        self._run: Generator[tuple[Any, BatchProgress], None, None] | None = None
        # The latest one: its reader is closed with it.
        self._begun: Generator[tuple[Any, BatchProgress], None, None] | None = None
        self._reader: ShardReader | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        run, self._run = self._run, None
        if run is None:
            run = self._begin()
        state = self._state
        try:
            for batch, progress in run:
                if self._convert is not None:
                    batch = self._convert(batch)
                # That it is given out is noted by the last instruction.
                self._run, state.progress, state.batches = run, progress, state.batches + 1
                return batch
            state.done = True
        except BaseException as problem:
            self.close()
            if isinstance(problem, StopIteration):  # it would end the loop as if the epoch had no more batches
                raise RuntimeError(say("the conversion of a batch raised StopIteration")) from problem
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Close the files; the next call opens them again."""
        reader, self._run, self._begun = self._reader, None, None
        if reader is not None:
            reader.close()

    def _begin(self) -> Generator[tuple[Any, BatchProgress], None, None]:
        if getattr(self._begun, "gi_running", False):
            raise ValueError("another thread takes a batch of this loop")
        self.close()
        if self._state.done:
            raise StopIteration
        self._reader = self._stream._reader(self._state.shard)
        self._begun = self._stream._batches(self._reader, self._state)
        return self._begun

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit() and getattr(self, "_reader", None) is not None:
            self.close()


class _LoopState:
    """How far a loop has come; it outlives the loop, which ``break`` drops."""

    def __init__(self, epoch: int, shard: Shard, start: StreamPosition | None = None, batches: int = 0) -> None:
        self.epoch, self.shard, self.batches = epoch, shard, batches
        self._start = start
        self.progress: BatchProgress | None = None
        self.done = False

    @property
    def position(self) -> StreamPosition | None:
        """Where to resume; None: at the beginning."""
        return self._start if self.progress is None else self.progress.position()


def _remake(kind: type[Stream], state: tuple[Any, ...]) -> Stream:
    made, next_epoch, resume = state
    again = kind(*made)
    again._next_epoch, again._resume = next_epoch, resume
    return again


def _unpickled(state: tuple[Any, ...]) -> Stream:
    return _remake(iterable_class(Stream), state)


def iterable_class(plain: Any) -> Any:
    """``plain``, also derived from torch's IterableDataset if the program has imported torch."""
    return torch_class(plain) if "torch.utils.data" in sys.modules else plain


@cache
def torch_class(plain: Any) -> Any:
    """A class derived from ``plain`` and torch's IterableDataset."""
    data = require("torch.utils.data", "torch", phrase("streams as torch datasets"))
    return type(plain.__name__, (plain, data.IterableDataset), {"__module__": plain.__module__})


def this_worker() -> tuple[int, int]:
    """(worker, workers) of the DataLoader of this worker process; (0, 1) in any other process."""
    data = sys.modules.get("torch.utils.data")
    found = None if data is None else data.get_worker_info()
    return (0, 1) if found is None else (found.id, found.num_workers)
