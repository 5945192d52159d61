"""The epoch's block on a real gpu: what this process holds, and what everybody does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from legroom.integrations.guard import epoch_lines, held_by_torch, memory_snapshot  # noqa: E402
from legroom.probe.gpu_devices import gpu_pools, gpus  # noqa: E402
from legroom.probe.host_files_and_syscalls import Host  # noqa: E402

pytestmark = pytest.mark.gpu
MB = 1 << 20


def test_allocated_and_reserved_memory_of_this_process_and_of_the_gpu() -> None:
    torch.cuda.init()
    _, before, _ = held_by_torch(torch)[0]
    kept = torch.zeros(64 * MB, dtype=torch.uint8, device="cuda:0")
    device, allocated, reserved = held_by_torch(torch)[0]
    assert device == "cuda:0" and allocated - before == 64 * MB and reserved >= allocated
    (gpu, *_) = gpu_pools(gpus(Host()))
    assert gpu.used is not None and gpu.used >= reserved  # the context comes on top
    text = epoch_lines(0, None, [memory_snapshot("at step 0")])
    assert "cuda:0" in text and gpu.name in text
    del kept
