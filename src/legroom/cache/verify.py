"""Entries compared with their checksums, and sources with their digests.

Covers: reading every byte of both. Does not cover: repair; a damaged entry is dropped and built anew by whoever
opens its file next.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from legroom.cache import checksum
from legroom.cache.attach import checked, in_words, lease, open_entry, read_manifest
from legroom.cache.catalog import entry_in, matching, not_loaded, once_of_source
from legroom.cache.evict import by_age
from legroom.cache.manifest import Array, Damaged, Manifest, OtherFormat, Table
from legroom.cache.open import source_paths
from legroom.cache.place import Store, stores
from legroom.cache.present import Present, source_now
from legroom.errors import SourceError, UnreadableSource
from legroom.model import Verification
from legroom.words import say

Where = str | os.PathLike[str]


def verify(what: Where | None = None, *, source: bool = True) -> tuple[Verification, ...]:
    """Check the entries of a key or file, or all; ``source=False`` leaves the sources unread.

    For a file that has no entry as it is now, those of what it was before: they say that it changed.
    """
    found = []
    with stores() as places:
        present = Present(places.found)
        keys = {store: _keys(store, what, present) for store in places.found}
        if what is not None and os.path.lexists(what) and not any(keys.values()):
            keys = {store: once_of_source(store, source_paths(what)) for store in places.found}
        for store in places.found:
            for key in keys[store]:
                result = _verify(store, key, present if source else None)
                if result is not None:
                    found.append(result)
    if what is not None and not found:
        raise not_loaded(what, places.findings)
    return tuple(found)


def _keys(store: Store, what: Where | None, present: Present) -> list[str]:
    return [old.key for old in by_age(store)] if what is None else matching(store, what, present)


def _verify(store: Store, key: str, present: Present | None) -> Verification | None:
    lock = lease(store, key, create=True)  # it must not be dropped while it is read
    assert lock is not None
    with lock, in_words(store, key):
        entry = entry_in(store, key)
        if entry is None:
            return None
        if entry.damaged is not None:
            return Verification(entry, (entry.damaged,), "not-checked", say("its manifest cannot be read"))
        try:
            folder = open_entry(store, key)
        except FileNotFoundError:
            return None
        except Damaged as problem:
            return Verification(entry, (str(problem),), "not-checked", say("it cannot be read"))
        try:
            manifest = read_manifest(folder, key)
            damaged = tuple(item.name for item in manifest.items if not _whole(folder, item))
        except (Damaged, OtherFormat) as problem:
            return Verification(entry, (str(problem),), "not-checked", say("its manifest cannot be read"))
        finally:
            os.close(folder)
    if present is None:
        return Verification(entry, damaged, "not-checked", say("it was not asked for"))
    state, why = _source(present, manifest)
    return Verification(entry, damaged, state, why)


def _whole(folder: int, item: Array | Table) -> bool:
    try:
        fd = checked(folder, item)
    except Damaged:
        return False
    try:
        start = len(item.header) if isinstance(item, Array) else 0
        return checksum.as_text(checksum.of_file(fd, start)) == item.crc32
    finally:
        os.close(fd)


def _gone(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # it is not known
    return False


def _source(
    present: Present, manifest: Manifest
) -> tuple[Literal["same", "changed", "missing", "not-checked"], str]:
    try:
        source = source_now([Path(path) for path in manifest.paths], manifest)
        now = present.digest(source, manifest.hash)
    except SourceError as problem:
        if any(_gone(path) for path in manifest.paths):
            return "missing", problem.why
        # What cannot be read may be the same or not.
        return ("not-checked" if isinstance(problem, UnreadableSource) else "changed"), problem.why
    if now == manifest.digest:
        return "same", ""
    return "changed", say("its {hash} is {now} now", hash=manifest.hash, now=now)
