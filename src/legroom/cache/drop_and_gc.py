"""``legroom cache drop`` and ``legroom cache gc``.

An entry in use is refused: its exclusive lock cannot be taken. ``force`` removes the name, and processes that have
mapped the entry keep their pages until they end.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from legroom.cache import eviction, locks, source_digest_records, store_free_space
from legroom.cache.entry_users import entry_users
from legroom.cache.eviction import FreesSpace, LeastRecent, least_recent_first, trash_unused
from legroom.cache.lease_and_map_entry import entry_exists
from legroom.cache.list_and_verify import SourceMatcher, What, find_keys, manifest_of, not_loaded_error, read_entry
from legroom.cache.manifest import Manifest, is_key, reader_difference
from legroom.cache.store_directories import (
    STORE_LOCK,
    Store,
    delete_leftovers,
    delete_trash,
    leftovers,
    open_stores,
    step,
    store_lock,
)
from legroom.cache.store_free_space import directory_bytes, forget_count
from legroom.errors import EntryInUse
from legroom.messages import listed, say
from legroom.records.cache_entry import Entry, Reaped, Shortfall


def drop(what: What = None, *, force: bool = False, dry_run: bool = False) -> Reaped:
    """Remove the entries of some keys or files, or all (None). ``dry_run``: only find them.

    Raises EntryInUse if the only one that was named is in use, and NotLoaded if no name has an entry.
    """
    removed: list[Entry] = []
    kept: list[Entry] = []
    freed = 0
    with open_stores() as stores:
        wanted = find_keys(stores.distinct, what, SourceMatcher(stores.found))
        for store, keys in wanted.keys.items():
            for key in keys:
                entry = read_entry(store, key, paths=wanted.paths_of(key)[0])
                size = directory_bytes(store.fd, key)
                if entry is None:
                    continue
                if (force or not entry.in_use) if dry_run else _remove(store, key, force=force):
                    removed.append(entry)
                    freed += size
                elif len(wanted.names) == 1:
                    raise in_use_error(store, key)
                else:
                    kept.append(entry)
            if what is None:
                with store_lock(store):
                    for name in eviction.unused_downloads(store):
                        freed += directory_bytes(store.work, name)
                        if not dry_run:
                            eviction.remove_download(store, name)
    if wanted.names and not removed and not kept:
        raise not_loaded_error(wanted.names[0], stores.findings, wanted=False)
    return Reaped(tuple(removed), freed, 0, tuple(kept), dry_run, missing=wanted.missing)


def gc(*, free: int | None = None, older: float | None = None, stale: bool = False, dry_run: bool = False) -> Reaped:
    """Remove what is no longer needed.

    Leftovers of dead processes always, and downloads that have not grown for a day (or ``older``). With ``stale``,
    entries whose file has other content now, or that an earlier version built whose reader gave other data. With
    ``older``, entries not used for that many seconds. With ``free``, the least recently used until every store has that
    many bytes free. A store that does not get there is listed in ``short``.
    """
    removed: list[Entry] = []
    kept: list[Entry] = []
    short: list[Shortfall] = []
    freed = strays = 0
    with open_stores() as stores:
        matcher = SourceMatcher(stores.found)
        for store in stores.distinct:
            count, of_strays = delete_strays(store, dry_run=dry_run)
            strays += count
            with store_lock(store):
                abandoned = eviction.unused_downloads(store, eviction.ABANDONED if older is None else older)
                strays += len(abandoned)
                of_strays += sum(directory_bytes(store.work, name) for name in abandoned)
                for name in () if dry_run else abandoned:
                    eviction.remove_download(store, name)
            wanted = _wanted(store, older, matcher if stale else None)
            of_these = sum(_reap(store, old, removed, kept, dry_run) for old in wanted)
            if free is not None:
                gone = {old.key for old in wanted}
                # A dry run frees nothing that could be measured.
                hoped = of_these + of_strays if dry_run else 0
                more, missing = _make_room(store, free, gone, removed, kept, dry_run, hoped)
                of_these += more
                short += [missing] if missing is not None else []
            freed += of_these + of_strays
            if not dry_run:
                delete_strays(store)  # belonged to the removed entries: not counted as strays
    return Reaped(tuple(removed), freed, strays, tuple(kept), dry_run, tuple(short))


def delete_strays(store: Store, *, dry_run: bool = False) -> tuple[int, int]:
    """Delete half-built directories, trash, records and lock files without an entry.

    Returns how many of them dead processes left, and their bytes.

    Lock files and records normally outlive their entry: they are deleted and not counted.
    """
    with store_lock(store):
        scratch = [name for name in os.listdir(store.sources) if name.startswith(source_digest_records.TEMPORARY)]
        nbytes = eviction.leftover_bytes(store)
        left = sum(map(len, leftovers(store))) if dry_run else delete_leftovers(store)
        if not dry_run:
            _clear_records(store)
            source_digest_records.clear_samples(store)
            forget_count(store)
            _clear_locks(store)
        return left + len(scratch), nbytes


def in_use_error(store: Store, key: str) -> EntryInUse:
    """EntryInUse, with the processes that use the entry."""
    people = (entry_users(store.root) or {}).get(key, ())
    who = listed(say("{pid} ({command})", pid=user.pid, command=user.command) for user in people)
    return EntryInUse(
        say("{key} is in use", key=key),
        why=say("used by {who}", who=who) if who else say("a process outside this PID namespace holds its lock"),
        fix=(
            say("end those processes first"),
            say("remove it with force=True; those processes keep their mapped pages"),
        ),
    )


def _remove(store: Store, key: str, *, force: bool = False) -> bool:
    with store_lock(store):
        moved = trash_unused(store, key, force=force)
    if moved is None:
        return False
    delete_trash(store, moved)
    step("removed")
    return True


def _reap(store: Store, old: LeastRecent, removed: list[Entry], kept: list[Entry], dry_run: bool) -> int:
    entry = read_entry(store, old.key)
    if entry is None:
        return 0
    if entry.in_use or not (dry_run or _remove(store, old.key)):
        kept.append(entry)
        return 0
    removed.append(entry)
    return old.nbytes


def _wanted(store: Store, older: float | None, matcher: SourceMatcher | None) -> list[LeastRecent]:
    """Entries not used for ``older`` seconds, and (with ``matcher``) those whose file or reader has changed."""

    def wanted(old: LeastRecent) -> bool:
        if older is not None and time.time() - old.last_used > older:
            return True
        if matcher is None:
            return False
        manifest = manifest_of(store, old.key)
        if not isinstance(manifest, Manifest):
            return False
        earlier = reader_difference(manifest.formats, manifest.options.readers) < 0
        return earlier or matcher.is_replaced(manifest)

    return [old for old in least_recent_first(store) if wanted(old)]


def _make_room(
    store: Store, free: int, gone: set[str], removed: list[Entry], kept: list[Entry], dry_run: bool, hoped: int
) -> tuple[int, Shortfall | None]:
    """Evict until ``free`` bytes are free. Returns the bytes freed (or that would be), and the shortfall if any."""
    freed = 0

    def missing() -> tuple[int, store_free_space.Bound]:
        with store_lock(store):
            bound = store_free_space.tightest(store_free_space.bounds(store))
            have = bound.free - store_free_space.outstanding_reservations(store)
        return free - have - (hoped + freed if dry_run else 0), bound

    helps = FreesSpace(store)
    still, bound = missing()
    for old in least_recent_first(store):
        if still <= 0:
            break
        if old.key not in gone and helps(old, bound):
            freed += _reap(store, old, removed, kept, dry_run)
            still, bound = missing()
    if still <= 0:
        return freed, None
    return freed, Shortfall(os.fspath(store.root), still, bound.what())


def _clear_records(store: Store) -> None:
    digests = {name.partition("-")[0] for name in os.listdir(store.fd) if is_key(name)}
    for name in os.listdir(store.sources):
        if _is_folder(store.sources, name):
            continue
        try:
            record = (
                None
                if name.startswith(source_digest_records.TEMPORARY)
                else source_digest_records.read_record_named(store, name)
            )
        except OSError:
            continue  # it may be a record
        if record is None or not digests & set(record.digests.values()):
            os.unlink(name, dir_fd=store.sources)


def _is_folder(folder: int, name: str) -> bool:
    """Whether it is a directory: not one of ours among these files, so it is left alone."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _clear_locks(store: Store) -> None:
    """Delete unheld lock files without an entry. A process waiting for one sees that its name is gone."""
    for name in os.listdir(store.locks):
        key = name.removesuffix(".lock")
        if name == STORE_LOCK or (is_key(key) and entry_exists(store, key)) or _is_folder(store.locks, name):
            continue
        try:
            lock = locks.acquire(store.locks, name, create=False)
        except FileNotFoundError:
            continue
        except OSError as problem:
            if problem.errno not in (errno.ELOOP, errno.ENXIO):  # a link or a socket, not a lock
                raise
            os.unlink(name, dir_fd=store.locks)
            continue
        if lock is None:
            continue
        with lock:
            os.unlink(name, dir_fd=store.locks)
