"""Pages of the cache's files: copy-on-write mappings, prefaulting, huge pages, NUMA nodes; reads and CRC-32.

Mappings are private and writable: a trainer that writes in place changes its own pages only. They reserve no memory,
otherwise 40 GB could not be mapped on a 24 GB machine. Under ``vm.overcommit_memory=2`` the kernel would charge every
writable mapping in full, so they are read-only there. No descriptor stays open: thousands of arrays would use them up.

A MappedFile owns its addresses. Arrays keep it alive, and it keeps the lease alive. When the last array is freed the
pages are unmapped and the lease is released, in this process alone.

Prefault in memory reads one byte of every 64 kB, then one of every page. The kernel maps the pages around a fault with
it, so the first pass maps nearly all and the second the rest. That takes two thirds of the time of
MADV_POPULATE_READ, which walks page by page (16 ms against 23 for 368 MB on the machine of bench/results). On a disk,
where each touch would wait for a read, MADV_POPULATE_READ is used, through ctypes because ``mmap.madvise`` holds the
interpreter's lock. Kernels before 5.14 do not have it: their pages are touched too.

A tmpfs uses 4 kB pages unless mounted otherwise, and the kernel clears, counts and maps each one. MADV_COLLAPSE (Linux
6.1) makes a huge page of a range that has at least one page, whatever the mount options are. Writing to such a file
takes half the time, and reading it for the first time takes no longer than reading it again.

The kernel may have to move other memory, or a hypervisor may have to find the memory first. So the cost is measured:
after huge pages that took twice as long as small pages would, the next 16 MB are small pages, then 64 MB and so on.
Huge pages that are fast take their size off the next pause. Once some are refused, the build uses small pages.

Without interleaving every page of an entry lies on the NUMA node of the process that built it, and training runs on
the other node read all of it across the link.

CRC-32 is in the standard library, every other tool can compute it, and the checksums of parts that several threads
copied can be combined without reading them again. It detects damage, not forgery. isal computes tens of GB/s per
core, so the cost disappears behind the copy. zlib computes about 4 GB/s.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from legroom.probe.host_files_and_syscalls import Host
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.system.processes_and_threads import (
    MAP_FAILED,
    Alive,
    last_error,
    libc,
    room_for_threads,
    start_thread_at_once,
    usable_cpus,
)

HUGE_PAGE = 2 << 20  # bytes of a huge page on x86 and arm64, and the alignment of its address
_NORESERVE = {"linux": 0x4000}.get(sys.platform, 0)
_NO_ACCESS = 0  # PROT_NONE


@contextmanager
def opened(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o777, *, dir_fd: int | None = None
) -> Iterator[int]:
    """``os.open`` for a block: the descriptor is closed at its end."""
    fd = os.open(path, flags, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@cache
def maps_writable() -> bool:
    """Whether private writable mappings are free of charge on this kernel."""
    try:
        with open("/proc/sys/vm/overcommit_memory", "rb", buffering=0) as file:
            return file.read().strip() != b"2"
    except OSError:
        return True


class _Pages:
    """Mapped addresses, unmapped when this object is freed."""

    __slots__ = ("_unmap", "address", "length")

    def __init__(self, address: int, length: int) -> None:
        self.address, self.length = address, length
        self._unmap = libc().munmap

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit other threads may still read. The kernel unmaps it.
        if not at_exit():
            self._unmap(self.address, self.length)


class MappedFile:
    """One mapped file. ``keep`` is an object that is kept alive with it.

    It has no finalizer of its own, on purpose. A weak reference to an object with one can still be followed while the
    finalizer runs, and a background thread would read pages that are being unmapped. Without one, a weak reference
    gives either nothing or a mapping that stays.
    """

    __slots__ = ("__weakref__", "_pages", "keep", "writable")

    def __init__(self, fd: int, length: int, keep: object = None, *, offset: int = 0) -> None:
        self.writable = maps_writable()
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        wish = _aligned_address(length, offset)
        address = libc().mmap(wish, length, protection, mmap.MAP_PRIVATE | _NORESERVE, fd, offset)
        if address == MAP_FAILED:
            raise last_error()
        self._pages = _Pages(address, length)
        self.keep = keep

    @property
    def address(self) -> int:
        """Its first address."""
        return self._pages.address

    @property
    def length(self) -> int:
        """Its length in bytes."""
        return self._pages.length

    def buffer(self) -> Any:
        """The bytes, as an array that keeps this mapping alive. ctypes would make a class for every length."""
        import numpy as np

        return np.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = self.address, not self.writable
        return {"version": 3, "typestr": "|u1", "shape": (self.length,), "data": data}


def _aligned_address(length: int, offset: int) -> int | None:
    """A free address at which the file's huge pages can be mapped as such. The kernel alone would choose any.

    Another thread may map something there first. Then the kernel chooses.
    """
    if length < HUGE_PAGE or sys.platform != "linux":
        return None
    span = length + HUGE_PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    free = libc().mmap(None, span, _NO_ACCESS, private, -1, 0)
    if free == MAP_FAILED:
        return None
    libc().munmap(free, span)
    return int(free) + (offset - int(free)) % HUGE_PAGE


_POPULATE_READ = 22
_STEP = 64 << 20
_PAGE = 4096
_AROUND = 65536  # the kernel's default fault_around_bytes
_MOST_THREADS = 4  # one CPU is left for the training run
_CHECKED_S = 0.2  # seconds between two looks whether the threads live
_HEAD_START = 0.0005  # the caller gets its arrays before prefaulting starts


class Prefault:
    """A running prefault. It ends early when the mappings are freed.

    Its threads keep the pages that they read mapped, and nothing that is kept alive with a mapping: an entry whose data
    were closed is not in use any more.
    """

    def __init__(self, maps: Sequence[MappedFile], *, in_memory: bool) -> None:
        self._maps = [weakref.ref(item) for item in maps]
        self._in_memory = in_memory
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._steps: Iterator[tuple[weakref.ref[MappedFile], int]] = iter(())
        self._running = 1
        self._alive: list[Alive] = []
        self.filled = 0
        self._spawn(self._first)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every page is mapped. False after ``timeout`` seconds."""
        if self._pid != os.getpid():  # a forked child has the mappings but not the threads
            self._start()
        end = None if timeout is None else time.monotonic() + timeout
        while not self._done.wait(_CHECKED_S if end is None else min(_CHECKED_S, max(0.0, end - time.monotonic()))):
            if all(alive() is None for alive in self._alive):  # out of memory: pages are mapped on use
                self._done.set()
            elif end is not None and time.monotonic() >= end:
                return False
        return True

    def _spawn(self, work: Callable[[], None]) -> None:
        alive = start_thread_at_once(work) if room_for_threads(1) else None
        if alive is None:  # pages are mapped on use
            self._end()
        else:
            self._alive.append(alive)

    def _first(self) -> None:
        time.sleep(_HEAD_START)
        sizes = [(reference, pages.length) for reference in self._maps if (pages := _pages_of(reference)) is not None]
        pages = None  # else it would stay mapped until this function ends
        total = sum(size for _, size in sizes)
        if not self._in_memory and not _fits(total):
            self._end()
            return
        self._steps = ((reference, offset) for reference, size in sizes for offset in range(0, size, _STEP))
        helpers = min(_MOST_THREADS, usable_cpus() - 1, total // _STEP) - 1
        for _ in range(helpers):
            with self._lock:
                self._running += 1
            self._spawn(self._fill)
        self._fill()

    def _fill(self) -> None:
        try:
            while (step := self._next()) is not None:
                reference, offset = step
                pages = _pages_of(reference)
                if pages is not None:
                    length = min(_STEP, pages.length - offset)
                    if self._in_memory:
                        _touch(pages, offset, length, _AROUND)
                        if length > _PAGE:
                            _touch(pages, offset, length, _PAGE)
                    else:
                        _populate(pages, offset, length)
                    self.filled += length
                    del pages  # the mapping may be freed between two steps
        finally:
            self._end()

    def _next(self) -> tuple[weakref.ref[MappedFile], int] | None:
        with self._lock:
            return next(self._steps, None)

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._done.set()


def _pages_of(reference: weakref.ref[MappedFile]) -> _Pages | None:
    """The pages of a mapping that is still there. The mapping itself is held for no more than an instruction or two."""
    return getattr(reference(), "_pages", None)


def _populate(pages: _Pages, offset: int, length: int) -> None:
    if libc().madvise(pages.address + offset, length, _POPULATE_READ) != 0 and ctypes.get_errno() == errno.EINVAL:
        _touch(pages, offset, length, _PAGE)  # on any other error pages are mapped on use


def _fits(size: int) -> bool:
    """Whether a disk entry is small enough to prefault without evicting pages that are in use."""
    with import_lock:
        from legroom.cache.store_free_space import memory_bounds

    return all(bound.free >= size for bound in memory_bounds())


def _touch(pages: _Pages, offset: int, length: int, step: int) -> None:
    """Read one byte of every ``step``. numpy releases the interpreter's lock meanwhile."""
    import numpy as np

    buffer: Any = (ctypes.c_char * length).from_address(pages.address + offset)
    bytes_there = np.frombuffer(buffer, np.uint8)[::step]
    int(bytes_there.max(initial=0))  # only to read the pages


_COLLAPSE = 25
_PIECE = 2 * HUGE_PAGE  # allocated between two time measurements; one page as long as they are not known to be fast
_DEAR = 0.8e-9  # seconds per byte: twice what small pages take
_PAUSE = 16 << 20  # bytes in small pages after huge pages that took too long; four times as many after the next ones
_SETTINGS = "/sys/kernel/mm/transparent_hugepage/"


class HugePages:
    """The huge pages of one build, used where they are fast enough."""

    def __init__(self) -> None:
        self._supported = hugepages_enabled(os.environ) and hugepages_supported()
        self._piece = HUGE_PAGE  # bytes of the next range
        self._pause, self._left = _PAUSE, 0  # bytes in small pages after the next dear range, and still to come

    def take(self, fd: int, offset: int, length: int) -> bool:
        """Allocate a range of a file in memory as huge pages, except for the tail. False if small pages are needed."""
        end = offset + length - length % HUGE_PAGE
        if offset % HUGE_PAGE or end == offset:
            return False
        whole = True
        while offset < end:
            piece = min(self._piece, end - offset)
            whole = self._take(fd, offset, piece) and whole
            offset += piece
        return whole

    def _take(self, fd: int, offset: int, length: int) -> bool:
        if not self._supported:
            return False
        if self._left > 0:
            self._left -= length
            return False
        worked, begun, preempted = time.thread_time(), time.monotonic(), _preemptions()
        for place in range(offset, offset + length, HUGE_PAGE):
            # MADV_COLLAPSE needs one page in the range. It also decides the NUMA node of the huge page.
            os.pwrite(fd, b"\0", place)
        self._supported = _collapse(fd, offset, length)
        cost = time.thread_time() - worked
        if _preemptions() == preempted:  # else wall time is that of other processes on this core
            cost = max(cost, (time.monotonic() - begun) / 8)  # waiting for memory to be moved
        if cost > _DEAR * length:
            self._piece, self._left, self._pause = HUGE_PAGE, self._pause, 4 * self._pause
        else:
            self._piece, self._pause = _PIECE, max(_PAUSE, self._pause - length)
        return self._supported


def _preemptions() -> int:
    """How often the kernel has given this thread's core to another thread that was waiting for it."""
    import resource  # Windows has none, and no huge pages of this kind either

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _collapse(fd: int, offset: int, length: int) -> bool:
    try:
        mapped = MappedFile(fd, length, offset=offset)
    except OSError:  # no addresses left
        return False
    return bool(libc().madvise(mapped.address, mapped.length, _COLLAPSE) == 0)


def hugepages_enabled(env: Mapping[str, str]) -> bool:
    """Whether ``LEGROOM_LARGE_PAGES`` allows huge pages: yes, unless it is 0."""
    return env.get("LEGROOM_LARGE_PAGES", "").strip().lower() not in ("0", "no", "false", "off")


def hugepages_supported(host: Host | None = None) -> bool:
    """Whether this kernel has 2 MB pages and they are not turned off."""
    host = host or Host()
    size = (host.text(_SETTINGS + "hpage_pmd_size") or "").strip()
    return size == str(HUGE_PAGE) and "[never]" not in (host.text(_SETTINGS + "enabled") or "")


_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}  # get_mempolicy, set_mempolicy
_INTERLEAVE = 3
_BITS = 1024  # bits in a node mask: the kernel's maximum


