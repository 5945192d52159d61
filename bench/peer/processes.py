"""Clients and daemons of one trial: starting, asking, weighing and ending them.

Covers: processes. Does not cover: what is measured with them (trial.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peer.protocol import Place

_SUBREAPER = 36


class Gone(Exception):
    """A client ended, or did not answer in time."""


class Missing(Exception):
    """The contender does not import."""


class Remote:
    """A client process (client.py)."""

    def __init__(self, name: str, place: Place, log: Path) -> None:
        command = [sys.executable, "-m", "peer.client", name]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*command, *map(str, (place.source, place.folder, place.memory))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        self._rest = b""

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")

    def answer(self, seconds: float = 180) -> dict[str, Any]:
        """What it says next; raises Gone where it says nothing, or an error."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise Gone(f"no answer within {seconds:g} s")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise Gone("it ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "missing" in found:
            raise Missing(found["missing"])
        if "error" in found:
            raise Gone(found["error"])
        return found

    def ask(self, *words: str) -> dict[str, Any]:
        """One after the other; all their answers as one."""
        found: dict[str, Any] = {}
        for word in words:
            self.tell(word)
            found |= self.answer()
        return found

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def adopt() -> None:
    """Become the parent of whatever our descendants leave, so that nothing of a trial is out of sight."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def start_daemon(command: list[str], awaited: str, log: Path) -> None:
    """Start it, and wait until it prints ``awaited`` or a file of that name is there."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not (os.path.exists(awaited) or awaited in log.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise Gone(f"{command[0]} did not start: {log.read_text(errors='replace')[-500:]}")
        time.sleep(0.05)


def end_all() -> None:
    """End every descendant: politely, then not."""
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience
        for pid in descendants():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        while descendants() and time.monotonic() < deadline:
            time.sleep(0.05)


def descendants() -> list[int]:
    """Every living process below this one."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry)] = int(fields[1])
    found, fresh = [], [os.getpid()]
    while fresh:
        fresh = [pid for pid, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def weigh(pids: Iterable[int]) -> dict[str, int]:
    """PSS and page tables of these processes, in bytes."""
    pss = tables = 0
    for pid in pids:
        try:
            pss += _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")
            tables += _field(Path(f"/proc/{pid}/status"), "VmPTE:")
        except OSError:
            continue  # ended meanwhile
    return {"pss": pss, "page_tables": tables}


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0
