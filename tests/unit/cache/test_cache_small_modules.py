"""The small parts: checksums, room, maps, pre-fault, NUMA, plans."""

from __future__ import annotations

import gc
import io
import os
import random
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legroom.cache import entry_users, locks, mapped_files_and_checksums, store_free_space
from legroom.cache.manifest import OPENING, Damaged, from_json
from legroom.cache.mapped_files_and_checksums import MappedFile, Prefault
from legroom.cache.plan_entry_files import plan_files
from legroom.cache.staging_directory import StagingDirectory
from legroom.cache.store_directories import open_stores
from legroom.errors import BadSize, NoRoom, UnsupportedData
from legroom.formats.base_reader import ArraySpec, Description, TableSpec
from legroom.messages import speak
from legroom.records.machine import CgroupLevel, Memory, MemoryEvents
from legroom.system import processes_and_threads

MB = 1 << 20


def test_crcs_of_parts_join(tmp_path: Path) -> None:
    chance = random.Random(1)
    for _ in range(100):
        parts = [chance.randbytes(chance.choice([0, 1, 7, 4096, 70_000])) for _ in range(chance.randrange(1, 6))]
        whole = zlib.crc32(b"".join(parts))
        assert mapped_files_and_checksums.combined((zlib.crc32(part), len(part)) for part in parts) == whole
        assert mapped_files_and_checksums.crc32()(b"".join(parts)) == whole
    (tmp_path / "a").write_bytes(b"12" + b"x" * 3_000_000)
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    assert (
        mapped_files_and_checksums.hex_digits(mapped_files_and_checksums.file_crc32(fd, 2))
        == f"{zlib.crc32(b'x' * 3_000_000):08x}"
    )
    os.close(fd)


