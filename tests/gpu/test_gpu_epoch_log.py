"""The epoch's block on a real card: what this process holds, and what everybody does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from legroom.integrations.guard import epoch_lines, memory_snapshot  # noqa: E402

pytestmark = pytest.mark.gpu
MB = 1 << 20


def test_allocated_and_reserved_of_this_process_stand_beside_the_card() -> None:
    torch.cuda.init()
    before = memory_snapshot("at start").held[0]
    kept = torch.zeros(64 * MB, dtype=torch.uint8, device="cuda:0")
    after = memory_snapshot("at step 0")
    assert after.held[0].allocated - before.allocated == 64 * MB
    assert after.held[0].reserved >= after.held[0].allocated
    (card, *_) = after.cards
    assert card.used is not None and card.used >= after.held[0].reserved  # the context comes on top
    text = epoch_lines(0, None, [after])
    assert "cuda:0" in text and card.name in text
    del kept
