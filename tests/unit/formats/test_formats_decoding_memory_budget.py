"""Memory for decoding: counted, shared by threads, refused with figures; what each format says that it needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from legroom.errors import NoRoom
from legroom.formats import decoding_memory_budget as memory_module
from legroom.formats.decoding_memory_budget import Allowed, DecodingMemory
from legroom.formats.detect import open_source

MB = 1 << 20


def memory(nbytes: int) -> DecodingMemory:
    return DecodingMemory(lambda: Allowed(nbytes, "a machine of its own", ("buy more",)))


@pytest.mark.parametrize("most", [1, 2])
def test_threads_wait_for_each_other_and_never_take_too_much(most: int) -> None:
    gate, lock = memory(100), threading.Lock()
    now = [0, 0]  # in use, the most that ever was
    pair = threading.Barrier(2, timeout=60)

    def work() -> None:
        for turn in range(20):
            with gate.take_some(40, most, "chunks") as count:
                with lock:
                    now[0] += 40 * count
                    now[1] = max(now)
                if most == 1 and turn == 0:  # two at once, whoever gets a core when
                    pair.wait()
                time.sleep(0.0005)
                with lock:
                    now[0] -= 40 * count

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert now == [0, 80]


def test_what_never_fits_is_refused_with_figures() -> None:
    gate = memory(10 * MB)
    with (
        pytest.raises(NoRoom, match=r"not enough memory to decode the chunk: 15 MB more needed") as refused,
        gate.take(25 * MB, "the chunk"),
    ):
        pass
    assert "25 MB at once; a machine of its own" in str(refused.value) and "buy more" in str(refused.value)
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


def test_memory_taken_by_others_meanwhile_counts() -> None:
    left = [100 * MB]
    gate = DecodingMemory(lambda: Allowed(left[0], "shrinking"))
    with gate.take(60 * MB, "one"):
        pass
    left[0] = 20 * MB
    with pytest.raises(NoRoom), gate.take(60 * MB, "two"):
        pass


def test_memory_taken_by_others_counts_also_while_some_is_in_use() -> None:
    left, asked = [100 * MB], threading.Event()
    refused: list[NoRoom | None] = []

    def measure() -> Allowed:
        if threading.current_thread() is second:
            asked.set()
        return Allowed(left[0], "shrinking")

    def take() -> None:
        try:
            with gate.take(40 * MB, "two"):
                refused.append(None)
        except NoRoom as problem:
            refused.append(problem)

    gate, second = DecodingMemory(measure), threading.Thread(target=take)
    with gate.take(60 * MB, "one"):
        left[0] = 20 * MB  # 40 MB were left, and another process took half of them
        second.start()
        assert asked.wait(60)  # it has looked before this is given back
    second.join(60)
    assert len(refused) == 1 and refused[0] is not None


def hdf5(path: Path, **options: Any) -> int:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(4 * MB, dtype=np.int32).reshape(64, -1), **options)
    return 16 * MB


def arrow(path: Path) -> int:
    pa, feather = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.feather")
    feather.write_feather(
        pa.table({"x": np.arange(4 * MB, dtype=np.int32)}), path, compression="uncompressed", chunksize=1 << 30
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
def test_decoding_stays_within_the_memory_that_a_format_states(tmp_path: Path, name: str) -> None:
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
    with pytest.raises(NoRoom, match="not enough memory to decode"):
        read(memory(chunk - 1))


def test_raw_data_need_no_memory(tmp_path: Path) -> None:
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


def virtual(path: Path, parts: int, chunk: int, **options: Any) -> None:
    layout = h5py.VirtualLayout((parts * 64, 1024), "int32")
    for index in range(parts):
        with h5py.File(path.with_name(f"part-{index}.h5"), "w") as file:
            made = file.create_dataset("x", (64, 1024), "int32", chunks=(chunk, 1024), **options)
            layout[index * 64 : (index + 1) * 64] = h5py.VirtualSource(made)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
        again = h5py.VirtualLayout((parts * 64, 1024), "int32")
        again[...] = h5py.VirtualSource(".", "x", (parts * 64, 1024))
        file.create_virtual_dataset("again", again)


@pytest.mark.parametrize("name", ["x", "again"])
def test_the_sources_of_a_virtual_dataset_are_counted(tmp_path: Path, name: str) -> None:
    cache = 256 << 10  # all of a source, which HDF5 keeps as long as the virtual dataset is open
    virtual(tmp_path / "few.h5", 2, 8, compression="gzip")
    virtual(tmp_path / "many.h5", 40, 8, compression="gzip")
    with open_source(tmp_path / "few.h5") as few, open_source(tmp_path / "many.h5") as many:
        few.describe(), many.describe()
        assert many.decoding(name) - few.decoding(name) == 38 * cache
    large = h5py.File(tmp_path / "large.source", "w")
    with large:
        made = large.create_dataset("x", (64, MB), "int32", chunks=(64, MB), compression="gzip")
        layout = h5py.VirtualLayout((64, MB), "int32")
        layout[...] = h5py.VirtualSource(made)
    with h5py.File(tmp_path / "large.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with open_source(tmp_path / "large.h5") as reader:
        reader.describe()
        assert reader.decoding("x") >= 3 * 256 * MB


def test_chunk_locations_are_counted_before_they_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "tiny.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=np.zeros((30_000, 4), np.int32), chunks=(1, 4))
    with open_source(tmp_path / "tiny.h5", None, memory(5 * MB)) as reader:
        reader.describe()
        with pytest.raises(NoRoom, match="30000 chunks"):
            reader.slabs("x")
    with open_source(tmp_path / "tiny.h5", None, memory(50 * MB)) as reader:
        reader.describe()
        assert reader.slabs("x") is not None


def test_memory_freed_by_a_thread_counts_until_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator keeps what a thread has freed for that thread: another one's is taken beside it."""
    calls: list[str] = []
    monkeypatch.setattr(memory_module, "release_freed_memory", lambda: calls.append("given back"))
    monkeypatch.setattr(memory_module, "_STALE", 60)
    gate = memory(100)

    def take(nbytes: int) -> None:
        with gate.take(nbytes, "a chunk"):
            calls.append(f"took {nbytes}")

    with ExitStack() as stack:  # threads that live side by side: one that has ended leaves its arena to the next
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(3)]
        for thread, nbytes in zip(threads, (60, 30, 50), strict=True):
            thread.submit(take, nbytes).result(30)
    assert calls == ["took 60", "took 30", "given back", "took 50"]
    calls.clear()
    for _ in range(3):
        take(90)  # the same thread uses its own again
    assert calls.count("given back") <= 1 and calls.count("took 90") == 3
