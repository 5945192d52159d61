"""Receives batches in the training process, and returns their slots to the workers.

The tensors and arrays of a batch all use one exporter object. It carries a Lease, and the slot goes back to the worker
when the Lease is deleted: with the last tensor, view, slice or ``.numpy()`` of the batch. So a slot is never
overwritten or unmapped while anything can still read it. Two slots per worker may be held like that; a further batch is
copied into private memory, and its slot goes back at once.

Forks: a child process has the parent's tensors on the parent's slots. It returns none of them, and slots that are held
at the moment of a fork are not written again, so the child's data stay as they were. At exit nothing is returned.

Slots stay mapped for as long as their worker uses them: to map and fault in 24 MB for every batch would cost more than
the copy that it saves.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from legroom.errors import BatchLost
from legroom.loader.dataloader.admit_workers_by_memory import current_admission
from legroom.loader.dataloader.memory_slots import FREE, HELD, RETIRED, NDArray, Slot, window
from legroom.loader.dataloader.send import ALIGN, Span
from legroom.loader.dataloader.worker_shutdown import exists
from legroom.messages import say
from legroom.system.processes_and_threads import malloc_trim

if TYPE_CHECKING:
    import torch

    from legroom.loader.dataloader.queues import Descriptors

MAX_HELD = 2  # slots per worker
_GPU_S = 1.0  # for a GPU to finish with the last batches of a loader that has ended
_slots: dict[int, ReceivedSlot] = {}  # by the slot's id
_workers: dict[int, WorkerSlots] = {}  # by pid
_thread = threading.local()
_owners: weakref.WeakSet[Any] = weakref.WeakSet()  # torch's iterators whose workers have slots here
_EMPTY: NDArray = np.empty(0, np.uint8)
hand_on = False  # this process hands batches on to others: it keeps the descriptors of their slots


class SentBatch:
    """A batch in the worker's queue: pickled, it is a few numbers and the batch without its bytes.

    To pickle it twice has no effect.
    """

    __slots__ = ("_arguments",)

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments  # of receive()

    def send_descriptor(self, descriptors: Descriptors) -> None:
        """Send the descriptor of its slot first, so that it is there when this message arrives."""
        fd, slot_id = self._arguments[1:3]
        if fd >= 0:
            descriptors.send(slot_id, fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # Right before it is written, when the samples are freed and the next ones are not loaded yet.
        if current_admission() is not None:
            malloc_trim()
        return receive, self._arguments


def receive(
    pid: int, fd: int, slot_id: int, spans: list[Span], skeleton: bytes, by_torch: bool, note: str | None, state: Any
) -> Any:
    """Called by the queue's unpickler: the batch, or a ReceivedBatch within ``unopened``."""
    received = ReceivedBatch(_received_slot(pid, fd, slot_id) if spans else None, spans, skeleton, note, state)
    if not getattr(_thread, "unopened", False):
        return received.open()
    if by_torch:  # the worker waits until what torch sends beside the slot is fetched, even if it is not used
        received.fetch()
    return received


class unopened:  # noqa: N801 - ``with unopened():``
    """Within it, this thread gets batches from a queue as ReceivedBatch."""

    def __enter__(self) -> None:
        _thread.unopened = True

    def __exit__(self, *_: object) -> None:
        _thread.unopened = False


def use_descriptors(descriptors: Descriptors | None) -> Descriptors | None:
    """Set where this thread finds the descriptors of new slots; returns the previous value.

    Not a context manager: one made of a generator costs 2 µs for every batch.
    """
    before: Descriptors | None = getattr(_thread, "descriptors", None)
    _thread.descriptors = descriptors
    return before


