"""legroom.open: what may be given, what comes back, how it is found again."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import rigs
import zarr
from archive_samples import write_mds

import legroom
from legroom.cache import drop_and_gc, list_and_verify, locks, source_digest_records, source_stamps_and_digests
from legroom.cache import store_directories as store_module
from legroom.cache import write_entry_files as load_module
from legroom.cache.find_or_build_entry import OpenRequest, find_manifest, source_paths
from legroom.cache.store_directories import open_stores
from legroom.errors import (
    DamagedSource,
    MissingKey,
    NotLoaded,
    SourceBeingWritten,
    SourceChanged,
    UnknownFormat,
    UnreadableSource,
    UnsupportedData,
    UsageError,
)
from open_descriptors import open_descriptors, opened_since


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that this process takes."""
    names: list[str] = []
    monkeypatch.setattr(store_module, "step_hook", names.append)
    return names


@pytest.fixture
def h5(tmp_path: Path) -> Path:
    path = tmp_path / "a.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["images"] = rng.integers(0, 255, (20, 8, 8, 3), np.uint8)
        file.create_dataset("group/heat", data=rng.random((20, 4)), chunks=(5, 4), compression="gzip", shuffle=True)
        file["big"] = np.arange(20, dtype=">i4")
        file["empty"] = np.zeros((0, 3), np.float32)
        file["one"] = 7.5
        file["names"] = [f"name {n} ü" for n in range(20)]
        file.attrs["made"] = "by hand"
        file["images"].attrs["mean"] = [1.5, 2.5]
    return path


def same(data: legroom.cache.cached_arrays_and_tables.Data, path: Path) -> bool:  # type: ignore[name-defined]
    with h5py.File(path) as file:
        return all((np.asarray(data[name]) == file[name][...]).all() for name in ("images", "group/heat", "big", "one"))


@pytest.mark.parametrize("backing", ["auto", "shm", "disk"])
def test_a_file_is_given_as_arrays(shm: Path, h5: Path, backing: str) -> None:
    with legroom.open(h5, backing=backing) as data:
        assert set(data) == {"images", "group/heat", "big", "empty", "one", "names"}
        assert len(data) == 6
        assert same(data, h5)
        assert data["big"].dtype.isnative and data["images"].flags.c_contiguous
        assert data["empty"].shape == (0, 3) and data["one"].shape == ()
        assert data["names"][3] == "name 3 ü"
        assert list(data["names"])[:2] == ["name 0 ü", "name 1 ü"]
        assert data.attributes["made"] == "by hand"
        assert data.info.arrays["images"].attributes["mean"] == [1.5, 2.5]
        assert data.info.backing == ("disk" if backing == "disk" else "shm")
        assert data.ready(10)
        for array in data.info.arrays:
            where = data.where(array)
            assert where is not None
            assert where.path.stat().st_mode & 0o777 == 0o400
            loaded = np.load(where.path, mmap_mode="r")  # anyone can, without us
            assert loaded.shape == data.info.arrays[array].shape
    with pytest.raises(UsageError, match="closed"):
        data["images"]


def test_a_plain_directory_is_refused_before_it_is_walked(shm: Path, h5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "walk", lambda *_, **__: pytest.fail("walked"))
    with pytest.raises(UnreadableSource) as caught:
        legroom.open(h5.parent)
    assert f"'{h5.parent}/*.h5'" in caught.value.fix[0]
    assert same(legroom.open(f"{h5.parent}/*.h5"), h5)


def test_a_path_may_be_bytes(shm: Path, h5: Path) -> None:
    for path in (os.fsencode(h5), [os.fsencode(h5)]):
        assert same(legroom.open(path), h5)


@pytest.mark.parametrize("path", [None, 3, [3], [None], object(), {"a.npy": 1}, io.BytesIO(b"a.npy")])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(UsageError, match="is not a path"):
        legroom.open(path)  # type: ignore[arg-type]


