"""In a trainer: maps the slots of a group privately, and opens batches on them.

What a trainer writes into a batch is copied page by page for it alone. The pages it wrote are discarded before the slot
is read again. The producer is told when the last tensor, view or slice of a batch is gone; only then may the slot be
written. Two slots may be held like that; a further batch is copied out, and its slot is free at once.

pin_memory copies a batch into pinned memory of torch: private maps are never registered with CUDA.
"""

from __future__ import annotations

import os
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from legroom.loader.dataloader.memory_slots import HEADER, Slot, window
from legroom.loader.dataloader.receive import MAX_HELD, copied
from legroom.loader.dataloader.send import Span
from legroom.loader.dataloader.sharing.producer_messages import Closed, Connection

_all: weakref.WeakSet[PrivateSlots] = weakref.WeakSet()
LeaseId = tuple[int, int]  # the batch's number, and which of the trainer's grants it was


class Opened(NamedTuple):
    """A batch, the state of its dataset after it, and where its bytes lie; none if it was copied out."""

    batch: Any
    state: Any
    address: int
    nbytes: int


class PrivateSlots:
    """The slots that this trainer has from one producer."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._slots: dict[int, Slot] = {}
        self._used: weakref.WeakSet[Slot] = weakref.WeakSet()  # that were opened before
        self._leases: weakref.WeakSet[_Lease] = weakref.WeakSet()
        self._lent: set[LeaseId] = set()  # those of _leases, and of what ended while its release was interrupted
        self._unsent: list[tuple[str, Any]] = []
        _all.add(self)

    def add(self, slot_id: int, fd: int) -> None:
        """Map a slot; the descriptor is closed."""
        self._slots[slot_id] = Slot.at(fd, slot_id, private=True)

    def forget(self, slots: list[int]) -> None:
        """No batch will come in these slots; each map lives while a batch uses it, or a message that was received."""
        for slot_id in slots:
            self._slots.pop(slot_id, None)

    def find(self, slot_id: int) -> Slot:
        """The slot of a message, looked up when it is received: a later message may say to forget it."""
        return self._slots[slot_id]

    def open(self, lease: LeaseId, slot: Slot | None, body: bytes, *, copy: bool = False) -> Opened:
        """The batch, on its slot or copied out of it."""
        spans, skeleton, state = pickle.loads(body)
        if slot is None:
            batch = pickle.loads(skeleton)
            self.give_back(lease)
            return Opened(batch, state, 0, 0)
        if slot in self._used:
            slot.discard_private_pages(_end(spans))
        self._used.add(slot)
        exporter = slot.exporter()
        address, nbytes = slot.address + HEADER, _end(spans)
        if copy or len(self._leases) >= MAX_HELD:
            buffers, nbytes = copied(exporter, spans, None), 0
            self.give_back(lease)
        else:
            buffers = [window(exporter, *span) for span in spans]
            exporter.lease = _Lease(self, lease)
            self._leases.add(exporter.lease)
            self._lent.add(lease)
        return Opened(pickle.loads(skeleton, buffers=buffers), state, address, nbytes)

    def give_back(self, lease: LeaseId) -> None:
        """Tell the producer that nothing uses the batch any more. Calling it again has no effect."""
        self.tell("release", lease)
        self._lent.discard(lease)

    def reclaim(self) -> None:
        """Give back what nothing uses, where an interruption came in the way."""
        for lease in self._lent.difference([one.id for one in self._leases]):
            self.give_back(lease)

    def tell(self, kind: str, about: Any) -> None:
        """Send a message about a batch, now or with the next one."""
        self._unsent.append((kind, about))
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before."""
        try:
            while self._unsent:
                message = self._unsent[0]
                if not self.connection.send(*message):
                    return
                self._unsent.remove(message)  # not before it is sent; sent twice, it has no effect
        except (IndexError, ValueError):
            pass  # another thread has sent it
        except Closed:
            self._unsent.clear()

    def retire_held(self) -> None:
        """A child is about to be forked, and keeps what is held now: these slots are not written again."""
        for lease in list(self._leases):
            self.tell("keep", lease.id)


class _Lease:
    """The right to read a batch; it ends when this object is deleted.

    It keeps the connection open, also when the loader is gone: without it the producer would write the slot again.
    """

    __slots__ = ("__weakref__", "id", "pid", "slots")

    def __init__(self, slots: PrivateSlots, lease: LeaseId) -> None:
        self.slots, self.id, self.pid = slots, lease, os.getpid()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit() and os.getpid() == self.pid:
            self.slots.give_back(self.id)


def _end(spans: list[Span]) -> int:
    return max((offset + nbytes for offset, nbytes in spans), default=0)


def _retire_all_held() -> None:
    for slots in list(_all):
        slots.retire_held()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_retire_all_held)
