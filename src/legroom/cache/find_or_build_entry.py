"""Open a source: find its entry by stamp, digest and key, or have it built in the first store that has room.

``legroom.open`` itself is in loader/batches/legroom_open.py: its Data also makes batches.
"""

from __future__ import annotations

import glob
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from legroom.cache import locks, source_digest_records, source_stamps_and_digests
from legroom.cache.cached_arrays_and_tables import CachedData, DataContents, ragged_of
from legroom.cache.lease_and_map_entry import (
    Attached,
    EntryLease,
    attach,
    entry_record,
    lease,
    lock_name,
    opened_entry,
    read_usable_manifest,
)
from legroom.cache.manifest import FORMAT, Array, Damaged, Manifest, Options, OtherFormat, key_of, split_own_readers
from legroom.cache.mapped_files_and_checksums import Prefault, opened
from legroom.cache.source_digest_records import SourceRecord
from legroom.cache.source_stamps_and_digests import Source, shard_names
from legroom.cache.store_directories import (
    Store,
    StoreCandidate,
    Stores,
    UnusableStore,
    delete_trash,
    existing_stores,
    is_resource_shortage,
    log,
    open_store,
    store_error,
    store_lock,
)
from legroom.errors import EntryUnreadable, LegroomError, NoRoom, NoStore, StoreError, UsageError
from legroom.formats.base_reader import Extent, Selection, column_names
from legroom.formats.file_reads_and_errors import absolute
from legroom.messages import joined, say
from legroom.remote.remote_object import ObjectUrl, SourcePath, is_url, local_path, object_url
from legroom.system.argument_checks import check_choice, check_path, not_a_path
from legroom.system.lazy_and_optional_imports import import_lock, lazy_import
from legroom.system.open_file_or_pipe import nothing_matches
from legroom.system.processes_and_threads import legroom_disabled, release_freed_memory, split_into_maps
from legroom.units import format_size

