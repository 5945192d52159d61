"""Tables in the cache: columns by key, as arrays, tensors and rows; what is stored and what is asked for."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.errors import MissingKey, UnsupportedData, UsageError

pa = pytest.importorskip("pyarrow")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

ROWS = 600


def table(rows: int = ROWS, first: int = 0) -> Any:
    ids = np.arange(first, first + rows)
    return pa.table(
        {
            "id": ids,
            "weight": ids / 2,
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 3).astype(np.float32)), 3),
            "hole": pa.array([None if n % 3 == 0 else n for n in ids.tolist()], pa.int64()),
            "text": pa.array([f"row {n}" for n in ids], pa.string()),
            "kind": pa.array(["a", "b"] * (rows // 2), pa.string()).dictionary_encode(),
            "flag": ids % 2 == 0,
        }
    )


def ipc(rows: Any, path: Path) -> None:
    with pa.ipc.new_file(path, rows.schema) as writer:
        writer.write_table(rows)


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "parquet": lambda rows, path: pq.write_table(rows, path),
    "arrow": ipc,
    "feather": lambda rows, path: feather.write_feather(rows, path),
}
FIXED = ["id", "weight", "vector"]


@pytest.fixture(params=WRITERS)
def path(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Path:
    where = tmp_path / f"t.{request.param}"
    WRITERS[request.param](table(), where)
    return where


@pytest.fixture
def one(shm: Path, tmp_path: Path) -> Path:
    where = tmp_path / "one.parquet"
    pq.write_table(table(), where)
    return where


@pytest.mark.parametrize("whole_first", [False, True], ids=["projected", "from-the-whole"])
@pytest.mark.parametrize("keys", ["id", "table/id", ("id",)], ids=str)
def test_keys_name_columns(path: Path, keys: Any, whole_first: bool) -> None:
    kept = legroom.open(path) if whole_first else None
    with legroom.open(path, keys=keys) as data:
        assert list(data) == ["table"] and len(data) == 1
        assert data["table"].column_names == ["id"]
        assert data["id"].tolist() == list(range(ROWS)) == data["table/id"].tolist()
        assert "id" in data and "table/id" in data and "weight" not in data and "text" not in data
        with pytest.raises(MissingKey):
            data["weight"]
        assert list(data.info.tables["table"].columns) == (table().column_names if kept else ["id"])
        again = pickle.loads(pickle.dumps(data))
        assert again["table"].equals(data["table"])


def test_only_what_is_asked_for_is_stored(path: Path) -> None:
    with legroom.open(path, keys=["id", "weight"]) as some:
        stored = some.info.bytes
        assert ROWS * 16 <= stored < ROWS * 16 + 4096
        with legroom.open(path) as whole:
            assert whole.info.key != some.info.key and whole.info.bytes > 2 * stored
        with legroom.open(path, keys=["weight", "id"]) as same:
            assert same["table"].column_names == ["id", "weight"]


def test_the_table_by_its_name_is_all_of_it(path: Path) -> None:
    with legroom.open(path, keys="table") as data:
        assert data["table"].column_names == table().column_names


@pytest.mark.parametrize("whole_first", [False, True], ids=["projected", "from-the-whole"])
@pytest.mark.parametrize("key", ["wieght", "table/wieght"])
def test_the_error_for_an_unknown_column_lists_the_columns(path: Path, key: str, whole_first: bool) -> None:
    kept = legroom.open(path) if whole_first else None
    with pytest.raises(MissingKey) as caught:
        legroom.open(path, keys=["id", key])
    assert "vector" in caught.value.why and "weight" in caught.value.fix[0]
    if kept is not None:
        with pytest.raises(MissingKey) as asked:
            kept[key]
        assert "vector" in asked.value.why and "weight" in asked.value.fix[0]
        assert len(asked.value.fix) == 1, "keys were not given, so omitting them is no advice"


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_tensors_are_the_columns_themselves(path: Path, disabled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("LEGROOM_DISABLE", disabled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with legroom.open(path) as data:
            tensors = data.tensors()
            assert list(tensors) == FIXED
            assert tensors["vector"].shape == (ROWS, 3) and tensors["weight"].dtype == torch.float64
            for name in FIXED:
                chunk = data["table"].column(name).chunk(0)
                values = chunk.flatten() if name == "vector" else chunk
                assert tensors[name].data_ptr() == values.buffers()[1].address
            tensors["id"][0] = 42  # this process's pages, nobody else's
            assert data["id"][0] == 42
            with legroom.open(path) as other:
                assert other["id"][0] == 0
    assert tensors["id"][1] == 1  # it outlives the data


def test_the_error_for_a_non_array_gives_the_reason(path: Path) -> None:
    pytest.importorskip("torch")
    with legroom.open(path) as data:
        for name, why in {
            "hole": "int64 and it has 200 nulls",
            "text": "string",
            "kind": "its type is",
            "flag": "bool",
        }.items():
            assert name in data
            for ask in (data.__getitem__, data.tensors):
                with pytest.raises(UnsupportedData, match=why):
                    ask(name)
        with pytest.raises(UnsupportedData, match="200 nulls") as caught:
            data.dataset("hole")
        table, batches = caught.value.fix
        assert "data['table'].column('hole')" in table and data["table"].column("hole").null_count == 200
        assert "keys=['a', 'b']" in batches and list(next(iter(data.batches(2, keys=["id"])))) == ["id"]
    with legroom.open(path, keys=["text", "hole"]) as data, pytest.raises(UnsupportedData, match="200 nulls"):
        data.tensors()


def test_a_dataset_of_columns(path: Path) -> None:
    pytest.importorskip("torch")
    with legroom.open(path, keys=["id", "vector"]) as data:
        for dataset in (data.dataset(), data.dataset("table/id", "vector")):
            number, vector = dataset.__getitems__([7])[0]
            assert len(dataset) == ROWS and number == 7 and vector.tolist() == [7.0] * 3
            assert pickle.loads(pickle.dumps(dataset))[3][0] == 3
        with pytest.raises(UsageError, match="has no rows"):
            data.dataset("table")


def test_a_dataset_has_the_rows_of_columns_that_are_no_arrays(shm: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    columns = {
        "text": pa.array(["one", None, "größe"]),
        "bytes": pa.array([b"a", b"", b"\0"]),
        "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
        "flag": pa.array([True, False, True]),
        "tokens": pa.array([[1, 2], [], [3]], pa.list_(pa.int32())),
        "gaps": pa.array([[1, None], None, [None]], pa.list_(pa.int64())),
        "image": pa.array([{"bytes": b"x", "path": None}] * 3),
    }
    rows = pa.table(columns)
    for part in (0, 1):  # two files: each column has two chunks
        pq.write_table(rows, tmp_path / f"{part}.parquet")
    with legroom.open(str(tmp_path / "*.parquet")) as data:
        for dataset in (data.dataset(), pickle.loads(pickle.dumps(data.dataset()))):
            for row, value in enumerate(rows.to_pylist() * 2):
                for found in (dataset[row], dataset[row - 6], dataset.__getitems__([row])[0]):
                    sample = dict(zip(columns, found, strict=True))
                    assert sample["tokens"].dtype == np.int32 and sample["tokens"].flags.writeable
                    assert sample | {"tokens": sample["tokens"].tolist()} == value
        decoded = data.dataset("text", "flag", decode={"text": lambda text: len(text or "")})
        lengths, flags = next(iter(torch.utils.data.DataLoader(decoded, batch_size=6, num_workers=1)))
        assert lengths.tolist() == [3, 0, 5] * 2 and flags.dtype == torch.bool


def test_batches_have_the_columns_asked_for(path: Path) -> None:
    with legroom.open(path, keys=["id", "vector"]) as data:
        first = next(iter(data.batches(4, format="numpy")))
        assert list(first) == ["id", "vector"] and first["vector"].shape == (4, 3)
    with legroom.open(path) as data:
        assert list(next(iter(data.batches(4, format="numpy", keys="table/weight")))) == ["table/weight"]


@pytest.mark.parametrize("kind", WRITERS)
def test_no_rows(shm: Path, tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    WRITERS[kind](table().slice(0, 0), tmp_path / "empty")
    with legroom.open(tmp_path / "empty", keys=["id", "vector", "text"]) as data:
        assert data["table"].num_rows == 0 and data["table"].column_names == ["id", "vector", "text"]
        assert {name: tuple(tensor.shape) for name, tensor in data.tensors().items()} == {"id": (0,), "vector": (0, 3)}
        assert data.tensors()["vector"].dtype == torch.float32
        assert len(data.dataset("id")) == 0


def test_shards_need_only_what_is_asked_for_in_common(shm: Path, tmp_path: Path) -> None:
    paths = []
    for number, kind in enumerate(WRITERS):
        rows = table(10, 10 * number).append_column(f"own{number}", pa.array(range(10)))
        paths.append(tmp_path / f"{number}.part")
        WRITERS[kind](rows, paths[-1])
    with legroom.open(paths, keys=["id", "table/text"]) as data:
        assert data["id"].tolist() == list(range(30))
        assert data["table"].column("text").to_pylist() == [f"row {n}" for n in range(30)]
        assert data["id"] is data["id"]  # joined once for as long as it is held
    with pytest.raises(UnsupportedData, match=r"only .*/0.part has own0; only .*/1.part has own1"):
        legroom.open(paths)
    with pytest.raises(MissingKey, match="own0"):
        legroom.open(paths, keys=["id", "own0"])


def test_a_column_that_has_the_tables_name(shm: Path, tmp_path: Path) -> None:
    where = tmp_path / "t.parquet"
    pq.write_table(pa.table({"table": [1, 2], "other": [3, 4]}), where)
    for _ in ("projected", "from the whole"):
        with legroom.open(where, keys="table") as data:
            assert data["table"].column_names == ["table"]
            assert data.columns == {"table": ("table/table",)} and data["table/table"].tolist() == [1, 2]
        legroom.open(where).close()
    with legroom.open(where) as data:
        assert data["other"].tolist() == [3, 4] and data["table/other"].tolist() == [3, 4]


def test_keys_are_kept_to_for_arrays_too(shm: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3), y=np.arange(3))
    with legroom.open(tmp_path / "a.npz"), legroom.open(tmp_path / "a.npz", keys="x") as data:
        assert list(data) == ["x"] and "y" not in data and 3 not in data


def test_tensors_shape_of_an_extension(shm: Path, tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 2))
    storage = pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.int32()), 4)
    ipc(pa.table({"m": pa.ExtensionArray.from_storage(kind, storage)}), tmp_path / "m.arrow")
    with legroom.open(tmp_path / "m.arrow", keys="m") as data:
        assert data["m"].tolist() == np.arange(12).reshape(3, 2, 2).tolist()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_table_outlives_the_name_of_its_entry(shm: Path, tmp_path: Path, shards: int) -> None:
    """As arrays do: it is mapped when the data are opened, not when it is first used."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from legroom.cache import drop_and_gc

    paths = [tmp_path / f"{number}.parquet" for number in range(shards)]
    for path in paths:
        pq.write_table(pa.table({"a": np.arange(1000), "b": [str(n) for n in range(1000)]}), path)
    data = legroom.open(paths)
    drop_and_gc.drop(data.info.key, force=True)
    shm.rename(shm.with_name("moved"))  # and with the store out of sight, as behind a mount
    assert data["table"].num_rows == 1000 * shards
    assert data["a"].tolist() == list(range(1000)) * shards
    column = data["a"]
    data.close()
    assert column[-1] == 999


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("disabled", [False, True], ids=["cached", "disabled"])
def test_rows_of_several_record_batches_are_not_joined(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, disabled: bool
) -> None:
    torch = pytest.importorskip("torch")

    if disabled:
        monkeypatch.setenv("LEGROOM_DISABLE", "1")
    paths = [tmp_path / f"{number}.arrow" for number in range(files)]
    for number, where in enumerate(paths):
        part = table(first=number * ROWS).select(FIXED)
        with pa.ipc.new_file(where, part.schema) as writer:
            for first, count in ((0, 7), (7, 1), (8, 0), (8, 400), (408, ROWS - 408)):
                for batch in part.slice(first, count).to_batches():
                    writer.write_batch(batch)
    total = files * ROWS
    with legroom.open(paths) as data:
        monkeypatch.setattr(data._tables["table"], "array", lambda name: pytest.fail(f"{name} was joined"))
        batches = data.batches(64, shuffle=True, seed=1, epoch=0)
        numbers = [int(one) for batch in batches for one in batch["id"]]
        assert sorted(numbers) == list(range(total)) != numbers
        for batch in data.batches(50):
            assert batch["weight"].tolist() == (batch["id"] / 2).tolist()
            assert batch["vector"].dtype == torch.float32 and batch["vector"].shape == (50, 3)
            assert (batch["vector"] == batch["id"][:, None]).all()
            batch["id"][:] = -1  # a copy
        dataset = data.dataset("id", "vector")
        order = [0, 6, 7, 8, 407, 408, total - 1, -1, ROWS - 1, ROWS % total]
        for row, (number, vector), (again, other) in zip(
            order, [dataset[row] for row in order], dataset.__getitems__(order), strict=True
        ):
            assert number == again == row % total and vector.tolist() == other.tolist() == [row % total] * 3
        assert [int(number) for number, _ in dataset] == list(range(total))
        plain = data.batches(50, format="numpy", keys=["id"])
        assert np.concatenate([batch["id"] for batch in plain]).tolist() == list(range(total))
        state = batches.state_dict()
    with legroom.open(paths) as data:  # the state is that of joined columns
        wanted = [f"id int64[{total}]", f"vector float32[{total}, 3]", f"weight float64[{total}]"]
        assert state["columns"] == wanted
        assert (data["id"] == np.arange(total)).all() and data["id"] is data.rows_of("id")


