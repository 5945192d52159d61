"""legroom.weights in transformers and PEFT: the model uses the shared copy, and computes and trains as with its own."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import legroom

torch = pytest.importorskip("torch")
EXAMPLE = Path(__file__).parents[3] / "examples" / "lora_shared_base"


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported here, which takes seconds, and not by every process that only looks for tests."""
    return pytest.importorskip("transformers")


@pytest.fixture
def peft(transformers: Any) -> Any:
    return pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, in which every entry of the test lies."""
    for name in ("LEGROOM_SHM", "LEGROOM_DIR"):
        folder = tmp_path / "stores" / name.lower()
        folder.mkdir(parents=True)
        monkeypatch.setenv(name, os.fspath(folder))
    return tmp_path / "stores"


def small_llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config)


def from_shared_copy(transformers: Any, folder: Path, config: Any) -> tuple[Any, Any]:
    """The model, as docs/integrations.md makes it, and the weights."""
    weights = legroom.weights(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    return model, weights


def pages_of_its_own(folder: Path) -> int:
    """Bytes of mapped files in this folder that this process has copied by writing to them."""
    copied, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = os.fspath(folder) in line
        elif inside and line.startswith("Anonymous:"):
            copied += int(line.split()[1]) << 10
    return copied


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_from_pretrained_uses_the_shared_copy(transformers: Any, tmp_path: Path, shard: str) -> None:
    model = small_llama(transformers).eval()
    model.save_pretrained(tmp_path / "model", max_shard_size=shard)
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == (shard == "20KB")
    other, weights = from_shared_copy(transformers, tmp_path / "model", model.config)
    tokens = torch.arange(10)[None]
    assert torch.equal(model(tokens).logits, other.eval()(tokens).logits)
    shared = {tensor.data_ptr() for tensor in weights.values()}
    assert all(parameter.data_ptr() in shared for parameter in other.parameters())


def test_peft_trains_on_the_shared_copy_as_on_private_weights(
    transformers: Any, peft: Any, tmp_path: Path, stores: Path
) -> None:
    private = small_llama(transformers)
    private.save_pretrained(tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in private.state_dict().items()}
    shared, weights = from_shared_copy(transformers, tmp_path / "model", private.config)

    def train(base: Any) -> tuple[Any, list[float]]:
        torch.manual_seed(2)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        tokens = (torch.arange(8)[:, None] + 3 * torch.arange(16)) % 64
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model.train()(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model, losses

    (tuned, losses), (_, expected) = train(shared), train(private)
    assert losses == expected and losses[-1] < losses[0]
    frozen = [one for one in tuned.parameters() if not one.requires_grad]
    assert sorted(one.data_ptr() for one in frozen) == sorted(one.data_ptr() for one in weights.values())
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    assert pages_of_its_own(stores) == 0
    with torch.no_grad():
        frozen[0].add_(0)  # what merging into the base would do; it is seen
    assert pages_of_its_own(stores) > 0


def test_the_lora_example_trains_adapters_of_peft(
    peft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    threads = torch.get_num_threads()
    try:
        finetune = runpy.run_path(os.fspath(EXAMPLE / "finetune.py"))
        torch.save(finetune["Transformer"](256, 32, 1).state_dict(), tmp_path / "base.pt")
        found = {}
        for flags in ([], ["--peft"]):
            monkeypatch.setattr(
                sys, "argv", ["finetune.py", str(tmp_path / "base.pt"), "--device", "cpu", "--steps", "8", *flags]
            )
            monkeypatch.setattr(sys, "stdin", io.StringIO("train\n"))
            finetune["main"]()
            ready, done = map(json.loads, capsys.readouterr().out.splitlines())
            found[bool(flags)] = ready["trained"], done["losses"]
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("model", None)
    assert found[True][0] == found[False][0] == 2 * 8 * (32 + 32)  # query and value, each with two matrices
    for _, losses in found.values():
        assert losses[-1] < losses[0]
    assert found[True][1][0] == found[False][1][0]  # an adapter that is not trained yet adds nothing