class TestRoom:
    def test_every_bound_is_looked_at(self, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        events = MemoryEvents(0, 0, 0, "cgroup", "test")
        levels = (CgroupLevel("/job", 200 * MB, None, 150 * MB, 120 * MB), CgroupLevel("/", None, None, None, None))
        told = Memory(1 << 34, 1 << 33, "v2", levels, False, events, None, "test")
        monkeypatch.setattr(store_free_space, "memory", lambda host: told)
        monkeypatch.setattr(store_free_space, "in_memory", lambda store: True)
        with open_stores(make=True) as places:
            bound = store_free_space.tightest(store_free_space.bounds(places.election_store))
            assert bound.free == 80 * MB - 16 * MB
            assert "/job" in bound.what()
            store_free_space.check_fits(places.election_store, store_free_space.BuildNeed(60 * MB))
            with pytest.raises(NoRoom) as caught:
                store_free_space.check_fits(places.election_store, store_free_space.BuildNeed(100 * MB))
            assert "36 MB more needed" in caught.value.what
            with pytest.raises(NoRoom, match="/job"):
                StagingDirectory(places.election_store, store_free_space.BuildNeed(100 * MB), evict=True)
        assert os.listdir(shm / "work") == []

    def test_reservations_of_the_living_count_and_of_the_dead_do_not(self, shm: Path) -> None:
        with open_stores(make=True) as places:
            store = places.election_store
            with StagingDirectory(store, store_free_space.BuildNeed(50 * MB), evict=False) as work:
                assert store_free_space.outstanding_reservations(store) == 50 * MB
                fd = work.create("x.npy")
                assert list(work.allocate(fd, b"h", 10 * MB)) == [(10 * MB, True)]
                os.close(fd)
                assert store_free_space.outstanding_reservations(store) == 40 * MB
                work.report_progress(3, 10)
                assert store_free_space.read_reservation(store, work.lock_file) == (50 * MB, 3, 10)
            assert store_free_space.outstanding_reservations(store) == 0
            fd = os.open("building-dead.lock", os.O_CREAT | os.O_RDWR, dir_fd=store.work)
            store_free_space.write_reservation(fd, 10 * MB, 0, 0)
            os.close(fd)
            assert store_free_space.outstanding_reservations(store) == 0

    def test_a_room_that_shrinks_while_it_is_taken(self, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with (
            open_stores(make=True) as places,
            StagingDirectory(places.election_store, store_free_space.BuildNeed(300 * MB), evict=False) as work,
        ):
            left = iter([200 * MB, 100 * MB, 10 * MB])
            monkeypatch.setattr(
                store_free_space, "bounds_now", lambda store: [store_free_space.Bound(next(left), lambda: "shrinking")]
            )
            fd = work.create("x.npy")
            with pytest.raises(NoRoom, match="shrinking"):
                list(work.allocate(fd, b"h", 300 * MB))
            os.close(fd)
            assert os.stat("x.npy", dir_fd=work.fd).st_blocks * 512 <= 160 * MB
        assert sorted(os.listdir(shm)) == ["locks", "sources", "work"]
        assert os.listdir(shm / "work") == []

    def test_the_disk_store_has_a_limit(self, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert store_free_space.disk_limit(100, {}) == 50
        assert store_free_space.disk_limit(100, {"LEGROOM_DISK_LIMIT": "2k"}) == 2048
        with pytest.raises(BadSize):
            store_free_space.disk_limit(100, {"LEGROOM_DISK_LIMIT": "many"})
        monkeypatch.setenv("LEGROOM_DISK_LIMIT", "1MB")
        with open_stores(make=True) as places:
            disk = next(store for store in places.found if store.backing == "disk")
            assert disk is not None
            with pytest.raises(NoRoom, match="LEGROOM_DISK_LIMIT"):
                store_free_space.check_fits(disk, store_free_space.BuildNeed(2 * MB))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/maps")
class TestMaps:
    def make(self, tmp_path: Path, size: int, keep: object = None) -> MappedFile:
        (tmp_path / "a").write_bytes(b"\x05" * size)
        fd = os.open(tmp_path / "a", os.O_RDONLY)
        try:
            return MappedFile(fd, size, keep)
        finally:
            os.close(fd)

    def mapped(self, tmp_path: Path) -> bool:
        return str(tmp_path / "a") in Path("/proc/self/maps").read_text()

    def test_arrays_keep_the_map_and_the_map_its_lease(self, tmp_path: Path) -> None:
        folder = os.open(tmp_path, os.O_RDONLY)
        lease = locks.acquire(folder, "a.lock", shared=True, lease=True)
        item = self.make(tmp_path, 10_000, lease)
        del lease
        part = np.frombuffer(item.buffer(), np.uint8)[5000:]
        del item
        gc.collect()
        assert part.sum() == 25_000 and self.mapped(tmp_path) and locks.held(folder, "a.lock")
        part[:] = 1
        assert (tmp_path / "a").read_bytes() == b"\x05" * 10_000
        del part
        gc.collect()
        assert not self.mapped(tmp_path) and not locks.held(folder, "a.lock")
        os.close(folder)

    def test_a_map_that_cannot_be_had_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(OSError):
            MappedFile(-1, 4096)
        gc.collect()

    def test_maps_larger_than_memory_reserve_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "huge"
        path.touch()
        size = 1 << 42
        os.truncate(path, size)
        fd = os.open(path, os.O_RDONLY)
        item = MappedFile(fd, size)
        os.close(fd)
        assert np.frombuffer(item.buffer(), np.uint8)[size // 2] == 0

    @pytest.mark.parametrize("populate", [True, False])
    def test_pages_are_filled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, populate: bool) -> None:
        if not populate:
            monkeypatch.setattr(
                mapped_files_and_checksums, "_POPULATE_READ", 0x7FFF
            )  # a kernel that does not know the call
        size = 40 * MB
        item = self.make(tmp_path, size)
        running = Prefault([item], in_memory=True)
        assert running.wait(60)
        assert running.filled == size
        assert _resident(tmp_path / "a") == size

    def test_threads_that_die_before_they_begin_are_not_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processes_and_threads, "_begin", lambda *_: None)  # as one without memory for a frame
        assert Prefault([self.make(tmp_path, MB)], in_memory=True).wait()

    def test_it_ends_when_the_map_goes(self, tmp_path: Path) -> None:
        item = self.make(tmp_path, MB)
        running = Prefault([item], in_memory=True)
        del item
        gc.collect()
        assert running.wait(60)

    @pytest.mark.parametrize("at", ["_fits", "_populate"])
    def test_a_lease_ends_with_its_map_wherever_the_prefault_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
    ) -> None:
        reached, go, real = threading.Event(), threading.Event(), getattr(mapped_files_and_checksums, at)

        def held(*arguments: Any) -> Any:
            reached.set()
            assert go.wait(60)
            return real(*arguments)

        monkeypatch.setattr(mapped_files_and_checksums, at, held)
        folder = os.open(tmp_path, os.O_RDONLY)
        item = self.make(tmp_path, MB, locks.acquire(folder, "a.lock", shared=True, lease=True))
        running = Prefault([item], in_memory=False)
        assert reached.wait(60)
        assert locks.held(folder, "a.lock")
        del item
        gc.collect()
        assert not locks.held(folder, "a.lock")
        assert self.mapped(tmp_path) is (at == "_populate")  # pages that are being read stay
        go.set()
        assert running.wait(60)
        os.close(folder)

    def test_a_disk_entry_larger_than_free_memory_is_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_free_space, "memory_bounds", lambda: [store_free_space.Bound(1000, lambda: "little")])
        item = self.make(tmp_path, MB)
        running = Prefault([item], in_memory=False)
        assert running.wait(60)
        assert running.filled == 0

    def test_overcommit_decides_whether_maps_may_be_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for text, may in ((b"0\n", True), (b"1\n", True), (b"2\n", False)):
            monkeypatch.setattr("builtins.open", lambda *_, text=text, **__: io.BytesIO(text))
            assert mapped_files_and_checksums.maps_writable.__wrapped__() is may


def _resident(path: Path) -> int:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(str(path)):
            inside = True
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    return 0


