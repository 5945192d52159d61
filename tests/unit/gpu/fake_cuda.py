"""A fake torch with one GPU: what legroom.gpu.torch_cuda_device calls, and its entry in NVML."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

from legroom.gpu.torch_cuda_device import CudaDevice
from legroom.records.machine import Gpu, GpuProcess

MB, GB = 1 << 20, 1 << 30


class OutOfMemoryError(RuntimeError):
    """Stands for torch.OutOfMemoryError."""


class FakeCuda:
    """One GPU of ``size``; this process's context takes ``context``, other processes hold ``others``."""

    def __init__(self, size: int = 80 * GB, context: int = 500 * MB, others: int = 0) -> None:
        self.size, self.context, self.others = size, context, others
        self.live = self.held = self.top = self.held_top = 0
        self.fraction, self.started, self.retries = 1.0, False, 0
        self.emptied = 0
        self.capability = (9, 0)
        self.allocator = "native"
        self.queued: list[Any] = []

    # What a training step does.

    def take(self, size: int) -> None:
        if self.live + size > self.held:
            wanted = self.live + size
            if wanted > self.fraction * self.size or wanted > self.size - self.others - self.context:
                raise OutOfMemoryError("CUDA out of memory.")
            self.held = wanted
        self.live += size
        self.top, self.held_top = max(self.top, self.live), max(self.held_top, self.held)

    def give(self, size: int) -> None:
        self.live -= size

    # torch.cuda

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.started

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def mem_get_info(self, _: int) -> tuple[int, int]:
        self.started = True
        return self.size - self.others - self.context - self.held, self.size

    def memory_stats(self, _: int) -> dict[str, int]:
        return {"num_alloc_retries": self.retries, "num_ooms": 0, "inactive_split_bytes.all.current": 3 * MB}

    def memory_allocated(self, _: int) -> int:
        return self.live

    def memory_reserved(self, _: int) -> int:
        return self.held

    def max_memory_allocated(self, _: int) -> int:
        return self.top

    def max_memory_reserved(self, _: int) -> int:
        return self.held_top

    def reset_peak_memory_stats(self, _: int) -> None:
        self.top, self.held_top = self.live, self.held

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [
            {"device": 0, "blocks": [{"state": "inactive", "size": 2 * MB}, {"state": "active_allocated", "size": GB}]}
        ]

    def host_memory_stats(self) -> dict[str, int]:
        return {"allocated_bytes.current": 64 * MB}

    def get_device_capability(self, _: Any = None) -> tuple[int, int]:
        return self.capability

    def get_allocator_backend(self) -> str:
        return self.allocator

    def get_device_properties(self, _: int) -> Any:
        return SimpleNamespace(total_memory=self.size, uuid="abc")

    def synchronize(self, _: int) -> None:
        self.started = True

    def empty_cache(self) -> None:
        self.emptied += 1
        self.held = self.live

    def device(self, _: int) -> Any:
        return contextlib.nullcontext()

    def set_per_process_memory_fraction(self, fraction: float, _: int) -> None:
        self.fraction = fraction

    def get_per_process_memory_fraction(self, _: int) -> float:
        return self.fraction

    def _lazy_call(self, call: Any) -> None:
        self.queued.append(call)


class FakeDevice(CudaDevice):
    """A device with given NVML figures: ``pid`` is this process's pid there, None: not listed, -1: its own."""

    def __init__(self, cuda: FakeCuda, pid: int | None = -1) -> None:
        torch = SimpleNamespace(cuda=cuda, _C=SimpleNamespace(), uint8=None, strided="strided")
        torch.empty = self._empty
        super().__init__(torch, 0)
        self.cuda = cuda
        self.pid = os.getpid() if pid == -1 else pid

    def warm_up(self) -> None:
        self.cuda.started = True

    def _empty(self, size: int, **_: Any) -> Any:
        self.cuda.take(size)
        return Block(self.cuda, size)

    def nvml(self) -> Gpu | None:
        cuda = self.cuda
        own = cuda.context + cuda.held if cuda.started else 0
        listed = [GpuProcess(77777, cuda.others, "another")] if cuda.others else []
        if self.pid is not None and cuda.started:
            listed.append(GpuProcess(self.pid, own, "us" if self.pid == os.getpid() else None))
        used = cuda.others + own
        return Gpu(0, "fake", "GPU-abc", cuda.size, used, cuda.size - used, tuple(listed))


class Block:
    """Memory that is freed with its last reference."""

    def __init__(self, cuda: FakeCuda, size: int) -> None:
        self._cuda, self._size = cuda, size

    def __del__(self) -> None:
        self._cuda.give(self._size)