BACKINGS = ("auto", "shm", "disk", "inplace")
HASHES = ("md5", "blake3", "xxh3")
Where = str | bytes | os.PathLike[str] | os.PathLike[bytes]
D = TypeVar("D", bound=CachedData)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The arguments of one open."""

    paths: tuple[SourcePath, ...]
    keys: tuple[str, ...] | None = None
    backing: str = "auto"
    hash: str = "md5"
    evict: bool = True
    revalidate: bool = False  # ask the servers of remote objects, however recently that was done
    dtype: str | None = None  # of a flat token file (token_reader.token_dtype)
    prefault: bool = True  # map the pages in the background: not where the files are read

    def wants(self, store: Store) -> bool:
        return self.backing in ("auto", store.backing)


def open_as(
    kind: type[D], request: OpenRequest, *, wait: bool = True, progress: Callable[[int, int], None] | None = None
) -> D:
    """Open a source as ``legroom.open`` does (documented there), as data of class ``kind``."""
    _check(request.backing, request.hash)
    again = (_reopen, (kind, request, None, None, None))
    with resource_errors(request.paths[0]):
        if legroom_disabled(os.environ) or not locks.SUPPORTED:
            try:
                contents = _uncached().in_process(request.paths, request.keys, progress, request.dtype)
            except OSError as problem:
                raise problem if isinstance(problem, LegroomError) else _temporary_error(problem) from problem
            return kind(contents, request.keys, again)
        if request.backing == "inplace":
            return kind(_uncached().in_place(request.paths, request.keys, request.dtype), request.keys, again)
        return _data(kind, _attached(request, wait, progress), request)


def _temporary_error(problem: OSError) -> StoreError:
    """The error for a file in the temporary directory that cannot be written, with the cache disabled."""
    known = store_error(problem)
    return StoreError(
        say("a temporary file in {folder} cannot be written", folder=os.environ.get("TMPDIR") or "/tmp"),
        why=known.why,
        fix=known.fix[:1]
        if is_resource_shortage(problem)
        else (say("set TMPDIR to a directory with free space"), say("unset LEGROOM_DISABLE to use the cache")),
    )


@contextmanager
def resource_errors(what: object, *, parts: bool = True) -> Iterator[None]:
    """Turn a lack of memory or threads into NoRoom, and a failed system call into StoreError.

    ``what`` is being loaded; ``parts`` of it can be asked for.
    """
    _reserve.take()
    try:
        yield
    except MemoryError as problem:
        _reserve.give_back()
        raise _no_memory(what, str(problem), parts) from problem
    except OSError as problem:
        if isinstance(problem, LegroomError):
            raise
        raise store_error(problem) from problem
    except RuntimeError as problem:
        if isinstance(problem, LegroomError) or "can't start new thread" not in str(problem):
            raise
        _reserve.give_back()
        raise _no_memory(what, str(problem), parts) from problem


class _Reserve:
    """Memory maps that nobody uses. Given back, they leave room for the objects with which an error is put into words:
    a process that has as many maps as the kernel allows gets no heap either, so not even a text can be made."""

    MAPS, BYTES = 8, 1 << 20  # of address space alone; Python takes a megabyte at a time for small objects

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None

    def take(self) -> None:
        if self._pages is None and sys.platform == "linux":
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            with suppress(OSError, MemoryError):
                self._pages = mmap.mmap(-1, self.MAPS * self.BYTES, kind, mmap.PROT_READ)
                split_into_maps(self._pages, self.BYTES)

    def give_back(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None


_reserve = _Reserve()


_NEARLY = 0.98  # of the maps that the kernel allows: a load needs some at once
_MAPS_READ = bytearray(1 << 14)  # allocated now: when its lines are counted, there may be no memory left


def _no_memory(what: object, said: str, parts: bool) -> NoRoom:
    why = say("this process cannot allocate more memory or start more threads")
    limit, (used, most) = _address_space(), _memory_maps()
    if used >= _NEARLY * most:
        return NoRoom(
            say("not enough memory to load {path}", path=what),
            why=say("this process has {used} memory maps; the kernel allows {most}", used=used, most=most),
            fix=(say("raise the limit of memory maps, as root:\nsysctl -w vm.max_map_count=1048576"),),
        )
    if limit is not None:
        why = say("{why}; its address space is limited to {limit} (ulimit -v)", why=why, limit=format_size(limit))
    return NoRoom(
        say("not enough memory to load {path}", path=what),
        why=joined([why, said]) if said else why,
        fix=(
            say("raise the limits of this process:\nulimit -v unlimited; ulimit -u"),
            *((say("load only what you need: keys=[…]"),) if parts else ()),
        ),
    )


def _address_space() -> int | None:
    """The limit of this process's address space in bytes, None if unlimited."""
    try:
        with import_lock:
            import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _memory_maps() -> tuple[int, int]:
    """The memory maps of this process, and how many the kernel allows; (0, 1) where that cannot be read."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        used = 0
        with opened("/proc/self/maps") as fd:
            while count := os.readv(fd, [_MAPS_READ]):  # tens of thousands of lines
                used += _MAPS_READ.count(b"\n", 0, count)
    except (OSError, ValueError, MemoryError):
        return 0, 1
    return used, most


def source_paths(path: Where | Iterable[Where]) -> tuple[SourcePath, ...]:
    """Absolute paths of a path, a URL, a glob pattern (matches sorted), several of these, or a name with braces.

    A file of exactly that name is meant as it is. Of ``{000..127}`` opening says which name is missing.
    """
    found: list[SourcePath] = []
    for one in _named(path):
        if isinstance(one, ObjectUrl):
            found.append(one)
            continue
        if one in ("", b""):
            check_path(say("the path"), one)
        text = os.fsdecode(one)
        if "\0" in text:
            content = isinstance(one, bytes)
            fix = say("pass the path of the file, not its content") if content else say("check the path")
            raise UsageError(say("a path cannot contain a null character"), fix=(fix,))
        if "://" in text and is_url(text):
            local = local_path(text)
            if local is None:
                for name in _expanded(text) or [text]:
                    found.extend(_objects(name))
                continue
            text = local
        text = os.path.expanduser(text)
        names = None if os.path.lexists(text) else _expanded(text)
        for name in names or [text]:
            found.extend(_matching(name))
    if not found:
        raise UsageError(say("no path was given"), fix=(say("pass a path, a glob pattern or a list of paths"),))
    if any(isinstance(one, Path) and one.suffix == ".bin" for one in found):
        found = lazy_import("legroom.formats.megatron_reader").with_indexes(found)
    return tuple(found)


def _expanded(text: str) -> list[str] | None:
    names: list[str] | None = lazy_import("legroom.cache.expand_braces").expand_braces(text) if "{" in text else None
    return names


def _matching(text: str) -> list[Path]:
    """The file of that name, or those that match it as a pattern."""
    if glob.has_magic(text) and not os.path.lexists(text):
        matches = sorted(glob.glob(text, recursive=True))
        if not matches:
            raise nothing_matches(text)
        return list(map(absolute, matches))
    return [absolute(text)]


def _objects(text: str) -> list[ObjectUrl]:
    """The object of a URL, or the objects that match a pattern."""
    url = object_url(text)
    if not glob.has_magic(text.partition("?")[0]):
        return [url]
    found: list[ObjectUrl] = lazy_import("legroom.remote.object_store").find_objects(url)
    return found


def _named(path: Any) -> list[Where]:
    """The paths as a list. Raises UsageError for anything that is not a path.

    A file gives its lines and a mapping its keys when it is iterated over; neither is a list of paths.
    """
    if isinstance(path, (str, bytes, os.PathLike)):
        return [path]
    other = any(hasattr(path, name) for name in ("read", "keys", "save_to_disk")) or getattr(path, "ndim", 1) == 0
    if other or not isinstance(path, Iterable):
        raise not_a_path(path)
    given: list[Where] = []
    for one in path:
        if not isinstance(one, (str, bytes, os.PathLike)):
            # Of a dataset, what it gives first is read, and it is named itself: a sample says nothing.
            raise not_a_path(one if isinstance(path, (list, tuple, set, Iterator)) else path)
        given.append(one)
    return given


def _check(backing: str, hash: str) -> None:
    check_choice("backing", backing, BACKINGS)
    check_choice("hash", hash, HASHES)
    source_stamps_and_digests.new_hasher(hash)  # raises if its package is missing


def _attached(request: OpenRequest, wait: bool, progress: Callable[[int, int], None] | None) -> Attached:
    source = source_stamps_and_digests.stamp_source(request.paths, ask=request.revalidate)
    found = find_entry(request, source, time.time_ns())
    if found is not None:
        remember_versions(source)
        return found
    with import_lock:
        from legroom.cache.elect_builder_and_publish import build
    return build(request, wait=wait, progress=progress)


def remember_versions(source: Source) -> None:
    """Note in the store which versions of remote objects were seen, and when."""
    for path in source.paths:
        if isinstance(path, ObjectUrl):
            lazy_import("legroom.cache.source_digest_records").remember(path)


def _uncached() -> Any:
    return lazy_import("legroom.cache.open_without_cache")


def _data(kind: type[D], attached: Attached, request: OpenRequest) -> D:
    manifest = attached.manifest
    memory = attached.backing == "shm"
    contents = DataContents(
        entry=entry_record(
            manifest,
            attached.backing,
            store=os.fspath(attached.root),
            in_use=True,
            last_used=time.time(),
            paths=request.paths,
        ),
        arrays=attached.arrays,
        tables=attached.tables,
        ragged=ragged_of(manifest.arrays),
        extent=_extents(manifest, attached.root),
        prefault=Prefault(attached.maps, in_memory=memory) if attached.maps and request.prefault else None,
        keep=attached.lease,
        findings=attached.findings,
    )
    root = os.fspath(attached.root)
    again = (_reopen, (kind, request, root, attached.backing, manifest.key))
    return kind(contents, request.keys, again)


def _extents(manifest: Manifest, root: Path) -> Callable[[str], Extent | None]:
    """Where the arrays of an entry lie in its files."""
    arrays: dict[str, Array] = {}  # made at the first call: most opens ask for none

    def extent(name: str) -> Extent | None:
        if not arrays:
            arrays.update((array.name, array) for array in manifest.arrays)
        array = arrays.get(name)
        return None if array is None else Extent(root / manifest.key / array.file, len(array.header), array.nbytes)

    return extent


def _reopen(kind: type[D], request: OpenRequest, root: str | None, backing: Any, key: str | None) -> D:
    """Unpickle in another process: attach the same entry by name, else open the same source."""
    if root is not None and key is not None and not legroom_disabled(os.environ):
        with suppress(*CANNOT_ATTACH):  # opening the source reports the problem or rebuilds the entry
            found = attach_named(root, backing, key)
            if found is not None:
                return _data(kind, found, request)
    return open_as(kind, request)


CANNOT_ATTACH = (OSError, UnusableStore, Damaged, OtherFormat, EntryUnreadable)


def attach_named(root: str, backing: Any, key: str) -> Attached | None:
    """Attach an entry that another process has pickled. None if it is not there, else one of CANNOT_ATTACH."""
    candidate = StoreCandidate(Path(root).parent, backing, named=True)
    if os.fspath(candidate.root) != root or not locks.SUPPORTED:
        return None
    with open_store(candidate, make=False) as store:
        return attach(store, key)


def find_entry(request: OpenRequest, source: Source, asked_ns: int) -> Attached | None:
    """Attach the source's entry by its record. None if there is no usable one."""
    for store, record, readers in _trusted_records(request, source, asked_ns):
        for algorithm in sorted(record.digests, key=lambda name: name != request.hash):
            found = find_by_digest(request, source, store, record.digests[algorithm], algorithm, readers)
            if found is not None:
                return found
    return None


