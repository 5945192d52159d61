"""What this process has to itself, and what is free for a measurement.

Covers: its private memory, shared-memory files left out; the room for a few batches. Does not cover: other processes
(probe.process), whether a training fits (budget).
"""

from __future__ import annotations

import multiprocessing
import warnings
from typing import Any

from legroom.probe.host import Host
from legroom.probe.memory import free_memory
from legroom.probe.shm import shm_space

_NOT_ITS_OWN = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")


def private_bytes() -> int | None:
    """Memory that only this process has: what a further worker like it would cost; None where it cannot be read."""
    total, counted = 0, True
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("Private_"):
                    total += int(line.split()[1]) * 1024 if counted else 0
                elif line[0] in "0123456789abcdef":  # the head of a mapping; its name is the sixth word
                    counted = not " ".join(line.split()[5:]).startswith(_NOT_ITS_OWN)
    except (OSError, ValueError, IndexError):
        return None
    return total


def idle_worker() -> int | None:
    """What a forked worker takes before it draws a sample, asked of a real one; None where that cannot be had."""
    from torch.utils.data import DataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 3.12 on warns of forking with threads
        asked: Any = range(2)
        try:
            held: list[int | None] = list(
                DataLoader(asked, num_workers=1, collate_fn=_held, multiprocessing_context="fork")
            )
        except RuntimeError:
            return None
        return held[-1]  # by its second batch it has written what it will write


def _held(_: object) -> int | None:
    return private_bytes()


def start_method(context: Any = None) -> str:
    """How workers will start; asked so that nothing is settled by asking."""
    asked: Any = multiprocessing if context is None else context
    return asked.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def free_bytes(kind: str) -> int | None:
    """Room for batches of that kind of loader: RAM, and for torch's /dev/shm too; None where neither is known."""
    host = Host()
    rooms = [free_memory(host)[0]]
    if kind == "torch":
        rooms.append(shm_space(host, "/dev/shm")[2])
    known = [room for room in rooms if room is not None]
    return min(known) if known else None
