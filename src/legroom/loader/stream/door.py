"""``legroom.stream``: batches from Parquet and Arrow files of any size, within a bound of memory.

Covers: making a stream, from the arguments to the facts about its files and the division of the bound. Does not cover:
looping over it (stream/dataset.py). The bound is kept by each process that loops: a DataLoader's workers have one each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from legroom.loader.rows.ranks import process_group, rank_and_world
from legroom.loader.rows.share import Uneven
from legroom.loader.stream.as_torch import iterable_class
from legroom.loader.stream.batch import COPIES, Format, converter
from legroom.loader.stream.catalog import Catalog, look
from legroom.loader.stream.dataset import THREADS_FROM, Stream
from legroom.loader.stream.parquet import leaf_count
from legroom.loader.stream.paths import Paths, expand
from legroom.loader.stream.read import Reader, count_rows
from legroom.loader.stream.room import Demand, Room, divide
from legroom.loader.stream.settings import StreamSettings
from legroom.system.argument_checks import check_integer
from legroom.units import parse_size


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
    """Batches of rows from Parquet and Arrow files, within a bound of memory that is kept.

    Args:
        paths: A file, a directory, a pattern, or a list of them.
        columns: The columns to read, in the order wanted; None reads all.
        batch_size: Rows a batch; only a rank's last one may have fewer.
        memory: What this process may grow by while it loops, as bytes or ``"256MB"``.
        shuffle_buffer: So many consecutive rows are shuffled among themselves; 0: none.
        seed: Of every order.
        epoch: The epoch's number; None: every new loop has the next one.
        filters: As for ``pyarrow.parquet.read_table``.
        format: ``"arrow"``, ``"numpy"``, ``"torch"`` or ``"python"``: what a batch is.
        rank: This process's part of the rows; None: torch.distributed's, or the launcher's.
        world_size: How many parts there are; None: likewise.
        uneven: What becomes of rows that do not divide among the ranks: ``"pad"``, ``"drop"`` or ``"all"``.
        drop_last: Leave out a batch smaller than ``batch_size``.
        shuffle_groups: Shuffle the order of files and row groups; None: where there is a shuffle buffer.
    """
    rank, world_size = rank_and_world(rank, world_size, os.environ, process_group())
    settings = StreamSettings(
        batch_size=batch_size,
        memory=parse_size(memory),
        shuffle_buffer=shuffle_buffer,
        shuffle_groups=bool(shuffle_buffer) if shuffle_groups is None else bool(shuffle_groups),
        seed=seed,
        form=format,
        rank=rank,
        world_size=world_size,
        uneven=uneven,
        drop_last=bool(drop_last),
    )
    converter(format)
    if epoch is not None:
        check_integer("epoch", epoch, 0)
    catalog = look(expand(paths), columns, filters)
    room = _room(catalog, settings)
    # Ranks of equal length need to know how many rows pass; else rows are divided before they are filtered.
    counted = catalog.condition is not None and world_size > 1 and uneven != "all"
    if counted:
        sizes = _count(catalog, settings, room)
    else:
        sizes = [group.rows for group in catalog.groups]
    made: Stream = iterable_class(Stream)(catalog, settings, room, sizes, counted, epoch)
    return made


def _room(catalog: Catalog, settings: StreamSettings) -> Room:
    """The bound, divided by what the first file says about its rows."""
    stored = leaf_count(catalog.schema) + len(catalog.read_columns) - len(catalog.columns)
    unknown = Demand(None, COPIES[settings.form], None if settings.shuffle_buffer else 0, max(1, stored))
    tried = divide(settings.memory, unknown)
    reader = Reader(catalog, catalog.read_columns, tried, settings.batch_size, threads=False)
    try:
        known = [reader.source(0).row_bytes(group.index) for group in catalog.groups if group.file == 0]
    finally:
        reader.close()
    if not known or None in known:
        return tried
    row = max(size or 0 for size in known)
    batch = row * min(settings.batch_size, catalog.rows)
    return divide(settings.memory, replace(unknown, batch=batch, window=row * settings.shuffle_buffer))


def _count(catalog: Catalog, settings: StreamSettings, room: Room) -> list[int]:
    needed = catalog.condition.columns if catalog.condition is not None else ()
    reader = Reader(catalog, needed, room, settings.batch_size, threads=settings.memory >= THREADS_FROM)
    try:
        return count_rows(reader, catalog)
    finally:
        reader.close()