def test_columns_that_arrow_converts_are_joined(shm: Path, tmp_path: Path) -> None:
    days = pa.chunked_array([pa.array([1, 2], pa.date32()), pa.array([3], pa.date32())])
    ipc(pa.table({"day": days}), tmp_path / "days.arrow")
    pytest.importorskip("torch")
    with legroom.open(tmp_path / "days.arrow") as data:
        assert data.rows_of("day").tolist() == data["day"].tolist()
        assert len(data.dataset("day")) == 3


@pytest.mark.parametrize("kind", ["time32('s')", "time64('ns')"])
def test_times_of_day_are_no_arrays(kind: str, shm: Path, tmp_path: Path) -> None:
    # numpy has no such type: batches of them ended in numpy's and Arrow's own errors.
    number = pa.int32() if "32" in kind else pa.int64()
    column = pa.array([0, 1000, 2000], number).cast(eval(f"pa.{kind}"))
    ipc(pa.table({"noon": column, "id": [0, 1, 2]}), tmp_path / "t.arrow")
    with legroom.open(tmp_path / "t.arrow") as data:
        for read in (lambda: data["noon"], lambda: data.batches(2, keys="noon", format="numpy")):
            with pytest.raises(UnsupportedData, match="noon"):
                read()


def test_times_of_day_are_no_tensors(shm: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    column = pa.array([0, 1000], pa.int32()).cast(pa.time32("s"))
    ipc(pa.table({"noon": column, "id": [0, 1]}), tmp_path / "t.arrow")
    with legroom.open(tmp_path / "t.arrow") as data:
        assert data.dataset("noon")[1] == column[1].as_py()
        with pytest.raises(UnsupportedData, match="noon"):
            data.tensors("noon")
        assert list(data.tensors()) == ["id"]
