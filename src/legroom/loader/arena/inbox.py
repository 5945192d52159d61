"""Batches as they arrive in the process that trains, and when their slots go back.

Covers: finding a slot, tensors on it, ordinary copies instead, giving it back, forgetting workers that are gone.
Does not cover: how a batch was written (arena/pack.py), pinned memory (arena/pin.py).

A batch's tensors and arrays all lie on one exporter object; it carries a Lease, and the slot goes back when the Lease
dies: with the last tensor, view, slice or ``.numpy()`` of the batch. So a slot is never overwritten, and never
unmapped, under anything that can still be read. Two slots a worker may be held like that; a batch beyond them is
copied into ordinary memory and its slot goes back at once.

Forks: a child has the parent's tensors on the parent's slots. It gives none of them back, and slots that are held
while a child is made are not written again, so what the child sees stays as it was. Exit: nothing is given back.

Slots are kept mapped for as long as their worker uses them: mapping and faulting in 24 MB for every batch would cost
more than the copy it saves.
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
from legroom.loader.arena.descriptors import Descriptors
from legroom.loader.arena.pack import ALIGN, NDArray, Span
from legroom.loader.arena.slot import FREE, HELD, RETIRED, Slot, window
from legroom.words import say

if TYPE_CHECKING:
    import torch

MAY_HOLD = 2  # slots a worker
_GPU_S = 1.0  # for a GPU to finish with the last batches of a loader that is gone
_slots: dict[int, Arrival] = {}  # by the slot's number
_thread = threading.local()
_owners: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators of torch's that have slots here
_NOTHING: NDArray = np.empty(0, np.uint8)


class Pinner(Protocol):
    """Host memory that a GPU reads by itself; see arena/pin.py."""

    def register(self, slot: Slot) -> bool:
        """Pin a slot's pages for as long as it is mapped; whether that worked."""
        ...

    def mark(self) -> object | None:
        """Something that knows when all the GPU has been asked to do until now is done; None: nothing to wait for."""
        ...

    def done(self, mark: object) -> bool:
        """Whether it is."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of torch's own."""
        ...


class Arrival:
    """A slot as this process has it."""

    __slots__ = ("pinned", "pinner", "retire", "slot", "worker")

    def __init__(self, slot: Slot, worker: Worker) -> None:
        self.slot, self.worker = slot, worker
        self.retire = False  # a forked child may be looking at it
        self.pinner: Pinner | None = None
        self.pinned = False

    def give_back(self) -> None:
        """The worker may write again."""
        self.slot.state = RETIRED if self.retire else FREE
        self.worker.held.discard(self.slot.id)
        if self.retire:
            _slots.pop(self.slot.id, None)


