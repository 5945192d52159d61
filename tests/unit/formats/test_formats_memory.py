"""Memory for decoding: counted, shared by threads, refused with figures; what each format says that it needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from legroom.errors import NoRoom
from legroom.formats.detect import open_source
from legroom.formats.memory import Allowed, DecodingMemory

MB = 1 << 20


def memory(nbytes: int) -> DecodingMemory:
    return DecodingMemory(lambda: Allowed(nbytes, "a box of its own", ("buy more",)))


def test_threads_wait_for_each_other_and_never_take_too_much() -> None:
    gate, lock = memory(100), threading.Lock()
    now = [0, 0]  # in use, the most that ever was

    def work() -> None:
        for _ in range(20):
            with gate.take(40, "a chunk"):
                with lock:
                    now[0] += 40
                    now[1] = max(now)
                time.sleep(0.0005)
                with lock:
                    now[0] -= 40

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert now == [0, 80]


def test_what_does_not_fit_alone_is_refused_with_figures() -> None:
    gate = memory(10 * MB)
    with (
        pytest.raises(NoRoom, match=r"15 MB of memory missing to decode the chunk") as refused,
        gate.take(25 * MB, "the chunk"),
    ):
        pass
    assert "25 MB at once; a box of its own" in str(refused.value) and "buy more" in str(refused.value)
    with gate.take(10 * MB, "another"):  # the refusal took nothing
        pass


def test_as_many_as_fit() -> None:
    gate = memory(100)
    with gate.take_some(30, 10, "chunks") as count:
        assert count == 3
    with gate.take_some(30, 2, "chunks") as count:
        assert count == 2
    with DecodingMemory().take_some(30, 7, "chunks") as count:
        assert count == 7  # no limit


def test_memory_that_others_take_meanwhile_counts() -> None:
    left = [100 * MB]
    gate = DecodingMemory(lambda: Allowed(left[0], "shrinking"))
    with gate.take(60 * MB, "one"):
        pass
    left[0] = 20 * MB
    with pytest.raises(NoRoom), gate.take(60 * MB, "two"):
        pass


def hdf5(path: Path, **options: Any) -> int:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(4 * MB, dtype=np.int32).reshape(64, -1), **options)
    return 16 * MB


def arrow(path: Path) -> int:
    pa, feather = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.feather")
    feather.write_feather(
        pa.table({"x": np.arange(4 * MB, dtype=np.int32)}),
        path,
        compression="uncompressed",
        chunksize=1 << 30,
    )
    return 16 * MB


def zarr(path: Path) -> int:
    group = pytest.importorskip("zarr").open_group(path, mode="w")
    group.create_array("x", shape=(64, MB // 16), dtype="int32", chunks=(64, MB // 16))[...] = 1
    return 16 * MB


SOURCES: dict[str, tuple[Callable[[Path], int], str]] = {
    "rows.h5": (lambda path: hdf5(path, chunks=(64, MB // 16), compression="gzip"), "x"),
    "columns.h5": (lambda path: hdf5(path, chunks=(64, MB // 32), compression="gzip", shuffle=True), "x"),
    "lzf.h5": (lambda path: hdf5(path, chunks=(64, MB // 16), compression="lzf"), "x"),
    "one.zarr": (zarr, "x"),
    "one.arrow": (arrow, "table"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_a_format_needs_is_said_and_kept_to(tmp_path: Path, name: str) -> None:
    """With exactly what it says, it reads; with less than one chunk, it refuses and does not take it."""
    write, item = SOURCES[name]
    chunk = write(tmp_path / name) // (2 if name == "columns.h5" else 1)

    def read(gate: DecodingMemory) -> None:
        with open_source(tmp_path / name, memory=gate) as reader:
            spec = reader.describe().items[0]
            if item == "table":
                reader.write_table(item, tmp_path / "out.arrow")
                return
            out = np.zeros(spec.shape, spec.dtype)
            reader.read_into(item, out)
            for slab in reader.slabs(item) or ():
                assert sum(map(len, slab.decode())) == slab.nbytes

    with open_source(tmp_path / name) as reader:
        reader.describe()
        needed = reader.decoding(item)
        slabs = max((slab.decoding for slab in reader.slabs(item) or ()), default=0) if item == "x" else 0
    assert chunk <= max(needed, slabs) <= 4 * chunk
    read(memory(max(needed, slabs)))
    with pytest.raises(NoRoom, match="memory missing to decode"):
        read(memory(chunk - 1))


def test_plain_data_need_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1000, 1000)))
    with open_source(tmp_path / "a.npy", memory=memory(0)) as reader:
        assert reader.decoding("array") == 0
        reader.read_into("array", np.zeros((1000, 1000)))
    hdf5(tmp_path / "a.h5", chunks=(64, MB // 16))  # in chunks, and nothing to undo: copied in pieces
    with open_source(tmp_path / "a.h5") as reader:
        slabs = reader.slabs("x")
        assert slabs is not None and max(slab.decoding for slab in slabs) <= MB


def test_references_to_rows_are_counted(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("s", (1 << 20,), h5py.string_dtype(), chunks=(1 << 18,))
    with open_source(tmp_path / "a.h5", memory=memory(8 * MB)) as reader, pytest.raises(NoRoom, match="'s'"):
        reader.describe()
