"""A side stream, and how batches made on it come to the consumer's stream.

Covers: queueing, handing over, how far the processor may run ahead, one batch ahead of time. Does not cover: how a
batch is made.

Ownership: memory of a batch is taken from torch's allocator on the side stream. At the hand-over the consumer's stream
is made to wait until the batch is whole, and the allocator is told that the memory is in use there too, so that a
batch dropped while the GPU still works on it is not overwritten by the next one. Memory comes back when the GPU is
done with it and not when the processor is, which may be many steps ahead; so it is not let further ahead than
``STEPS_AHEAD`` batches, or each of those would hold memory of its own.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.errors import UsageError
from legroom.loader.cuda.driver import Driver, cannot_use_cuda
from legroom.words import say

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
STEPS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Queued:
    """A batch that the side stream will have made when ``done`` has come."""

    tensors: Mapping[str, torch.Tensor]
    done: Any


class Lane:
    """One side stream of a device."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream()
        self._handed: deque[Any] = deque()

    def wait_for_room(self) -> None:
        """Wait until the consumer's stream is at most so many batches behind; at once where it is."""
        while len(self._handed) > STEPS_AHEAD:
            self._handed.popleft().synchronize()

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """This thread's work goes to the side stream.

        Tensors made here are ordinary ones: a batch begun under ``inference_mode`` may be trained on.
        """
        import torch

        with torch.inference_mode(False), self.driver.on(self.stream):
            yield

    def queued(self, tensors: Mapping[str, torch.Tensor]) -> Queued:
        """What has just been queued, and the event behind it."""
        return Queued(tensors, self.driver.mark(self.stream))

    def hand_over(self, batch: Queued) -> dict[str, torch.Tensor]:
        """The batch, usable on this thread's current stream; nobody waits but that stream."""
        consumer = self.driver.current()
        consumer.wait_event(batch.done)
        for tensor in batch.tensors.values():
            self.driver.lend(tensor, consumer)
        self._handed.append(self.driver.mark(consumer, sleep=True))
        return dict(batch.tensors)

    def drain(self) -> None:
        """Wait until everything queued here is done."""
        self._handed.clear()
        self.stream.synchronize()


class CudaGatherer(ABC):
    """What the CUDA gatherers share: one batch ahead, closing, and what a forked child may not do."""

    path: str
    why: str

    def __init__(self, driver: Driver, path: str, why: str) -> None:
        self.path, self.why = path, why
        self.lane = Lane(driver)
        self._ahead: tuple[NDArray, Callable[[], Queued]] | None = None
        self._pid = os.getpid()
        self._open = True

    def gather(self, rows: NDArray) -> dict[str, torch.Tensor]:
        """The batch of these rows, ordered on the current stream; begun already where ``begin`` was told so."""
        self._usable()
        ahead, self._ahead = self._ahead, None
        ready = ahead[1] if ahead is not None and ahead[0] is rows else self._start(rows)
        return self.lane.hand_over(ready())

    def begin(self, rows: NDArray) -> None:
        """Start on the batch that will be asked for next: the GPU makes it while it computes on this one."""
        self._usable()
        self._ahead = rows, self._start(rows)

    def close(self) -> None:
        """Wait for what is queued, let go of everything; batches that were given stay valid."""
        if not self._open or self._pid != os.getpid():
            return
        self._open = False
        self._ahead = None
        self._stop()
        self.lane.drain()
        self._release()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # Streams may be gone at exit, and the kernel takes everything back.
        if not at_exit() and getattr(self, "_open", False):
            self.close()

    def _usable(self) -> None:
        if self._pid != os.getpid():
            raise cannot_use_cuda(say("it was forked from process {pid}, which uses CUDA", pid=self._pid))
        if not self._open:
            raise UsageError(
                say("the batches are closed"), why=say("close() was called"), fix=(say("make them again"),)
            )

    @abstractmethod
    def _start(self, rows: NDArray) -> Callable[[], Queued]:
        """Start on a batch; what is returned gives it, and waits for it where it must."""

    def _stop(self) -> None:
        """End threads of one's own, before the stream is waited for."""
        return

    @abstractmethod
    def _release(self) -> None:
        """Let go of memory; nothing is queued any more."""
