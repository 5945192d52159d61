"""A CUDA device made of the processor's memory: what is asked of it is written down and done at once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from fake_gpu_memory import FakeMemory

from legroom.gpu.cuda_driver_api import CudaRefused


class FakeEvent:
    def __init__(self, log: list[Any], stream: FakeStream, when: float = 0.0) -> None:
        self.log, self.stream, self.when = log, stream, when

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        """Milliseconds on the GPU."""
        return 1e3 * (other.when - self.when)

    def synchronize(self) -> None:
        self.log.append(("wait for", self.stream.name))

    def record(self, stream: FakeStream) -> None:
        self.log.append(("mark", stream.name))


class FakeStream:
    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name
        self.cuda_stream = hash(name)

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append((self.name, "waits for", event.stream.name))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.name))


class FakeDriver:
    """Stands in for Driver; ``refuse`` names the calls that say no."""

    def __init__(self, *refuse: str, free: int = 64 << 30, total: int = 80 << 30) -> None:
        self.device = torch.device("cpu")
        self.log: list[Any] = []
        self.refuse = set(refuse)
        self.registered: dict[int, int] = {}
        self.sent: list[str] = []  # streams that row numbers were sent on, and waits for everything
        self.lent: list[tuple[torch.Tensor, str]] = []  # and the other streams that use them
        self.pinned_sizes: list[int] = []
        self.copies: list[int] = []  # copies of each call to the copy engines
        self.room = free, total
        self.shared_memory = FakeMemory()
        self.gpu_clock = 0.0  # seconds that the GPU has worked
        self._consumer = FakeStream(self.log, "consumer")
        self._thread = threading.local()

    def stream(self) -> FakeStream:
        return FakeStream(self.log, "side")

    def current(self) -> FakeStream:
        found: FakeStream = getattr(self._thread, "stream", self._consumer)
        return found

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._thread.stream = self.current(), stream
        self.log.append(("on", stream.name))
        try:
            yield
        finally:
            self._thread.stream = before
            self.log.append(("off", stream.name))

    def mark(self, stream: FakeStream, *, timing: bool = False) -> FakeEvent:
        self.log.append(("mark", stream.name))
        return FakeEvent(self.log, stream, self.gpu_clock)

    def record_use(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.lent.append((tensor, stream.name))

    def row_numbers(self, rows: np.ndarray[Any, Any]) -> torch.Tensor:
        self.sent.append(self.current().name)
        return torch.as_tensor(rows.copy())

    def synchronize(self) -> None:
        self.sent.append("synchronize")

    def pinned(self, nbytes: int) -> torch.Tensor:
        if "pinned" in self.refuse or f"pinned {nbytes}" in self.refuse:
            raise CudaRefused("out of memory (2)")
        self.pinned_sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def memory(self) -> tuple[int, int]:
        return self.room

    def why_no_registering(self) -> str | None:
        return None

    def register(self, address: int, length: int) -> None:
        if "register" in self.refuse:
            raise CudaRefused("operation not permitted (800)")
        assert address not in self.registered
        self.registered[address] = length

    def unregister(self, address: int) -> None:
        if "unregister" in self.refuse:
            raise CudaRefused("invalid argument (1)")
        del self.registered[address]

    def window(self, address: int, words: int, width: int) -> torch.Tensor:
        if "window" in self.refuse:
            raise CudaRefused("torch does not see registered memory in place")
        start = next(base for base, length in self.registered.items() if base <= address < base + length)
        assert address + words * width <= start + self.registered[start]
        kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
        return torch.frombuffer((ctypes.c_char * (words * width)).from_address(address), dtype=kind)

    def api(self) -> FakeMemory:
        if "api" in self.refuse:
            raise CudaRefused("libcuda.so.1 cannot be loaded")
        return self.shared_memory

    def at(self, address: int, words: int, width: int) -> torch.Tensor:
        kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
        return torch.frombuffer((ctypes.c_char * (words * width)).from_address(address), dtype=kind)

    def at_all(self, places: Iterable[tuple[int, int]], width: int) -> list[torch.Tensor]:
        return [self.at(address, words, width) for address, words in places]

    def empty(self, words: int, width: int) -> torch.Tensor:
        return torch.empty(words, dtype={8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])

    def why_no_copy_engines(self) -> str | None:
        return "the driver has no cuMemcpyBatchAsync" if "copy_batch" in self.refuse else None

    def copy_batch(self, to: Any, source: Any, sizes: Any, stream: FakeStream) -> None:
        assert to.dtype == source.dtype == sizes.dtype == np.uint64 and stream.name == "side"
        self.copies.append(len(sizes))
        for target, start, size in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, start, size)

    def gather_kernel(self) -> FakeKernel:
        if "kernel" in self.refuse:
            raise CudaRefused("libnvrtc.so.13 cannot be loaded")
        return FakeKernel(self)


class FakeKernel:
    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def of_column(self, source: int, row_bytes: int, grid: object = None) -> Callable[[int, int, int, int], None]:
        if "compile" in self._driver.refuse:  # a GPU that NVRTC does not know
            raise CudaRefused("NVRTC: invalid value for --gpu-architecture (5)")

        def gather(rows: int, target: int, count: int, stream: int) -> None:
            self._driver.log.append(("kernel", "side" if stream == hash("side") else "consumer"))
            for place, row in enumerate((ctypes.c_int64 * count).from_address(rows)):
                ctypes.memmove(target + place * row_bytes, source + row * row_bytes, row_bytes)

        return gather
