"""Write the arrays and tables of an entry: copy raw bytes in threads, decode the rest.

Files are allocated before they are filled, so a write through a mapping cannot hit a full file system.
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from legroom.cache import checksummed_io
from legroom.cache.build_plan import ArrayTarget, Piece, SourceLayout, TableTarget
from legroom.cache.checksummed_io import MOST_PARTS, Part, read_at, write_all, write_parts
from legroom.cache.identity import source_changed_error, source_gone_error
from legroom.cache.staging import StagingDirectory
from legroom.formats.decoding_memory import DecodingMemory
from legroom.formats.protocol import Extent, Reader, Slab
from legroom.formats.source_file import wrong_checksum

PART = 8 << 20
_BUFFER = 1 << 20
_SMALL = 256 << 10  # arrays up to this size are copied together
_MOST_OPEN = 128  # a file of thousands of small arrays must not run out of descriptors
_local = threading.local()


class Stopped(Exception):
    """The build was stopped by another thread's error or an interrupt."""


@dataclass(slots=True)
class BuildMeter:
    """Progress of a build: its threads count, the caller's thread reads."""

    copied: int = 0
    hashed: int = 0
    stopped: bool = False

    def add(self, count: int) -> None:
        if self.stopped:
            raise Stopped
        self.copied += count  # a lost update between threads only affects the progress for a moment

    def add_hashed(self, count: int) -> None:
        if self.stopped:
            raise Stopped
        self.hashed += count


class _CopyTask(NamedTuple):
    """A part of an array for one thread: its offset in the array, its length, its end in the file."""

    offset: int
    nbytes: int
    end: int
    work: Callable[..., list[Part]]
    arguments: tuple[Any, ...]


