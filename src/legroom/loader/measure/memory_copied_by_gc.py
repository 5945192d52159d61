"""Garbage collections in a process and its forked workers, which copy memory that they share.

A full collection writes to every object, so a process that shares its pages with forked workers then copies the pages
of all objects that existed at the fork: 35 MB with torch imported, more with a list of records. It comes after 121
young collections, and only if the objects that survived since the last full one are a quarter of the others. A worker
inherits both counts, so a full collection can follow its first young one, or not come at all. That depends on what the
training program did before the fork. So the trial runs without full collections first. If young ones continue, it then
runs with full ones as soon as possible, which gives the least and the most that the loop needs.

That is CPython's collector with three generations. Another one, such as the incremental one of some releases of 3.14
or that of builds without the GIL, copies shared memory bit by bit or at every collection, and nothing postpones that.
There the first run has the collections that come, and when the rest of the memory is copied is not predicted. The
second run collects everything once at the fork, which gives the most.
"""

from __future__ import annotations

import gc
import mmap
import os
import struct

_NEVER = 1 << 30  # a threshold that is not reached
_SLOTS = 512  # processes that are counted at once
_OWN = struct.Struct("II")  # young and full collections of a process
_AT_START = 2  # young collections that the start of a worker takes: the inherited count is used up, and imports
# Collections, at least, by which a training script that imports the same is behind a trial in a new process.
_BEHIND = 1
_ALIKE = 5  # collections, at most, by which the training program differs
_FEW = 50  # objects after which a collection is run, to see which kinds there are
_CYCLE, _NONE = 150, 255  # young collections after which no full one is waited for; the exit status then


class ForkedCollections:
    """Counts collections of this process and of those forked from it, and says when full ones come."""

    def __init__(self, *, caller: bool) -> None:
        """``caller``: this is a fork of the training program, which goes on before it starts its workers."""
        self._counts = mmap.mmap(-1, _SLOTS * _OWN.size)  # shared with the workers
        self._main = os.getpid()
        self._thresholds = gc.get_threshold()
        self._generations = has_generations()
        self._full_after = young_until_full() if self._generations else None
        self._soonest = None
        if self._full_after is not None:
            self._soonest = max(1, self._full_after + (-_ALIKE if caller else _BEHIND))
        # A script that imports the same is just before it.
        if self._generations and not caller and _young_since_full() <= _BEHIND:
            self._soonest = 1
        self._expedited = False
        self._again = {"main": False, "workers": False}
        gc.callbacks.append(self._count)
        os.register_at_fork(after_in_child=self._begin)

    def postpone(self) -> None:
        """Run no full collections, here and in processes forked from now on; with another collector it runs as ever."""
        if self._generations:
            gc.set_threshold(*self._thresholds[:2], _NEVER)

    def forked(self) -> None:
        """The workers were forked: count from here in this process too, and collect as they do."""
        self._begin()

    def go_on(self, *, workers: bool, restarted: bool) -> bool:
        """Whether full collections can come in this process or (``workers``) in its workers.

        They can where a process collects again and again, and where one that collects a few times reaches the next full
        collection of a script that imports the same. ``restarted``: workers live for an epoch, and those of later
        epochs inherit what this process has counted by then.
        """
        own, others = self._young()
        most = max(others, default=0)
        theirs = most > 0 and self._reaches(most, own if restarted else 0)
        self._again = {"main": self._reaches(own, 0), "workers": workers and theirs}
        return any(self._again.values())

    def _reaches(self, young: int, inherited: int) -> bool:
        return max(young, inherited) > _AT_START or (self._soonest is not None and young + inherited >= self._soonest)

    def expected(self, workers: int) -> bool:
        """Whether a program that imports what this one imports runs full collections in as many processes as can."""
        if self._full_after is None:
            return False
        own, others = self._young()
        enough = self._full_after + _ALIKE
        if self._again["workers"]:
            return sum(young >= enough for young in others) >= workers
        return own >= enough

    def expedite(self) -> None:
        """Let the first young collection be a full one, in the processes that collect again and again.

        It counts over an empty heap, so that no full collection is postponed for a lack of new objects. That writes to
        no object. With another collector they run a full one at the fork instead.
        """
        if not self._generations:
            self._counts[:] = bytes(len(self._counts))
            self._expedited = True
            return
        if not gc.get_freeze_count():  # keep a freeze of the program
            gc.freeze()
            gc.collect()
            gc.unfreeze()
        gc.set_threshold(self._thresholds[0], 1, _NEVER)  # until the workers are forked
        gc.collect(1)  # a full collection comes after the middle generation's
        self._counts[:] = bytes(len(self._counts))
        self._expedited = True

    def full(self, workers: int) -> bool:
        """Whether all processes that collect again and again have run a full collection."""
        counts = self._all()
        own = counts.pop(self._main % _SLOTS)
        others = sum(bool(full) for _, full in counts.values())
        return (not self._again["main"] or own[1] > 0) and (not self._again["workers"] or others >= workers)

    def _young(self) -> tuple[int, list[int]]:
        counts = self._all()
        own = counts.pop(self._main % _SLOTS)
        return own[0], [young for young, _ in counts.values()]

    def _all(self) -> dict[int, tuple[int, int]]:
        return {slot: _OWN.unpack_from(self._counts, slot * _OWN.size) for slot in range(_SLOTS)}

    def _begin(self) -> None:
        """In this process, or in one that was forked."""
        if not self._expedited:
            # A worker inherits up to 699 objects towards its first collection, which is chance: the start of one that
            # inherits many would take a collection more.
            gc.collect(0)
        _OWN.pack_into(self._counts, os.getpid() % _SLOTS * _OWN.size, 0, 0)
        if self._expedited:
            again = self._again["main" if os.getpid() == self._main else "workers"]
            if not self._generations:
                if again:
                    gc.collect()
                return
            gc.set_threshold(self._thresholds[0], 1, 0 if again else _NEVER)

    def _count(self, phase: str, about: dict[str, int]) -> None:
        if phase == "stop":
            at = os.getpid() % _SLOTS * _OWN.size
            young, full = _OWN.unpack_from(self._counts, at)
            _OWN.pack_into(self._counts, at, young + 1, full + (about["generation"] == 2))


