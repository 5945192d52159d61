"""Calls to NVIDIA's driver library (libcuda) that torch does not offer: batched copies, kernels, shareable memory.

The driver wants a context that is current in the calling thread. torch sets one only in threads that call the CUDA
runtime, so ``enter`` sets torch's (the device's primary context) where there is none. A failing call raises
``CudaRefused`` with the driver's own message. Tests pass a fake library.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from functools import cache
from typing import Any

import numpy as np

from legroom.messages import say

NDArray = np.ndarray[Any, Any]
LIBRARY = "libcuda.so.1"
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ, READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_*
_HAS_VIRTUAL_MEMORY, _HAS_DESCRIPTORS = 102, 103  # CU_DEVICE_ATTRIBUTE_*
# CU_MEMCPY_SRC_ACCESS_ORDER_ANY: the sources do not change, so they may be read at any time after the call.
_ANY_ORDER = 3
_OVERLAP_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


_maps: dict[tuple[int, int], int] = {}  # bytes by device and address: what ``map`` mapped in this process


def shared_maps(index: int) -> list[tuple[int, int]]:
    """Address and size of the memory of a device that this process maps beside torch's allocator."""
    return [(address, size) for (device, address), size in list(_maps.items()) if device == index]


class CudaRefused(Exception):
    """A CUDA call failed; the message is CUDA's where it has one."""


