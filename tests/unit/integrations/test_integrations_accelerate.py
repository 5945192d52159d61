"""The guard in a real loop under accelerate."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.fake_watch import FakeWatch, filling
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*")


@pytest.fixture(scope="module", autouse=True)
def _framework() -> None:
    """Imported here, which takes seconds, and not by every process that only looks for tests."""
    with warnings.catch_warnings(action="ignore"):
        pytest.importorskip("accelerate")


def test_a_loop_with_accumulation_saves_in_time(watches: list[FakeWatch], tmp_path: Path, monkeypatch: Any) -> None:
    from accelerate import Accelerator

    from legroom.integrations.accelerate import guarded

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.long))
    reasons: list[str | None] = []
    with guarded(accelerator, save_to=tmp_path / "last") as guard:
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
        guard.model_ready()
        for epoch in range(2):
            found = guard.epoch(epoch, loader)
            assert found is not None and found.effective_batch == 8
            for number, (x, y) in enumerate(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                if (epoch, number) == (1, 2):
                    watches[0].raise_alarm(filling(50))
                reasons.append(guard.step())
    assert [number for number, reason in enumerate(reasons) if reason] == [11]
    assert watches[0].steps == 8 and watches[0].left == 1
    assert (tmp_path / "last" / "optimizer.bin").is_file()


def test_without_a_folder_the_loop_gets_a_warning(watches: list[FakeWatch]) -> None:
    from accelerate import Accelerator

    from legroom.integrations.accelerate import guarded

    with guarded(Accelerator(cpu=True), tune="off") as guard:
        watches[0].raise_alarm(filling(50))
        assert guard.step() == "ram-filling in about 50 s"
