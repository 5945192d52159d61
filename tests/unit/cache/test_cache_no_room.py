"""Stores that are full, nearly full, or one and the same directory: what an open does then."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.cache import eviction, list_and_verify, locks, source_digest_records, store_free_space
from legroom.cache import store_directories as store_module
from legroom.cache.manifest import is_key
from legroom.cache.store_directories import Store
from legroom.cache.store_free_space import store_bytes
from legroom.errors import NoRoom, UsageError

MB = 1 << 20


def make(tmp_path: Path, number: int, size: int = 40_000) -> Path:
    path = tmp_path / f"{number}.npy"
    np.save(path, np.full(size, number, np.uint8))
    return path


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestOneDirectoryTwice:
    @pytest.mark.parametrize("link", [False, True])
    @pytest.mark.parametrize("backing", ["disk", "auto", "shm"])
    def test_an_open_does_not_wait_for_its_own_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backing: str, link: bool
    ) -> None:
        (tmp_path / "both").mkdir(mode=0o700)
        (tmp_path / "link").symlink_to("both")
        monkeypatch.setenv("LEGROOM_SHM", str(tmp_path / "both"))
        monkeypatch.setenv("LEGROOM_DIR", str(tmp_path / ("link" if link else "both")))
        path, opened = make(tmp_path, 1), []
        thread = threading.Thread(target=lambda: opened.append(legroom.open(path, backing=backing)), daemon=True)
        thread.start()
        thread.join(60)
        assert opened and int(opened[0]["array"].sum()) == 40_000
        assert [entry.key for entry in list_and_verify.entries()] == [opened[0].info.key]  # listed once

    def test_a_progress_callback_may_not_open_what_is_being_loaded(self, shm: Path, tmp_path: Path) -> None:
        path = make(tmp_path, 1)
        with pytest.raises(UsageError, match="this thread"):
            legroom.open(path, progress=lambda *_: legroom.open(path).close())
        assert int(legroom.open(path)["array"][0]) == 1


@pytest.mark.usefixtures("old_files")
class TestEviction:
    def tight(self, monkeypatch: pytest.MonkeyPatch, allowed: int, **what: Any) -> None:
        def bounds(store: Store, env: object = None) -> list[store_free_space.Bound]:
            if store.backing == "disk":
                return [store_free_space.Bound(0, lambda: "none")]
            return [
                store_free_space.Bound(1 << 40, lambda: "plenty"),
                store_free_space.Bound(allowed - store_bytes(store), lambda: "tight", **what),
            ]

        monkeypatch.setattr(store_free_space, "bounds", bounds)
        for module in (eviction, store_free_space):
            monkeypatch.setattr(module, "in_memory", lambda store: True)

    def test_entries_charged_to_another_cgroup_stay(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_free_space, "memory_cgroup_inodes", lambda: (7, 1))
        keys = [legroom.open(make(tmp_path, number)).info.key for number in range(3)]
        self.tight(monkeypatch, 300_000, memory=True, group=8)
        with pytest.raises(NoRoom):
            legroom.open(make(tmp_path, 9, 100_000))
        assert {entry.key for entry in list_and_verify.entries()} == set(keys)

    @pytest.mark.parametrize("evict", [True, False])
    def test_removing_entries_by_hand_is_advised_only_where_the_load_may_not_remove_them(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evict: bool
    ) -> None:
        """Where it may, it has just found out that removing them would not make the room."""
        self.tight(monkeypatch, 50_000)
        with pytest.raises(NoRoom) as refused:
            legroom.open(make(tmp_path, 9, 100_000), backing="shm", evict=evict)
        assert any("legroom cache gc" in fix for fix in refused.value.fix) is not evict

    def test_of_entries_charged_here_and_elsewhere_those_here_go(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        charged = {0: (7, 1), 1: (8, 1), 2: (7, 1)}
        keys = []
        for number, groups in charged.items():
            monkeypatch.setattr(store_free_space, "memory_cgroup_inodes", lambda groups=groups: groups)
            keys.append(legroom.open(make(tmp_path, number)).info.key)
        self.tight(monkeypatch, room_used(shm) + 150_000, memory=True, group=8)
        data = legroom.open(make(tmp_path, 9, 100_000))
        assert data.info.backing == "shm"
        assert {entry.key for entry in list_and_verify.entries()} == {keys[0], keys[2], data.info.key}

    def test_every_bound_must_be_met_before_anything_goes(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Evicting would satisfy the file system and leave the cgroup short."""
        key = legroom.open(make(tmp_path, 1, 200_000)).info.key

        def bounds(store: Store, env: object = None) -> list[store_free_space.Bound]:
            if store.backing == "disk":
                return [store_free_space.Bound(0, lambda: "none")]
            return [
                store_free_space.Bound(300_000 - store_bytes(store), lambda: "small"),
                store_free_space.Bound(50_000, lambda: "group", memory=True, group=8),
            ]

        monkeypatch.setattr(store_free_space, "bounds", bounds)
        for module in (eviction, store_free_space):
            monkeypatch.setattr(module, "in_memory", lambda store: True)
        with pytest.raises(NoRoom):
            legroom.open(make(tmp_path, 9, 100_000))
        assert [entry.key for entry in list_and_verify.entries()] == [key]

    def test_what_fits_needs_no_eviction(self, shm: Path, tmp_path: Path) -> None:
        """Downloads that were removed just before may have made the room."""
        legroom.open(make(tmp_path, 1)).close()
        with store_module.open_stores() as stores, store_module.store_lock(stores.found[0]):
            assert eviction.evict_until_fits(stores.found[0], store_free_space.BuildNeed(1000))
        assert len(list_and_verify.entries()) == 1


