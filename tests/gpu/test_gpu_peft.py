"""PEFT on a model of transformers whose weights are the shared copy on a real GPU: it trains as on private weights."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import legroom

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    memory = tempfile.mkdtemp(prefix="legroom-test-", dir="/dev/shm")
    monkeypatch.setenv("LEGROOM_SHM", memory)
    monkeypatch.setenv("LEGROOM_DIR", os.fspath(tmp_path / "disk"))
    yield
    shutil.rmtree(memory)


def train(base: Any) -> tuple[Any, list[float]]:
    """The model with adapters, and its losses."""
    torch.manual_seed(2)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    tokens = ((torch.arange(8)[:, None] + 3 * torch.arange(16)) % 64).to("cuda")
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def test_peft_trains_on_the_shared_copy_as_on_private_weights(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(1)
    private = transformers.LlamaForCausalLM(config)
    private.save_pretrained(tmp_path / "model")
    weights = legroom.weights(tmp_path / "model", "cuda", shared=True)
    print(weights.why)
    assert "own copy" not in weights.why
    with torch.device("cuda"):
        shared = transformers.LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=weights, dtype=torch.float32
        )
    (tuned, losses), (_, expected) = train(shared), train(private.to("cuda"))
    print(losses, expected)
    assert losses == pytest.approx(expected, rel=1e-4) and losses[-1] < losses[0]
    frozen = [one for one in tuned.parameters() if not one.requires_grad]
    assert sorted(one.data_ptr() for one in frozen) == sorted(one.data_ptr() for one in weights.values())
    assert all(torch.equal(weights[name].cpu(), tensor) for name, tensor in legroom.weights(tmp_path / "model").items())
