"""Chunked HDF5 as slabs: which datasets have them, and what lies at the edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from legroom.errors import DamagedSource
from legroom.formats.detect import open_source


def _slabs(path: Path, data: np.ndarray, **options: Any) -> list[bytes] | None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=data, **options)
    with open_source(path) as reader:
        slabs = reader.slabs("x")
        return None if slabs is None else [b"".join(slab.decode()) for slab in slabs]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 400])
def test_rows_that_do_not_fill_the_last_chunk(tmp_path: Path, rows: int, shuffle: bool) -> None:
    data = np.arange(rows * 30, dtype=">i4").reshape(rows, 5, 6)
    parts = _slabs(
        tmp_path / "a.h5", data, chunks=(64, 5, 6), maxshape=(None, 5, 6), compression="gzip", shuffle=shuffle
    )
    assert parts is not None
    assert b"".join(parts) == data.astype("=i4").tobytes()


def test_large_arrays_have_several_slabs(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 9, (90, 100_000), dtype=np.uint8)
    parts = _slabs(tmp_path / "a.h5", data, chunks=(1, 100_000), compression="gzip", fletcher32=True)
    assert parts is not None and len(parts) > 3
    assert b"".join(parts) == data.tobytes()


def test_chunks_that_cut_rows_have_no_slabs(tmp_path: Path) -> None:
    assert _slabs(tmp_path / "a.h5", np.zeros((64, 64)), chunks=(8, 8), compression="gzip") is None


def test_unwritten_chunks_have_no_slabs(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (100, 10), "f4", chunks=(10, 10), compression="gzip", fillvalue=3.0)[:10] = 1
    with open_source(tmp_path / "a.h5") as reader:
        assert reader.slabs("x") is None


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    data = np.arange(4000, dtype=np.int32).reshape(40, 100)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        chunk = file.create_dataset("x", data=data, chunks=(10, 100), compression="gzip").id.get_chunk_info(2)
    with (tmp_path / "a.h5").open("r+b") as file:
        file.seek(chunk.byte_offset + 20)
        file.write(b"\xff" * 16)
    with open_source(tmp_path / "a.h5") as reader, pytest.raises(DamagedSource, match="20"):
        for slab in reader.slabs("x") or ():
            list(slab.decode())


@pytest.mark.skipif(
    h5py.version.hdf5_version_tuple < (1, 14, 4), reason="offsets of chunks do not count the user block"
)
def test_chunks_behind_a_user_block_are_decoded_in_threads(tmp_path: Path) -> None:
    wanted = np.arange(4000, dtype="i4").reshape(40, 100)
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=1024) as file:  # as files of MATLAB have
        file.create_dataset("x", data=wanted, chunks=(10, 100), compression="gzip")
        file.create_dataset("plain", data=wanted, chunks=(16, 100))
    for name in ("x", "plain"):
        with open_source(tmp_path / "x.h5", keys=name) as reader, h5py.File(tmp_path / "x.h5") as file:
            slabs = reader.slabs(name)
            assert slabs
            parts = b"".join(bytes(part) for slab in slabs for part in slab.decode())
            assert parts == file[name][...].tobytes()
            out = np.empty_like(wanted)
            reader.read_into(name, out)
            np.testing.assert_array_equal(out, file[name][...])
