"""Ragged bytes from many ranges: slabs, and that reading one takes no more memory than it states."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.formats.decoding_memory_budget import UNLIMITED, Allowed, DecodingMemory
from legroom.formats.detect import open_source
from legroom.formats.gather_byte_ranges import GrowingMemory, gather_ranges, rows_between, slabs_of_rows
from legroom.system.file_writes import grouped

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
from archive_samples import image_folder, mds, mds_sample, write_mds, write_tar


class Bytes:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_at(self, offset: int, count: int) -> bytes:
        assert offset >= 0 and offset + count <= len(self.data)
        return self.data[offset : offset + count]


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40_000)), min_size=1, max_size=30),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    kind=st.sampled_from(["i8", "u4"]),
)
def test_any_part_of_the_array_is_read(rows: list[tuple[int, int]], cut: tuple[float, float], kind: str) -> None:
    """Each row: its length, and the gap before it."""
    lengths = np.array([length for length, _ in rows])
    ends = np.cumsum([length + gap for length, gap in rows])
    starts, offsets = (ends - lengths).astype(kind), np.concatenate([[0], np.cumsum(lengths)]).astype(kind)
    data = np.random.default_rng(0).bytes(int(ends[-1]))
    whole = b"".join(data[end - length : end] for length, end in zip(lengths, ends, strict=True))
    start, end = sorted(int(share * len(whole)) for share in cut)
    if start < end:
        found = b"".join(gather_ranges(Bytes(data), starts, offsets, UNLIMITED, "x", start, end))
        assert found == whole[start:end]
    slabs = slabs_of_rows(offsets, lambda a, b: gather_ranges(Bytes(data), starts, offsets, UNLIMITED, "x", a, b))
    assert b"".join(b"".join(slab.decode()) for slab in slabs) == whole


def test_rows_between_two_bytes() -> None:
    first, skip, lengths = rows_between(np.array([0, 5, 5, 9, 20]), 3, 12)
    assert (first, skip.tolist(), lengths.tolist()) == (0, [3, 0, 0, 0], [2, 0, 4, 3])


def test_growing_memory_is_required_step_by_step() -> None:
    asked: list[int] = []

    class Counting(DecodingMemory):
        def require(self, nbytes: int, what: str) -> None:
            asked.append(nbytes)

    growing = GrowingMemory(Counting(lambda: Allowed(1, "")), "x", 100)
    for _ in range(30):
        growing.add(10)
    growing.add(1000)
    assert asked == [100, 100, 100, 1000]


def tiny_files(folder: Path) -> Path:
    return write_tar(folder / "x", [(f"{number:06d}.a", b"1") for number in range(17_000)])


def large_files(folder: Path) -> Path:
    return write_tar(folder / "x", [(f"{number}.a", bytes((5 << 20) + number)) for number in range(4)])


def images(folder: Path) -> Path:
    return image_folder(folder, 6 << 20)


def tiny_values(folder: Path) -> Path:
    return write_mds(folder / "x", [[{"a": b"%d" % number} for number in range(20_000)]], {"a": "bytes"})


def compressed(folder: Path, kind: str) -> Path:
    rows = [mds_sample(number, 40_000) for number in range(300)]
    return write_mds(folder / "x", [rows], compression=kind)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (tiny_files, "a/values"),
        (large_files, "a/values"),
        (images, "image/values"),
        (tiny_values, "a/values"),
        (lambda folder: mds(folder, 60, 400_000), "image/values"),
        (lambda folder: compressed(folder, "gz"), "image/values"),
        (lambda folder: compressed(folder, "zstd"), "image/values"),
    ],
    ids=["tiny files", "large files", "images", "tiny values", "large values", "gz", "zstd"],
)
def test_a_slab_takes_no_more_memory_than_it_states(tmp_path: Path, write: Any, name: str) -> None:
    path = write(tmp_path)
    required: list[int] = []

    class Counting(DecodingMemory):
        def require(self, nbytes: int, what: str) -> None:
            required.append(nbytes)

    with open_source(path, memory=Counting()) as reader:
        reader.describe()
        slabs = reader.slabs(name)
        assert slabs
        for slab in slabs:
            tracemalloc.start()
            try:
                for parts in grouped(slab.decode(), 1 << 20):  # as the cache writes it
                    del parts
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak <= slab.decoding, (peak, slab)
