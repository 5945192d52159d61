"""Who uses a card: NVML's list of processes, joined with the names of those that can be seen here.

Covers: compute, graphics and MPS clients, the memory of each where the driver tells it, their commands.
Does not cover: the card itself (gpu.py), what else a process holds (process.py).

A pid of NVML's may be the host's while we look from inside a container: a number without a process has no
command, and a number that a stranger bears here gets none either.
"""

from __future__ import annotations

from typing import Any

from legroom.model import GpuProcess
from legroom.probe.host import Host
from legroom.probe.nvml import NvmlTrouble, running
from legroom.probe.place import in_initial_namespace
from legroom.probe.process import plain, process_at
from legroom.words import say

_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE, where the bindings let it through


def processes_on(host: Host, nvml: Any, handle: Any, reasons: list[str]) -> tuple[GpuProcess, ...] | None:
    """Everybody on a card, by pid; None where that cannot be told. Why something is missing goes to ``reasons``."""
    try:
        found = running(nvml, handle, "Compute")
    except NvmlTrouble as trouble:
        reasons.append(say("processes unknown: {trouble}", trouble=trouble))
        return None
    for which in ("Graphics", "MPSCompute"):
        try:
            found += running(nvml, handle, which)
        except NvmlTrouble:
            continue  # cards without graphics, drivers without MPS
    held: dict[int, int | None] = {}
    for process in found:
        amount = _amount(process.usedGpuMemory)
        before = held.get(process.pid)
        # A process in two lists is listed with its whole memory in each.
        held[process.pid] = before if amount is None else max(amount, before or 0)
    listed = tuple(GpuProcess(pid, held[pid], _command(host, pid)) for pid in sorted(held))
    _say_what_is_missing(host, listed, reasons)
    return listed


def _amount(used: int | None) -> int | None:
    # A process on a card holds a context at least; some drivers say 0 inside a container, where they cannot tell.
    return None if not used or used == _NOT_AVAILABLE else used


def _command(host: Host, pid: int) -> str | None:
    if host.platform != "linux":
        return _command_elsewhere(pid) if host.live else None
    process = process_at(host, pid)
    if process is None:
        return None
    if in_initial_namespace(host, "pid") is False:
        # Some drivers give the host's pids here, and a stranger may bear the number. A user of a card maps it.
        maps = host.text(f"/proc/{pid}/maps") or ""
        if "/dev/nvidia" not in maps and "libcuda" not in maps:
            return None
    return process.command


def _command_elsewhere(pid: int) -> str | None:
    import psutil

    try:
        return plain(psutil.Process(pid).name())
    except (psutil.Error, ValueError, OverflowError):
        return None


def _say_what_is_missing(host: Host, listed: tuple[GpuProcess, ...], reasons: list[str]) -> None:
    if any(process.used is None for process in listed):
        reasons.append(
            say("Windows (WDDM) does not tell NVML what each process holds")
            if host.platform == "win32"
            else say("the driver does not say here what each process holds")
        )
    hidden = sum(1 for process in listed if process.command is None)
    if hidden:
        reasons.append(
            say(
                "{hidden} of {count} pids match no process that can be seen here: NVML's pids are the host's",
                hidden=hidden,
                count=len(listed),
            )
        )
