"""Parquet and Arrow: sizes promised before anything is read, and kept."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legroom.errors import DamagedSource, UnsupportedData
from legroom.formats import parquet_reader as parquet_module
from legroom.formats.base_reader import TableSpec
from legroom.formats.detect import open_source
from legroom.formats.file_reads_and_errors import SourceFile
from legroom.formats.parquet_reader import row_groups


def copy(path: Path, out: Path, keys: Any = None) -> tuple[TableSpec, pa.Table]:
    """The table through a reader; the promise of its size is checked on the way."""
    with open_source(path, keys) as reader:
        (spec,) = reader.describe().items
        assert isinstance(spec, TableSpec)
        written = reader.write_table(spec.name, out)
    assert written == out.stat().st_size <= spec.nbytes
    return spec, pa.ipc.open_file(out.read_bytes()).read_all()


# Random tables.

_TEXT = st.text(max_size=40)
_VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): _TEXT,
    pa.large_string(): _TEXT,
    pa.binary(): st.binary(max_size=200),
    pa.binary(4): st.binary(min_size=4, max_size=4),
    pa.decimal128(10, 2): st.decimals(-1000, 1000, places=2),
    pa.list_(pa.int16()): st.lists(st.integers(-9, 9), max_size=5),
    pa.list_(pa.list_(pa.string())): st.lists(st.lists(_TEXT, max_size=3), max_size=3),
    pa.list_(pa.float32(), 3): st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3),
    pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]): st.fixed_dictionaries(
        {"a": st.none() | st.integers(0, 5), "b": st.none() | st.lists(_TEXT, max_size=2)}
    ),
    pa.map_(pa.string(), pa.int64()): st.lists(st.tuples(_TEXT, st.integers(0, 9)), max_size=3),
    pa.null(): st.none(),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = draw(st.integers(0, 30))
    kinds = draw(st.lists(st.sampled_from(list(_VALUES)), min_size=1, max_size=4))
    columns = {}
    for index, kind in enumerate(kinds):
        values = draw(st.lists(st.none() | _VALUES[kind], min_size=rows, max_size=rows))
        columns[f"c{index}"] = pa.array(values, kind)
    repeat = draw(st.sampled_from([1, 1, 50]))
    return pa.concat_tables([pa.table(columns)] * repeat)


quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@quick
@given(table=tables(), dictionary=st.booleans(), group=st.sampled_from([7, 1000]))
def test_parquet_sizes_are_upper_bounds(tmp_path_factory: Any, table: pa.Table, dictionary: bool, group: int) -> None:
    folder = tmp_path_factory.mktemp("t")
    pq.write_table(table, folder / "x", use_dictionary=dictionary, row_group_size=group)
    spec, found = copy(folder / "x", folder / "out")
    assert found.equals(pq.read_table(folder / "x"))
    assert spec.rows == table.num_rows


@quick
@given(table=tables(), stream=st.booleans(), compression=st.sampled_from([None, "lz4", "zstd"]))
def test_arrow_sizes_are_upper_bounds(tmp_path_factory: Any, table: pa.Table, stream: bool, compression: str) -> None:
    folder = tmp_path_factory.mktemp("t")
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(folder / "x"), table.schema, options=options) as to:
        to.write_table(table, max_chunksize=11)
    spec, found = copy(folder / "x", folder / "out")
    assert found.equals(table)
    assert spec.rows == table.num_rows


# Sizes.


def repeated(path: Path, **options: Any) -> pa.Table:
    """A file of a few kilobytes that is 20 MB of text."""
    table = pa.table({"text": ["the very same sentence " * 40] * 22_000, "id": range(22_000)})
    pq.write_table(table, path, **options)
    assert path.stat().st_size < 500_000
    return table


def test_the_size_of_a_dictionary_encoded_column_is_known(tmp_path: Path) -> None:
    table = repeated(tmp_path / "x")
    spec, found = copy(tmp_path / "x", tmp_path / "out")
    assert found.equals(table)
    assert spec.nbytes < 1.2 * (tmp_path / "out").stat().st_size


def test_a_column_of_unknown_size_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = repeated(tmp_path / "x")
    monkeypatch.setattr(parquet_module, "row_groups", lambda _: None)
    spec, found = copy(tmp_path / "x", tmp_path / "out")
    assert found.equals(table)
    assert spec.nbytes < 1.2 * (tmp_path / "out").stat().st_size


def test_the_footer_is_read_as_pyarrow_reads_it(tmp_path: Path) -> None:
    repeated(tmp_path / "x", row_group_size=9000)
    metadata = pq.ParquetFile(tmp_path / "x").metadata
    with SourceFile(tmp_path / "x") as file:
        groups = row_groups(file)
    assert groups is not None and [rows for rows, _ in groups] == [9000, 9000, 4000]
    for index, (_, columns) in enumerate(groups):
        chunk = metadata.row_group(index).column(0)
        assert columns[0].entries == chunk.num_values
        assert columns[0].data == chunk.num_values * len("the very same sentence " * 40)


def test_more_data_than_the_metadata_state_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated(tmp_path / "x")
    real = row_groups

    def lying(file: SourceFile) -> Any:
        groups = real(file)
        assert groups is not None
        chunk = parquet_module.ColumnChunk
        return [(rows, [chunk(one.entries, 10) for one in columns]) for rows, columns in groups]

    monkeypatch.setattr(parquet_module, "row_groups", lying)
    with pytest.raises(DamagedSource, match="more than"):
        copy(tmp_path / "x", tmp_path / "out")


def test_memory_stays_small_while_a_large_row_group_is_written(tmp_path: Path) -> None:
    table = pa.table({f"c{i}": range(i, 400_000 + i) for i in range(20)})
    pq.write_table(table, tmp_path / "x", row_group_size=400_000, use_dictionary=False, compression="none")
    script = (
        "import sys, pyarrow as pa\n"
        "from pathlib import Path\n"
        "from legroom.formats.detect import open_source\n"
        "with open_source(sys.argv[1]) as reader:\n"
        "    reader.describe()\n"
        "    reader.write_table('table', Path(sys.argv[2]))\n"
        "print(pa.default_memory_pool().max_memory())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "x", tmp_path / "out"], capture_output=True, text=True
    )
    peak = int(done.stdout)
    assert (tmp_path / "out").stat().st_size > 60_000_000
    assert peak < 25_000_000, done.stderr


LYING = """
import sys, pyarrow as pa, legroom
from pathlib import Path
from legroom.errors import LegroomError
from legroom.formats.detect import open_source
try:
    if sys.argv[3] == "stream":
        list(legroom.stream(sys.argv[1], batch_size=1000, memory="128MB"))
    else:
        with open_source(sys.argv[1]) as reader:
            reader.describe()
            reader.write_table("table", Path(sys.argv[2]))
