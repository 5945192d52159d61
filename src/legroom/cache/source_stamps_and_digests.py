"""Which data a path stands for: stamps (stat results) of its files, and the digest of their bytes.

One file's digest is what ``md5sum`` prints. If the file ends with 1 GiB or more of zeros, these are counted instead of
hashed: see docs/decisions/0014-one-rule-for-source-files.md. Several files, a directory, or a file whose data are
partly in other files have the digest of their sorted (name, digest) list. A referenced file is named by the reference
to it, not by its path: two such files that are swapped are different data.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from legroom.cache.file_stamps import Stamp, StampedFile, StampedFolder, is_folder, packed, stamp_file, stamp_folder
from legroom.cache.mapped_files_and_checksums import opened, read_at
from legroom.errors import (
    LegroomError,
    NoSuchObject,
    SourceChanged,
    SourceError,
    TransferDamaged,
    UnreadableSource,
    UnsupportedData,
)
from legroom.formats.base_reader import BaseReader, Description, Lookup
from legroom.formats.file_reads_and_errors import arriving_bytes, changed_while_read, unreadable, wait_for_some
from legroom.messages import phrase, say
from legroom.remote.remote_object import BOUND, ObjectStamp, ObjectUrl, SourcePath
from legroom.system.file_writes import write_back
from legroom.system.lazy_and_optional_imports import import_lock, lazy_import, require
from legroom.system.processes_and_threads import room_for_threads, usable_cpus

# "version" is the hash of a remote object's URL and version: of data that was read in part and not hashed.
DIGITS = {"md5": 32, "blake3": 64, "xxh3": 32, "version": 32}
# Small enough to stay in a core's cache between the read and the hash; blake3 spreads a chunk over threads.
_CHUNKS = {"md5": 256 << 10, "xxh3": 256 << 10, "blake3": 8 << 20}

# Threads that receive take turns with the hash: each turn waits for the interpreter's lock.
_ARRIVING = 2 << 20
_MAPPED = 8 << 20  # of an arriving file that needs no copy
_ZEROS = 1 << 30  # bytes of zeros at the end of a file that are counted: MD5 takes 1 to 3 s for them
_ZERO_BLOCK = 1 << 20  # the zeros are counted from a multiple of this on
_SAMPLES = 16
_HASHED_AT_ONCE = 1024  # files of a directory
_TICK_NS = 20_000_000  # the coarsest file system clock: 10 ms at 100 Hz, with a margin
_MOST_LINKS = 40  # the kernel's own limit


class Hasher(Protocol):
    def update(self, data: Any, /) -> Any: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Source:
    """The paths to open, in the order of their rows, and every file that holds their data."""

    paths: tuple[SourcePath, ...]
    files: Sequence[StampedFile]
    name: str  # names its record and its election lock
    referenced: tuple[StampedFile, ...] = ()  # files that hold some of the data, found by reference
    lookups: tuple[Lookup, ...] = ()  # how the referenced files were found
    folders: tuple[StampedFile, ...] = ()  # directories: adding or removing a file changes their stamps
    links: tuple[StampedFile, ...] = ()  # symbolic links on the paths of ``referenced``

    @property
    def all_files(self) -> Sequence[StampedFile]:
        return (*self.files, *self.referenced) if self.referenced else self.files

    @property
    def size(self) -> int:
        if isinstance(self.files, StampedFolder):
            return self.files.size
        return sum(size or 0 for size in {file.stamp: file.stamp.size for file in self.all_files}.values())

    @property
    def is_remote(self) -> bool:
        """Whether some of it is in remote storage."""
        return any(isinstance(path, ObjectUrl) for path in self.paths)

    @property
    def has_versions(self) -> bool:
        """Whether all of it is in remote storage, and each object's version is vouched for."""
        stamps = (file.stamp for file in self.files)
        return all(isinstance(stamp, ObjectStamp) and stamp.by_ranges for stamp in stamps)

    @property
    def is_bound(self) -> bool:
        """Whether every read was bound to the stamped version by its server, so that what was read is that version."""
        return self.has_versions and all(
            isinstance(file.path, ObjectUrl) and file.path.protocol in BOUND for file in self.files
        )

    @property
    def changed_ns(self) -> int:
        """When the last of the files changed."""
        latest = max((file.changed_ns for file in self.folders), default=0)
        if isinstance(self.files, StampedFolder):
            return max(latest, self.files.changed_ns)
        return max((file.changed_ns for file in self.all_files), default=latest)


