"""Paths cuda-pinned and cuda-copy: the CPU gathers a batch into a buffer that is then copied to the GPU.

One core fills a buffer at a tenth of the speed at which the GPU reads it. So several threads make a batch each, some
batches ahead of the training step: they wait for nothing within a batch, and take the interpreter's lock a few times
for it. Where batches are too large for that, or CPUs are few, one thread makes one batch after the other and splits it
among helpers. A buffer is reused only after its copy is done. torch rounds page-locked allocations up to powers of two,
so all columns share one buffer of such a size. Where page-locking fails, ordinary memory is used and each copy is
waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches.cpu_gather import RowThreads, TaskThread, take_rows
from legroom.loader.batches.cuda_calls_for_gather import Driver
from legroom.loader.batches.cuda_gather_base import CudaGatherer, QueuedBatch, RowLayout
from legroom.messages import say
from legroom.system.processes_and_threads import usable_cpus

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
PATH = "cuda-pinned"
_BUFFERS = 3  # of a maker that is alone
_MOST_MAKERS = 6
_MOST_BUFFERED = 512 << 20  # bytes of page-locked memory for makers that work side by side
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
            size = _rounded(nbytes)
            self._bytes = None  # released first: torch caches page-locked memory
            self._bytes = self._driver.pinned(size) if pinned else _ordinary(size)
        return self._bytes


class BatchMaker:
    """A thread that makes batches, with buffers of its own."""

    def __init__(self, driver: Driver, buffers: int, name: str = "legroom-batch") -> None:
        self.thread = TaskThread(name)
        self.buffers = [StagingBuffer(driver) for _ in range(buffers)]
        self._turn = 0

    def next_buffer(self) -> StagingBuffer:
        """The buffer that was used longest ago."""
        self._turn = (self._turn + 1) % len(self.buffers)
        return self.buffers[self._turn]


class PinnedGatherer(CudaGatherer):
    """Gathers on the CPU; ``path`` changes from cuda-pinned to cuda-copy when page-locking fails."""

    def __init__(
        self,
        driver: Driver,
        columns: Mapping[str, NDArray],
        rows: Mapping[str, RowLayout],
        why: str,
        *,
        batch_size: int,
    ) -> None:
        super().__init__(driver, PATH, why)
        self._columns, self._rows = dict(columns), dict(rows)
        count = _makers(column_offsets(rows, batch_size)[1])
        self._makers = [BatchMaker(driver, 1 if count > 1 else _BUFFERS) for _ in range(count)]
        self._turn = 0
        self.ahead = count if count > 1 else _BUFFERS - 1
        # Where there are several makers, each copies its batch alone: nothing is waited for within a batch.
        self._threads = RowThreads() if count == 1 else None
        try:
            for maker in self._makers:
                for buffer in maker.buffers:
                    buffer.take(1, pinned=True)
        except CudaRefused as refusal:
            self._copy_instead(refusal)

    def _copy_instead(self, refusal: CudaRefused) -> None:
        if self.path == PATH:  # several makers may come here
            self.path = "cuda-copy"
            self.why = say("{why}; memory cannot be page-locked: {refusal}", why=self.why, refusal=refusal)

    def _start(self, rows: NDArray) -> Callable[[], QueuedBatch]:
        self._turn = (self._turn + 1) % len(self._makers)
        maker = self._makers[self._turn]
        batch = QueuedBatch(self.side, self._rows, len(rows))
        return maker.thread.start(partial(self._make, maker, rows, batch)).result

    def _make(self, maker: BatchMaker, rows: NDArray, batch: QueuedBatch) -> QueuedBatch:
        starts, total = column_offsets(self._rows, len(rows))
        with self.side.queueing():  # from the start: page-locked memory also belongs to this thread's device
            buffer = maker.next_buffer()
            memory, pinned = self._memory(buffer, total)
            filled = memory.numpy()
            copy = take_rows if self._threads is None else self._threads.copy
            for name, kind in self._rows.items():
                if kind.nbytes and len(rows):
                    copy(self._columns[name], rows, filled[starts[name] : starts[name] + len(rows) * kind.nbytes])
            batch.before()
            for name, kind in self._rows.items():
                size = len(rows) * kind.nbytes
                if size:
                    part = memory[starts[name] : starts[name] + size].view(kind.dtype)
                    batch.tensors[name].copy_(part.view(len(rows), *kind.shape), non_blocking=pinned)
        batch.queued()
        buffer.copied = batch.done
        return batch

    def _memory(self, buffer: StagingBuffer, total: int) -> tuple[torch.Tensor, bool]:
        """Memory of so many bytes, and whether it is page-locked."""
        if self.path == PATH:
            try:
                return buffer.take(total, pinned=True), True
            except CudaRefused as refusal:
                self._copy_instead(refusal)
        return buffer.take(total, pinned=False), False

    def _stop(self) -> None:
        for maker in self._makers:
            maker.thread.stop()
        if self._threads is not None:
            self._threads.stop()

    def _release(self) -> None:
        self._makers.clear()
        self._columns.clear()


def _makers(nbytes: int) -> int:
    """How many batches of so many bytes are made side by side."""
    return max(1, min(_MOST_MAKERS, usable_cpus() // 2, _MOST_BUFFERED // _rounded(nbytes)))


def _rounded(nbytes: int) -> int:
    return 1 << max(12, (nbytes - 1).bit_length())


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
