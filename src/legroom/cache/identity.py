"""Which data a path stands for: stamps (stat results) of its files, and the digest of their bytes.

One file's digest is what ``md5sum`` prints. Several files, a directory, or a file whose data are partly in other
files have the digest of their sorted (name, digest) list. A referenced file is named by the reference to it, not by
its path: two such files that are swapped are different data.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from legroom.cache.checksummed_io import read_at, write_back
from legroom.errors import MissingPackage, SourceChanged, SourceError, UnreadableSource, UsageError
from legroom.formats.protocol import Description, Lookup, Reader
from legroom.formats.source_file import require_regular, unreadable
from legroom.system.imports import import_lock
from legroom.words import say

HashName = Literal["md5", "blake3", "xxh3"]
HASHES = ("md5", "blake3", "xxh3")
DIGITS = {"md5": 32, "blake3": 64, "xxh3": 32}
# Small enough to stay in a core's cache between the read and the hash; blake3 spreads a chunk over threads.
_CHUNKS = {"md5": 256 << 10, "xxh3": 256 << 10, "blake3": 8 << 20}

_SAMPLES = 16
_TICK_NS = 20_000_000  # the coarsest file system clock: 10 ms at 100 Hz, with a margin
_MOST_LINKS = 40  # the kernel's own limit
_MOST_AGAIN = 10_000  # n directories with two links each to the next have 2^n names


class Hasher(Protocol):
    def update(self, data: Any, /) -> Any: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Stamp:
    """The stat fields that identify a file's content: two equal stamps are taken for the same bytes."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stats: os.stat_result) -> Stamp:
        return cls(stats.st_dev, stats.st_ino, stats.st_size, stats.st_mtime_ns, stats.st_ctime_ns)

    def __str__(self) -> str:
        return f"{self.dev}-{self.ino}-{self.size}-{self.mtime_ns}-{self.ctime_ns}"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source: its name in the digest, and its stamp."""

    name: str
    path: Path
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Source:
    """The paths to open, in the order of their rows, and every file that holds their data."""

    paths: tuple[Path, ...]
    files: tuple[SourceFile, ...]
    name: str  # names its record and its election lock
    referenced: tuple[SourceFile, ...] = ()  # files that hold some of the data, found by reference
    lookups: tuple[Lookup, ...] = ()  # how the referenced files were found
    folders: tuple[SourceFile, ...] = ()  # directories: adding or removing a file changes their stamps
    links: tuple[SourceFile, ...] = ()  # symbolic links on the paths of ``referenced``

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        return self.files + self.referenced

    @property
    def size(self) -> int:
        return sum(stamp.size for stamp in {file.stamp for file in self.all_files})

    @property
    def changed_ns(self) -> int:
        """When the last of the files changed."""
        files = (*self.all_files, *self.folders)
        return max((max(file.stamp.ctime_ns, file.stamp.mtime_ns) for file in files), default=0)


def stamp_source(paths: Sequence[Path]) -> Source:
    """Stamp all files of these paths."""
    files: list[SourceFile] = []
    folders: list[SourceFile] = []
    for path, name in zip(paths, shard_names(paths), strict=True):
        if _is_folder(path):
            _walk(path, name, files, folders)
        else:
            files.append(stamp_file(path, name or path.name))
    if len(paths) == 1 and len(files) == 1 and not folders:
        return Source(tuple(paths), tuple(files), str(files[0].stamp))
    listed = "\n".join(sorted(f"{file.name}\0{file.stamp}" for file in (*files, *folders)))
    name = "set-" + hashlib.blake2b(os.fsencode(listed), digest_size=16).hexdigest()
    return Source(tuple(paths), tuple(files), name, folders=tuple(folders))


def with_referenced(source: Source, lookups: Iterable[Lookup]) -> Source:
    """Add the other files that hold its data, each named by the reference to it."""
    searches = tuple(lookups)
    if not searches:
        return source
    named = {file.path: file.name if len(source.files) > 1 else "" for file in source.files}
    names = {file.stamp: [named[file.path]] for file in source.files}
    called = dict(named)  # by path, the name of each file that refers to others
    given = {file.stamp for file in source.files}
    founds = {one.found: stamp_file(one.found) for one in searches if one.found is not None}
    behind: dict[Stamp, SourceFile] = {}
    for lookup in searches:
        if lookup.found is None:
            continue
        file = founds[lookup.found]
        name = f"{lookup.kind} {lookup.name} of {called.get(lookup.holder, lookup.holder.name)}"
        called.setdefault(lookup.found, name)
        names.setdefault(file.stamp, []).append(name)
        if file.path not in named and file.stamp not in given:
            behind.setdefault(file.stamp, file)
    links = {link.path: link for file in behind.values() for link in _links_to(file.path)}

    def renamed(file: SourceFile) -> SourceFile:
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


def require_stamped(source: Source, readers: Iterable[Reader]) -> None:
    """Raise SourceChanged if a reader has opened another file than was stamped: a link was switched."""
    stamps = {file.stamp for file in (*source.all_files, *source.folders)}
    for reader in readers:
        for fd in reader.descriptors():
            if Stamp.of(os.fstat(fd)) not in stamps:
                raise source_changed_error(source.paths[0])


def stamp_file(path: Path, name: str | None = None) -> SourceFile:
    """Stamp one regular file, from its descriptor."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        try:
            stats = os.fstat(fd)
        finally:
            os.close(fd)
    except OSError as problem:
        raise unreadable(path, problem) from problem
    if not stat.S_ISREG(stats.st_mode):
        require_regular(path)  # raises with the kind of file
    return SourceFile(name or path.name, path, Stamp.of(stats))