class ReceivedBatch:
    """A batch that has arrived and was not opened; if it is dropped unopened, it returns its slot."""

    __slots__ = ("_fetched", "_pid", "_skeleton", "_slot", "_spans", "note", "state")

    def __init__(
        self, slot: ReceivedSlot | None, spans: list[Span], skeleton: bytes, note: str | None, state: Any
    ) -> None:
        self._slot, self._spans, self._skeleton = slot, spans, skeleton
        self._pid = os.getpid()
        self._fetched: list[Any] = []
        self.note = note  # why it was not sent in a slot
        self.state = state  # (worker, state of its dataset after this batch, samples in it), if it has one

    def fetch(self) -> None:
        """Open it now, for later."""
        self._fetched.append(self.open())

    def parts(self) -> tuple[ReceivedSlot | None, list[Span], bytes] | None:
        """To hand it on unopened: its slot, the spans in it and the pickle; None if only this process can open it.

        This object keeps the slot until it is deleted.
        """
        if self._fetched:
            return None
        if self._slot is not None:
            self._slot.slot.state = HELD  # no longer on its way: the worker may make the next
        return self._slot, self._spans, self._skeleton

    def open(self, pinner: Pinner | None = None) -> Any:
        """The batch, on its slot or copied out of it."""
        if self._fetched:
            return self._fetched.pop()
        slot = self._slot
        if slot is None:
            return pickle.loads(self._skeleton)
        worker = slot.worker
        worker.return_read_slots()
        if pinner is not None and slot.pinner is None:
            slot.pinner, slot.pinned = pinner, pinner.register(slot.slot)
        exporter = slot.slot.exporter()
        if pinner is None:
            in_place = len(worker.held) < MAX_HELD
        else:  # a slot also counts while the GPU reads it
            in_place = slot.pinned and len(worker.held) < 2 * MAX_HELD
        # Until one of these is complete, this object owns the slot, and returns it if it is interrupted.
        if in_place:
            buffers = [window(exporter, *span) for span in self._spans]
            exporter.lease = Lease(slot)
        else:
            buffers = copied(exporter, self._spans, pinner)
            slot.give_back()
        self._slot = None
        return pickle.loads(self._skeleton, buffers=buffers)

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():
            return
        slot = getattr(self, "_slot", None)
        if slot is not None and os.getpid() == self._pid:
            slot.give_back()


class ReceivedSlot:
    """A slot that this process has mapped."""

    __slots__ = ("pinned", "pinner", "retire", "slot", "worker")

    def __init__(self, slot: Slot, worker: WorkerSlots) -> None:
        self.slot, self.worker = slot, worker
        self.retire = False  # a forked child may still read it
        self.pinner: Pinner | None = None
        self.pinned = False

    def give_back(self) -> None:
        """Let the worker write again."""
        self.slot.state = RETIRED if self.retire else FREE
        self.worker.held.discard(self.slot.id)
        if self.retire:
            _slots.pop(self.slot.id, None)


class Lease:
    """The right to read a slot; it ends when this object is deleted."""

    __slots__ = ("pid", "slot")

    def __init__(self, slot: ReceivedSlot) -> None:
        self.slot, self.pid = slot, os.getpid()
        slot.worker.held.add(slot.slot.id)
        slot.slot.state = HELD

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit() or os.getpid() != self.pid:
            return
        slot = self.slot
        mark = slot.pinner.mark() if slot.pinner is not None and slot.pinned else None
        if mark is None:
            slot.give_back()
        else:
            slot.worker.pending.append((mark, slot))
        if slot.worker.ended:
            forget_ended_workers()


