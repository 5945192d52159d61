"""Checksums that a format carries: what the format's own library refuses is refused here, whatever way it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import legroom
from legroom.errors import DamagedSource

ARRAY = np.random.default_rng(0).integers(0, 1 << 60, 50_000)
MIDDLE = ARRAY[25_000].tobytes()  # found once in what is stored as it is


def _npz(path: Path) -> None:
    np.savez(path, other=np.arange(10), a=ARRAY)


def _npz_deflated(path: Path) -> None:
    np.savez_compressed(path, other=np.arange(10), a=ARRAY)


def _hdf5(**options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("a", data=ARRAY, chunks=(7000,), **options)

    return write


def _zarr(path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    zarr.create_array(str(path), data=ARRAY, chunks=(7000,), compressors=[zarr.codecs.Crc32cCodec()], overwrite=True)


def _parquet(path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        arrow.table({"a": ARRAY}), path, write_page_checksum=True, compression="none", use_dictionary=False
    )


WRITERS = {
    "npz": _npz,
    "npz-deflated": _npz_deflated,
    "hdf5-fletcher32": _hdf5(fletcher32=True),
    "hdf5-fletcher32-shuffle": _hdf5(fletcher32=True, shuffle=True),
    "hdf5-gzip": _hdf5(compression="gzip"),
    "hdf5-lzf-fletcher32": _hdf5(compression="lzf", fletcher32=True),
    "zarr-crc32c": _zarr,
    "parquet": _parquet,
}


def flip(path: Path) -> None:
    """Change one bit in the middle of the data."""
    file = path if path.is_file() else sorted(path.glob("**/c/3"))[0]
    data = bytearray(file.read_bytes())
    at = data.find(MIDDLE)
    data[at if at >= 0 else len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.usefixtures("shm")
@pytest.mark.parametrize("way", ["shm", "disk", "disabled"])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_flipped_bit_that_the_format_can_notice_is_refused(
    tmp_path: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    WRITERS[kind](path.with_suffix(".npz") if kind.startswith("npz") else path)
    if kind.startswith("npz"):
        path = path.with_suffix(".npz")
    monkeypatch.setenv("LEGROOM_DISABLE", "1" if way == "disabled" else "")
    backing = "auto" if way == "disabled" else way
    legroom.open(path, backing=backing).close()
    flip(path)
    with pytest.raises(DamagedSource):
        legroom.open(path, backing=backing)


@pytest.mark.usefixtures("shm")
def test_the_checksum_of_one_of_several_archives_is_compared(tmp_path: Path) -> None:
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", a=ARRAY + number)
    pattern = str(tmp_path / "*.npz")
    with legroom.open(pattern) as data:
        assert np.array_equal(data["a"], np.concatenate([ARRAY, ARRAY + 1, ARRAY + 2]))
    broken = tmp_path / "1.npz"
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1
    broken.write_bytes(content)
    with pytest.raises(DamagedSource, match=r"1\.npz"):
        legroom.open(pattern)


@pytest.mark.usefixtures("shm")
def test_a_damaged_archive_is_not_mapped_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, a=ARRAY.view(np.uint8))  # bytes may lie anywhere
    with legroom.open(path, backing="inplace") as data:
        assert np.array_equal(data["a"], ARRAY.view(np.uint8))
    flip(path)
    with pytest.raises(DamagedSource):
        legroom.open(path, backing="inplace")


@pytest.mark.usefixtures("shm")
def test_what_was_refused_leaves_nothing(tmp_path: Path, shm: Path) -> None:
    path = tmp_path / "a.npz"
    _npz(path)
    flip(path)
    with pytest.raises(DamagedSource):
        legroom.open(path)
    assert {*os.listdir(shm)} == {"locks", "sources", "work"} and not os.listdir(shm / "work")
