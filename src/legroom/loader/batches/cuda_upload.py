"""Copies arrays to GPU memory through page-locked chunks that several threads fill.

A copy from ordinary memory goes through one staging buffer of the driver at 4 to 6 GB/s. Threads that fill chunks of
their own reach most of what PCIe transfers. The chunks are unlocked and freed at the end.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.system.process_control import room_for_threads, usable_cpus

if TYPE_CHECKING:
    import torch

    from legroom.loader.batches.cuda_runtime import Driver

NDArray = np.ndarray[Any, Any]
CHUNK = 16 << 20
_MOST_THREADS = 14
_CHUNKS = 2  # per thread: one is filled while the other is copied


def upload(driver: Driver, pairs: Iterable[tuple[NDArray, torch.Tensor]]) -> None:
    """Copy contiguous arrays to contiguous tensors of as many bytes; returns when all bytes are on the GPU."""
    import torch

    arrays = [
        (here.reshape(-1).view(np.uint8), there.view(-1).view(torch.uint8)) for here, there in pairs if here.nbytes
    ]
    total = sum(here.nbytes for here, _ in arrays)
    pieces = _Pieces(arrays)
    threads = max(1, min(_MOST_THREADS, usable_cpus(), total // CHUNK))
    while threads > 1 and not room_for_threads(threads):
        threads -= 1
    if threads == 1:
        _copy(driver, pieces, min(CHUNK, total))
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="legroom-upload") as pool:
        for done in [pool.submit(_copy, driver, pieces, CHUNK) for _ in range(threads)]:
            done.result()


class _Pieces:
    """Hands out pieces of at most a chunk to whichever thread is ready."""

    def __init__(self, arrays: list[tuple[NDArray, torch.Tensor]]) -> None:
        self._pieces = (
            (here[start : start + CHUNK], there[start : start + CHUNK])
            for here, there in arrays
            for start in range(0, len(here), CHUNK)
        )
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[NDArray, torch.Tensor]]:
        while True:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            yield piece


def _copy(driver: Driver, pieces: _Pieces, size: int) -> None:
    stream = driver.stream()
    chunks = [_Chunk(driver, size) for _ in range(_CHUNKS)]
    try:
        with driver.on(stream):
            for turn, (here, there) in enumerate(pieces):
                chunk = chunks[turn % _CHUNKS]
                chunk.copy(here, there)
                chunk.copied = driver.mark(stream)
    finally:
        stream.synchronize()
        for chunk in chunks:
            chunk.close()


class _Chunk:
    """Page-locked memory, or ordinary memory where CUDA refuses to lock it."""

    def __init__(self, driver: Driver, size: int) -> None:
        import torch

        self._driver, self.copied = driver, None
        self._memory = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
        self._tensor = torch.from_numpy(self._memory)
        try:
            driver.register(self._memory.ctypes.data, self._memory.nbytes)
            self._locked = True
        except CudaRefused:
            self._locked = False

    def copy(self, here: NDArray, there: torch.Tensor) -> None:
        """Queue a copy on the current stream, once the chunk's last copy is done."""
        if self.copied is not None:
            self.copied.synchronize()
        np.copyto(self._memory[: len(here)], here)
        there.copy_(self._tensor[: len(here)], non_blocking=self._locked)

    def close(self) -> None:
        """Unlock the memory; its copies must be done."""
        if self._locked:
            self._locked = False
            self._driver.unregister(self._memory.ctypes.data)
