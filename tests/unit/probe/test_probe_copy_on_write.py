"""Inherited memory of forked workers: what they copy is counted, what they allocate themselves is not."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from freed_memory import return_freed_memory

from legroom.probe.copy_on_write import (
    PAGE,
    CopyReader,
    anonymous_areas,
    anonymous_pages,
    page_count,
    share_of,
    was_only_read,
)
from legroom.probe.host_files_and_syscalls import Host

MB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads this machine's /proc")


@contextmanager
def worker(*steps: Callable[[], object]) -> Iterator[tuple[int, Callable[[], None]]]:
    """A forked process that does one step each time it is told to; yields its pid and how to tell it."""
    return_freed_memory()  # free pages of earlier tests that an allocation uses again are copied
    (go, tell), (hear, done) = os.pipe(), os.pipe()
    gc.disable()  # in both: a collection writes to every object, and each copies its pages
    pid = os.fork()
    if pid == 0:
        try:
            kept = []
            os.write(done, b".")
            for step in steps:
                os.read(go, 1)
                kept.append(step())
                os.write(done, b".")
            os.read(go, 1)
        finally:
            os._exit(0)
    try:

        def next_step() -> None:
            os.write(tell, b".")
            assert os.read(hear, 1) == b"."

        assert os.read(hear, 1) == b"."  # what a new process copies at first is no step's
        yield pid, next_step
    finally:
        gc.enable()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (go, tell, hear, done):
            os.close(fd)


@linux
def test_reading_a_list_of_objects_copies_it_and_its_addresses_show_it() -> None:
    records = [[float(number), str(number)] for number in range(200_000)]
    other = [[number] for number in range(100_000)]
    addresses, untouched = (
        list(map(id, records)),
        list(map(id, other)),
    )  # now: the parent's own reading copies pages too

    with worker(lambda: sum(len(one) for one in records), lambda: None) as (pid, next_step):
        reader = CopyReader(Host(), os.getpid())
        (first,) = reader.read([pid], 0.0)
        assert (first.copied, first.reason) == (0, None)
        assert first.shared is not None and first.shared > 20 * MB
        next_step()
        (now,) = reader.read([pid], 2.0)
        assert now.copied is not None and now.copied > 10 * MB
        assert first.shared - now.copied - 2 * MB < (now.shared or 0) <= first.shared - now.copied + 2 * MB
        assert now.until == 2.0
        next_step()
        (after,) = reader.read([pid], 3.0)
        assert after.copied is not None and abs(after.copied - now.copied) < MB  # copied once
        assert (share_of(addresses, now.pages) or 0) > 0.95
        assert (share_of(untouched, now.pages) or 0) < 0.05


@linux
def test_allocating_and_reading_arrays_copies_nothing() -> None:
    shared = np.ones(30 * MB // 8)

    def allocate() -> list[bytearray]:
        return [bytearray(b"\1" * MB) for _ in range(40)]

    with worker(allocate, lambda: shared.sum()) as (pid, next_step):
        mine = allocate()  # the parent too: new mappings get the same addresses in both
        reader = CopyReader(Host(), os.getpid())
        reader.read([pid], 0.0)
        next_step()
        next_step()
        (now,) = reader.read([pid], 1.0)
        assert now.copied is not None and now.copied < 8 * MB
        assert page_count(anonymous_pages(Host(), pid).own) * PAGE > 35 * MB
        del mine


@linux
def test_memory_that_the_parent_gives_back_is_not_a_copy() -> None:
    area = mmap.mmap(-1, 20 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[:] = b"\1" * len(area)
    with worker(lambda: None) as (pid, _):
        reader = CopyReader(Host(), os.getpid())
        reader.read([pid], 0.0)
        area.madvise(mmap.MADV_DONTNEED)  # the worker's pages are its own now, and the only ones
        (now,) = reader.read([pid], 1.0)
        assert now.copied is not None and now.copied < 2 * MB
    area.close()


@linux
def test_both_write_to_the_same_pages() -> None:
    area = mmap.mmap(-1, 20 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[:] = b"\1" * len(area)

    other = b"\2" * (8 * MB)

    def write() -> None:
        area[: 8 * MB] = other

    with worker(write) as (pid, next_step):
        reader = CopyReader(Host(), os.getpid())
        reader.read([pid], 0.0)
        next_step()
        write()
        (now,) = reader.read([pid], 1.0)
        assert now.copied is not None and 8 * MB <= now.copied < 10 * MB
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        assert share_of(range(start, start + 8 * MB, PAGE), now.pages) == 1.0
        assert (share_of(range(start + 8 * MB, start + 20 * MB, PAGE), now.pages) or 0) < 0.1
    gc.collect()
    area.close()


@linux
def test_a_process_that_is_gone_is_unknown_with_a_reason() -> None:
    with worker() as (pid, _):
        pass
    (now,) = CopyReader(Host(), os.getpid()).read([pid], 0.0)
    assert now.copied is None and now.shared is None
    assert now.reason is not None and f"/proc/{pid}/" in now.reason
    (orphan,) = CopyReader(Host(), pid).read([os.getpid()], 0.0)
    assert orphan.copied is None and orphan.reason is not None


@linux
def test_a_worker_that_is_forgotten_begins_again() -> None:
    records = [[number] for number in range(200_000)]
    with worker(lambda: sum(len(one) for one in records)) as (pid, next_step):
        reader = CopyReader(Host(), os.getpid())
        reader.read([pid], 0.0)
        next_step()
        assert (reader.read([pid], 1.0)[0].copied or 0) > 5 * MB
        reader.forget(pid)
        assert reader.read([pid], 2.0)[0].copied == 0


MAPS = """\
00400000-00500000 r-xp 00000000 fe:00 77 /usr/bin/python3
00600000-00700000 rw-p 00100000 fe:00 77 /usr/bin/python3
01000000-01800000 rw-p 00000000 00:00 0 [heap]
10000000-10004000 rw-p 00000000 00:00 0
20000000-20004000 ---p 00000000 00:00 0
30000000-30004000 rw-s 00000000 00:01 9 /dev/zero (deleted)
40000000-40002000 rw-p 00000000 00:00 0 [anon:torch]
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
"""


def _machine(root: Path, pid: int, maps: str, pages: dict[int, int]) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "maps").write_text(maps)
    with (folder / "pagemap").open("wb") as file:
        for address, flags in pages.items():
            file.seek(address // PAGE * 8)
            file.write(bytes(7) + bytes([flags]))
        file.truncate(0x50000000 // PAGE * 8)


def test_flags_of_pages(tmp_path: Path) -> None:
    # present and shared, present and exclusive, of a file, swapped out, absent
    _machine(tmp_path, 5, MAPS, {0x1000000: 0x80, 0x1001000: 0x81, 0x1002000: 0xA1, 0x1003000: 0x40, 0x40001000: 0x81})
    host = Host(root=tmp_path)
    assert anonymous_areas(host, 5) == [
        range(0x1000000, 0x1800000),
        range(0x10000000, 0x10004000),
        range(0x40000000, 0x40002000),
    ]
    found = anonymous_pages(host, 5)
    assert (found.shared_bytes, page_count(found.own), found.reason) == (PAGE, 2, None)
    assert share_of([0x1000010, 0x1001010], found.shared) == 0.5
    assert share_of([0x40001FFF], found.own) == 1.0
    assert share_of([], found.own) is None
    within = anonymous_pages(host, 5, [range(0x1001000, 0x1002000), range(0x9000000, 0x10001000)])
    assert (page_count(within.shared), page_count(within.own)) == (0, 1)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert anonymous_pages(Host(root=tmp_path), 5).reason is not None
    _machine(tmp_path, 5, MAPS, {})
    (tmp_path / "proc/5/pagemap").unlink()
    found = anonymous_pages(Host(root=tmp_path), 5)
    assert found.reason is not None and "pagemap" in found.reason
    _machine(tmp_path, 6, "100000000000-600000000000 rw-p 00000000 00:00 0\n", {})
    assert "256 GB" in (anonymous_pages(Host(root=tmp_path), 6).reason or "")


def _words(*changed: tuple[int, int]) -> bytes:
    """A page of 64 objects, with reference count 3, type, hash and five words each, and some words changed."""
    words = [3, 0x7F00_1122_3340, (1 << 64) - 1, 17, 18, 19, 20, 21] * 64
    for place, value in changed:
        words[place] = value
    return struct.pack("<512Q", *words)


@pytest.mark.parametrize(
    ("before", "after", "only_read"),
    [
        (_words(), _words(), True),
        (_words(), _words((0, 4), (64, 2)), True),  # reference counts
        (_words(), _words(*((place, 4) for place in range(0, 512, 8))), True),
        (_words(), _words((2, 0x1234_5678_9ABC_DEF0)), True),  # a str that was hashed
        (_words(), _words((4, 77)), False),  # malloc's size of the block before: no address follows
        (_words(), _words((0, 0x7F00_1122_0000)), False),  # a block that was freed
        (_words(), _words((1, 0x7F00_1122_9990)), False),  # another object
        (_words(), _words((3, 4)), False),  # not where an object begins
        (bytes(PAGE), bytes(PAGE), False),
        (b"12345678" * 512, b"12345678" * 512, False),
        (_words(), b"", False),  # gone by now
    ],
)
def test_a_page_that_was_only_read_differs_in_reference_counts_alone(
    before: bytes, after: bytes, only_read: bool
) -> None:
    assert was_only_read(before, after) is only_read
