"""``legroom.collate``: any collate function, with batches that travel in memory of their own.

Covers: what runs in a worker for every batch. Does not cover: its parts (arena/), the loader (dataloader.py).

Everything happens in the collate function and in how its result is pickled, so any loader that calls one in worker
processes and sends the result through a multiprocessing queue is served: torch's own, and what other libraries make
of it. In the main process it is the plain function, and so it is where other code in the worker gets the result.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

from legroom.cache.find_or_build import cache_disabled
from legroom.errors import LoaderError
from legroom.loader.arena import door as arena_door
from legroom.loader.arena import stack as arena_stack
from legroom.loader.arena.pack import Span, Writer, needed, pickled, regions, stacked, write
from legroom.loader.arena.pool import Pool
from legroom.loader.arena.sent import Sent
from legroom.loader.arena.slot import SENT, Slot, supported
from legroom.loader.progress import position_of
from legroom.loader.rejoin import TurnKept
from legroom.loader.torch_internals import fetching
from legroom.system.imports import require
from legroom.units import parse_size
from legroom.words import say

Collate = Callable[[Any], Any]

_log = logging.getLogger("legroom")


def collate(fn: Collate | None = None, *, memory_budget: int | str = "auto") -> Collate:
    """``fn`` (torch's ``default_collate`` if None) with its batches carried past ``/dev/shm``, for any DataLoader.

    Where there is no such memory on this system, or LEGROOM_DISABLE is set, the function comes back as it is.

    Args:
        fn: The collate function to carry for; None is torch's ``default_collate``.
        memory_budget: Bounds the batches on their way, all workers of one iterator together: bytes, a text such as
            ``"256MB"``, or ``"auto"`` for what the machine and its cgroups leave free.
    """
    return wrapped(fn if fn is not None else default_collate(), memory_budget)


def default_collate() -> Collate:
    """torch's."""
    found: Collate = require("torch.utils.data", "torch", "legroom.collate").default_collate
    return found


def wrapped(fn: Collate, memory_budget: int | str) -> Collate:
    """The function with the transport, once; or the function itself where the transport cannot be had."""
    budget = read_budget(memory_budget)
    if isinstance(fn, Carried):
        fn = fn.fn
    return fn if why_not() is not None else Carried(fn, budget)


def why_not() -> str | None:
    """Why batches travel torch's way here, or None."""
    return say("LEGROOM_DISABLE is set") if cache_disabled(os.environ) else supported()


def read_budget(memory_budget: int | str) -> int | None:
    """Bytes; None where the machine decides."""
    return None if memory_budget == "auto" else parse_size(memory_budget)


class Carried:
    """A collate function whose result reaches another process in a slot."""

    def __init__(self, fn: Collate, budget: int | None = None) -> None:
        self.fn, self.budget = fn, budget
        self._pool: Pool | None = None
        self._pid = 0
        self._state_of: Callable[[], Any] | None = None
        self._told = False  # that it was called by another function

    def __call__(self, samples: Any) -> Any:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is None:
            return self.fn(samples)
        if not self._is_sent(samples):
            return self.fn(samples)
        pool = self._pool
        if pool is None or self._pid != os.getpid():
            return self._first(samples, info)
        return self._made(samples, info, pool, pool.take(pool.want) if pool.want else None)

    def _is_sent(self, samples: Any) -> bool:
        """Whether torch's worker loop sends what this call returns.

        Other code that calls this function gets the plain batch. Where that code is the loader's collate function, what
        it returns is carried from the next batch on.
        """
        found = fetching(samples)
        if found is None:
            self._warn_once()
            return False
        fetcher, drawn = found
        outermost = fetcher.collate_fn
        if isinstance(outermost, TurnKept):
            outermost = outermost.fn
        if not isinstance(outermost, Carried):
            fetcher.collate_fn = Carried(outermost, self.budget)
        return drawn and outermost is self

    def _warn_once(self) -> None:
        if self._told:
            return
        self._told = True
        _log.warning(
            say(
                "legroom.collate() was called by another function, which gets a plain batch: "
                "it travels torch's way, through /dev/shm. "
                "Put legroom.collate() around the outermost function to change that"
            )
        )

    def _first(self, samples: Any, info: Any) -> Any:
        """This worker's first batch, by which others may learn what one takes."""
        pool, came = self._start(info), arena_door.here()
        if came is None:
            want = self._expected(samples, pool)
            return self._made(samples, info, pool, pool.take(want) if want else None)
        try:
            return self._shown(samples, info, pool, came)
        except LoaderError:
            pool.recall()
            self._pool = None  # the next batch is the first, or is refused as this one was
            raise

    def _shown(self, samples: Any, info: Any, pool: Pool, came: arena_door.Door) -> Any:
        came.check()
        shows = info.id == 0 and came.waited_for
        if shows:
            came.drawn()
        else:
            came.hold()
        want = self._expected(samples, pool)
        count = len(samples) if isinstance(samples, (list, tuple)) else None
        slot = pool.take(want) if want else None
        if shows and want and slot is None:  # to collate beside it would take as much
            came.shown(want, count, sent=False)
        sent = self._made(samples, info, pool, slot)
        if shows:
            came.shown(pool.want, count)
        pool.making = 0 if came.seen is None else came.seen.making
        return sent

    def _expected(self, samples: Any, pool: Pool) -> int:
        """The bytes of a first batch, where they can be told: stacked in a slot, it is not there twice."""
        if self.fn is not default_collate() or not isinstance(samples, (list, tuple)) or not samples:
            return 0
        found = len(samples) * stacked(samples[0])
        return found if pool.allows(found) else 0

    def _made(self, samples: Any, info: Any, pool: Pool, slot: Slot | None) -> Any:
        writer = Writer(slot)
        arena_stack.stacking(writer)
        try:
            batch = self.fn(samples)
        finally:
            arena_stack.stacking(None)
        state = None if self._state_of is None else self._state(info.id, samples)
        return _packed(batch, writer, pool, state)

    def _start(self, info: Any) -> Pool:
        """In a worker, before its first batch."""
        from torch.utils.data import IterableDataset

        arena_stack.install()
        self._pid = os.getpid()
        self._pool = Pool(self.budget, info.num_workers)
        # Of a dataset that is iterated over, only this process knows how far it has come.
        self._state_of = position_of(info.dataset) if isinstance(info.dataset, IterableDataset) else None
        Finalize(None, self._pool.end, exitpriority=0)  # runs when a process of multiprocessing's ends
        return self._pool

    def _state(self, worker: int, samples: Any) -> tuple[int, bytes, int | None] | None:
        """Where the dataset stands, and how many samples of it these are.

        As bytes: the queue pickles in a thread, when the dataset has already gone on.
        """
        assert self._state_of is not None
        try:
            count = len(samples) if isinstance(samples, list) else None
            return worker, pickle.dumps(self._state_of()), count
        except Exception:  # it says no such thing about itself: resuming will skip instead
            self._state_of = None
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "fn": self.fn,
            "budget": self.budget,
            "_pool": None,
            "_pid": 0,
            "_state_of": None,
            "_told": False,
        }

    def __repr__(self) -> str:
        return f"legroom.collate({self.fn!r})"


