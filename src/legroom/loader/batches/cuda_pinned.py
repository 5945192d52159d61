"""Paths cuda-pinned and cuda-copy: the CPU gathers a batch into a buffer that is then copied to the GPU.

One thread prepares one batch after the other while the training step runs. It splits large batches among helper
threads, because one core fills a buffer at a tenth of the speed at which the GPU reads it. A buffer is reused only
after its copy is done. torch rounds page-locked allocations up to powers of two, so all columns share one buffer of
such a size. Where page-locking fails, ordinary memory is used and each copy is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches.cuda_gather_base import CudaGatherer, QueuedBatch, RowLayout
from legroom.loader.batches.cuda_runtime import Driver
from legroom.messages import say
from legroom.system.process_control import room_for_threads, usable_cpus

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
_BUFFERS = 2
_ALIGNMENT = 64
_MOST_HELPERS = 8
_PIECE = 1 << 20  # bytes per helper thread


class StagingBuffer:
    """Host memory that grows to the largest batch, and the event after its last copy."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._bytes: torch.Tensor | None = None
        self.copied: Any = None

    def take(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """The memory, of at least ``nbytes``, once its last copy is done."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        if self._bytes is None or len(self._bytes) < nbytes:
            size = 1 << max(12, (nbytes - 1).bit_length())
            self._bytes = None  # released first: torch caches page-locked memory
            self._bytes = self._driver.pinned(size) if pinned else _ordinary(size)
        return self._bytes


class PinnedGatherer(CudaGatherer):
    """Gathers on the CPU; ``path`` changes from cuda-pinned to cuda-copy when page-locking fails."""

    def __init__(self, driver: Driver, columns: Mapping[str, NDArray], rows: Mapping[str, RowLayout], why: str) -> None:
        super().__init__(driver, "cuda-pinned", why)
        self._columns, self._rows = dict(columns), dict(rows)
        self._buffers = [StagingBuffer(driver) for _ in range(_BUFFERS)]
        self._turn = 0
        self._maker: ThreadPoolExecutor | None = None  # both None where ulimit -v leaves no room for threads
        self._helpers: ThreadPoolExecutor | None = None
        if room_for_threads(1 + _helpers()):
            self._maker = ThreadPoolExecutor(1, thread_name_prefix="legroom-batch")
            self._helpers = ThreadPoolExecutor(_helpers(), thread_name_prefix="legroom-gather")
        try:
            for buffer in self._buffers:
                buffer.take(1, pinned=True)
        except CudaRefused as refusal:
            self._copy_instead(refusal)

    def _copy_instead(self, refusal: CudaRefused) -> None:
        self.path = "cuda-copy"
        self.why = say("{why}; memory cannot be page-locked: {refusal}", why=self.why, refusal=refusal)
        self._buffers = [StagingBuffer(self.side.driver)]

    def _start(self, rows: NDArray) -> Callable[[], QueuedBatch]:
        if self._maker is None:
            made = self._make(rows)
            return lambda: made
        batch: Future[QueuedBatch] = self._maker.submit(self._make, rows)
        return batch.result

    def _make(self, rows: NDArray) -> QueuedBatch:
        starts, total = column_offsets(self._rows, len(rows))
        parts: dict[str, torch.Tensor] = {}
        with self.side.queueing():  # from the start: page-locked memory also belongs to this thread's device
            memory, buffer = self._memory(total)
            filled = memory.numpy()
            self._fill(rows, {name: filled[start:] for name, start in starts.items()})
            self.side.limit_run_ahead()
            pinned = self.path == "cuda-pinned"
            for name, kind in self._rows.items():
                parts[name] = kind.empty(len(rows), self.side.driver.device)
                size = len(rows) * kind.nbytes
                if size:
                    part = memory[starts[name] : starts[name] + size].view(kind.dtype)
                    parts[name].copy_(part.view(len(rows), *kind.shape), non_blocking=pinned)
        batch = self.side.queued(parts)
        buffer.copied = batch.done
        return batch

    def _memory(self, total: int) -> tuple[torch.Tensor, StagingBuffer]:
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        try:
            return buffer.take(total, pinned=self.path == "cuda-pinned"), buffer
        except CudaRefused as refusal:
            self.side.stream.synchronize()  # the other buffer is dropped too, and its copy may be queued
            self._copy_instead(refusal)
            self._turn = 0
            return self._buffers[0].take(total, pinned=False), self._buffers[0]

    def _fill(self, rows: NDArray, into: Mapping[str, NDArray]) -> None:
        pieces = [
            (column, rows[start:end], into[name][start * kind.nbytes : end * kind.nbytes])
            for name, column in self._columns.items()
            for kind in (self._rows[name],)
            if kind.nbytes
            for start, end in _ranges(len(rows), kind.nbytes)
        ]
        if self._helpers is None or len(pieces) <= 1 + len(self._columns):
            for piece in pieces:
                take_rows(*piece)
            return
        for done in wait([self._helpers.submit(take_rows, *piece) for piece in pieces]).done:
            done.result()

    def _stop(self) -> None:
        for pool in (self._maker, self._helpers):
            if pool is None:
                continue
            try:
                pool.shutdown(cancel_futures=True)
            except RuntimeError:
                pass  # in the pool's own thread: its last job held the last reference to the gatherer

    def _release(self) -> None:
        self._buffers.clear()
        self._columns.clear()


def take_rows(column: NDArray, rows: NDArray, into: NDArray) -> None:
    """Copy some rows of a column as bytes; numpy releases the GIL meanwhile."""
    count = len(rows)
    if not column.flags.c_contiguous:  # numpy would make a contiguous copy of all of it
        into.reshape(count, -1)[:] = np.ascontiguousarray(column[rows]).reshape(count, -1).view(np.uint8)
        return
    whole = column.reshape(len(column), -1).view(np.uint8)
    np.take(whole, rows, axis=0, out=into.reshape(count, -1), mode="clip")


def column_offsets(rows: Mapping[str, RowLayout], count: int) -> tuple[dict[str, int], int]:
    """Where each column starts in a buffer, and the size of the buffer."""
    starts: dict[str, int] = {}
    total = 0
    for name, kind in rows.items():
        starts[name] = total
        total += -(-count * kind.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, max(total, 1)


def _ranges(count: int, row: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about ``_PIECE`` bytes."""
    step = max(1, _PIECE // row)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _ordinary(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _helpers() -> int:
    return min(_MOST_HELPERS, usable_cpus())