def stamp_source(paths: Sequence[SourcePath], *, ask: bool = False) -> Source:
    """Stamp all files of these paths. With ``ask``, ask the servers of remote objects even if that was just done."""
    files: list[StampedFile] = []
    folders: list[StampedFile] = []
    for path, name in zip(paths, shard_names(paths), strict=True):
        if isinstance(path, ObjectUrl):
            stamp = lazy_import("legroom.cache.source_digest_records").version_of(path, ask=ask)
            files.append(StampedFile(name or path.name, path, stamp))
        elif is_folder(path):
            below = stamp_folder(path, name, folders)
            if len(paths) == 1 and folders:  # everything below it
                stamps = "\n".join(f"{folder.name}\0{folder.stamp}" for folder in folders) + "\n" + below.digest
                return Source(tuple(paths), below, _set_name(stamps), folders=tuple(folders))
            files.extend(below)
        else:
            files.append(stamp_file(path, name or path.name))
    if len(paths) == 1 and len(files) == 1 and not folders and isinstance(files[0].stamp, Stamp):
        return Source(tuple(paths), tuple(files), str(files[0].stamp))
    listed = "\n".join(sorted(f"{file.name}\0{_which(file)}{file.stamp}" for file in (*files, *folders)))
    return Source(tuple(paths), tuple(files), _set_name(listed), folders=tuple(folders))


def _set_name(listed: str) -> str:
    return "set-" + hashlib.blake2b(os.fsencode(listed), digest_size=16).hexdigest()


def _which(file: StampedFile) -> str:
    """The object of a remote file: its stamp alone does not identify it, as a file's does."""
    return f"{file.path.identity}\0" if isinstance(file.path, ObjectUrl) else ""


def version_digest(source: Source) -> str:
    """The digest of objects that are not read in whole: of their URLs and versions."""
    listed = "\n".join(sorted(f"{file.name}\0{_which(file)}{file.stamp}" for file in source.files))
    return hashlib.blake2b(os.fsencode(listed), digest_size=16).hexdigest()


def with_doubts(source: Source, digests: Mapping[str, str]) -> Source:
    """The source with, by path, what an earlier download of it had as its digest."""
    if not digests:
        return source
    return replace(source, files=tuple(replace(file, doubted=digests.get(str(file.path))) for file in source.files))


def with_referenced(source: Source, lookups: Iterable[Lookup]) -> Source:
    """Add the other files that hold its data, each named by the reference to it."""
    searches = tuple(lookups)
    if not searches:
        return source
    if source.is_remote:
        raise UnsupportedData(
            say("{path} refers to other files", path=source.paths[0]),
            why=say("some of its data are in {name}", name=repr(searches[0].name)),
            fix=(say("copy the file and those it refers to onto this machine"), say("select other data: keys=[…]")),
        )
    named: dict[SourcePath, str] = {file.path: file.name if len(source.files) > 1 else "" for file in source.files}
    names = {file.stamp: [named[file.path]] for file in source.files}
    called = dict(named)  # by path, the name of each file that refers to others
    given = {file.stamp for file in source.files}
    founds = {one.found: stamp_file(one.found) for one in searches if one.found is not None}
    behind: dict[Stamp | ObjectStamp, StampedFile] = {}
    for lookup in searches:
        if lookup.found is None:
            continue
        file = founds[lookup.found]
        name = f"{lookup.kind} {lookup.name} of {called.get(lookup.holder, lookup.holder.name)}"
        called.setdefault(lookup.found, name)
        names.setdefault(file.stamp, []).append(name)
        if file.path not in named and file.stamp not in given:
            behind.setdefault(file.stamp, file)
    links = {link.path: link for file in behind.values() for link in _links_to(Path(file.path))}

    def renamed(file: StampedFile) -> StampedFile:
        return replace(file, name="\1".join(sorted(set(names[file.stamp]))))

    return replace(
        source,
        files=tuple(map(renamed, source.files)) if behind else source.files,
        referenced=tuple(map(renamed, behind.values())),
        lookups=searches,
        links=tuple(links.values()),
    )