class TestNuma:
    def test_lists(self) -> None:
        assert mapped_files_and_checksums.parse_node_list("0\n") == [0]
        assert mapped_files_and_checksums.parse_node_list("0-2,5\n") == [0, 1, 2, 5]
        assert mapped_files_and_checksums.parse_node_list("") == mapped_files_and_checksums.parse_node_list("x-1") == []

    def test_one_node_is_left_as_it_is(self) -> None:
        with mapped_files_and_checksums.interleaved([0]) as done:
            assert done is False

    @pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
    def test_the_policy_is_set_and_put_back(self) -> None:
        calls: list[tuple[int, ...]] = []
        real = mapped_files_and_checksums.libc().syscall

        class Library:
            @staticmethod
            def syscall(number: int, *rest: object) -> int:
                calls.append((number, rest[0] if isinstance(rest[0], int) else -1))
                return int(real(number, *rest))

        original, mapped_files_and_checksums.libc = mapped_files_and_checksums.libc, Library  # type: ignore[assignment]
        try:
            with mapped_files_and_checksums.interleaved([0, 0]) as done:  # twice the one node there surely is
                pass
        finally:
            mapped_files_and_checksums.libc = original
        if done:
            assert [mode for _, mode in calls] == [-1, 3, 0]


class TestPlan:
    def describe(self, *items: ArraySpec) -> Description:
        return Description("test", items, {}, ())

    def test_names_and_shapes_must_agree(self) -> None:
        one = ArraySpec("x", (2, 3), np.dtype("f4"))
        files = [Path("/d/one.npz"), Path("/d/two.npz")]
        with pytest.raises(UnsupportedData, match=r"only /d/one.npz has x; only /d/two.npz has y"):
            plan_files([self.describe(one), self.describe(ArraySpec("y", (2, 3), np.dtype("f4")))], files)
        for other in (ArraySpec("x", (2, 4), np.dtype("f4")), ArraySpec("x", (2, 3), np.dtype("f8"))):
            with pytest.raises(UnsupportedData, match=r"/d/two.npz has .* /d/one.npz has"):
                plan_files([self.describe(one), self.describe(other)], files)
        scalar = ArraySpec("x", (), np.dtype("f4"))
        with pytest.raises(UnsupportedData, match="a scalar"):
            plan_files([self.describe(scalar), self.describe(scalar)], files)

    def test_columns_must_agree(self) -> None:
        files = [Path("/d/1.parquet"), Path("/d/2.parquet")]
        first = TableSpec("table", 2, {"a": "int64", "b": "int64"}, 64)
        for columns, why in (
            ({"a": "int64", "c": "int64"}, "only /d/1.parquet has b; only /d/2.parquet has c"),
            ({"a": "int64"}, "only /d/1.parquet has b"),
            ({"a": "int64", "b": "string"}, "column 'b' is int64 in /d/1.parquet and string in /d/2.parquet"),
        ):
            other = TableSpec("table", 2, columns, 64)
            with pytest.raises(UnsupportedData) as caught:
                plan_files([Description("test", (one,), {}, ()) for one in (first, other)], files)
            assert caught.value.why == why

    def test_pieces_lie_one_after_the_other(self) -> None:
        sizes = (2, 0, 5)
        made = plan_files(
            [self.describe(ArraySpec("x", (n, 3), np.dtype("f4"))) for n in sizes],
            [Path("a"), Path("b"), Path("c")][: len(sizes)],
        )
        (target,) = made.arrays
        assert target.spec.shape == (7, 3)
        assert [piece.offset for piece in target.pieces] == [0, 24, 24]
        assert made.need.nbytes >= made.nbytes == 84


def test_privatised_bytes_are_read_from_smaps() -> None:
    root, key = Path("/dev/shm/legroom-1"), "0" * 32
    text = (
        f"7f00-7f10 rw-p 00000000 00:1b 5 {root}/{key}/a.npy\nRss: 8 kB\nAnonymous: 4 kB\n"
        "7f20-7f30 rw-p 00000000 00:00 0 \nAnonymous: 100 kB\n"
        f"7f40-7f50 rw-p 00000000 00:1b 5 {root}/{key}/b.npy (deleted)\nAnonymous: 12 kB\n"
        f"7f60-7f70 rw-p 00000000 00:1b 5 {root}/locks/x\nAnonymous: 40 kB\n"
    )
    assert entry_users.private_bytes(text, root) == {key: 16 * 1024}
    assert entry_users.private_bytes("", root) is None


def test_time_moves_on_in_lock_files(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with locks.acquire(folder, "a.lock") as lock:  # type: ignore[union-attr]
        os.utime(tmp_path / "a.lock", (1, 1))
        lock.touch()
    assert abs((tmp_path / "a.lock").stat().st_mtime - time.time()) < 60
    os.close(folder)


def test_keys_of_a_manifest_are_no_words_to_translate() -> None:
    body = b' "format": 1,\n "source": {},\n "options": {},\n "built": {},\n "key": 3\n}\n'
    whole = OPENING % zlib.crc32(body) + body
    for language in ("zh", "en"):
        speak(language)
        with pytest.raises(Damaged, match=r"^key .* str$"):
            from_json(whole, "0" * 32)
