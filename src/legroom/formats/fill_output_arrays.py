"""Fill the arrays of a caller: checks, pieces, threads, byte order, Fortran order.

Threads start and end within one call, and ``progress`` is called from the calling thread only. So nothing here survives
a fork, and progress callbacks need no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.formats.file_reads_and_errors import SourceFile
from legroom.system.processes_and_threads import room_for_threads, usable_cpus

if TYPE_CHECKING:
    from legroom.formats.base_reader import ArraySpec

PIECE = 8 << 20
_MOST_THREADS = 8  # measured on 16 cores: more threads were slower for chunks that inflate fast

Array = np.ndarray[Any, Any]
ReadNext = Callable[[memoryview], None]  # fills the view with the next bytes of the file
DType = np.dtype[Any]
Progress = Callable[[int], None]  # called with the number of bytes that arrived since the last call


def no_progress(_: int) -> None:
    """Ignore progress."""


def bytes_of(out: Array) -> memoryview:
    """A writable view of the bytes of a C-contiguous array."""
    if out.nbytes == 0:
        return memoryview(bytearray())
    return out.reshape(-1).view(np.uint8).data


def check_out(spec: ArraySpec, out: Array) -> None:
    """Refuse a buffer that does not match the spec."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"cannot read {spec.name!r} into a {type(out).__name__}: a numpy array is needed")
    if out.shape != spec.shape or out.dtype != spec.dtype:
        has, needed = f"{out.shape} {out.dtype}", f"{spec.shape} {spec.dtype}"
        raise ValueError(f"cannot read {spec.name!r} into an array of {has}: {needed} is needed")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"cannot read {spec.name!r} into an array that is read-only or not C-contiguous")


def threads() -> int:
    """How many threads to start: the CPUs this process may run on, at most 8; 1 where ``ulimit -v`` allows no more."""
    count = min(usable_cpus(), _MOST_THREADS)
    return count if room_for_threads(count) else 1


def in_parallel(tasks: Iterable[Callable[[], int]], progress: Progress) -> None:
    """Run tasks in threads; each returns how many bytes it read. The first failure cancels the rest.

    ``tasks`` may be a generator: the calling thread draws from it, a few tasks ahead.
    """
    count = threads()
    if count == 1:
        for task in tasks:
            progress(task())
        return
    running: set[Future[int]] = set()
    with ThreadPoolExecutor(count, thread_name_prefix="legroom-read") as pool:
        try:
            for task in tasks:
                running.add(pool.submit(task))
                if len(running) >= 3 * count:
                    running = _report_finished(running, progress)
            while running:
                running = _report_finished(running, progress)
        finally:
            for future in running:
                future.cancel()


def _report_finished(running: set[Future[int]], progress: Progress) -> set[Future[int]]:
    done, rest = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        progress(future.result())
    return rest


def copy_raw(file: SourceFile, offset: int, out: Array, progress: Progress) -> None:
    """Read bytes that the file stores exactly as they are in memory, in threads."""
    view = bytes_of(out)
    file.require(offset, len(view))

    def piece(start: int) -> Callable[[], int]:
        def read() -> int:
            part = view[start : start + PIECE]
            file.read_into(offset + start, part)
            return len(part)

        return read

    if len(view) <= PIECE:
        progress(piece(0)())
    else:
        in_parallel((piece(start) for start in range(0, len(view), PIECE)), progress)


def fill_in_order(
    read_next: ReadNext, out: Array, file_dtype: np.dtype[Any], fortran: bool, progress: Progress
) -> None:
    """Fill ``out`` from bytes in the file's order, converting byte order and axis order."""
    if out.nbytes == 0:
        progress(0)
        return
    fortran = fortran and out.ndim > 1
    if file_dtype == out.dtype and not fortran:
        view = bytes_of(out)
        for start in range(0, len(view), PIECE):
            part = view[start : start + PIECE]
            read_next(part)
            progress(len(part))
        return
    # In Fortran order the last axis is the slowest: the transpose has the file's order.
    _convert(read_next, out.T if fortran else out.reshape(-1), file_dtype, progress)


def _convert(read_next: ReadNext, target: Array, file_dtype: np.dtype[Any], progress: Progress) -> None:
    """Convert piece by piece, so that the second copy stays small whatever the shape."""
    row = target.nbytes // len(target)  # not target[0].nbytes: a single string drops its trailing zeros
    if row > PIECE and target.ndim > 1:
        for part in target:
            _convert(read_next, part, file_dtype, progress)
        return
    step = max(1, PIECE // row)
    for start in range(0, len(target), step):
        part = target[start : start + step]
        slab = np.empty(part.shape, file_dtype)
        read_next(bytes_of(slab))
        part[...] = slab
        progress(part.nbytes)


def sequential(file: SourceFile, offset: int) -> ReadNext:
    """Read a file from ``offset`` on, in order."""
    position = offset

    def read_next(view: memoryview) -> None:
        nonlocal position
        file.read_into(position, view)
        position += len(view)

    return read_next