class _Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("device", c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (("source_order", c_int), ("source", _Location), ("destination", _Location), ("flags", c_uint))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Allocation(ctypes.Structure):
    _fields_ = (
        ("kind", c_int),
        ("handle_kind", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class DriverApi:
    """The driver's functions for one device, named by its CUDA index."""

    def __init__(self, index: int, library: Any = None) -> None:
        self.index = index
        self._library: Any = library if library is not None else _load()
        self._call("cuInit", c_uint(0))
        self._context: c_void_p | None = None

    def enter(self) -> None:
        """Make the device's primary context current in this thread, if no context is."""
        current = c_void_p()
        self._call("cuCtxGetCurrent", byref(current))
        if current.value:
            return
        if self._context is None:
            context = c_void_p()
            # Never released: torch keeps the context for the life of the process too.
            self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(self.index))
            self._context = context
        self._call("cuCtxSetCurrent", self._context)

    def uuid(self) -> str:
        """The UUID of the device, or of its MIG slice: the same in every process and container."""
        found = (c_ubyte * 16)()
        name = "cuDeviceGetUuid_v2" if self.has("cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        self._call(name, byref(found), c_int(self.index))
        return str(uuid.UUID(bytes=bytes(found)))

    def has(self, name: str) -> bool:
        """Whether the driver has this function."""
        try:
            getattr(self._library, name)
        except AttributeError:
            return False
        return True

    def attribute(self, number: int) -> int:
        """A number of CUdevice_attribute; 0 where the driver does not know it."""
        found = c_int()
        code = self._function("cuDeviceGetAttribute")(byref(found), c_int(number), c_int(self.index))
        return found.value if code == 0 else 0

    # Copies

    def why_no_batched_copies(self) -> str | None:
        """Why ``copy_batch`` cannot be used, or None."""
        if self.has("cuMemcpyBatchAsync") or self.has("cuMemcpyBatchAsync_v2"):
            return None
        return say("the driver has no cuMemcpyBatchAsync (it came with CUDA 12.8)")

    def copy_batch(self, to: NDArray, source: NDArray, sizes: NDArray, stream: int) -> None:
        """Queue one copy per element on ``stream``, by the copy engines: arrays of addresses and sizes (uint64).

        The sources must stay readable and unchanged until the copies are done.
        """
        count = len(sizes)
        attributes = _CopyAttributes(source_order=_ANY_ORDER, flags=_OVERLAP_COMPUTE)
        first = c_size_t(0)
        arguments = [
            to.ctypes.data_as(c_void_p),
            source.ctypes.data_as(c_void_p),
            sizes.ctypes.data_as(c_void_p),
            c_size_t(count),
            byref(attributes),
            byref(first),
            c_size_t(1),
        ]
        if self.has("cuMemcpyBatchAsync_v2"):
            self._call("cuMemcpyBatchAsync_v2", *arguments, c_void_p(stream))
            return
        failed = c_size_t()
        self._call("cuMemcpyBatchAsync", *arguments, byref(failed), c_void_p(stream))

    # Kernels

    def load_kernel(self, image: bytes, name: str) -> c_void_p:
        """A kernel of a compiled module (PTX or cubin). The module stays loaded for the life of the context."""
        module, kernel = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), ctypes.c_char_p(image))
        self._call("cuModuleGetFunction", byref(kernel), module, ctypes.c_char_p(name.encode()))
        return kernel

    def prepare_launch(
        self, kernel: c_void_p, blocks: int, threads: int, arguments: list[Any]
    ) -> Callable[[int], None]:
        """A function that queues a kernel on a stream. ``arguments`` are ctypes values, read again at each launch."""
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        one, none, grid, block = c_uint(1), c_uint(0), c_uint(blocks), c_uint(threads)
        function = self._function("cuLaunchKernel")

        def launch(stream: int, _kept: list[Any] = arguments) -> None:
            code = function(kernel, grid, one, one, block, one, one, none, c_void_p(stream), pointers, None)
            if code != 0:
                raise self._refused("cuLaunchKernel", code)

        return launch

    # Memory that several processes map

    def why_no_shared_memory(self) -> str | None:
        """Why GPU memory cannot be shared through file descriptors, or None."""
        if not self.has("cuMemCreate"):
            return say("the driver has no virtual memory management (it came with CUDA 10.2)")
        if not self.attribute(_HAS_VIRTUAL_MEMORY):
            return say("the device has no virtual memory management")
        if not self.attribute(_HAS_DESCRIPTORS):
            return say("the driver cannot export GPU memory as a file descriptor here")
        return None

    def granularity(self) -> int:
        """Allocations and maps are multiples of this many bytes."""
        found = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(found), byref(self._allocation()), c_uint(0))
        return found.value

    def create(self, size: int) -> int:
        """Allocate memory that can be exported; returns its handle."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(self._allocation()), c_uint64(0))
        return handle.value

    def export(self, handle: int) -> int:
        """A file descriptor for memory that this process created; the caller closes it."""
        found = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(found), c_uint64(handle), c_int(_FILE_DESCRIPTOR), c_uint64(0))
        return found.value

    def adopt(self, fd: int) -> int:
        """A handle for the memory of a descriptor that another process exported."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(_FILE_DESCRIPTOR))
        return handle.value

    def map(self, handle: int, size: int, access: int) -> int:
        """Map memory into this process's device address space; returns the address."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        try:
            self._call("cuMemMap", address, c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
            try:
                self.set_access(address.value, size, access)
            except CudaRefused:
                self._call("cuMemUnmap", address, c_size_t(size))
                raise
        except CudaRefused:
            self._call("cuMemAddressFree", address, c_size_t(size))
            raise
        _maps[self.index, address.value] = size
        return address.value

    def set_access(self, address: int, size: int, access: int) -> None:
        """Allow this device READ or READ_WRITE access to mapped memory."""
        allowed = _Access(_Location(_DEVICE, self.index), access)
        self._call("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(allowed), c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        """Undo ``map``. No queued work may use the memory any more."""
        _maps.pop((self.index, address), None)
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(size))

    def release(self, handle: int) -> None:
        """Drop this process's handle; mapped memory stays until it is unmapped."""
        self._call("cuMemRelease", c_uint64(handle))

    def _allocation(self) -> _Allocation:
        return _Allocation(_PINNED, _FILE_DESCRIPTOR, _Location(_DEVICE, self.index), None, _AllocationFlags())

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise CudaRefused(say("the driver has no {name}", name=name)) from None

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._function(name)(*arguments)
        if code != 0:
            raise self._refused(name, code)

    def _refused(self, call: str, code: int) -> CudaRefused:
        return CudaRefused(say("{call}: {words} ({code})", call=call, words=self._words(code), code=code))

    def _words(self, code: int) -> str:
        text = ctypes.c_char_p()
        try:
            self._function("cuGetErrorString")(c_int(code), byref(text))
        except CudaRefused:
            pass
        return (text.value or b"unknown error").decode(errors="replace")


@cache
def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as problem:
        raise CudaRefused(say("{library} cannot be loaded: {problem}", library=LIBRARY, problem=problem)) from problem
