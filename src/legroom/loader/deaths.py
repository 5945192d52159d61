"""Why a worker died: torch says that it did, this adds the reason and what to do.

Covers: signals, exit codes, the OOM counters, wherever torch notices: while a batch is waited for, or in the middle of
the training step, when the signal arrives. Does not cover: deaths of other processes (rescue).
"""

from __future__ import annotations

import re
import signal
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from legroom.advice.remedies import raise_ram_limit
from legroom.errors import BatchLost, WorkerDied
from legroom.probe.environment import environment
from legroom.probe.host import Host
from legroom.probe.memory import memory, ram_pool
from legroom.records import Memory
from legroom.system.child_processes import signal_name
from legroom.units import format_size
from legroom.words import say

_TORCH_SAYS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ?([\d, ]+)\)")


class Crew:
    """The workers of one iterator."""

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self.processes = list(processes)
        self._before = memory(Host())
        _crews[:] = [ref for ref in _crews if ref() is not None] + [weakref.ref(self)]

    @property
    def pids(self) -> set[int]:
        """Their process ids."""
        return {process.pid for process in self.processes if process.pid is not None}

    def died(self, problem: BaseException) -> WorkerDied | None:
        """What torch's error (or a batch that cannot be reached) means; None where no worker of ours has died."""
        said = _TORCH_SAYS.search(str(problem))
        if said is None and not isinstance(problem, BatchLost):
            return None
        named = self.pids if said is None else {int(pid) for pid in said[1].split(",")}
        ended = [(one.pid, one.exitcode) for one in self.processes if one.pid in named]
        dead = [(pid, code) for pid, code in ended if code]
        if not dead:
            return None
        pid, code = dead[0]
        why, fix = explain(code, self._before, memory(Host()), len(self.processes))
        return WorkerDied(_died(pid, code), why=why, fix=fix)


# Without callbacks: torch's error may be raised between any two steps, and one in a callback would be lost.
_crews: list[weakref.ref[Crew]] = []


def explain(code: int, before: Memory, now: Memory, workers: int) -> tuple[str, tuple[str, ...]]:
    """(why, what to do) for an exit code, going by the counters before and now."""
    fewer = say("num_workers={less}, or a smaller batch", less=max(1, workers // 2))
    if code == -signal.SIGKILL:
        kills, first = now.events.oom_kills, before.events.oom_kills
        source = now.events.source
        if kills is None or first is None:
            why = say("SIGKILL came from outside; whether from the OOM killer cannot be told: {source} counts no kills",
                      source=source)  # fmt: skip
            return why, (fewer, say("see whom the kernel killed:\ndmesg | grep -i 'killed process'"))
        if kills > first:
            pool = ram_pool(now)
            free = say("unknown") if pool.free is None else format_size(pool.free)
            size = say("unknown") if pool.size is None else format_size(pool.size)
            why = say("the kernel's OOM killer: oom_kill in {source} rose from {first} to {kills}; "
                      "{free} of {size} of memory are free now", source=source, first=first, kills=kills, free=free,
                      size=size)  # fmt: skip
            return why, (
                fewer,
                say("memory_budget='256MB' bounds what is on its way"),
                *raise_ram_limit(environment(Host()), None)[:1],
            )
        why = say("somebody sent SIGKILL; it was not the kernel's OOM killer: oom_kill in {source} is still {kills}",
                  source=source, kills=kills)  # fmt: skip
        return why, (say("look at who kills here: a scheduler, systemd-oomd, earlyoom, a person"),)
    if code == -signal.SIGBUS:
        room, shm = Host().disk_space("/dev/shm"), say("unknown")
        if room is not None:
            shm = say("{free} free of {size}", free=format_size(room.free), size=format_size(room.size))
        why = say("SIGBUS: it touched a page of shared memory or of a mapped file that could not be given; "
                  "/dev/shm has {shm}", shm=shm)  # fmt: skip
        return why, (
            say("if the dataset uses /dev/shm itself, give it room:\ndf -h /dev/shm"),
            say("if it maps files, see that nobody truncates them, and that their disk is not full"),
        )
    if code < 0:
        why = say(
            "the worker's own code, or a library it uses, was stopped by {name}", name=signal_name(-code)
        )
        return why, (
            say("see where:\npython -X faulthandler …"),
            say("num_workers=0 runs the dataset in this process"),
        )
    why = say("the dataset, its transforms or worker_init_fn ended the process with status {code}", code=code)
    return why, (say("num_workers=0 shows where"),)


def _died(pid: int | None, code: int) -> str:
    """In torch's words, which people and programs look for."""
    if code < 0:
        text = signal.strsignal(-code) if -code in signal.valid_signals() else None
        return say("DataLoader worker (pid {pid}) is killed by signal: {text} ({name})", pid=pid, text=text or -code,
                   name=signal_name(-code))  # fmt: skip
    return say("DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}", pid=pid, code=code)


def listen() -> None:
    """Add the reason also to the error that torch raises in the middle of other work, from its SIGCHLD handler."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return
    before = signal.getsignal(signal.SIGCHLD)
    if callable(before) and not isinstance(before, _Listener):
        signal.signal(signal.SIGCHLD, _Listener(before))


class _Listener:
    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before(number, frame)
        except RuntimeError as problem:
            died = _death(problem)
            if died is None:
                raise
            try:
                raise died from problem
            finally:
                del died  # else the error, and with it the iterator and its workers, lives until garbage is collected


def _death(problem: BaseException) -> WorkerDied | None:
    """What torch's error means, of whichever iterator."""
    for ref in _crews:
        crew = ref()
        died = None if crew is None else crew.died(problem)
        if died is not None:
            return died
    return None
