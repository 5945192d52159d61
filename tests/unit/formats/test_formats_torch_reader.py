"""Torch checkpoints: values as torch.load has them, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legroom.errors import UnsupportedData
from legroom.formats.detect import open_source

torch = pytest.importorskip("torch")


def read(path: Path, keys: Any = None) -> dict[str, Any]:
    found = {}
    with open_source(path, keys) as reader:
        for spec in reader.describe().items:
            found[spec.name] = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
            reader.read_into(spec.name, found[spec.name])
    return found


def test_tensors_are_those_of_torch_load(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    made = {
        "plain": base, "transposed": base.t(), "part": base[1:3, ::2], "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "parameter": torch.nn.Parameter(base + 1), "resolved": torch.tensor([1 + 2j]).conj().resolve_conj(),
        "uint16": torch.arange(4).to(torch.uint16), "scalar": torch.tensor(5, dtype=torch.int16),
    }  # fmt: skip
    torch.save(made, tmp_path / "x.pt")
    found = read(tmp_path / "x.pt")
    for name, tensor in torch.load(tmp_path / "x.pt", weights_only=True).items():
        np.testing.assert_array_equal(found[name], tensor.detach().numpy(), err_msg=name)


def test_values_that_torch_conjugates_or_negates_when_it_loads_them_are_refused(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    for bit, lazy in (("conj", z.conj()), ("neg", z.conj().imag)):
        torch.save({"a": lazy, "b": torch.ones(2)}, tmp_path / "x.pt")
        with pytest.raises(UnsupportedData, match=f"its {bit} bit"):
            read(tmp_path / "x.pt")
        assert read(tmp_path / "x.pt", keys="b")["b"].tolist() == [1, 1]
        torch.save({"a": lazy.resolve_conj().resolve_neg()}, tmp_path / "y.pt")
        np.testing.assert_array_equal(read(tmp_path / "y.pt")["a"], torch.load(tmp_path / "y.pt")["a"].numpy())


@pytest.mark.parametrize("clash", [{"a": {"b": 1.0}, "a/b": 2.0}, {1: 1.0, "1": 2.0}], ids=["a/b", "1"])
def test_two_tensors_of_one_name_are_refused(clash: Any, tmp_path: Path) -> None:
    def tensors(value: Any) -> Any:
        return {key: tensors(one) for key, one in value.items()} if isinstance(value, dict) else torch.tensor(value)

    torch.save({**tensors(clash), "c": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedData, match="two things"):
        read(tmp_path / "x.pt")
