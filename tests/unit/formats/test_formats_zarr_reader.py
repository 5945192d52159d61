"""Zarr stores: chunks, codecs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs

from legroom.errors import DamagedSource, UnsupportedData
from legroom.formats.detect import open_source


def read(path: Path, name: str) -> np.ndarray:
    with open_source(path) as reader:
        spec: Any = next(item for item in reader.describe().items if item.name == name)
        out = np.empty(spec.shape, spec.dtype)
        reader.read_into(name, out)
    return out


@pytest.mark.parametrize("version", [2, 3])
def test_a_store_that_is_one_array_is_read(tmp_path: Path, version: int) -> None:
    data = np.arange(50.0).reshape(10, 5)
    zarr.create_array(store=str(tmp_path / "x"), data=data, chunks=(3, 2), zarr_format=version)
    np.testing.assert_array_equal(read(tmp_path / "x", "array"), data)


def test_shards_are_read_whole(tmp_path: Path) -> None:
    root = zarr.create_group(store=str(tmp_path / "x"))
    data = np.arange(1000, dtype=np.int32)
    root.create_array("a", data=data, chunks=(10,), shards=(100,))
    np.testing.assert_array_equal(read(tmp_path / "x", "a"), data)


def test_large_arrays_are_read_in_pieces_cut_between_chunks(tmp_path: Path) -> None:
    root = zarr.create_group(store=str(tmp_path / "x"))
    data = np.arange(10_000_000, dtype=np.int64)
    root.create_array("a", data=data, chunks=(3_000_000,), compressors=None)
    seen: list[int] = []
    with open_source(tmp_path / "x") as reader:
        out = np.empty_like(data)
        reader.read_into("a", out, seen.append)
    np.testing.assert_array_equal(out, data)
    assert len(seen) == 2 and seen[0] % 24_000_000 == 0


@pytest.mark.parametrize("columns", [1, 3])
def test_few_chunks_are_read_at_once(columns: int, tmp_path: Path) -> None:
    # zarr makes a task of every chunk: a billion of one byte each took more memory than the machine has.
    root = zarr.create_group(store=str(tmp_path / "x"))
    root.create_array("a", shape=(5000, columns), dtype="i1", chunks=(1, 1), fill_value=7)
    seen: list[int] = []
    with open_source(tmp_path / "x") as reader:
        out = np.empty((5000, columns), np.int8)
        reader.read_into("a", out, seen.append)
    assert (out == 7).all() and sum(seen) == out.nbytes and max(seen) <= 4096


def test_chunks_never_written_are_filled(tmp_path: Path) -> None:
    root = zarr.create_group(store=str(tmp_path / "x"))
    root.create_array("a", shape=(10,), dtype="i4", chunks=(3,), fill_value=7)[0:2] = 1
    assert read(tmp_path / "x", "a").tolist() == [1, 1] + [7] * 8


def test_strings_of_variable_length_are_refused_by_name(tmp_path: Path) -> None:
    root = zarr.create_group(store=str(tmp_path / "x"), zarr_format=2)
    root.create_array("words", shape=(2,), dtype=str)
    root.create_array("good", data=np.arange(3))
    with pytest.raises(UnsupportedData, match="'words'"), open_source(tmp_path / "x") as reader:
        reader.describe()
    with open_source(tmp_path / "x", keys=["good"]) as reader:
        assert [item.name for item in reader.describe().items] == ["good"]


def test_a_damaged_chunk_is_detected(tmp_path: Path) -> None:
    root = zarr.create_group(store=str(tmp_path / "x"))
    root.create_array("a", data=np.arange(1000), chunks=(100,))
    (tmp_path / "x" / "a" / "c" / "3").write_bytes(b"not what zstd wrote")
    with pytest.raises(DamagedSource, match="'a'"):
        read(tmp_path / "x", "a")


@pytest.mark.parametrize("content", ["", "{", '{"zarr_format": 9}', '{"zarr_format": 3, "node_type": "array"}'])
def test_damaged_metadata_are_detected(tmp_path: Path, content: str) -> None:
    (tmp_path / "zarr.json").write_text(content)
    with pytest.raises(DamagedSource), open_source(tmp_path) as reader:
        reader.describe()


CHUNKED: dict[str, tuple[int, dict[str, Any]]] = {
    "v2 blosc": (2, {"compressors": numcodecs.Blosc("lz4", 0, 0)}),
    "v2 blosc and a filter": (2, {"compressors": numcodecs.Blosc(), "filters": numcodecs.Delta("i4")}),
    "v2 zlib": (2, {"compressors": numcodecs.Zlib()}),
    "v2 plain": (2, {"compressors": None}),
    "v3 blosc": (3, {"compressors": zarr.codecs.BloscCodec()}),
    "v3 plain": (3, {"compressors": None}),
    "shards": (3, {"compressors": zarr.codecs.BloscCodec(), "shards": {"shape": (40, 32), "index_location": "start"}}),
}


@pytest.mark.parametrize("kind", CHUNKED)
def test_a_chunk_that_was_cut_short_is_detected(kind: str, tmp_path: Path) -> None:
    version, options = CHUNKED[kind]
    rng = np.random.default_rng(1)
    wanted = rng.integers(0, 1 << 30, (40, 32)).astype("i4")
    made = zarr.create_array(
        str(tmp_path / "x"), shape=wanted.shape, chunks=(20, 16), dtype="i4", zarr_format=version, **options
    )
    made[...] = wanted
    chunk = tmp_path / "x" / {"v2": "1.1", "v3": "c/1/1", "shards": "c/0/0"}[kind.partition(" ")[0]]
    data = chunk.read_bytes()
    np.testing.assert_array_equal(read(tmp_path / "x", "array"), zarr.open_array(str(tmp_path / "x"))[...])
    for size in (0, 3, 15, 16, 40, len(data) // 2, len(data) - 9, len(data) - 1):
        chunk.write_bytes(data[:size])
        with pytest.raises(DamagedSource, match="'array'"):
            read(tmp_path / "x", "array")
