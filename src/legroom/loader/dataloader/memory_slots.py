"""Slots: shared memory that carries one batch from a worker to the training process, and the slots of one worker.

A slot is a memfd: not limited by /dev/shm, without a name that could be left behind, freed when the last process that
has it ends, however that ends. It is sealed once its pages are allocated, so no process can truncate it under a
mapping. Its first page is a header:

    byte 0    FREE      the worker may write                    set by the training process, or when it is made
              SENT      it holds a batch on its way             set by the worker
              HELD      tensors of the training process use it  set by the training process
              RETIRED   as FREE, but a forked child of the training process may still read it: never written again
    byte 1    not zero: the worker has released the slot, and will send nothing in it
    byte 8…   a random id, so that another file is never taken for a slot

Only one side may change the state at any moment, so no lock is needed.

Ownership: the worker that made a slot keeps its descriptor open while it uses the slot. The training process gets the
descriptor through a socket (queues.py) or /proc, maps the slot and closes the descriptor. Each process unmaps its own
mapping when nothing uses it any more.

Every worker has its own pool of slots, so no lock is shared. Slots are made when they are needed: a consumer that is
faster than its workers causes one or two per worker. A memory budget is divided evenly, because the consumer takes
batches in turn: if one worker could use it all, the next in turn could wait for memory while the consumer waits for it.
What the consumer holds is not counted.

A worker waits while one of its own batches is on its way. A consumer that asks for more takes that batch out sooner or
later, so the wait ends. With no batch on its way, a worker waits only a moment for memory.

Slots must leave memory for samples, since every worker may be about to load those of a batch. Where memory is low, a
worker has only one batch on its way, and frees the pages of its other slots.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from legroom.advice.memory_need import Each, fits
from legroom.cache.store_free_space import STEP, memory_bounds, tightest
from legroom.errors import BudgetTooSmall, LoaderClosed
from legroom.loader.dataloader.admit_workers_by_memory import does_not_fit
from legroom.loader.dataloader.worker_shutdown import must_end
from legroom.loader.measure_process_memory import free_memory_now
from legroom.messages import counted, phrase, say
from legroom.system.processes_and_threads import MAP_FAILED, last_error, libc
from legroom.units import exact_size, format_size

FREE, SENT, HELD, RETIRED = range(4)
HEADER = 4096  # one page, so that the data begin on a page
_ID_OFFSET = 8
_NOEXEC = 0x8  # MFD_NOEXEC_SEAL: required where vm.memfd_noexec=2, unknown to older kernels
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_ADD_SEALS = 1033
_PUNCH_HOLE = 0x2 | 0x1  # with FALLOC_FL_KEEP_SIZE
_DONTNEED, _POPULATE_READ = 4, 22  # of madvise
_MB = 1 << 20
_PAGE = 4096
_PAGE_FLAGS = np.uint64(61)  # of /proc/self/pagemap: the page is the file's, is in swap, is in memory
_PAGE_OF_FILE, _PAGE_USED = np.uint64(1), np.uint64(2 | 4)
_pagemap = (0, -1)  # pid, and a descriptor in it
_RECENT = 16  # batches that decide how large slots are
_SLOT_WAIT_S = 1.0  # other workers make their first batches in memory that they soon free
_LOW_MEMORY_WAIT_S = 10.0  # where memory is low: the consumer returns a slot with its next step
_CHECK_S = 0.05  # between two checks for memory and for the end of the loader

NDArray = np.ndarray[Any, Any]


class NoSlot(Exception):
    """There is not enough memory for a slot now, and why."""


def unsupported_reason() -> str | None:
    """Why this system has no slots, or None."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return say("this system has no memfd_create")
    if not os.path.isdir("/proc/self/fd"):
        return say("/proc is not mounted")
    return None