class ArrayWriter:
    """Fills allocated files from readers. ``jobs`` are its running tasks."""

    def __init__(
        self,
        readers: Sequence[Reader],
        meter: BuildMeter,
        pool: ThreadPoolExecutor,
        again: Callable[[int], None],  # raises if that many more bytes no longer fit
        memory: DecodingMemory,
        layout: SourceLayout,
        *,
        by_map: bool,
    ) -> None:
        self._readers, self._meter, self._pool, self._by_map = readers, meter, pool, by_map
        self._again, self._memory = again, memory
        self._extents, self._slabs = layout.extents, layout.slabs
        self._small_jobs: list[tuple[str, Future[Any]]] = []
        self._decoding = threading.Lock()  # a reader is used by one thread at a time
        self._sources: dict[str, int] = {}
        self._opening = threading.Lock()
        # The files that the readers have open.
        self._reader_stats = [os.fstat(fd) for reader in readers for fd in reader.descriptors()]
        self.jobs: list[Future[Any]] = []
        self._parts: dict[str, list[tuple[int, Future[list[Part]]]]] = {}
        self._opened: deque[tuple[int, list[Future[Any]]]] = deque()

    def is_small(self, target: ArrayTarget) -> bool:
        """Whether the array is copied in one task with others: thousands of small ones would cost a task each."""
        extents = (self._extents[piece.source, piece.name] for piece in target.pieces)
        # Arrays whose source has a checksum are copied and compared as large ones.
        return target.size <= _SMALL and all(one is not None and one.checksum is None for one in extents)

    def copy_small(self, targets: Sequence[ArrayTarget], work: StagingDirectory) -> None:
        """Start copying small arrays, each into its own file, which is sealed at once."""
        job = self._start(self._copy_small, targets, work)
        self._small_jobs.extend((target.spec.name, job) for target in targets)

    def sealed(self) -> dict[str, tuple[str, os.stat_result]]:
        """Checksum and stat of every small array, by name."""
        jobs = {id(job): job for _, job in self._small_jobs}
        return {name: found for job in jobs.values() for name, found in job.result().items()}

    def _copy_small(
        self, targets: Sequence[ArrayTarget], work: StagingDirectory
    ) -> dict[str, tuple[str, os.stat_result]]:
        crc32, found = checksummed_io.crc32(), {}
        work.check_capacity(sum(-(-target.size // mmap.PAGESIZE) * mmap.PAGESIZE for target in targets))
        for target in targets:
            data = bytearray(target.size)
            data[: len(target.header)] = target.header
            view = memoryview(data)
            for piece in target.pieces:
                extent = self._extents[piece.source, piece.name]
                assert extent is not None  # it is small
                start = len(target.header) + piece.offset
                begin = extent.offset + extent.nbytes - piece.nbytes
                if (
                    piece.nbytes
                    and read_at(self._source(extent), view[start : start + piece.nbytes], begin)
                    != piece.nbytes
                ):
                    raise source_changed_error(extent.path)
            self._meter.add(target.spec.nbytes)
            crc = checksummed_io.hex_digits(crc32(view[len(target.header) :]))
            found[target.spec.name] = crc, work.write_sealed(target.file, view)
        return found

    def comes_in_slabs(self, target: ArrayTarget) -> bool:
        """Whether the whole array comes in slabs, which are written without a mapping."""
        return all(self._slabs[piece.source, piece.name] is not None for piece in target.pieces)

    def write_array(self, target: ArrayTarget, fd: int, allocated: Iterable[tuple[int, bool]]) -> None:
        """Fill one array's file while it is allocated: ``allocated`` gives (end, whether the blocks are allocated).

        Takes over the descriptor, and closes it when the file is filled.
        """
        parts = self._parts.setdefault(target.spec.name, [])
        started: list[Future[Any]] = []
        self._opened.append((fd, started))  # first, so that it is closed whatever fails
        waiting = deque(self._tasks(target, fd))
        for end, there in allocated:
            if self._meter.stopped:
                raise Stopped
            while waiting and waiting[0].end <= end:
                share = waiting.popleft()
                started.append(self._start(share.work, *share.arguments, ask=0 if there else share.nbytes))
                parts.append((share.offset, started[-1]))
        self._close_filled(_MOST_OPEN)

    def _tasks(self, target: ArrayTarget, fd: int) -> Iterator[_CopyTask]:
        """The tasks that fill the file, in file order."""
        for piece in target.pieces:
            at, start = piece.offset, len(target.header) + piece.offset
            extent = self._extents[piece.source, piece.name]
            slabs = self._slabs[piece.source, piece.name]
            if slabs is not None:
                for slab in slabs:
                    start_byte = start + slab.start
                    yield _CopyTask(
                        at + slab.start,
                        slab.nbytes,
                        start_byte + slab.nbytes,
                        self._write_slab,
                        (slab, fd, start_byte),
                    )
            elif extent is None:
                yield _CopyTask(at, piece.nbytes, start + piece.nbytes, self._decode, (target, piece, fd))
            else:
                begin = extent.offset + extent.nbytes - piece.nbytes  # after the rows that are left out
                source = self._source(extent)
                for done in range(0, piece.nbytes, PART):
                    length, start_byte = min(PART, piece.nbytes - done), start + done
                    arguments = (extent, source, begin + done, fd, start_byte, length)
                    yield _CopyTask(at + done, length, start_byte + length, self._copy, arguments)

    def _close_filled(self, most: int) -> None:
        """Close filled files, oldest first, until at most ``most`` are open."""
        while len(self._opened) > most:
            fd, jobs = self._opened.popleft()
            wait(jobs)
            os.close(fd)

    def crc32(self, target: ArrayTarget) -> str:
        """The checksum of a filled array. Also compares it with the checksums in its sources."""
        ordered = sorted(self._parts[target.spec.name], key=lambda pair: pair[0])
        for piece in target.pieces:
            extent = self._extents[piece.source, piece.name]
            if extent is not None and extent.checksum is not None:
                first, last = (
                    bisect_left(ordered, start_byte, key=lambda pair: pair[0])
                    for start_byte in (piece.offset, piece.offset + piece.nbytes)
                )
                check_source_checksum(
                    extent, piece.name, (part for _, job in ordered[first:last] for part in job.result())
                )
        return checksummed_io.hex_digits(
            checksummed_io.combined(part for _, job in ordered for part in job.result())
        )

    def write_table(self, target: TableTarget, folder: str) -> Future[int]:
        """Start writing one table."""
        return self._start(self._table, target, folder)

    def close(self) -> None:
        """Wait for all jobs, then close all files."""
        wait(self.jobs)
        self._close_filled(0)
        for fd in self._sources.values():
            os.close(fd)
        self._sources.clear()

    def failure(self) -> BaseException | None:
        """The first error of a finished job, if any."""
        ended = [job for job in self.jobs if job.done() and not job.cancelled()]
        problems = [problem for job in ended if (problem := job.exception()) is not None]
        return next((problem for problem in problems if not isinstance(problem, Stopped)), None)

    def _start(self, work: Callable[..., Any], *arguments: Any, ask: int = 0) -> Future[Any]:
        job = self._pool.submit(self._run, work, arguments, ask)
        self.jobs.append(job)
        return job

    def _run(self, work: Callable[..., Any], arguments: tuple[Any, ...], ask: int) -> Any:
        try:
            if ask:
                self._again(ask)
            return work(*arguments)
        except BaseException:
            self._meter.stopped = True  # the other threads stop
            raise

    def _source(self, extent: Extent) -> int:
        path = os.fspath(extent.path)
        with self._opening:
            if path not in self._sources:
                try:
                    self._sources[path] = fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as problem:
                    raise source_gone_error(extent.path, problem) from problem
                if not any(os.path.samestat(os.fstat(fd), own) for own in self._reader_stats):
                    raise source_changed_error(extent.path)  # its name now leads to another file
            return self._sources[path]

    def _copy(self, extent: Extent, source: int, start: int, fd: int, to: int, length: int) -> list[Part]:
        crc, total, done = checksummed_io.crc32(), 0, 0
        buffer = _buffer()
        while done < length:
            got = read_at(source, buffer[: min(len(buffer), length - done)], start + done)
            if got == 0:
                raise source_changed_error(extent.path)
            part = buffer[:got]
            total = crc(part, total)
            write_all(fd, part, to + done)
            done += got
            self._meter.add(got)
        return [(total, length)]

    def _write_slab(self, slab: Slab, fd: int, to: int) -> list[Part]:
        """Decode a slab and write it. A write has no page faults of a mapping, and fails cleanly on a full store."""
        crc, total, done = checksummed_io.crc32(), 0, 0
        for parts in _grouped(slab.decode()):
            for part in parts:
                total = crc(part, total)
            write_parts(fd, parts, to + done)
            length = sum(map(len, parts))
            done += length
            self._meter.add(length)
        if done != slab.nbytes:
            raise AssertionError(f"a slab of {slab.nbytes} bytes gave {done}")
        return [(total, done)]

    def _decode(self, target: ArrayTarget, piece: Piece, fd: int) -> list[Part]:
        if piece.nbytes == 0:
            return []
        with self._decoding:
            if self._meter.stopped:
                raise Stopped
            plain = piece.shift == 0 and piece.skip == 0
            if self._by_map and plain:
                return self._decode_into_map(target, piece, fd)
            whole = self._memory.array(piece.shape, target.spec.dtype, repr(piece.name))
            self._readers[piece.source].read_into(piece.name, whole, self._meter.add)
            if piece.shift:
                whole += piece.shift
            data = whole[piece.skip :].reshape(-1).view(np.uint8).data
        write_all(fd, data, len(target.header) + piece.offset)
        return [(checksummed_io.crc32()(data), len(data))]

    def _decode_into_map(self, target: ArrayTarget, piece: Piece, fd: int) -> list[Part]:
        start = len(target.header) + piece.offset
        page = start - start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(fd, start - page + piece.nbytes, offset=page)
        try:
            out: Any = np.ndarray(piece.shape, target.spec.dtype, mapped, start - page)
            self._readers[piece.source].read_into(piece.name, out, self._meter.add)
            total = checksummed_io.crc32()(memoryview(mapped)[start - page :])
            del out
        finally:
            try:
                mapped.close()
            except BufferError:
                pass  # a traceback still refers to the array; the map goes with it
        return [(total, piece.nbytes)]

    def _table(self, target: TableTarget, folder: str) -> int:
        with self._decoding:
            if self._meter.stopped:
                raise Stopped
            path = Path(folder, target.file)
            # The reader allocates the file, so memory is measured before it grows.
            return self._readers[target.source].write_table(target.name, path, self._meter.add, self._again)


def check_source_checksum(extent: Extent, name: str, parts: Iterable[Part]) -> None:
    """Raise DamagedSource if the parts of an extent do not match the checksum in its file."""
    if extent.checksum is not None:
        header = (extent.checksum.header, extent.checksum.header_bytes)
        has = checksummed_io.combined([header, *parts])
        if has != extent.checksum.whole:
            raise wrong_checksum(extent.path, name, has, extent.checksum.whole)


def _grouped(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Group the parts to about one buffer: writers to one file take turns, so fewer writes are better.

    Larger groups would leave the core's cache before they are written.
    """
    group: list[memoryview] = []
    size = 0
    for part in parts:
        if group and (size + len(part) > _BUFFER or len(group) == MOST_PARTS):
            yield group
            group, size = [], 0
        group.append(part)
        size += len(part)
    if group:
        yield group


def _buffer() -> memoryview:
    """This thread's buffer: small enough to stay in its core's cache between read and write."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_BUFFER))
    return _local.buffer  # type: ignore[no-any-return]
