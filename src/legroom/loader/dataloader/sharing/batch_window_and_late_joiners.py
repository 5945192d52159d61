"""Which batches a producer keeps, for which trainers, and which it makes next: decisions alone, without I/O.

The producer makes one sequence of batches. The window is the part of it that is made and kept: from the first batch
that a trainer still needs to ``head``, the next one to be made. A trainer asks for one position at a time:

    GRANT   it is in the window; the trainer holds it until it releases it
    WAIT    it will be made within about a second; it is granted then
    MISS    it was dropped, or is far ahead or behind: the trainer makes it itself

A batch leaves the window when no trainer in the window needs it. Its slot is written again only when no trainer holds
it: until then the batch is kept aside, and does not count.

A trainer is in the window from a GRANT or WAIT to a MISS. While it is in, nothing it needs is dropped. If the window is
full and another trainer waits for a batch that cannot be made for lack of space, the time is charged to the trainers
that need the oldest batch. A trainer that has cost the others more than its patience is out: it makes its batches
itself, and is in again when it has caught up. Charges fade, so that trainers of nearly the same speed stay together.

So no trainer waits for ever: after every answer, if one waits, either there is room for the next batch, or the time is
charged to a trainer. Whatever changes which batches are needed drops the others at once.

A trainer that asks for the first time, and is only a few seconds behind, moves the sequence back to its position. One
that is new, and has run ahead while the producer started, waits as long: those who start together stay together. If no
trainer is near the window, the sequence starts again where most of them are.

A trainer that is out makes its batches on the same cores as the producer, so one of equal speed would never catch up.
If it has stayed as far from the window as it was, it can keep up, and is treated like one that asks for the first time;
the others wait for it as it would for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import Position, position_after

WAIT_S = 1.0  # the longest that a trainer waits for a batch that is not being made yet
JOIN_S = 5.0  # what a trainer that asks for the first time may be behind, or ahead if it is new
RETURN_S = 3.0  # out of the window at one distance, before a trainer is taken back; twice as long each time
FADE = 0.05  # of a trainer's charges, in a second: the slowdown that is tolerated


class Answer(Enum):
    """What a trainer gets for a position."""

    GRANT = "grant"
    WAIT = "wait"
    MISS = "miss"


@dataclass(slots=True, eq=False)
class GroupMember:
    """What the producer knows of a trainer."""

    patience: float  # seconds that it may hold the others up
    continuous: bool = False  # the time counts from the last moment when it held none up
    new: bool = False  # it has had no other producer
    cursor: Position | None = None  # the batch it needs next
    asking: bool = False  # it waits for that batch
    unread: bool = False  # that batch could not be sent: it has not read what was sent before
    inside: bool = False  # in the window: nothing it needs is dropped
    fresh: bool = True  # it has not asked for anything yet
    charged: float = 0.0
    out: float = 0.0  # seconds out of the window, since it was ``gap`` batches behind at ``left_at``
    gap: int | None = None
    left_at: Position | None = None
    return_after: float = RETURN_S
    made_itself: int = 0
    granted: int = 0


@dataclass(slots=True, eq=False)
class MadeBatch:
    """A batch that is made."""

    position: Position
    nbytes: int
    content: Any
    serial: int
    holders: dict[int, set[int | None]] = field(default_factory=dict)  # by trainer: its grants of it


class Window:
    """The batches that are made, and the trainers that want them."""

    def __init__(self, start: Position, length: Callable[[int], int], drop: Callable[[MadeBatch], None]) -> None:
        self.head = start  # the next batch to be made
        self.entries: dict[Position, MadeBatch] = {}  # in the order of the sequence
        self.aside: dict[int, MadeBatch] = {}  # that no trainer needs, but some hold
        self.members: dict[int, GroupMember] = {}
        self.most, self.most_bytes = 2, None  # type: int, int | None
        self.interval: float | None = None  # seconds between two batches, when they are made without a pause
        self.in_production = 0  # batches that the workers are making
        self.begun = False  # a batch was made since the sequence started here
        self._length, self._drop = length, drop  # batches of an epoch; frees the memory of an entry
        self._serial = 0

    # Trainers

    def join(self, number: int, patience: float, continuous: bool = False, new: bool = False) -> None:
        """A trainer has come."""
        self.members[number] = GroupMember(patience, continuous, new)

    def leave(self, number: int) -> None:
        """A trainer is gone, and holds nothing any more."""
        self.members.pop(number, None)
        for entry in [*self.entries.values(), *self.aside.values()]:
            entry.holders.pop(number, None)
        self.trim()

    def want(self, number: int, position: Position) -> Answer:
        """A trainer asks for a batch."""
        member = self.members[number]
        member.cursor, member.asking, member.unread = position, True, False
        return self.answer(number)

    def move(self, number: int, position: Position) -> None:
        """A trainer is at another position and asks for nothing: it has left an epoch."""
        member = self.members[number]
        member.cursor, member.asking, member.unread = position, False, False
        self.trim()

    def answer(self, number: int) -> Answer:
        """What a trainer that asks gets now; GRANT makes it a holder of ``entries[cursor]`` (see ``granted``)."""
        member = self.members[number]
        assert member.cursor is not None
        if member.cursor in self.entries:
            member.inside, member.fresh, member.new = True, False, False
            return Answer.GRANT
        if self._awaited(member.cursor, JOIN_S if member.new else WAIT_S):
            member.inside, member.fresh = True, False
            self.trim()  # it may have passed all that was made: then there is room only without that
            return Answer.WAIT
        member.inside = member.asking = False
        member.made_itself += 1
        self.trim()
        return Answer.MISS

    def granted(self, number: int) -> MadeBatch:
        """The batch that a trainer gets by GRANT; it holds it from now on."""
        member = self.members[number]
        assert member.cursor is not None
        entry = self.entries[member.cursor]
        entry.holders.setdefault(number, set()).add(member.granted)
        member.cursor, member.asking, member.unread = self._after(member.cursor), False, False
        member.granted += 1
        self.trim()
        return entry

    def release(self, number: int, serial: int, grant: int | None = None) -> MadeBatch | None:
        """A trainer uses a batch no more; ``grant``: as it got it then, for it may have got it twice."""
        entry = self.aside.get(serial) or next((one for one in self.entries.values() if one.serial == serial), None)
        if entry is not None:
            grants: set[int | None] = entry.holders.get(number, set())
            grants.discard(grant)
            if not grants or grant is None:
                entry.holders.pop(number, None)
            self.trim()
        return entry

    # Batches

    def room(self) -> bool:
        """Whether another batch may be made."""
        if not self.members:
            return False
        if len(self.entries) < 2:
            return True
        largest = max(entry.nbytes for entry in self.entries.values())
        used = sum(entry.nbytes for entry in self.entries.values())
        return len(self.entries) < self.most and (self.most_bytes is None or used + largest <= self.most_bytes)

    def add(self, nbytes: int, content: Any) -> MadeBatch:
        """The batch at ``head`` is made."""
        self._serial += 1
        entry = self.entries[self.head] = MadeBatch(self.head, nbytes, content, self._serial)
        self.begun = True
        self.head = self._after(self.head)
        self.trim()
        return entry

    def restart(self, start: Position) -> None:
        """Continue at another position. What was made is dropped when no trainer holds it."""
        for entry in list(self.entries.values()):
            self._remove(entry)
        self.head, self.begun = start if self._length(start[0]) else self._after(start), False
        for member in self.members.values():
            member.inside = False

    def trim(self) -> None:
        """Drop what no trainer needs or holds."""
        needed = [one.cursor for one in self.members.values() if one.inside and one.cursor is not None]
        first = min(needed, default=None)
        if first is not None:
            for entry in list(self.entries.values()):
                if entry.position >= first:
                    break
                self._remove(entry)
        for serial, entry in list(self.aside.items()):
            if not entry.holders:
                del self.aside[serial]
                self._drop(entry)

    def _remove(self, entry: MadeBatch) -> None:
        del self.entries[entry.position]
        if entry.holders:
            self.aside[entry.serial] = entry
        else:
            self._drop(entry)

    # Time

    def charge(self, seconds: float) -> None:
        """So much time has passed: charge it to the trainers for which others wait, and let go of the slowest."""
        blocking = self.blocking()
        for number, member in self.members.items():
            self._follow(member, seconds)
            if number in blocking:
                member.charged += seconds
                if member.charged > member.patience:
                    member.inside, member.charged = False, 0.0
            elif member.continuous:
                member.charged = 0.0
            else:
                member.charged = max(0.0, member.charged - FADE * seconds)
        if blocking:
            self.trim()

    def _follow(self, member: GroupMember, seconds: float) -> None:
        """Count the time that a trainer is out, and note where it was."""
        if member.inside or member.fresh or member.cursor is None:
            member.out, member.gap = 0.0, None
        elif member.gap is None:
            member.out, member.gap, member.left_at = 0.0, self._gap(member.cursor), member.cursor
        else:
            member.out += seconds

    def _keeps_pace(self, member: GroupMember) -> bool:
        """Whether a trainer that has been out for a while has not fallen back since."""
        if member.gap is None or member.out < member.return_after or member.cursor is None or member.left_at is None:
            return False
        gap, made = self._gap(member.cursor), self._distance(member.left_at, member.cursor)
        kept = bool(gap is not None and made and abs(gap) <= abs(member.gap) + max(2, made // 20))
        member.gap = None  # measured again
        if kept:
            member.return_after *= 2
        return kept

    def _gap(self, position: Position) -> int | None:
        """How many batches a position is behind the next one to be made; negative if it is ahead."""
        if position <= self.head:
            return self._distance(position, self.head)
        ahead = self._distance(self.head, position)
        return None if ahead is None else -ahead

    def blocking(self) -> list[int]:
        """The trainers for which the oldest batch is kept, if the window is full and others wait for a new one.

        One that asks for that batch is about to get it, unless it does not read.
        """
        waiting = [one for one in self.members.values() if one.asking and one.inside and one.cursor not in self.entries]
        if not waiting or not self.entries or self.room():
            return []
        first = next(iter(self.entries))
        return [number for number, one in self.members.items() if one.inside and (one.unread or not one.asking)
                and one.cursor is not None and one.cursor <= first]  # fmt: skip

    def slow(self) -> list[int]:
        """The same, and those that are out."""
        blocking = self.blocking()
        return [number for number, one in self.members.items()
                if number in blocking or (one.cursor is not None and not one.inside and not one.fresh)]  # fmt: skip

    def better_start(self) -> Position | None:
        """Where the sequence should start again, or None."""
        placed = [one.cursor for one in self.members.values() if one.cursor is not None]
        if not placed or not self.begun:  # a trainer that makes its own may be faster than workers that start
            return None
        for one in self.members.values():
            if self._keeps_pace(one):
                one.fresh = one.new = True
        first = next(iter(self.entries), self.head)
        behind = [one for one in self.members.values() if one.fresh and one.cursor is not None and one.cursor < first]
        near = [(one.cursor, one.new) for one in behind if one.cursor is not None and self._near(one.cursor, first)]
        for one in behind:
            one.fresh = False
        if near:
            if any(new for _, new in near):  # not after a takeover, when nobody shall stand still
                for one in self.members.values():
                    one.new = True
            return min(near)[0]
        if any(first <= cursor and (cursor <= self.head or self._awaited(cursor)) for cursor in placed):
            return None
        return max(placed, key=lambda at: (sum(self._near(at, one) for one in placed), at))

    def _near(self, position: Position, first: Position) -> bool:
        distance = self._distance(position, first)
        if distance is None:
            return False
        if distance <= max(self.most, self.in_production):
            return True
        return self.interval is not None and distance * self.interval <= JOIN_S

    def _awaited(self, position: Position, seconds: float = WAIT_S) -> bool:
        """Whether a batch will be made within so many seconds, or is being made."""
        if position < self.head or self.interval is None or not self._length(self.head[0]):
            return False  # nothing is made in an epoch without batches
        distance = self._distance(self.head, position)
        return distance is not None and (distance < self.in_production or distance * self.interval <= seconds)

    def _distance(self, start: Position, end: Position) -> int | None:
        """Batches from one position to another; None if that is far, or behind."""
        if start > end or end[0] > start[0] + 1:
            return None
        if start[0] == end[0]:
            return end[1] - start[1]
        return self._length(start[0]) - start[1] + end[1]

    def _after(self, position: Position) -> Position:
        return position_after(position, self._length)