except LegroomError as problem:
    print(problem.code, pa.default_memory_pool().max_memory())
"""


@pytest.mark.parametrize("how", ["cache", "stream"])
@pytest.mark.parametrize("columns", [1, 20])
def test_a_page_that_claims_to_be_longer_than_its_column_takes_no_memory(
    tmp_path: Path, columns: int, how: str
) -> None:
    """pyarrow takes the memory that a page's header states before it reads the page, if it reads page by page."""
    values = pa.array([bytes(128)] * 25_000, pa.binary(128))  # pages of 20,000 rows
    table = pa.table({f"c{i}": values for i in range(columns)})
    options = {"use_dictionary": False, "compression": "none", "data_page_size": 4 << 20, "write_statistics": False}
    pq.write_table(table, tmp_path / "x", **options)
    start = pq.ParquetFile(tmp_path / "x").metadata.row_group(0).column(columns - 1).data_page_offset
    whole = bytearray((tmp_path / "x").read_bytes())
    sizes = [at for at in range(start, start + 12) if whole[at] == 0x15]  # fields 1 to 3: kind and two sizes
    assert [at - start for at in sizes[:3]] == [0, 2, 7]
    whole[sizes[2] + 1 : sizes[2] + 5] = b"\xfe\xff\xff\x7f"  # 134 MB, which the file does not have
    (tmp_path / "x").write_bytes(whole)
    done = subprocess.run(
        [sys.executable, "-c", LYING, tmp_path / "x", tmp_path / "out", how], capture_output=True, text=True,
        env={**os.environ, "LEGROOM_SHM": str(tmp_path)},
    )  # fmt: skip
    code, peak = done.stdout.split()
    assert code == "damaged-source" and int(peak) < 60_000_000, done.stdout


class Kms(encryption.KmsClient):
    def __init__(self, _: Any) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64decode(key)


def test_encrypted_columns_are_named_so_and_others_are_read(tmp_path: Path) -> None:
    how = encryption.EncryptionConfiguration(footer_key="f", column_keys={"c": ["id"]}, plaintext_footer=True)
    keys = encryption.CryptoFactory(Kms).file_encryption_properties(encryption.KmsConnectionConfig(), how)
    table = pa.table({"id": [1, 2], "x": [1.0, 2.0]})
    with pq.ParquetWriter(tmp_path / "x", table.schema, encryption_properties=keys) as writer:
        writer.write_table(table)
    with pytest.raises(UnsupportedData, match="has encrypted columns"):
        copy(tmp_path / "x", tmp_path / "out")
    assert copy(tmp_path / "x", tmp_path / "out", ["x"])[1].equals(table.select(["x"]))


