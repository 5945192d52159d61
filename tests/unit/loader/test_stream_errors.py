"""What a stream refuses, and that it says what, why and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from stream_data import ids, table, write, write_one

from legroom.errors import (
    BadSize,
    BudgetTooSmall,
    DamagedSource,
    LegroomError,
    MissingKey,
    SourceChanged,
    UnknownFormat,
    UnreadableSource,
    UnsupportedData,
    UsageError,
)
from legroom.loader.stream.stream_dataset import stream
from legroom.units import parse_size


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_one(tmp_path / "a.parquet", table(0, 40), 10)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"batch_size": 0}, UsageError, "batch_size must be an integer >= 1 (got 0)"),
        ({"batch_size": "many"}, UsageError, "(got 'many')"),
        ({"shuffle_buffer": -1}, UsageError, "shuffle_buffer must be an integer >= 0 (got -1)"),
        ({"seed": -1}, UsageError, "seed must be an integer >= 0 (got -1)"),
        ({"epoch": -1}, UsageError, "epoch must be an integer >= 0 (got -1)"),
        ({"memory": "lots"}, BadSize, "lots"),
        ({"memory": "1MB"}, BudgetTooSmall, "memory=1 MB is too small"),
        ({"uneven": "maybe"}, UsageError, "uneven must be one of pad, drop, all (got 'maybe')"),
        ({"rank": 2, "world_size": 2}, UsageError, "rank=2, world_size=2"),
        ({"rank": 2}, UsageError, "both rank and world_size"),
        ({"columns": []}, UsageError, "at least one column, and none twice"),
        ({"columns": ["id", "id"]}, UsageError, "at least one column, and none twice"),
        ({"columns": ["idd"]}, MissingKey, "has no 'idd'"),
        ({"filters": [("prt", "==", 1)]}, MissingKey, "has no 'prt'"),
        ({"filters": [("part", "~", 1)]}, UsageError, "cannot be used"),
        ({"filters": [("part", "==", "one")]}, UsageError, "cannot be used"),
        ({"filters": "part == 1"}, UsageError, "cannot be used"),
        ({"filters": pc.field("nothing") == 1}, UsageError, "cannot be used"),
        ({"filters": pc.field("part")}, UsageError, "cannot be used"),
    ],
)
def test_invalid_arguments_are_refused(path: Path, given: dict[str, Any], kind: type, said: str) -> None:
    with pytest.raises(kind) as caught:
        stream(path, **given)
    assert said in caught.value.what
    assert caught.value.fix


def test_the_nearest_column_is_named(path: Path) -> None:
    with pytest.raises(MissingKey, match="did you mean 'vector'"):
        stream(path, columns=["vectr"])


def test_paths_without_files(tmp_path: Path, path: Path) -> None:
    for wrong, said in (
        (tmp_path / "none.parquet", "no such file"),
        (str(tmp_path / "*.arrow"), "no file matches"),
        ([], "no files to stream"),
    ):
        with pytest.raises((UnreadableSource, UsageError), match=said):
            stream(wrong)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("x")
    with pytest.raises(UnreadableSource, match="has no Parquet or Arrow files"):
        stream(tmp_path / "folder")


def test_files_of_another_format(tmp_path: Path) -> None:
    words = tmp_path / "words.parquet"
    words.write_text("these are only words, and quite a few of them")
    with pytest.raises(UnknownFormat, match=r"words\.parquet"):
        stream(words)
    arrays = tmp_path / "arrays.parquet"
    with h5py.File(arrays, "w") as file:
        file["x"] = np.arange(3)
    with pytest.raises(UnknownFormat, match="neither Parquet nor Arrow"):
        stream(arrays)
    (tmp_path / "empty.parquet").touch()
    with pytest.raises(DamagedSource, match="empty"):
        stream(tmp_path / "empty.parquet")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather", "stream"])
def test_a_file_cut_short(tmp_path: Path, kind: str) -> None:
    path = write_one(tmp_path / "a", table(0, 500), 100, kind)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DamagedSource, match=str(path)):
        list(stream(path))


def test_a_damaged_page_names_the_file_and_the_row_group(path: Path) -> None:
    chunk = pq.read_metadata(path).row_group(2).column(0)
    with path.open("r+b") as file:
        file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        file.write(b"\xff" * chunk.total_compressed_size)
    loop = iter(stream(path, batch_size=10))
    assert ids([next(loop), next(loop)]) == list(range(20))
    with pytest.raises(DamagedSource, match="row group 2") as caught:
        next(loop)
    assert str(path) in caught.value.what


def test_schemas_that_differ(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1.5]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"y": [1]}), tmp_path / "c.parquet")
    with pytest.raises(UnsupportedData, match="different schemas: column 'x'") as caught:
        stream([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert "double" in caught.value.why and "int64" in caught.value.why and "b.parquet" in caught.value.why
    with pytest.raises(MissingKey, match=r"c\.parquet has no 'x'"):
        stream([tmp_path / "a.parquet", tmp_path / "c.parquet"], columns="x")


def test_files_with_other_columns_and_no_columns_given(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"t": [1], "y": [3]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"z": [1]}), tmp_path / "c.parquet")
    with pytest.raises(UnsupportedData, match=r"b\.parquet has no 'x'") as caught:
        stream([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    advice = " ".join(caught.value.fix)
    assert "omit columns" not in advice and "columns=['y']" in advice and "a.parquet" in caught.value.why
    batches = list(stream([tmp_path / "a.parquet", tmp_path / "b.parquet"], columns=["y"], format="numpy"))
    assert [int(y) for batch in batches for y in batch["y"]] == [2, 3]
    with pytest.raises(UnsupportedData) as caught:
        stream([tmp_path / "a.parquet", tmp_path / "c.parquet"])
    assert "columns=[" not in " ".join(caught.value.fix)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [10, 10], 5)
    data = stream(paths, batch_size=5)
    loop = iter(data)
    next(loop)
    write_one(paths[1], table(0, 12), 5)
    with pytest.raises(SourceChanged, match=r"part-001"):
        list(loop)


def test_a_batch_larger_than_the_bound_is_refused_at_once(tmp_path: Path) -> None:
    wide = pa.table({"x": pa.array([bytes(100_000)] * 300)})
    pq.write_table(wide, tmp_path / "wide.parquet")
    with pytest.raises(BudgetTooSmall, match="memory=64 MB is too small") as caught:
        stream(tmp_path / "wide.parquet", batch_size=300, memory="64MB")
    assert "28." in caught.value.why  # megabytes a batch
    needed = caught.value.fix[0].split("'")[1]
    assert parse_size(needed) < 5 * 64 << 20
    data = stream(tmp_path / "wide.parquet", batch_size=300, memory=needed)  # what it advises is enough
    assert sum(batch.num_rows for batch in data) == 300
    few = stream(tmp_path / "wide.parquet", batch_size=10, memory="64MB")
    assert [batch.num_rows for batch in few] == [10] * 30


def test_rows_far_above_the_average_are_refused_when_they_come(tmp_path: Path) -> None:
    """The footer's average says that a batch fits; the rows of one batch do not."""
    lengths = [10] * 20_000 + [1 << 20] * 30
    path = tmp_path / "skew.parquet"
    pq.write_table(pa.table({"x": [bytes(length) for length in lengths]}), path, use_dictionary=False,
                   data_page_size=1 << 16, write_batch_size=16)  # fmt: skip
    loop = iter(stream(path, batch_size=100, memory="48MB"))
    with pytest.raises(BudgetTooSmall):
        for _ in loop:
            pass


