"""The calls to torch.cuda and the CUDA runtime that the CUDA gatherers need; tests replace the Driver with a fake.

Each failing CUDA call becomes ``CudaRefused`` with CUDA's message. A failed ``cudaHostRegister`` leaves its error code
in the thread, and torch would report it for the next kernel. So a small kernel is launched that takes that error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.errors import UsageError
from legroom.gpu.cuda_driver_api import CudaRefused, DriverApi
from legroom.loader.batches.cuda_kernel import GatherKernel
from legroom.messages import counted, phrase, say
from legroom.system.lazy_and_optional_imports import require

if TYPE_CHECKING:
    import torch

_PORTABLE, _MAPPED, _READ_ONLY = 1, 2, 8  # cudaHostRegister*
# CUDA documents all three; with unified addressing the last one suffices.
_FLAGS = (_READ_ONLY | _PORTABLE | _MAPPED, _READ_ONLY)
_TYPES = {8: "<i8", 4: "<i4", 2: "<i2", 1: "|u1"}

NDArray = np.ndarray[Any, Any]


class Driver:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self._torch: Any = torch
        self._api: DriverApi | None = None
        self._raw_current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # torch's own is slow
        self._last_current: Any = None

    def api(self) -> DriverApi:
        """The driver library's own functions; CudaRefused where it cannot be loaded."""
        if self._api is None:
            self._api = DriverApi(self.device.index or 0)
        return self._api

    def why_no_copy_engines(self) -> str | None:
        """Why rows cannot be copied by the copy engines, or None."""
        try:
            return self.api().why_no_batched_copies()
        except CudaRefused as refusal:
            return str(refusal)

    def copy_batch(self, to: NDArray, source: NDArray, sizes: NDArray, stream: Any) -> None:
        """Queue copies on ``stream`` by the copy engines, one per element: addresses and sizes as uint64."""
        self.api().enter()
        self.api().copy_batch(to, source, sizes, stream.cuda_stream)

    def gather_kernel(self) -> GatherKernel:
        """The gather kernel of few blocks; CudaRefused where it cannot be compiled."""
        self.api().enter()
        capability = self._torch.cuda.get_device_capability(self.device)
        return GatherKernel(self.api(), capability, self._torch.version.cuda)

    def stream(self) -> Any:
        """A new stream."""
        return self._torch.cuda.Stream(self.device)

    def current(self) -> Any:
        """The current stream of this thread."""
        last = self._last_current
        if last is not None and self._raw_current(self.device.index or 0) == last.cuda_stream:
            return last
        found = self._torch.cuda.current_stream(self.device)
        if self._raw_current is not None:
            self._last_current = found
        return found

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which this thread's work goes to ``stream``."""
        context: AbstractContextManager[Any] = self._torch.cuda.stream(stream)
        return context

    def mark(self, stream: Any, *, timing: bool = False) -> Any:
        """An event after all work queued on ``stream``."""
        event = self._torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Record that ``stream`` uses ``tensor`` too, so that its memory is not reused before that is done."""
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Wait until all streams of the device are done."""
        self._torch.cuda.synchronize(self.device)

    def row_numbers(self, rows: NDArray) -> torch.Tensor:
        """Copy row numbers to the device on the current stream.

        From pinned memory: before a copy from other memory CUDA waits until the stream is empty. torch does not reuse
        the pinned block before the copy is done.
        """
        staged: torch.Tensor = self._torch.empty(len(rows), dtype=self._torch.int64, device="cpu", pin_memory=True)
        staged.numpy()[:] = rows
        return staged.to(self.device, non_blocking=True)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory."""
        try:
            found: torch.Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as problem:
            raise CudaRefused(first_line(problem)) from problem
        return found

    def at(self, address: int, words: int, width: int) -> torch.Tensor:
        """GPU memory from ``address`` on, as a tensor of integers of ``width`` bytes. It must stay mapped."""
        return self.at_all([(address, words)], width)[0]

    def at_all(self, places: Iterable[tuple[int, int]], width: int) -> list[torch.Tensor]:
        """The same for several addresses and numbers of words. Entering the device takes as long as one tensor."""
        found: list[torch.Tensor] = []
        with self._torch.cuda.device(self.device):
            for address, words in places:
                found.append(self._torch.as_tensor(_Window(address, words, width), device=self.device))
                if found[-1].data_ptr() != address:
                    raise CudaRefused(say("torch copies GPU memory instead of using it in place"))
        return found

    def empty(self, words: int, width: int) -> torch.Tensor:
        """Memory of torch's allocator for integers of ``width`` bytes."""
        kind = getattr(self._torch, {8: "int64", 4: "int32", 2: "int16", 1: "uint8"}[width])
        found: torch.Tensor = self._torch.empty(words, dtype=kind, device=self.device)
        return found

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of GPU memory."""
        free, total = self._torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def why_no_registering(self) -> str | None:
        """Why no host memory can be registered, or None."""
        if self._torch.version.hip is not None:
            return say("torch is built for ROCm; registering read-only memory is not attempted there")
        return None

    def register(self, address: int, length: int) -> None:
        """Lock the pages of a read-only map and make them readable by the device."""
        words = ""
        with self._torch.cuda.device(self.device):
            for flags in _FLAGS:
                answer = self._torch.cuda.cudart().cudaHostRegister(address, length, flags)
                if int(answer) == 0:
                    return
                words = self._refused(answer)
        raise CudaRefused(words)

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        with self._torch.cuda.device(self.device):
            answer = self._torch.cuda.cudart().cudaHostUnregister(address)
            if int(answer) != 0:
                raise CudaRefused(self._refused(answer))

    def window(self, address: int, words: int, width: int) -> torch.Tensor:
        """Registered memory from ``address`` on, as a tensor on the device of integers of ``width`` bytes."""
        with self._torch.cuda.device(self.device):
            there = _device_address(address)
            # One integer first: if torch copied instead, it would copy all of the memory.
            for count in (1, words):
                seen: torch.Tensor = self._torch.as_tensor(_Window(there, count, width), device=self.device)
                if seen.data_ptr() != there or seen.device != self.device:
                    raise CudaRefused(say("torch copies registered memory instead of reading it in place"))
        return seen

    def _refused(self, answer: Any) -> str:
        """CUDA's message for an error, which is cleared so that the next kernel does not report it."""
        words = self._torch.cuda.cudart().cudaGetErrorString(answer)
        try:
            self._torch.ones(1, device=self.device).add_(1)
        except RuntimeError:
            pass  # the same error
        return say("{words} ({code})", words=words, code=int(answer))


