"""A careful start where memory is short: one worker shows what a batch takes before the others draw anything.

Covers: when care is needed, measuring the first worker, waiting for it, the verdict. Does not cover: the arithmetic
(budget.crew), the error's words (arena/refusal.py), slots beyond the first (arena/pool.py), how a draw is stopped
(arena/watch.py) or an empty share noticed (arena/ending.py).

How much a worker needs is known to nobody before it has made a batch: samples are decoded, cropped, stacked. But once
all workers draw at the same time it is too late to ask, a memory cgroup kills and does not refuse. So the first worker,
whose batch is also the first to be taken, goes alone; at the end of its collate it compares what it took, times the
number of workers, with what is left. Too little is an error in place of the first batch; where its samples alone show
that there will be too little, they are not drawn to the end. A later pass of the same loader knows the figures, and
waits for nobody.

Workers may wait for each other: at a barrier, for a file that another one writes. So a first worker that is blocked for
a second, neither computing nor growing, is not waited for any longer. Those who come in by that are watched while they
draw, as it is. Whoever waits here ends when its loader, or the program that started it, has ended.

The door is a ``worker_init_fn`` around the user's: the only place that a worker passes before its first sample. The
numbers lie in memory shared with all workers, however those are started.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import Any

from legroom.advice.memory_need import SPARE, Each, fits, least
from legroom.errors import BudgetTooSmall, LoaderClosed
from legroom.loader.arena.ending import watch_end
from legroom.loader.arena.processes import Blocked, Guarded, end_if_told
from legroom.loader.arena.refusal import Left, left, refused
from legroom.loader.arena.watch import May, Watch
from legroom.loader.measure.bare import bare
from legroom.loader.measure.private import idle_worker, private_bytes
from legroom.probe.host import Host
from legroom.system.libc import libc, malloc_trim
from legroom.words import say

Init = Callable[[int], None]

ENOUGH = 1 << 30  # bytes for each worker: with so much no care is needed, unless a batch takes a third of it
_SHUT, _OPEN, _REFUSED = range(3)
_VERDICT, _OWN, _MAKING, _BATCH, _FREE, _SAMPLES, _FIRST, _HERE = range(8)
# _FIRST: the first worker's process id, when it has begun; from _HERE on: which workers stand at the door
# By whether another worker's batch may be the first: the first one's share of an iterable dataset may be empty, and its
# class not say so; with in_order=False batches are given out as they come.
_PATIENCE_S = {False: 60.0, True: 5.0}
_BARELY = {
    True: 64 << 20,
    False: ENOUGH,
}  # bytes a worker, by whether it is forked: above, it is worth no measurement
_ASSEMBLY_S = 10.0  # for workers that import torch to be there, and in the figures
_LOOK_S = 0.005
_CLOSE = 2 * SPARE  # bytes left: so near to the end it is asked whether the first batch can end well
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD; setting it ends the learning
_LARGE = 128 << 10  # glibc's own, before it has learnt

_here: Door | None = None  # that this worker came through


class Door:
    """What the workers of one pass go through, one before the others."""

    def __init__(
        self,
        workers: int,
        before: Init | None,
        known: Each | None,
        *,
        iterable: bool,
        drop_last: bool = False,
        in_order: bool = True,
    ) -> None:
        from multiprocessing.sharedctypes import RawArray  # loads a library of the platform

        self.workers, self._iterable, self._drop_last = workers, iterable, drop_last
        self._before = Guarded(before)
        self._shared: Any = RawArray(ctypes.c_longlong, _HERE + workers)
        self._patience = iterable or not in_order
        self._height = 0
        self._watch: Watch | None = None
        if known is not None:
            self._shared[:4] = [_OPEN, known.own, known.making, known.batch]

    def __call__(self, worker: int) -> None:
        """In a worker, before it draws."""
        global _here
        _here = self
        _keep_nothing()
        self._shared[_HERE + worker] = 1
        shows = worker == 0 and self.waited_for
        if shows:
            self._assemble()
            self._shared[_OWN] = private_bytes() or 0
            self._shared[_FIRST] = os.getpid()
        else:
            self._wait()
        self._before(worker)
        if self.waited_for:
            self._watch = Watch(lambda: self._shared[_VERDICT] != _OPEN, self._may)
            if shows and self._iterable:
                self._tell_end()

    @property
    def waited_for(self) -> bool:
        """Whether others wait for this worker, if it is the first."""
        return bool(self._shared[_VERDICT] == _SHUT)

    @property
    def seen(self) -> Each | None:
        """What the first worker took, once that is known."""
        own, making, batch = (self._shared[at] for at in (_OWN, _MAKING, _BATCH))
        return Each(own, making, batch) if batch else None

    def open(self) -> None:
        """Let everybody in: the first batch is there, or will never be."""
        if self.waited_for:
            self._shared[_VERDICT] = _OPEN

    def close(self) -> None:
        """Let nobody in any more: the pass is over before it began."""
        if self.waited_for:
            self._shared[_VERDICT] = _REFUSED

    def drawn(self) -> None:
        """In the first worker, when its samples are there."""
        self._height = _beyond_now()

    def hold(self) -> None:
        """In a worker that was let in before the first one's batch, when its own samples are there: they are enough."""
        if self._watch is not None:
            self._watch.hold()

    def shown(self, batch: int, samples: int | None, *, sent: bool = True) -> None:
        """In the first worker, when its batch is in a slot of ``batch`` bytes, or none could be had: the verdict.

        It is raised where it is no.
        """
        self.hold()
        own, now, here = self._shared[_OWN], private_bytes(), left()
        if now is None or here is None:
            self.open()
            return
        each = Each(own, max(0, now - own) + max(self._height, _beyond_now()), batch)
        # What was free before there were workers: those who stand here are themselves, this one is all it has shown.
        free = here.free + sum(self._shared[_HERE:]) * own + max(0, now - own) + (batch if sent else 0)
        self._note(each, free, samples)
        if fits(least(each, self.workers), free):
            self.open()
            return
        self._shared[_VERDICT] = _REFUSED
        if self._watch is not None:
            self._watch.go_on()  # another batch was ordered
        raise refused(each, self.workers, free, here.source, samples)

    def check(self) -> None:
        """Raise where the verdict was no."""
        if self._shared[_VERDICT] == _REFUSED:
            raise LoaderClosed(say("the loader was closed while a worker waited for room"))

    def refusal(self) -> BudgetTooSmall | None:
        """The error of the first worker, with its parts; torch hands over its text alone."""
        here, free = left(), self._shared[_FREE]
        if self._shared[_VERDICT] != _REFUSED or not free or here is None:
            return None
        each = Each(self._shared[_OWN], self._shared[_MAKING], self._shared[_BATCH])
        return refused(each, self.workers, free, here.source, self._shared[_SAMPLES] or None)

    def _may(self, grown: int) -> May:
        """Whether the first worker, so much larger than when it came, may go on drawing.

        What it takes in the end is more than this, so where this is too much for all, that will be.
        """
        own, present, here = self._shared[_OWN], sum(self._shared[_HERE:]), left()
        if here is None or self._shared[_VERDICT] == _OPEN:
            return May.GO_ON
        if self._shared[_VERDICT] == _REFUSED:  # another batch was ordered: it will not be sent
            return May.GO_ON if here.free >= SPARE else May.NO_MORE
        if here.free >= _CLOSE:  # a whole batch tells more: what would fit
            return May.GO_ON
        each, free = Each(own, grown, 0), max(1, here.free + present * own + grown)
        # Those who are not here yet hold what nobody can tell: until then only the end of all memory is a reason.
        if here.free >= SPARE and (present < self.workers or fits(least(each, self.workers), free)):
            return May.GO_ON
        self._note(each, free, None)
        self._shared[_VERDICT] = _REFUSED
        return May.STOP

    def _note(self, each: Each, free: int, samples: int | None) -> None:
        self._shared[_MAKING], self._shared[_BATCH], self._shared[_FREE] = each.making, each.batch, free
        self._shared[_SAMPLES] = samples or 0

    def _tell_end(self) -> None:
        """Let the others in when this worker's share is over, and no batch came of it."""
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is not None:
            watch_end(info.dataset, self._ended)

    def _ended(self, given: bool) -> None:
        if self._drop_last or not given:  # else what was given is a batch, and will be shown
            self.open()

    def _assemble(self) -> None:
        """Wait until everybody stands at the door: what they take by themselves is in the figures then."""
        self._stand(lambda: sum(self._shared[_HERE:]) < self.workers and self.waited_for, _ASSEMBLY_S)

    def _wait(self) -> None:
        blocked = Blocked()
        self._stand(
            lambda: self.waited_for and not (self._shared[_FIRST] and blocked.now(self._shared[_FIRST])),
            _PATIENCE_S[self._patience],
        )
        self.check()

    def _stand(self, still: Callable[[], bool], patience: float) -> None:
        until = time.monotonic() + patience
        while still() and time.monotonic() < until:
            end_if_told()
            time.sleep(_LOOK_S)


