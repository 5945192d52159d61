"""Write the files of an entry: hash the source, allocate, copy raw bytes or decode in threads, report progress.

Files are allocated before they are filled, so a write through a mapping cannot hit a full file system. The caller's
thread waits, reports progress, and can be interrupted.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from legroom.cache import mapped_files_and_checksums, source_stamps_and_digests
from legroom.cache.downloads_in_store import Fetched
from legroom.cache.find_or_build_entry import OpenRequest
from legroom.cache.manifest import Array, Table, stamp_of
from legroom.cache.mapped_files_and_checksums import Part, interleaved, opened, read_at
from legroom.cache.plan_entry_files import ArrayTarget, BuildPlan, Piece, SourceLayout, TableTarget, decoding_bytes
from legroom.cache.source_stamps_and_digests import Source, source_changed_error, source_gone_error
from legroom.cache.staging_directory import StagingDirectory
from legroom.cache.store_directories import Store, filesystem_type, in_memory, step
from legroom.cache.store_free_space import BuildNeed
from legroom.errors import LegroomError
from legroom.formats.base_reader import BaseReader, Extent, Slab
from legroom.formats.decoding_memory_budget import DecodingMemory
from legroom.formats.file_reads_and_errors import wait_for_bytes, wrong_checksum
from legroom.system.file_writes import WriteParts, grouped, write_all, write_parts, write_through
from legroom.system.processes_and_threads import (
    lower_thread_priority,
    release_freed_memory,
    room_for_threads,
    usable_cpus,
    why_no_thread,
)

Progress = Callable[[int, int], None]  # (done, total) in bytes
_POLL = 0.05
_TOGETHER = 256  # small arrays in one task
_MOST_COPIERS = 8  # more contend with each other: sixteen took 10 to 25 % longer on sixteen cores
# File systems on which allocated blocks are really used by writes through a mapping. On others (copy-on-write,
# compressed) a full disk would cause SIGBUS, so data is decoded into memory and written.
_SURE = frozenset({"tmpfs", "ext2", "ext3", "ext4", "xfs", "f2fs"})


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """A request, with its source and time."""

    request: OpenRequest
    source: Source
    when_ns: int
    wait: bool
    progress: Progress | None


@dataclass(slots=True)
class BuildJob:
    """One build: its source, readers, plan and digests."""

    asked: BuildRequest
    source: Source  # with all referenced files
    readers: Sequence[BaseReader]
    plan: BuildPlan
    memory: DecodingMemory
    layout: SourceLayout
    digests: dict[str, str] = field(default_factory=dict)
    hashed_ns: int = 0  # when hashing began
    sample: str = ""
    fetched: Fetched | None = None  # the downloads of remote objects
    partly: bool = False  # only what the keys need is read, so it is identified by its version

    @property
    def algorithm(self) -> str:
        """The hash that identifies the entry."""
        return "version" if self.partly else self.asked.request.hash


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The written data files."""

    arrays: tuple[Array, ...]
    tables: tuple[Table, ...]


