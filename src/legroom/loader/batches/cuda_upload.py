"""Copies arrays to GPU memory through page-locked chunks that several threads fill.

A copy from ordinary memory goes through one staging buffer of the driver at 4 to 6 GB/s. Threads that fill chunks of
their own reach most of what PCIe transfers. Locking pages takes about as long as copying them, so the chunks are small
and lie in huge pages. Bytes that lie in a file are read from it: mapping their pages first would take as long as
copying them. The chunks are unlocked and freed at the end.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.cache.mapped_files_and_checksums import HUGE_PAGE, read_at
from legroom.formats.base_reader import Extent
from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.system.processes_and_threads import room_for_threads, usable_cpus

if TYPE_CHECKING:
    import torch

    from legroom.loader.batches.cuda_calls_for_gather import Driver

NDArray = np.ndarray[Any, Any]
CHUNK = 8 << 20  # smaller ones cost more in Python than in PCIe; larger ones leave the CPU's cache
_MOST_THREADS = 8
_CHUNKS = 2  # per thread: one is filled while the other is copied
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class Upload:
    """A contiguous array, the contiguous tensor of as many bytes that it is copied to, and the file that has them."""

    here: NDArray
    there: torch.Tensor
    file: Extent | None = None


@dataclass(slots=True)
class UploadSeconds:
    """Where the threads of an upload spent their time, in seconds summed over them.

    "lock" and "unlock" pages, "allocate" tensors, "read" into chunks, "wait" for the GPU to copy them.
    """

    threads: int = 1
    phases: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count so much time."""
        with self._lock:
            self.phases[name] = self.phases.get(name, 0.0) + seconds