def with_referenced_files(source: Source, descriptions: Iterable[Description]) -> Source:
    """Add every file that the descriptions refer to."""
    return with_referenced(source, dict.fromkeys(lookup for one in descriptions for lookup in one.lookups))


def require_stamped(source: Source, readers: Iterable[BaseReader]) -> None:
    """Raise SourceChanged if a reader has opened another file than was stamped: a link was switched."""
    in_folder = isinstance(source.files, StampedFolder)  # only the directory itself is kept open
    stamps = {file.stamp for file in (*(() if in_folder else source.all_files), *source.folders)}
    downloads = [os.stat(file.local) for file in source.files if source.is_remote and file.local is not None]
    stamped = b"" if source.is_remote else _packed_stamps(source)
    for reader in readers:
        if not source.is_remote and not reader.is_listed_among(stamped):
            raise source_changed_error(source.paths[0])
        for fd in reader.descriptors():
            stats = os.fstat(fd)
            if Stamp.of(stats) not in stamps and not any(os.path.samestat(stats, one) for one in downloads):
                raise source_changed_error(source.paths[0])


def _packed_stamps(source: Source) -> bytes:
    """The stamps of all files and directories, as a reader compares them with those it has listed."""
    files = source.files
    inside = files.packed_stamps if isinstance(files, StampedFolder) else b"".join(map(packed, files))
    return b"".join([inside, *map(packed, source.folders)])


def shard_names(paths: Sequence[SourcePath]) -> list[str]:
    """The name of each path in the digest, relative to their common parent: a moved folder is the same data."""
    if len(paths) == 1:
        return [""]
    texts = [os.fspath(path) for path in paths]
    if any(isinstance(path, ObjectUrl) for path in paths):
        parts = [text.split("/") for text in texts]
        common = next(
            (n for n, same in enumerate(zip(*(part[:-1] for part in parts), strict=False)) if len(set(same)) > 1),
            min(len(part) - 1 for part in parts),
        )
        return ["/".join(part[common:]) for part in parts]
    base = os.path.commonpath([os.path.dirname(text) for text in texts])
    return [Path(os.path.relpath(text, base)).as_posix() for text in texts]


def _links_to(path: Path) -> Iterator[StampedFile]:
    """The symbolic links on the path to a file, each with its own stamp."""
    for _ in range(_MOST_LINKS):
        for step in (*reversed(path.parents), path):
            try:
                stats = os.lstat(step)
                target = os.readlink(step) if stat.S_ISLNK(stats.st_mode) else None
            except OSError as problem:
                raise source_gone_error(path, problem) from problem
            if target is not None:
                yield StampedFile(step.name, step, Stamp.of(stats))
                target = os.path.join(step.parent, target)
                path = Path(target, path.relative_to(step))
                break
        else:
            return


def is_unchanged(source: Source) -> bool:
    """Whether all stamps, directory listings and lookups are still the same."""
    try:
        now = stamp_source(source.paths, ask=True)
        links = all(Stamp.of(os.lstat(link.path)) == link.stamp for link in source.links)
        behind = all(Stamp.of(os.stat(file.path)) == file.stamp for file in source.referenced)
    except OSError as problem:
        cause = problem.__cause__ if isinstance(problem, UnreadableSource) else problem
        if isinstance(cause, (FileNotFoundError, NotADirectoryError)):
            return False
        if isinstance(problem, NoSuchObject):
            return False
        if isinstance(problem, UnreadableSource):
            raise  # unknown: it may be unchanged
        raise unreadable(Path(source.paths[0]), problem) from problem
    return now.name == source.name and links and behind and all(map(same_lookup, source.lookups))


def same_lookup(lookup: Lookup) -> bool:
    """Whether a lookup still finds the same file."""
    if lookup.kind == "beside":
        megatron = lazy_import("legroom.formats.megatron_reader")
        return bool(megatron.look_beside(lookup.holder).found == lookup.found)
    with import_lock:
        from legroom.formats.hdf5_find_datasets import look_up

    return look_up(lookup.kind, lookup.name, lookup.holder).found == lookup.found