@pytest.mark.parametrize("what", ["page", "dictionary", "feather"])
def test_what_cannot_be_decoded_within_the_bound_is_refused_with_numbers(tmp_path: Path, what: str) -> None:
    rng = np.random.default_rng(0)
    rows = pa.table({"x": rng.integers(0, 1 << 62, 4_000_000), "y": np.zeros(4_000_000)})
    path = tmp_path / what
    if what == "page":
        pq.write_table(
            rows, path, row_group_size=1 << 30, use_dictionary=False, data_page_size=1 << 30, max_rows_per_page=1 << 30
        )
    elif what == "dictionary":
        pq.write_table(rows, path, row_group_size=1 << 30, use_dictionary=["x"], dictionary_pagesize_limit=1 << 30)
    else:
        write_one(path, rows, 4_000_000, "feather")
    with pytest.raises(BudgetTooSmall, match="cannot be decoded within memory=64 MB") as caught:
        next(iter(stream(path, memory="64MB")))
    assert "it needs" in caught.value.why
    assert ("'x'" in caught.value.why) == (what != "feather")
    needed = caught.value.fix[0].split("'")[1]
    assert next(iter(stream(path, memory=needed))).num_rows == 1024  # what it advises is enough
    if what != "page":
        assert next(iter(stream(path, columns=["y"], memory="96MB"))).num_rows == 1024


def test_without_pyarrow_the_extra_is_named(path: Path) -> None:
    script = """
import sys
sys.modules["pyarrow"] = None
import legroom
try:
    legroom.stream(sys.argv[1])
except legroom.LegroomError as problem:
    print(problem)
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=240)
    assert "pip install pyarrow" in done.stdout, done.stdout + done.stderr


def test_every_error_is_ours(path: Path, tmp_path: Path) -> None:
    """Flipping any byte of a footer gives rows, or an error of ours, never another."""
    whole = path.read_bytes()
    broken = tmp_path / "broken.parquet"
    rng = np.random.default_rng(1)
    for at in rng.integers(len(whole) - 400, len(whole), 40):
        broken.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            list(stream(broken))
        except LegroomError:
            pass


@pytest.mark.parametrize("form", ["numpy", "torch", "python"])
def test_a_text_that_is_not_utf_8(tmp_path: Path, form: Any) -> None:
    if form == "torch":
        pytest.importorskip("torch")
    text = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 2, 4], np.int32)), pa.py_buffer(b"okf\xe9"))
    pq.write_table(pa.table({"n": [1, 2], "text": text}), tmp_path / "a.parquet")
    with pytest.raises(DamagedSource, match="column 'text' has a text that is not UTF-8") as caught:
        list(stream(tmp_path / "a.parquet", batch_size=2, format=form))
    assert "0xe9" in caught.value.why


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("column", [[1], [{"colname": 1}], [[{"colname": "x"}]]])
def test_a_name_of_a_column_that_is_not_utf_8(tmp_path: Path, kind: str, column: list[Any]) -> None:
    name = "a" if isinstance(column[0], (dict, list)) else "colname"
    good = write_one(tmp_path / f"good.{kind}", pa.table({name: column}), 1, kind)
    path = tmp_path / f"bad.{kind}"
    path.write_bytes(good.read_bytes().replace(b"colname", b"col\xe9ame"))
    for paths in (path, [good, path]):
        with pytest.raises(DamagedSource, match=path.name):
            list(stream(paths, batch_size=2, format="python"))


def test_advice_about_a_filter_is_about_the_filter(path: Path) -> None:
    with pytest.raises(MissingKey, match="has no 'prt'") as caught:
        stream(path, filters=[("prt", "==", 1)])
    assert "omit columns" not in " ".join(caught.value.fix) and "'part'" in " ".join(caught.value.fix)
