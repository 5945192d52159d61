"""Several files as one dataset: what must be the same in all of them, and what is shown of attributes that differ."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.errors import UnsupportedData

h5py = pytest.importorskip("h5py")
CATS, DOGS = {"cat": 0, "dog": 1}, {"dog": 0, "cat": 1}


def tensors(*kinds: str) -> Callable[[Path], list[Path]]:
    """Files with one tensor each: ``bfloat16.pt``, ``uint16.safetensors``."""

    def write(folder: Path) -> list[Path]:
        torch = pytest.importorskip("torch")
        save = pytest.importorskip("safetensors.torch").save_file
        paths = [folder / f"{number}-{kind}" for number, kind in enumerate(kinds)]
        for path in paths:
            held = {"x": torch.tensor([1.0, 2.0]).to(getattr(torch, path.stem.partition("-")[2]))}
            torch.save(held, path) if path.suffix == ".pt" else save(held, path)
        return paths

    return write


def hdf5(*writers: Callable[[Any], None]) -> Callable[[Path], list[Path]]:
    def write(folder: Path) -> list[Path]:
        paths = [folder / f"{number}.h5" for number in range(len(writers))]
        for path, fill in zip(paths, writers, strict=True):
            with h5py.File(path, "w") as file:
                fill(file)
        return paths

    return write


def enum(names: dict[str, int], **more: Any) -> Callable[[Any], None]:
    return lambda file: file.create_dataset("x", data=[0, 1], dtype=h5py.enum_dtype(names), **more)


def rows_of_enums(names: dict[str, int]) -> Callable[[Any], None]:
    def fill(file: Any) -> None:
        rows = file.create_dataset("x", 2, h5py.vlen_dtype(h5py.enum_dtype(names)))
        rows[0] = rows[1] = [0, 1]

    return fill


def records(names: dict[str, int]) -> Callable[[Any], None]:
    kind = np.dtype([("id", "i4"), ("labels", h5py.enum_dtype(names), (2,))])
    return lambda file: file.create_dataset("x", data=np.zeros(2, kind), dtype=kind)


OTHER_MEANING = {
    "safetensors-bits-and-numbers": tensors("bfloat16.safetensors", "uint16.safetensors"),
    "safetensors-numbers-and-bits": tensors("uint16.safetensors", "bfloat16.safetensors"),
    "safetensors-8-bit-floats": tensors("float8_e4m3fn.safetensors", "float8_e5m2.safetensors"),
    "safetensors-8-bits-and-numbers": tensors("float8_e4m3fn.safetensors", "uint8.safetensors"),
    "torch": tensors("bfloat16.pt", "uint16.pt"),
    "torch-8-bit-floats": tensors("float8_e4m3fn.pt", "float8_e5m2.pt"),
    "torch-and-safetensors": tensors("bfloat16.pt", "uint16.safetensors"),
    "hdf5-enum": hdf5(enum(CATS), enum(DOGS)),
    "hdf5-enum-and-numbers": hdf5(enum(CATS), lambda file: file.create_dataset("x", data=np.arange(2, dtype=np.uint8))),
    "hdf5-enums-of-variable-length": hdf5(rows_of_enums(CATS), rows_of_enums(DOGS)),
    "hdf5-enums-in-records": hdf5(records(CATS), records(DOGS)),
}


@pytest.mark.parametrize("disabled", ["0", "1"])
@pytest.mark.parametrize("write", OTHER_MEANING.values(), ids=OTHER_MEANING)
def test_numbers_that_mean_different_things_are_not_joined(
    write: Any, disabled: str, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", disabled)
    paths = write(tmp_path)
    for path in paths:
        legroom.open(path).close()
    with pytest.raises(UnsupportedData, match=r"cannot join x[\s\S]*have different (\w+)_(dtype|enum): "):
        legroom.open(paths)


@pytest.mark.parametrize(
    "write",
    [
        hdf5(enum(CATS), enum(dict(reversed(CATS.items())))),
        tensors("bfloat16.safetensors", "bfloat16.pt"),
        tensors("float8_e5m2.pt", "float8_e5m2.safetensors"),
    ],
)
def test_the_same_meaning_in_other_words_is_joined_and_kept(write: Any, shm: Path, tmp_path: Path) -> None:
    paths = write(tmp_path)
    alone, data = legroom.open(paths[0]), legroom.open(paths)
    assert data["x"].tolist() == 2 * alone["x"].tolist()
    assert data.info.arrays["x"].attributes == alone.info.arrays["x"].attributes != {}


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_files_of_different_formats_without_common_names_are_refused_as_such(
    disabled: str, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", disabled)
    (tmp_path / "1.txt").write_text("one")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "1.txt", "1.txt")
    np.save(tmp_path / "images.npy", np.zeros((1, 4)))
    paths = [tmp_path / "a.tar", tmp_path / "a.tar", tmp_path / "images.npy"]
    with pytest.raises(UnsupportedData, match=r"cannot join \S*a\.tar and \S*images\.npy") as caught:
        legroom.open(paths)
    assert caught.value.why.startswith("the files have different formats: webdataset, npy; only ")
    assert caught.value.fix == ("open the files of each format on their own",)


def test_keys_are_advised_only_where_names_are_common(shm: Path, tmp_path: Path) -> None:
    for name, others in {"a": ["x", "y"], "b": ["x"], "c": ["z"]}.items():
        np.savez(tmp_path / f"{name}.npz", **{one: np.zeros(2) for one in others})
    with pytest.raises(UnsupportedData, match="cannot join y") as caught:
        legroom.open([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert any("keys=" in step for step in caught.value.fix)
    assert len(legroom.open([tmp_path / "a.npz", tmp_path / "b.npz"], keys="x")["x"]) == 4
    with pytest.raises(UnsupportedData, match=r"only \S*a\.npz has y") as caught:
        legroom.open([tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "c.npz"])
    assert caught.value.fix == ("open the files one by one",)


def test_attributes_that_are_not_those_of_all_files_are_left_out(shm: Path, tmp_path: Path) -> None:
    def fill(scale: int, classes: list[str], **more: int) -> Callable[[Any], None]:
        def write(file: Any) -> None:
            file["x"] = np.arange(2.0)
            file["x"].attrs.update({"scale": scale, "unit": "m", **more})
            file.attrs.update({"classes": classes, "licence": "MIT"})

        return write

    paths = hdf5(fill(1, ["a", "b"], first=1), fill(2, ["b", "a"], last=1))(tmp_path)
    data = legroom.open(paths)
    assert data["x"].tolist() == [0, 1, 0, 1]
    assert data.info.arrays["x"].attributes == {"unit": "m"}
    assert data.attributes == {"licence": "MIT"}
    assert legroom.open(paths[0]).info.arrays["x"].attributes == {"scale": 1, "unit": "m", "first": 1}


def test_the_shape_of_ragged_rows_is_joined_along_its_first_axis(shm: Path, tmp_path: Path) -> None:
    def grid(first: int, last: int) -> Callable[[Any], None]:
        return lambda file: file.create_dataset(
            "x", data=[[f"{row}"] * last for row in range(first)], dtype=h5py.string_dtype()
        )

    data = legroom.open(hdf5(grid(2, 3), grid(1, 3))(tmp_path))
    assert data["x"].shape == (3, 3) and data["x"][2, 1] == "0" and data["x"][1, 2] == "1"
    with pytest.raises(UnsupportedData, match="cannot join x"):
        legroom.open(hdf5(grid(2, 3), grid(3, 2))(tmp_path))


# Tables.


def parquet(folder: Path, *tables: Any) -> list[Path]:
    pq = pytest.importorskip("pyarrow.parquet")
    paths = [folder / f"{number}.parquet" for number in range(len(tables))]
    for path, table in zip(paths, tables, strict=True):
        pq.write_table(table, path)
    return paths


@pytest.mark.parametrize("keys", [None, ["x"], ["y", "x"]])
@pytest.mark.parametrize("disabled", ["0", "1"])
def test_columns_in_another_order_are_joined(
    keys: Any, disabled: str, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", disabled)
    pa = pytest.importorskip("pyarrow")
    first, second = pa.table({"x": [0, 1], "y": [10, 11], "z": ["a", "b"]}), pa.table({"z": ["c"], "y": [12], "x": [2]})
    with legroom.open(parquet(tmp_path, first, second), keys=keys) as data:
        expected = pa.concat_tables([first, second.select(first.column_names)])
        names = [name for name in first.column_names if keys is None or name in keys]
        assert data["table"].equals(expected.select(names))
        assert list(data.columns["table"]) == list(data.info.tables["table"].columns) == names
        assert data["x"].tolist() == [0, 1, 2]
        assert data.dataset("x")[2] == 2
        assert next(iter(data.batches(3, format="numpy", keys=["x"])))["x"].tolist() == [0, 1, 2]


def test_a_column_that_may_be_null_in_one_file_may_be_in_all(shm: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    always = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    tables = [pa.table({"x": [1, 2]}, always), pa.table({"x": [3]})]
    for order in (tables, tables[::-1]):
        with legroom.open(parquet(tmp_path, *order)) as data:
            assert data["table"].equals(
                pa.concat_tables([table.cast(pa.schema([("x", pa.int64())])) for table in order])
            )
            assert data["table"].schema.field("x").nullable
            assert data["x"].tolist() == [value for table in order for value in table["x"].to_pylist()]


@pytest.mark.parametrize("ordered", [True, False])
def test_dictionaries_in_an_order_and_without_one_are_not_joined(ordered: bool, shm: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    paths = [tmp_path / "0.arrow", tmp_path / "1.arrow"]
    for path, kind in zip(paths, (ordered, not ordered), strict=True):
        table = pa.table({"x": pa.DictionaryArray.from_arrays([0, 1], ["a", "b"], ordered=kind)})
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UnsupportedData, match="cannot join table"):
        legroom.open(paths)


def test_metadata_that_are_not_those_of_all_tables_are_left_out(shm: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")

    def table(unit: str, rows: int) -> Any:
        field = pa.field("x", pa.int64(), metadata={"unit": unit, "of": "length"})
        return pa.table({"x": range(rows)}, pa.schema([field], {"by": unit, "licence": "MIT", "pandas": f"{rows}"}))

    with legroom.open(parquet(tmp_path, table("m", 2), table("km", 1))) as data:
        assert data["x"].tolist() == [0, 1, 0]
        assert data.attributes == data.info.tables["table"].attributes == {"licence": "MIT"}
        assert data["table"].schema.metadata == {b"licence": b"MIT", b"pandas": b"2"}
        kept = data["table"].schema.field("x").metadata
        assert kept[b"of"] == b"length" and b"unit" not in kept


def test_features_of_datasets_are_kept_if_they_are_those_of_all(shm: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")

    def table(names: list[str], size: int) -> Any:
        noted = json.dumps({"info": {"features": {"x": {"names": names}}, "size": size}})
        return pa.table({"x": [0, 1]}).replace_schema_metadata({"huggingface": noted})

    paths = parquet(tmp_path, table(["a", "b"], 1), table(["a", "b"], 2), table(["b", "a"], 1))
    data = legroom.open(paths[:2])
    assert '"size": 1' in str(data.attributes["huggingface"])
    assert b"huggingface" in data["table"].schema.metadata
    with pytest.raises(UnsupportedData, match="have different huggingface"):
        legroom.open([paths[0], paths[2]])
