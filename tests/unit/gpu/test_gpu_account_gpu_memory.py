"""account: categories add up, and the context is measured, bounded or assumed."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import GB, MB, FakeCuda, FakeDevice

from legroom.gpu.account_gpu_memory import account_device, measure_overhead, used_before_context
from legroom.probe.nvml import bytes_of_grown


class FakeTensor:
    """The attributes of a tensor that account() reads."""

    layout = "strided"
    grad = None

    def __init__(self, size: int, address: int, grad: FakeTensor | None = None, device: str = "cuda") -> None:
        self.device = SimpleNamespace(type=device, index=0 if device == "cuda" else None)
        self._storage = SimpleNamespace(nbytes=lambda: size, data_ptr=lambda: address)
        self.grad = grad

    def untyped_storage(self) -> Any:
        return self._storage


def test_account_adds_up() -> None:
    cuda = FakeCuda(others=5 * GB)
    device = FakeDevice(cuda)
    device.warm_up()
    device.torch.is_tensor = lambda one: isinstance(one, FakeTensor)
    weight = FakeTensor(GB, 1, FakeTensor(GB, 2))
    tied = FakeTensor(GB, 1)
    model = SimpleNamespace(
        parameters=lambda recurse: [weight, tied], buffers=lambda recurse: [FakeTensor(7, 8, device="cpu")]
    )
    optimizer = SimpleNamespace(
        param_groups=[{"params": [weight]}], state={weight: {"m": FakeTensor(GB, 3), "v": FakeTensor(GB, 4), "step": 3}}
    )
    cuda.take(9 * GB)
    cuda.give(3 * GB)
    found = account_device(device, model, optimizer)
    assert (found.weights, found.gradients, found.optimizer) == (GB, GB, 2 * GB)
    assert (found.activations, found.cached) == (2 * GB, 3 * GB)
    assert found.overhead.bytes == cuda.context and found.others == 5 * GB
    assert found.unknown == 0
    assert found.used == 9 * GB + cuda.context + 5 * GB
    assert found.fragmentation == pytest.approx(3 * MB / (9 * GB))
    assert found.largest_free == 2 * MB and found.pinned == 64 * MB
    assert found.spilled is None and "Windows" in found.reasons["spilled"]


def test_account_without_nvml_gives_reasons() -> None:
    cuda = FakeCuda(others=30 * GB)
    device = FakeDevice(cuda, pid=None)
    device.warm_up()
    nothing = SimpleNamespace(parameters=lambda recurse: [], buffers=lambda recurse: [])
    found = account_device(device, nothing, SimpleNamespace(param_groups=[], state={}))
    assert found.overhead.bytes is None and found.others is None
    assert found.unknown == 30 * GB + cuda.context
    assert "overhead" in found.reasons and "others" in found.reasons


@pytest.mark.parametrize("counted", [True, False])
def test_a_copy_that_processes_share_counts_once(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers may count it in NVML's figure of each process that maps it, or of none."""
    cuda = FakeCuda(context=520 * MB, others=25 * GB)  # 20 GB of them are the copy
    device = FakeDevice(cuda)
    device.warm_up()
    monkeypatch.setattr(device, "shared_maps", lambda: [(1 << 40, 20 * GB)])
    device.torch.is_tensor = lambda one: isinstance(one, FakeTensor)
    if counted:
        found = device.nvml()
        assert found is not None and found.processes is not None
        more = [replace(one, used=(one.used or 0) + 20 * GB) for one in found.processes if one.pid == os.getpid()]
        rest = [one for one in found.processes if one.pid != os.getpid()]
        monkeypatch.setattr(device, "nvml", lambda: replace(found, processes=(*more, *rest)))
    model = SimpleNamespace(parameters=lambda recurse: [FakeTensor(GB, (1 << 40) + 7 * MB)], buffers=lambda recurse: [])
    account = account_device(device, model, SimpleNamespace(param_groups=[], state={}))
    assert account.shared == 20 * GB and account.weights == 0
    assert account.overhead.bytes == 520 * MB and account.others == 5 * GB and account.unknown == 0
    parts = (account.shared, account.overhead.bytes or 0, account.others or 0)
    assert sum(parts) == account.used


# The CUDA context.


def test_context_from_the_nvml_entry_that_grows() -> None:
    """NVML lists host pids: the entry that grows with this process is this process."""
    cuda = FakeCuda(others=3 * GB)
    found = measure_overhead(_started(cuda, 4242))
    assert (found.bytes, found.how) == (cuda.context, "measured")
    assert "host pids" in found.source
    assert cuda.live == 0


def test_context_from_growth_of_used_memory() -> None:
    cuda = FakeCuda(others=30 * GB)
    device = FakeDevice(cuda, pid=None)
    before = used_before_context(device)
    assert before is not None
    device.warm_up()
    found = measure_overhead(device, before)
    assert (found.bytes, found.how) == (cuda.context, "bounded")
    assert used_before_context(device) is None


def test_context_bounded_or_assumed() -> None:
    alone = measure_overhead(_started(FakeCuda(), None))
    assert (alone.bytes, alone.how) == (500 * MB, "bounded")
    crowded = measure_overhead(_started(FakeCuda(others=30 * GB), None))
    assert crowded.how == "assumed" and "1 GB" in crowded.source


def test_change_by_other_processes_is_not_the_context() -> None:
    cuda = FakeCuda(others=30 * GB)
    device = FakeDevice(cuda, pid=None)
    before = used_before_context(device)
    device.warm_up()
    cuda.others -= 10 * GB
    assert measure_overhead(device, before).how == "assumed"


def test_two_processes_that_grew_alike() -> None:
    assert bytes_of_grown({1: 10 * GB, 2: 5 * GB}, {1: 10 * GB, 2: 5 * GB + 46 * MB}, 46 * MB) == 5 * GB
    assert bytes_of_grown({1: 0, 2: 0}, {1: 46 * MB, 2: 46 * MB}, 46 * MB) is None


def _started(cuda: FakeCuda, pid: int | None) -> FakeDevice:
    device = FakeDevice(cuda, pid)
    device.warm_up()
    return device
