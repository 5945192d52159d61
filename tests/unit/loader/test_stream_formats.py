"""Batches in the form asked for: values unchanged, nothing made up."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stream_data import small_steps, write, write_one

from legroom.errors import UnsupportedData, UsageError
from legroom.loader.stream.stream_dataset import stream


def _file(folder: Path, **columns: object) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_numpy_gives_arrays_that_may_be_written_to(tmp_path: Path) -> None:
    paths, whole = write(tmp_path, [10], 4)
    found = list(stream(paths, batch_size=4, format="numpy"))
    assert [len(batch["id"]) for batch in found] == [4, 4, 2]
    batch = found[1]
    np.testing.assert_array_equal(batch["id"], [4, 5, 6, 7])
    assert batch["vector"].shape == (4, 2) and batch["vector"].dtype == np.float32
    assert batch["text"].dtype == object and batch["text"].tolist() == whole["text"].to_pylist()[4:8]
    assert [row.tolist() for row in batch["ragged"]] == whole["ragged"].to_pylist()[4:8]
    assert batch["ragged"][1].dtype == np.int16
    for name in ("id", "vector", "part"):
        batch[name][0] = 0  # writable


def test_torch_gives_tensors_and_lists(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    paths, whole = write(tmp_path, [10], 4)
    batch = list(stream(paths, batch_size=4, format="torch"))[1]
    assert torch.equal(batch["id"], torch.tensor([4, 5, 6, 7]))
    assert batch["vector"].shape == (4, 2)
    assert batch["text"] == whole["text"].to_pylist()[4:8]
    assert [row.tolist() for row in batch["ragged"]] == whole["ragged"].to_pylist()[4:8]


def test_python_gives_rows(tmp_path: Path) -> None:
    paths, whole = write(tmp_path, [10], 4)
    assert [row for batch in stream(paths, batch_size=4, format="python") for row in batch] == whole.to_pylist()


def test_nested_and_odd_types(tmp_path: Path) -> None:
    day = datetime.datetime(2024, 5, 1)
    tensor = pa.fixed_shape_tensor(pa.int32(), (2, 2))
    inner = pa.FixedSizeListArray.from_arrays(pa.array(range(8), pa.int32()), 4)
    path = _file(
        tmp_path,
        flag=[True, False],
        when=pa.array([day, None], pa.timestamp("us")),
        half=pa.array([1.5, None], pa.float32()),
        place=[{"x": 1, "y": "a"}, {"x": 2, "y": "b"}],
        word=pa.array(["u", "v"]).dictionary_encode(),
        cube=pa.array([[[1, 2], [3, 4]]] * 2, pa.list_(pa.list_(pa.uint8(), 2), 2)),
        image=pa.ExtensionArray.from_storage(tensor, inner),
        nothing=pa.nulls(2),
        raw=[b"\x00\x01", None],
    )
    (batch,) = stream(path, format="numpy")
    assert batch["flag"].tolist() == [True, False] and batch["flag"].dtype == bool
    assert batch["when"][0] == np.datetime64(day) and np.isnat(batch["when"][1])
    assert batch["half"][0] == 1.5 and np.isnan(batch["half"][1]) and batch["half"].dtype == np.float32
    assert batch["place"]["x"].tolist() == [1, 2] and batch["place"]["y"].tolist() == ["a", "b"]
    assert batch["word"].tolist() == ["u", "v"]
    assert batch["cube"].shape == (2, 2, 2) and batch["cube"].dtype == np.uint8
    assert batch["image"].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert batch["nothing"].tolist() == [None, None]
    assert batch["raw"].tolist() == [b"\x00\x01", None]
    torch = pytest.importorskip("torch")
    (batch,) = stream(path, format="torch", columns=["flag", "place", "image"])
    assert torch.equal(batch["flag"], torch.tensor([True, False]))
    assert batch["place"]["y"] == ["a", "b"]
    assert batch["image"].shape == (2, 2, 2)
    with pytest.raises(UnsupportedData, match="'when' cannot be a tensor"):
        list(stream(path, format="torch", columns=["when"]))


@pytest.mark.parametrize("values", [[1, None], [True, None], [[1, 2], None]])
def test_a_null_is_not_made_into_a_number(tmp_path: Path, values: list[object]) -> None:
    path = _file(tmp_path, x=values)
    with pytest.raises(UnsupportedData, match="1 of 2 rows are null") as caught:
        list(stream(path, format="numpy"))
    assert "is_valid" in caught.value.fix[0]
    import pyarrow.compute as pc

    assert len(next(iter(stream(path, format="numpy", filters=pc.field("x").is_valid())))["x"]) == 1


def test_the_advice_for_nulls_in_a_field_of_a_struct_works(tmp_path: Path) -> None:
    path = _file(tmp_path, n=[{"a": 1}, {"a": None}])
    with pytest.raises(UnsupportedData, match=r"'n\.a' cannot be an array") as caught:
        list(stream(path, format="numpy"))
    import pyarrow.compute

    (advice,) = [fix for fix in caught.value.fix if "field(" in fix]
    filters = eval(advice.partition("filters=")[2], {"pyarrow": pyarrow})
    (batch,) = stream(path, format="numpy", filters=filters)
    assert batch["n"]["a"].tolist() == [1]


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_lists_of_a_fixed_size_of_anything(tmp_path: Path, form: Any) -> None:
    if form == "torch":
        pytest.importorskip("torch")
    path = _file(
        tmp_path,
        lists=pa.array([[[1], [2, 3]], [[], [4]]], pa.list_(pa.list_(pa.int64()), 2)),
        structs=pa.array([[{"x": 1}, {"x": 2}], [{"x": 3}, {"x": 4}]], pa.list_(pa.struct([("x", pa.int64())]), 2)),
    )
    (batch,) = stream(path, format=form)
    assert [[one.tolist() for one in row] for row in batch["lists"]] == [[[1], [2, 3]], [[], [4]]]
    assert batch["structs"]["x"].tolist() == [[1, 2], [3, 4]]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, x=[1])
    with pytest.raises(UsageError, match="got 'jax'"):
        stream(path, format="jax")  # type: ignore[arg-type]


CUBES = pa.array([[[number, 1], [2, 3], [4, number]] for number in range(90)], pa.list_(pa.list_(pa.int32(), 2), 3))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
@pytest.mark.parametrize("column", [CUBES, pa.StructArray.from_arrays([CUBES], ["x"])], ids=["lists", "in a struct"])
@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle_buffer": 20, "seed": 1}, {"shuffle_buffer": 500, "batch_size": 70}, {"filters": [("id", ">", 3)]}],
)
def test_lists_in_lists_of_a_fixed_size_keep_their_values(
    tmp_path: Path, kind: str, column: Any, options: dict[str, Any]
) -> None:
    # Arrow's take and filter gave values of other rows where the rows are a slice of what was read.
    path = write_one(tmp_path / "file", pa.table({"id": range(90), "cube": column}), 37, kind)
    whole, found = column.to_pylist(), 0
    with small_steps(11):
        for batch in stream(path, **{"batch_size": 8, **options}, rank=1, world_size=2):
            for row in batch.to_pylist():
                assert row["cube"] == whole[row["id"]]
                found += 1
    assert found >= 40


def test_intervals_and_times_of_day_are_objects(tmp_path: Path) -> None:
    # pyarrow's to_numpy ends the process at an interval.
    span, noon = pa.MonthDayNano([1, 2, 3]), datetime.time(12, 0, 5)
    rows = pa.table({"span": pa.array([span]), "spans": pa.array([[span]]), "noon": pa.array([noon], pa.time32("s"))})
    (batch,) = stream(write_one(tmp_path / "a.arrow", rows, 1, "arrow"), format="numpy")
    assert batch["span"].tolist() == batch["spans"][0].tolist() == [span]
    assert batch["noon"].tolist() == [noon]


@pytest.mark.skipif(not hasattr(pa, "bool8"), reason="needs pyarrow 18")
def test_booleans_of_a_byte_are_booleans(tmp_path: Path) -> None:
    flags = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, 2], pa.int8()))
    (batch,) = stream(write_one(tmp_path / "a.arrow", pa.table({"flag": flags}), 3, "arrow"), format="numpy")
    assert batch["flag"].dtype == bool and batch["flag"].tolist() == flags.to_pylist() == [False, True, True]


@pytest.mark.parametrize("options", [{"shuffle_buffer": 2}, {"filters": [("id", "==", 1)]}])
def test_rows_that_arrow_cannot_select_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    if not hasattr(pa, "string_view"):
        pytest.skip("this pyarrow has no such type")
    rows = pa.table({"id": [1, 2, 3], "text": pa.array(["a", "b", "c"], pa.string_view())})
    try:
        rows.take([0])
        pytest.skip("this pyarrow can select such rows")
    except pa.ArrowNotImplementedError:
        path = write_one(tmp_path / "a.arrow", rows, 3, "arrow")
    with pytest.raises(UnsupportedData, match="cannot select rows") as caught:
        list(stream(path, **options))
    assert "string_view" in caught.value.why


def test_a_filter_beside_a_tensor_with_a_permutation(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])
    tensors = pa.ExtensionArray.from_storage(kind, pa.array([range(6)] * 3, pa.list_(pa.int32(), 6)))
    path = _file(tmp_path, x=[1, 2, 3], image=tensors)
    (batch,) = stream(path, filters=[("x", ">", 1)], format="numpy")
    np.testing.assert_array_equal(batch["image"], tensors.to_numpy_ndarray()[1:])
