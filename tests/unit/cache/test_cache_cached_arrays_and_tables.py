"""Tensors, torch datasets, pickling, tables, fork."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import legroom
from legroom.cache import drop_and_gc, mapped_files_and_checksums
from legroom.cache.cached_arrays_and_tables import Ragged
from legroom.errors import BadArgument, BadArgumentType, DamagedSource, MissingKey, UnsupportedData, UsageError

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
from archive_samples import write_mds

torch = pytest.importorskip("torch")


@pytest.fixture
def data(shm: Path, tmp_path: Path, old_files: None):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["images"] = np.arange(60, dtype=np.uint8).reshape(10, 2, 3)
        file["labels"] = np.arange(10)
        file["names"] = [f"n{n}" for n in range(10)]
        file["codes"] = np.array([b"ab"] * 10)
        file["other"] = np.zeros(3)
        ragged = file.create_dataset("rows", (10,), h5py.vlen_dtype(np.float32))
        for row in range(10):
            ragged[row] = np.full(row, row)
    with legroom.open(path) as data:
        yield data


def double(image, label):
    image *= 2  # in place: must not reach the shared copy
    return image, label


def test_tensors_are_the_same_memory_without_a_warning(data) -> None:
    tensors = data.tensors("images", "labels")
    assert list(tensors) == ["images", "labels"]
    tensors["labels"][0] = 42
    assert data["labels"][0] == 42
    assert set(data.tensors()) >= {"images", "labels", "other"} and "codes" not in data.tensors()
    with pytest.raises(UnsupportedData, match="codes"):
        data.tensors("codes")


def test_rows_one_by_one_and_many_at_once(data) -> None:
    dataset = data.dataset("images", "labels")
    assert isinstance(dataset, torch.utils.data.Dataset)
    assert len(dataset) == 10
    image, label = dataset[3]
    assert image.tolist() == data["images"][3].tolist() and label == 3
    many = dataset.__getitems__([9, 0, -1])
    assert [int(label) for _, label in many] == [9, 0, 9]
    assert dataset.__getitems__([]) == []
    for wrong in (10, -11):
        with pytest.raises(IndexError):
            dataset[wrong]
        with pytest.raises(IndexError):
            dataset.__getitems__([wrong])
    assert data.dataset("labels")[2] == 2
    names, rows, codes = data.dataset("names", "rows", "codes").__getitems__([4])[0]
    assert names == "n4" and rows.tolist() == [4.0] * 4 and codes == b"ab"


def test_arrays_of_different_lengths_are_refused(data) -> None:
    with pytest.raises(UsageError, match="different numbers of rows"):
        data.dataset("images", "other")


def test_a_transform_in_place_changes_nothing_for_the_next_epoch(data) -> None:
    dataset = data.dataset("images", "labels", transform=double)
    for _ in range(2):
        assert dataset[1][0].tolist() == (data["images"][1] * 2).tolist()
        assert dataset.__getitems__([1])[0][0].tolist() == (data["images"][1] * 2).tolist()
    assert data["images"][1, 0, 0] == 6


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_read_the_shared_copy(data, start: str) -> None:
    dataset = data.dataset("images", "labels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, Python 3.12 and later
        loader = torch.utils.data.DataLoader(dataset, 5, num_workers=1, multiprocessing_context=start)
        labels = torch.cat([labels for _, labels in loader])
    assert labels.tolist() == list(range(10))


def test_pickled_it_is_a_few_names(data) -> None:
    text = pickle.dumps(data)
    assert len(text) < 2000
    again = pickle.loads(text)
    assert (again["images"] == data["images"]).all() and again.info.key == data.info.key
    assert set(again) == set(data)


def test_pickled_and_dropped_it_is_opened_from_its_source(data) -> None:
    text = pickle.dumps(data)
    drop_and_gc.drop(data.info.key, force=True)
    assert (pickle.loads(text)["images"] == data["images"]).all()


def test_read_only_where_every_writable_map_would_count(data, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mapped_files_and_checksums, "maps_writable", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = legroom.open(tmp_path / "a.h5")
        assert not again["images"].flags.writeable
        assert again.tensors()["images"].tolist() == data["images"].tolist()


def test_ragged_rows(data) -> None:
    rows = data["rows"]
    assert isinstance(rows, Ragged) and len(rows) == 10
    assert rows[3].tolist() == [3.0] * 3 and rows[-1].tolist() == [9.0] * 9
    assert [len(row) for row in rows[2:5]] == [2, 3, 4]
    with pytest.raises(IndexError):
        rows[10]
    assert (data["rows/values"] == rows.values).all()
    grid = Ragged(np.array([0, 1, 3, 3, 4]), np.arange(4), text=False, shape=(2, 2))
    assert grid[0, 1].tolist() == [1, 2]
    assert grid[-2, -1].tolist() == [1, 2] and grid[np.int64(1)].tolist() == [1, 2]
    for outside in ((2, 0), (0, -3), (0,), (0, 0, 0)):
        with pytest.raises(IndexError):
            grid[outside]


def test_ragged_rows_are_chosen_as_numpy_chooses(data) -> None:
    rows, plain = data["rows"], np.array([np.full(n, float(n)) for n in range(10)], dtype=object)
    mask = np.arange(10) % 3 == 0
    chosen: list[Any] = [[1, -1], np.array([3, 3, 0]), np.array([9], np.uint8), [], np.array([], np.int64), mask,
                         mask.tolist(), torch.tensor([2, 4])]  # fmt: skip
    for index in chosen:
        found, expected = rows[index], plain[np.asarray(index, dtype=None if len(index) else int)]
        assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    with pytest.raises(IndexError):
        rows[[0, 10]]
    wrong: list[Any] = [2.0, "2", None, [0.5], ["a"], [[1, 2]], [True, False], (2.0,), {1}, ...]
    for index in wrong:
        with pytest.raises(BadArgumentType, match=r"'rows' cannot be indexed by"):
            rows[index]


@pytest.mark.parametrize("longest", [0, 40, 5000])  # 5000: more than is copied at once
def test_a_loop_over_ragged_rows_gives_each_of_them(longest: int) -> None:
    lengths = np.random.default_rng(2).integers(0, longest + 1, 700)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.random.default_rng(3).integers(32, 127, offsets[-1], dtype=np.uint8)
    wanted = [values[first:last].tobytes() for first, last in pairwise(offsets)]
    rows = Ragged(offsets, values, text=False)
    assert [row.tobytes() for row in rows] == list(rows.all_copied()) == wanted
    assert [rows[number].tobytes() for number in range(-700, 0)] == [rows.copied(row) for row in range(700)] == wanted
    text = Ragged(offsets, values, text=True)
    assert list(text) == [text[np.int64(row)] for row in range(700)] == [row.decode() for row in wanted]
    again = pickle.loads(pickle.dumps(text))
    assert list(again) == list(text) and again.shape == (700,)
    numbers = Ragged(offsets, values.astype(np.float32), text=False)
    assert all((found == row).all() for found, row in zip(numbers, rows, strict=True))


INVALID = b"caf\xe9"  # Latin-1


def _invalid_hdf5(path: Path) -> Path:
    with h5py.File(path / "a.h5", "w") as file:
        rows = file.create_dataset("text", (3,), h5py.string_dtype())
        for row, text in enumerate((b"one", b"two", INVALID)):
            rows[row] = text
    return path / "a.h5"


def _invalid_mds(path: Path) -> Path:
    return write_mds(path / "mds", [[{"text": text} for text in (b"one", b"two", INVALID)]], {"text": "str"})


def _invalid_parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    edges = np.cumsum([0, 3, 3, len(INVALID)]).astype(np.int32)
    text = pa.StringArray.from_buffers(3, pa.py_buffer(edges), pa.py_buffer(b"onetwo" + INVALID))
    pq.write_table(pa.table({"text": text}), path / "a.parquet")
    return path / "a.parquet"


@pytest.mark.parametrize("write", [_invalid_hdf5, _invalid_mds, _invalid_parquet])
def test_a_text_that_is_not_utf_8_is_an_error_with_a_code(shm: Path, tmp_path: Path, write: Any) -> None:
    with legroom.open(write(tmp_path)) as data:
        rows = data.dataset("text")
        reads = [lambda: rows[2], lambda: rows.__getitems__([1, 2]), lambda: list(rows)]
        if "text" in list(data):  # ragged rows, not a table
            again = pickle.loads(pickle.dumps(data["text"]))
            reads += [lambda: data["text"][2], lambda: data["text"][1:], lambda: list(data["text"]), lambda: again[2]]
            reads += [lambda: list(data.batches(2))]
            assert data["text"].copied(2) == INVALID
        assert rows[1] == "two"
        for read in reads:
            with pytest.raises(DamagedSource, match="row 2 of 'text' is not UTF-8 text") as caught:
                read()
            assert "0xe9" in caught.value.why and caught.value.fix


def test_ready_in_a_forked_child(data) -> None:
    assert data.ready(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        good = data.ready(10) and data["labels"][5] == 5
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    ("index", "code"),
    [(0, "data['codes'][0]"), (slice(5), "data['codes'][:5]"), ([1, 2], "data['codes'][[1, 2]]"),
     (np.int64(3), "data['codes'][3]"), (b"images", "data['images']"), (None, "data['codes']")],
)  # fmt: skip
def test_an_index_that_is_not_a_name_is_refused_in_words(data, index: Any, code: str) -> None:
    with pytest.raises(MissingKey, match="data are selected by name") as caught:
        data[index]
    assert caught.value.fix[0].endswith(": " + code)
    assert any("data.dataset()" in line for line in caught.value.fix)
    assert any("data.batches(" in line for line in caught.value.fix)


def test_data_given_to_a_loader_is_refused_with_what_to_write(data) -> None:
    with pytest.raises(BadArgument, match="not a torch Dataset") as caught:
        legroom.DataLoader(data, batch_size=2)
    assert "legroom.DataLoader(data.dataset('codes', 'images', " in caught.value.fix[0]
    # Names may come from a sampler, as with any mapping.
    assert [len(one) for one in legroom.DataLoader(data, None, sampler=["images"])] == [len(data["images"])]


def test_repr_shows_what_it_is(data) -> None:
    assert "images: uint8[10, 2, 3]" in repr(data) and "shm" in repr(data)
    data.close()
    data.close()
    assert "closed" in repr(data)


def test_tables(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"x": np.arange(1000), "text": [f"t{n}" for n in range(1000)], "hole": [None, 1.0] * 500})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    for disabled in ("0", "1"):
        monkeypatch.setenv("LEGROOM_DISABLE", disabled)
        with legroom.open(path) as data:
            (name,) = data
            assert data[name].equals(table)
            assert (data["x"] == np.arange(1000)).all()
            assert (data[f"{name}/x"] == np.arange(1000)).all()
            for column in ("text", "hole"):
                with pytest.raises(UnsupportedData):
                    data[column]
            with pytest.raises(legroom.LegroomError):
                data.dataset(name)
            assert data.dataset("x")[5] == 5
            kept = data[name]
        assert kept.equals(table)


def test_tables_of_several_files_are_one(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    parts = [
        pa.table({"x": np.arange(n * 10, n * 10 + 10), "text": [f"{n}-{row}" for row in range(10)]}) for n in range(3)
    ]
    for number, part in enumerate(parts):
        pq.write_table(part, tmp_path / f"part-{number}.parquet")
    for disabled in ("0", "1"):
        monkeypatch.setenv("LEGROOM_DISABLE", disabled)
        with legroom.open(str(tmp_path / "part-*.parquet")) as data:
            (name,) = data
            assert data[name].equals(pa.concat_tables(parts))
            assert data["x"].tolist() == list(range(30))
            assert data.info.tables[name].rows == 30
            assert len(data.dataset("x")) == 30
    monkeypatch.setenv("LEGROOM_DISABLE", "0")
    pq.write_table(pa.table({"x": [1.5]}), tmp_path / "part-9.parquet")
    with pytest.raises(UnsupportedData, match=r"only .*part-0.parquet has text"):
        legroom.open(str(tmp_path / "part-*.parquet"))


@pytest.mark.parametrize("form", ["npy", "npz", "h5"])
@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "i1"), ("b", "<f8"), ("c", "<i2")], align=True),
        np.dtype(
            [("p", np.dtype([("a", "i1"), ("b", "<i4")], align=True), (2, 3)), ("q", "S3"), ("r", "<u8")], align=True
        ),
        np.dtype({"names": ["a", "b"], "formats": ["i1", "<i4"], "offsets": [2, 8], "itemsize": 16}),
        np.dtype([("a", "i1"), ("b", ">f8"), ("c", ">i2")], align=True),
    ],
    ids=["aligned", "nested", "gaps", "big-endian"],
)
def test_records_with_padding(shm: Path, tmp_path: Path, form: str, dtype: Any) -> None:
    """As C lays structures out."""
    rows = np.random.default_rng(0).integers(0, 100, (50, dtype.itemsize), np.uint8).view(dtype).reshape(-1)
    path = tmp_path / f"a.{form}"
    if form == "npy":
        np.save(path, rows)
    elif form == "npz":
        np.savez_compressed(path, array=rows)
    else:
        with h5py.File(path, "w") as file:
            file["array"] = rows
    for _ in range(2):  # built, then found
        with legroom.open(path) as data:
            assert data["array"].dtype.itemsize == dtype.itemsize
            stored = np.load(data.where("array").path)
            for name in dtype.names:
                assert data["array"][name].tolist() == rows[name].tolist() == stored[name].tolist()


def test_records_out_of_order_are_refused_in_words(shm: Path, tmp_path: Path) -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["i1", "<i4"], "offsets": [8, 0], "itemsize": 12})
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["array"] = np.zeros(5, dtype)
    with pytest.raises(UnsupportedData, match="array"):
        legroom.open(tmp_path / "a.h5")


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_tensors_of_types_that_numpy_has_not(kind: str, suffix: str, shm: Path, tmp_path: Path) -> None:
    # They were integers: 16256 in place of 1.0.
    kind = getattr(torch, kind)
    whole, path = torch.arange(12.0).reshape(6, 2).to(kind), tmp_path / f"a{suffix}"
    held = {"x": whole, "count": torch.arange(6).to(torch.uint16)}
    if suffix == ".pt":
        torch.save(held, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(held, path)

    def same(found: Any, expected: Any) -> bool:
        return found.dtype == kind and found.float().equal(expected.float())

    with legroom.open(path) as data:
        assert same(data.tensors()["x"], whole) and data.tensors()["count"].dtype == torch.uint16
        bits = torch.uint16 if kind == torch.bfloat16 else torch.uint8
        assert data["x"].tolist() == whole.view(bits).tolist()
        dataset = data.dataset("x")
        assert same(dataset[1], whole[1]) and same(torch.stack(dataset.__getitems__([5, 0])), whole[[5, 0]])
        loops = data.batches(4), data.batches(1), data.batches(4, rows=[3, 1, 0, 5, 5])
        for loop, rows in zip(loops, (range(6), range(6), [3, 1, 0, 5, 5]), strict=True):
            batches = list(loop)
            assert same(torch.cat([batch["x"].float() for batch in batches]).to(kind), whole[list(rows)])
            assert all(batch["x"].dtype == kind and batch["count"].dtype == torch.uint16 for batch in batches)
        assert next(iter(data.batches(4, format="numpy")))["x"].dtype == data["x"].dtype


def test_attributes_of_a_user_are_not_types_of_tensors(shm: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3, dtype=np.uint16)
        file["x"].attrs["torch_dtype"] = "bfloat16"
    with legroom.open(tmp_path / "a.h5") as data:
        assert data.tensors()["x"].tolist() == next(iter(data.batches(3)))["x"].tolist() == [0, 1, 2]
