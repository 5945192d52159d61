"""Which trainer copies a batch to a GPU, and which read that copy: decisions alone, without I/O.

A ring is GPU memory that all trainers of a group on one GPU map. The producer has one for each GPU with two or more
trainers. A trainer that has taken a batch claims it before it goes to the GPU:

    COPY   it is the first: it copies the batch from the host into a slot of the ring, and reports that
    READY  the batch is in a slot: the trainer copies it from there, within the GPU
    BUSY   another trainer is copying it now; READY follows
    OWN    there is no slot for it: the trainer copies the batch from the host for itself

A slot is written again when no trainer reads it and none of those that were there still needs it. A trainer needs a
batch until it claims a later one, leaves its epoch or falls out of the window.

The memory lives while a trainer has it mapped. One trainer creates it, with its first copy. All others map what exists
or do without, so memory with nothing in it is never taken for a ring. When the last one that has mapped it is gone,
what was in it is gone too, and a new ring takes its place.

A trainer that is killed while it copies may have given the GPU work that is still queued. Its slot is never used again,
and the next one that claims the batch copies it. When every slot is lost like that, a new ring takes its place.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

_MOST_BYTES, _MOST_SLOTS, _LEAST_SLOTS = 512 << 20, 8, 2
_PAGE = 4096


class Claim(Enum):
    """What a trainer does with a batch."""

    COPY = "copy"
    READY = "ready"
    BUSY = "busy"
    OWN = "own"


class RingMemory(NamedTuple):
    """What a trainer needs to map a ring."""

    name: str  # of the shared copy
    nbytes: int  # of one slot
    slots: int


@dataclass(slots=True, eq=False)
class _Slot:
    index: int
    serial: int | None = None  # the batch that is in it, or is being copied
    writer: int | None = None  # the trainer that copies it
    lost: bool = False  # its writer was killed
    readers: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)  # trainers that were told BUSY
    needed: set[int] = field(default_factory=set)  # trainers that have not claimed it yet

    def empty(self) -> None:
        self.serial = self.writer = None
        self.readers, self.waiting, self.needed = set(), set(), set()


class Ring:
    """The slots in the memory of one GPU, and its trainers."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.members: set[int] = set()
        self.memory: RingMemory | None = None
        self.nbytes = 0  # of the largest batch
        self.copied = self.read = 0  # batches, so far
        self.creator: int | None = None  # the trainer that was told to create the memory
        self._mapped: set[int] = set()  # trainers that have it
        self._slots: list[_Slot] = []

    def join(self, number: int) -> None:
        """A trainer uses this GPU."""
        self.members.add(number)

    def leave(self, number: int) -> list[tuple[int, int]]:
        """A trainer is gone; (trainer, batch) of those that waited for a copy that it made."""
        self.members.discard(number)
        again = []
        for slot in self._slots:
            slot.readers.discard(number)
            slot.waiting.discard(number)
            slot.needed.discard(number)
            if slot.writer == number and slot.serial is not None:
                again += [(one, slot.serial) for one in sorted(slot.waiting)]
                slot.empty()
                slot.lost = True
        self._mapped.discard(number)
        if number == self.creator or (self.creator is None and not self._mapped):
            again += [
                (one, slot.serial) for slot in self._slots for one in sorted(slot.waiting) if slot.serial is not None
            ]
            self._forget()
        return again

    def mapped(self, number: int, serial: int) -> None:
        """A trainer has mapped the memory in which this batch is."""
        if number in self.members and any(slot.serial == serial for slot in self._slots):
            self._mapped.add(number)

    def _forget(self) -> None:
        self.memory, self.creator, self._mapped, self._slots = None, None, set(), []

    def claim(self, number: int, serial: int, nbytes: int, inside: Callable[[int], bool]) -> tuple[Claim, int]:
        """What a trainer does with a batch of so many bytes, and the slot; ``inside``: who is in the window."""
        if number not in self.members:
            return Claim.OWN, -1
        self._passed(number, serial)
        found = next((slot for slot in self._slots if slot.serial == serial), None)
        if found is not None:
            found.needed.discard(number)
            if found.writer is not None:
                found.waiting.add(number)
                return Claim.BUSY, found.index
            found.readers.add(number)
            self.read += 1
            return Claim.READY, found.index
        if len(self.members) < 2:  # no other trainer would read it
            return Claim.OWN, -1
        if self.creator is not None:  # until it has mapped the memory, there is none
            return Claim.OWN, -1
        self.nbytes = max(self.nbytes, nbytes)
        self._make_room(nbytes)
        slot = self._free(inside)
        if slot is None:
            return Claim.OWN, -1
        if not self._mapped:
            self.creator = number
        slot.empty()
        slot.serial, slot.writer, slot.needed = serial, number, self.members - {number}
        return Claim.COPY, slot.index

    def done(self, number: int, serial: int) -> list[int]:
        """A trainer has copied a batch and reads it now; the trainers that waited read it too."""
        slot = self._written_by(number, serial)
        if slot is None:
            return []
        waited = sorted(slot.waiting)
        slot.writer, slot.readers, slot.waiting = None, {number, *waited}, set()
        self._mapped.add(number)
        self.creator = None if self.creator == number else self.creator
        self.copied += 1
        self.read += 1 + len(waited)
        return waited

    def ready(self, serial: int) -> tuple[str, int, RingMemory | None]:
        """What a trainer that waited for a batch is told."""
        slot = next(slot for slot in self._slots if slot.serial == serial)
        return Claim.READY.value, slot.index, self.memory

    def give_up(self, number: int, serial: int) -> list[tuple[int, int]]:
        """A trainer was told to copy a batch, and has not begun; (trainer, batch) of those that waited for it."""
        slot = self._written_by(number, serial)
        if slot is None:
            return []
        waiting = [(one, serial) for one in sorted(slot.waiting)]
        slot.empty()
        if self.creator == number:
            self._forget()
        return waiting

    def failed(self, number: int, serial: int) -> list[tuple[int, int]]:
        """A trainer cannot use the ring; the others do without it. See ``leave``."""
        self.release(number, serial)
        return self.leave(number)

    def release(self, number: int, serial: int) -> None:
        """A trainer has read a batch."""
        for slot in self._slots:
            if slot.serial == serial:
                slot.readers.discard(number)
                slot.waiting.discard(number)

    def skip(self, number: int) -> None:
        """A trainer has left its epoch: it needs nothing that is in the ring now."""
        for slot in self._slots:
            slot.needed.discard(number)

    def _passed(self, number: int, serial: int) -> None:
        for slot in self._slots:
            if slot.serial is not None and slot.serial < serial:
                slot.needed.discard(number)

    def _written_by(self, number: int, serial: int) -> _Slot | None:
        return next((one for one in self._slots if one.serial == serial and one.writer == number), None)

    def _free(self, inside: Callable[[int], bool]) -> _Slot | None:
        usable = [slot for slot in self._slots if not slot.lost and slot.writer is None and not slot.readers]
        unneeded = [slot for slot in usable if not any(inside(one) for one in slot.needed)]
        return min(unneeded, key=lambda slot: -1 if slot.serial is None else slot.serial, default=None)

    def _make_room(self, nbytes: int) -> None:
        """A ring with slots that are large enough. Trainers unmap the one before when they see the new one."""
        if self.memory is not None and nbytes <= self.memory.nbytes and not all(slot.lost for slot in self._slots):
            return
        size = -(-(nbytes + nbytes // 8) // _PAGE) * _PAGE  # with a margin, for the next one that is a little larger
        count = max(_LEAST_SLOTS, min(_MOST_SLOTS, _MOST_BYTES // size))
        self._forget()
        self.memory = RingMemory(f"ring {self.group} {secrets.token_hex(8)}", size, count)
        self._slots = [_Slot(index) for index in range(count)]


class GpuRings:
    """In the producer: the ring of each GPU, and what trainers say and hear about it."""

    MESSAGES = frozenset({"gpu", "claim", "mapped", "copied", "read", "no-copy", "no-ring"})

    def __init__(self, group: str, send: Callable[..., bool], inside: Callable[[int], bool]) -> None:
        self._group, self._send, self._inside = group, send, inside
        self._rings: dict[str, Ring] = {}  # by the UUID of the GPU
        self._ring_of: dict[int, Ring] = {}  # by trainer

    def handle(self, number: int, kind: str, given: Any, nbytes: int = 0) -> None:
        """A message of a trainer: one of MESSAGES."""
        if kind == "gpu":
            ring = self._ring_of[number] = self._rings.setdefault(given, Ring(self._group))
            ring.join(number)
            return
        found = self._ring_of.get(number)
        if found is None:
            if kind == "claim":
                self._send(number, "gpu", given, Claim.OWN.value, -1, None, False)
        elif kind == "claim":
            self._claim(found, number, given, nbytes)
        elif kind == "copied":
            for other in found.done(number, given):
                self._send(other, "gpu", given, *found.ready(given), False)
        elif kind == "read":
            found.release(number, given)
        elif kind == "mapped":
            found.mapped(number, given)
        elif kind == "no-copy":
            self._claim_again(found, found.give_up(number, given))
        elif kind == "no-ring":
            del self._ring_of[number]
            self._claim_again(found, found.failed(number, given))

    def skip(self, number: int) -> None:
        """A trainer has left its epoch: it needs nothing that is in its ring now."""
        if (ring := self._ring_of.get(number)) is not None:
            ring.skip(number)

    def leave(self, number: int) -> None:
        """A trainer is gone or leaves the group: others copy what it did not finish."""
        if (ring := self._ring_of.pop(number, None)) is not None:
            self._claim_again(ring, ring.leave(number))

    def status(self) -> list[dict[str, Any]]:
        """What `legroom watch` shows."""
        return [
            {
                "gpu": uuid, "trainers": len(ring.members), "copied": ring.copied, "read": ring.read,
                "bytes": 0 if ring.memory is None else ring.memory.nbytes * ring.memory.slots,
            }
            for uuid, ring in self._rings.items()
        ]  # fmt: skip

    def _claim(self, ring: Ring, number: int, serial: int, nbytes: int) -> None:
        claim, slot = ring.claim(number, serial, nbytes, self._inside)
        memory = None if ring.memory is None else tuple(ring.memory)
        self._send(number, "gpu", serial, claim.value, slot, memory, ring.creator == number)

    def _claim_again(self, ring: Ring, waiting: list[tuple[int, int]]) -> None:
        """The trainer that copied a batch is gone: the first that waits for it copies it."""
        for number, serial in waiting:
            self._claim(ring, number, serial, ring.nbytes)
