"""Calls to NVIDIA's driver library, with a fake one: old drivers, devices that cannot share, calls that fail."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fake_libcuda import GRAIN, FakeLibrary
from legroom.gpu import cuda_driver_api
from legroom.gpu.cuda_driver_api import READ, CudaRefused, DriverApi, shared_maps


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (FakeLibrary("cuMemCreate"), "no virtual memory management (it came with CUDA 10.2)"),
        (FakeLibrary(attributes={102: 0, 103: 1}), "the device has no virtual memory management"),
        (FakeLibrary(attributes={102: 1, 103: 0}), "cannot export GPU memory as a file descriptor"),  # WSL
        (FakeLibrary(attributes={102: 1}), "cannot export GPU memory as a file descriptor"),  # an unknown attribute
        (FakeLibrary(failing={"cuDeviceGetAttribute": 801}), "the device has no virtual memory management"),
        (FakeLibrary(), None),
    ],
)
def test_devices_that_cannot_share_memory_say_why(library: FakeLibrary, words: str | None) -> None:
    found = DriverApi(0, library).why_no_shared_memory()
    assert found is None if words is None else found is not None and words in found


def test_memory_is_made_shared_and_given_back() -> None:
    library = FakeLibrary()
    api = DriverApi(1, library)
    assert api.granularity() == GRAIN and api.uuid() == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    handle = api.create(GRAIN)
    address = api.map(handle, GRAIN, READ)
    assert shared_maps(1) == [(address, GRAIN)] and shared_maps(0) == []
    assert api.export(handle) == 9 and api.adopt(9) == 6
    api.unmap(address, GRAIN)
    api.release(handle)
    assert shared_maps(1) == []
    assert library.calls[-3:] == ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_map_that_fails_is_undone(call: str) -> None:
    library = FakeLibrary(failing={call: 2})
    with pytest.raises(CudaRefused, match=rf"{call}: out of memory \(2\)"):
        DriverApi(0, library).map(5, GRAIN, READ)
    count = library.calls.count
    assert count("cuMemAddressFree") == (call != "cuMemAddressReserve") and not shared_maps(0)
    assert count("cuMemUnmap") == (call == "cuMemSetAccess")


def test_a_context_is_made_current_where_there_is_none() -> None:
    library = FakeLibrary()
    api = DriverApi(0, library)
    api.enter()
    assert library.context == 77
    api.enter()  # it is current
    library.context = 0  # in another thread
    api.enter()
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 1 and library.context == 77


@pytest.mark.parametrize(
    ("missing", "called"), [((), "cuMemcpyBatchAsync_v2"), (("cuMemcpyBatchAsync_v2",), "cuMemcpyBatchAsync")]
)
def test_the_newest_batched_copy_is_used(missing: tuple[str, ...], called: str) -> None:
    library = FakeLibrary(*missing)
    api = DriverApi(0, library)
    assert api.why_no_batched_copies() is None
    api.copy_batch(*(np.arange(3, dtype=np.uint64) for _ in range(3)), stream=7)
    assert library.calls[-1] == called


def test_an_old_driver_has_no_batched_copies() -> None:
    api = DriverApi(0, FakeLibrary("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"))
    assert "CUDA 12.8" in str(api.why_no_batched_copies())
    with pytest.raises(CudaRefused, match="the driver has no cuMemcpyBatchAsync"):
        api.copy_batch(*(np.arange(3, dtype=np.uint64) for _ in range(3)), stream=7)


def test_a_driver_that_cannot_start_or_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CudaRefused, match=r"cuInit: unknown error \(999\)"):
        DriverApi(0, FakeLibrary(failing={"cuInit": 999}))
    monkeypatch.setattr(cuda_driver_api, "LIBRARY", "libcuda-missing.so.1")
    cuda_driver_api._load.cache_clear()
    with pytest.raises(CudaRefused, match=r"libcuda-missing\.so\.1 cannot be loaded"):
        DriverApi(0)
    assert ctypes.sizeof(cuda_driver_api._Access) == 12  # two ints of the location, and the flags
