"""Frozen objects in the store: one copy, found by content; killed, dropped, pickled, listed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_values import same

import legroom
from legroom.cache import drop_and_gc, list_and_verify, store_directories
from legroom.cache.frozen_sequence_and_mapping import FrozenMapping, FrozenSequence
from legroom.cli.main import run
from legroom.errors import MissingPackage, NoRoom, NotLoaded, UnsupportedData, UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs flock and /proc")


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Annotations as in COCO."""
    chance = random.Random(seed)
    return [
        {
            "file_name": f"train/{index:012d}.jpg",
            "image_id": index,
            "annotations": [
                {"bbox": [chance.random() * 640 for _ in range(4)], "category_id": chance.randrange(80), "iscrowd": 0}
                for _ in range(chance.randrange(1, 6))
            ],
        }
        for index in range(count)
    ]


def test_a_frozen_list_behaves_as_the_list(shm: Path) -> None:
    items = [(f"img/{index}.jpg", index % 10) for index in range(3000)]
    view = legroom.freeze(items)
    assert isinstance(view, FrozenSequence) and len(view) == 3000
    assert view == items and items == view and (view != items) is False
    assert view != items[:-1] and view != tuple(items) and view != [*items[:-1], ("x", 0)]
    assert view[0] == items[0] and view[-1] == items[-1] and view[np.int64(5)] == items[5]
    for part in (slice(5, 10), slice(None, None, -1), slice(-3, None), slice(2, 2), slice(0, 3000, 7)):
        assert view[part] == items[part] and isinstance(view[part], FrozenSequence)
        assert view[part][::2] == items[part][::2]
    assert items[7] in view and ("no", 1) not in view
    assert view.index(items[9]) == 9 and view.count(items[9]) == 1
    assert list(reversed(view[:5])) == items[4::-1]
    for wrong in (3000, -3001):
        with pytest.raises(IndexError, match=str(wrong)):
            view[wrong]
    with pytest.raises(TypeError):
        view["a"]  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        hash(view)
    assert repr(view).startswith("<frozen list of 3,000 items, ") and repr(view).endswith(" in shm>")
    view._contents.entry = replace(view.info, backing="disk")
    assert repr(view).endswith(" on disk>")
    assert legroom.freeze(view) is view
    assert bool(view) and not bool(legroom.freeze([]))


def test_a_frozen_dict_behaves_as_the_dict(shm: Path) -> None:
    items = {index: [f"a{index}"] for index in range(2000, 0, -1)} | {
        "name": 1,
        b"raw": 2,
        None: 3,
        (1, "a"): 4,
        0.5: 5,
    }
    view = legroom.freeze(items)
    assert isinstance(view, FrozenMapping) and view == items and items == view
    assert list(view) == list(items) and list(view.keys()) == list(items.keys())
    assert list(view.values()) == list(items.values()) and list(view.items()) == list(items.items())
    assert (5, ["a5"]) in view.items() and ["a5"] in view.values()
    for key in (7, 7.0, np.int32(7), np.float64(7), True + 6):
        assert view[key] == ["a7"]  # keys that are equal to Python
    assert view[True] == view[1] == ["a1"] and view[np.str_("name")] == 1
    for missing in (-1, 1.5, "x", b"x", (1, "b"), float("nan"), object(), 2**80, np.zeros(())[()] + 0.25):
        assert missing not in view and view.get(missing) is None
        with pytest.raises(KeyError):
            view[missing]
    with pytest.raises(TypeError):
        view[[1]]
    assert view != {**items, "name": 2} and view != {1: 2} and legroom.freeze({}) == {}


