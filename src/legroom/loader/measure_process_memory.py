"""Measures the memory of processes: this one, an idle worker, an interpreter that has only imported torch.

Also reads the memory that is free for workers and for a measurement.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

from legroom.advice.job_settings_to_workload import Demand
from legroom.advice.memory_need import SPARE
from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import free_memory
from legroom.probe.shm import shm_space
from legroom.system.processes_and_threads import prefer_oom_kill
from legroom.units import format_size

_NOT_PRIVATE = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")
_POLL_S = 0.02


def private_bytes() -> int | None:
    """Memory that only this process has, which is what another worker like it needs; None where it cannot be read."""
    total, counted = 0, True
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("Private_"):
                    total += int(line.split()[1]) * 1024 if counted else 0
                elif line[0] in "0123456789abcdef":  # the first line of a mapping; its name is the sixth word
                    counted = not " ".join(line.split()[5:]).startswith(_NOT_PRIVATE)
    except (OSError, ValueError, IndexError):
        return None
    return total


def idle_worker() -> int | None:
    """Private memory of a forked worker before its first sample, measured in a real one; None where that fails."""
    from torch.utils.data import DataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and newer warn of forking with threads
        numbers: Any = range(2)
        try:
            held: list[int | None] = list(
                DataLoader(numbers, num_workers=1, collate_fn=_held, multiprocessing_context="fork")
            )
        except RuntimeError:
            return None
        return held[-1]  # by the second batch the worker has copied the pages that it writes to


def _held(_: object) -> int | None:
    return private_bytes()


def start_method(context: Any = None) -> str:
    """The start method of workers; reading it does not set multiprocessing's default."""
    source: Any = multiprocessing if context is None else context
    return source.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that can still be allocated before the kernel kills a process, and the file that limits them."""

    free: int
    source: str


def free_memory_now() -> FreeMemory | None:
    """Free RAM within all cgroup limits, plus free swap: a machine that swaps is slow, but kills no process."""
    free, source = free_memory(None, with_swap=True)
    return None if free is None else FreeMemory(free, source)


def free_bytes(kind: str) -> int | None:
    """Free memory for batches of that kind of loader: RAM, for torch's also /dev/shm; None where both are unknown."""
    host = Host()
    amounts = [free_memory(host)[0]]
    if kind == "torch":
        amounts.append(shm_space(host, "/dev/shm").free)
    known = [amount for amount in amounts if amount is not None]
    return min(known) if known else None


@dataclass(frozen=True, slots=True)
class BareProcess:
    """Private bytes of a process that has only imported torch; None where they are unknown."""

    process: int | None = None
    forked: int | None = None  # a worker that this process forks
    stopped: bool = False  # for lack of memory: ``process`` is what it had allocated until then

    def worker(self, method: str) -> int | None:
        """A worker with this start method; one that is not forked imports torch itself."""
        return self.forked if method == "fork" else self.process


_bare: list[BareProcess] = []  # once it has been measured


def bare_process(timeout: float = 120.0) -> BareProcess:
    """Measure a child process that imports torch, once in the lifetime of this process, whatever the timeouts."""
    if not _bare:
        found = _measured_process(timeout)
        if found.process is None:  # in more time, it may be known
            return found
        _bare.append(found)
    return _bare[0]


def _measured_process(timeout: float) -> BareProcess:
    """The child is the first that the OOM killer takes, and it is killed here while ``SPARE`` bytes are still free."""
    before = free_memory_now()
    line = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import report_bare_process as report; report()",
    ]
    try:
        child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return BareProcess()
    with child:
        try:
            until = time.monotonic() + timeout
            while child.poll() is None and time.monotonic() < until:
                now = free_memory_now()
                if before is not None and now is not None and now.free < SPARE:
                    return BareProcess(process=max(0, before.free - now.free), stopped=True)
                time.sleep(_POLL_S)
        finally:
            child.kill()
        answer = child.stdout.read() if child.stdout is not None and child.returncode == 0 else b""
    try:
        return BareProcess(**json.loads(answer))
    except (ValueError, TypeError):
        return BareProcess()


def report_bare_process() -> None:
    """In the child: import torch and print what this process, and a worker that it forks, have allocated."""
    prefer_oom_kill()
    import torch.utils.data  # noqa: F401  the import is what is measured

    forked = idle_worker() if sys.platform == "linux" else None
    sys.stdout.write(json.dumps({"process": private_bytes(), "forked": forked}))


def with_bare_processes(demand: Demand, timeout: float) -> Demand:
    """The demand with the measured memory of processes that have only imported torch; unchanged if that fails.

    A dataset or a model adds to them: ``--dataset`` measures the first, ``--process-ram`` gives the second.
    """
    method = demand.multiprocessing_context or start_method()
    if "torch" in sys.modules:  # this process is the training process, and counted as used already
        worker = idle_worker() if method == "fork" else bare_process(timeout).worker(method)
        source = say("measured: a worker of this process, started by {method}", method=method)
        return demand if worker is None else replace(demand, worker_ram=worker, worker_ram_source=source)
    found = bare_process(timeout)
    worker = found.worker(method)
    if worker is not None:
        source = say("measured: a worker started by {method}, of a process that only imported torch", method=method)
        demand = replace(demand, worker_ram=worker, worker_ram_source=source)
    if demand.process_ram is not None or found.process is None:
        return demand
    process, source = found.process, say("measured: a process that only imported torch")
    if found.stopped:  # it needs more than was free, by an unknown amount
        process += SPARE
        source = say(
            "measured: a process that imports torch was stopped at {taken}; {spare} must stay free",
            taken=format_size(found.process), spare=format_size(SPARE),
        )  # fmt: skip
    return replace(demand, process_ram=process, process_ram_source=source)