class Slot:
    """One mapped slot. ``fd`` is None unless this process made it or hands it on."""

    __slots__ = (
        "__weakref__", "_exported", "_kind", "_released", "_state", "_unmap",
        "address", "before_unmap", "capacity", "fd", "id",
    )  # fmt: skip

    def __init__(self, fd: int, capacity: int, slot_id: int | None, *, keep: bool, private: bool = False) -> None:
        length = HEADER + capacity
        # To populate a private map would copy every page.
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        address = libc().mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == MAP_FAILED:
            raise last_error()
        self.fd: int | None = None
        self.before_unmap: Callable[[int], None] | None = None
        self.address, self.capacity = address, capacity
        self._unmap = libc().munmap
        self._state = ctypes.c_ubyte.from_address(address)
        self._released = ctypes.c_ubyte.from_address(address + 1)
        self._kind = ctypes.c_char * length  # made once: a new ctypes type for every batch would be slow
        self._exported: Any = None
        stored = ctypes.c_uint64.from_address(address + _ID_OFFSET)
        if slot_id is None:
            stored.value = int.from_bytes(os.urandom(8), "little")
        elif stored.value != slot_id:
            raise OSError(0, say("the file behind the batch is not the one that was sent"))
        self.id: int = stored.value
        self.fd = fd if keep else None  # from here on it is closed with the slot: a caller closes it after an error

    @classmethod
    def make(cls, capacity: int, workers: int) -> Self:
        """A new slot; ``workers`` processes may be allocating at the same time."""
        try:
            fd = _memfd()
        except OSError as problem:
            raise NoSlot(str(problem)) from problem
        try:
            _allocate(fd, HEADER + capacity, workers)
            _seal(fd)
            return cls(fd, capacity, None, keep=True)
        except BaseException as problem:
            os.close(fd)
            if isinstance(problem, OSError):
                raise NoSlot(str(problem)) from problem
            raise

    @classmethod
    def find(cls, pid: int, fd: int, slot_id: int, *, keep: bool = False) -> Self:
        """The slot that the worker ``pid`` has open as ``fd``."""
        return cls.at(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), slot_id, keep=keep)

    @classmethod
    def at(cls, fd: int, slot_id: int, *, keep: bool = False, private: bool = False) -> Self:
        """The slot behind a descriptor, which is closed, or kept to hand it on.

        ``private``: what this process writes into the batch stays its own. Its state must not be set then.
        """
        try:
            slot = cls(fd, os.fstat(fd).st_size - HEADER, slot_id, keep=keep, private=private)
        except BaseException:
            os.close(fd)
            raise
        if not keep:
            os.close(fd)
        return slot

    def discard_private_pages(self, nbytes: int) -> None:
        """In a private map: forget what this process wrote, and read the first ``nbytes`` as they are now."""
        if not _has_private_pages(self.address + HEADER, self.capacity):
            return
        libc().madvise(self.address + HEADER, self.capacity, _DONTNEED)
        libc().madvise(self.address + HEADER, -(-nbytes // _PAGE) * _PAGE, _POPULATE_READ)  # fails on older kernels

    @property
    def state(self) -> int:
        """FREE, SENT, HELD or RETIRED."""
        return self._state.value

    @state.setter
    def state(self, state: int) -> None:
        self._state.value = state

    @property
    def released(self) -> bool:
        """Whether the worker uses it no more."""
        return self._released.value != 0

    def release(self) -> None:
        """Use it no more. Pages that no batch uses are freed at once, although the other process maps them."""
        self._released.value = 1
        if self.state == FREE and not self.exported and self.fd is not None:
            libc().fallocate(self.fd, _PUNCH_HOLE, ctypes.c_long(HEADER), ctypes.c_long(self.capacity))

    def exporter(self) -> Any:
        """The bytes as an object: arrays and tensors on it keep it alive, and it keeps the slot alive."""
        exporter: Any = self._kind.from_address(self.address)
        exporter.slot = self
        self._exported = weakref.ref(exporter)
        return exporter

    @property
    def exported(self) -> bool:
        """Whether anything on the last exporter is alive."""
        return self._exported is not None and self._exported() is not None

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():  # other threads may still read; the kernel unmaps it
            return
        if getattr(self, "_unmap", None) is not None:
            if self.before_unmap is not None:
                self.before_unmap(self.address)
            # In a collected cycle, __del__ of other objects may run after this one and still write here.
            self._state, self._released = type(self._state)(), type(self._released)()
            self._unmap(self.address, HEADER + self.capacity)
        fd = getattr(self, "fd", None)
        if fd is not None:
            os.close(fd)


def _has_private_pages(address: int, nbytes: int) -> bool:
    """Whether this process has its own copy of a page of a private map; True if that is unknown.

    To map 10 MB again takes 0.7 ms, to look takes 0.07, and most batches are only read.
    """
    global _pagemap
    try:
        if _pagemap[0] != os.getpid():  # of a parent: its memory is another
            _pagemap = os.getpid(), os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        data = os.pread(_pagemap[1], nbytes // _PAGE * 8, address // _PAGE * 8)
    except OSError:
        return True
    flags = np.frombuffer(data, np.uint64) >> _PAGE_FLAGS
    return len(data) < nbytes // _PAGE * 8 or bool((((flags & _PAGE_USED) != 0) & ((flags & _PAGE_OF_FILE) == 0)).any())


def window(exporter: Any, offset: int, nbytes: int) -> NDArray:
    """Some bytes of a slot's data; they keep ``exporter`` alive."""
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


def _allocate(fd: int, size: int, workers: int) -> None:
    """Allocate the pages in steps, with a check before each: over its limit a cgroup kills, it returns no error.

    Workers check without a lock. Each can be wrong by the one step that it is about to take, so a step is a fraction of
    the free memory that shrinks with the number of workers.
    """
    os.ftruncate(fd, size)
    offset = 0
    while offset < size:
        step = size - offset
        bounds = memory_bounds()
        if bounds:
            bound = tightest(bounds)
            if bound.free < step:
                raise NoSlot(bound.what())
            step = min(step, max(_MB, min(STEP, bound.free // (4 * workers))))
        os.posix_fallocate(fd, offset, step)
        offset += step


class SlotPool:
    """The slots of this worker: reuses, makes, replaces them and waits for one, within the memory budget."""

    def __init__(self, budget: int | None, workers: int) -> None:
        self.workers = max(1, workers)
        self.budget = budget
        self.slots: list[Slot] = []
        self.making = 0  # bytes a worker holds beside its slots while it makes a batch, where that was measured
        self.why: str | None = None  # why there was no slot for the last batch
        self._low_memory = False  # only one batch may be on its way
        self._recent: deque[int] = deque(maxlen=_RECENT)

    @property
    def expected(self) -> int:
        """Bytes of the next batch, judged by the last ones; 0 if unknown."""
        return max(self._recent, default=0)

    def record(self, nbytes: int) -> None:
        """Remember the size of a batch."""
        if nbytes:
            self._recent.append(nbytes)

    def take(self, nbytes: int, *, outgrown: bool = False) -> Slot | None:
        """A slot to write ``nbytes`` into; None if torch must send the batch."""
        self._check_budget(nbytes)
        size = nbytes
        if outgrown:  # batches vary: with a margin, the next one that is a little larger fits too
            size += nbytes // 4 if self.budget is None else min(nbytes // 4, self._share - nbytes)
        pause, check_at, began = 0.0, 0.0, time.monotonic()
        while True:
            slot = self._reuse(nbytes)
            if slot is None and time.monotonic() >= check_at:  # the checks below take time
                check_at = time.monotonic() + _CHECK_S
                slot = self._make(size)
                if slot is None and must_end():
                    raise LoaderClosed(
                        say("the loader was closed while a worker waited for memory"),
                        why=say("no process will take its batches"),
                    )
            if slot is not None:
                return slot
            wait = _LOW_MEMORY_WAIT_S if self._low_memory and self.slots else _SLOT_WAIT_S
            if not self._in_flight() and time.monotonic() > began + wait:
                return self._reuse(nbytes) or self._make(size, always=True)
            time.sleep(pause)
            pause = min(pause + 0.0001, 0.002)

    def allows(self, nbytes: int) -> bool:
        """Whether a batch of this size is within the budget."""
        return self.budget is None or nbytes <= self._share

    def reset(self) -> None:
        """Mark all slots free: what was in them is not sent."""
        for slot in self.slots:
            slot.state = FREE

    def drop(self, slot: Slot) -> None:
        """Use this slot no more; it is unmapped once nothing uses it."""
        slot.release()
        self.slots.remove(slot)

    def close(self) -> None:
        """Free the pages that no batch uses when this process ends, although the other process may map them."""
        for slot in list(self.slots):
            self.drop(slot)

    def check_memory(self, nbytes: int) -> None:
        """Raise if memory does not hold a batch of this size from each worker."""
        now = free_memory_now()
        if now is not None and not fits(self.workers * nbytes, now.free):
            raise does_not_fit(Each(0, self.making, nbytes), self.workers, now.free, now.source, None)

    def _in_flight(self) -> bool:
        return any(slot.state == SENT for slot in self.slots)

    def _reuse(self, nbytes: int) -> Slot | None:
        enough = self._low_memory and self._in_flight()
        for slot in list(self.slots):
            state = slot.state
            # A collate function that keeps its result must not find the next batch in it.
            if state == RETIRED or (state == FREE and (enough or slot.exported or not _suits(slot, nbytes))):
                self.drop(slot)
            elif state == FREE:
                return slot
        return None

    def _make(self, nbytes: int, *, always: bool = False) -> Slot | None:
        capacity = -(-nbytes // _PAGE) * _PAGE
        if not (always or self._may_add(capacity)):
            return None
        try:
            slot = Slot.make(capacity, self.workers)
        except NoSlot as problem:
            self.why = str(problem)
            return None
        self.slots.append(slot)
        return slot

    def _may_add(self, capacity: int) -> bool:
        mine = sum(slot.capacity for slot in self.slots if slot.state != HELD)
        if self.budget is not None:
            return mine == 0 or mine + capacity <= self._share
        if not self.slots:
            return True  # Slot.make checks the memory
        bounds = memory_bounds()
        if not bounds:
            return True
        free, samples = tightest(bounds).free, max(capacity, self.making)
        # A second batch is optional: it must leave memory for each worker's first, and for the samples of its next.
        self._low_memory = free < capacity * (self.workers + 1) + samples * self.workers
        # If the consumer holds the first slot, the samples of this batch are loaded; those of others may not be.
        return not self._low_memory or (mine == 0 and free >= capacity + samples * (self.workers - 1))

    @property
    def _share(self) -> int:
        return (self.budget or 0) // self.workers

    def _check_budget(self, nbytes: int) -> None:
        if self.budget is None or self.allows(nbytes):
            return
        least = -(-nbytes // _PAGE) * _PAGE * self.workers
        raise BudgetTooSmall(
            say("memory_budget={budget} does not hold one batch per worker", budget=format_size(self.budget)),
            why=say(
                "{workers} × {batch} per batch = {least}",
                batch=format_size(-(-nbytes // _PAGE) * _PAGE), least=format_size(least),
                workers=counted(self.workers, phrase("{count} worker"), phrase("{count} workers")),
            ),
            fix=(
                say("set memory_budget={least!r} or more", least=exact_size(least)),
                say("use fewer workers or a smaller batch"),
            ),
        )  # fmt: skip


def _suits(slot: Slot, nbytes: int) -> bool:
    """Large enough, but not so large that the slot of one outlier is kept forever."""
    return nbytes <= slot.capacity <= 2 * nbytes + _MB + HEADER
