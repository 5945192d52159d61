"""Path cuda-copy-engine: the GPU's copy engines fetch the rows, and its cores stay free for the training step.

Large rows are copied one by one from shared memory that is registered with CUDA, all rows of a batch with one call
(``cuMemcpyBatchAsync``). Consecutive rows are one copy. Rows that are too small for a copy each are gathered by the CPU
into page-locked memory, which is one more copy of the same call. A copy takes the CPU about two microseconds, so a
thread queues them while the training step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.loader.batches.cpu_gather import RowThreads
from legroom.loader.batches.cuda_calls_for_gather import Driver
from legroom.loader.batches.cuda_gather_base import CudaGatherer, QueuedBatch, RowLayout
from legroom.loader.batches.cuda_pinned import BatchMaker, StagingBuffer, column_offsets
from legroom.loader.batches.cuda_registered import RegisteredColumns

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
PATH = "cuda-copy-engine"
LEAST_ROW = 16 << 10  # smaller rows are staged: a copy has a fixed cost of 1.5 us, 16 kB cross PCIe in 0.3 us
_BUFFERS = 3
_AT_ONCE = 32  # copies per call: the driver locks the context meanwhile, and the training thread launches kernels


class CopyEngineGatherer(CudaGatherer):
    """Copies rows from registered memory, or from page-locked memory where the CPU gathers them first."""

    def __init__(
        self, driver: Driver, rows: Mapping[str, RowLayout], registered: RegisteredColumns, why: str, *, scattered: bool
    ) -> None:
        super().__init__(driver, PATH, why)
        self._rows, self._registered = dict(rows), registered
        self._staged = {name: kind for name, kind in rows.items() if scattered and 0 < kind.nbytes < LEAST_ROW}
        self.ahead = _BUFFERS - 1 if self._staged else 1
        self._maker = BatchMaker(driver, _BUFFERS if self._staged else 0, "legroom-copy")
        self._threads = RowThreads() if self._staged else None

    def _start(self, rows: NDArray) -> Callable[[], QueuedBatch]:
        batch = QueuedBatch(self.side, self._rows, len(rows))
        return self._maker.thread.start(partial(self._queue, rows, batch)).result

    def _queue(self, rows: NDArray, batch: QueuedBatch) -> QueuedBatch:
        copies = [
            consecutive(rows, kind.nbytes, self._registered.addresses[name], batch.tensors[name].data_ptr())
            for name, kind in self._rows.items()
            if kind.nbytes and name not in self._staged and len(rows)
        ]
        buffer = None
        if self._staged and len(rows):
            with self.side.queueing():  # page-locked memory belongs to this thread's device
                buffer = self._stage(rows, batch.tensors, copies)
        batch.before()
        if copies:
            to, source, sizes = (np.concatenate(column) for column in zip(*copies, strict=True))
            for first in range(0, len(sizes), _AT_ONCE):
                some = slice(first, first + _AT_ONCE)
                self.side.driver.copy_batch(to[some], source[some], sizes[some], self.side.stream)
        batch.queued()
        if buffer is not None:
            buffer.copied = batch.done
        return batch

    def _stage(
        self, rows: NDArray, parts: Mapping[str, torch.Tensor], copies: list[tuple[NDArray, NDArray, NDArray]]
    ) -> StagingBuffer:
        """Gather small rows into page-locked memory and add one copy per column."""
        assert self._threads is not None
        starts, total = column_offsets(self._staged, len(rows))
        buffer = self._maker.next_buffer()
        memory = buffer.take(total, pinned=True)
        filled = memory.numpy()
        for name, kind in self._staged.items():
            size = len(rows) * kind.nbytes
            self._threads.copy(self._registered.array(name), rows, filled[starts[name] : starts[name] + size])
            copies.append(
                (
                    np.array([parts[name].data_ptr()], np.uint64),
                    np.array([memory.data_ptr() + starts[name]], np.uint64),
                    np.array([size], np.uint64),
                )
            )
        return buffer

    def _stop(self) -> None:
        self._maker.thread.stop()
        if self._threads is not None:
            self._threads.stop()

    def _release(self) -> None:
        self._maker.buffers.clear()
        self._registered.release()


def consecutive(rows: NDArray, nbytes: int, source: int, target: int) -> tuple[NDArray, NDArray, NDArray]:
    """The copies of these rows: targets, sources and sizes; a run of consecutive rows is one copy."""
    starts = np.flatnonzero(np.concatenate(([True], np.diff(rows) != 1)))
    counts = np.diff(starts, append=len(rows))
    return (
        (target + starts * nbytes).astype(np.uint64),
        (source + rows[starts].astype(np.int64) * nbytes).astype(np.uint64),
        (counts * nbytes).astype(np.uint64),
    )
