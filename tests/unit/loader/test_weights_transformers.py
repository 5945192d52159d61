"""legroom.weights in transformers: from_pretrained(state_dict=…) uses the shared copy and gives the same model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import legroom

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported here, which takes seconds, and not by every process that only looks for tests."""
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_from_pretrained_uses_the_shared_copy(
    transformers: Any, tmp_path: Path, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEGROOM_SHM", "LEGROOM_DIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, os.fspath(folder))
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model", max_shard_size=shard)
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == (shard == "20KB")
    weights = legroom.weights(tmp_path / "model")
    other = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32
    ).eval()
    tokens = torch.arange(10)[None]
    assert torch.equal(model(tokens).logits, other(tokens).logits)
    shared = {tensor.data_ptr() for tensor in weights.values()}
    assert all(parameter.data_ptr() in shared for parameter in other.parameters())
