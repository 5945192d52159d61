"""The parts the readers are made of: filters, filling, choosing, attributes, files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from legroom.errors import DamagedSource, MissingKey, UnreadableSource
from legroom.formats import decompress_deflate, fill_output_arrays
from legroom.formats.base_reader import Selection, as_json, missing_key, native_dtype
from legroom.formats.decompress_deflate import inflate
from legroom.formats.detect import open_source
from legroom.formats.file_reads_and_errors import SourceFile
from legroom.formats.hdf5_chunks_and_filters import DEFLATE, FLETCHER32, SHUFFLE, ChunkFilter, fletcher32, undo

quick = settings(max_examples=80, deadline=None, derandomize=True)

# Filters.


def slow_fletcher32(data: bytes) -> int:
    """The definition, word by word."""
    low = high = 0
    padded = data + b"\0" * (len(data) % 2)
    for at in range(0, len(padded), 2):
        low += padded[at] << 8 | padded[at + 1]
        high += low
        low, high = (low & 0xFFFF) + (low >> 16), (high & 0xFFFF) + (high >> 16)
    for _ in range(3):
        low, high = (low & 0xFFFF) + (low >> 16), (high & 0xFFFF) + (high >> 16)
    return high << 16 | low


@quick
@given(st.binary(max_size=50), st.integers(0, 40), st.sampled_from([b"", b"\xff", b"\xff\xff", b"\0"]))
def test_fletcher32_is_the_sum_by_its_definition(data: bytes, times: int, tail: bytes) -> None:
    whole = data * times + tail
    assert fletcher32(memoryview(whole)) == slow_fletcher32(whole)


@quick
@given(
    array=arrays(st.sampled_from(["u1", ">i2", "<f4", "<c16", "S5"]), array_shapes(min_dims=1, max_dims=3, max_side=9)),
    chunk=st.integers(1, 6),
    gzip=st.booleans(),
    shuffle=st.booleans(),
    checksum=st.booleans(),
)
def test_any_chunks_and_filters_read_as_h5py_reads_them(
    tmp_path_factory: Any, array: np.ndarray, chunk: int, gzip: bool, shuffle: bool, checksum: bool
) -> None:
    path = tmp_path_factory.mktemp("h5") / "x.h5"
    chunks = tuple(min(chunk, side) for side in array.shape)
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "x", data=array, chunks=chunks, compression="gzip" if gzip else None, shuffle=shuffle, fletcher32=checksum
        )
    with h5py.File(path, "r") as file:
        expected = file["x"][...]
    with open_source(path) as reader:
        (spec,) = reader.describe().items
        out = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
        reader.read_into("x", out)
    assert out.tobytes() == expected.astype(out.dtype).tobytes()


def test_the_remainder_of_a_chunk_is_not_shuffled() -> None:
    shuffled = np.arange(10, dtype=np.uint8)  # two words of four bytes and two bytes more
    plain = undo((ChunkFilter(SHUFFLE, (4,), "shuffle"),), shuffled.tobytes(), 0, 10)
    assert plain.tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]


def test_a_checksum_inside_the_compression_is_undone_in_order() -> None:
    body = bytes(range(100))
    packed = zlib.compress(body + fletcher32(memoryview(body)).to_bytes(4, "little"))
    filters = (ChunkFilter(FLETCHER32, (), "fletcher32"), ChunkFilter(DEFLATE, (6,), "deflate"))
    assert undo(filters, packed, 0, 100).tobytes() == body
    assert undo(filters, body, 3, 100).tobytes() == body  # both skipped
    with pytest.raises(ValueError, match=r"instead of|expected"):
        undo(filters, packed, 0, 99)


def test_the_old_order_of_checksum_bytes_is_accepted() -> None:
    body = b"from a library before 1.6.3"
    good = fletcher32(memoryview(body)).to_bytes(4, "little")
    filters = (ChunkFilter(FLETCHER32, (), "fletcher32"),)
    for tail in (good, bytes([good[1], good[0], good[3], good[2]])):
        assert undo(filters, body + tail, 0, len(body)).tobytes() == body
    with pytest.raises(ValueError, match="checksum"):
        undo(filters, body + b"\1\2\3\4", 0, len(body))
    with pytest.raises(ValueError, match="too short"):
        undo(filters, b"ab", 0, 2)


def test_a_size_that_deflate_cannot_reach_allocates_no_memory() -> None:
    with pytest.raises(ValueError, match="cannot expand"):
        inflate(zlib.compress(b"x"), 1 << 40)
    with pytest.raises(ValueError, match="instead of 5"):
        inflate(zlib.compress(b"x"), 5)
    for packed in (b"rubbish", zlib.compress(bytes(6)), zlib.compress(bytes(5))[:-5]):
        with pytest.raises(ValueError, match=r"instead of|expected"):
            inflate(packed, 5)


# Filling.


@pytest.mark.parametrize("count", [1, 4])
def test_the_first_failure_cancels_all_tasks_and_is_raised(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(fill_output_arrays, "threads", lambda: count)
    done: list[int] = []
    noticed = threading.Event()

    def fail() -> int:
        raise DamagedSource("broken")

    def later() -> int:  # the thread that fails may be the last one to get a core
        assert noticed.wait(60)
        return 2

    def wait(*arguments: Any, **options: Any) -> Any:
        found = real_wait(*arguments, **options)
        if any(future.exception() for future in found.done):
            noticed.set()
        return found

    real_wait = fill_output_arrays.wait
    monkeypatch.setattr(fill_output_arrays, "wait", wait)
    with pytest.raises(DamagedSource):
        fill_output_arrays.in_parallel(iter([lambda: 1, fail] + [later] * 1000), done.append)
    assert done in ([], [1])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("legroom-read")]


def test_tasks_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill_output_arrays, "threads", lambda: 3)
    together = threading.Barrier(3, timeout=60)  # passes only if three wait at once

    def meet() -> int:
        together.wait()
        return 5

    seen: list[int] = []
    fill_output_arrays.in_parallel([meet, meet, meet], seen.append)
    assert seen == [5, 5, 5]


def test_large_arrays_are_copied_in_pieces(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 255, 20_000_003, np.uint8)
    (tmp_path / "x").write_bytes(b"abc" + array.tobytes())
    out, seen = np.zeros_like(array), list[int]()
    with SourceFile(tmp_path / "x") as file:
        fill_output_arrays.copy_raw(file, 3, out, seen.append)
        np.testing.assert_array_equal(out, array)
        assert len(seen) == 3 and sum(seen) == array.nbytes
        with pytest.raises(DamagedSource, match="truncated"):
            fill_output_arrays.copy_raw(file, 4, out, seen.append)


def test_a_file_that_shrinks_while_it_is_read_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    with SourceFile(tmp_path / "x") as file:
        (tmp_path / "x").write_bytes(bytes(10))
        with pytest.raises(DamagedSource, match="ends at byte 10"):
            file.read_at(0, 100)


def test_without_positional_reads_a_file_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in ("pread", "preadv"):
        monkeypatch.delattr(os, name, raising=False)
    array = np.arange(5_000_000, dtype=np.int32)
    np.save(tmp_path / "x.npy", array)
    with open_source(tmp_path / "x.npy") as reader:
        out = np.empty_like(array)
        reader.read_into("array", out)
    np.testing.assert_array_equal(out, array)


def test_a_disk_error_means_unreadable_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "x").write_bytes(bytes(100))
    with SourceFile(tmp_path / "x") as file:
        monkeypatch.setattr(os, "pread", broken)
        with pytest.raises(UnreadableSource, match="Input/output error"):
            file.read_at(0, 10)


# Choosing.


@pytest.mark.parametrize(
    ("keys", "name", "takes", "enters"),
    [
        (None, "a/b", True, True),
        (["a"], "a", True, True),
        (["a"], "a/b", True, True),
        (["a"], "ab", False, False),
        (["a/b"], "a", False, True),
        (["/a/"], "a/b", True, True),
        (["/"], "x", True, True),
    ],
)
def test_a_selection_matches_items_and_groups(keys: Any, name: str, takes: bool, enters: bool) -> None:
    selection = Selection(keys)
    assert selection.takes(name) is takes
    assert selection.enters(name) is enters


def test_a_missing_key_lists_the_existing_names() -> None:
    problem = missing_key("imges", [f"n{i}" for i in range(50)] + ["images"], "x.h5")
    assert isinstance(problem, MissingKey)
    assert "and 31 more" in problem.why
    assert problem.fix[0] == "did you mean 'images'?"
    assert "nothing" in missing_key("a", [], "x").why
    assert "'train/text'" in missing_key("text", ["train/text", "train/label", "test/text"], "x").fix[0]


# Attributes and types.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (float("nan"), "nan"),
        (np.array(7), 7),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array([b"a", b"b"]), ["a", "b"]),
        (np.array(["a", 1], object), ["a", 1]),
        (np.datetime64("2020-01-02"), "2020-01-02"),
        (1 + 2j, [1.0, 2.0]),
        (np.longdouble(1.5), 1.5),
        (np.void(b"ab"), "ab"),
        (b"\xff", "\ufffd"),
        ({"a": (1, None)}, {"a": [1, None]}),
        (object(), {"omitted": "object"}),
        ("x" * 2_000_000, {"omitted": "text", "length": 2_000_000}),
        (np.zeros((0, 2)), []),
    ],
)
def test_attributes_become_json(value: object, expected: object) -> None:
    assert as_json(value) == expected
    json.dumps(as_json(value), allow_nan=False)


def test_native_dtypes_lose_metadata_and_keep_their_layout() -> None:
    kind = np.dtype({"names": ["a", "b"], "formats": [">i4", ("<f8", (2,))], "offsets": [4, 16], "itemsize": 40})
    found = native_dtype(kind)
    assert found.itemsize == 40 and found.fields is not None and found.fields["b"][1] == 16
    assert found["a"] == np.dtype("i4") and found["a"].isnative
    assert native_dtype(np.dtype("i4", metadata={"enum": {}})).metadata is None
    assert native_dtype(np.dtype(">M8[ns]")) == np.dtype("M8[ns]")
    assert native_dtype(np.dtype("V7")) == np.dtype("V7")


@quick
@given(
    keys=st.lists(st.text("ab/", max_size=5), min_size=1, max_size=4),
    names=st.lists(st.text("ab/", max_size=6), max_size=6),
)
def test_keys_take_names_and_what_is_below_them(keys: list[str], names: list[str]) -> None:
    def covers(key: str, name: str) -> bool:
        bare = key.strip("/")
        return name in (key, bare) or not bare or name.startswith((bare + "/", key + "/"))

    selection = Selection(keys)
    for name in names:
        taken = any(covers(key, name) for key in keys)
        assert selection.takes(name) == taken
        assert not name or selection.enters(name) == (
            taken or any(key.strip("/").startswith(name + "/") for key in keys)
        )
    complete = all(any(covers(key, name) for name in names) for key in keys)
    try:
        selection.check(names, names, "x")
    except MissingKey:
        assert not complete
    else:
        assert complete


def test_many_keys_are_compared_with_many_names_in_linear_time() -> None:
    keys = [f"data/demo_{number}" for number in range(20_000)]
    names = [f"{key}/actions" for key in keys]
    selection = Selection(keys)
    assert all(map(selection.takes, names)) and selection.enters("data") and not selection.enters("mask")
    selection.check(names, names, "x")


@pytest.mark.parametrize("damage", ["bomb", "cut"])
def test_zlib_alone_stops_at_the_size_that_is_stated(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setitem(sys.modules, "deflate", None)
    monkeypatch.setitem(sys.modules, "isal", None)
    decompress_deflate.zlib_module.cache_clear()
    decompress_deflate._whole.cache_clear()
    whole = zlib.compress(bytes(64 << 20))
    packed, size = (whole, 1 << 20) if damage == "bomb" else (whole[:-20], 64 << 20)
    try:
        assert inflate(whole, 64 << 20) == bytes(64 << 20)
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"bytes"):
            inflate(packed, size)
        assert damage == "cut" or tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
        decompress_deflate.zlib_module.cache_clear()
        decompress_deflate._whole.cache_clear()


@pytest.mark.parametrize("missing", [("deflate",), ("deflate", "isal")])
@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (3 << 20) + 5, 24 << 20])
def test_slower_libraries_inflate_in_pieces_and_hold_the_result_once(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], size: int
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    plain = random.Random(size).randbytes(min(size, 2 << 20)).ljust(size, b"x")
    packed = zlib.compress(plain, 1)
    decompress_deflate.zlib_module.cache_clear()
    decompress_deflate._whole.cache_clear()
    try:
        tracemalloc.start()
        assert inflate(packed, size) == plain
        assert tracemalloc.get_traced_memory()[1] < size + (8 << 20)
        for wrong in (packed[:-1], packed[: len(packed) // 2]):
            with pytest.raises(ValueError, match=r"bytes"):
                inflate(wrong, size)
    finally:
        tracemalloc.stop()
        decompress_deflate.zlib_module.cache_clear()
        decompress_deflate._whole.cache_clear()


def test_more_files_than_the_soft_limit_are_opened(tmp_path: Path) -> None:
    """In a process of its own: the limit is the process's."""
    for number in range(60):
        np.save(tmp_path / f"{number:03}.npy", np.arange(3))
    program = f"""
import resource, sys
from pathlib import Path
from legroom.formats.detect import open_source
from legroom.formats.file_reads_and_errors import make_room_for_files
paths = sorted(Path({str(tmp_path)!r}).glob("*.npy"))
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 4096))
make_room_for_files(len(paths))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (632, 4096)
readers = [open_source(path) for path in paths]
make_room_for_files(10)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (632, 4096)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
make_room_for_files(len(paths))
try:
    open_source(paths[0])
except Exception as problem:
    assert "Too many open files" in str(problem) and "ulimit -n" in str(problem), problem
else:
    sys.exit("opened")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