def numa_nodes(host: Host | None = None) -> list[int]:
    """The NUMA nodes that have memory. Empty if unknown."""
    return parse_node_list((host or Host()).text("/sys/devices/system/node/has_memory") or "")


def parse_node_list(text: str) -> list[int]:
    """Parse the kernel's list format: ``0-1,4``."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return []
        found.extend(range(int(first), int(last or first) + 1))
    return [node for node in found if node < _BITS]


@contextmanager
def interleaved(chosen: list[int] | None = None) -> Iterator[bool]:
    """Interleave this thread's new pages over the nodes. Yields whether it does. A single node is left as it is."""
    chosen = numa_nodes() if chosen is None else chosen
    calls = _CALLS.get(platform.machine())
    if len(chosen) < 2 or calls is None:
        yield False
        return
    get, put = calls
    mode, mask = ctypes.c_int(), _mask([])
    if libc().syscall(get, ctypes.byref(mode), mask, _BITS, None, 0) != 0:
        yield False
        return
    done = libc().syscall(put, _INTERLEAVE, _mask(chosen), _BITS + 1) == 0
    try:
        yield done
    finally:
        if done:
            libc().syscall(put, mode.value, mask, _BITS + 1)


def _mask(chosen: list[int]) -> ctypes.Array[ctypes.c_ulong]:
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_BITS // width + 1))()
    for node in chosen:
        mask[node // width] |= 1 << node % width
    return mask


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Read into ``view`` from ``offset``. Returns the number of bytes, 0 at the end."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    data = os.pread(fd, len(view), offset)
    view[: len(data)] = data
    return len(data)


_POLYNOMIAL = 0xEDB88320
_CHUNK = 1 << 20
Part = tuple[int, int]  # (crc, length)


class Crc(Protocol):
    def __call__(self, data: Any, value: int = 0, /) -> int: ...


@cache
def crc32() -> Crc:
    """The fastest CRC-32 function installed."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    fast: Crc = isal_zlib.crc32
    return fast


def combined(parts: Iterable[Part]) -> int:
    """The CRC of all parts, concatenated."""
    total = 0
    for crc, length in parts:
        total = (_multiply(_shift(length), total) if total else 0) ^ crc
    return total


def file_crc32(fd: int, offset: int = 0) -> int:
    """The CRC of a file from ``offset`` to its end."""
    crc, total, buffer = crc32(), 0, bytearray(_CHUNK)
    view = memoryview(buffer)
    while got := read_at(fd, view, offset):
        total = crc(view[:got], total)
        offset += got
    return total


def hex_digits(crc: int) -> str:
    """Eight hexadecimal digits, as in the manifest."""
    return f"{crc:08x}"


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC's, bits reflected: the highest bit is x^0."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@cache
def _power(exponent: int) -> int:
    """x to the power of 2^exponent."""
    return 1 << 30 if exponent == 0 else _multiply(_power(exponent - 1), _power(exponent - 1))


@cache
def _shift(length: int) -> int:
    """x^(8·length): what a CRC is multiplied by when ``length`` bytes follow."""
    product, exponent, bits = 1 << 31, 3, length
    while bits:
        if bits & 1:
            product = _multiply(_power(exponent % 32), product)
        bits >>= 1
        exponent += 1
    return product