def room_used(shm: Path) -> int:
    return sum(file.stat().st_blocks * 512 for key in shm.iterdir() if is_key(key.name) for file in key.iterdir())


class TestFull:
    def test_memory_that_fills_up_in_the_middle_leads_to_the_disk(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def bounds_now(store: Store) -> list[store_free_space.Bound]:
            asked.append(store.backing)
            little = store.backing == "shm" and len(asked) > 1
            return [store_free_space.Bound(0 if little else 64 * MB, lambda: "filling up")]

        monkeypatch.setattr(store_free_space, "bounds_now", bounds_now)
        path = make(tmp_path, 3, 40 * MB)
        data = legroom.open(path)
        assert asked[:2] == ["shm", "shm"] and data.info.backing == "disk"
        assert bool((data["array"] == 3).all())
        assert [name for name in os.listdir(shm) if name not in ("locks", "sources", "work")] == []
        assert os.listdir(shm / "work") == []
        with pytest.raises(NoRoom):
            legroom.open(make(tmp_path, 4, 40 * MB), backing="shm")

    def test_a_store_that_cannot_hold_a_lock_file_is_passed_by(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a /dev/shm without inodes: its directories are there, and nothing can be made in them."""
        legroom.open(make(tmp_path, 1)).close()
        acquire, inodes = locks.acquire, os.stat(shm / "locks").st_ino

        def refuse(folder: int, name: str, **options: Any) -> Any:
            if os.fstat(folder).st_ino == inodes and options.get("create", True):
                full()
            return acquire(folder, name, **options)

        monkeypatch.setattr(locks, "acquire", refuse)
        data = legroom.open(make(tmp_path, 2))
        assert data.info.backing == "disk" and int(data["array"][0]) == 2
        assert [finding.code for finding in data.findings] == ["store-unusable"]
        with pytest.raises(legroom.LegroomError) as refused:
            legroom.open(make(tmp_path, 3), backing="shm")
        assert refused.value.code in ("no-room", "no-store") and os.strerror(errno.ENOSPC) in str(refused.value)

    def test_too_few_inodes_are_reported(self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.statvfs

        class Stats:
            def __init__(self, stats: os.statvfs_result) -> None:
                self.stats = stats

            def __getattr__(self, name: str) -> Any:
                return {"f_files": 100, "f_favail": 3}.get(name, getattr(self.stats, name))

        monkeypatch.setattr(os, "statvfs", lambda path: Stats(real(path)))
        with pytest.raises(NoRoom, match="3 of 100 inodes free") as refused:
            legroom.open(make(tmp_path, 1), backing="disk")
        assert "set LEGROOM_DIR to a directory of another file system" in refused.value.fix
        monkeypatch.setattr(store_free_space, "in_memory", lambda store: store.backing == "shm")
        with pytest.raises(NoRoom, match="3 of 100 inodes free") as refused:
            legroom.open(make(tmp_path, 1), backing="shm")
        assert any("nr_inodes" in line for line in refused.value.fix)


class TestRecord:
    def test_a_record_that_cannot_be_written_fails_no_open(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = make(tmp_path, 5)
        with monkeypatch.context() as broken:
            broken.setattr(source_digest_records, "write_all", full)
            data = legroom.open(path)
            assert int(data["array"][0]) == 5
            assert os.listdir(shm / "sources") == []  # no half of one either
            seen: list[str] = []
            broken.setattr(store_module, "step_hook", seen.append)
            assert legroom.open(path).info.key == data.info.key
            assert "hash" in seen and "allocate" not in seen  # hashed, not loaded a second time
        assert legroom.open(path).info.key == data.info.key
        assert len(os.listdir(shm / "sources")) == 1


@pytest.mark.parametrize(
    ("backing", "full", "suggested"),
    [("shm", {"shm"}, True), ("disk", {"disk"}, True), ("disk", {"disk", "shm"}, False),
     ("auto", {"disk", "shm"}, False)],
)  # fmt: skip
def test_without_room_only_what_works_now_is_suggested(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backing: str, full: set[str], suggested: bool
) -> None:
    def bounds(store: Store) -> list[store_free_space.Bound]:
        free = 10 if store.backing in full else 1 << 30
        return [store_free_space.Bound(free, lambda: f"{free} B free")]

    monkeypatch.setattr(store_free_space, "bounds", bounds)
    path = make(tmp_path, 1)
    with pytest.raises(NoRoom) as caught:
        legroom.open(path, backing=backing)
    assert any("backing='auto'" in line for line in caught.value.fix) is suggested
    if suggested:
        assert int(legroom.open(path, backing="auto")["array"][0]) == 1
    code = next(line for line in caught.value.fix if "inplace" in line).split("\n")[1]
    assert code == f"legroom.open({str(path)!r}, backing='inplace')"
    with eval(code) as data:
        assert int(data["array"][0]) == 1


def test_a_file_that_cannot_be_mapped_is_not_advised_to_be(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_free_space, "bounds", lambda store: [store_free_space.Bound(10, lambda: "10 B free")])
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(40_000, np.uint8))
    for path in (tmp_path / "a.npz", [make(tmp_path, 1), make(tmp_path, 2)]):
        with pytest.raises(NoRoom) as caught:
            legroom.open(path)  # type: ignore[arg-type]
        assert "inplace" not in " ".join(caught.value.fix)
        assert "keys=" not in " ".join(caught.value.fix)  # there is one array


def test_no_other_file_system_than_that_of_the_store_is_remounted(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_free_space, "bounds", lambda store: [store_free_space.Bound(10, lambda: "10 B free")])
    with pytest.raises(NoRoom) as caught:
        legroom.open(make(tmp_path, 1), backing="shm")  # LEGROOM_SHM is no directory of /dev/shm
    assert "remount" not in " ".join(caught.value.fix) and "set LEGROOM_SHM" in " ".join(caught.value.fix)
    monkeypatch.setattr(store_free_space, "_on_dev_shm", lambda store: True)
    with pytest.raises(NoRoom) as caught:
        legroom.open(make(tmp_path, 2), backing="shm")
    assert "set LEGROOM_SHM" not in " ".join(caught.value.fix)


def test_a_manifest_that_is_written_in_several_calls_is_whole(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, memoryview(data)[:400], offset))
    path = make(tmp_path, 1, 1000)
    assert int(legroom.open(path)["array"].sum()) == 1000
    (found,) = list_and_verify.verify()
    assert found.whole