def shard_names(paths: Sequence[Path]) -> list[str]:
    """The name of each path in the digest, relative to their common parent: a moved folder is the same data."""
    if len(paths) == 1:
        return [""]
    base = os.path.commonpath([path.parent for path in paths])
    return [Path(os.path.relpath(path, base)).as_posix() for path in paths]


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as problem:
        raise unreadable(path, problem) from problem


def _walk(path: Path, name: str, files: list[SourceFile], folders: list[SourceFile]) -> None:
    """Stamp everything below a directory, following symbolic links as its reader does."""
    with import_lock:  # imported here: it imports the readers' base class, which attaching does not need
        from legroom.formats.detect import require_zarr_store

    require_zarr_store(path)
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(path, frozenset())]
    reached: set[tuple[int, int]] = set()
    again = 0
    while waiting:
        folder, above = waiting.pop()
        # Names relative to the folder: a renamed or copied folder is the same data.
        here = (Path(name) / folder.relative_to(path)).as_posix()
        try:
            stats = os.stat(folder)
            folders.append(SourceFile(here + "/", folder, Stamp.of(stats)))
            with os.scandir(folder) as found:
                children = sorted((one.name, one.is_dir()) for one in found)
        except OSError as problem:
            raise unreadable(folder, problem) from problem
        this = stats.st_dev, stats.st_ino
        again += this in reached
        reached.add(this)
        if this in above or again > _MOST_AGAIN:
            raise UnreadableSource(
                say("cannot read {path}", path=path),
                why=say("{folder} is a link to one of its own parent directories", folder=folder)
                if this in above
                else say(
                    "symbolic links lead to the same directories more than {most} times", most=_MOST_AGAIN
                ),
                fix=(say("remove the symbolic links"),),
            )
        inside = above | {this}
        for child, is_folder in children:
            if not is_folder:
                files.append(stamp_file(folder / child, f"{here}/{child}".removeprefix("./")))
        waiting += [(folder / child, inside) for child, is_folder in reversed(children) if is_folder]


def _links_to(path: Path) -> Iterator[SourceFile]:
    """The symbolic links on the path to a file, each with its own stamp."""
    for _ in range(_MOST_LINKS):
        for step in (*reversed(path.parents), path):
            try:
                stats = os.lstat(step)
                target = os.readlink(step) if stat.S_ISLNK(stats.st_mode) else None
            except OSError as problem:
                raise source_gone_error(path, problem) from problem
            if target is not None:
                yield SourceFile(step.name, step, Stamp.of(stats))
                target = os.path.join(step.parent, target)
                path = Path(target, path.relative_to(step))
                break
        else:
            return


def is_unchanged(source: Source) -> bool:
    """Whether all stamps, directory listings and lookups are still the same."""
    try:
        now = stamp_source(source.paths)
        links = all(Stamp.of(os.lstat(link.path)) == link.stamp for link in source.links)
        behind = all(Stamp.of(os.stat(file.path)) == file.stamp for file in source.referenced)
    except OSError as problem:
        cause = problem.__cause__ if isinstance(problem, UnreadableSource) else problem
        if isinstance(cause, (FileNotFoundError, NotADirectoryError)):
            return False
        if isinstance(problem, UnreadableSource):
            raise  # unknown: it may be unchanged
        raise unreadable(source.paths[0], problem) from problem
    return now.name == source.name and links and behind and all(map(same_lookup, source.lookups))


def same_lookup(lookup: Lookup) -> bool:
    """Whether a lookup still finds the same file."""
    with import_lock:
        from legroom.formats.hdf5_external import look_up

    return look_up(lookup.kind, lookup.name, lookup.holder).found == lookup.found