def flush_source(source: Source) -> None:
    """Flush changes that other processes made through mappings, and wait for the clock tick to pass.

    A dirty page can be changed again without a trace: the file's times change only when a clean page becomes dirty.
    Flushed pages are clean. File systems in memory flush nothing, so it does not help there.

    File system clocks are coarse: a file written a moment ago could be written again and keep its times.
    """
    below = source.files if isinstance(source.files, StampedFolder) else None
    stamped = (*source.folders, *(() if below is not None else source.all_files))
    times = [file.stamp.ctime_ns for file in stamped if isinstance(file.stamp, Stamp)]
    changed_ns = max([*times, below.ctime_ns if below is not None else 0])
    wait_ns = changed_ns + _TICK_NS - time.time_ns()
    if 0 < wait_ns <= _TICK_NS:
        time.sleep(wait_ns / 1e9)
    for file in source.all_files:
        if isinstance(file.path, ObjectUrl):
            continue
        with opened_source(file.path) as fd:
            write_back(fd)


def digest_source(source: Source, algorithm: str, progress: Callable[[int], None] | None = None) -> str:
    """The digest of all the source's bytes. Raises SourceChanged if a file no longer has its stamp."""
    files = source.all_files
    if len(files) == 1 and not source.folders:
        return hash_file(files[0], algorithm, progress)
    total, threads = new_hasher(algorithm), min(len(files), usable_cpus())
    hashed = partial(hash_file, algorithm=algorithm, progress=progress)
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="legroom-hash")
        if threads > 1 and room_for_threads(threads)
        else nullcontext() as pool
    ):
        if isinstance(files, StampedFolder):  # sorted by name already, and maybe millions of them
            for start in range(0, len(files), _HASHED_AT_ONCE):
                some = files[start : start + _HASHED_AT_ONCE]
                for file, value in zip(some, (pool.map if pool else map)(hashed, some), strict=True):
                    total.update(os.fsencode(f"{file.name}\0{value}\n"))
            return total.hexdigest()
        digests = list((pool.map if pool else map)(hashed, files))
    for name, value in sorted(zip((file.name for file in files), digests, strict=True)):
        total.update(os.fsencode(f"{name}\0{value}\n"))
    return total.hexdigest()


def hash_file(file: StampedFile, algorithm: str, progress: Callable[[int], None] | None = None) -> str:
    """The digest of one file's bytes. Its stamp is compared before and after, on the descriptor."""
    hashers = {name: new_hasher(name) for name in dict.fromkeys((algorithm, *_expected(file)))}
    with opened_source(file.path, file.readable) as fd:
        _same(fd, file)
        end = _end_of_data(fd, file)
        for block in _blocks(fd, file, _CHUNKS[algorithm], end):
            for hasher in hashers.values():
                hasher.update(block)
            if progress is not None:
                progress(len(block))
        if progress is not None and end < file.size:
            progress(file.size - end)
        _same(fd, file)
    digests = {name: hasher.hexdigest() for name, hasher in hashers.items()}
    _require_expected(file, digests)
    if end == file.size:
        return digests[algorithm]
    counted = new_hasher(algorithm)
    counted.update(f"{digests[algorithm]} and {file.size - end} zeros\n".encode())
    return counted.hexdigest()


def _end_of_data(fd: int, file: StampedFile) -> int:
    """Where many zeros at the end begin, else the size. It depends on the bytes alone, not on which are allocated.

    A database or array may be a file of the largest size that it can get, with data at its start.
    """
    size = file.size
    if size < _ZEROS or file.local is not None or os.pread(fd, 4096, size - 4096).strip(b"\0"):
        return size
    end, zeros = _end_of_extents(fd, size), bytes(_ZERO_BLOCK)
    while end > 0:
        start = (end - 1) // _ZERO_BLOCK * _ZERO_BLOCK
        if os.pread(fd, end - start, start) != zeros[: end - start]:
            break
        end = start
    return end if size - end >= _ZEROS else size


