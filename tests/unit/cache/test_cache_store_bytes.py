"""The count of a store's bytes: right after every change, also one that was interrupted or made by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import legroom
from legroom.cache import drop_and_gc, store_free_space
from legroom.cache.store_directories import Store, open_stores, store_lock

KILLED = """
import os, signal, sys
import legroom
from legroom.cache import drop_and_gc
before, after = os.rename, sys.argv[2]

def rename(*what, **where):
    if after == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    before(*what, **where)
    os.kill(os.getpid(), signal.SIGKILL)

os.rename = rename
drop_and_gc.drop() if sys.argv[1] == "drop" else legroom.open(sys.argv[1], backing="disk")
"""


def make(tmp_path: Path, number: int, size: int = 100_000) -> Path:
    path = tmp_path / f"{number}.npy"
    np.save(path, np.full(size, number, np.uint8))
    return path


def counted(disk: Path) -> tuple[int, int]:
    """What the store says that it takes, and what its entries take."""
    with open_stores() as places:
        (store,) = (place for place in places.found if place.backing == "disk")
        with store_lock(store):
            said = store_free_space.store_bytes(store)
    entries = [folder for folder in disk.iterdir() if folder.name not in ("locks", "samples", "sources", "work")]
    return said, sum(file.stat().st_blocks * 512 for folder in entries for file in folder.iterdir())


def test_the_count_follows_every_build_and_removal_without_counting_again(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [legroom.open(make(tmp_path, number), backing="disk").info.key for number in range(3)]
    said, real = counted(disk)
    assert said == real > 300_000
    read: list[str] = []
    blocks = store_free_space.directory_bytes

    def noted(folder: int, name: str) -> int:
        read.append(name)
        return blocks(folder, name)

    monkeypatch.setattr(store_free_space, "directory_bytes", noted)
    keys.append(legroom.open(make(tmp_path, 4), backing="disk").info.key)
    said, real = counted(disk)
    assert said == real > 400_000
    assert not set(read) & set(keys)
    monkeypatch.undo()
    legroom_keys = [str(key) for key in keys]
    os.environ["LEGROOM_SHM"], os.environ["LEGROOM_DIR"] = str(tmp_path / "shm"), str(tmp_path / "disk")
    drop_and_gc.drop(legroom_keys[0])
    said, real = counted(disk)
    assert said == real < 400_000


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["open", "drop"])
def test_a_kill_beside_the_rename_leaves_no_wrong_count(disk: Path, tmp_path: Path, what: str, when: str) -> None:
    legroom.open(make(tmp_path, 1), backing="disk").close()
    legroom.open(make(tmp_path, 2), backing="disk").close()
    assert counted(disk)[0] > 200_000
    argument = "drop" if what == "drop" else str(make(tmp_path, 3))
    ended = subprocess.run([sys.executable, "-c", KILLED, argument, when], check=False)
    assert ended.returncode == -9
    if what == "open":
        legroom.open(make(tmp_path, 4), backing="disk").close()  # clears what the dead builder left
    else:
        drop_and_gc.gc()
    said, real = counted(disk)
    assert said == real


def test_an_entry_removed_with_rm_is_noticed(disk: Path, tmp_path: Path) -> None:
    key = legroom.open(make(tmp_path, 1), backing="disk").info.key
    legroom.open(make(tmp_path, 2), backing="disk").close()
    counted(disk)
    time.sleep(0.02)  # two changes within a tick of the file system's clock have one time
    shutil.rmtree(disk / str(key))
    said, real = counted(disk)
    assert said == real < 200_000


@pytest.mark.parametrize("text", ["", "1", "x y\n", "1 2 3\n", "12 34", "-\n"])
def test_a_count_that_is_damaged_is_none(disk: Path, tmp_path: Path, text: str) -> None:
    legroom.open(make(tmp_path, 1), backing="disk").close()
    changed = disk.stat().st_mtime_ns
    (disk / "work" / "used").write_text(text.replace("12", str(changed)))
    said, real = counted(disk)
    assert said == real


def test_what_a_builder_has_taken_counts(disk: Path, tmp_path: Path) -> None:
    from legroom.cache.staging_directory import StagingDirectory

    with open_stores(make=True) as places:
        store = next(store for store in places.found if store.backing == "disk")
        assert isinstance(store, Store)
        with StagingDirectory(store, store_free_space.BuildNeed(1 << 20), evict=False) as work:
            work.write_sealed("x.npy", bytes(500_000))
            assert store_free_space.store_bytes(store) >= 500_000
        assert store_free_space.store_bytes(store) == 0
