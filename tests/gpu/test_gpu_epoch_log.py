"""The epoch's block on a real gpu: what this process holds, and what everybody does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from legroom.integrations.guard import epoch_lines, memory_snapshot  # noqa: E402

pytestmark = pytest.mark.gpu
MB = 1 << 20


def test_allocated_and_reserved_memory_of_this_process_and_of_the_gpu() -> None:
    torch.cuda.init()
    before = memory_snapshot("at start").torch[0]
    kept = torch.zeros(64 * MB, dtype=torch.uint8, device="cuda:0")
    after = memory_snapshot("at step 0")
    assert after.torch[0].allocated - before.allocated == 64 * MB
    assert after.torch[0].reserved >= after.torch[0].allocated
    (gpu, *_) = after.gpus
    assert gpu.used is not None and gpu.used >= after.torch[0].reserved  # the context comes on top
    text = epoch_lines(0, None, [after])
    assert "cuda:0" in text and gpu.name in text
    del kept