def _end_of_extents(fd: int, size: int) -> int:
    """A multiple of the block from which on the file system has stored nothing, at most a block too far."""
    stored, empty = 0, -(-size // _ZERO_BLOCK)  # in blocks: there is data at or after the first, none after the second
    while stored < empty:
        middle = (stored + empty) // 2
        try:
            os.lseek(fd, middle * _ZERO_BLOCK, os.SEEK_DATA)
            stored = middle + 1
        except OSError as problem:
            if problem.errno != errno.ENXIO:  # a file system without holes
                return size
            empty = middle
    return min(size, empty * _ZERO_BLOCK)


def _blocks(fd: int, file: StampedFile, chunk: int, end: int) -> Iterator[memoryview]:
    """The file's bytes in order, up to ``end``.

    Those of a remote object as they arrive, in place if they arrive in memory.
    """
    path, offset = file.readable, 0
    if (mapped := arriving_bytes(path)) is not None:
        while offset < file.size:
            there = wait_for_some(path, offset, min(_MAPPED, file.size - offset))
            yield mapped[offset : offset + there]
            offset += there
        return
    chunk = chunk if file.local is None else max(chunk, _ARRIVING)
    buffer = memoryview(bytearray(min(chunk, max(1, file.size))))
    while offset < end or not file.size:
        there = wait_for_some(path, offset, min(len(buffer), end - offset))
        got = read_at(fd, buffer[:there], offset)
        if got == 0:
            return
        yield buffer[:got]
        offset += got


def _expected(file: StampedFile) -> Mapping[str, str]:
    """By algorithm, the digest that a remote object's store states."""
    return file.stamp.expected if isinstance(file.stamp, ObjectStamp) else {}


def _require_expected(file: StampedFile, digests: Mapping[str, str]) -> None:
    """Raise TransferDamaged if what arrived is not what the store states.

    An ETag that looks like an MD5 may be something else. If two downloads have the same digest, they are right.
    """
    for algorithm, digest in _expected(file).items():
        sure = isinstance(file.stamp, ObjectStamp) and file.stamp.is_sure(algorithm)
        if digests[algorithm] == digest or (not sure and file.doubted == digests[algorithm]):
            continue
        raise TransferDamaged(
            say("{path} arrived damaged", path=file.path),
            why=say(
                "the {algorithm} of what arrived is {has}, the storage service states {needed}",
                algorithm=algorithm, has=digests[algorithm], needed=digest,
            ),
            fix=(say("try again; if it happens again, check the network and the proxies between"),),
            path=str(file.path),
            digest=digests[algorithm],
        )  # fmt: skip


def _same(fd: int, file: StampedFile) -> None:
    if isinstance(file.stamp, Stamp) and Stamp.of(os.fstat(fd)) != file.stamp:
        raise source_changed_error(file.path)


def source_gone_error(path: SourcePath, problem: OSError) -> SourceError:
    """The error for a stamped file that can no longer be opened or read."""
    return source_changed_error(path) if isinstance(problem, FileNotFoundError) else unreadable(Path(path), problem)


@contextmanager
def opened_source(path: SourcePath, local: Path | None = None) -> Iterator[int]:
    """A descriptor of a stamped file, or of where it is on this machine. Failed calls are errors of the source."""
    try:
        with opened(local or path) as fd:
            yield fd
    except OSError as problem:
        if isinstance(problem, LegroomError):
            raise
        raise source_gone_error(path, problem) from problem


def source_changed_error(path: SourcePath) -> SourceChanged:
    """The error for a file that changes while it is read."""
    return changed_while_read(path)


def sample_source(source: Source) -> str:
    """A hash of a few pages of the files. Sources with different samples differ; equal samples prove nothing."""
    hasher = hashlib.blake2b(digest_size=8)
    for file in source.all_files[:_SAMPLES]:
        with opened_source(file.path, file.readable) as fd:
            for number in range(_SAMPLES):
                hasher.update(os.pread(fd, 4096, max(0, file.size - 4096) * number // (_SAMPLES - 1)))
    return hasher.hexdigest()


def new_hasher(algorithm: str) -> Hasher:
    """A hash object of that name."""
    if algorithm in ("md5", "sha256"):
        return hashlib.new(algorithm, usedforsecurity=False)
    what, instead = f"hash={algorithm!r}", (phrase("use hash='md5', which needs no package"),)
    if algorithm == "blake3":
        blake3 = require("blake3", "hash", what, instead=instead).blake3
        return cast(Hasher, blake3(max_threads=blake3.AUTO))
    if algorithm == "xxh3":
        return cast(Hasher, require("xxhash", "hash", what, instead=instead).xxh3_128())
    raise ValueError(algorithm)
