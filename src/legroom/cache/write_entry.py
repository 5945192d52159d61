"""Write the files of an entry: hash the source, allocate and copy in threads, report progress.

The caller's thread waits, reports progress, and can be interrupted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from legroom.cache import checksummed_io, identity
from legroom.cache.build_plan import ArrayTarget, BuildPlan, SourceLayout, decoding_bytes
from legroom.cache.capacity import Need
from legroom.cache.copy_arrays import ArrayWriter, BuildMeter, Stopped
from legroom.cache.find_or_build import OpenRequest
from legroom.cache.identity import Source
from legroom.cache.manifest import Array, Table, stamp_of
from legroom.cache.page_placement import interleaved
from legroom.cache.staging import StagingDirectory
from legroom.cache.store import Store, filesystem_type, in_memory, step
from legroom.formats.decoding_memory import DecodingMemory, release_freed_memory
from legroom.formats.protocol import Reader
from legroom.system.cpus import room_for_threads, usable_cpus
from legroom.words import say

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
    readers: Sequence[Reader]
    plan: BuildPlan
    memory: DecodingMemory
    layout: SourceLayout
    digests: dict[str, str] = field(default_factory=dict)
    hashed_ns: int = 0  # when hashing began
    sample: str = ""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The written data files."""

    arrays: tuple[Array, ...]
    tables: tuple[Table, ...]


def write_entry_files(job: BuildJob, work: StagingDirectory) -> WrittenFiles:
    """Fill the staging directory, and compute the source's digest at the same time."""
    meter = BuildMeter()
    cpus = usable_cpus()
    slow_hash = job.asked.request.hash == "md5" and "md5" not in job.digests
    initializer = _lower_priority if slow_hash else None
    # Copying finishes long before md5, so md5 gets one core. Decoding uses all cores.
    copiers = max(1, cpus - 1) if slow_hash and not job.layout.decodes else max(2, cpus)
    if not room_for_threads(2 + min(_MOST_COPIERS, copiers)):
        raise MemoryError(say("ulimit -v leaves no address space for the threads that copy and hash"))
    with (
        ThreadPoolExecutor(1, "legroom-hash") as hashing,
        ThreadPoolExecutor(1, "legroom-allocate", initializer) as allocating,
        ThreadPoolExecutor(min(_MOST_COPIERS, copiers), "legroom-copy", initializer) as copying,
    ):
        job.memory.measure = work.decoding_allowance
        writer = ArrayWriter(
            job.readers,
            meter,
            copying,
            work.check_capacity,
            job.memory,
            job.layout,
            by_map=_by_map(work.store),
        )
        first: list[Future[Any]] = []
        try:
            step("read")
            if job.asked.request.hash not in job.digests:
                job.hashed_ns = time.time_ns()
                first.append(
                    hashing.submit(
                        identity.digest_source, job.source, job.asked.request.hash, meter.add_hashed
                    )
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
                job.digests = {**job.digests, job.asked.request.hash: first[0].result()}
            sealed = writer.sealed()
            crcs = {
                target.spec.name: sealed[target.spec.name][0]
                if target.spec.name in sealed
                else writer.crc32(target)
                for target in job.plan.arrays
            }
            stats = {name: stats for name, (_, stats) in sealed.items()}
            sizes = [table.result() for table in tables]
        except BaseException as problem:
            meter.stopped = True
            wait(first)
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


def storage_need(job: BuildJob, store: Store) -> Need:
    """What loading into that store needs."""
    return replace(
        job.plan.need,
        decoding=decoding_bytes(job.readers, job.plan.targets, job.layout, by_map=_by_map(store)),
    )


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
            later = in_memory(work.store) and writer.comes_in_slabs(target)
            fd = work.create(target.file)  # the writer takes it over and closes it
            writer.write_array(target, fd, work.allocate(fd, target.header, target.size, later=later))
    for start in range(0, len(small), _TOGETHER):
        writer.copy_small(small[start : start + _TOGETHER], work)


def _lower_priority() -> None:
    """Lower this thread's priority, so that hashing has a core to itself: md5 takes longer than all the rest."""
    if sys.platform == "linux":
        try:
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 5))
        except OSError:
            pass  # forbidden by a sandbox: only a little slower


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
            Array(
                spec.name,
                target.file,
                spec.shape,
                spec.dtype,
                crc,
                stamp,
                spec.attributes,
                spec.ragged,
                spec.text,
            )
        )
    for table, size in zip(job.plan.tables, sizes, strict=True):
        stamp = stamp_of(work.seal(table.file))
        crc = checksummed_io.hex_digits(_crc_of(work, table.file))
        about = table.spec
        tables.append(
            Table(
                about.name,
                table.file,
                about.rows,
                about.columns,
                size,
                crc,
                stamp,
                about.attributes,
                table.part_of,
            )
        )
    return WrittenFiles(tuple(arrays), tuple(tables))


def _crc_of(work: StagingDirectory, name: str) -> int:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=work.fd)
    try:
        return checksummed_io.file_crc32(fd)
    finally:
        os.close(fd)
