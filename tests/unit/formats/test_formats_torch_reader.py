"""Torch checkpoints: values as torch.load has them, or an error."""

from __future__ import annotations

import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legroom.errors import DamagedSource, UnsupportedData
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


def test_a_checkpoint_that_was_packed_again_is_refused_in_words(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(6, 5)}, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(UnsupportedData, match="compressed or encrypted"):
        read(tmp_path / "y.pt")


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


def test_tensors_below_keys_that_are_not_text_have_names(tmp_path: Path) -> None:
    held = {
        "w": 1.0, ("layer", 0): 2.0, 0.5: 3.0, None: {"b": 4.0}, True: 5.0, 7: 6.0, (None, None): 7.0, (None, (1, "a")): 8.0,
        "list": [9.0, (10.0, {"deep": [11.0]})], b"x": 12.0,
    }  # fmt: skip
    names = {
        "w": 1, "('layer', 0)": 2, "0.5": 3, "None/b": 4, "True": 5, "7": 6, "(None, None)": 7, "(None, (1, 'a'))": 8,
        "list/0": 9, "list/1/0": 10, "list/1/1/deep/0": 11, "b'x'": 12,
    }  # fmt: skip

    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tensors(one) for key, one in value.items()}
        return type(value)(map(tensors, value)) if isinstance(value, list | tuple) else torch.tensor(value)

    torch.save(tensors(held), tmp_path / "x.pt", pickle_protocol=4)
    assert {name: value.tolist() for name, value in read(tmp_path / "x.pt").items()} == names


def test_a_tensor_that_is_an_attribute_of_an_ordered_dict_is_found(tmp_path: Path) -> None:
    state: Any = OrderedDict(w=torch.ones(1))
    state.extra = {"e": torch.zeros(1)}
    torch.save({"model": state}, tmp_path / "x.pt")
    assert sorted(read(tmp_path / "x.pt")) == ["model/extra/e", "model/w"]


class _WithAttributes:
    """A tensor that is pickled with attributes, as torch itself does not do."""

    def __reduce__(self) -> Any:
        return *torch.ones(2).__reduce_ex__(2), {"extra": torch.ones(3)}


def test_a_tensor_with_attributes_is_refused(tmp_path: Path) -> None:
    torch.save({"a": _WithAttributes()}, tmp_path / "x.pt")
    with pytest.raises(DamagedSource, match="a tensor with attributes"):
        read(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "hide",
    [
        lambda tensor: {tensor},
        lambda tensor: frozenset([tensor]),
        lambda tensor: {tensor: 1},
        lambda tensor: {("a", tensor): 1},
        lambda tensor: {frozenset([1]): tensor},
        lambda tensor: {tuple(range(100)): tensor},
        lambda tensor: {10**5000: tensor},
        lambda tensor: {frozenset([1]): [{"deep": tensor}]},
    ],
)
def test_a_tensor_without_a_name_is_refused(hide: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": [hide(torch.ones(3))]}, tmp_path / "x.pt", pickle_protocol=4)
    with pytest.raises(UnsupportedData, match="tensors without a name: 1"):
        read(tmp_path / "x.pt")
    assert read(tmp_path / "x.pt", keys="a")["a"].tolist() == [1, 1]


def test_a_dict_that_contains_itself_is_refused_before_its_names_fill_the_memory(tmp_path: Path) -> None:
    held: dict[str, Any] = {"weight": torch.ones(2)}
    held["self"] = held
    torch.save(held, tmp_path / "a.pt")
    tracemalloc.start()
    try:
        with pytest.raises(DamagedSource, match="more than"), open_source(tmp_path / "a.pt") as reader:
            reader.describe()
        assert tracemalloc.get_traced_memory()[1] < 1 << 28
    finally:
        tracemalloc.stop()
