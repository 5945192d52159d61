"""A worker's slots: which one the next batch goes into.

Covers: reusing, making, replacing and waiting for slots; the byte budget. Does not cover: a slot itself
(arena/slot.py), what is written (arena/pack.py).

Every worker has a pool of its own, so no lock is shared with another. Slots are made when they are needed: a consumer
that is quicker than its workers costs one or two a worker. A budget is shared out evenly, because the consumer takes
batches in turn: if one worker could use up all of it, the next in turn might wait for room while the consumer waits
for it. What the consumer holds is the consumer's and not counted.

A worker waits while one of its own batches is still on its way. That batch is taken out sooner or later by a consumer
that asks for more, whatever it keeps: so waiting always ends. Where none is, it waits a moment for memory at most.

Slots must leave room for samples: every worker may be about to draw those of a batch. Where memory is short a worker
comes down to one batch on its way, and gives the pages of its other slots back.
"""

from __future__ import annotations

import time
from collections import deque

from legroom.advice.memory_need import Each, fits
from legroom.cache.capacity import memory_bounds, tightest
from legroom.errors import BudgetTooSmall, LoaderClosed
from legroom.loader.arena.processes import must_end
from legroom.loader.arena.refusal import left, refused
from legroom.loader.arena.slot import FREE, HEADER, HELD, RETIRED, SENT, NoSlot, Slot
from legroom.units import exact_size, format_size
from legroom.words import say

_RECENT = 16  # batches that decide how large slots are
_SLACK = 1 << 20
_PAGE = 4096
_PATIENCE_S = 1.0  # other workers put together their first batches in memory that they soon give back
_SHORT_PATIENCE_S = 10.0  # where memory is short: the consumer gives a slot back with its next step
_LOOK_S = 0.05  # how often a waiting worker looks whether anybody is left to wait for


class Pool:
    """The slots of this process."""

    def __init__(self, budget: int | None, workers: int) -> None:
        self.workers = max(1, workers)
        self.budget = budget
        self.slots: list[Slot] = []
        self.making = (
            0  # bytes that a worker holds beside its slots while it makes a batch, where that was measured
        )
        self.why: str | None = None  # why the last batch found no slot
        self._short = False  # of memory: one batch on its way must do
        self._recent: deque[int] = deque(maxlen=_RECENT)

    @property
    def want(self) -> int:
        """How large the next batch will be, going by the last ones; 0 where nothing is known."""
        return max(self._recent, default=0)

    def used(self, need: int) -> None:
        """Note what a batch took."""
        if need:
            self._recent.append(need)

    def take(self, need: int, *, outgrown: bool = False) -> Slot | None:
        """A slot for ``need`` bytes to write into, or None where the batch must travel otherwise."""
        self._check(need)
        size = need
        if outgrown:  # batches vary: leave room, or the next one a little larger needs yet another slot
            size += need // 4 if self.budget is None else min(need // 4, self._share - need)
        pause, look, began = 0.0, 0.0, time.monotonic()
        while True:
            slot = self._free(need)
            if (
                slot is None and time.monotonic() >= look
            ):  # looking for memory and for the other process takes time
                look = time.monotonic() + _LOOK_S
                slot = self._made(size)
                if slot is None:
                    self._somebody_there()
            if slot is not None:
                return slot
            patience = _SHORT_PATIENCE_S if self._short and self.slots else _PATIENCE_S
            if not self._on_their_way() and time.monotonic() > began + patience:
                return self._free(need) or self._made(size, anyhow=True)
            time.sleep(pause)
            pause = min(pause + 0.0001, 0.002)

    def allows(self, need: int) -> bool:
        """Whether a batch of ``need`` bytes is within the budget."""
        return self.budget is None or need <= self._share

    def recall(self) -> None:
        """What was to be sent is not: nobody will give it back."""
        for slot in self.slots:
            slot.state = FREE

    def forget(self, slot: Slot) -> None:
        """Use this slot no more; it is unmapped once nothing lies on it."""
        slot.give_up()
        self.slots.remove(slot)

    def end(self) -> None:
        """This process ends: pages that nobody reads go back, though the other process may keep them mapped."""
        for slot in list(self.slots):
            self.forget(slot)

    def check_room(self, need: int) -> None:
        """Raise where a batch of ``need`` bytes, one from each worker, would be somebody's death."""
        now = left()
        if now is not None and not fits(self.workers * need, now.free):
            raise refused(Each(0, self.making, need), self.workers, now.free, now.source, None)

    def _on_their_way(self) -> bool:
        return any(slot.state == SENT for slot in self.slots)

    def _free(self, need: int) -> Slot | None:
        enough = self._short and self._on_their_way()
        for slot in list(self.slots):
            state = slot.state
            # A collate function that keeps what it made must not find the next batch in it.
            if state == RETIRED or (state == FREE and (enough or slot.lent or not _suits(slot, need))):
                self.forget(slot)
            elif state == FREE:
                return slot
        return None

    def _made(self, need: int, *, anyhow: bool = False) -> Slot | None:
        capacity = -(-need // _PAGE) * _PAGE
        if not (anyhow or self._may_add(capacity)):
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
            return True  # making it looks for itself
        bounds = memory_bounds()
        if not bounds:
            return True
        free, samples = tightest(bounds).free, max(capacity, self.making)
        # A second batch is comfort: it must leave every worker room for a first, and for the samples of its next one.
        self._short = free < capacity * (self.workers + 1) + samples * self.workers
        # Where the consumer holds the first, the samples of this batch are there, those of others may be yet to come.
        return not self._short or (mine == 0 and free >= capacity + samples * (self.workers - 1))

    @property
    def _share(self) -> int:
        return (self.budget or 0) // self.workers

    def _check(self, need: int) -> None:
        if self.budget is None or self.allows(need):
            return
        least = -(-need // _PAGE) * _PAGE * self.workers
        raise BudgetTooSmall(
            say("a memory budget of {budget} cannot hold one batch", budget=format_size(self.budget)),
            why=say(
                "a batch is {batch}, and each of {workers} workers needs room for one: {least}",
                batch=format_size(need), workers=self.workers, least=format_size(least),
            ),
            fix=(
                say("memory_budget={least!r} or more", least=exact_size(least)),
                say("fewer workers, or a smaller batch"),
            ),
        )  # fmt: skip

    def _somebody_there(self) -> None:
        if must_end():
            raise LoaderClosed(
                say("the loader was closed while a worker waited for room"),
                why=say("nobody will take its batches any more"),
            )


def _suits(slot: Slot, need: int) -> bool:
    """Large enough, and not so large that one outlier's slot would be kept for ever."""
    return need <= slot.capacity <= 2 * need + _SLACK + HEADER
