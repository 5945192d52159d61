"""What is written to a disk and does not fit into the free memory does not wait for the disk in the page cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import legroom
from legroom.cache import store_free_space
from legroom.cache.store_free_space import Bound
from legroom.system import file_writes

ROWS = np.random.default_rng(0).integers(0, 255, (96, 100_000), np.uint8)


def hdf5(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("rows", data=ROWS, **options)
    return path


def contiguous(folder: Path) -> Path:
    return hdf5(folder / "x.h5")


def chunked(folder: Path) -> Path:
    return hdf5(folder / "x.h5", chunks=(48, 100_000), compression="gzip", compression_opts=1)


def table(folder: Path) -> Path:
    feather, pa = pytest.importorskip("pyarrow.feather"), pytest.importorskip("pyarrow")
    feather.write_feather(pa.table({"rows": ROWS.reshape(-1)}), folder / "x.arrow", compression="uncompressed")
    return folder / "x.arrow"


@pytest.mark.parametrize(
    ("make", "free", "through"),
    [
        *((make, free, False) for make in (contiguous, chunked, table) for free in (None, 64 << 20)),
        (contiguous, 9_000_000, True),
        (chunked, 10_000_000, True),
        (table, 9_000_000, True),
    ],
)
def test_a_load_that_does_not_fit_into_memory_is_written_through(
    tmp_path: Path,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    free: int | None,
    through: bool,
) -> None:
    path, written = make(tmp_path), list[int]()
    write_back = file_writes.write_back

    def counted(fd: int, offset: int = 0, length: int = 0) -> None:
        written.append(length)
        write_back(fd, offset, length)

    monkeypatch.setattr(file_writes, "write_back", counted)
    bounds = [] if free is None else [Bound(free, lambda: "a cgroup", memory=True)]
    monkeypatch.setattr(store_free_space, "memory_bounds", lambda: bounds)
    data = legroom.open(path, backing="disk")
    has = data["table"]["rows"].to_numpy() if "table" in data else data["rows"]
    assert np.array_equal(has.reshape(ROWS.shape), ROWS)
    assert data.info.backing == "disk"
    if through:
        assert ROWS.nbytes - (1 << 20) <= sum(written) < 1.1 * ROWS.nbytes and max(written) < 2 << 20
    else:
        assert not written
