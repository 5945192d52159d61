"""LMDB: the tree, what is refused, a writer beside the reader, one entry for the directory and its file."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_samples import ragged_pairs, read_lmdb
from lmdb_files import write_lmdb

import legroom
from legroom.errors import DamagedSource, NoRoom, SourceChanged, UnsupportedData
from legroom.formats.decoding_memory_budget import Allowed, DecodingMemory
from legroom.formats.detect import open_source


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    with open_source(path) as reader:
        for spec in reader.describe().items:
            found[spec.name] = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
            reader.read_into(spec.name, found[spec.name])
    return found


def random_entries(rng: random.Random) -> dict[bytes, bytes]:
    longest = rng.choice([3, 30, 511])
    sizes = [0, 1, 10, 500, 2030, 2031, 5000, 100_000]
    return {
        rng.randbytes(rng.randint(1, longest)): rng.randbytes(rng.choice(sizes)) for _ in range(rng.choice([1, 2, 300]))
    }


@pytest.mark.parametrize("page", [512, 4096, 32768])
def test_trees_of_every_depth(page: int, tmp_path: Path) -> None:
    for count in (0, 1, 2, 500, 6000):
        entries = {b"%06d" % row: b"v" * (row % 90) for row in range(count)}
        found = read(write_lmdb(tmp_path / "x", entries, page=page))
        for name, array in ragged_pairs(entries).items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{count} {name}")


def test_what_the_library_writes_is_read_as_it_reads_it(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb", reason="the lmdb library is not installed")
    rng = random.Random(1)
    for case in range(12):
        entries = random_entries(rng)
        folder = tmp_path / str(case)
        with lmdb.open(str(folder), map_size=1 << 30) as env:
            for part in (list(entries.items())[::2], list(entries.items())[1::2]):
                with env.begin(write=True) as transaction:
                    for key, value in part:
                        transaction.put(key, value)
            with env.begin(write=True) as transaction:
                for key in list(entries)[::3]:
                    transaction.delete(key)
        alone = str(tmp_path / f"{case}.lmdb")
        with lmdb.open(alone, map_size=1 << 24, subdir=False) as env, env.begin(write=True) as transaction:
            transaction.put(b"a", b"1")
        assert read(tmp_path / f"{case}.lmdb")["value/values"].tobytes() == b"1"
        found, expected = read(folder), read_lmdb(folder)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


def test_the_library_reads_what_our_tests_write(tmp_path: Path) -> None:
    pytest.importorskip("lmdb", reason="the lmdb library is not installed")
    rng = random.Random(2)
    for case in range(8):
        entries = random_entries(rng)
        expected = ragged_pairs(entries)
        found = read_lmdb(write_lmdb(tmp_path / str(case), entries))
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


def test_rows_through_the_cache_and_one_entry_for_directory_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, variable in (("shm", "LEGROOM_SHM"), ("disk", "LEGROOM_DIR")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    folder = tmp_path / "train"
    folder.mkdir()
    entries = {b"%04d" % row: b"image" * row for row in range(300)}
    write_lmdb(folder / "data.mdb", entries)
    (folder / "lock.mdb").touch()
    data = legroom.open(folder)
    assert data.info.format == "lmdb"
    assert [bytes(row) for row in data["value"][:]] == list(entries.values())
    assert bytes(data["key"][7]) == b"0007"
    (folder / "lock.mdb").write_bytes(b"a reader")  # as the library does when the database is read
    assert legroom.open(folder / "data.mdb").info.key == data.info.key == legroom.open(folder).info.key
    assert legroom.open([folder / "data.mdb"] * 1, keys="value")["value"][3] is not None


REFUSED = {
    "several values for a key": {"flags": 4},
    "keys in another order": {"flags": 8},
    "a named database": {"node_flags": 2},
    "several values in a node": {"node_flags": 4},
}


@pytest.mark.parametrize("how", REFUSED.values(), ids=REFUSED)
def test_databases_that_are_not_plain_are_refused(how: dict[str, int], tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "x", {b"a": b"1", b"b": b"2"}, **how)
    with pytest.raises(UnsupportedData, match="not a plain LMDB database"):
        read(path)


def test_another_data_version_is_refused(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "x", {b"a": b"1"})
    data = bytearray(path.read_bytes())
    for page in (0, 4096):
        struct.pack_into("<I", data, page + 20, 2)
    path.write_bytes(data)
    with pytest.raises(UnsupportedData, match="data version is 2"):
        read(path)


def root(data: bytes) -> int:
    return int(struct.unpack_from("<Q", data, 4096 + 16 + 24 + 48 + 40)[0])


def changed(path: Path, at: int, form: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at, value)
    path.write_bytes(data)


def test_a_tree_that_refers_to_itself_is_damaged(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "x", {b"%06d" % row: b"" for row in range(4000)})
    top = root(path.read_bytes())
    data = path.read_bytes()
    node = struct.unpack_from("<H", data, top * 4096 + 16)[0]
    second = struct.unpack_from("<H", data, top * 4096 + 18)[0]
    child = struct.unpack_from("<H", data, top * 4096 + node)[0]
    for number in (top, child, 0, 60_000):
        path.write_bytes(data)
        changed(path, top * 4096 + second, "<H", number)
        with pytest.raises(DamagedSource):
            read(path)


def test_two_values_in_the_same_pages_are_damaged(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "x", {b"a": b"1" * 5000, b"b": b"2" * 5000})
    top = root(path.read_bytes())
    second = struct.unpack_from("<H", path.read_bytes(), top * 4096 + 18)[0]
    changed(path, top * 4096 + second + 9, "<Q", 2)
    with pytest.raises(DamagedSource, match="same pages"):
        read(path)


def test_numbers_that_the_file_cannot_hold_are_damaged(tmp_path: Path) -> None:
    tree = 4096 + 16 + 24 + 48
    for at, form, value in ((32, "<Q", 1 << 40), (32, "<Q", 3), (6, "<H", 40), (6, "<H", 2), (40, "<Q", 1 << 50)):
        path = write_lmdb(tmp_path / "x", {b"a": b"1", b"b": b"2"})
        changed(path, tree + at, form, value)
        with pytest.raises(DamagedSource):
            read(path)


def test_a_commit_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "x", {b"a": b"1" * 9000, b"b": b"2"})
    with open_source(path) as reader:
        (spec, *_) = [item for item in reader.describe().items if item.name == "value/values"]
        with path.open("r+b") as file:  # as a commit does: the older meta page, in place
            file.seek(16 + 24 + 96 + 8)
            file.write(struct.pack("<Q", 2))
        with pytest.raises(SourceChanged, match="committed"):
            reader.read_into("value/values", np.empty(spec.shape, spec.dtype))  # type: ignore[union-attr]


def test_the_library_committing_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb", reason="the lmdb library is not installed")
    for writemap in (False, True):
        folder = tmp_path / str(writemap)
        with lmdb.open(str(folder), map_size=1 << 24, writemap=writemap) as env:
            with env.begin(write=True) as transaction:
                transaction.put(b"a", b"1" * 9000)
            with open_source(folder) as reader:
                (spec, *_) = [item for item in reader.describe().items if item.name == "value/values"]
                out = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
                reader.read_into("value/values", out)
                with env.begin(write=True) as transaction:
                    transaction.put(b"b", b"2")
                with pytest.raises(SourceChanged):
                    reader.read_into("value/values", out)


def test_the_index_is_counted_before_it_is_taken(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "x", {b"%06d" % row: b"" for row in range(4000)})
    memory = DecodingMemory(lambda: Allowed(20_000, "a test allows 20 kB"))
    with pytest.raises(NoRoom, match="index"), open_source(path, memory=memory) as reader:
        reader.describe()


def test_a_file_in_a_directory_that_is_missing_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").symlink_to("gone")
    with pytest.raises(OSError, match=r"cannot read"):
        open_source(tmp_path)
    os.unlink(tmp_path / "data.mdb")
    write_lmdb(tmp_path / "data.mdb", {b"a": b"1"})
    with open_source(tmp_path) as reader:
        assert os.fstat(reader.descriptors()[0]).st_ino == (tmp_path / "data.mdb").stat().st_ino
