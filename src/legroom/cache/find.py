"""The entry that a source has, if it has one.

Covers: from stamps to digest to entry, in every store; entries that cannot be used are put aside.
Does not cover: hashing or building (build.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from legroom.cache import records, trash
from legroom.cache.attach import Attached, attach, lock_name
from legroom.cache.identity import Source, shard_names
from legroom.cache.manifest import FORMAT, Damaged, Manifest, Options, OtherFormat, key_of
from legroom.cache.place import Store, each
from legroom.cache.steps import log
from legroom.formats.selection import Selection, column_names
from legroom.words import say


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asked to open."""

    paths: tuple[Path, ...]
    keys: tuple[str, ...] | None = None
    backing: str = "auto"
    hash: str = "md5"
    evict: bool = True

    def wants(self, store: Store) -> bool:
        return self.backing in ("auto", store.backing)


def find(request: Request, source: Source, asked_ns: int) -> Attached | None:
    """Attach the source's entry by its record; None where it has none that can be used."""
    for store in each():
        if not request.wants(store):
            continue
        record = records.read(store, source)
        if record is None or not record.believed(asked_ns):
            continue
        for algorithm in sorted(record.digests, key=lambda name: name != request.hash):
            found = find_digest(request, source, store, record.digests[algorithm], algorithm)
            if found is not None:
                return found
    return None


def find_digest(
    request: Request, source: Source, store: Store, digest: str, algorithm: str
) -> Attached | None:
    """Attach the entry of that digest in that store; what is damaged is put into the trash."""
    for options in variants(request, source):
        key = key_of(digest, algorithm, options)
        while True:
            try:
                found = attach(store, key)
            except Damaged as problem:
                log.warning(
                    "%s",
                    say(
                        "{root}/{key} cannot be used and is built anew: {why}",
                        root=store.root,
                        key=key,
                        why=problem,
                    ),
                )
                if put_aside(store, key):
                    continue
                break
            except OtherFormat as other:
                if other.version < FORMAT and put_aside(store, key):
                    continue
                break  # a newer one is left alone: the next variant stands beside it
            if found is None:
                break
            _check_keys(request, found.manifest)
            return found
    return None


def variants(request: Request, source: Source) -> Iterator[Options]:
    """The options of every entry that would serve, the whole source first."""
    order = row_order(source)
    for version in (None, FORMAT):
        yield Options(None, order, version)
        if request.keys is not None:
            yield replace(own_options(request, source), version=version)


def own_options(request: Request, source: Source) -> Options:
    """The options of the entry that this request would build."""
    keys = None if request.keys is None else tuple(sorted(set(request.keys)))
    return Options(keys, row_order(source))


def row_order(source: Source) -> tuple[int, ...] | None:
    """Where the named files' rows stand, when they are not in the order of their names; None when they are."""
    names = shard_names(source.paths)
    order = tuple(sorted(range(len(names)), key=lambda index: names[index]))
    return None if order == tuple(range(len(names))) else order


def put_aside(store: Store, key: str) -> bool:
    """Move an entry that cannot be used into the trash; False where it is in fact usable now.

    Those who have it mapped keep their pages: it is only the name that goes.
    """
    with trash.store_lock(store):
        try:
            found = attach(store, key)
        except (Damaged, OtherFormat) as problem:
            if isinstance(problem, OtherFormat) and problem.version >= FORMAT:
                return False
            moved = trash.move_entry(store, key)
            try:
                os.unlink(lock_name(key), dir_fd=store.locks)
            except FileNotFoundError:
                pass
        else:
            if found is not None and found.lease is not None:
                found.lease.release()
            return True
    if moved is not None:
        trash.delete(store, moved)
    return True


def _check_keys(request: Request, manifest: Manifest) -> None:
    arrays = list(dict.fromkeys(array.ragged or array.name for array in manifest.arrays))
    tables = {table.part_of or table.name: list(table.columns) for table in manifest.tables}
    answering = [name for table, columns in tables.items() for name in column_names(table, columns)]
    every = [column for columns in tables.values() for column in columns]
    Selection(request.keys).check([*arrays, *answering], [*arrays, *every], request.paths[0])