def flush_source(source: Source) -> None:
    """Flush changes that other processes made through mappings, and wait for the clock tick to pass.

    A dirty page can be changed again without a trace: the file's times change only when a clean page becomes dirty.
    Flushed pages are clean. File systems in memory flush nothing, so it does not help there.

    File system clocks are coarse: a file written a moment ago could be written again and keep its times.
    """
    changed_ns = max((file.stamp.ctime_ns for file in (*source.all_files, *source.folders)), default=0)
    wait_ns = changed_ns + _TICK_NS - time.time_ns()
    if 0 < wait_ns <= _TICK_NS:
        time.sleep(wait_ns / 1e9)
    for file in source.all_files:
        try:
            fd = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                write_back(fd)
            finally:
                os.close(fd)
        except OSError as problem:
            raise source_gone_error(file.path, problem) from problem


def digest_source(source: Source, algorithm: str, progress: Callable[[int], None] | None = None) -> str:
    """The digest of all the source's bytes. Raises SourceChanged if a file no longer has its stamp."""
    files = source.all_files
    if len(files) == 1 and not source.folders:
        return hash_file(files[0], algorithm, progress)
    workers = min(len(files), os.cpu_count() or 1) or 1
    with ThreadPoolExecutor(workers, thread_name_prefix="legroom-hash") as pool:
        digests = list(pool.map(lambda file: hash_file(file, algorithm, progress), files))
    total = new_hasher(algorithm)
    for name, value in sorted(zip((file.name for file in files), digests, strict=True)):
        total.update(os.fsencode(f"{name}\0{value}\n"))
    return total.hexdigest()


def hash_file(file: SourceFile, algorithm: str, progress: Callable[[int], None] | None = None) -> str:
    """The digest of one file's bytes. Its stamp is compared before and after, on the descriptor."""
    hasher = new_hasher(algorithm)
    try:
        fd = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            _same(fd, file)
            buffer = memoryview(bytearray(min(_CHUNKS[algorithm], max(1, file.stamp.size))))
            offset = 0
            while got := read_at(fd, buffer, offset):
                hasher.update(buffer[:got])
                offset += got
                if progress is not None:
                    progress(got)
            _same(fd, file)
        finally:
            os.close(fd)
    except OSError as problem:
        raise source_gone_error(file.path, problem) from problem
    return hasher.hexdigest()


def _same(fd: int, file: SourceFile) -> None:
    if Stamp.of(os.fstat(fd)) != file.stamp:
        raise source_changed_error(file.path)


def source_gone_error(path: Path, problem: OSError) -> SourceError:
    """The error for a stamped file that can no longer be opened or read."""
    return source_changed_error(path) if isinstance(problem, FileNotFoundError) else unreadable(path, problem)


def source_changed_error(path: Path) -> SourceChanged:
    """The error for a file that changes while it is read."""
    return SourceChanged(
        say("{path} changed while it was being read", path=path),
        why=say("its size or timestamps changed after the load began"),
        fix=(say("wait until the file is fully written, then open it again"),),
    )


def sample_source(source: Source) -> str:
    """A hash of a few pages of the files. Sources with different samples differ; equal samples prove nothing."""
    hasher = hashlib.blake2b(digest_size=8)
    for file in source.all_files[:_SAMPLES]:
        try:
            fd = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                for number in range(_SAMPLES):
                    hasher.update(
                        os.pread(fd, 4096, max(0, file.stamp.size - 4096) * number // (_SAMPLES - 1))
                    )
            finally:
                os.close(fd)
        except OSError as problem:
            raise source_gone_error(file.path, problem) from problem
    return hasher.hexdigest()


def new_hasher(algorithm: str) -> Hasher:
    """A hash object of that name."""
    if algorithm == "md5":
        return hashlib.md5(usedforsecurity=False)
    try:
        if algorithm == "blake3":
            from blake3 import blake3

            return cast(Hasher, blake3(max_threads=blake3.AUTO))
        if algorithm == "xxh3":
            from xxhash import xxh3_128

            return cast(Hasher, xxh3_128())
    except ImportError as problem:
        raise MissingPackage(
            say("hash={name!r} needs a package that is not installed", name=algorithm),
            why=str(problem),
            fix=("pip install 'legroom[hash]'", say("use hash='md5', which needs no package")),
        ) from problem
    raise UsageError(
        say("unknown hash {name!r}", name=algorithm),
        why=say("valid values: md5, blake3, xxh3"),
        fix=("hash='md5'",),
    )
