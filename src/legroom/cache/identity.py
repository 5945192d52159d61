"""Which data a path stands for: stat records of its files, and the digest of their bytes.

Covers: files, several files, directories; md5, blake3, xxh3. Does not cover: where a digest is remembered
(records.py) or what is inside a file (formats).

One file's digest is what ``md5sum`` prints. Several files, a directory, or a file whose data lie partly in
other files have the digest of their sorted (name, digest) list.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from legroom.cache.fileio import read_at
from legroom.errors import MissingPackage, SourceChanged, UsageError
from legroom.formats.folder import require_store
from legroom.formats.source import require_regular, unreadable
from legroom.words import say

HashName = Literal["md5", "blake3", "xxh3"]
HASHES = ("md5", "blake3", "xxh3")
DIGITS = {"md5": 32, "blake3": 64, "xxh3": 32}
# Small enough to stay in a core's cache between the read and the hash; blake3 spreads a chunk over threads.
_CHUNKS = {"md5": 256 << 10, "xxh3": 256 << 10, "blake3": 8 << 20}

_SAMPLES = 16


class Hasher(Protocol):
    def update(self, data: Any, /) -> Any: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the file system says about one file; two equal stamps are taken for the same bytes."""

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
class File:
    """One file of a source: the name it has in the digest, and its stamp."""

    name: str
    path: Path
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Source:
    """What was named, in the order of its rows, and every file behind it."""

    paths: tuple[Path, ...]
    files: tuple[File, ...]
    name: str  # of its record and its election lock
    behind: tuple[File, ...] = ()  # files that hold some of the data and were not named

    @property
    def every(self) -> tuple[File, ...]:
        return self.files + self.behind

    @property
    def size(self) -> int:
        return sum(file.stamp.size for file in self.every)

    @property
    def changed_ns(self) -> int:
        """When the last of the files changed."""
        return max((max(file.stamp.ctime_ns, file.stamp.mtime_ns) for file in self.every), default=0)


def look(paths: Sequence[Path]) -> Source:
    """Stamp everything that was named."""
    files: list[File] = []
    for path, name in zip(paths, shard_names(paths), strict=True):
        files.extend(_files(path, name))
    if len(paths) == 1 and len(files) == 1 and files[0].path == paths[0]:
        return Source(tuple(paths), tuple(files), str(files[0].stamp))
    listed = "\n".join(sorted(f"{file.name}\0{file.stamp}" for file in files))
    name = "set-" + hashlib.blake2b(os.fsencode(listed), digest_size=16).hexdigest()
    return Source(tuple(paths), tuple(files), name)


def with_behind(source: Source, paths: Iterable[Path]) -> Source:
    """The source with the other files its data come from."""
    known = {file.stamp for file in source.files}
    behind = [stamp_file(path) for path in paths if not path.is_dir()]
    others = {file.stamp: file for file in behind if file.stamp not in known}
    return Source(source.paths, source.files, source.name, tuple(others.values()))


def stamp_file(path: Path, name: str | None = None) -> File:
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
        require_regular(path)  # says what it is
    return File(name or path.name, path, Stamp.of(stats))


def shard_names(paths: Sequence[Path]) -> list[str]:
    """The name of each path in the digest: below what all have in common, so that a moved folder is the same."""
    if len(paths) == 1:
        return [""]
    base = os.path.commonpath([path.parent for path in paths])
    return [Path(os.path.relpath(path, base)).as_posix() for path in paths]


def _files(path: Path, name: str) -> list[File]:
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as problem:
        raise unreadable(path, problem) from problem
    if not is_folder:
        return [stamp_file(path, name or path.name)]
    require_store(path)
    found = []
    for folder, folders, names in os.walk(path, onerror=_raise):
        folders.sort()
        for child in sorted(names):
            file = Path(folder, child)
            # Names within the folder alone: a renamed or copied folder is the same data.
            found.append(stamp_file(file, (Path(name) / file.relative_to(path)).as_posix()))
    return found


def _raise(problem: OSError) -> None:
    raise unreadable(Path(problem.filename or "."), problem) from problem


def unchanged(source: Source) -> bool:
    """Whether every file still has the stamp it had."""
    for file in source.every:
        try:
            if Stamp.of(os.stat(file.path)) != file.stamp:
                return False
        except OSError:
            return False
    return True


def digest(source: Source, algorithm: str, progress: Callable[[int], None] | None = None) -> str:
    """The digest of all the source's bytes; raises SourceChanged where a file is not what was stamped."""
    files = source.every
    if len(files) == 1 and source.paths == (files[0].path,):
        return hash_file(files[0], algorithm, progress)
    workers = min(len(files), os.cpu_count() or 1) or 1
    with ThreadPoolExecutor(workers, thread_name_prefix="legroom-hash") as pool:
        digests = list(pool.map(lambda file: hash_file(file, algorithm, progress), files))
    total = new_hasher(algorithm)
    for name, value in sorted(zip((file.name for file in files), digests, strict=True)):
        total.update(os.fsencode(f"{name}\0{value}\n"))
    return total.hexdigest()


def hash_file(file: File, algorithm: str, progress: Callable[[int], None] | None = None) -> str:
    """The digest of one file's bytes, its stamp compared before and after on the descriptor."""
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
        raise unreadable(file.path, problem) from problem
    return hasher.hexdigest()


def _same(fd: int, file: File) -> None:
    if Stamp.of(os.fstat(fd)) != file.stamp:
        raise changed(file.path)


def changed(path: Path) -> SourceChanged:
    """The error for a file that does not hold still."""
    return SourceChanged(
        say("{path} changed while it was being read", path=path),
        why=say("its size or its times are not what they were when the load began"),
        fix=(say("wait until whatever writes it has finished, then open it again"),),
    )


def sample(source: Source) -> str:
    """A few pages of the files, hashed: two sources with different samples differ; nothing more is known."""
    hasher = hashlib.blake2b(digest_size=8)
    for file in source.every[:_SAMPLES]:
        try:
            fd = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as problem:
            raise unreadable(file.path, problem) from problem
        try:
            for number in range(_SAMPLES):
                hasher.update(os.pread(fd, 4096, max(0, file.stamp.size - 4096) * number // (_SAMPLES - 1)))
        finally:
            os.close(fd)
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
            fix=("pip install 'legroom[hash]'", say("leave hash at 'md5', which needs nothing")),
        ) from problem
    raise UsageError(
        say("there is no hash {name!r}", name=algorithm),
        why=say("the hashes are md5, blake3 and xxh3"),
        fix=("hash='md5'",),
    )