def _young_since_full() -> int:
    """Collections since the last full one."""
    _, first, second = gc.get_count()
    return first + second * (gc.get_threshold()[1] + 1)


def has_generations() -> bool:
    """Whether this interpreter runs full collections after a number of young ones, as gc.set_threshold says.

    A forked process tries it, whatever the version: the incremental collector came with 3.14 and was taken back.
    """
    pid = os.fork()
    if not pid:
        try:
            os._exit(_runs_full_ones())
        finally:
            os._exit(_NONE)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def _runs_full_ones() -> bool:
    seen: set[int] = set()
    gc.freeze()  # so that they write to no object
    gc.collect()
    gc.callbacks[:] = [lambda phase, about: seen.add(about["generation"])]
    gc.enable()
    gc.set_threshold(_FEW, 1, 1)
    objects = [[] for _ in range(100 * _FEW)]  # type: ignore[var-annotated]
    return bool(objects) and 2 in seen


def young_until_full() -> int | None:
    """How many collections from now the next full one comes, itself included; None: not within a whole cycle.

    A forked process tries it. It ends when the full collection would start, so it copies next to nothing.
    """
    pid = os.fork()
    if not pid:
        try:
            _collect_until_full()
        finally:
            os._exit(_NONE)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if 0 < status <= _CYCLE else None


def _collect_until_full() -> None:
    seen = 0

    def count(phase: str, about: dict[str, int]) -> None:
        nonlocal seen
        if phase != "start":
            return
        seen += 1
        if about["generation"] == 2 or seen > _CYCLE:
            os._exit(min(seen, _NONE) if seen <= _CYCLE else _NONE)

    gc.callbacks.append(count)
    objects: list[list[None]] = []
    for _ in range(_CYCLE):
        objects = [[] for _ in range(2 * gc.get_threshold()[0])]  # some come from a free list, and are not counted
    del objects