def test_a_dict_of_large_lists_is_entered_without_decoding_them(shm: Path) -> None:
    loaded = {
        "info": {"year": 2017},
        "images": records(1500),
        "by_id": {index: (index, "x") for index in range(1024)},
        "categories": [{"id": 1}],
        "matrix": np.arange(300_000.0).reshape(300, 1000),
        "parts": [records(1100, 1), "end"],
    }
    view = legroom.freeze(loaded, name="instances")
    assert isinstance(view["images"], FrozenSequence) and view["images"] == loaded["images"]
    assert isinstance(view["by_id"], FrozenMapping) and view["by_id"][1023] == (1023, "x")
    assert same(view["categories"], [{"id": 1}]) and same(view["info"], {"year": 2017})
    assert same(view["parts"], loaded["parts"])  # a list inside an item is an item's own
    assert same(view["matrix"], loaded["matrix"]) and not view["matrix"].flags.writeable
    assert view["matrix"].ctypes.data % 64 == 0
    again = pickle.loads(pickle.dumps(view["images"][10:20]))
    assert again == loaded["images"][10:20]
    long_rows = [list(range(2000)) for _ in range(100)]  # many items, each of them long: plain lists
    assert same(list(legroom.freeze(long_rows)), long_rows)


def test_equal_content_is_one_entry_whatever_its_name(shm: Path) -> None:
    first, second = legroom.freeze(records(50), name="a"), legroom.freeze(records(50), name="b")
    other = legroom.freeze(tuple(records(50)))
    assert first.info.key == second.info.key != other.info.key
    assert [entry.attributes.get("name") for entry in list_and_verify.entries()] == ["a", None]
    assert first == second and list(first) == list(other) and first != other


def test_the_sample_alone_does_not_identify(shm: Path) -> None:
    """Objects that differ only where the sample does not look are two entries."""
    items = list(range(100_000))
    changed = [*items[:77], -1, *items[78:]]
    one, two = legroom.freeze(items), legroom.freeze(changed)
    assert one.info.key != two.info.key and one[77] == 77 and two[77] == -1


def test_a_view_pickles_by_key_and_a_dropped_entry_is_an_error_in_words(shm: Path) -> None:
    view = legroom.freeze(records(300), name="train")
    data = pickle.dumps(view)
    assert len(data) < 500
    again = pickle.loads(data)
    assert again == view and again.info.key == view.info.key
    drop_and_gc.drop(view.info.key, force=True)
    assert view[5] == records(300)[5] and again == view  # who has it open keeps its pages
    with pytest.raises(NotLoaded, match="is not in the cache any more") as caught:
        pickle.loads(data)
    assert "legroom.freeze again" in str(caught.value)
    del view, again
    gc.collect()
    assert legroom.freeze(records(300)) == records(300)  # frozen again


def test_an_entry_in_use_is_not_dropped_nor_collected(shm: Path) -> None:
    view = legroom.freeze(records(20), name="mine")
    assert [entry.in_use for entry in list_and_verify.entries("mine")] == [True]
    assert not drop_and_gc.gc(older=0).entries and len(drop_and_gc.gc(older=0).kept) == 1
    del view
    gc.collect()
    assert not drop_and_gc.gc(stale=True).entries  # it has no source that could have changed
    assert len(drop_and_gc.gc(older=0).entries) == 1


def test_the_command_line_shows_and_handles_it(shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    legroom.freeze(records(20), name="coco-train")
    legroom.freeze({"a": 1})
    gc.collect()

    def call(*words: str) -> str:
        assert run(["cache", *words]) == 0
        return capsys.readouterr().out

    assert "coco-train (frozen list of 20 items)" in call("list") and "frozen dict of 1 item" in call("list")
    assert '@name: "coco-train"' in call("info", "coco-train")
    verified = call("verify", "coco-train")
    assert verified.endswith(": copy intact\n") and "coco-train" in verified
    (entry,) = json.loads(call("list", "coco-train", "--json"))["entries"]
    assert entry["format"] == "frozen" and entry["attributes"]["name"] == "coco-train" and entry["source"] is None
    assert "coco-train (frozen list of 20 items)" in call("drop", "coco-train")
    assert len(list_and_verify.entries()) == 1


def test_a_damaged_entry_is_found_and_frozen_again(shm: Path) -> None:
    view = legroom.freeze(records(200), name="x")
    path = shm / view.info.key / "data.npy"
    del view
    gc.collect()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"????")
    (result,) = list_and_verify.verify("x")
    assert not result.whole
    assert legroom.freeze(records(200)) == records(200)