class Samples:
    """A map-style dataset, and what an iterable one has."""

    def __getitem__(self, row: int) -> int:
        return row

    def __len__(self) -> int:
        return 1 << 40


class Stream(Samples):
    def __iter__(self) -> Iterator[dict[str, int]]:
        yield {"x": 1}
        pytest.fail("read on")


class Saves(Stream):
    def save_to_disk(self, path: str) -> None: ...

    def __iter__(self) -> Iterator[dict[str, int]]:
        pytest.fail("read")


class Frame(dict[str, int]):
    def to_parquet(self, path: str) -> None: ...


@pytest.mark.parametrize(
    "given, advice",
    [
        (Saves(), "given.save_to_disk('data'); legroom.open('data')"),
        (Samples(), "legroom.freeze([given[i] for i in range(len(given))])"),
        (Stream(), "legroom.freeze(["),
        ({"a": 1}, "legroom.freeze(given)"),
        (Frame(a=1), "given.to_parquet('data.parquet')"),
        (np.zeros((3, 4)), "numpy.save('data.npy', given)"),
        (np.float32(1), "numpy.save("),
    ],
    ids=lambda one: type(one).__name__,
)
def test_data_in_memory_are_named_with_how_to_share_them(given: Any, advice: str) -> None:
    with pytest.raises(UsageError) as caught:
        legroom.open(given)
    shown = " ".join(repr(given).split())[:80]
    assert caught.value.what.startswith(shown) and type(given).__name__ in caught.value.why
    assert advice in caught.value.fix[0]


def test_a_file_object_is_not_a_list_of_paths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    for mode in ("r", "rb"):
        with path.open(mode) as file, pytest.raises(UsageError, match="is not a path") as caught:
            legroom.open(file)
        assert repr(str(path)) in caught.value.fix[0]


def test_content_is_not_a_path(h5: Path) -> None:
    with pytest.raises(UsageError, match="null character") as caught:
        legroom.open(h5.read_bytes())
    assert "not its content" in caught.value.fix[0]


@pytest.mark.parametrize("keys", [3, b"images", [3], []])
def test_what_are_no_keys_is_refused(shm: Path, h5: Path, keys: object) -> None:
    with pytest.raises(UsageError, match="selects nothing"):
        legroom.open(h5, keys)  # type: ignore[arg-type]


def test_the_second_open_reads_nothing(shm: Path, h5: Path, seen: list[str], old_files: None) -> None:
    first = legroom.open(h5)
    assert seen.count("read") == 1
    seen.clear()
    second = legroom.open(h5)
    assert seen == []
    assert same(second, h5)
    assert second.info.key == first.info.key


def test_a_renamed_copy_finds_the_same_entry(shm: Path, h5: Path, tmp_path: Path, seen: list[str]) -> None:
    first = legroom.open(h5)
    shutil.copy(h5, tmp_path / "other.h5")
    seen.clear()
    second = legroom.open(tmp_path / "other.h5")
    assert seen == ["elected", "hash", "record", "recorded"]  # nothing was copied
    assert second.info.key == first.info.key
    assert len(list_and_verify.entries()) == 1


def test_another_hash_finds_what_is_there(shm: Path, h5: Path, seen: list[str], old_files: None) -> None:
    pytest.importorskip("xxhash")
    first = legroom.open(h5)
    second = legroom.open(h5, hash="xxh3")
    assert second.info.key == first.info.key
    del first, second
    drop_and_gc.drop(h5)
    drop_and_gc.gc()
    third = legroom.open(h5, hash="xxh3")
    assert third.info.hash == "xxh3"
    assert third.info.key == f"{third.info.digest}-xxh3"


def test_a_changed_file_is_a_new_entry(shm: Path, npy, old_files: None) -> None:
    path = npy()
    before = legroom.open(path)
    np.save(path, np.ones((500, 10), np.int32))
    after = legroom.open(path)
    assert after["array"].all() and before["array"][0, 0] == 0
    assert after.info.key != before.info.key


