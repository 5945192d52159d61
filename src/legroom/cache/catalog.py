"""What is in the cache.

Covers: every entry, the entry of a key or of a file, the room of each store. Changes nothing.
Does not cover: removing (reap.py), checking bytes (verify.py), printing (cli).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from legroom.cache import room, trash
from legroom.cache.attach import lock_name, open_entry, read_manifest
from legroom.cache.describe import entry_of, unusable_entry
from legroom.cache.evict import by_age, last_used
from legroom.cache.manifest import Damaged, Manifest, OtherFormat, is_key
from legroom.cache.open import source_paths
from legroom.cache.place import Store, is_shortage, stores
from legroom.cache.present import Present
from legroom.cache.store_size import blocks
from legroom.cache.users import users
from legroom.errors import NotLoaded, UsageError
from legroom.model import Entry, EntryUser, Finding, StoreRoom
from legroom.words import joined, listed, say

Where = str | os.PathLike[str]
_SHORTEST = 6  # digits of a key that may stand for it


def entries(what: Where | None = None, *, with_users: bool = False) -> tuple[Entry, ...]:
    """Every entry of every store, newest use last; or those of one key or file (none, where it is not loaded)."""
    return listing(what, with_users=with_users)[0]


def listing(
    what: Where | None = None, *, with_users: bool = False
) -> tuple[tuple[Entry, ...], tuple[StoreRoom, ...], tuple[Finding, ...]]:
    """The entries, the stores that are there with their room, and which stores could not be looked into."""
    found: list[Entry] = []
    with stores() as places:
        present = Present(places.found)
        for store in places.distinct:
            keys = [old.key for old in by_age(store)] if what is None else matching(store, what, present)
            people = users(store.root) if with_users and keys else None
            for key in keys:
                entry = entry_in(store, key, people.get(key, ()) if people is not None else None)
                if entry is not None:
                    found.append(entry)
        return tuple(found), tuple(map(_room, places.distinct)), places.findings


def info(what: Where, *, with_users: bool = True) -> Entry:
    """The entry of a key (or its first digits) or of a file; NotLoaded where there is none."""
    found, _, findings = listing(what, with_users=with_users)
    if not found:
        raise not_loaded(what, findings)
    return found[0]


def store_rooms() -> tuple[tuple[StoreRoom, ...], tuple[Finding, ...]]:
    """The stores that are there with their room, and which candidates were passed over."""
    with stores() as places:
        return tuple(map(_room, places.distinct)), places.findings


def _room(store: Store) -> StoreRoom:
    stats = os.statvfs(store.fd)
    with trash.store_lock(store):
        bound = room.tightest(room.bounds(store))
        free = max(0, bound.free - room.outstanding(store))
    size = stats.f_blocks * stats.f_frsize
    used = sum(old.nbytes for old in by_age(store))  # not what locks and records take
    return StoreRoom(os.fspath(store.root), store.backing, size, used, free, bound.what)


def not_loaded(what: Where, findings: Sequence[Finding] = (), *, wanted: bool = True) -> NotLoaded:
    """The error for something the cache does not hold; not ``wanted`` there by whoever would remove it.

    A store that could not be looked into may hold it: its finding is part of the error.
    """
    there = os.path.lexists(os.path.expanduser(os.fspath(what)))
    nowhere = (
        say("no store holds an entry of that file as it is now")
        if there
        else say("no store holds an entry of that key, and there is no such file")
    )
    return NotLoaded(
        say("{what} is not loaded", what=os.fspath(what)),
        why=joined([nowhere, *(one.why for one in findings if one.severity != "info")]),
        fix=(
            *((say("legroom cache load {what}", what=os.fspath(what)),) if there and wanted else ()),
            say("see what there is:\nlegroom cache list"),
        ),
    )


def matching(store: Store, what: Where, present: Present) -> list[str]:
    """The keys of a store that a key, its first digits, or a file stand for."""
    text = os.fspath(what)
    if not os.path.lexists(text) and len(text) >= _SHORTEST and not set(text) - set("0123456789abcdef-blkex"):
        found = [old.key for old in by_age(store) if old.key.startswith(text)]
        if len(found) > 1 and text not in found and len({key.partition("-")[0] for key in found}) > 1:
            raise UsageError(
                say("{text} stands for several entries", text=text),
                why=listed(found),
                fix=(say("give more digits"),),
            )
        return [text] if text in found else found
    paths = source_paths(what)
    if len(paths) == 1 and not os.path.lexists(paths[0]):
        # The file may have been removed, and what was built from it not.
        return once_of_source(store, paths)
    return of_source(store, paths, present)


def once_of_source(store: Store, paths: Sequence[Path]) -> list[str]:
    """The keys of a store that were built from a file of that name, whatever it holds now."""
    names = {os.fspath(path) for path in paths}
    manifests = ((old.key, manifest_of(store, old.key)) for old in by_age(store))
    return [key for key, found in manifests if isinstance(found, Manifest) and names & set(found.paths)]


def of_source(store: Store, paths: Sequence[Path], present: Present) -> list[str]:
    """The keys of a store that have the content of these files as they are now."""
    manifests = ((old.key, manifest_of(store, old.key)) for old in by_age(store))
    return [key for key, found in manifests if isinstance(found, Manifest) and present.holds(paths, found)]


def manifest_of(store: Store, key: str) -> Manifest | Damaged | OtherFormat | OSError | None:
    """The manifest of an entry; why it cannot be used (or read: an OSError); None where it is gone."""
    if not is_key(key):
        return None
    try:
        folder = open_entry(store, key)
    except FileNotFoundError:
        return None
    except (Damaged, OSError) as problem:
        return _unless_short(problem)
    try:
        return read_manifest(folder, key)
    except (Damaged, OtherFormat, OSError) as problem:
        return _unless_short(problem)
    finally:
        os.close(folder)


_T = TypeVar("_T", bound=Exception)


def _unless_short(problem: _T) -> _T:
    """The problem of one entry; raised where it is this process that is short of something."""
    if isinstance(problem, OSError) and is_shortage(problem):
        raise problem
    return problem


def entry_in(store: Store, key: str, people: tuple[EntryUser, ...] | None = None) -> Entry | None:
    """One entry as it is now; None where it has gone meanwhile."""
    manifest = manifest_of(store, key)
    if manifest is None:
        return None
    root = os.fspath(store.root)
    if isinstance(manifest, OSError):
        why = manifest.strerror or str(manifest)
        return unusable_entry(key, store.backing, root, blocks(store.fd, key), unreadable=why)
    if not isinstance(manifest, Manifest):
        return unusable_entry(key, store.backing, root, blocks(store.fd, key), damaged=str(manifest))
    return entry_of(
        manifest,
        store.backing,
        store=root,
        in_use=trash.in_use(store, lock_name(key)),
        users=people,
        last_used=last_used(store, key),
    )
