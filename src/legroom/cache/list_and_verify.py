"""``legroom cache list``, ``info`` and ``verify``: read-only views of the cache; which entries are stale.

An entry is stale if its file has other content now, and no other file has the old one. A file that was touched, moved
or copied has the entry that its bytes have. A trusted record gives the digest. Otherwise size and a sample of a few
pages select candidate entries, and only for those the file is hashed, once for each hash algorithm.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from legroom.cache import (
    eviction,
    mapped_files_and_checksums,
    source_digest_records,
    source_stamps_and_digests,
    store_free_space,
)
from legroom.cache.entry_users import entry_users
from legroom.cache.eviction import last_used, least_recent_first
from legroom.cache.find_or_build_entry import source_paths
from legroom.cache.lease_and_map_entry import (
    entry_errors,
    entry_record,
    lease,
    lock_name,
    open_checked,
    opened_entry,
    read_manifest,
)
from legroom.cache.manifest import FROZEN, Array, Damaged, Manifest, OtherFormat, Table, is_key
from legroom.cache.source_stamps_and_digests import Source
from legroom.cache.store_directories import Store, is_locked, is_resource_shortage, open_stores, store_lock
from legroom.cache.store_free_space import directory_bytes
from legroom.errors import (
    DamagedSource,
    FormatPluginFailed,
    LegroomError,
    MissingKey,
    NoSuchObject,
    NotLoaded,
    RemoteError,
    SourceError,
    UnknownFormat,
    UnreadableSource,
    UnsupportedData,
    UsageError,
)
from legroom.formats.detect import has_format, open_source
from legroom.formats.file_reads_and_errors import make_room_for_files
from legroom.messages import joined, listed, say, shown
from legroom.records.cache_entry import Entry, EntryUser, StoreRoom, Verification
from legroom.records.finding_and_alarm import Finding
from legroom.remote.remote_object import ObjectStamp, ObjectUrl, SourcePath, is_url, object_url, without_credentials


def same_versions(source: Source, manifest: Manifest) -> bool | None:
    """Whether remote objects are those that an entry was built from. None if their versions do not tell."""
    stamps = {str(file.path): file.stamp for file in source.files}
    if all(
        isinstance(stamp := stamps.get(path), ObjectStamp) and stamp.is_strong and str(stamp) == then
        for path, then in zip(manifest.paths, manifest.stamps, strict=True)
    ):
        return True
    if None not in (file.stamp.size for file in source.files) and source.size != manifest.source_bytes:
        return False
    hashes = [file.stamp.hashes if isinstance(file.stamp, ObjectStamp) else {} for file in source.files]
    if len(hashes) == 1 and manifest.hash in hashes[0]:
        return hashes[0][manifest.hash] == manifest.digest
    return None


def recorded_paths(texts: Iterable[str]) -> Paths:
    """Paths and URLs from their text in a manifest or record."""
    return tuple(object_url(text) if is_url(text) else Path(text) for text in texts)


Paths = tuple[SourcePath, ...]
_REFERRING = ("hdf5", "megatron")  # formats whose data may be in other files too
_OTHER_FILE = (DamagedSource, UnknownFormat, UnsupportedData, MissingKey)  # a loaded source raised none of these


class SourceMatcher:
    """Compares files with entries by content. Each file is stamped and hashed at most once."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = stores
        self._asked_ns = time.time_ns()
        self._looked: dict[Paths, Source] = {}
        self._sources: dict[tuple[Paths, tuple[str, ...] | None, bool], Source] = {}
        self._samples: dict[Source, str] = {}
        self._digests: dict[tuple[Source, str], str] = {}
        self._known: dict[str, list[Paths]] | None = None

    def matches(self, paths: Sequence[SourcePath], manifest: Manifest) -> bool:
        """Whether these paths have the content that the entry was built from."""
        return self._matches(paths, manifest) is True

    def _matches(self, paths: Sequence[SourcePath], manifest: Manifest) -> bool | None:
        """The same; None if it is not known."""
        if not manifest.paths:
            return False  # a frozen object
        named = tuple(paths)
        if named not in self._looked:
            self._looked[named] = source_stamps_and_digests.stamp_source(named)
        for store in self._stores:
            record = source_digest_records.read_record(store, self._looked[named])
            if record is not None and record.is_trusted(self._asked_ns):
                if record.digests.get(manifest.hash) == manifest.digest:
                    return True
                # Other keys may refer to other files, and have another digest.
                if manifest.hash in record.digests and manifest.kind not in _REFERRING:
                    return False
        if self._looked[named].is_remote:
            return same_versions(self._looked[named], manifest)
        try:
            source = self._source(named, manifest)
        except _OTHER_FILE:
            return False
        if source.size != manifest.source_bytes:
            return False
        if source not in self._samples:
            self._samples[source] = source_stamps_and_digests.sample_source(source)
        if self._samples[source] != manifest.sample:
            return False
        return self.digest(source, manifest.hash) == manifest.digest

    def digest(self, source: Source, algorithm: str) -> str:
        """The digest of a source as it is now."""
        if (source, algorithm) not in self._digests:
            source_stamps_and_digests.flush_source(source)
            self._digests[source, algorithm] = source_stamps_and_digests.digest_source(source, algorithm)
            if not source_stamps_and_digests.is_unchanged(source):
                raise source_stamps_and_digests.source_changed_error(source.paths[0])
        return self._digests[source, algorithm]

    def is_replaced(self, manifest: Manifest) -> bool:
        """Whether the entry's known files have other content now, and none has its own.

        The same content may have been opened under other names since. An unreadable file is not known to differ.
        """
        if not manifest.paths:
            return False
        answers: set[bool | None] = set()
        for paths in dict.fromkeys((recorded_paths(manifest.paths), *self._opened(manifest.digest))):
            if all(_can_look(path) for path in paths):
                try:
                    answers.add(self._matches(paths, manifest))
                except LegroomError:
                    answers.add(None)
        return answers == {False}

    def _opened(self, digest: str) -> list[Paths]:
        """The paths that had this digest when they were opened."""
        if self._known is None:
            self._known = {}
            for store in self._stores:
                for record in source_digest_records.all_records(store):
                    for one in record.digests.values():
                        self._known.setdefault(one, []).append(recorded_paths(record.paths))
        return self._known.get(digest, [])

    def _source(self, paths: Paths, manifest: Manifest) -> Source:
        """The source with every referenced file that the entry's keys need."""
        with_others = manifest.kind in _REFERRING
        key = paths, manifest.options.keys if with_others else None, with_others
        if key not in self._sources:
            self._sources[key] = current_source(paths, manifest)
        return self._sources[key]