def upload(driver: Driver, uploads: Iterable[Upload], total: int) -> UploadSeconds:
    """Copy ``total`` bytes in all; returns when all of them are on the GPU.

    ``uploads`` is iterated while the threads copy, so it may allocate each tensor when its turn comes.
    """
    threads = max(1, min(_MOST_THREADS, usable_cpus(), total // CHUNK))
    while threads > 1 and not room_for_threads(threads):
        threads -= 1
    seconds = UploadSeconds(threads)
    pieces = _pieces(driver, uploads, seconds)
    if threads == 1:
        _copy(driver, pieces, min(CHUNK, total), seconds)
        return seconds
    waiting: SimpleQueue[_Piece | None] = SimpleQueue()
    failed = threading.Event()
    with ThreadPoolExecutor(threads, thread_name_prefix="legroom-upload") as pool:
        copying = [pool.submit(_copy_waiting, driver, waiting, failed, seconds) for _ in range(threads)]
        try:
            for piece in pieces:
                if failed.is_set():
                    break
                waiting.put(piece)
        except BaseException:
            failed.set()
            raise
        finally:
            for _ in range(threads):
                waiting.put(None)
    for done in copying:
        done.result()
    return seconds


@dataclass(frozen=True, slots=True)
class _Piece:
    """At most a chunk of an upload, and the event after which its tensor may be written to."""

    here: NDArray
    there: torch.Tensor
    file: Extent | None
    offset: int  # in the array
    usable: Any


def _pieces(driver: Driver, uploads: Iterable[Upload], seconds: UploadSeconds) -> Iterator[_Piece]:
    import torch

    consumer = driver.current()
    waiting = iter(uploads)
    while True:
        with seconds.phase("allocate"):
            one = next(waiting, None)
        if one is None:
            return
        if not one.here.nbytes:
            continue
        usable = driver.mark(consumer)  # work that is queued there may still use the tensor's memory
        here, there = one.here.reshape(-1).view(np.uint8), one.there.view(-1).view(torch.uint8)
        for start in range(0, len(here), CHUNK):
            end = start + CHUNK
            yield _Piece(here[start:end], there[start:end], one.file, start, usable)


def _copy_waiting(
    driver: Driver, waiting: SimpleQueue[_Piece | None], failed: threading.Event, seconds: UploadSeconds
) -> None:
    def pieces() -> Iterator[_Piece]:
        while (piece := waiting.get()) is not None and not failed.is_set():
            yield piece

    try:
        _copy(driver, pieces(), CHUNK, seconds)
    except BaseException:
        failed.set()
        raise


def _copy(driver: Driver, pieces: Iterable[_Piece], size: int, seconds: UploadSeconds) -> None:
    """Copy pieces in this thread.

    Each call that gives up the interpreter's lock and takes it again costs more than the call where several threads do
    it, so there are few per piece: the file stays open for the next piece, and events are used again.
    """
    stream = driver.stream()
    with seconds.phase("lock"):
        chunks = _Chunks(driver, size)
    try:
        read, wait = 0.0, 0.0
        with driver.on(stream), _OpenFile() as file:
            for turn, piece in enumerate(pieces):
                begun = time.perf_counter()
                chunks.wait(turn % _CHUNKS)
                free = time.perf_counter()
                chunks.fill(turn % _CHUNKS, piece, file)
                read += time.perf_counter() - free
                wait += free - begun
                stream.wait_event(piece.usable)
                chunks.send(turn % _CHUNKS, piece, stream)
        seconds.add("read", read)
        seconds.add("wait", wait)
    finally:
        with seconds.phase("wait"):
            stream.synchronize()
        with seconds.phase("unlock"):
            chunks.close()


class _Chunks:
    """Page-locked memory of one thread, or ordinary memory where CUDA refuses to lock it."""

    def __init__(self, driver: Driver, size: int) -> None:
        import torch

        self._driver, size = driver, max(size, 1)
        self._copied: list[Any] = [None] * _CHUNKS
        self._memory = _huge_pages(_CHUNKS * size)
        self._arrays = [self._memory[number * size : (number + 1) * size] for number in range(_CHUNKS)]
        self._tensors = [torch.from_numpy(array) for array in self._arrays]
        try:
            driver.register(self._memory.ctypes.data, self._memory.nbytes)
            self._locked = True
        except CudaRefused:
            self._locked = False

    def wait(self, number: int) -> None:
        """Wait until a chunk's last copy is done."""
        if self._copied[number] is not None:
            self._copied[number].synchronize()

    def fill(self, number: int, piece: _Piece, file: _OpenFile) -> None:
        """Put the bytes of a piece into a chunk."""
        into = self._arrays[number][: len(piece.here)]
        if piece.file is None or not file.read(piece.file, piece.offset, into):
            np.copyto(into, piece.here)

    def send(self, number: int, piece: _Piece, stream: Any) -> None:
        """Queue the copy of a chunk on the current stream."""
        piece.there.copy_(self._tensors[number][: len(piece.here)], non_blocking=self._locked)
        if self._copied[number] is None:
            self._copied[number] = self._driver.mark(stream)
        else:
            self._copied[number].record(stream)

    def close(self) -> None:
        """Unlock the memory; its copies must be done."""
        if self._locked:
            self._locked = False
            self._driver.unregister(self._memory.ctypes.data)


def _huge_pages(size: int) -> NDArray:
    """Memory of this process alone, touched. Locking it then takes few steps, and a forked child gets none of it."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    mapped = mmap.mmap(-1, size + HUGE_PAGE, **private)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            try:
                mapped.madvise(getattr(mmap, advice))
            except OSError:
                pass  # a kernel without it
    memory = np.frombuffer(mapped, np.uint8)
    skip = -memory.ctypes.data % HUGE_PAGE
    memory = memory[skip : skip + size]
    memory[:: mmap.PAGESIZE] = 0
    return memory


class _OpenFile:
    """The file that was read last: the next piece is often in the same."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._fd = -1

    def read(self, file: Extent, offset: int, into: NDArray) -> bool:
        """Read bytes of an array. False where that fails: the file was removed, and only its map is left."""
        try:
            if self._path != file.path:
                self._close()
                self._fd = os.open(file.path, _READ_FLAGS)
                self._path = file.path
            buffer: Any = into
            view, start = memoryview(buffer), file.offset + offset
            while len(view):
                got = read_at(self._fd, view, start)
                if not got:
                    return False
                view, start = view[got:], start + got
        except OSError:
            return False
        return True

    def _close(self) -> None:
        self._path = None
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