class Worker:
    """What this process has of one worker."""

    __slots__ = ("ended", "held", "pending", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = False  # its loader is gone
        self.held: set[int] = (
            set()
        )  # numbers of slots: sets change in one step, whatever thread a finalizer runs in
        self.pending: list[
            tuple[object, Arrival]
        ] = []  # nothing lies on them, but a GPU may still be reading

    def settle(self) -> None:
        """Give back what no GPU reads any more."""
        waiting, self.pending = self.pending, []
        for mark, arrival in waiting:
            if arrival.pinner is None or arrival.pinner.done(mark):
                arrival.give_back()
            else:
                self.pending.append((mark, arrival))

    @property
    def gone(self) -> bool:
        if self.ended:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it is there, and another user's: this program may have changed its own
            return False
        return False


_workers: dict[int, Worker] = {}


class Lease:
    """The right to look at a slot; it ends when this dies."""

    __slots__ = ("arrival", "pid")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival, self.pid = arrival, os.getpid()
        arrival.worker.held.add(arrival.slot.id)
        arrival.slot.state = HELD

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit() or os.getpid() != self.pid:
            return
        arrival = self.arrival
        mark = arrival.pinner.mark() if arrival.pinner is not None and arrival.pinned else None
        if mark is None:
            arrival.give_back()
        else:
            arrival.worker.pending.append((mark, arrival))
        if arrival.worker.gone:
            sweep()


class Parcel:
    """A batch that has arrived and has not been opened; one that is dropped unopened gives its slot back."""

    __slots__ = ("_arrival", "_fetched", "_pid", "_skeleton", "_spans", "note", "state")

    def __init__(
        self, arrival: Arrival | None, spans: list[Span], skeleton: bytes, note: str | None, state: Any
    ) -> None:
        self._arrival, self._spans, self._skeleton = arrival, spans, skeleton
        self._pid = os.getpid()
        self._fetched: list[Any] = []
        self.note = note  # why it did not come in a slot
        self.state = state  # (worker, its dataset's state after this batch, samples in it), where it has one

    def fetch(self) -> None:
        """Open it now, for later."""
        self._fetched.append(self.open())

    def open(self, pinner: Pinner | None = None) -> Any:
        """The batch, on its slot or copied out of it."""
        if self._fetched:
            return self._fetched.pop()
        arrival = self._arrival
        if arrival is None:
            return pickle.loads(self._skeleton)
        worker = arrival.worker
        worker.settle()
        if pinner is not None and arrival.pinner is None:
            arrival.pinner, arrival.pinned = pinner, pinner.register(arrival.slot)
        exporter = arrival.slot.exporter()
        # Until one of these two is done the parcel has the slot, and gives it back if we are interrupted.
        if pinner is None:
            as_it_lies = len(worker.held) < MAY_HOLD
        else:  # a slot also counts while the GPU reads it
            as_it_lies = arrival.pinned and len(worker.held) < 2 * MAY_HOLD
        if as_it_lies:
            buffers = [window(exporter, *span) for span in self._spans]
            exporter.lease = Lease(arrival)
        else:
            buffers = _copied(exporter, self._spans, pinner)
            arrival.give_back()
        self._arrival = None
        return pickle.loads(self._skeleton, buffers=buffers)

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():
            return
        arrival = getattr(self, "_arrival", None)
        if arrival is not None and os.getpid() == self._pid:
            arrival.give_back()


def _copied(exporter: Any, spans: list[Span], pinner: Pinner | None) -> list[NDArray]:
    """The bytes in ordinary memory, in a piece for each span; spans that overlap share one."""
    found: list[NDArray] = [_NOTHING] * len(spans)
    start, end, members = 0, -1, list[int]()

    def copy() -> None:
        target = _ordinary(end - start, pinner)
        target.copy_(_as_bytes(window(exporter, start, end - start)))  # without the interpreter's lock
        there = target.numpy()
        for number in members:
            offset, nbytes = spans[number]
            found[number] = there[offset - start : offset - start + nbytes]

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


def _ordinary(nbytes: int, pinner: Pinner | None) -> torch.Tensor:
    import torch

    if pinner is not None:
        return pinner.empty(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _as_bytes(source: NDArray) -> torch.Tensor:
    import torch

    return torch.from_numpy(source)


class unopened:  # noqa: N801 - reads as a word: ``with unopened():``
    """Within it, batches that this thread takes from a queue arrive as Parcels."""

    def __enter__(self) -> None:
        _thread.unopened = True

    def __exit__(self, *_: object) -> None:
        _thread.unopened = False


def look_among(descriptors: Descriptors | None) -> Descriptors | None:
    """Look for slots that this thread does not know yet among these; returns those looked among before.

    Not a context manager: one made of a generator costs 2 µs for every batch.
    """
    before: Descriptors | None = getattr(_thread, "descriptors", None)
    _thread.descriptors = descriptors
    return before


def receive(
    pid: int,
    fd: int,
    number: int,
    spans: list[Span],
    skeleton: bytes,
    by_torch: bool,
    note: str | None,
    state: Any,
) -> Any:
    """What the queue calls for a batch: the batch, or a Parcel for those who open it themselves."""
    parcel = Parcel(_arrival(pid, fd, number) if spans else None, spans, skeleton, note, state)
    if not getattr(_thread, "unopened", False):
        return parcel.open()
    if (
        by_torch
    ):  # what torch carries beside the slot waits for us in the worker: it must be fetched, wanted or not
        parcel.fetch()
    return parcel


def _arrival(pid: int, fd: int, number: int) -> Arrival:
    arrival = _slots.get(number)
    if arrival is None:
        sweep()
        try:
            slot = _slot(pid, fd, number)
        except OSError as problem:
            raise BatchLost(
                say("a batch of worker {pid} cannot be reached", pid=pid),
                why=say("/proc/{pid}/fd/{fd}: {problem}", pid=pid, fd=fd, problem=problem),
                fix=(
                    say("if the worker was killed, see what it died of"),
                    say("LEGROOM_DISABLE=1 uses torch's own transport"),
                ),
            ) from problem
        worker = _workers.setdefault(pid, Worker(pid))
        for other in [one for one in list(_slots.values()) if one.worker is worker and one.slot.given_up]:
            _slots.pop(other.slot.id, None)
        arrival = _slots[number] = Arrival(slot, worker)
    return arrival


def _slot(pid: int, fd: int, number: int) -> Slot:
    descriptors: Descriptors | None = getattr(_thread, "descriptors", None)
    came = None if descriptors is None else descriptors.take(number)
    return Slot.find(pid, fd, number) if came is None else Slot.at(came, number)


def sweep() -> None:
    """Forget the slots of workers that are gone; they are unmapped when nothing lies on them."""
    for worker in [worker for worker in list(_workers.values()) if worker.gone]:
        worker.settle()
        if worker.pending:  # a GPU may still be reading
            continue
        _workers.pop(worker.pid, None)
        for arrival in [one for one in list(_slots.values()) if one.worker is worker]:
            _slots.pop(arrival.slot.id, None)


def lives_with(iterator: Any, pids: Collection[int]) -> None:
    """Forget the slots of these workers when torch's iterator, which owns them, is gone."""
    if iterator not in _owners:  # one that lasts begins many passes
        _owners.add(iterator)
        weakref.finalize(iterator, _forget, frozenset(pids), os.getpid()).atexit = False


def _forget(pids: Collection[int], owner: int) -> None:
    if os.getpid() != owner:
        return
    workers = [worker for pid, worker in list(_workers.items()) if pid in pids]
    for worker in workers:
        worker.ended = True
    until = time.monotonic() + _GPU_S
    while any(worker.pending for worker in workers) and time.monotonic() < until:
        time.sleep(0.001)
        for worker in workers:
            worker.settle()
    sweep()


def mapped() -> int:
    """How many slots this process has mapped."""
    return len(_slots)


def _before_children_look() -> None:
    for arrival in list(_slots.values()):
        if arrival.slot.id in arrival.worker.held:
            arrival.retire = True


def _in_a_child() -> None:
    _slots.clear()
    _workers.clear()
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_children_look, after_in_child=_in_a_child)