class WorkerSlots:
    """The slots of one worker that this process has."""

    __slots__ = ("held", "loader_ended", "pending", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.loader_ended = False
        # Ids: sets change in one step, in whichever thread a finalizer runs.
        self.held: set[int] = set()
        # Slots that no tensor uses, but a GPU may still read.
        self.pending: list[tuple[object, ReceivedSlot]] = []

    def return_read_slots(self) -> None:
        """Return the slots that no GPU reads any more."""
        waiting, self.pending = self.pending, []
        for mark, slot in waiting:
            if slot.pinner is None or slot.pinner.done(mark):
                slot.give_back()
            else:
                self.pending.append((mark, slot))

    @property
    def ended(self) -> bool:
        """Whether the worker, or its loader, has ended."""
        return self.loader_ended or not exists(self.pid)


class Pinner(Protocol):
    """Host memory that a GPU reads directly; see pin_memory.py."""

    def register(self, slot: Slot) -> bool:
        """Pin the pages of a slot for as long as it is mapped; whether that worked."""
        ...

    def mark(self) -> object | None:
        """An object that covers all work that the GPU was given until now; None: nothing to wait for."""
        ...

    def done(self, mark: object) -> bool:
        """Whether that work is done."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of torch."""
        ...


def copied(exporter: Any, spans: list[Span], pinner: Pinner | None) -> list[NDArray]:
    """The bytes in private memory, one array for each span; spans that overlap share one."""
    found: list[NDArray] = [_EMPTY] * len(spans)
    start, end, members = 0, -1, list[int]()

    def copy() -> None:
        import torch

        nbytes = end - start
        target = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if pinner is None else pinner.empty(nbytes)
        target.copy_(torch.from_numpy(window(exporter, start, nbytes)))  # without the GIL
        array = target.numpy()
        for number in members:
            offset, size = spans[number]
            found[number] = array[offset - start : offset - start + size]

    for number in sorted(range(len(spans)), key=lambda at: spans[at]):
        offset, nbytes = spans[number]
        if offset >= end:
            if members:
                copy()
            start, end, members = offset - offset % ALIGN, offset, []
        end = max(end, offset + nbytes)
        members.append(number)
    if members:
        copy()
    return found


def _received_slot(pid: int, fd: int, slot_id: int) -> ReceivedSlot:
    received = _slots.get(slot_id)
    if received is None:
        forget_ended_workers()
        descriptors: Descriptors | None = getattr(_thread, "descriptors", None)
        own_fd = None if descriptors is None else descriptors.take(slot_id)
        try:
            slot = (
                Slot.find(pid, fd, slot_id, keep=hand_on) if own_fd is None else Slot.at(own_fd, slot_id, keep=hand_on)
            )
        except OSError as problem:
            raise BatchLost(
                say("cannot open a batch of worker {pid}", pid=pid),
                why=say("/proc/{pid}/fd/{fd}: {problem}", pid=pid, fd=fd, problem=problem),
                fix=(
                    say("if the worker was killed, find out why"),
                    say("set LEGROOM_DISABLE=1 to use torch's transport"),
                ),
            ) from problem
        worker = _workers.setdefault(pid, WorkerSlots(pid))
        for other in [one for one in list(_slots.values()) if one.worker is worker and one.slot.released]:
            _slots.pop(other.slot.id, None)
        received = _slots[slot_id] = ReceivedSlot(slot, worker)
    return received


def forget_ended_workers() -> None:
    """Drop the slots of workers that have ended; they are unmapped when nothing uses them."""
    for worker in [worker for worker in list(_workers.values()) if worker.ended]:
        worker.return_read_slots()
        if worker.pending:  # a GPU may still read
            continue
        _workers.pop(worker.pid, None)
        for slot in [one for one in list(_slots.values()) if one.worker is worker]:
            _slots.pop(slot.slot.id, None)


def forget_with(iterator: Any, pids: Collection[int]) -> None:
    """Drop the slots of these workers when torch's iterator, which owns the workers, is deleted."""
    if iterator not in _owners:  # one with persistent workers begins many epochs
        _owners.add(iterator)
        weakref.finalize(iterator, _forget, frozenset(pids), os.getpid()).atexit = False


def _forget(pids: Collection[int], owner: int) -> None:
    if os.getpid() != owner:
        return
    workers = [worker for pid, worker in list(_workers.items()) if pid in pids]
    for worker in workers:
        worker.loader_ended = True
    until = time.monotonic() + _GPU_S
    while any(worker.pending for worker in workers) and time.monotonic() < until:
        time.sleep(0.001)
        for worker in workers:
            worker.return_read_slots()
    forget_ended_workers()


def _retire_held_slots() -> None:
    for slot in list(_slots.values()):
        if slot.slot.id in slot.worker.held:
            slot.retire = True


def _forget_all() -> None:
    _slots.clear()
    _workers.clear()
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_retire_held_slots, after_in_child=_forget_all)
