"""Why a worker crashed: adds the reason and what to do to torch's error.

Reads the signal, the exit code and the OOM counters, wherever torch notices the crash: while the loop waits for a
batch, or in the middle of a training step, when the signal arrives.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from legroom.advice.fix_commands import raise_ram_limit
from legroom.errors import BatchLost, WorkerDied
from legroom.loader.dataloader.worker_shutdown import IMPORTED_MAIN
from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory, ram_pool
from legroom.probe.runtime_environment import environment
from legroom.records.machine import Memory
from legroom.system.processes_and_threads import signal_name
from legroom.units import format_size

_TORCH_TEXT = re.compile(r"DataLoader worker \(pid(?:\(s\))? ?([\d, ]+)\)")


class WorkerGroup:
    """The workers of one iterator; ``before``: the memory and its OOM counters before they were started."""

    def __init__(self, processes: Sequence[BaseProcess], method: str = "fork", before: Memory | None = None) -> None:
        self.processes = list(processes)
        self._method = method
        self._before = before or memory(Host())
        _groups[:] = [ref for ref in _groups if ref() is not None] + [weakref.ref(self)]

    @property
    def pids(self) -> set[int]:
        """Their process ids."""
        return {process.pid for process in self.processes if process.pid is not None}

    def explain(self, problem: BaseException) -> WorkerDied | None:
        """The reason for torch's error, or for a batch that cannot be opened; None if no worker of these crashed."""
        found = _TORCH_TEXT.search(str(problem))
        if found is None and not isinstance(problem, BatchLost):
            return None
        named = self.pids if found is None else {int(pid) for pid in found[1].split(",")}
        crashed = [(one.pid, one.exitcode) for one in self.processes if one.pid in named and one.exitcode]
        if not crashed:
            return None
        pid, code = crashed[0]
        assert code is not None
        why, fix = explain(code, self._before, memory(Host()), len(self.processes), self._method)
        return WorkerDied(_what(pid, code), why=why, fix=fix)


# Without callbacks: torch's error may be raised between any two steps, and one in a callback would be lost.
_groups: list[weakref.ref[WorkerGroup]] = []


def explain_start(problem: BaseException, method: str) -> WorkerDied | None:
    """The reason why a worker ended before it had received the dataset; None if that is not what happened."""
    if method == "fork" or not isinstance(problem, (BrokenPipeError, ConnectionError, EOFError)):
        return None
    return WorkerDied(
        say("a DataLoader worker ended while it was starting"),
        why=say("it ended before it had received the dataset. With start method {method!r}, a worker first imports the "
                "main script, and so runs everything outside of an if __name__ block", method=method),
        fix=(*_guard_main(), say("if the worker printed an error above, fix that")),
    )  # fmt: skip


def importing_main_message(method: str) -> str:
    """What a worker prints that would start the training again, because it imports the main script."""
    why, fix = _importing_main(method)
    return "legroom: " + str(WorkerDied(say("the main script starts DataLoader workers while it is imported"), why=why,
                                        fix=fix))  # fmt: skip


def _importing_main(method: str) -> tuple[str, tuple[str, ...]]:
    why = say("with start method {method!r}, a worker first imports the main script. That import starts the training "
              "again, because the script does not check __name__", method=method)  # fmt: skip
    return why, (*_guard_main(), say("or, on Linux, pass multiprocessing_context='fork', which imports nothing"))


def _guard_main() -> tuple[str, ...]:
    return (
        say("put the training code of the main script into a function, and call it at the end:\n"
            "if __name__ == \"__main__\":\n    main()"),
    )  # fmt: skip