def test_a_file_changed_within_its_clocks_tick_is_noticed(
    shm: Path, npy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same size, same times to the nanosecond: only hashing again can tell, and it is done."""
    path = npy()
    before = legroom.open(path).info
    assert before.hash is not None and before.digest is not None
    other = np.load(path)
    other[0, 0] = 99
    np.save(path, other)
    # The new content has the record of the old, as if it had been written within the tick in which that was hashed.
    now = source_stamps_and_digests.stamp_source([path])
    with open_stores() as places:
        source_digest_records.write_record(places.election_store, now, {before.hash: before.digest}, now.changed_ns)
    with monkeypatch.context() as quiet:
        quiet.setattr(source_digest_records, "QUIET_NS", 0)  # were it believed
        assert list_and_verify.info(path).digest == before.digest
        assert legroom.open(path)["array"][0, 0] == 0
        found = find_manifest(OpenRequest(source_paths(path)))
        assert found is not None
        found[2].release()
    with pytest.raises(NotLoaded):
        list_and_verify.info(path)
    assert find_manifest(OpenRequest(source_paths(path))) is None
    assert legroom.open(path)["array"][0, 0] == 99


def test_a_record_is_believed_when_the_file_was_quiet_or_the_question_older() -> None:
    second = 1_000_000_000
    record = source_digest_records.SourceRecord(
        {"md5": "0" * 32}, hashed_ns=10 * second, changed_ns=9 * second, paths=("a",)
    )
    assert not record.is_trusted(11 * second)
    assert record.is_trusted(10 * second)
    quiet = source_digest_records.SourceRecord(
        {"md5": "0" * 32}, hashed_ns=11 * second, changed_ns=9 * second, paths=("a",)
    )
    assert quiet.is_trusted(99 * second)


def test_keys_choose_and_are_served_by_the_whole(shm: Path, h5: Path, old_files: None) -> None:
    some = legroom.open(h5, ["images", "group"])
    assert set(some) == {"images", "group/heat"}
    assert "-" in (some.info.key or "")
    whole = legroom.open(h5)
    assert legroom.open(h5, "images").info.key == whole.info.key
    assert list(legroom.open(h5, "images")) == ["images"]
    for _ in range(2):  # with the file's own words, and with the entry's
        with pytest.raises(MissingKey, match="did you mean 'images'"):
            legroom.open(h5, "imagse")
    with pytest.raises(MissingKey):
        whole["nothing"]
    assert "images" in whole and "nothing" not in whole


def test_shards_are_joined_in_the_order_given(shm: Path, tmp_path: Path, old_files: None) -> None:
    parts = [np.full((n + 1, 4), n, np.float32) for n in range(3)]
    for number, part in enumerate(parts):
        with h5py.File(tmp_path / f"part-{number}.h5", "w") as file:
            file["x"] = part
            file["text"] = [f"{number}-{row}" for row in range(len(part))]
    data = legroom.open(str(tmp_path / "part-*.h5"))
    assert (data["x"] == np.concatenate(parts)).all()
    assert list(data["text"]) == ["0-0", "1-0", "1-1", "2-0", "2-1", "2-2"]
    back = legroom.open([tmp_path / "part-2.h5", tmp_path / "part-0.h5"])
    assert back["x"][:, 0].tolist() == [2, 2, 2, 0]
    assert list(back["text"]) == ["2-0", "2-1", "2-2", "0-0"]
    assert legroom.open([tmp_path / "part-2.h5", tmp_path / "part-0.h5"]).info.key == back.info.key
    with h5py.File(tmp_path / "odd.h5", "w") as file:
        file["x"] = np.zeros((2, 5), np.float32)
        file["text"] = ["a"]
    with pytest.raises(UnsupportedData, match="cannot join"):
        legroom.open([tmp_path / "part-0.h5", tmp_path / "odd.h5"])


def test_disabled_gives_the_same_without_the_cache(
    shm: Path, h5: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    calls: list[tuple[int, int]] = []
    data = legroom.open(h5, progress=lambda done, total: calls.append((done, total)))
    assert same(data, h5)
    assert data["names"][3] == "name 3 ü"
    assert data.info.backing == "memory" and data.info.key is None
    assert calls[-1][0] == calls[-1][1]
    assert data.ready()
    assert not shm.exists()
    monkeypatch.setenv("LEGROOM_DISABLE", "0")
    assert legroom.open(h5).info.backing == "shm"


def test_inplace_maps_the_file_where_it_lies(shm: Path, tmp_path: Path) -> None:
    path = tmp_path / "raw.h5"
    array = np.random.default_rng(0).random((100, 7))
    with h5py.File(path, "w") as file:
        file["x"] = array
    data = legroom.open(path, backing="inplace")
    assert (data["x"] == array).all()
    assert data.info.backing == "inplace"
    data["x"][0] = -1  # this process's own page
    with h5py.File(path) as file:
        assert (file["x"][...] == array).all()
    assert not shm.exists()


def test_inplace_refuses_what_must_be_decoded(shm: Path, h5: Path) -> None:
    with pytest.raises(UnsupportedData, match="in place"):
        legroom.open(h5, backing="inplace")


@pytest.mark.parametrize("kind", ["mds", "imagefolder", "zarr", "h5", "npz"])
def test_inplace_says_why_an_array_cannot_be_mapped(shm: Path, tmp_path: Path, kind: str) -> None:
    path, key, made, writable = tmp_path / "x", "x", False, False
    if kind == "mds":
        write_mds(path, [[{"label": bytes(8)}] * 2], {"label": "int"})
        key, made = "label", True
    elif kind == "imagefolder":
        (path / "cat").mkdir(parents=True)
        (path / "cat" / "1.jpg").write_bytes(b"x")
        key, made = "label", True
    elif kind == "zarr":
        zarr.open_group(path, mode="w").create_array("x", shape=(9,), dtype="int64")[:] = np.arange(9)
    elif kind == "h5":
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.arange(9), chunks=(3,))
        writable = True
    else:
        with path.open("wb") as file:
            np.savez_compressed(file, x=np.arange(9))
        writable = True
    with pytest.raises(UnsupportedData) as caught:
        legroom.open(path, keys=[key], backing="inplace")
    assert caught.value.why.startswith("no file has it" if made else "it is compressed, chunked"), caught.value.why
    assert any("contiguous" in fix for fix in caught.value.fix) is writable


def test_data_without_arrays_have_no_rows_to_loop_over(shm: Path, tmp_path: Path) -> None:
    h5py.File(tmp_path / "x.h5", "w").close()
    data = legroom.open(tmp_path / "x.h5")
    assert dict(data) == {}
    asks = [lambda: data.batches(2, format="numpy")]
    if find_spec("torch") is not None:
        asks.append(data.dataset)
    for ask in asks:
        with pytest.raises(UsageError, match=r"no columns|no array with rows") as caught:
            ask()
        assert "different" not in str(caught.value)
    with pytest.raises(UnsupportedData, match="it has no arrays"):
        legroom.plan(batch_size=2, data=tmp_path / "x.h5")
    for name, rows in (("zero", np.zeros((0, 4))), ("one", np.float32(1))):
        np.save(tmp_path / f"{name}.npy", rows)
    with pytest.raises(UnsupportedData, match="its arrays have 0 rows"):
        legroom.plan(batch_size=2, data=tmp_path / "zero.npy")
    with pytest.raises(UnsupportedData, match="none of its 1 arrays has a first axis"):
        legroom.plan(batch_size=2, data=tmp_path / "one.npy")


def test_progress_reaches_the_end_and_never_goes_back(shm: Path, npy) -> None:
    calls: list[tuple[int, int]] = []
    legroom.open(npy(array=np.zeros(30 << 20, np.uint8)), progress=lambda *now: calls.append(now))
    assert calls[-1] == (30 << 20, 30 << 20)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_progress_that_raises_stops_the_build_and_leaves_nothing(shm: Path, npy) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        legroom.open(npy(), progress=stop)
    assert list_and_verify.entries() == ()
    assert os.listdir(shm / "work") == []


def test_waiters_see_progress_and_get_the_data(shm: Path, npy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = npy()
    go = threading.Event()
    held = threading.Event()

    def slow(name: str) -> None:
        if name == "seal":
            held.set()
            assert go.wait(60)

    monkeypatch.setattr(store_module, "step_hook", slow)
    results: list[object] = []
    builder = threading.Thread(target=lambda: results.append(legroom.open(path)))
    builder.start()
    assert held.wait(60)
    with pytest.raises(NotLoaded, match="another process is loading"):
        legroom.open(path, wait=False)
    calls: list[tuple[int, int]] = []
    waiter = threading.Thread(target=lambda: results.append(legroom.open(path, progress=lambda *n: calls.append(n))))
    waiter.start()
    deadline = time.monotonic() + 60
    while not calls and time.monotonic() < deadline:
        time.sleep(0.01)
    go.set()
    builder.join(60)
    waiter.join(60)
    assert len(results) == 2
    assert calls and all(call == (20_000, 20_000) for call in calls)


def test_a_file_that_changes_during_the_load_is_loaded_again(shm: Path, npy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = npy()
    times = []

    def change(name: str) -> None:
        if name == "written" and not times:
            times.append(1)
            np.save(path, np.full((500, 10), 5, np.int32))

    monkeypatch.setattr(store_module, "step_hook", change)
    assert (legroom.open(path)["array"] == 5).all()
    assert times == [1]
    assert len(list_and_verify.entries()) == 1


def test_a_file_that_keeps_changing_is_refused(shm: Path, npy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = npy()
    counter = iter(range(100))

    def change(name: str) -> None:
        if name == "written":
            np.save(path, np.full((500, 10), next(counter), np.int32))

    monkeypatch.setattr(store_module, "step_hook", change)
    with pytest.raises(SourceChanged):
        legroom.open(path)
    assert list_and_verify.entries() == ()
    assert os.listdir(shm / "work") == []


def test_arrays_keep_the_entry_leased_and_valid(shm: Path, npy) -> None:
    path = npy()
    data = legroom.open(path)
    array = data["array"][10:20]
    data.close()
    del data
    gc.collect()
    with pytest.raises(legroom.LegroomError, match="in use"):
        drop_and_gc.drop(path)
    drop_and_gc.drop(path, force=True)
    assert array[0, 0] == 100  # the pages stay
    del array
    gc.collect()
    with open_stores() as places:
        assert not [
            name for name in os.listdir(places.election_store.locks) if locks.held(places.election_store.locks, name)
        ]


def test_no_descriptor_is_left_open(shm: Path, h5: Path, old_files: None) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    data = legroom.open(h5)
    data.ready()
    before = open_descriptors()
    more = [legroom.open(h5) for _ in range(10)]
    for one in more:
        one.ready()
    # One lease of an entry, whatever the number of its users.
    assert not opened_since(before)
    del more, one
    gc.collect()
    assert not opened_since(before)


@pytest.mark.real("user")
def test_an_unreadable_file(npy) -> None:
    path = npy()
    rigs.open_to_all(path.parent)
    path.chmod(0)
    script = f"import legroom\ntry: legroom.open({str(path)!r})\nexcept legroom.LegroomError as e: print(e.code, e.why)"
    done = subprocess.run(rigs.as_user(65534, [sys.executable, "-c", script]), capture_output=True, text=True, cwd="/")
    assert done.stdout.startswith("unreadable-source this user has no read permission"), done.stderr


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is no data file at all, whatever its name says" * 10)


def _truncated(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(100_000)
    os.truncate(path, 50_000)


def _virtual(path: Path) -> None:
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((10,), "i4")
        layout[:] = h5py.VirtualSource(str(path) + ".gone", "x", (10,))
        file.create_virtual_dataset("v", layout)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: None, UnreadableSource),
        (lambda path: path.symlink_to("nowhere"), UnreadableSource),
        (lambda path: path.mkdir(), (UnknownFormat, UnreadableSource)),
        (lambda path: path.touch(), DamagedSource),
        (_garbage, UnknownFormat),
        (_truncated, DamagedSource),
        (_virtual, legroom.LegroomError),
    ],
)
def test_bad_files_are_refused_and_leave_nothing(shm: Path, tmp_path: Path, make, error) -> None:
    path = tmp_path / "bad.h5"
    make(path)
    with pytest.raises(error) as caught:
        legroom.open(path)
    assert caught.value.why and caught.value.fix
    assert list_and_verify.entries() == ()


def test_a_virtual_dataset_follows_its_source(shm: Path, tmp_path: Path, old_files: None) -> None:
    source, virtual = tmp_path / "source.h5", tmp_path / "virtual.h5"

    def write(value: int) -> None:
        with h5py.File(source, "w") as file:
            file["x"] = np.full(10, value, "i4")

    write(1)
    with h5py.File(virtual, "w") as file:
        layout = h5py.VirtualLayout((10,), "i4")
        layout[:] = h5py.VirtualSource(str(source), "x", (10,))
        file.create_virtual_dataset("v", layout)
    assert (legroom.open(virtual)["v"] == 1).all()
    assert (legroom.open(virtual)["v"] == 1).all()
    write(2)
    assert (legroom.open(virtual)["v"] == 2).all()


def test_other_keys_may_need_other_files(shm: Path, tmp_path: Path, old_files: None) -> None:
    """Choosing what lies in the named file alone must not hide that the rest lies elsewhere, and has changed."""
    source, both = tmp_path / "source.h5", tmp_path / "both.h5"

    def write(value: int) -> None:
        with h5py.File(source, "w") as file:
            file["x"] = np.full(10, value, "i4")

    write(1)
    with h5py.File(both, "w") as file:
        layout = h5py.VirtualLayout((10,), "i4")
        layout[:] = h5py.VirtualSource(str(source), "x", (10,))
        file.create_virtual_dataset("v", layout)
        file["local"] = np.arange(3)
    for value in (1, 2, 3):
        write(value)
        assert legroom.open(both, "local")["local"].tolist() == [0, 1, 2]
        assert (legroom.open(both)["v"] == value).all()
        assert legroom.open(both, "local")["local"].tolist() == [0, 1, 2]
        assert (legroom.open(both, "v")["v"] == value).all()


def test_a_file_being_written_is_refused(shm: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["x"] = np.arange(10)
        file.flush()
        with pytest.raises(SourceBeingWritten):
            legroom.open(path)


@pytest.mark.parametrize(
    "arguments", [{"backing": "tape"}, {"hash": "sha0"}, {"keys": []}, {"path": []}, {"path": "a\0b"}]
)
def test_nonsense_is_refused(shm: Path, npy, arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        legroom.open(**{"path": npy(), **arguments})  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing(shm: Path, tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource, match="nothing matches"):
        legroom.open(str(tmp_path / "*.h5"))


def test_decoding_without_maps_gives_the_same(shm: Path, h5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What file systems get whose allocation a map cannot rely on."""
    monkeypatch.setattr(load_module, "_SURE", frozenset())
    assert same(legroom.open(h5), h5)


def test_fortran_order_is_turned(shm: Path, npy) -> None:
    array = np.asfortranarray(np.random.default_rng(0).random((30, 40)))
    found = legroom.open(npy(array=array))["array"]
    assert found.flags.c_contiguous and (found == array).all()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_attaching_imports_no_reader(shm: Path, h5: Path, tmp_path: Path) -> None:
    import subprocess

    time.sleep(max(0.0, h5.stat().st_ctime + 2.1 - time.time()))
    legroom.open(h5)
    script = "import sys, legroom; legroom.open(sys.argv[1]); print('h5py' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, str(h5)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_cold_open_reads_no_manifest_of_other_entries(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many entries there are: a link named for size and sample says whether one may be the same."""
    from legroom.cache import lease_and_map_entry

    for number in range(5):
        np.save(tmp_path / f"{number}.npy", np.full(1000, number))
        legroom.open(tmp_path / f"{number}.npy").close()
    keys: list[str] = []
    read = lease_and_map_entry.read_manifest

    def noted(folder: int, key: str) -> object:
        keys.append(key)
        return read(folder, key)

    monkeypatch.setattr(lease_and_map_entry, "read_manifest", noted)
    np.save(tmp_path / "new.npy", np.full(1000, 99))
    data = legroom.open(tmp_path / "new.npy")
    assert set(keys) == {data.info.key}


@pytest.mark.parametrize("backing", ["shm", "disk"])
def test_a_cold_open_lists_no_folder_that_grows_with_the_entries(
    shm: Path, disk: Path, tmp_path: Path, backing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.npy" for number in range(4)]
    for number, path in enumerate(paths):
        np.save(path, np.full(1000, number))
    store = {"shm": shm, "disk": disk}[backing]
    for path in paths[:3]:
        legroom.open(path, backing=backing).close()
    listed: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def listing(folder: Any = ".") -> Any:
            listed.append(os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) else os.fspath(folder))
            return real(folder)

        return listing

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, noting(name))
    legroom.open(paths[3], backing=backing).close()
    inside = {name for name in listed if name == str(store) or name.startswith(f"{store}/")}
    assert inside and {name for name in inside if not name.startswith(f"{store}/work")} == set()