def write_entry_files(job: BuildJob, work: StagingDirectory) -> WrittenFiles:
    """Fill the staging directory, and compute the source's digest at the same time."""
    meter = BuildMeter()
    cpus = usable_cpus()
    slow_hash = job.algorithm == "md5" and "md5" not in job.digests
    initializer = lower_thread_priority if slow_hash else None
    # Copying finishes long before md5, so md5 gets one core. Decoding uses all cores.
    copiers = max(1, cpus - 1) if slow_hash and not job.layout.decodes else max(2, cpus)
    if not room_for_threads(2 + min(_MOST_COPIERS, copiers)):
        raise MemoryError(why_no_thread(2 + min(_MOST_COPIERS, copiers)))
    with (
        ThreadPoolExecutor(1, "legroom-hash") as hashing,
        ThreadPoolExecutor(1, "legroom-allocate", initializer) as allocating,
        ThreadPoolExecutor(min(_MOST_COPIERS, copiers), "legroom-copy", initializer) as copying,
    ):
        job.memory.measure = work.decoding_allowance
        job.memory.write_through = through = work.fills_memory()
        writer = ArrayWriter(
            job.readers, meter, copying, work.check_capacity, job.memory, job.layout,
            by_map=_by_map(work.store), write=write_through if through else write_parts,
        )  # fmt: skip
        first: list[Future[Any]] = []
        try:
            step("read")
            if job.algorithm not in job.digests:
                job.hashed_ns = time.time_ns()
                first.append(
                    hashing.submit(source_stamps_and_digests.digest_source, job.source, job.algorithm, meter.add_hashed)
                )
            else:
                meter.hashed = job.source.size
            step("allocate")
            first.append(allocating.submit(_allocate, job, work, writer))
            _watch(first[-1:], lambda: _report(job, work, meter))
            step("write")
            tables = [writer.write_table(target, os.fspath(work.folder)) for target in job.plan.tables]
            _watch([*first, *writer.jobs], lambda: _report(job, work, meter))
            step("written")
            if len(first) == 2:
                job.digests = {**job.digests, job.algorithm: first[0].result()}
            sealed = writer.sealed()
            crcs = {
                target.spec.name: sealed[target.spec.name][0]
                if target.spec.name in sealed
                else _adopt(job, work, target)
                if _adopts(job, work.store, target)
                else writer.crc32(target)
                for target in job.plan.arrays
            }
            stats = {name: stats for name, (_, stats) in sealed.items()}
            sizes = [table.result() for table in tables]
        except BaseException as problem:
            meter.stopped = True
            if job.fetched is not None and not isinstance(problem, (OSError, LegroomError, Stopped)):
                job.fetched.fail(Stopped())  # an interrupt, or the caller's own error: wait for no silent server
            wait(first)
            if isinstance(problem, Stopped):
                wait(writer.jobs)  # the job that failed stops the others, and they may end before it
            cause = writer.failure() or problem
            work.raise_if_full(cause)
            if cause is not problem:
                raise cause from None
            raise
        finally:
            meter.stopped = True
            wait(first)
            writer.close()
    if job.layout.decodes or job.plan.tables:
        release_freed_memory()  # the process goes on to train
    # All descriptors are closed: nothing changes the files' times from here on.
    step("seal")
    return _sealed(job, work, crcs, stats, sizes)


def storage_need(job: BuildJob, store: Store) -> BuildNeed:
    """What loading into that store needs. A download that becomes an array's file is there already."""
    there = sum(target.size for target in job.plan.arrays if _adopts(job, store, target))
    return replace(
        job.plan.need,
        nbytes=job.plan.need.nbytes - there,
        decoding=decoding_bytes(job.readers, job.plan.targets, job.layout, by_map=_by_map(store)),
    )


def _adopts(job: BuildJob, store: Store, target: ArrayTarget) -> bool:
    """Whether the download becomes the array's file: an .npy object differs from that file in its header at most."""
    if job.fetched is None or job.partly or len(target.pieces) != 1 or target.size <= _SMALL:
        return False
    [piece] = target.pieces
    extent = job.layout.extents[piece.source, piece.name]
    if extent is None or extent.checksum is not None or extent.nbytes != piece.nbytes:
        return False
    return extent.offset == len(target.header) and job.fetched.is_whole_file(extent.path, target.size, store)


def _adopt(job: BuildJob, work: StagingDirectory, target: ArrayTarget) -> str:
    """Move the download into the entry, and give it the entry's header. Returns the checksum of the array."""
    assert job.fetched is not None
    [piece] = target.pieces
    extent = job.layout.extents[piece.source, piece.name]
    assert extent is not None
    if not job.sample:
        job.sample = source_stamps_and_digests.sample_source(job.source)  # of the file as it came
    crc = job.fetched.crc32(extent.path, extent.offset)
    step("adopt")
    os.rename(extent.path, target.file, dst_dir_fd=work.fd)
    moved = work.folder / target.file
    files = (replace(file, local=moved) if file.local == extent.path else file for file in job.source.files)
    job.source = replace(job.source, files=tuple(files))
    with opened(target.file, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=work.fd) as fd:
        write_all(fd, target.header, 0)
    return mapped_files_and_checksums.hex_digits(crc)


def _by_map(store: Store) -> bool:
    return filesystem_type(store) in _SURE


