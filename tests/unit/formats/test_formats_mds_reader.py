"""MDS directories: columns, compression, hashes, and indexes and shards that lie."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.errors import (
    DamagedSource,
    LegroomError,
    MissingKey,
    MissingPackage,
    NoRoom,
    SourceChanged,
    UnsupportedData,
)
from legroom.formats import mds_reader
from legroom.formats.base_reader import Selection
from legroom.formats.decoding_memory_budget import UNLIMITED, Allowed, DecodingMemory
from legroom.formats.detect import open_source

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
from archive_samples import COLUMNS, mds, mds_sample, read_mds, write_mds


def read(path: Path, keys: Any = None, memory: DecodingMemory = UNLIMITED) -> dict[str, Any]:
    with open_source(path, keys, memory) as reader:
        found = {}
        for spec in reader.describe().items:
            out: Any = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
            reader.read_into(spec.name, out)
            found[spec.name] = out
    return found


def change_index(path: Path, **fields: Any) -> None:
    index = json.loads((path / "index.json").read_text())
    for key, value in fields.items():
        where = index["shards"][0]
        *above, last = key.split("__")
        for step in above:
            where = where[step]
        where[last] = value
    (path / "index.json").write_text(json.dumps(index))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return mds(tmp_path, 9, 300, hashes=())


@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
def test_the_values_are_those_that_the_streaming_package_writes_and_reads(
    tmp_path: Path, compression: str | None
) -> None:
    streaming = pytest.importorskip("streaming")
    columns = {
        "a": "int", "b": "float32", "c": "ndarray:int16:2,3", "d": "ndarray:float64", "e": "str", "f": "bytes",
        "g": "json", "h": "uint8", "i": "pkl",
    }  # fmt: skip
    rng = np.random.default_rng(0)
    samples = [
        {
            "a": -number, "b": np.float32(number / 3), "c": rng.integers(0, 99, (2, 3)).astype(np.int16),
            "d": rng.normal(size=(1 + number % 3, 2)), "e": "ß" * (number % 5), "f": rng.bytes(number * 50),
            "g": {"n": number}, "h": number, "i": (number, "x"),
        }
        for number in range(60)
    ]  # fmt: skip
    out = str(tmp_path / "out")
    with streaming.MDSWriter(
        out=out, columns=columns, compression=compression, hashes=["sha1", "xxh64"], size_limit=8192
    ) as writer:
        for sample in samples:
            writer.write(sample)
    from streaming.base.format.mds.encodings import mds_encode

    found = read(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("shard*"))) > 3
    np.testing.assert_array_equal(found["a"], [sample["a"] for sample in samples])
    np.testing.assert_array_equal(found["b"], [sample["b"] for sample in samples])
    np.testing.assert_array_equal(found["c"], [sample["c"] for sample in samples])
    np.testing.assert_array_equal(found["h"], [sample["h"] for sample in samples])
    for name in "defgi":
        rows = [found[f"{name}/values"][a:b].tobytes() for a, b in np.lib.stride_tricks.sliding_window_view(found[f"{name}/offsets"], 2)]  # fmt: skip
        assert rows == [mds_encode(columns[name], sample[name]) for sample in samples], name
    if compression is None:
        from streaming.base.format.mds.reader import MDSReader

        index = json.loads((tmp_path / "out" / "index.json").read_text())
        read_back = [row for one in index["shards"] for row in MDSReader.from_json(out, None, one)]
        assert [row["f"] for row in read_back] == [sample["f"] for sample in samples]


def test_columns_have_their_types(shards: Path) -> None:
    with open_source(shards) as reader:
        specs: dict[str, Any] = {spec.name: spec for spec in reader.describe().items}
    assert specs["label"].dtype == np.int64 and specs["label"].shape == (9,)
    assert specs["mask"].dtype == np.float32 and specs["mask"].shape == (9, 2, 3)
    assert specs["caption/values"].text and not specs["image/values"].text and not specs["meta/values"].text
    assert specs["image/values"].attributes == {"mds_encoding": "jpeg"}


def test_keys_choose_columns(shards: Path) -> None:
    found = read(shards, ["label", "caption"])
    assert set(found) == {"label", "caption/offsets", "caption/values"}
    expected = read_mds(shards)
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])


def test_shards_in_subdirectories_are_read_and_those_outside_are_not(tmp_path: Path) -> None:
    path = write_mds(tmp_path / "x", [[mds_sample(1, 10)]])
    (path / "sub").mkdir()
    (path / "shard.00000.mds").rename(path / "sub" / "shard.00000.mds")
    change_index(path, raw_data__basename="sub/shard.00000.mds")
    assert read(path)["label"].tolist() == [-1]
    for name in ("../secret", "/etc/passwd", "sub/../sub/shard.00000.mds", "", ".", "a//b"):
        change_index(path, raw_data__basename=name)
        with pytest.raises(DamagedSource, match="basename"):
            read(path)


@pytest.mark.parametrize("compression", [None, "gz", "zstd"])
def test_a_wrong_hash_is_refused(tmp_path: Path, compression: str | None) -> None:
    path = mds(tmp_path, 6, 200, compression=compression)
    shard = sorted(path.glob("shard.00000*"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # of the last value: no other check would find it in a plain shard
    shard.write_bytes(data)
    with pytest.raises(DamagedSource, match=r"sha1|shard\.00000"):
        read(path)
    if compression is None:
        with pytest.raises(DamagedSource, match="its sha1 is"):
            read(path, ["image/offsets"])
        with pytest.raises(DamagedSource, match="its sha1 is"):
            legroom.open(path)


def test_hashes_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    path = mds(tmp_path, 6, 20)
    change_index(path, raw_data__hashes={"crc9": "00"})
    with pytest.raises(UnsupportedData, match="crc9"):
        read(path)


def test_zstd_without_its_library_is_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mds(tmp_path, 6, 200, compression="zstd")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match="pip install"):
        read(path)


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    path = mds(tmp_path, 6, 20, compression="gz")
    change_index(path, compression="br:11")
    with pytest.raises(UnsupportedData, match="compressed with br"):
        read(path)


def test_the_plain_shard_is_read_where_both_are_there(tmp_path: Path) -> None:
    packed = mds(tmp_path, 6, 20, compression="gz")
    plain = mds(tmp_path / "plain", 6, 20)
    for shard in plain.glob("shard*"):
        (packed / shard.name).write_bytes(shard.read_bytes())
    for shard in packed.glob("*.gz"):
        shard.unlink()
    np.testing.assert_array_equal(read(packed)["label"], read(plain)["label"])


@pytest.mark.parametrize(
    "fields",
    [
        {"samples": 10**9},
        {"samples": -1},
        {"samples": 2},
        {"samples": True},
        {"version": 3},
        {"format": "json"},
        {"column_sizes": [None, None, 4, 24, None]},
        {"column_names": ["a", "a", "b", "c", "d"]},
        {"column_names": ["a"]},
        {"column_encodings": ["str", "jpeg", "int", "ndarray:float32:2,0", "json"]},
        {"column_encodings": ["str", "jpeg", "int", "ndarray:float32:99999999999,9", "json"]},
        {"column_encodings": ["str", "secret", "int", "ndarray:float32:2,3", "json"]},
        {"raw_data__bytes": 1 << 40},
        {"raw_data__bytes": 3},
        {"raw_data": None},
        {"raw_data": "x"},
        {"raw_data__hashes": [1]},
        {"raw_data__basename": "missing.mds"},
    ],
    ids=str,
)
def test_an_index_that_lies_is_refused(shards: Path, fields: dict[str, Any]) -> None:
    change_index(shards, **fields)
    with pytest.raises(LegroomError):
        read(shards)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"shards": [1]}', "[" * 100_000, '{"weight_map": {}}'])
def test_another_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(LegroomError, match=r"index\.json"):
        read(tmp_path)


def test_an_index_without_shards_is_empty(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(UnsupportedData, match=r"index\.json has no samples.*\n.*list of shards is empty"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("at", "value"), [(0, 2), (4, 0), (8, 1 << 31), (16, 0xFFFFFFFF), (8, 0)], ids=str
)  # the count, positions
def test_positions_that_lie_are_refused(shards: Path, at: int, value: int) -> None:
    shard = shards / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    struct.pack_into("<I", data, at, value)
    shard.write_bytes(data)
    with pytest.raises(DamagedSource, match=r"shard\.00000"):
        read(shards)


def test_lengths_that_lie_are_refused(shards: Path) -> None:
    shard = shards / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    first = struct.unpack_from("<I", data, 4)[0]
    struct.pack_into("<I", data, first, 0xFFFFFF00)
    shard.write_bytes(data)
    with pytest.raises(DamagedSource, match=r"longer than the shard|end at byte"):
        read(shards)


def test_shards_of_different_columns_are_refused(tmp_path: Path) -> None:
    path = mds(tmp_path, 6, 20)
    change_index(path, column_names=["caption", "image", "label", "mask", "other"])
    with pytest.raises(UnsupportedData, match="different columns"):
        read(path)


def test_a_bomb_is_refused_before_it_is_decompressed(tmp_path: Path) -> None:
    path = mds(tmp_path, 6, 20, compression="gz", hashes=())
    small = DecodingMemory(lambda: Allowed(64 << 20, "a small machine"))
    change_index(path, raw_data__bytes=3 << 30)
    with pytest.raises(NoRoom):
        read(path, memory=small)
    change_index(path, raw_data__bytes=10)
    with pytest.raises(DamagedSource):
        read(path)


def test_a_shard_that_is_replaced_while_it_is_read_is_noticed(shards: Path) -> None:
    with open_source(shards) as reader:
        reader.describe()
        shard = shards / "shard.00000.mds"
        data = shard.read_bytes()
        time.sleep(0.02)
        shard.unlink()
        shard.write_bytes(data)
        with pytest.raises(SourceChanged):
            reader.read_into("label", np.empty(9, np.int64))


def test_a_directory_is_one_entry_and_a_changed_shard_another(shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with legroom.open(shards) as data:
        assert data["caption"][1] == "größe 1" and len(data["image"]) == 9
        key = data.info.key
        assert len(data.dataset("image", "label")) == 9
    rows = [mds_sample(number, 300) for number in range(9)]
    rows[4]["label"] = struct.pack("<q", 77)
    write_mds(shards, [rows[:3], rows[3:]], COLUMNS, hashes=())
    with legroom.open(shards) as data:
        assert data.info.key != key and data["label"][4] == 77


def test_the_index_is_read_within_the_memory_that_is_free(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = DecodingMemory(lambda: Allowed(1 << 10, "a small machine"))
    with pytest.raises(NoRoom):
        read(shards, memory=little)
    monkeypatch.setattr(mds_reader, "MOST_INDEX", 100)
    with pytest.raises(DamagedSource, match=r"index\.json"):
        read(shards)


@pytest.mark.parametrize("encodings", [("jpeg", "str"), ("str", "jpeg"), ("jpeg", "png"), ("ndarray:int16", "ndarray")])
def test_columns_of_other_encodings_are_not_joined(tmp_path: Path, encodings: tuple[str, str]) -> None:
    folders = [
        write_mds(tmp_path / str(number), [[{"x": b"12"}]], {"x": encoding})
        for number, encoding in enumerate(encodings)
    ]
    with pytest.raises(UnsupportedData, match="join"):
        legroom.open(folders)
    again = write_mds(tmp_path / "again", [[{"x": b"34"}]], {"x": encodings[0]})
    assert len(legroom.open([folders[0], again])["x"]) == 2


@pytest.mark.parametrize("columns", [{"b": "bytes", "b/values": "uint8"}, {"b": "bytes", "b/offsets": "int"},
                                     {"b": "bytes", "b/values": "bytes"}, {"\ud800": "uint8"}])  # fmt: skip
@pytest.mark.parametrize("disabled", ["", "1"])
def test_a_name_that_cannot_be_used_is_refused(
    tmp_path: Path, columns: dict[str, str], disabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", disabled)
    row = {name: bytes(8) if encoding == "int" else b"1" for name, encoding in columns.items()}
    with pytest.raises(UnsupportedData, match="column name"):
        legroom.open(write_mds(tmp_path / "x", [[row, row]], columns))


def test_describing_again_after_an_error_finds_each_sample_once(tmp_path: Path) -> None:
    folder = mds(tmp_path / "x")
    with open_source(folder, keys="nothing") as reader:
        with pytest.raises(MissingKey):
            reader.describe()
        reader.selection = Selection()
        (spec, *_) = [item for item in reader.describe().items if item.name.endswith("/offsets")]
        with open_source(folder) as once:
            assert spec in once.describe().items
