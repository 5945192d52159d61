"""Paths cuda-pinned and cuda-copy: the CPU gathers a batch into a buffer that is then copied to the GPU.

One thread prepares one batch after the other while the training step runs, up to two ahead. It splits large batches
among helper threads, because one core fills a buffer at a tenth of the speed at which the GPU reads it. A buffer is
reused only after its copy is done. torch rounds page-locked allocations up to powers of two, so all columns share one
buffer of such a size. Where page-locking fails, ordinary memory is used and each copy is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches.cuda_gather_base import CudaGatherer, QueuedBatch, RowLayout
from legroom.loader.batches.cuda_runtime import Driver
from legroom.loader.batches.gather_threads import RowThreads, TaskThread
from legroom.messages import say

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
PATH = "cuda-pinned"
_BUFFERS = 3
_ALIGNMENT = 64


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

    ahead = _BUFFERS - 1  # the batch that is used was copied from the other one

    def __init__(
        self,
        driver: Driver,
        columns: Mapping[str, NDArray],
        rows: Mapping[str, RowLayout],
        why: str,
        release: Callable[[], None] | None = None,
    ) -> None:
        """``release`` is called at the end, when nothing reads ``columns`` any more."""
        super().__init__(driver, PATH, why)
        self._columns, self._rows, self._on_release = dict(columns), dict(rows), release
        self._buffers = [StagingBuffer(driver) for _ in range(_BUFFERS)]
        self._turn = 0
        self._maker, self._threads = TaskThread("legroom-batch"), RowThreads()
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
        return self._maker.start(partial(self._make, rows)).result

    def _make(self, rows: NDArray) -> QueuedBatch:
        starts, total = column_offsets(self._rows, len(rows))
        parts: dict[str, torch.Tensor] = {}
        with self.side.queueing():  # from the start: page-locked memory also belongs to this thread's device
            memory, buffer = self._memory(total)
            filled = memory.numpy()
            for name, kind in self._rows.items():
                if kind.nbytes:
                    into = filled[starts[name] : starts[name] + len(rows) * kind.nbytes]
                    self._threads.copy(self._columns[name], rows, into)
            self.side.limit_run_ahead()
            pinned = self.path == PATH
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
            return buffer.take(total, pinned=self.path == PATH), buffer
        except CudaRefused as refusal:
            self.side.stream.synchronize()  # the other buffer is dropped too, and its copy may be queued
            self._copy_instead(refusal)
            self._turn = 0
            return self._buffers[0].take(total, pinned=False), self._buffers[0]

    def _stop(self) -> None:
        self._maker.stop()
        self._threads.stop()

    def _release(self) -> None:
        self._buffers.clear()
        self._columns.clear()
        if self._on_release is not None:
            self._on_release()


def column_offsets(rows: Mapping[str, RowLayout], count: int) -> tuple[dict[str, int], int]:
    """Where each column starts in a buffer, and the size of the buffer."""
    starts: dict[str, int] = {}
    total = 0
    for name, kind in rows.items():
        starts[name] = total
        total += -(-count * kind.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, max(total, 1)


def _ordinary(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