def _trusted_records(
    request: OpenRequest, source: Source, asked_ns: int
) -> Iterator[tuple[Store, SourceRecord, tuple[str, ...] | None]]:
    """The records of a source that may be used, each with its store and the installed readers of the source."""
    for store in existing_stores():
        record = source_digest_records.read_record(store, source) if request.wants(store) else None
        if record is not None and record.is_trusted(asked_ns):
            yield store, record, _installed(record.readers)


def find_manifest(request: OpenRequest) -> tuple[Manifest, Path, EntryLease] | None:
    """The manifest of the source's entry, its store and a lease on it, without mapping a file.

    None where there is no entry, or where only attaching it can tell.
    """
    if legroom_disabled(os.environ) or not locks.SUPPORTED:
        return None
    source, asked_ns = source_stamps_and_digests.stamp_source(request.paths), time.time_ns()
    for store, record, readers in _trusted_records(request, source, asked_ns):
        for algorithm, digest in record.digests.items():
            for options in usable_options(request, source, readers):
                key = key_of(digest, algorithm, options)
                held = lease(store, key)
                if held is None:
                    continue
                try:
                    with opened_entry(store, key) as folder:
                        return read_usable_manifest(folder, key), store.root, held
                except (OSError, Damaged, OtherFormat):
                    held.release()
    return None