def explain(code: int, before: Memory, now: Memory, workers: int, method: str = "fork") -> tuple[str, tuple[str, ...]]:
    """(why, what to do) for an exit code, judged by the OOM counters before and now, and by the start method."""
    fewer = say("use num_workers={less} or a smaller batch", less=max(1, workers // 2))
    if code == -signal.SIGKILL:
        kills, first = now.events.oom_kills, before.events.oom_kills
        source = now.events.source
        if kills is None or first is None:
            why = say("another process or the kernel sent SIGKILL. Whether it was the OOM killer is unknown: "
                      "{source} has no counter", source=source)  # fmt: skip
            return why, (fewer, say("find out which process the kernel killed:\ndmesg | grep -i 'killed process'"))
        if kills > first:
            pool = ram_pool(now)
            free = say("unknown") if pool.free is None else format_size(pool.free)
            size = say("unknown") if pool.size is None else format_size(pool.size)
            why = say("the kernel's OOM killer: oom_kill in {source} rose from {first} to {kills}. "
                      "{free} of {size} of memory are free now", source=source, first=first, kills=kills, free=free,
                      size=size)  # fmt: skip
            return why, (
                fewer,
                say("set memory_budget='256MB' to limit the batches on their way"),
                *raise_ram_limit(environment(Host()), None)[:1],
            )
        why = say("another process sent SIGKILL. It was not the kernel's OOM killer: oom_kill in {source} is still "
                  "{kills}", source=source, kills=kills)  # fmt: skip
        return why, (say("find out which program kills processes here: a scheduler, systemd-oomd, earlyoom, a user"),)
    if code == -signal.SIGBUS:
        space, shm = Host().disk_space("/dev/shm"), say("unknown")
        if space is not None:
            shm = say("{free} free of {size}", free=format_size(space.free), size=format_size(space.size))
        why = say("SIGBUS: it used a page of shared memory or of a mapped file that could not be allocated. "
                  "/dev/shm: {shm}", shm=shm)  # fmt: skip
        return why, (
            say("if the dataset uses /dev/shm itself, check its free space:\ndf -h /dev/shm"),
            say("if it maps files, check that no process truncates them and that their disk is not full"),
        )
    if code < 0:
        why = say("the dataset's code, or a library it uses, was stopped by {name}", name=signal_name(-code))
        return why, (
            say("print where it crashed:\npython -X faulthandler …"),
            say("num_workers=0 runs the dataset in this process"),
        )
    if code == IMPORTED_MAIN and method != "fork":
        return _importing_main(method)
    if method != "fork" and code == 1 and (script := _main_without_file()) is not None:
        why = say("with start method {method!r}, a worker first imports the main script, and this one is not a file: "
                  "{script}", method=method, script=script)  # fmt: skip
        return why, (
            say("save the script in a file, and run that"),
            say("or, on Linux, pass multiprocessing_context='fork', which imports nothing"),
        )
    if method != "fork" and code == 1:
        why = say("it failed while it was starting, or the dataset's code called exit(1). With start method "
                  "{method!r}, a worker imports the main script and unpickles the dataset first",
                  method=method)  # fmt: skip
        return why, (
            say("read the worker's own error above"),
            say("define the dataset's class and its functions at the top level of a module, not below "
                "if __name__ == \"__main__\""),
            say("num_workers=0 shows where the dataset's code ends the process"),
        )  # fmt: skip
    why = say("the dataset, its transforms or worker_init_fn ended the process with status {code}", code=code)
    return why, (say("num_workers=0 shows where"),)


def _main_without_file() -> str | None:
    """The name that the main script has instead of a file: ``<stdin>``; None if workers can import it."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script is None or getattr(main, "__spec__", None) is not None or os.path.exists(script):
        return None
    return str(script)


def _what(pid: int | None, code: int) -> str:
    """In torch's words, which people and programs search for."""
    if code < 0:
        text = signal.strsignal(-code) if -code in signal.valid_signals() else None
        return say("DataLoader worker (pid {pid}) is killed by signal: {text} ({name})", pid=pid, text=text or -code,
                   name=signal_name(-code))  # fmt: skip
    return say("DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}", pid=pid, code=code)


def explain_sigchld() -> None:
    """Add the reason also to the error that torch's SIGCHLD handler raises in the middle of other code."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return
    before = signal.getsignal(signal.SIGCHLD)
    if callable(before) and not isinstance(before, _SigchldHandler):
        signal.signal(signal.SIGCHLD, _SigchldHandler(before))


class _SigchldHandler:
    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before(number, frame)
        except RuntimeError as problem:
            explained = _explained(problem)
            if explained is None:
                raise
            try:
                raise explained from problem
            finally:
                del explained  # else the error, and with it the iterator and its workers, lives until collected


def _explained(problem: BaseException) -> WorkerDied | None:
    """The reason for torch's error, of any iterator."""
    for ref in _groups:
        group = ref()
        found = None if group is None else group.explain(problem)
        if found is not None:
            return found
    return None