def here() -> Door | None:
    """The door that this worker came through, if there was one."""
    return _here


def careful(
    workers: int,
    method: str,
    before: Init | None,
    known: Each | None,
    samples: int | None,
    *,
    iterable: bool,
    drop_last: bool = False,
    in_order: bool = True,
) -> Door | None:
    """The door for a pass that is about to start; None where there is plenty, an error where it would be in vain."""
    now = left()
    if now is None or now.free >= workers * ENOUGH:
        return None
    malloc_trim()
    now = left() or now
    if known is not None:
        # What is not known beforehand is in the figures by now, and a training that came so far is not stopped lightly.
        if least(known, workers) + SPARE > now.free:
            raise refused(known, workers, now.free, now.source, samples)
    else:
        _check_processes(workers, method, now)
    return Door(workers, before, known, iterable=iterable, drop_last=drop_last, in_order=in_order)


def _check_processes(workers: int, method: str, now: Left) -> None:
    """Where the workers by themselves are too much, say so before they are started."""
    if now.free >= workers * _BARELY[method == "fork"]:
        return
    if now.free < SPARE:  # to try one would be the end already
        raise refused(Each(0, 0, 0), workers, now.free, now.source, None)
    own = idle_worker() if method == "fork" else bare().worker(method)
    if own is not None and not fits(workers * own, now.free):
        raise refused(Each(own, 0, 0), workers, now.free, now.source, None)


def _keep_nothing() -> None:
    """Hold little: a worker whose batches were 24 MB came to hold 54, and 40 of its parent's objects.

    The C library by itself learns to keep large pieces that were freed, as holes in its heap; it is told not to (and
    what holes it inherited are given back after every batch, see collate.py). The collector writes to every object it
    walks over, and so copies what was inherited; it is told to leave that alone.
    """
    gc.freeze()
    adjust = getattr(libc(), "mallopt", None)  # not everybody's C library has it
    if adjust is not None:
        adjust(_MMAP_THRESHOLD, _LARGE)


def _beyond_now() -> int:
    """How far this process was above what it holds now, at its highest."""
    status = Host().table("/proc/self/status")
    return max(0, status.get("VmHWM", 0) - status.get("VmRSS", 0))