def _installed(readers: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The readers of a source in their installed versions: an update may read the same bytes differently."""
    if readers is None:
        return None
    own, others = split_own_readers(readers)
    found = lazy_import("legroom.formats.plugin_formats").installed_readers(others) if others else ()
    return None if found is None else tuple(sorted({*own, *found})) or None


def find_by_digest(
    request: OpenRequest,
    source: Source,
    store: Store,
    digest: str,
    algorithm: str,
    readers: tuple[str, ...] | None = None,
) -> Attached | None:
    """Attach the entry of that digest in that store. Damaged entries are moved to the trash.

    ``readers`` are what decides how the source is read, besides its bytes: those of other packages, and Legroom's own
    that have a revision. None: neither.
    """
    for options in usable_options(request, source, readers):
        key = key_of(digest, algorithm, options)
        found = attach_usable(store, key)
        if found is not None:
            _check_keys(request, found.manifest)
            return found
    return None


def attach_usable(store: Store, key: str) -> Attached | None:
    """Attach an entry. None if it does not exist or is unusable: a damaged or older one is moved to the trash."""
    while True:
        try:
            return attach(store, key)
        except Damaged as problem:
            text = say("{root}/{key} is unusable and will be rebuilt: {why}", root=store.root, key=key, why=problem)
            log.warning("%s", text)
        except OtherFormat as other:
            if other.newer:
                return None  # it is left alone: the next variant is built beside it
        if not discard_unusable(store, key):
            return None


def usable_options(request: OpenRequest, source: Source, readers: tuple[str, ...] | None) -> Iterator[Options]:
    """The options of every entry that can serve the request, the whole source first."""
    order = row_order(source)
    for version in (None, FORMAT):
        yield Options(None, order, version, readers, request.dtype)
        if request.keys is not None:
            yield replace(entry_options(request, source, readers), version=version)


def entry_options(request: OpenRequest, source: Source, readers: tuple[str, ...] | None = None) -> Options:
    """The options of the entry that this request would build."""
    keys = None if request.keys is None else tuple(sorted(set(request.keys)))
    return Options(keys, row_order(source), readers=readers, dtype=request.dtype)


def row_order(source: Source) -> tuple[int, ...] | None:
    """The order of the files' rows if it is not the order of their names, else None."""
    names = shard_names(source.paths)
    order = tuple(sorted(range(len(names)), key=lambda index: names[index]))
    return None if order == tuple(range(len(names))) else order


def discard_unusable(store: Store, key: str) -> bool:
    """Move an unusable entry to the trash. False if its format or reader is newer: it is left alone.

    Processes that have mapped it keep their pages: only the name is removed.
    """
    eviction = lazy_import("legroom.cache.eviction")
    with store_lock(store):
        try:
            found = attach(store, key)
        except (Damaged, OtherFormat) as problem:
            if isinstance(problem, OtherFormat) and problem.newer:
                return False
            moved = eviction.move_entry_to_trash(store, key)
            try:
                os.unlink(lock_name(key), dir_fd=store.locks)
            except FileNotFoundError:
                pass
        else:
            if found is not None:
                found.lease.release()
            return True
    if moved is not None:
        delete_trash(store, moved)
    return True


def _check_keys(request: OpenRequest, manifest: Manifest) -> None:
    arrays = list(dict.fromkeys(array.ragged or array.name for array in manifest.arrays))
    tables = {table.part_of or table.name: list(table.columns) for table in manifest.tables}
    answering = [name for table, columns in tables.items() for name in column_names(table, columns)]
    every = [column for columns in tables.values() for column in columns]
    parts = [array.name for array in manifest.arrays]  # of ragged data, offsets and values
    Selection(request.keys).check([*arrays, *parts, *answering], [*arrays, *every], request.paths[0])


def in_first_store(
    stores: Sequence[Store], build: Callable[[Store], T], what: str, more: Callable[[], Sequence[str]] = tuple
) -> T:
    """Build in the first of these stores that has room. Raises NoRoom with the reasons of all, and ``more`` fixes."""
    refused: list[NoRoom] = []
    for store in stores:
        try:
            return build(store)
        except NoRoom as problem:
            # Memory may also fill up during the load. The traceback would keep the data read so far alive.
            refused.append(problem.with_traceback(None))
            problem.__context__ = problem.__cause__ = None
            release_freed_memory()
            log.info("%s", problem)
    raise _no_room_anywhere(what, refused, *more())


def stores_wanted(request: OpenRequest, stores: Stores) -> list[Store]:
    """The stores that the request may be built in, best first."""
    chosen = [store for store in stores.found if request.wants(store)]
    if not chosen:
        raise NoStore(
            say("there is no {backing} store", backing=request.backing),
            why=joined(finding.why for finding in stores.findings) or say("no candidate directory is usable"),
            fix=(*(("backing='auto'",) if stores.found else ()), "LEGROOM_DIR=/some/local/directory"),
        )
    return chosen


def _no_room_anywhere(what: str, refused: Sequence[NoRoom], *more: str) -> NoRoom:
    if len(refused) == 1:
        (only,) = refused
        return NoRoom(only.what, why=only.why, fix=(*more, *only.fix)) if more else only
    return NoRoom(
        say("no store has enough free space for {path}", path=what),
        why=joined(say("{name}: {why}", name=problem.what, why=problem.why) for problem in refused),
        fix=tuple(dict.fromkeys((*more, *(line for problem in refused for line in problem.fix)))),
    )