def test_hints_of_entries_that_are_gone_go_too(shm: Path, tmp_path: Path) -> None:
    from legroom.cache import drop_and_gc

    np.save(tmp_path / "a.npy", np.arange(1000))
    with legroom.open(tmp_path / "a.npy") as data:
        key = data.info.key
    assert [os.readlink(link) for link in (shm / "samples").iterdir()] == [key]
    drop_and_gc.drop(key)
    np.save(tmp_path / "b.npy", np.arange(1000))  # the same size and sample, with no entry any more
    with legroom.open(tmp_path / "b.npy") as data:
        assert [os.readlink(link) for link in (shm / "samples").iterdir()] == [data.info.key]
    drop_and_gc.drop(key)
    drop_and_gc.gc()
    assert list((shm / "samples").iterdir()) == []


@pytest.mark.parametrize("backing", ["shm", pytest.param("disk", marks=pytest.mark.soak)])
def test_thousands_of_small_arrays(shm: Path, tmp_path: Path, backing: str) -> None:
    """They are copied together; each has a file, a checksum and a stamp of its own all the same."""
    from legroom.cache import list_and_verify

    shapes = [(7,), (0,), (3, 5), ()] * 300
    arrays = {f"layer.{n}": np.full(shape, n, np.float32) for n, shape in enumerate(shapes)}
    arrays["large"] = np.arange(200_000, dtype=np.int64)
    np.savez(tmp_path / "a.npz", **arrays)
    header, data = {}, b""
    for name, array in arrays.items():
        kind = {"float32": "F32", "int64": "I64"}[str(array.dtype)]
        end = len(data) + array.nbytes
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    for name in ("a.safetensors", "a.npz"):
        for _ in range(2):
            opened = legroom.open(tmp_path / name, backing=backing)
            assert list(opened) == list(arrays)
            assert all(np.array_equal(opened[key], array) for key, array in arrays.items())
            assert stat.S_IMODE(opened.where("layer.0").path.stat().st_mode) == 0o400
        assert list_and_verify.verify(opened.info.key)[0].whole
