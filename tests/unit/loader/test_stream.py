"""Streams give the rows of their files: all of them, in order, in batches of the right size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from stream_data import as_worker, ids, small_steps, table, write, write_one

import legroom
from legroom.errors import NoLength, UnreadableSource, UsageError
from legroom.loader.stream.stream_dataset import stream
from open_descriptors import open_descriptors

KINDS = ("parquet", "feather", "arrow", "stream")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
def test_the_rows_of_the_files_in_order(tmp_path: Path, kind: str, batch_size: int) -> None:
    paths, whole = write(tmp_path, [50, 1, 83], 20, kind)
    with small_steps(9):
        batches = list(stream(paths, batch_size=batch_size))
    assert pa.Table.from_batches(batches) == whole
    assert {batch.num_rows for batch in batches[:-1]} <= {batch_size}
    assert len(batches) == len(stream(paths, batch_size=batch_size)) == -(-134 // batch_size)


def test_it_is_exported() -> None:
    assert legroom.stream is stream


@pytest.mark.parametrize("kind", KINDS)
def test_columns_come_as_asked_for(tmp_path: Path, kind: str) -> None:
    paths, whole = write(tmp_path, [30], 10, kind)
    batches = list(stream(paths, columns=["part", "id"], batch_size=8))
    assert pa.Table.from_batches(batches) == whole.select(["part", "id"])
    assert next(iter(stream(paths, columns="ragged", batch_size=100))).to_pydict() == {
        "ragged": whole.column("ragged").to_pylist()
    }


def test_a_directory_a_pattern_and_a_list_name_the_same_files(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [5, 6], 3)
    (tmp_path / "_notes.parquet").write_text("not data")
    (tmp_path / "README.md").write_text("not data")
    deeper = tmp_path / "z"
    deeper.mkdir()
    write_one(deeper / "last.feather", table(11, 4), 2, "feather")
    everything = list(range(15))
    assert ids(stream(tmp_path)) == everything
    assert ids(stream(str(tmp_path / "**" / "[pl]a*.*"))) == everything
    assert ids(stream([*map(str, paths), deeper])) == everything
    assert ids(stream([paths[1], paths[0], paths[1]])) == [*range(5, 11), *range(5)]
    odd = write_one(tmp_path / "what[1].parquet", table(0, 2), 2)
    assert ids(stream(odd)) == [0, 1]
    assert ids(stream(f"{tmp_path}/part-{{001..000}}.parquet")) == [*range(5, 11), *range(5)]
    with pytest.raises(UnreadableSource, match=r"part-002\.parquet"):
        stream(f"{tmp_path}/part-{{000..002}}.parquet")
    braces = write_one(tmp_path / "what{1,2}.parquet", table(0, 3), 3)
    assert ids(stream(braces)) == [0, 1, 2]


FILTERS = [
    [("part", "==", 1)],
    [("id", ">=", 57), ("part", "!=", 0)],
    [[("id", "<", 4)], [("id", "in", [20, 21, 133])]],
    [("id", "<", 0)],
    pc.field("text").is_valid() & (pc.utf8_length(pc.field("text")) > 10),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_give_what_read_table_gives(tmp_path: Path, kind: str, filters: object) -> None:
    paths, whole = write(tmp_path, [50, 1, 83], 20, kind)
    expression = filters if isinstance(filters, pc.Expression) else pq.filters_to_expression(filters)
    wanted = whole.filter(expression).select(["vector", "id"])
    with small_steps(9):
        batches = list(stream(paths, columns=["vector", "id"], batch_size=5, filters=filters))
    assert pa.Table.from_batches(batches, wanted.schema) == wanted.combine_chunks()
    assert {batch.num_rows for batch in batches[:-1]} <= {5}


def test_row_groups_that_statistics_rule_out_are_not_read(tmp_path: Path) -> None:
    """Proved by breaking them."""
    path = write_one(tmp_path / "a.parquet", table(0, 100), 10)
    chunk = pq.read_metadata(path).row_group(3).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * chunk.total_compressed_size)
    kept = stream(path, columns=["id"], filters=[("id", ">", 55)])
    assert len(kept.catalog.groups) == 5
    assert ids(kept) == list(range(56, 100))
    with pytest.raises(legroom.LegroomError, match="row group 3"):
        list(stream(path, columns=["id"]))


def test_len_is_refused_with_filters(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [20], 5)
    some = stream(paths, filters=[("part", "==", 1)])
    with pytest.raises(NoLength, match="unknown"):
        len(some)
    assert len(list(some)) == 1  # list() asks for the length and takes no for an answer
    assert len(stream(paths, batch_size=2, filters=[("part", "==", 1)], rank=0, world_size=2)) == 2


def test_drop_last(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [20], 6)
    short = stream(paths, batch_size=6, drop_last=True)
    assert ids(short) == list(range(18))
    assert len(short) == 3
    assert ids(stream(paths, batch_size=6, drop_last=True, filters=[("id", ">", 5)])) == list(range(6, 18))


def test_an_epoch_without_batches_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths, _ = write(tmp_path, [20], 6)
    stream(paths, batch_size=20, drop_last=True)
    stream(paths, batch_size=21, drop_last=True, filters=[("id", ">", 5)])  # unknown before it is read
    assert not caplog.messages
    assert ids(stream(paths, batch_size=21, drop_last=True)) == []
    (text,) = caplog.messages
    assert "batch_size=21 is more than the 20 rows of each rank" in text


def test_an_empty_file_has_no_batches(tmp_path: Path) -> None:
    for kind in KINDS:
        path = write_one(tmp_path / kind, table(0, 0), 5, kind)
        assert list(stream(path)) == []
        assert len(stream(path)) == 0
        assert list(stream(path, rank=1, world_size=2)) == []


def test_shuffled_rows_are_all_there_and_in_another_order_each_epoch(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [50, 40], 10)
    data = stream(paths, batch_size=8, shuffle_buffer=25, seed=3)
    epochs = [ids(data) for _ in range(3)]
    assert all(sorted(epoch) == list(range(90)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = stream(paths, batch_size=8, shuffle_buffer=25, seed=3)
    assert [ids(again) for _ in range(3)] == epochs
    assert ids(stream(paths, batch_size=8, shuffle_buffer=25, seed=3, epoch=1)) == epochs[1]
    again.set_epoch(2)
    assert ids(again) == epochs[2] == ids(again)
    assert ids(stream(paths, batch_size=8, shuffle_buffer=25, seed=4)) != epochs[0]


def test_groups_may_be_shuffled_alone_or_rows_alone(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [50, 40], 10)
    groups = ids(stream(paths, shuffle_groups=True))
    assert sorted(groups) == list(range(90)) != groups
    assert all(groups[at : at + 10] == list(range(groups[at], groups[at] + 10)) for at in range(0, 90, 10))
    rows = ids(stream(paths, shuffle_buffer=30, shuffle_groups=False))
    assert [sorted(rows[at : at + 30]) for at in (0, 30, 60)] == [list(range(at, at + 30)) for at in (0, 30, 60)]
    assert rows[:30] != list(range(30))


def test_the_launchers_environment_gives_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, _ = write(tmp_path, [20], 5)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ids(stream(paths)) == list(range(10, 20))


def test_schemas_may_differ_in_columns_that_are_not_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "x": [1.0, 2.0]}), tmp_path / "a.parquet")
    fields = [pa.field("id", pa.int64(), nullable=False, metadata={"k": "v"}), pa.field("x", pa.string())]
    pq.write_table(pa.table({"id": [3], "x": ["no"]}, schema=pa.schema(fields)), tmp_path / "b.parquet")
    (batch,) = stream(tmp_path, columns=["id"])
    assert batch.column("id").to_pylist() == [1, 2, 3]


def test_dictionaries_of_several_files_are_joined(tmp_path: Path) -> None:
    for number, words in enumerate((["a", "b"], ["b", "c", "c"])):
        column = pa.array(words).dictionary_encode()
        for kind in ("arrow", "parquet"):
            write_one(tmp_path / f"{kind}{number}", pa.table({"w": column}), 2, kind)
    for kind in ("arrow", "parquet"):
        (batch,) = stream(sorted(tmp_path.glob(f"{kind}*")))
        assert batch.column("w").to_pylist() == ["a", "b", "b", "c", "c"]


def test_files_are_closed_after_a_loop_and_after_leaving_one(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [20, 20], 5)
    before = open_descriptors()
    data = stream(paths, batch_size=3)
    for _ in data:
        break
    list(data)
    loop = iter(data)
    next(loop)
    del loop
    assert not open_descriptors() - before


def test_what_leaves_a_worker_is_no_slice_of_more(tmp_path: Path) -> None:
    """A slice would pickle everything that it is a slice of."""
    import pickle

    paths, whole = write(tmp_path, [5000], 5000)
    with as_worker(0, 2):
        batch = next(iter(stream(paths, batch_size=10)))
    assert batch == whole.slice(0, 10).combine_chunks().to_batches()[0]
    assert len(pickle.dumps(batch)) < 5000


def test_a_state_of_numpys_integers_is_json(tmp_path: Path) -> None:
    path = write_one(tmp_path / "a", table(0, 100), 10)
    made = {name: np.int64(value) for name, value in ARGUMENTS.items()}
    data = stream(path, **made)  # type: ignore[arg-type]
    next(iter(data))
    state = json.loads(json.dumps(data.state_dict()))
    again = stream(path, **ARGUMENTS)
    again.load_state_dict(state)
    data.set_epoch(np.int64(5))  # type: ignore[arg-type]
    json.dumps(data.state_dict())


ARGUMENTS: dict[str, Any] = {
    "batch_size": 8, "shuffle_buffer": 16, "seed": 3, "epoch": 2, "rank": 1, "world_size": 2
}  # fmt: skip


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_one(tmp_path / "a", table(0, 10), 10)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(ids(stream("~/a*"))) == 10


@pytest.mark.parametrize("given", [{"rank": "0", "world_size": 2}, {"rank": 0, "world_size": "2"}])
def test_a_rank_that_is_text_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    path = write_one(tmp_path / "a", table(0, 10), 10)
    with pytest.raises(UsageError, match="must be an integer"):
        stream(path, **given)
