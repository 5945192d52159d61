"""Slots as pinned memory: a GPU copies out of them by itself.

Covers: registering a slot with CUDA, knowing when the GPU has finished with it. Does not cover: when that matters
(arena/inbox.py).

A copy with ``non_blocking=True`` may still be reading when the tensor it was called on is dropped. torch's own pinned
memory is watched by its allocator; memory that is registered is not, and which stream the copy went to cannot be asked.
So an event is recorded that covers everything the device has been asked to do so far, on every stream
(``cuCtxRecordEvent``, drivers from CUDA 12.5 on), and the slot is written again only after it. Where there is no such
call, slots are not registered, and torch's pin thread does what it always did.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import TYPE_CHECKING, Any

from legroom.loader.arena.slot import HEADER, Slot

if TYPE_CHECKING:
    import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_DONE = 0


class _Mark:
    """Events of all devices; None while they could not be recorded yet."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] | None = None


class CudaPinner:
    """Pins slots for the CUDA devices of this process."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def register(self, slot: Slot) -> bool:
        """Pin a slot's pages for as long as it is mapped; whether that worked."""
        import torch

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(slot.address, HEADER + slot.capacity, _PORTABLE)) != 0:
            _take_the_blame()
            return False
        owner = os.getpid()

        def unregister(address: int) -> None:
            if os.getpid() == owner:  # a forked child never registered anything
                runtime.cudaHostUnregister(address)

        slot.before_unmap = unregister
        return True

    def mark(self) -> object | None:
        """What covers all that the devices have been asked to do until now."""
        mark = _Mark()
        self._record(mark)
        return mark

    def done(self, mark: object) -> bool:
        """Whether they have done it."""
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
        """Pinned memory of torch's own."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _record(self, mark: _Mark) -> None:
        import torch

        # Asking the device about all its streams would break the capture of one of them.
        if torch.cuda.is_current_stream_capturing():
            return
        mark.events = []
        for device, context in self._active():
            event = ctypes.c_void_p()
            self._within(
                context, lambda event=event: self._driver.cuEventCreate(ctypes.byref(event), _DISABLE_TIMING)
            )
            if not event.value:
                continue
            if self._driver.cuCtxRecordEvent(context, event) != _DONE:
                # Not knowable by an event: wait for it here.
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
    """The pinner of this process, or None where slots cannot be registered safely."""
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
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return CudaPinner(driver)


def _take_the_blame() -> None:
    """A refused call leaves its error behind; without this the next innocent kernel would be blamed for it."""
    import torch

    try:
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        pass


def pinned(batch: Any) -> Any:
    """The batch with everything pinned that can be, by torch's rules; what lies in a registered slot already is."""
    import copy
    from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence

    if hasattr(batch, "pin_memory"):  # a tensor, or a type of somebody's own that knows how
        return batch.pin_memory()
    if isinstance(batch, (str, bytes)):
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(pinned, batch))
    try:
        if isinstance(batch, MutableMapping):
            same: Any = copy.copy(batch)
            same.update({key: pinned(value) for key, value in batch.items()})
            return same
        if isinstance(batch, MutableSequence):
            same = copy.copy(batch)
            for place, value in enumerate(batch):
                same[place] = pinned(value)
            return same
        if isinstance(batch, Mapping):
            return type(batch)({key: pinned(value) for key, value in batch.items()})  # type: ignore[call-arg]
        if isinstance(batch, Sequence):
            return type(batch)([pinned(value) for value in batch])  # type: ignore[call-arg]
    except TypeError:  # a container that cannot be made again
        if isinstance(batch, Mapping):
            return {key: pinned(value) for key, value in batch.items()}
        return [pinned(value) for value in batch]
    return batch
