"""Copy-on-write maps of files, and their lifetime.

Covers: mapping a file so that arrays can be made on it, unmapping when the last array is gone.
Does not cover: which files (attach.py), pages ahead of time (prefault.py).

Maps are private and writable: a trainer that writes in place changes its own pages and nobody else's. They
reserve no memory, or 40 GB could not be mapped on a 24 GB machine. Under ``vm.overcommit_memory=2`` the kernel
would count every writable map in full, so they are read-only there. No descriptor stays open for a map: files
with thousands of arrays would run out of them.

A Map owns its addresses. Arrays keep the Map alive, the Map keeps the lease alive; when the last array dies the
pages are unmapped and the lease is given back, in this process alone.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from legroom.system.libc import MAP_FAILED, last_error, libc

LARGE = 2 << 20  # a large page of x86 and of arm64: what its address in a map must be a multiple of
_NORESERVE = {"linux": 0x4000}.get(sys.platform, 0)
_NO_ACCESS = 0  # PROT_NONE


@cache
def writable() -> bool:
    """Whether private writable maps cost nothing here."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return True


class _Pages:
    """Mapped addresses, unmapped when nobody has this any more."""

    __slots__ = ("_unmap", "address", "keep", "length")

    def __init__(self, address: int, length: int, keep: object) -> None:
        self.address, self.length, self.keep = address, length, keep
        self._unmap = libc().munmap

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit other threads may still read; the kernel unmaps soon enough.
        if not at_exit():
            self._unmap(self.address, self.length)


class Map:
    """One mapped file; ``keep`` is held for as long as the map is.

    It has no finalizer of its own, on purpose. A weak reference to an object with one can still be followed while
    the finalizer runs, and a background thread would read pages that are being unmapped; without one, a weak
    reference gives either nothing or a map that stays.
    """

    __slots__ = ("__weakref__", "_pages", "writable")

    def __init__(self, fd: int, length: int, keep: object = None, *, offset: int = 0) -> None:
        self.writable = writable()
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        wish = _wish(length, offset)
        address = libc().mmap(wish, length, protection, mmap.MAP_PRIVATE | _NORESERVE, fd, offset)
        if address == MAP_FAILED:
            raise last_error()
        self._pages = _Pages(address, length, keep)

    @property
    def address(self) -> int:
        """Where it lies."""
        return self._pages.address

    @property
    def length(self) -> int:
        """Its bytes."""
        return self._pages.length

    @property
    def keep(self) -> object:
        """What is held along with it."""
        return self._pages.keep

    def buffer(self) -> Any:
        """The bytes, as an object that keeps this map alive."""
        buffer: Any = (ctypes.c_char * self.length).from_address(self.address)
        buffer.map = self
        return buffer


def _wish(length: int, offset: int) -> int | None:
    """A free address where the file's large pages can be mapped as such; left to itself the kernel takes any.

    Another thread may map something there first: then the kernel takes any after all.
    """
    if length < LARGE or sys.platform != "linux":
        return None
    span = length + LARGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    free = libc().mmap(None, span, _NO_ACCESS, private, -1, 0)
    if free == MAP_FAILED:
        return None
    libc().munmap(free, span)
    return int(free) + (offset - int(free)) % LARGE