class _Window:
    """An address with ``__cuda_array_interface__``, which torch accepts as a CUDA array."""

    def __init__(self, address: int, words: int, width: int) -> None:
        self.__cuda_array_interface__: dict[str, object] = {
            "data": (address, False),  # torch refuses an array marked read-only
            "shape": (words,),
            "strides": None,
            "typestr": _TYPES[width],
            "version": 3,
        }


def open_driver(device: object) -> Driver:
    """The driver for a device: "cuda", "cuda:1", 1 or a torch.device."""
    torch = require(
        "torch",
        "torch",
        phrase("batches on a CUDA device"),
        instead=(phrase("format='numpy' without a device needs no torch"),),
    )
    cuda: Any = torch.cuda
    try:
        asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(str(device))
    except (RuntimeError, TypeError, ValueError) as problem:
        raise UsageError(
            say("{device!r} is not a device", device=device), why=first_line(problem), fix=("device='cuda'",)
        ) from None
    if asked.type != "cuda":
        raise UsageError(
            say("{device} is not a CUDA device", device=asked), fix=(say("device='cuda', or device=None"),)
        )
    if not cuda.is_available():
        raise UsageError(
            say("CUDA is not available"),
            why=say("torch {version} is built without CUDA", version=torch.__version__)
            if torch.version.cuda is None
            else say("torch {version} finds no usable GPU", version=torch.__version__),
            fix=(say("device=None returns batches in RAM"), say("list the GPUs:\nlegroom doctor")),
        )
    try:
        index = cuda.current_device() if asked.index is None else asked.index
        count = cuda.device_count()
        if index >= count:
            raise UsageError(
                say("cuda:{index} does not exist", index=index),
                why=say(
                    "torch sees {devices}",
                    devices=counted(count, phrase("{count} CUDA device"), phrase("{count} CUDA devices")),
                ),
                fix=(say("check CUDA_VISIBLE_DEVICES"),),
            )
        cuda.init()
    except RuntimeError as problem:  # a fork of a process that used CUDA, a broken driver
        raise cannot_use_cuda(first_line(problem)) from problem
    return Driver(torch.device("cuda", index))


def cannot_use_cuda(why: str) -> UsageError:
    """The error for a process that cannot use CUDA although it is available."""
    return UsageError(
        say("this process cannot use CUDA"),
        why=why,
        fix=(
            say(
                "once CUDA is in use, start processes with spawn or forkserver: "
                "multiprocessing.set_start_method('spawn')"
            ),
            say("call data.batches in the training process; it needs no workers"),
        ),
    )


def first_line(problem: BaseException) -> str:
    """The first line of an exception's message: CUDA's have many."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]


def _device_address(address: int) -> int:
    """The device address of registered memory: nearly always the same as on the host."""
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2
    except (OSError, AttributeError):
        return address
    found = ctypes.c_uint64()
    code = ask(ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
    if code != 0:
        raise CudaRefused(say("the device has no address for registered memory (CUDA error {code})", code=code))
    return found.value