def _allocate(job: BuildJob, work: StagingDirectory, writer: ArrayWriter) -> None:
    """Allocate every array, and start to fill what is allocated."""
    with interleaved():  # pages in memory lie on the node of the allocating thread
        small: list[ArrayTarget] = []
        for target in job.plan.arrays:
            if writer.is_small(target):
                small.append(target)
                continue
            if _adopts(job, work.store, target):
                writer.count(target.spec.nbytes)
                continue
            later = in_memory(work.store) and writer.comes_in_slabs(target)
            fd = work.create(target.file)  # the writer takes it over and closes it
            writer.write_array(target, fd, work.allocate(fd, target.header, target.size, later=later))
    for start in range(0, len(small), _TOGETHER):
        writer.copy_small(small[start : start + _TOGETHER], work)


def _watch(jobs: Sequence[Future[Any]], report: Callable[[], None]) -> None:
    """Wait for all jobs and report progress. The first failure ends the wait."""
    pending: set[Future[Any]] = set(jobs)
    while pending:
        done, pending = wait(pending, timeout=_POLL, return_when=FIRST_EXCEPTION)
        failed = [job.exception() for job in done if job.exception() is not None]
        for problem in sorted(failed, key=lambda problem: isinstance(problem, Stopped)):
            for job in pending:
                job.cancel()
            assert problem is not None
            raise problem
        report()


def _report(job: BuildJob, work: StagingDirectory, meter: BuildMeter) -> None:
    """Report the slower of copying and hashing: both must finish."""
    total = job.plan.nbytes
    copied = meter.copied / total if total else 1.0
    hashed = meter.hashed / job.source.size if job.source.size else 1.0
    done = int(total * min(1.0, copied, hashed))
    work.report_progress(done, total)
    if job.fetched is not None:
        job.fetched.update_reservation()
    if job.asked.progress is not None:
        job.asked.progress(done, total)


def _sealed(
    job: BuildJob,
    work: StagingDirectory,
    crcs: Mapping[str, str],
    stats: Mapping[str, os.stat_result],
    sizes: Sequence[int],
) -> WrittenFiles:
    arrays, tables = [], []
    for target in job.plan.arrays:
        spec = target.spec
        stamp = stamp_of(stats.get(spec.name) or work.seal(target.file))
        crc = crcs[spec.name]
        arrays.append(
            Array(spec.name, target.file, spec.shape, spec.dtype, crc, stamp, spec.attributes, spec.ragged, spec.text)
        )
    for table, size in zip(job.plan.tables, sizes, strict=True):
        stamp = stamp_of(work.seal(table.file))
        crc = mapped_files_and_checksums.hex_digits(_crc_of(work, table.file))
        about = table.spec
        tables.append(
            Table(about.name, table.file, about.rows, about.columns, size, crc, stamp, about.attributes, table.part_of)
        )
    return WrittenFiles(tuple(arrays), tuple(tables))


