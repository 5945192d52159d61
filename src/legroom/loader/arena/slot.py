"""A slot: one piece of shared memory that carries one batch from a worker to the process that trains.

Covers: making a slot in a worker, finding it again in the other process, its state, its lifetime in each.
Does not cover: which slot is used when (arena/pool.py), what lies in it (arena/pack.py), who may free it in the
process that trains (arena/inbox.py).

A slot is a memfd of its own: not bounded by /dev/shm, without a name that could be left behind, gone when the last
process that has it is gone, however that process ends. It is sealed once its pages are there, so nobody can truncate
it under a map. Its first page says who it is and whose turn it is:

    byte 0    FREE      the worker may write                    set by the other process, or at birth
              SENT      a batch is in it, on its way            set by the worker
              HELD      tensors of the other process lie on it  set by the other process
              RETIRED   as FREE, but a forked child of the other process may still look at it: never to be written again
    byte 1    not zero: the worker has given the slot up, and nothing will come in it any more
    byte 8…   a random number, so that a wrong file is never taken for a slot

At any moment only one side may change the state, so no lock is needed.

Ownership: the worker that made a slot keeps its descriptor open for as long as it uses it; the other process gets the
descriptor through a socket (arena/descriptors.py) or /proc, maps the slot and keeps no descriptor. Each process unmaps
its own map when nothing lies on it any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from legroom.cache.capacity import STEP, memory_bounds, tightest
from legroom.system.libc import MAP_FAILED, last_error, libc
from legroom.words import say

FREE, SENT, HELD, RETIRED = range(4)
HEADER = 4096  # a page, so that the data begin on one
_ID = 8
_NOEXEC = 0x8  # MFD_NOEXEC_SEAL, which systems with vm.memfd_noexec=2 insist on and older kernels do not know
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_ADD_SEALS = 1033
_PUNCH_HOLE = 0x2 | 0x1  # and FALLOC_FL_KEEP_SIZE
_MB = 1 << 20

NDArray = np.ndarray[Any, Any]


class NoSlot(Exception):
    """There is no room for a slot now, and why."""


def supported() -> str | None:
    """Why slots cannot be had on this system, or None."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return say("this system has no memfd_create")
    if not os.path.isdir("/proc/self/fd"):
        return say("/proc is not mounted")
    return None


class Slot:
    """One mapped slot. ``fd`` is None where this process did not make it."""

    __slots__ = (
        "__weakref__", "_given_up", "_kind", "_lent", "_state", "_unmap",
        "address", "before_unmap", "capacity", "fd", "id",
    )  # fmt: skip

    def __init__(self, fd: int, capacity: int, number: int | None, *, keep: bool) -> None:
        length = HEADER + capacity
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        address = libc().mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == MAP_FAILED:
            raise last_error()
        self.fd = fd if keep else None
        self.before_unmap: Callable[[int], None] | None = None
        self.address, self.capacity = address, capacity
        self._unmap = libc().munmap
        self._state = ctypes.c_ubyte.from_address(address)
        self._given_up = ctypes.c_ubyte.from_address(address + 1)
        self._kind = ctypes.c_char * length  # made once: a new ctypes type for every batch would be slow
        self._lent: Any = None
        here = ctypes.c_uint64.from_address(address + _ID)
        if number is None:
            here.value = int.from_bytes(os.urandom(8), "little")
        elif here.value != number:
            raise OSError(0, say("the file behind the batch is not the one that was sent"))
        self.id: int = here.value

    @classmethod
    def make(cls, capacity: int, sharers: int) -> Self:
        """A new slot; ``sharers`` processes may be taking memory at the same time."""
        try:
            fd = _memfd()
        except OSError as problem:
            raise NoSlot(str(problem)) from problem
        try:
            _reserve(fd, HEADER + capacity, sharers)
            _seal(fd)
            return cls(fd, capacity, None, keep=True)
        except BaseException as problem:
            os.close(fd)
            if isinstance(problem, OSError):
                raise NoSlot(str(problem)) from problem
            raise

    @classmethod
    def find(cls, pid: int, fd: int, number: int) -> Self:
        """The slot that the worker ``pid`` has open as ``fd``."""
        return cls.at(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), number)

    @classmethod
    def at(cls, fd: int, number: int) -> Self:
        """The slot behind a descriptor, which is closed."""
        try:
            return cls(fd, os.fstat(fd).st_size - HEADER, number, keep=False)
        finally:
            os.close(fd)

    @property
    def state(self) -> int:
        """Whose turn it is."""
        return self._state.value

    @state.setter
    def state(self, state: int) -> None:
        self._state.value = state

    @property
    def given_up(self) -> bool:
        """Whether the worker uses it no more."""
        return self._given_up.value != 0

    def give_up(self) -> None:
        """Use it no more. Its pages go back at once where nobody looks at them, though the other process maps them."""
        self._given_up.value = 1
        if self.state == FREE and not self.lent and self.fd is not None:
            libc().fallocate(self.fd, _PUNCH_HOLE, ctypes.c_long(HEADER), ctypes.c_long(self.capacity))

    def exporter(self) -> Any:
        """The bytes as an object of their own: whatever is made on it keeps it, and it keeps the slot, alive."""
        exporter: Any = self._kind.from_address(self.address)
        exporter.slot = self
        self._lent = weakref.ref(exporter)
        return exporter

    @property
    def lent(self) -> bool:
        """Whether anything made on the last exporter lives."""
        return self._lent is not None and self._lent() is not None

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():  # other threads may still read; the kernel unmaps soon enough
            return
        if getattr(self, "_unmap", None) is not None:
            if self.before_unmap is not None:
                self.before_unmap(self.address)
            # In a collected cycle others' __del__ may come after this one, and still write here.
            self._state, self._given_up = type(self._state)(), type(self._given_up)()
            self._unmap(self.address, HEADER + self.capacity)
        fd = getattr(self, "fd", None)
        if fd is not None:
            os.close(fd)


def window(exporter: Any, offset: int, nbytes: int) -> NDArray:
    """Some bytes of a slot's data, keeping ``exporter`` alive."""
    return np.ndarray((nbytes,), np.uint8, exporter, HEADER + offset)


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("legroom-batch", flags | _NOEXEC)
    except OSError:
        return os.memfd_create("legroom-batch", flags)


def _seal(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, _ADD_SEALS, _SEALS)


def _reserve(fd: int, size: int, sharers: int) -> None:
    """Take the pages for real, looking before every step: beyond its limit a cgroup does not refuse, it kills.

    Workers look without a lock. Each can be wrong by the one step it is about to take, so the steps are a fraction of
    what is left that shrinks with the number of workers.
    """
    os.ftruncate(fd, size)
    offset = 0
    while offset < size:
        rest = size - offset
        bounds = memory_bounds()
        if bounds:
            bound = tightest(bounds)
            if bound.free < rest:
                raise NoSlot(bound.what)
            rest = min(rest, max(_MB, min(STEP, bound.free // (4 * sharers))))
        os.posix_fallocate(fd, offset, rest)
        offset += rest