@pytest.mark.parametrize("wrong", [5, "text", np.zeros(3), range(3), {1, 2}, None])
def test_what_freeze_does_not_take(shm: Path, wrong: Any) -> None:
    with pytest.raises(UsageError, match="takes a list, a tuple or a dict"):
        legroom.freeze(wrong)
    with pytest.raises(UsageError, match="name must be"):
        legroom.freeze([], name="")


def test_a_list_that_changes_meanwhile_is_refused_and_leaves_nothing(shm: Path) -> None:
    items: list[Any] = [[index] for index in range(1000)]
    grown = []

    def grow(name: str) -> None:
        if name == "write" and not grown:
            grown.append(items.append)

    store_directories.step_hook = grow
    try:
        writer = sys.modules["legroom.cache.frozen_writer"]
        real = writer._chunks  # type: ignore[attr-defined]

        def chunks(given: Any) -> Any:
            for chunk in real(given):
                if grown:
                    grown.pop()([0])
                yield chunk

        writer._chunks = chunks  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="changed while"):
            legroom.freeze(items)
    finally:
        writer._chunks = real  # type: ignore[attr-defined]
        store_directories.step_hook = None
    assert not list_and_verify.entries() and not os.listdir(shm / "work")


def test_no_room_is_an_error_with_numbers_and_leaves_nothing(
    shm: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_DISK_LIMIT", "1MB")
    from legroom.cache import store_free_space

    real = store_free_space.bounds
    monkeypatch.setattr(
        store_free_space,
        "bounds",
        lambda store: [*real(store), store_free_space.Bound(1 << 20, lambda: "a small store")],
    )
    big = [os.urandom(1000) for _ in range(100)] * 100
    with pytest.raises(NoRoom, match="no store has enough free space for big"):
        legroom.freeze(big, name="big")
    # The estimate is too small for this one: the store runs full in the middle.
    uneven = [b""] * 65_000
    for index in range(1, 65_000, 2):
        uneven[index] = bytes(100)
    with pytest.raises(NoRoom):
        legroom.freeze(uneven)
    for root in (shm, disk):
        assert not [name for name in os.listdir(root) if len(name) >= 32] and os.listdir(root / "work") in (
            [],
            ["used"],
        )


@pytest.mark.parametrize("arrays", [3, 0])
def test_a_small_shm_has_room_for_a_small_object(shm: Path, monkeypatch: pytest.MonkeyPatch, arrays: int) -> None:
    """Large arrays are not in the sample, and texts may be longer than those that are."""
    from legroom.cache import store_free_space

    small = store_free_space.Bound(12 << 20, lambda: "a small /dev/shm")
    monkeypatch.setattr(store_free_space, "bounds", lambda store: [small] if store.backing == "shm" else [])
    obj = [np.full(1 << 20, number, np.uint8) for number in range(arrays)] or [
        "x" * 2000 if number % 2 else "" for number in range(3000)
    ]
    assert legroom.freeze(obj).info.backing == "shm"


def test_an_entry_of_a_newer_format_is_left_alone_and_the_one_beside_it_is_found(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = legroom.freeze([1, 2, 3]).info.key
    manifest = shm / str(key) / "manifest.json"
    manifest.chmod(0o600)
    manifest.write_text('{"format": 99}')
    gc.collect()
    beside = legroom.freeze([1, 2, 3]).info.key
    assert beside != key
    steps: list[str] = []
    monkeypatch.setattr(store_directories, "step_hook", steps.append)
    assert legroom.freeze([1, 2, 3]).info.key == beside
    assert "write" not in steps and "unusable" not in caplog.text
    assert manifest.read_text() == '{"format": 99}'


@pytest.mark.parametrize("problem", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_process_without_threads_or_memory_is_told_so(
    shm: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise problem

    monkeypatch.setattr("legroom.cache.frozen_writer.ThreadPoolExecutor", refuse)
    monkeypatch.setattr("legroom.cache.frozen_writer.usable_cpus", lambda: 2)
    for disabled in ("0", "1"):
        monkeypatch.setenv("LEGROOM_DISABLE", disabled)
        with pytest.raises(NoRoom, match="not enough memory to load labels") as caught:
            legroom.freeze([1, 2, 3], name="labels")
        assert caught.value.fix and not any("keys=" in line for line in caught.value.fix)


def test_a_missing_encoder_is_installed_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from legroom.cache import frozen_encoding

    monkeypatch.setitem(sys.modules, "ormsgpack", None)
    frozen_encoding._library.cache_clear()
    try:
        with pytest.raises(MissingPackage) as caught:
            frozen_encoding.Encoder()
        assert caught.value.fix == ("pip install ormsgpack", "keep it as a numpy array")
    finally:
        frozen_encoding._library.cache_clear()


# Processes.


def in_processes(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run it in forked processes at once; their results."""
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()

    def run(number: int) -> None:
        results.put((number, work(number)))

    children = [context.Process(target=run, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    found = dict(results.get(timeout=240) for _ in children)
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    return [found[number] for number in range(count)]


def test_one_process_writes_and_the_others_attach(shm: Path, tmp_path: Path) -> None:
    items = records(4000)
    begin = time.monotonic() + 1.0

    def work(number: int) -> tuple[str, bool, int]:
        wrote: list[str] = []
        store_directories.step_hook = wrote.append
        time.sleep(max(0.0, begin - time.monotonic()))
        view = legroom.freeze(items)
        return view.info.key or "", view == items, wrote.count("write")

    found = in_processes(4, work)
    assert len({key for key, _, _ in found}) == 1 and all(equal for _, equal, _ in found)
    assert sum(writes for _, _, writes in found) == 1
    assert len(list_and_verify.entries()) == 1 and not os.listdir(shm / "work")


STEPS = ("work", "reserve", "elected", "write", "written", "lease", "manifest", "publish", "done")


@pytest.mark.parametrize("at", STEPS)
def test_killed_while_freezing_leaves_nothing_and_the_next_one_works(shm: Path, at: str) -> None:
    items = records(500)
    pid = os.fork()
    if pid == 0:

        def die(name: str) -> None:
            if name == at:
                os.kill(os.getpid(), signal.SIGKILL)

        store_directories.step_hook = die
        try:
            legroom.freeze(items)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert legroom.freeze(items) == items
    gc.collect()
    drop_and_gc.drop()
    drop_and_gc.gc()
    left = [name for name in ("work", "sources", "samples", "locks") for name in os.listdir(shm / name)]
    assert set(left) <= {"store.lock", "used"} and not list_and_verify.entries()


@pytest.mark.soak
def test_killed_at_random_moments(shm: Path) -> None:
    items, chance = records(3000), random.Random(7)
    for _ in range(60):
        pids = []
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                ok = legroom.freeze(items) == items
                os._exit(0 if ok else 1)
            pids.append(pid)
        time.sleep(chance.random() * 0.3)
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)
        assert os.waitstatus_to_exitcode(os.waitpid(pids[1], 0)[1]) == 0
        if chance.random() < 0.5:
            drop_and_gc.drop(force=True)
    drop_and_gc.gc()
    assert not [name for name in os.listdir(shm / "work") if name != "used"]


def pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss")


def grown_by_reading(data: Any, workers: int = 4) -> int:
    """Bytes that forked workers add to the machine by reading all of it three times."""
    ready, go = os.pipe()
    done, finished = os.pipe()
    pids = []
    for _ in range(workers):
        pid = os.fork()
        if pid == 0:
            gc.disable()
            os.read(ready, 1)
            for _ in range(3):
                for item in data:
                    item["annotations"][0]["bbox"][0]
            os.write(finished, b".")
            signal.pause()  # its memory is read; what is in the pipe is for those that have not begun
            os._exit(0)
        pids.append(pid)
    try:
        before = pss(os.getpid()) + sum(map(pss, pids))
        os.write(go, b"." * workers)
        for _ in pids:
            os.read(done, 1)
        return pss(os.getpid()) + sum(map(pss, pids)) - before
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for fd in (ready, go, done, finished):
            os.close(fd)


def test_forked_workers_share_a_frozen_list_and_copy_a_plain_one(shm: Path) -> None:
    plain = records(15_000)
    view = legroom.freeze(plain)
    copied = grown_by_reading(plain)
    # Four workers copy most of the Python objects each, and those take more than pickled bytes.
    assert copied > 4 * len(pickle.dumps(plain))
    assert grown_by_reading(view) < 0.3 * copied  # the shared copy is mapped, and each worker has a little of its own


class Folder:
    """A dataset as torchvision's ImageFolder."""

    def __init__(self, count: int = 30_000) -> None:
        self.samples = [(f"images/{index:08d}.jpg", index % 10) for index in range(count)]
        self.imgs = self.samples
        self.targets = [index % 10 for index in range(count)]
        self.classes = ["a", "b"]
        self.weights = np.zeros(count)
        self.odd = [{"when": object()} for _ in range(20_000)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Part:
    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


def test_freeze_dataset_freezes_large_attributes_in_place(shm: Path) -> None:
    folder = Folder()
    plain = list(folder.samples)
    told = {one.name: one for one in legroom.freeze_dataset(folder)}
    assert set(told) == {"samples", "imgs", "odd"}  # targets are small: ten integers, 30,000 times
    assert told["samples"].frozen and told["samples"].items == 30_000 and told["samples"].bytes > 3 << 20
    assert folder.samples is folder.imgs and folder.samples == plain and isinstance(folder.samples, FrozenSequence)
    assert told["odd"].frozen is None and "odd[0]['when']" in str(told["odd"]) and type(folder.odd) is list
    assert type(folder.classes) is list and type(folder.weights) is np.ndarray
    assert legroom.freeze_dataset(folder) == (told["odd"],)
    both = [Part(Folder(), list(range(300, 60_300)))]
    outer = Part(None, [])
    outer.dataset = both
    names = {one.name for one in legroom.freeze_dataset(outer) if one.frozen}
    assert names == {"dataset[0].dataset.samples", "dataset[0].dataset.imgs", "dataset[0].indices"}
    assert both[0][5] == plain[305]


def test_freeze_dataset_takes_a_dataset(shm: Path) -> None:
    with pytest.raises(UsageError, match="has no attributes"):
        legroom.freeze_dataset([1, 2])
    with pytest.raises(UsageError, match="is not a dataset"):
        legroom.freeze_dataset("x")


def test_without_a_store_it_is_kept_in_the_process_and_pickled_by_value(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    view = legroom.freeze({"a": records(1200), "b": (1, 2)})
    again = pickle.loads(pickle.dumps(view))
    assert view.info.key is None and view.info.backing == "memory"
    assert again == view and again["a"][-1] == records(1200)[-1] and not shm.exists()


def test_a_refusal_shows_no_error_of_the_encoder(shm: Path) -> None:
    for given in ([object()], [(object(),)], {"a": [1, object()]}):
        with pytest.raises(UnsupportedData) as caught:
            legroom.freeze(given)
        assert caught.value.__context__ is None and caught.value.__cause__ is None
