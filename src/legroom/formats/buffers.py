"""Fill arrays given by the caller: checks, pieces, threads, byte order and Fortran order.

Threads start and end within one call, and ``progress`` is called from the calling thread only. So nothing here survives
a fork, and progress callbacks need no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from legroom.errors import UsageError
from legroom.formats.protocol import ArraySpec, Progress
from legroom.formats.source_file import SourceFile
from legroom.system.cpus import usable_cpus
from legroom.words import say

PIECE = 8 << 20
_MOST_THREADS = 8  # of sixteen cores' threads, more than this took longer for chunks that inflate fast

Array = np.ndarray[Any, Any]
Take = Callable[[memoryview], None]  # fills the view with the next bytes of the file
DType = np.dtype[Any]


def check_out(spec: ArraySpec, out: Array) -> None:
    """Refuse a buffer that is not exactly what the spec says."""
    if not isinstance(out, np.ndarray):
        wrong = say("it is a {kind}, not a numpy array", kind=type(out).__name__)
    elif out.shape != spec.shape:
        wrong = say("its shape is {has}, needed is {needed}", has=out.shape, needed=spec.shape)
    elif out.dtype != spec.dtype:
        wrong = say("its dtype is {has}, needed is {needed}", has=out.dtype, needed=spec.dtype)
    elif not out.flags.c_contiguous:
        wrong = say("it is not C-contiguous")
    elif not out.flags.writeable:
        wrong = say("it is read-only")
    else:
        return
    raise UsageError(
        say("cannot read {name!r} into this buffer", name=spec.name),
        why=wrong,
        fix=(say("give numpy.empty(spec.shape, spec.dtype), or a writable map of that shape and dtype"),),
    )


def bytes_of(out: Array) -> memoryview:
    """The bytes of a C-contiguous array, to be written to."""
    if out.nbytes == 0:
        return memoryview(bytearray())
    return out.reshape(-1).view(np.uint8).data


def threads() -> int:
    """How many threads are worth starting: the CPUs this process may run on."""
    return min(usable_cpus(), _MOST_THREADS)


def in_parallel(tasks: Iterable[Callable[[], int]], progress: Progress) -> None:
    """Run tasks that each say how many bytes they brought; the first failure ends it all.

    ``tasks`` may be a generator: it is drawn from in the calling thread, a few tasks ahead.
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
    """Read bytes that lie in the file exactly as in memory, by threads."""
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
    take: Take, out: Array, file_dtype: np.dtype[Any], fortran: bool, progress: Progress
) -> None:
    """Fill ``out`` from bytes that come in the file's own order, converting byte order and axes on the way."""
    if out.nbytes == 0:
        progress(0)
        return
    fortran = fortran and out.ndim > 1
    if file_dtype == out.dtype and not fortran:
        view = bytes_of(out)
        for start in range(0, len(view), PIECE):
            part = view[start : start + PIECE]
            take(part)
            progress(len(part))
        return
    # In Fortran order the last axis is the slowest: the transpose runs through memory as the file does.
    _convert(take, out.T if fortran else out.reshape(-1), file_dtype, progress)


def _convert(take: Take, target: Array, file_dtype: np.dtype[Any], progress: Progress) -> None:
    """Slab by slab, so that the second copy stays small whatever the shape."""
    row = target.nbytes // len(target)  # not target[0].nbytes: a text by itself has lost its trailing zeros
    if row > PIECE and target.ndim > 1:
        for part in target:
            _convert(take, part, file_dtype, progress)
        return
    step = max(1, PIECE // row)
    for start in range(0, len(target), step):
        part = target[start : start + step]
        slab = np.empty(part.shape, file_dtype)
        take(bytes_of(slab))
        part[...] = slab
        progress(part.nbytes)


def sequential(file: SourceFile, offset: int) -> Take:
    """The bytes of a file from ``offset`` on, in order."""
    position = offset

    def take(view: memoryview) -> None:
        nonlocal position
        file.read_into(position, view)
        position += len(view)

    return take


def native_dtype(dtype: DType) -> DType:
    """The same values in native byte order; offsets and padding of records are kept, metadata is not.

    Metadata would be lost, with a warning, by anyone who saves the array.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((native_dtype(base), shape))
    if dtype.names is None or dtype.fields is None:
        return (
            np.dtype(dtype.newbyteorder("=").str)
            if dtype.kind != "V"
            else np.dtype((np.void, dtype.itemsize))
        )
    fields = [dtype.fields[name] for name in dtype.names]
    return np.dtype(
        {
            "names": list(dtype.names),
            "formats": [native_dtype(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
        }
    )