def _can_look(path: SourcePath) -> bool:
    return path.is_reopenable if isinstance(path, ObjectUrl) else os.path.lexists(path)


def current_source(paths: Sequence[SourcePath], manifest: Manifest) -> Source:
    """The source of these paths now, as a load with the entry's keys would see it."""
    source = source_stamps_and_digests.stamp_source(paths)
    if manifest.kind not in _REFERRING:
        return source
    with ExitStack() as stack:
        options = manifest.options
        make_room_for_files(len(paths))
        # No others: they may need the reader of a package that is gone or broken.
        referring = [path for path in map(Path, paths) if has_format(path, _REFERRING)]
        readers = [stack.enter_context(open_source(path, options.keys, dtype=options.dtype)) for path in referring]
        source = source_stamps_and_digests.with_referenced_files(source, [reader.describe() for reader in readers])
        source_stamps_and_digests.require_stamped(source, readers)
    return source


Where = str | os.PathLike[str]
What = Where | Sequence[Where] | None  # None: everything
_BEGINS_KEY = re.compile(r"[0-9a-f]{6,64}(?:-[0-9a-z]*)*")  # six digits at least


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries, the stores with their free space, and what could not be found or read."""

    entries: tuple[Entry, ...]
    rooms: tuple[StoreRoom, ...]
    findings: tuple[Finding, ...]  # stores that could not be read
    missing: tuple[str, ...] = ()  # names that no entry matches


def entries(what: What = None, *, with_users: bool = False) -> tuple[Entry, ...]:
    """Every entry of every store, least recently used first, or those of some keys or files."""
    return listing(what, with_users=with_users).entries


def listing(what: What = None, *, with_users: bool = False) -> Listing:
    """The entries, and the stores that they are in."""
    found: list[Entry] = []
    with open_stores() as stores:
        wanted = find_keys(stores.distinct, what, SourceMatcher(stores.found))
        for store, keys in wanted.keys.items():
            people = entry_users(store.root) if with_users and keys else None
            for key in keys:
                users = people.get(key, ()) if people is not None else None
                entry = read_entry(store, key, users, paths=wanted.paths_of(key)[0])
                if entry is not None:
                    found.append(entry)
        return Listing(tuple(found), tuple(map(_room, stores.distinct)), stores.findings, wanted.missing)


def info(what: Where, *, with_users: bool = True) -> Entry:
    """The entry of a key (or its first digits) or of a file. Raises NotLoaded if there is none."""
    return infos([what], with_users=with_users)[0]


def infos(what: Sequence[Where], *, with_users: bool = True) -> tuple[Entry, ...]:
    """The entries of keys or files. Raises NotLoaded if one of them has none."""
    found = listing(what, with_users=with_users)
    if found.missing or not found.entries:
        raise not_loaded_error([*found.missing, *what][0], found.findings)
    return found.entries


def store_rooms() -> tuple[tuple[StoreRoom, ...], tuple[Finding, ...]]:
    """The stores with their free space, and the candidates that are not used."""
    with open_stores() as stores:
        return tuple(map(_room, stores.distinct)), stores.findings


def _room(store: Store) -> StoreRoom:
    stats = os.statvfs(store.fd)
    with store_lock(store):
        bound = store_free_space.tightest(store_free_space.bounds(store))
        free = max(0, bound.free - store_free_space.outstanding_reservations(store))
        left = eviction.leftover_bytes(store)
        downloads = eviction.unused_downloads(store), eviction.unused_downloads(store, eviction.ABANDONED)
        unfinished, abandoned = (sum(directory_bytes(store.work, name) for name in names) for names in downloads)
    size = stats.f_blocks * stats.f_frsize
    used = sum(old.nbytes for old in least_recent_first(store))  # without locks and records
    root = os.fspath(store.root)
    return StoreRoom(
        root, store.backing, size, used, free, bound.what(), left + abandoned, max(0, unfinished - abandoned)
    )


def not_loaded_error(what: Where, findings: Sequence[Finding] = (), *, wanted: bool = True) -> NotLoaded:
    """NotLoaded for something that the cache does not hold. ``wanted`` adds how to load it.

    A store that could not be read may hold it, so its finding is part of the error.
    """
    name = without_credentials(os.fspath(what))
    there = _is_source(name)
    nowhere = (
        say("no store has an entry for the current content of that object")
        if is_url(name)
        else say("no store has an entry for the current content of that file")
        if there
        else say("no store has an entry with that key, and no such file exists")
    )
    return NotLoaded(
        say("{what} is not loaded", what=name),
        why=joined([nowhere, *(one.why for one in findings if one.severity != "info")]),
        fix=(
            *((f"legroom cache load {shown(name)}",) if there and wanted else ()),
            say("list the entries:\nlegroom cache list"),
        ),
    )


@dataclass(frozen=True, slots=True)
class FoundKeys:
    """The keys that some names stand for, in each store, and the names that stand for none."""

    keys: dict[Store, list[str]]
    names: tuple[str, ...]  # empty: everything was asked for
    missing: tuple[str, ...]
    paths: Mapping[str, list[Paths]] = field(default_factory=dict)  # of a key: the files that have its content

    def paths_of(self, key: str) -> list[Paths]:
        """The files that were named for it, each with its content; (): those it was built from."""
        return self.paths.get(key) or [()]


def find_keys(stores: Sequence[Store], what: What, matcher: SourceMatcher, *, earlier: bool = False) -> FoundKeys:
    """The keys of one or several names; None: all.

    Several files also stand for the entry of all of them joined, as a shell passes the shards of a pattern.
    ``earlier``: a file without an entry of its current content stands for those of its earlier content.
    """
    if what is None:
        return FoundKeys({store: [old.key for old in least_recent_first(store)] for store in stores}, (), ())
    given: Sequence[Where] = [what] if isinstance(what, (str, os.PathLike)) else what
    names = tuple(dict.fromkeys(os.fspath(name) for name in given))
    keys: dict[Store, dict[str, None]] = {store: {} for store in stores}  # in order, each once
    missing = []
    paths: dict[str, list[Paths]] = {}

    def add(found: Mapping[Store, MatchingKeys]) -> bool:
        for store, matching in found.items():
            keys[store] |= dict.fromkeys(matching.keys)
            for key in matching.keys:
                if matching.paths not in (several := paths.setdefault(key, [])):
                    several.append(matching.paths)
        return any(matching.keys for matching in found.values())

    for name in names:
        there = add({store: matching_keys(store, name, matcher) for store in stores})
        if not there and earlier and _is_source(name):
            there = add({store: MatchingKeys(keys_built_from(store, source_paths(name))) for store in stores})
        if not there:
            missing.append(name)
    sources = [name for name in names if _is_source(name)]
    if len(sources) > 1 and add({store: _keys_of_paths(store, source_paths(sources), matcher) for store in stores}):
        missing = [name for name in missing if name not in sources]
    return FoundKeys({store: list(these) for store, these in keys.items()}, names, tuple(missing), paths)


@dataclass(frozen=True, slots=True)
class MatchingKeys:
    """The keys of one store that a name stands for."""

    keys: list[str]
    paths: Paths = ()  # the files that have the content of these entries now, where the name is theirs


def _is_source(name: Where) -> bool:
    """Whether it is a URL or an existing file, rather than a key or a name."""
    return is_url(os.fspath(name)) or os.path.lexists(os.path.expanduser(name))


def matching_keys(store: Store, what: Where, matcher: SourceMatcher) -> MatchingKeys:
    """The keys in a store that match a key, its first digits, or a file, least recently used first."""
    text = os.fspath(what)
    if not os.path.lexists(text) and _BEGINS_KEY.fullmatch(text):
        found = [old.key for old in least_recent_first(store) if old.key.startswith(text)]
        if len(found) > 1 and text not in found and len({key.partition("-")[0] for key in found}) > 1:
            raise UsageError(
                say("{text} matches several entries", text=text), why=listed(found), fix=(say("give more digits"),)
            )
        if found:  # else it may be a name: of "face.features" or "decade" too
            return MatchingKeys([text] if text in found else found)
    if not os.path.lexists(text) and (named := keys_named(store, text)):
        return MatchingKeys(named)
    return _keys_of_paths(store, source_paths(what), matcher)


def _keys_of_paths(store: Store, paths: Paths, matcher: SourceMatcher) -> MatchingKeys:
    gone = len(paths) == 1 and isinstance(paths[0], Path) and not os.path.lexists(paths[0])
    try:
        # The file may have been removed while its entry still exists.
        if not gone:
            return MatchingKeys(keys_of_content(store, paths, matcher), paths)
    except RemoteError:  # not reachable now: those that were built from it
        pass
    except (FormatPluginFailed, UnreadableSource):  # the format of a directory may be of a package that is gone
        if not any(isinstance(path, Path) and path.is_dir() for path in paths):
            raise
    return MatchingKeys(keys_built_from(store, paths))


def keys_named(store: Store, name: str) -> list[str]:
    """The keys of frozen objects with that name."""
    return _keys_where(store, lambda found: found.kind == FROZEN and found.attributes.get("name") == name)


def keys_built_from(store: Store, paths: Sequence[SourcePath]) -> list[str]:
    """The keys in a store that were built from a file of that name, whatever its content is now."""
    names = {os.fspath(path) for path in paths}
    return _keys_where(store, lambda found: bool(names & set(found.paths)))


def keys_of_content(store: Store, paths: Sequence[SourcePath], matcher: SourceMatcher) -> list[str]:
    """The keys in a store that have the current content of these files."""
    return _keys_where(store, lambda found: matcher.matches(paths, found))


def _keys_where(store: Store, wanted: Callable[[Manifest], bool]) -> list[str]:
    manifests = ((old.key, manifest_of(store, old.key)) for old in least_recent_first(store))
    return [key for key, found in manifests if isinstance(found, Manifest) and wanted(found)]


def manifest_of(store: Store, key: str) -> Manifest | Damaged | OtherFormat | OSError | None:
    """The manifest of an entry, or the error that makes it unusable or unreadable. None if it is gone.

    Raises an error that shows a shortage in this process: it does not concern the entry.
    """
    if not is_key(key):
        return None
    try:
        with opened_entry(store, key) as folder:
            try:
                return read_manifest(folder, key)
            except (Damaged, OtherFormat, OSError):
                if not _is_named(store, key, folder):
                    return None  # removed after it was opened: its files may be gone already
                raise
    except FileNotFoundError:
        return None
    except (Damaged, OtherFormat, OSError) as problem:
        if isinstance(problem, OSError) and is_resource_shortage(problem):
            raise
        return problem


def _is_named(store: Store, key: str, folder: int) -> bool:
    """Whether the open directory is still the entry of that key."""
    try:
        return os.path.samestat(os.stat(key, dir_fd=store.fd, follow_symlinks=False), os.fstat(folder))
    except FileNotFoundError:
        return False


def read_entry(
    store: Store, key: str, people: tuple[EntryUser, ...] | None = None, *, paths: Paths = ()
) -> Entry | None:
    """One entry as it is now. None if it is gone. ``paths``: the files that it was found by."""
    manifest = manifest_of(store, key)
    if manifest is None:
        return None
    root = os.fspath(store.root)
    if not isinstance(manifest, Manifest):
        # An entry of another format is no damaged one.
        why = manifest.strerror or str(manifest) if isinstance(manifest, OSError) else str(manifest)
        field = "damaged" if isinstance(manifest, Damaged) else "unreadable"
        size = directory_bytes(store.fd, key)
        return Entry(key, (), None, None, "unknown", store.backing, size, {}, {}, {}, root, **{field: why})  # type: ignore[arg-type]
    return entry_record(
        manifest,
        store.backing,
        store=root,
        in_use=is_locked(store, lock_name(key)),
        users=people,
        last_used=last_used(store, key),
        paths=paths,
    )


def verify(what: What = None, *, source: bool = True) -> tuple[Verification, ...]:
    """Check the entries of some keys or files, or all. ``source=False`` skips reading the sources.

    A file without an entry of its current content: checks those of its earlier content, which report the change.
    """
    found = []
    with open_stores() as stores:
        matcher = SourceMatcher(stores.found)
        wanted = find_keys(stores.distinct, what, matcher, earlier=True)
        if wanted.missing:
            raise not_loaded_error(wanted.missing[0], stores.findings)
        for store, keys in wanted.keys.items():
            for key in keys:
                result = _verify(store, key, matcher if source else None, wanted.paths_of(key))
                found.extend(result)
        if wanted.names and not found:  # removed meanwhile
            raise not_loaded_error(wanted.names[0], stores.findings)
    return tuple(found)


def _verify(store: Store, key: str, matcher: SourceMatcher | None, named: Sequence[Paths]) -> list[Verification]:
    """Check one entry, and each of the files that were named for it."""
    in_use = is_locked(store, lock_name(key))  # before its own lease
    lock = lease(store, key, create=True)  # it must not be dropped while it is read
    assert lock is not None
    with lock, entry_errors(store, key):
        entry = read_entry(store, key)
        if entry is None:
            return []
        entry = replace(entry, in_use=in_use)
        if entry.unreadable is not None:
            return [Verification(entry, (), "not-checked", entry.unreadable)]
        if entry.damaged is not None:
            return [Verification(entry, (entry.damaged,), "not-checked", say("its manifest cannot be read"))]
        try:
            with opened_entry(store, key) as folder:
                manifest = read_manifest(folder, key)
                damaged = tuple(item.name for item in manifest.items if not _whole(folder, item))
        except FileNotFoundError:
            return []
        except (Damaged, OtherFormat) as problem:
            return [Verification(entry, (str(problem),), "not-checked", say("its manifest cannot be read"))]
        except OSError as problem:
            if is_resource_shortage(problem):
                raise
            unreadable = problem.strerror or str(problem)
            return [Verification(replace(entry, unreadable=unreadable), (), "not-checked", unreadable)]
    if not manifest.paths:
        state, why = _not_checked(say("it was frozen from memory and has no source file"))
        return [Verification(entry, damaged, state, why)]
    found: dict[tuple[str, ...], Verification] = {}  # by the names that are shown
    for paths in named:
        own = entry_record(manifest, store.backing, paths=paths).opened_as
        state, why = _not_checked(say("not requested")) if matcher is None else _source(matcher, manifest, paths)
        found.setdefault(own, Verification(replace(entry, opened_as=own), damaged, state, why))
    return list(found.values())


SourceState = tuple[Literal["same", "changed", "missing", "not-checked"], str]


def _not_checked(why: str) -> SourceState:
    return "not-checked", why


def _whole(folder: int, item: Array | Table) -> bool:
    try:
        fd = open_checked(folder, item)
    except Damaged:
        return False
    try:
        start = len(item.header) if isinstance(item, Array) else 0
        return mapped_files_and_checksums.hex_digits(mapped_files_and_checksums.file_crc32(fd, start)) == item.crc32
    finally:
        os.close(fd)


def _gone(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # unknown
    return False


def _source(matcher: SourceMatcher, manifest: Manifest, named: Paths = ()) -> SourceState:
    """Compare the files that were named, else those that the entry was built from, with its digest."""
    paths = named or recorded_paths(manifest.paths)
    if any(isinstance(path, ObjectUrl) for path in paths):
        return _remote_source(paths, manifest)
    try:
        source = current_source(paths, manifest)
        now = matcher.digest(source, manifest.hash)
    except SourceError as problem:
        if any(_gone(os.fspath(path)) for path in paths):
            return "missing", problem.why
        unknown = isinstance(problem, (FormatPluginFailed, UnreadableSource))  # it may be unchanged
        return ("not-checked" if unknown else "changed"), problem.why
    if now == manifest.digest:
        return "same", ""
    return "changed", say("its {hash} is now {now}", hash=manifest.hash, now=now)


def _remote_source(paths: Paths, manifest: Manifest) -> SourceState:
    """Compare the versions of remote objects with those that were loaded. Their content is not read again."""
    try:
        same = same_versions(source_stamps_and_digests.stamp_source(paths, ask=True), manifest)
    except NoSuchObject as problem:
        return "missing", problem.why
    except LegroomError as problem:
        return "not-checked", problem.why
    if same is None:
        return "not-checked", say("the server gives the object no version, or another one for unknown content")
    return ("same", "") if same else ("changed", say("the server has another version of it now"))
