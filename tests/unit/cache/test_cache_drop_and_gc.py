"""Listing, dropping, collecting, evicting, verifying."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from cache_scenario_process import BUILD_STEPS, REMOVAL_STEPS

import legroom
from legroom.cache import drop_and_gc, eviction, list_and_verify, store_free_space
from legroom.cache import store_directories as store_module
from legroom.cache.list_and_verify import SourceMatcher
from legroom.cache.store_directories import delete_trash, open_stores
from legroom.cache.store_free_space import store_bytes
from legroom.errors import EntryInUse, NoRoom, NotLoaded, UsageError


def make(tmp_path: Path, number: int, size: int = 40_000) -> Path:
    path = tmp_path / f"{number}.npy"
    np.save(path, np.full(size, number, np.uint8))
    return path


def used_at(shm: Path, path: Path, when: float) -> str:
    """Say that the file's entry was last used then."""
    key = list_and_verify.info(path).key
    assert key is not None
    os.utime(shm / "locks" / f"{key}.lock", (when, when))
    return key


@pytest.mark.usefixtures("old_files")
class TestCatalog:
    def test_entries_show_what_they_are(self, shm: Path, tmp_path: Path) -> None:
        path = make(tmp_path, 1)
        assert list_and_verify.entries() == ()
        with pytest.raises(NotLoaded):
            list_and_verify.info(path)
        data = legroom.open(path)
        (entry,) = list_and_verify.entries(with_users=True)
        assert entry.key == data.info.key
        assert entry.sources == (str(path),)
        assert entry.arrays["array"].shape == (40_000,)
        assert entry.in_use is True
        assert entry.bytes == data.info.bytes == (shm / data.info.key / "array.npy").stat().st_size
        assert abs(time.time() - (entry.last_used or 0)) < 60
        if sys.platform == "linux":
            assert [user.pid for user in entry.users or ()] == [os.getpid()]
        data.close()
        assert list_and_verify.info(path).in_use is False

    def test_a_key_may_be_shortened_as_long_as_it_is_one(self, shm: Path, tmp_path: Path) -> None:
        keys = [legroom.open(make(tmp_path, number)).info.key or "" for number in range(3)]
        assert list_and_verify.info(keys[1]).key == keys[1]
        assert list_and_verify.info(keys[1][:10]).key == keys[1]
        with pytest.raises(legroom.LegroomError):
            list_and_verify.info("0" * 10)

    @pytest.mark.parametrize("name", ["cifar10", "cifar100", "scenes", "version", "decade", "facade-blk"])
    def test_a_name_that_may_begin_a_key_is_found(self, shm: Path, name: str) -> None:
        legroom.freeze([1, 2, 3], name=name)
        assert list_and_verify.info(name).attributes["name"] == name
        assert len(drop_and_gc.drop(name, force=True).entries) == 1

    def test_a_key_is_found_whatever_its_hash(self, shm: Path, tmp_path: Path) -> None:
        pytest.importorskip("xxhash")
        key = legroom.open(make(tmp_path, 1), hash="xxh3").info.key or ""
        assert key.endswith("-xxh3") and list_and_verify.info(key).key == key

    def test_one_directory_as_both_stores_is_verified_once(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LEGROOM_DIR", os.environ["LEGROOM_SHM"])
        for number in (1, 2):
            legroom.open(make(tmp_path, number))
        assert len(list_and_verify.verify()) == len(list_and_verify.entries()) == 2

    def test_verify_says_whether_others_use_an_entry(self, shm: Path, tmp_path: Path) -> None:
        data = legroom.open(make(tmp_path, 1))
        (found,) = list_and_verify.verify()
        assert found.entry.in_use is True
        data.close()
        (found,) = list_and_verify.verify()
        assert found.entry.in_use is False

    def test_an_entry_of_a_newer_format_is_not_called_damaged(self, shm: Path, tmp_path: Path) -> None:
        key = legroom.open(make(tmp_path, 1)).info.key or ""
        (shm / key / "manifest.json").chmod(0o600)
        (shm / key / "manifest.json").write_text('{"format": 99}')
        (found,) = list_and_verify.verify()
        assert found.damaged == () and "format 99" in (found.entry.unreadable or "") and not found.whole

    def test_drop_of_everything_counts_unused_downloads(self, shm: Path, tmp_path: Path) -> None:
        legroom.open(make(tmp_path, 1)).close()
        folder = shm / "work" / "download-1"
        folder.mkdir()
        (folder / "data").write_bytes(bytes(1 << 20))
        would = drop_and_gc.drop(dry_run=True).freed
        assert folder.exists()
        gone = drop_and_gc.drop()
        assert would == gone.freed >= (1 << 20) + 40_000 and not folder.exists()

    def test_an_entry_is_found_after_its_file_has_gone(self, shm: Path, tmp_path: Path) -> None:
        path = make(tmp_path, 1)
        legroom.open(path)
        path.unlink()
        assert list_and_verify.info(path).sources == (str(path),)
        assert len(drop_and_gc.drop(path).entries) == 1

    def test_rooms_name_what_bounds_them(self, shm: Path, tmp_path: Path) -> None:
        legroom.open(make(tmp_path, 1))
        rooms, findings = list_and_verify.store_rooms()
        assert [found.backing for found in rooms] == ["shm", "disk"]
        assert rooms[0].used >= 40_000 and rooms[0].free > 0 and rooms[0].bound_by
        assert findings == ()
        drop_and_gc.drop(force=True)
        # A lock, and records, take room and are no entries.
        (shm / "work" / "building-1.lock").write_text("1 2 3")
        assert [found.used for found in list_and_verify.store_rooms()[0]] == [0, 0]

    def test_a_file_that_changed_is_verified_against_what_it_was(self, shm: Path, tmp_path: Path) -> None:
        path = make(tmp_path, 1)
        key = legroom.open(path).info.key
        make(tmp_path, 1, 50_000)
        (found,) = list_and_verify.verify(path)
        assert found.entry.key == key and found.whole and found.source == "changed"
        legroom.open(path)  # now it has an entry as it is, and that one counts
        (found,) = list_and_verify.verify(path)
        assert found.entry.key != key and found.source == "same"
        with pytest.raises(NotLoaded):
            list_and_verify.verify(make(tmp_path, 2))

    def test_a_damaged_entry_is_listed_as_such(self, shm: Path, tmp_path: Path) -> None:
        key = legroom.open(make(tmp_path, 1)).info.key or ""
        (shm / key / "manifest.json").chmod(0o600)
        (shm / key / "manifest.json").write_text("{}")
        (entry,) = list_and_verify.entries()
        assert entry.damaged
        (found,) = list_and_verify.verify()
        assert not found.whole
        assert len(drop_and_gc.drop(key).entries) == 1


@pytest.mark.usefixtures("old_files")
class TestDrop:
    def test_what_is_in_use_is_refused_and_named(self, shm: Path, tmp_path: Path) -> None:
        path = make(tmp_path, 1)
        data = legroom.open(path)
        with pytest.raises(EntryInUse) as caught:
            drop_and_gc.drop(path)
        if sys.platform == "linux":
            assert str(os.getpid()) in caught.value.why
        kept = drop_and_gc.drop()
        assert not kept.entries and len(kept.kept) == 1
        dropped = drop_and_gc.drop(path, force=True)
        assert dropped.freed >= 40_000
        assert (data["array"] == 1).all()
        assert list_and_verify.entries() == ()

    def test_forced_away_under_a_user_it_is_built_anew_for_others(self, shm: Path, tmp_path: Path) -> None:
        path = make(tmp_path, 1)
        old = legroom.open(path)
        drop_and_gc.drop(path, force=True)
        new = legroom.open(path)
        assert (new["array"] == old["array"]).all()
        del old
        with pytest.raises(EntryInUse):
            drop_and_gc.drop(path)
        del new
        drop_and_gc.drop(path)

    def test_nothing_there(self, shm: Path, tmp_path: Path) -> None:
        with pytest.raises(NotLoaded):
            drop_and_gc.drop(make(tmp_path, 1))
        assert drop_and_gc.drop() == drop_and_gc.gc()

    @pytest.mark.parametrize("at", [name for name in REMOVAL_STEPS if name != "removed"])
    def test_killed_in_the_middle_it_leaves_nothing_half_gone(self, shm: Path, tmp_path: Path, at: str) -> None:
        path = make(tmp_path, 1)
        legroom.open(path)
        script = (
            "import os, signal, sys\n"
            "from legroom.cache import drop_and_gc, store_directories\n"
            f"store_directories.step_hook = lambda name: name == {at!r} and os.kill(os.getpid(), signal.SIGKILL)\n"
            "drop_and_gc.drop(sys.argv[1])\n"
        )
        done = subprocess.run([sys.executable, "-c", script, str(path)])
        assert done.returncode == -9
        assert (legroom.open(path)["array"] == 1).all()
        drop_and_gc.gc()
        assert os.listdir(shm / "work") == []
        (found,) = list_and_verify.verify()
        assert found.whole


@pytest.mark.usefixtures("old_files")
class TestGc:
    def test_strays_go_and_what_lives_stays(self, shm: Path, tmp_path: Path) -> None:
        data = legroom.open(make(tmp_path, 1))
        trashed, building = (shm / "work" / name for name in ("trash-1", "building-dead"))
        trashed.mkdir()
        (trashed / "x").write_bytes(b"x" * 5000)
        building.mkdir()
        (building / "y").touch()
        (shm / "work" / "building-dead.lock").touch()
        (shm / "locks" / "src-1-2-3.lock").touch()
        (shm / "locks" / ("0" * 32 + ".lock")).touch()
        (shm / "sources" / ".tmp-1").touch()
        (shm / "sources" / "1-2-3").write_text("nonsense")
        looked = drop_and_gc.gc(dry_run=True)
        assert looked.dry_run
        assert trashed.exists()
        taken = list_and_verify.store_rooms()[0][0].leftovers
        assert taken == looked.freed == sum(path.stat().st_blocks * 512 for path in (trashed / "x", building / "y"))
        assert taken >= 5000
        # A removal, a build (its directory and its lock are one), a record that was being written.
        done = drop_and_gc.gc()
        assert (looked.strays, looked.freed) == (done.strays, done.freed) == (3, taken)
        assert list_and_verify.store_rooms()[0][0].leftovers == drop_and_gc.gc().freed == 0
        assert sorted(os.listdir(shm)) == sorted([data.info.key, "locks", "samples", "sources", "work"])
        assert os.listdir(shm / "work") == []
        assert sorted(os.listdir(shm / "locks")) == sorted([f"{data.info.key}.lock", "store.lock"])
        assert len(os.listdir(shm / "sources")) == 1

    def test_a_store_of_an_earlier_layout_is_used_as_it_is(self, shm: Path, tmp_path: Path) -> None:
        path = make(tmp_path, 1)
        key = legroom.open(path).info.key
        (shm / "work").rmdir()
        assert [entry.key for entry in list_and_verify.entries()] == [key]
        (shm / "work").rmdir()
        inode = (shm / str(key)).stat().st_ino
        assert legroom.open(path).info.key == key
        assert (shm / str(key)).stat().st_ino == inode
        assert [entry.key for entry in drop_and_gc.drop().entries] == [key]

    def test_a_living_builders_directory_stays(self, shm: Path, tmp_path: Path) -> None:
        from legroom.cache.staging_directory import StagingDirectory

        need = store_free_space.BuildNeed(1000)
        with open_stores(make=True) as places, StagingDirectory(places.election_store, need, evict=False) as work:
            assert drop_and_gc.gc(dry_run=True).strays == drop_and_gc.gc().strays == 0
            assert work.folder.is_dir() and work.folder.parent == shm / "work"
            assert store_free_space.outstanding_reservations(places.election_store) == 1000
            assert store_free_space.outstanding_reservations(places.election_store, work.lock_file) == 0
        assert not work.folder.exists()

    def test_what_ordinary_use_leaves_is_no_leftover(self, shm: Path, tmp_path: Path) -> None:
        for number in range(3):
            legroom.open(make(tmp_path, number))
        drop_and_gc.drop()
        idle = [name for name in os.listdir(shm / "locks") if name != "store.lock"]
        assert idle and os.listdir(shm / "sources")
        assert drop_and_gc.gc(dry_run=True).strays == drop_and_gc.gc().strays == 0
        assert os.listdir(shm / "locks") == ["store.lock"] and not os.listdir(shm / "sources")

    def test_stale_versions(self, shm: Path, tmp_path: Path) -> None:
        path = make(tmp_path, 1)
        old = legroom.open(path).info.key
        np.save(path, np.zeros(10))
        new = legroom.open(path).info.key
        assert {entry.key for entry in drop_and_gc.gc(stale=True, dry_run=True).entries} == {old}
        assert {entry.key for entry in drop_and_gc.gc(stale=True).entries} == {old}
        assert [entry.key for entry in list_and_verify.entries()] == [new]

    def test_older(self, shm: Path, tmp_path: Path) -> None:
        for number in range(2):
            legroom.open(make(tmp_path, number))
        key = used_at(shm, tmp_path / "0.npy", time.time() - 1000)
        assert [entry.key for entry in drop_and_gc.gc(older=500).entries] == [key]

    def test_free_takes_the_least_recently_used_first_and_spares_the_used(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = legroom.open(make(tmp_path, 0))
        for number in range(1, 4):
            legroom.open(make(tmp_path, number))
        now = time.time()
        keys = [used_at(shm, tmp_path / f"{number}.npy", now - 100 + number) for number in range(4)]
        pretend(monkeypatch, shm, 200_000)
        reaped = drop_and_gc.gc(free=90_000)
        assert [entry.key for entry in reaped.entries] == keys[1:3]
        assert [entry.key for entry in reaped.kept] == [held.info.key]
        assert {entry.key for entry in list_and_verify.entries()} == {keys[0], keys[3]}

    def test_space_that_cannot_be_freed_is_reported(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(2):
            legroom.open(make(tmp_path, number))
        pretend(monkeypatch, shm, 1_000_000)
        for dry_run in (True, False):
            reaped = drop_and_gc.gc(free=2_000_000, dry_run=dry_run)
            assert len(reaped.entries) == 2
            (short,) = reaped.short
            assert short.store == str(shm) and short.bound_by == "pretended"
            assert 1_000_000 <= short.missing < 1_050_000  # what locks and records take
        assert drop_and_gc.gc(free=500_000).short == ()


def pretend(monkeypatch: pytest.MonkeyPatch, root: Path, size: int) -> None:
    """The shared-memory store has that many bytes and no other bound."""

    def bounds(store: object, env: object = None) -> list[store_free_space.Bound]:
        if getattr(store, "root", None) != root:
            return [store_free_space.Bound(1 << 40, lambda: "plenty")]
        return [store_free_space.Bound(size - store_bytes(store), lambda: "pretended")]  # type: ignore[arg-type]

    monkeypatch.setattr(store_free_space, "bounds", bounds)
    monkeypatch.setattr(store_free_space, "bounds_now", bounds)


@pytest.mark.usefixtures("old_files")
class TestEviction:
    def test_unused_entries_make_room_oldest_first(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(3):
            legroom.open(make(tmp_path, number))
        keys = [used_at(shm, tmp_path / f"{number}.npy", 1000 + number) for number in range(3)]
        need = 40_960 + (1 << 16) + 1024
        pretend(monkeypatch, shm, 3 * 45_056 + need - 10_000)
        data = legroom.open(make(tmp_path, 9))
        assert data.info.backing == "shm"
        assert {entry.key for entry in list_and_verify.entries()} == {*keys[1:], data.info.key}

    def test_without_eviction_or_with_everything_in_use_it_goes_to_disk_or_fails(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = legroom.open(make(tmp_path, 0))
        pretend(monkeypatch, shm, 100_000)
        assert legroom.open(make(tmp_path, 1)).info.backing == "disk"
        with pytest.raises(NoRoom) as caught:
            legroom.open(make(tmp_path, 2), backing="shm")
        assert caught.value.fix and not any("cache gc" in step for step in caught.value.fix)  # it tried that itself
        held.close()
        with pytest.raises(NoRoom) as caught:
            legroom.open(make(tmp_path, 3), backing="shm", evict=False)
        assert any("cache gc" in step for step in caught.value.fix)
        assert len(list_and_verify.entries(tmp_path / "0.npy")) == 1
        del held
        assert legroom.open(make(tmp_path, 4, 10_000), backing="shm").info.backing == "shm"

    def test_nothing_is_evicted_in_vain(self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        legroom.open(make(tmp_path, 0))
        pretend(monkeypatch, shm, 100_000)
        with pytest.raises(NoRoom):
            legroom.open(make(tmp_path, 1, 500_000), backing="shm")
        assert len(list_and_verify.entries()) == 1


class TestVerify:
    def test_copy_and_source(self, shm: Path, tmp_path: Path) -> None:
        path = make(tmp_path, 1)
        key = legroom.open(path).info.key or ""
        (found,) = list_and_verify.verify(path)
        assert found.whole and found.source == "same"
        (found,) = list_and_verify.verify(path, source=False)
        assert found.source == "not-checked"
        np.save(path, np.zeros(3))
        (found,) = list_and_verify.verify(key)
        assert found.whole and found.source == "changed"
        path.unlink()
        (found,) = list_and_verify.verify(key)
        assert found.source == "missing"

    def test_a_changed_bit_is_found(self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        key = legroom.open(make(tmp_path, 1)).info.key or ""
        file = shm / key / "array.npy"
        file.chmod(0o600)
        with file.open("r+b") as stream:
            stream.seek(-5, 2)
            stream.write(b"\x07")
        # Even if its times were those it was sealed with.
        monkeypatch.setattr("legroom.cache.manifest.stamp_of", lambda stats: _sealed(shm / key))
        (found,) = list_and_verify.verify(key)
        assert found.damaged == ("array",)

    def test_not_loaded(self, shm: Path, tmp_path: Path) -> None:
        assert list_and_verify.verify() == ()
        with pytest.raises(NotLoaded):
            list_and_verify.verify(make(tmp_path, 1))


def _sealed(folder: Path) -> str:
    import json

    stamp: str = json.loads((folder / "manifest.json").read_text())["arrays"][0]["stamp"]
    return stamp


def test_a_key_that_stands_for_several_is_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["abcdef" + "0" * 26, "abcdef" + "1" * 26]
    with open_stores(make=True) as places:
        monkeypatch.setattr(
            list_and_verify, "least_recent_first", lambda store: [eviction.LeastRecent(key, 0.0, 1) for key in keys]
        )
        with pytest.raises(UsageError, match="several"):
            list_and_verify.matching_keys(places.election_store, "abcdef", SourceMatcher(places.found))


def test_trash_deletes_nothing_else(shm: Path) -> None:
    with open_stores(make=True) as places, pytest.raises(ValueError):
        delete_trash(places.election_store, "locks")


@pytest.mark.usefixtures("old_files")
def test_an_entry_that_cannot_get_another_parent_goes_too(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that this user may not write to cannot be moved into another."""
    with legroom.open(make(tmp_path, 1)) as data:
        (shm / (data.info.key or "")).chmod(0o500)
    rename = os.rename

    def refusing(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if not os.stat(source, dir_fd=src_dir_fd).st_mode & 0o200:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", refusing)
    assert len(drop_and_gc.drop().entries) == 1
    assert sorted(os.listdir(shm)) == ["locks", "samples", "sources", "work"]


def test_steps_are_reported_in_order(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(store_module, "step_hook", seen.append)
    legroom.open(make(tmp_path, 1))
    assert [name for name in seen if name in BUILD_STEPS] == list(BUILD_STEPS)


@pytest.mark.usefixtures("old_files")
class TestContent:
    """The commands find an entry by the bytes of a file, as load does."""

    WAYS = ("touch", "move", "copy", "rewrite", "link")

    def changed(self, path: Path, way: str) -> Path:
        """The same bytes, in another way."""
        other = path.with_name("other" + path.suffix)
        if way == "touch":
            os.utime(path, (1e9, 1e9))
            return path
        if way == "move":
            path.rename(other)
        elif way == "copy":
            shutil.copytree(path, other) if path.is_dir() else shutil.copy(path, other)
        elif way == "link":
            other.symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, other)
            shutil.rmtree(path)
            other.rename(path)
            return path
        else:
            whole = path.read_bytes()
            path.unlink()
            path.write_bytes(whole)
            return path
        return other

    def file(self, tmp_path: Path, kind: str) -> Path:
        path = tmp_path / f"a.{kind}"
        if kind == "npy":
            np.save(path, np.arange(1000))
        elif kind == "zarr":
            zarr.create_array(store=str(path), data=np.arange(1, 1000), chunks=(100,))
        else:
            with h5py.File(tmp_path / "far.h5", "w") as file:
                file["data"] = np.arange(1000)
            with h5py.File(path, "w") as file:
                file["data"] = h5py.ExternalLink("far.h5", "data")
        return path

    @pytest.mark.parametrize("kind", ["npy", "zarr", "h5"])
    @pytest.mark.parametrize("way", WAYS)
    def test_the_same_bytes_are_loaded(self, shm: Path, tmp_path: Path, kind: str, way: str) -> None:
        path = self.file(tmp_path, kind)
        key = legroom.open(path).info.key
        path = self.changed(path, way)
        assert list_and_verify.info(path).key == key
        assert [entry.key for entry in list_and_verify.entries(path)] == [key]
        (found,) = list_and_verify.verify(path)
        assert found.entry.key == key and found.whole
        assert drop_and_gc.gc(stale=True).entries == ()
        with legroom.open(path) as data:
            assert data.info.key == key
        assert [entry.key for entry in drop_and_gc.drop(path).entries] == [key]
        with pytest.raises(NotLoaded):
            list_and_verify.info(path)

    @pytest.mark.parametrize("kind", ["npy", "zarr", "h5"])
    def test_other_bytes_of_the_same_size_are_not(self, shm: Path, tmp_path: Path, kind: str) -> None:
        path = self.file(tmp_path, kind)
        key = legroom.open(path).info.key
        if kind == "npy":
            np.save(path, np.arange(1000)[::-1])
        elif kind == "zarr":
            zarr.open_array(store=str(path), mode="r+")[5] = 7
        else:
            with h5py.File(tmp_path / "far.h5", "r+") as file:
                file["data"][5] = 7
        with pytest.raises(NotLoaded):
            list_and_verify.info(path)
        assert list_and_verify.entries(path) == ()
        with pytest.raises(NotLoaded):
            drop_and_gc.drop(path)
        (found,) = list_and_verify.verify(path)
        assert found.entry.key == key and found.source == "changed"
        assert [entry.key for entry in drop_and_gc.gc(stale=True).entries] == [key]

    def test_an_entry_of_a_file_that_was_moved_and_opened_there_is_not_stale(self, shm: Path, tmp_path: Path) -> None:
        path = self.file(tmp_path, "npy")
        key = legroom.open(path).info.key
        path.rename(tmp_path / "b.npy")
        np.save(path, np.arange(1000)[::-1])
        assert [entry.key for entry in drop_and_gc.gc(stale=True, dry_run=True).entries] == [
            key
        ]  # nothing else is known
        legroom.open(tmp_path / "b.npy").close()
        assert drop_and_gc.gc(stale=True).entries == ()
        np.save(tmp_path / "b.npy", np.zeros(1000))
        assert [entry.key for entry in drop_and_gc.gc(stale=True).entries] == [key]

    @pytest.mark.parametrize("how", ["gone", "forbidden", "being written"])
    def test_what_is_not_known_to_be_another_version_is_not_stale(
        self, shm: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = self.file(tmp_path, "h5")
        legroom.open(path).close()
        with ExitStack() as stack:
            if how == "gone":
                path.unlink()
            elif how == "forbidden":
                os.utime(path, (1e9, 1e9))
                real = os.open
                refuse = PermissionError(errno.EACCES, "no", str(path))

                def opens(name: Any, *arguments: Any, **more: Any) -> int:
                    if os.fspath(name) == os.fspath(path):
                        raise refuse
                    return real(name, *arguments, **more)

                monkeypatch.setattr(os, "open", opens)
            else:
                stack.enter_context(h5py.File(path, "r+"))
                os.utime(path, (1e9, 1e9))
            assert drop_and_gc.gc(stale=True).entries == ()
