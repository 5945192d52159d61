"""Large pages: taken where the kernel has them, given up where they cost too much, and mapped as they are."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import re
import resource
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

import legroom
from legroom.cache import mapped_files_and_checksums
from legroom.cache.mapped_files_and_checksums import HUGE_PAGE, HugePages, MappedFile
from legroom.probe.host_files_and_syscalls import Host
from legroom.system.processes_and_threads import libc

MB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm and /proc/self/smaps")


@pytest.fixture
def memory() -> Iterator[int]:
    """A file in memory of 20 MB and a bit, without a page."""
    path = Path("/dev/shm", f"legroom-large-{secrets.token_hex(4)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    os.ftruncate(fd, 20 * MB + 5000)
    yield fd
    os.close(fd)


@pytest.fixture
def in_memory(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store that is really in memory."""
    folder = Path("/dev/shm", f"legroom-large-{secrets.token_hex(4)}")
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("LEGROOM_SHM", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: what is tested is not this machine's speed."""
    monkeypatch.setattr(mapped_files_and_checksums, "_DEAR", float("inf"))


def _joins() -> bool:
    """Whether this kernel knows the call at all (6.1 and later, large pages not switched off)."""
    path = Path("/dev/shm", f"legroom-large-{secrets.token_hex(4)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    try:
        os.ftruncate(fd, HUGE_PAGE)
        os.pwrite(fd, b"\0", 0)
        mapped = MappedFile(fd, HUGE_PAGE)
        return mapped_files_and_checksums.hugepages_supported() and libc().madvise(mapped.address, HUGE_PAGE, 25) == 0
    finally:
        os.close(fd)


joins = pytest.mark.skipif(sys.platform == "linux" and not _joins(), reason="this kernel does not join pages")


def _in_large_pages(address: int) -> int:
    """How many bytes of the map at this address are mapped by large pages."""
    text = Path("/proc/self/smaps").read_text()
    area = re.search(rf"^{address:x}-.*?(?=^[0-9a-f]+-[0-9a-f]+ |\Z)", text, re.M | re.S)
    assert area is not None
    found = re.search(r"ShmemPmdMapped:\s+(\d+) kB", area.group())
    assert found is not None
    return 1024 * int(found.group(1))


@joins
@pytest.mark.usefixtures("patient")
class TestTaken:
    def test_a_file_is_taken_in_large_pages_and_mapped_by_them(self, memory: int) -> None:
        assert HugePages().take(memory, 0, 20 * MB + 5000)
        assert os.fstat(memory).st_blocks * 512 == 20 * MB  # the tail is left
        item = MappedFile(memory, 20 * MB + 5000)
        values = np.frombuffer(item.buffer(), np.uint8)
        assert values.sum() == 0
        assert _in_large_pages(item.address) == 20 * MB

    def test_a_write_takes_one_small_page_away(self, memory: int) -> None:
        assert HugePages().take(memory, 0, 20 * MB)
        one, other = MappedFile(memory, 20 * MB), MappedFile(memory, 20 * MB)
        np.frombuffer(one.buffer(), np.uint8)[3 * MB] = 7
        assert np.frombuffer(other.buffer(), np.uint8)[3 * MB] == 0
        assert os.pread(memory, 1, 3 * MB) == b"\0"

    def test_ranges_one_after_another(self, memory: int) -> None:
        pages = HugePages()
        assert all(pages.take(memory, offset, 8 * MB) for offset in (0, 8 * MB))
        assert os.fstat(memory).st_blocks * 512 == 16 * MB

    def test_a_whole_entry(self, tmp_path: Path, in_memory: Path) -> None:
        packed = np.random.default_rng(0).integers(0, 9, (700, 8192), np.uint8)
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset("packed", data=packed, chunks=(3, 8192), compression="gzip")
            file.create_dataset("plain", data=packed[:, ::-1].copy())
        with legroom.open(tmp_path / "a.h5", backing="shm") as data:
            data.ready()
            np.testing.assert_array_equal(data["packed"], packed)
            np.testing.assert_array_equal(data["plain"], packed[:, ::-1])
            assert list(in_memory.glob("legroom-*/*/*.npy"))
            for array in (data["packed"], data["plain"]):
                start = array.ctypes.data - array.ctypes.data % HUGE_PAGE
                assert _in_large_pages(start) == 4 * MB  # of 5.7


def _tried(monkeypatch: pytest.MonkeyPatch, is_dear: Callable[[int], bool]) -> list[tuple[int, int]]:
    """Which ranges are tried where making huge pages takes no time, or a second where they are dear."""
    tried: list[tuple[int, int]] = []
    now = [0.0]

    def collapse(_fd: int, offset: int, length: int) -> bool:
        tried.append((offset, length))
        now[0] += is_dear(offset)
        return True

    monkeypatch.setattr(mapped_files_and_checksums, "hugepages_supported", lambda: True)
    monkeypatch.setattr(mapped_files_and_checksums, "_collapse", collapse)
    monkeypatch.setattr(mapped_files_and_checksums.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(mapped_files_and_checksums.time, "monotonic", lambda: now[0])
    return tried


class TestNotTaken:
    def test_what_is_no_large_page_is_left_alone(self, memory: int) -> None:
        pages = HugePages()
        assert not pages.take(memory, 0, HUGE_PAGE - 1)
        assert not pages.take(memory, 4096, HUGE_PAGE)
        assert os.fstat(memory).st_blocks == 0

    def test_switched_off(self, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LEGROOM_LARGE_PAGES", "0")
        assert not HugePages().take(memory, 0, 20 * MB)
        assert os.fstat(memory).st_blocks == 0

    def test_a_kernel_that_does_not_know_the_call(self, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mapped_files_and_checksums, "_COLLAPSE", 0x7FFF)
        assert not HugePages().take(memory, 0, 20 * MB)
        assert os.fstat(memory).st_blocks * 512 <= 2 * HUGE_PAGE  # no more than was tried

    def test_small_pages_follow_when_it_takes_too_long(self, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
        tried = _tried(monkeypatch, lambda offset: offset < 300 * MB)
        pages = HugePages()
        found = [pages.take(memory, offset, 4 * MB) for offset in range(0, 600 * MB, 4 * MB)]
        # After one page that took a second 16 MB in small pages, then 64 MB, then 256 MB.
        assert [offset // MB for offset, _ in tried[:3]] == [0, 18, 84]
        assert {length for _, length in tried[:4]} == {HUGE_PAGE}
        first = tried[3][0]
        assert 84 * MB + 256 * MB <= first <= 84 * MB + 264 * MB
        # From there on all of them are huge.
        assert sum(length for _, length in tried[3:]) == 600 * MB - first
        assert found[first // (4 * MB) + 1 :] == [True] * (149 - first // (4 * MB)) and not any(found[:70])

    def test_pages_that_are_fast_shorten_the_next_pause(self, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
        tried = _tried(monkeypatch, lambda offset: offset in (0, 18 * MB) or 500 * MB <= offset < 504 * MB)
        HugePages().take(memory, 0, 600 * MB)
        places = [offset for offset, _ in tried]
        dear = next(number for number, offset in enumerate(places) if offset >= 500 * MB)
        assert 16 * MB <= places[dear + 1] - places[dear] <= 24 * MB  # not 256 MB

    @pytest.mark.parametrize("preempted", [False, True])
    def test_waiting_counts_unless_it_is_for_a_core(
        self, memory: int, monkeypatch: pytest.MonkeyPatch, preempted: bool
    ) -> None:
        tried = _tried(monkeypatch, lambda offset: False)
        seconds, switches = itertools.count(), itertools.count()
        monkeypatch.setattr(mapped_files_and_checksums.time, "monotonic", lambda: float(next(seconds)))
        monkeypatch.setattr(mapped_files_and_checksums, "_preemptions", lambda: next(switches) if preempted else 7)
        assert HugePages().take(memory, 0, 12 * MB) is preempted
        assert sum(length for _, length in tried) == (12 * MB if preempted else HUGE_PAGE)

    def test_no_addresses_left(self, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> MappedFile:
            raise OSError(errno.ENOMEM, "no addresses")

        monkeypatch.setattr(mapped_files_and_checksums, "MappedFile", refuse)
        assert not HugePages().take(memory, 0, 20 * MB)

    def test_a_write_that_is_refused_is_an_error(self, monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
        monkeypatch.setattr(mapped_files_and_checksums, "hugepages_supported", lambda: True)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MB, hard))
        try:
            with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                HugePages().take(memory, 4 * MB, 4 * MB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("text", "expected"), [("", True), ("1", True), ("0", False), (" No ", False), ("off", False)])
def test_the_switch(text: str, expected: bool) -> None:
    assert mapped_files_and_checksums.hugepages_enabled({"LEGROOM_LARGE_PAGES": text}) is expected
    assert mapped_files_and_checksums.hugepages_enabled({})


@pytest.mark.parametrize(
    ("size", "enabled", "expected"),
    [
        ("2097152\n", "always [madvise] never\n", True),
        ("2097152\n", "[always] madvise never\n", True),
        ("2097152\n", "always madvise [never]\n", False),
        ("536870912\n", "[always] madvise never\n", False),  # arm64 with pages of 64 kB
        (None, None, False),
    ],
)
def test_whether_there_are_any(tmp_path: Path, size: str | None, enabled: str | None, expected: bool) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    if size is not None and enabled is not None:
        (folder / "hpage_pmd_size").write_text(size)
        (folder / "enabled").write_text(enabled)
    assert mapped_files_and_checksums.hugepages_supported(Host(tmp_path)) is expected


class TestWhereMapsLie:
    @pytest.mark.parametrize("offset", [0, 4096, HUGE_PAGE, 3 * MB])
    def test_a_large_map_begins_where_large_pages_fit(self, memory: int, offset: int) -> None:
        item = MappedFile(memory, 8 * MB, offset=offset)
        assert (item.address - offset) % HUGE_PAGE == 0

    def test_an_address_that_is_taken_meanwhile_stays_as_it_was(
        self, memory: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.pwrite(memory, b"first", 0)
        first = MappedFile(memory, 8 * MB)
        np.frombuffer(first.buffer(), np.uint8)[:5] = 9
        monkeypatch.setattr(mapped_files_and_checksums, "_aligned_address", lambda length, offset: first.address)
        second = MappedFile(memory, 8 * MB)
        assert second.address != first.address
        assert ctypes.string_at(first.address, 5) == b"\x09" * 5
        assert ctypes.string_at(second.address, 5) == b"first"

    def test_no_room_for_the_wish(self, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
        item = MappedFile(memory, 8 * MB)
        del item
        gc.collect()
        real = libc().mmap

        def mmap(*arguments: object) -> int | None:
            return mapped_files_and_checksums.MAP_FAILED if arguments[4] == -1 else real(*arguments)

        monkeypatch.setattr(libc(), "mmap", mmap)
        assert ctypes.string_at(MappedFile(memory, 8 * MB).address, 2) == b"\0\0"