# Columns and schemas.


def test_categories_are_written_as_their_values(tmp_path: Path) -> None:
    kind = pa.list_(pa.dictionary(pa.int8(), pa.string()))
    table = pa.table({"kind": pa.array(["a", "b", "a"]).dictionary_encode(), "plain": [1, 2, 3]})
    pq.write_table(table, tmp_path / "x", row_group_size=2)
    spec, found = copy(tmp_path / "x", tmp_path / "out")
    assert spec.columns["kind"] == "string"
    assert found["kind"].to_pylist() == ["a", "b", "a"]
    assert parquet_module.without_dictionaries(kind) == pa.list_(pa.string())


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pa.ipc.new_file(str(tmp_path / "x"), table.schema) as to:
        to.write_table(table)
    with pytest.raises(UnsupportedData, match="'a'"):
        copy(tmp_path / "x", tmp_path / "out")


def test_a_stream_that_replaces_a_dictionary_is_refused(tmp_path: Path) -> None:
    batches = [pa.record_batch({"k": pa.array([word]).dictionary_encode()}) for word in ("a", "b")]
    with pa.ipc.new_stream(str(tmp_path / "x"), batches[0].schema) as to:
        for batch in batches:
            to.write_batch(batch)
    with pytest.raises(UnsupportedData, match="dictionary"):
        copy(tmp_path / "x", tmp_path / "out")


def test_a_dictionary_that_only_grows_is_kept(tmp_path: Path) -> None:
    first = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["a"]))
    second = pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array(["a", "b"]))
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    schema = pa.schema({"k": first.type})
    with pa.ipc.new_stream(str(tmp_path / "x"), schema, options=options) as to:
        for column in (first, second):
            to.write_batch(pa.record_batch([column], schema=schema))
    _, found = copy(tmp_path / "x", tmp_path / "out")
    assert found["k"].to_pylist() == ["a", "a", "b", "a"]


def test_a_stream_without_an_end_marker_is_read(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2, 3]})
    with pa.ipc.new_stream(str(tmp_path / "x"), table.schema) as to:
        to.write_table(table)
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:-8])
    assert copy(tmp_path / "x", tmp_path / "out")[1].equals(table)


def test_a_column_may_be_called_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"table": [1], "other": [2]}), tmp_path / "x")
    spec, _ = copy(tmp_path / "x", tmp_path / "out", keys="table")
    assert list(spec.columns) == ["table"]


def test_views_and_unions_come_through_arrow(tmp_path: Path) -> None:
    union = pa.UnionArray.from_dense(
        pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([5]), pa.array(["x"])]
    )
    table = pa.table({"view": pa.array(["short", "a string longer than twelve"], pa.string_view()), "union": union})
    with pa.ipc.new_file(str(tmp_path / "x"), table.schema) as to:
        to.write_table(table)
    assert copy(tmp_path / "x", tmp_path / "out")[1].equals(table)


def sparse(rows: int) -> Any:
    return pa.UnionArray.from_sparse(pa.array([0] * rows, pa.int8()), [pa.array(range(rows), pa.int64())])


def dense(rows: int) -> Any:
    places = pa.array(range(rows), pa.int32())
    return pa.UnionArray.from_dense(pa.array([0] * rows, pa.int8()), places, [pa.array(range(rows), pa.int64())])


@pytest.mark.parametrize("union", [sparse, dense])
@pytest.mark.parametrize(
    "column",
    [
        lambda union: [union(2), union(2).slice(0, 0)],
        lambda union: [union(0)],
        lambda union: [pa.ListArray.from_arrays([0, 0], union(0))],
        lambda union: [pa.StructArray.from_arrays([one], ["a"]) for one in (union(0), union(1))],
    ],
    ids=["a-batch-without-rows", "no-rows", "empty-lists", "struct"],
)
def test_unions_without_rows_are_read(column: Any, union: Any, tmp_path: Path) -> None:
    chunks = column(union)
    batches = [pa.RecordBatch.from_pydict({"u": chunk}) for chunk in chunks]
    with pa.ipc.new_file(tmp_path / "x", batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)

    code = f"""
import pyarrow as pa
from pathlib import Path
from legroom.formats.detect import open_source
with open_source(Path({str(tmp_path / "x")!r})) as reader:
    reader.write_table("table", Path({str(tmp_path / "out")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    with pa.ipc.open_file(tmp_path / "out") as found:
        assert found.read_all().to_pydict() == pa.Table.from_batches(batches).to_pydict()