def _crc_of(work: StagingDirectory, name: str) -> int:
    with opened(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=work.fd) as fd:
        return mapped_files_and_checksums.file_crc32(fd)


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
        readers: Sequence[BaseReader],
        meter: BuildMeter,
        pool: ThreadPoolExecutor,
        again: Callable[[int], None],  # raises if that many more bytes no longer fit
        memory: DecodingMemory,
        layout: SourceLayout,
        *,
        by_map: bool,
        write: WriteParts,
    ) -> None:
        self._readers, self._meter, self._pool, self._by_map, self._write = readers, meter, pool, by_map, write
        self._again, self._memory = again, memory
        self._extents, self._slabs = layout.extents, layout.slabs
        self._small_jobs: list[Future[Any]] = []
        self._decoding = threading.Lock()  # a reader is used by one thread at a time
        self._sources: dict[str, int] = {}
        self._opening = threading.Lock()
        # The files that the readers have open.
        self._reader_stats = [os.fstat(fd) for reader in readers for fd in reader.descriptors()]
        self.jobs: list[Future[Any]] = []
        self._parts: dict[str, list[tuple[int, Future[list[Part]]]]] = {}
        self._opened: deque[tuple[int, list[Future[Any]]]] = deque()

    def count(self, nbytes: int) -> None:
        """Count bytes that need no copy."""
        self._meter.add(nbytes)

    def is_small(self, target: ArrayTarget) -> bool:
        """Whether the array is copied in one task with others: thousands of small ones would cost a task each."""
        extents = (self._extents[piece.source, piece.name] for piece in target.pieces)
        # Arrays whose source has a checksum are copied and compared as large ones.
        return target.size <= _SMALL and all(one is not None and one.checksum is None for one in extents)

    def copy_small(self, targets: Sequence[ArrayTarget], work: StagingDirectory) -> None:
        """Start copying small arrays, each into its own file, which is sealed at once."""
        self._small_jobs.append(self._start(self._copy_small, targets, work))

    def sealed(self) -> dict[str, tuple[str, os.stat_result]]:
        """Checksum and stat of every small array, by name."""
        return {name: found for job in self._small_jobs for name, found in job.result().items()}

    def _copy_small(
        self, targets: Sequence[ArrayTarget], work: StagingDirectory
    ) -> dict[str, tuple[str, os.stat_result]]:
        crc32, found = mapped_files_and_checksums.crc32(), {}
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
                wait_for_bytes(extent.path, begin, piece.nbytes)
                if (
                    piece.nbytes
                    and read_at(self._source(extent), view[start : start + piece.nbytes], begin) != piece.nbytes
                ):
                    raise source_changed_error(extent.path)
            self._meter.add(target.spec.nbytes)
            crc = mapped_files_and_checksums.hex_digits(crc32(view[len(target.header) :]))
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
                        at + slab.start, slab.nbytes, start_byte + slab.nbytes, self._write_slab, (slab, fd, start_byte)
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
        return mapped_files_and_checksums.hex_digits(
            mapped_files_and_checksums.combined(part for _, job in ordered for part in job.result())
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
                    self._sources[path] = fd = os.open(path, os.O_RDONLY)
                except OSError as problem:
                    raise source_gone_error(extent.path, problem) from problem
                if not any(os.path.samestat(os.fstat(fd), own) for own in self._reader_stats):
                    raise source_changed_error(extent.path)  # its name now leads to another file
            return self._sources[path]

    def _copy(self, extent: Extent, source: int, start: int, fd: int, to: int, length: int) -> list[Part]:
        crc, total, done = mapped_files_and_checksums.crc32(), 0, 0
        buffer = _buffer()
        while done < length:
            wait_for_bytes(extent.path, start + done, min(len(buffer), length - done))
            got = read_at(source, buffer[: min(len(buffer), length - done)], start + done)
            if got == 0:
                raise source_changed_error(extent.path)
            part = buffer[:got]
            total = crc(part, total)
            self._write(fd, [part], to + done)
            done += got
            self._meter.add(got)
        return [(total, length)]

    def _write_slab(self, slab: Slab, fd: int, to: int) -> list[Part]:
        """Decode a slab and write it. A write has no page faults of a mapping, and fails cleanly on a full store."""
        crc, total, done = mapped_files_and_checksums.crc32(), 0, 0
        for parts in grouped(slab.decode(), _BUFFER):
            for part in parts:
                total = crc(part, total)
            self._write(fd, parts, to + done)
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
        self._write(fd, [data], len(target.header) + piece.offset)
        return [(mapped_files_and_checksums.crc32()(data), len(data))]

    def _decode_into_map(self, target: ArrayTarget, piece: Piece, fd: int) -> list[Part]:
        start = len(target.header) + piece.offset
        page = start - start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(fd, start - page + piece.nbytes, offset=page)
        try:
            out: Any = np.ndarray(piece.shape, target.spec.dtype, mapped, start - page)
            self._readers[piece.source].read_into(piece.name, out, self._meter.add)
            total = mapped_files_and_checksums.crc32()(memoryview(mapped)[start - page :])
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
        has = mapped_files_and_checksums.combined([header, *parts])
        if has != extent.checksum.whole:
            raise wrong_checksum(extent.path, name, has, extent.checksum.whole)


def _buffer() -> memoryview:
    """This thread's buffer: small enough to stay in its core's cache between read and write."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_BUFFER))
    return _local.buffer  # type: ignore[no-any-return]