def _packed(batch: Any, writer: Writer, pool: Pool, state: Any) -> Any:
    skeleton, pieces = pickled(batch)
    found = regions(pieces.all)
    need = needed(found)
    pool.used(need)
    note = None
    spans: list[Span] | None = []
    if need:
        spans = write(pieces.all, found, writer)
        if spans is None:  # the first batch, or one larger than those before it
            slot = pool.take(need, outgrown=writer.slot is not None)
            writer = Writer(slot)
            spans = write(pieces.all, found, writer) if slot is not None else None
    if spans is None:
        pool.check_room(need)  # torch's way takes as much
        note = pool.why or say("no room for a slot of {need} bytes", need=need)
        return _by_torch(batch, note, state)
    if not spans or writer.slot is None:
        return Sent(os.getpid(), -1, 0, [], skeleton, pieces.by_torch, note, state)
    slot = writer.slot
    slot.state = SENT
    return Sent(os.getpid(), slot.fd, slot.id, spans, skeleton, pieces.by_torch, note, state)


def _by_torch(batch: Any, note: str, state: Any) -> Sent:
    """The batch as torch would send it, with the reason why it was."""
    from multiprocessing.reduction import ForkingPickler

    return Sent(os.getpid(), -1, 0, [], bytes(ForkingPickler.dumps(batch)), True, note, state)
