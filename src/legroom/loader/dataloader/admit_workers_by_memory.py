"""Admission of workers where memory is low: the first worker is measured before the others load any sample.

How much a worker needs is unknown until it has made a batch: samples are decoded, cropped, stacked. Once all workers
load samples it is too late: a memory cgroup returns no error, it kills. So the first worker, whose batch is also the
first to be used, starts alone. When its batch is made, its memory times the number of workers is compared with the free
memory. If that does not fit, an error replaces the first batch. If its samples alone show that it will not fit, the
worker stops loading them. Later epochs of the same loader know the figures and wait for no worker.

Workers may wait for each other: at a barrier, or for a file that another one writes. So the others stop waiting for a
first worker that has ended, or that has been blocked for a second without computing or allocating. Those that are
admitted this way are watched while they load. A worker that waits here ends with its loader and its program.

Admission is a ``worker_init_fn`` around the user's: the only code in a worker before its first sample. Its numbers are
in memory shared with all workers, with any start method.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import Any

from legroom.advice.fix_commands import raise_ram_limit
from legroom.advice.memory_need import SPARE, Each, fits, least, most_samples, most_workers, spare
from legroom.errors import BudgetTooSmall, LoaderClosed
from legroom.loader.dataloader.worker_shutdown import (
    BlockedCheck,
    Decision,
    EndWithProgram,
    GrowthMonitor,
    exit_if_ending,
    has_ended,
)  # fmt: skip
from legroom.loader.measure_process_memory import (
    FreeMemory,
    bare_process,
    free_memory_now,
    idle_worker,
    private_bytes,
)  # fmt: skip
from legroom.messages import counted, phrase, say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.runtime_environment import environment
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.system.processes_and_threads import libc, malloc_trim
from legroom.units import format_size

Init = Callable[[int], None]

ENOUGH = 1 << 30  # bytes per worker: with so much there is no admission, unless a batch takes a third of it
_WAITING, _ADMITTED, _REFUSED = range(3)
# Indices of the shared numbers. _FIRST: pid of the first worker once it has started; from _READY on: a 1 for each
# worker that has reached this point.
_STATUS, _OWN, _MAKING, _BATCH, _FREE, _SAMPLES, _FIRST, _READY = range(8)
# How long to wait for the first batch, by whether another worker's batch may come before it: the first worker's share
# of an IterableDataset may be empty, and with in_order=False batches are returned as they arrive.
_FIRST_BATCH_S = {False: 60.0, True: 5.0}
_MEASURE_BELOW = {True: 64 << 20, False: ENOUGH}  # bytes per worker, by whether it is forked: with more, its own
# memory need not be measured
_ALL_READY_S = 10.0  # for workers that import torch to be ready, and counted
_POLL_S = 0.005
_LOW = 2 * SPARE  # free bytes below which the growth of the first worker is judged
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD; to set it ends glibc's own adjustment
_LARGE = 128 << 10  # glibc's initial threshold

_current: Admission | None = None  # in a worker: the one it started with


class Admission:
    """Starts the workers of one epoch, the first before the others."""

    def __init__(
        self, workers: int, init_fn: Init | None, known: Each | None, *, iterable: bool, in_order: bool = True
    ) -> None:
        with import_lock:
            from multiprocessing.sharedctypes import RawArray  # loads a library of the platform

        self.workers = workers
        self._init_fn = EndWithProgram(init_fn)
        self._shared: Any = RawArray(ctypes.c_longlong, _READY + workers)
        self._first_batch_s = _FIRST_BATCH_S[iterable or not in_order]
        self._peak = 0  # of the first worker above what it holds when its samples are loaded
        self._monitor: GrowthMonitor | None = None
        if known is not None:
            self._shared[:4] = [_ADMITTED, known.own, known.making, known.batch]

    def __call__(self, worker: int) -> None:
        """In a worker, before its first sample."""
        global _current
        _current = self
        _limit_own_memory()
        self._shared[_READY + worker] = 1
        if worker == 0 and self.waiting:
            self._poll(lambda: self._ready < self.workers and self.waiting, _ALL_READY_S)
            self._shared[_OWN] = private_bytes() or 0
            self._shared[_FIRST] = os.getpid()
        else:
            self._wait_for_first()
        self._init_fn(worker)
        if self.waiting:
            self._monitor = GrowthMonitor(lambda: self._shared[_STATUS] != _ADMITTED, self._judge_growth)

    @property
    def waiting(self) -> bool:
        """Whether the other workers wait for the first."""
        return bool(self._shared[_STATUS] == _WAITING)

    @property
    def measured(self) -> Each | None:
        """The memory of the first worker, once that is known."""
        own, making, batch = (self._shared[at] for at in (_OWN, _MAKING, _BATCH))
        return Each(own, making, batch) if batch else None

    def admit(self) -> None:
        """Let all workers start: the first batch is made, or will never be."""
        if self.waiting:
            self._shared[_STATUS] = _ADMITTED

    def close(self) -> None:
        """Let no further worker start: the epoch is over."""
        if self.waiting:
            self._shared[_STATUS] = _REFUSED

    def samples_loaded(self) -> None:
        """In the first worker, when its samples are loaded."""
        self._peak = _above_current()

    def stop_monitor(self) -> None:
        """In a worker whose samples are loaded: do not stop it from here on."""
        if self._monitor is not None:
            self._monitor.pause()

    def decide(self, batch: int, samples: int | None, *, sent: bool = True) -> None:
        """In the first worker, when its batch is in a slot of ``batch`` bytes, or there was no memory for one.

        Raises BudgetTooSmall if the workers do not fit.
        """
        self.stop_monitor()
        own, now, memory = self._shared[_OWN], private_bytes(), free_memory_now()
        if now is None or memory is None:
            self.admit()
            return
        grown = max(0, now - own)
        each = Each(own, grown + max(self._peak, _above_current()), batch)
        # What was free before there were workers: those that are ready hold ``own``, this one what it was measured at.
        free = memory.free + self._ready * own + grown + (batch if sent else 0)
        self._record(each, free, samples)
        if fits(least(each, self.workers), free):
            self.admit()
            return
        self._shared[_STATUS] = _REFUSED
        if self._monitor is not None:
            self._monitor.resume()  # torch has requested another batch
        raise does_not_fit(each, self.workers, free, memory.source, samples)

    def check(self) -> None:
        """Raise if the workers were refused."""
        if self._shared[_STATUS] == _REFUSED:
            raise LoaderClosed(say("the loader was closed while a worker waited for memory"))

    def error(self) -> BudgetTooSmall | None:
        """In the training process: the error of the first worker, of which torch passes only the text."""
        memory, free = free_memory_now(), self._shared[_FREE]
        if self._shared[_STATUS] != _REFUSED or not free or memory is None:
            return None
        each = Each(self._shared[_OWN], self._shared[_MAKING], self._shared[_BATCH])
        return does_not_fit(each, self.workers, free, memory.source, self._shared[_SAMPLES] or None)

    @property
    def _ready(self) -> int:
        return int(sum(self._shared[_READY:]))

    def _judge_growth(self, grown: int) -> Decision:
        """Whether the first worker, larger by ``grown`` than at its start, may continue to load samples.

        It will need more than that, so if this is too much for all workers, its batch will be.
        """
        own, ready, memory = self._shared[_OWN], self._ready, free_memory_now()
        if memory is None or self._shared[_STATUS] == _ADMITTED:
            return Decision.CONTINUE
        if self._shared[_STATUS] == _REFUSED:  # torch has requested another batch, which will not be sent
            return Decision.CONTINUE if memory.free >= SPARE else Decision.EXIT
        if memory.free >= _LOW:  # a whole batch shows more: which settings would fit
            return Decision.CONTINUE
        each, free = Each(own, grown, 0), max(1, memory.free + ready * own + grown)
        # What workers that are not ready yet hold is unknown: until then only the end of all memory is a reason.
        if memory.free >= SPARE and (ready < self.workers or fits(least(each, self.workers), free)):
            return Decision.CONTINUE
        self._record(each, free, None)
        self._shared[_STATUS] = _REFUSED
        return Decision.STOP

    def _record(self, each: Each, free: int, samples: int | None) -> None:
        self._shared[_MAKING], self._shared[_BATCH], self._shared[_FREE] = each.making, each.batch, free
        self._shared[_SAMPLES] = samples or 0

    def _wait_for_first(self) -> None:
        blocked = BlockedCheck()

        def still_waiting() -> bool:
            first = self._shared[_FIRST]
            if first and self.waiting and has_ended(first):  # its share of the dataset was empty
                self.admit()
            return self.waiting and not (first and blocked.blocked(first))

        self._poll(still_waiting, self._first_batch_s)
        self.check()

    def _poll(self, condition: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while condition() and time.monotonic() < until:
            exit_if_ending()
            time.sleep(_POLL_S)


def current_admission() -> Admission | None:
    """In a worker: the admission it started with, if there was one."""
    return _current


def admission_for(
    workers: int,
    method: str,
    init_fn: Init | None,
    known: Each | None,
    samples: int | None,
    *,
    iterable: bool,
    in_order: bool = True,
) -> Admission | None:
    """The admission for an epoch that is about to start; None if there is plenty of memory.

    Raises BudgetTooSmall if the workers cannot fit.
    """
    now = free_memory_now()
    if now is None or now.free >= workers * ENOUGH:
        return None
    malloc_trim()
    now = free_memory_now() or now
    if known is not None:
        # All else is allocated by now. A training run that came so far is stopped only if it cannot continue.
        if least(known, workers) + SPARE > now.free:
            raise does_not_fit(known, workers, now.free, now.source, samples)
    else:
        _check_processes(workers, method, now)
    return Admission(workers, init_fn, known, iterable=iterable, in_order=in_order)


def _check_processes(workers: int, method: str, now: FreeMemory) -> None:
    """Raise if the worker processes alone are too much, before they are started."""
    if now.free >= workers * _MEASURE_BELOW[method == "fork"]:
        return
    if now.free < SPARE:  # even one process to measure would be too much
        raise does_not_fit(Each(0, 0, 0), workers, now.free, now.source, None)
    own = idle_worker() if method == "fork" else bare_process().worker(method)
    if own is not None and not fits(workers * own, now.free):
        raise does_not_fit(Each(own, 0, 0), workers, now.free, now.source, None)


def _limit_own_memory() -> None:
    """Keep little: without this, a worker whose batches were 24 MB held 54 MB, and 40 MB of its parent's objects.

    glibc learns to keep large freed blocks as holes in its heap; a fixed threshold ends that (inherited holes are freed
    after every batch, see receive.py). The garbage collector writes to every object it visits, and so copies what was
    inherited; frozen objects are not visited.
    """
    gc.freeze()
    mallopt = getattr(libc(), "mallopt", None)  # other C libraries do not have it
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)


def _above_current() -> int:
    """By how much the peak memory of this process exceeds what it holds now."""
    status = Host().table("/proc/self/status")
    return max(0, status.get("VmHWM", 0) - status.get("VmRSS", 0))


def does_not_fit(each: Each, workers: int, free: int, source: str, samples: int | None) -> BudgetTooSmall:
    """The error for workers that do not fit: what they need, what is free, what fits.

    ``free`` is what was free before any of them started. ``samples`` is the batch size, if a smaller one is possible.
    """
    need = least(each, workers)
    count = counted(workers, phrase("{count} worker"), phrase("{count} workers"))
    sizes = {
        "own": format_size(each.own), "making": format_size(each.making), "batch": format_size(each.batch),
        "need": format_size(need), "spare": format_size(spare(need)), "free": format_size(free), "source": source,
    }  # fmt: skip
    if each.batch:
        what = say("not enough free memory for {workers} with one batch each", workers=count)
        why = say(
            "each worker needs {own} for its process, {making} while it makes a batch and {batch} to send it. "
            "With the batch in use that is {need}, and {spare} must stay free. {free} are free ({source})",
            **sizes,
        )  # fmt: skip
    elif each.making:
        what = say("not enough free memory for {workers} with the samples of one batch each", workers=count)
        why = say(
            "a worker needs {own} for its process, and had allocated {making} for its first samples when it was "
            "stopped. For all workers that is {need}, and {spare} must stay free. {free} are free ({source})",
            **sizes,
        )  # fmt: skip
    else:
        what = say("not enough free memory for {workers}", workers=count)
        if each.own:
            why = say(
                "each worker needs {own} before it loads a sample: {need} in total, and {spare} must stay free. "
                "{free} are free ({source})",
                **sizes,
            )  # fmt: skip
        else:
            why = say("{free} are free ({source}), and {spare} must stay free beside the workers", **sizes)
    return BudgetTooSmall(
        what, why=why, fix=(*_smaller(each, workers, free, samples), *raise_ram_limit(environment(Host()), None)[:1])
    )


def _smaller(each: Each, workers: int, free: int, samples: int | None) -> list[str]:
    if not each.batch:  # what they need beside their processes is unknown yet
        steps = [say("use fewer workers or a smaller batch")] if each.making else []
        if each.own and (most := most_workers(each, free, workers - 1)):
            steps.append(say("use num_workers={most} or less", most=most))
        return [*steps, say("use num_workers=0: the training process makes the batches")]
    steps = []
    if fewer := most_workers(each, free, workers - 1):
        steps.append(say("num_workers={fewer} fits", fewer=fewer))
    elif fits(each.making + 2 * each.batch, free):
        steps.append(say("num_workers=0 fits: the training process makes the batches"))
    if samples is not None and (less := most_samples(each, free, workers, samples)):
        steps.append(say("batch_size={less} fits with num_workers={workers}", less=less, workers=workers))
    return steps or [say("no number of workers fits")]
