"""Registers slots as pinned memory, so that a GPU copies out of them directly, and pins whole batches.

A copy with ``non_blocking=True`` may still read after the tensor it was called on was deleted. torch's allocator tracks
its own pinned memory, but not registered memory, and the stream of the copy is unknown. So an event is recorded that
covers all work the device was given so far, on every stream (``cuCtxRecordEvent``, drivers since CUDA 12.5), and the
slot is written again only after it. Where the driver lacks that call, slots are not registered, and torch's pin thread
copies as usual.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from legroom.loader.dataloader.memory_slots import HEADER, Slot

if TYPE_CHECKING:
    import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_DONE = 0


class _Mark:
    """Events of all devices; None if they could not be recorded yet."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] | None = None


class CudaPinner:
    """Pins slots for the CUDA devices of this process."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def register(self, slot: Slot) -> bool:
        """Pin the pages of a slot for as long as it is mapped; whether that worked."""
        import torch

        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(slot.address, HEADER + slot.capacity, _PORTABLE)) != 0:
            _clear_error()
            return False
        owner = os.getpid()

        def unregister(address: int) -> None:
            if os.getpid() == owner:  # a forked child has registered nothing
                runtime.cudaHostUnregister(address)

        slot.before_unmap = unregister
        return True

    def mark(self) -> object | None:
        """An object that covers all work that the devices were given until now."""
        mark = _Mark()
        self._record(mark)
        return mark

    def done(self, mark: object) -> bool:
        """Whether that work is done."""
        assert isinstance(mark, _Mark)
        if mark.events is None:
            self._record(mark)
            return False
        while mark.events:
            context, event = mark.events[-1]
            if self._driver.cuEventQuery(event) != _DONE:
                return False
            self._within(context, lambda event=event: self._driver.cuEventDestroy_v2(event))
            mark.events.pop()
        return True

    def empty(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of torch."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _record(self, mark: _Mark) -> None:
        import torch

        # An event for all streams of the device would break the capture of one of them.
        if torch.cuda.is_current_stream_capturing():
            return
        mark.events = []
        for device, context in self._active():
            event = ctypes.c_void_p()
            self._within(context, lambda event=event: self._driver.cuEventCreate(ctypes.byref(event), _DISABLE_TIMING))
            if not event.value:
                continue
            if self._driver.cuCtxRecordEvent(context, event) != _DONE:
                # No event could be recorded: wait here.
                torch.cuda.synchronize(device)
                self._within(context, lambda event=event: self._driver.cuEventDestroy_v2(event))
                continue
            mark.events.append((context, event))

    def _active(self) -> list[tuple[int, ctypes.c_void_p]]:
        """The devices that this process uses, and their contexts."""
        import torch

        found = []
        for device in range(torch.cuda.device_count()):
            flags, active = ctypes.c_uint(), ctypes.c_int()
            self._driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            if not active.value:
                continue
            if device not in self._contexts:
                context = ctypes.c_void_p()
                if self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) != _DONE:
                    continue
                self._contexts[device] = context
            found.append((device, self._contexts[device]))
        return found

    def _within(self, context: ctypes.c_void_p, call: Any) -> None:
        self._driver.cuCtxPushCurrent_v2(context)
        try:
            call()
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@cache
def cuda_pinner() -> CudaPinner | None:
    """The pinner of this process; None where slots cannot be registered safely."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        names = ("cuCtxRecordEvent", "cuEventCreate", "cuEventQuery", "cuEventDestroy_v2", "cuCtxPushCurrent_v2",
                 "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxGetState")  # fmt: skip
        for name in names:
            getattr(driver, name).restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    torch.cuda.init()
    return CudaPinner(driver)


def _clear_error() -> None:
    """A call that failed leaves its error behind, which the next kernel would report."""
    import torch

    try:
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        pass


def pin_batch(batch: Any) -> Any:
    """The batch with everything pinned that torch would pin; tensors in a registered slot already are."""
    # A tensor, or a user's type with this method.
    return map_batch(batch, lambda one: one.pin_memory() if hasattr(one, "pin_memory") else None)


def map_batch(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A batch of the same structure; what ``change`` returns takes the place of a part, unless that is None."""
    import copy
    from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence

    if (changed := change(batch)) is not None:
        return changed
    if isinstance(batch, (str, bytes)):
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_batch(one, change) for one in batch))
    try:
        if isinstance(batch, MutableMapping):
            same: Any = copy.copy(batch)
            same.update({key: map_batch(value, change) for key, value in batch.items()})
            return same
        if isinstance(batch, MutableSequence):
            same = copy.copy(batch)
            for index, value in enumerate(batch):
                same[index] = map_batch(value, change)
            return same
        if isinstance(batch, Mapping):
            return type(batch)({key: map_batch(value, change) for key, value in batch.items()})  # type: ignore[call-arg]
        if isinstance(batch, Sequence):
            return type(batch)([map_batch(value, change) for value in batch])  # type: ignore[call-arg]
    except TypeError:  # a container that cannot be constructed from its items
        if isinstance(batch, Mapping):
            return {key: map_batch(value, change) for key, value in batch.items()}
        return [map_batch(value, change) for value in batch]
    return batch
