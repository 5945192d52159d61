"""What a script says of itself: its components, its phase, its steps.

Covers: gathering it in the script, from any thread; the rate of steps. Does not cover: carrying it to a watch in
another process (board.py), the thread that samples (script.py).
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legroom.model import Mark, Said
from legroom.probe.host import Host
from legroom.probe.process import started_at
from legroom.system.atomic_file import replace_file
from legroom.words import say

_MOST_MARKS = 256  # between two samples
_RATE_OVER = 10  # looks at the count of steps


@dataclass
class ScriptAnnotations:
    """Filled by the script, read at every sample."""

    components: dict[str, int] = field(default_factory=dict)
    phase: str | None = None
    steps: int | None = None
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def mark(self, text: str) -> None:
        """What begins now."""
        with self._lock:
            self.phase = str(text)
            self.marks.append(Mark(time.time(), self.phase))

    def component(self, **sizes: int | None) -> None:
        """Bytes on the host by component; None takes one back."""
        for name, size in sizes.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
                raise TypeError(
                    say("component {name}: a whole number of bytes, not {size!r}", name=name, size=size)
                )
        with self._lock:
            for name, size in sizes.items():
                if size is None:
                    self.components.pop(name, None)
                else:
                    self.components[name] = size

    def step(self, count: int = 1) -> None:
        """So many steps were done."""
        with self._lock:
            self.steps = (self.steps or 0) + count

    def said(self) -> Said:
        """Everything said so far, with the marks since this was last asked."""
        with self._lock:
            marks = tuple(self.marks)
            self.marks.clear()
            return Said(dict(self.components), self.phase, marks, self.steps)


@dataclass
class StepRate:
    """Steps a second, over the last few looks at a count."""

    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_OVER + 1))

    def at(self, clock: float, steps: int | None) -> float | None:
        """The rate now; None where nobody counts, or not for long enough."""
        if steps is None:
            return None
        if self._seen and steps < self._seen[-1][1]:
            self._seen.clear()  # counted anew: a restart
        self._seen.append((clock, steps))
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        return (now - before) / (last - first) if last > first else None


SCHEMA = "legroom.said/1"
_LONGEST = 1 << 16
_MARKS_KEPT = 32


def annotation_directory(host: Host, *, create: bool = False) -> Path | None:
    """The directory, or None where there is none to be trusted."""
    uid = host.uid
    if uid is None or not host.live:
        return None
    runtime = host.env.get("XDG_RUNTIME_DIR")
    path = Path(runtime, "legroom-said") if runtime else Path(tempfile.gettempdir(), f"legroom-said-{uid}")
    try:
        if create:
            path.mkdir(mode=0o700, exist_ok=True)
        facts = os.lstat(path)
    except OSError:
        return None
    ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == uid and not facts.st_mode & 0o077
    return path if ours else None


class AnnotationFile:
    """This process's file; gone when it is closed, or cleared away by the next one if it was killed."""

    def __init__(self, host: Host) -> None:
        self._pid = os.getpid()
        place = annotation_directory(host, create=True)
        self._path = None if place is None else place / f"{self._pid}.json"
        self._marks: list[Mark] = []
        self._last = ""
        if place is not None:
            _clear_the_dead(place)

    def write(self, said: Said) -> None:
        """Replace what is there, if it changed."""
        if self._path is None:
            return
        self._marks = [*self._marks, *said.marks][-_MARKS_KEPT:]
        text = json.dumps(
            {
                "schema": SCHEMA,
                "components": dict(said.components),
                "phase": said.phase,
                "marks": [[mark.when, mark.text] for mark in self._marks],
                "steps": said.steps,
            }
        )
        if text == self._last:
            return
        try:
            replace_file(self._path, text)
            self._last = text
        except OSError:
            self._path = None  # the directory is gone or full: heard by our own watch only

    def close(self) -> None:
        """Take it away; a forked child leaves its parent's alone."""
        if self._path is not None and os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)


@dataclass
class AnnotationReader:
    """Reads the boards of watched processes, and puts them together."""

    host: Host
    _pace: StepRate = field(default_factory=StepRate)
    _heard: float | None = None  # the time of the newest mark that was passed on

    def said(self, clock: float, pids: Iterable[int]) -> Said:
        """What the scripts among those processes say: components added up, steps of the furthest, its phase."""
        place = annotation_directory(self.host)
        boards = [] if place is None else [one for pid in pids if (one := self._read(place, pid)) is not None]
        components: dict[str, int] = {}
        for board in boards:
            for name, size in board.components.items():
                components[name] = components.get(name, 0) + size
        furthest = max(boards, key=lambda board: board.steps or 0, default=Said())
        marks = sorted({mark for board in boards for mark in board.marks}, key=lambda mark: mark.when)
        new = tuple(mark for mark in marks if self._heard is not None and mark.when > self._heard)
        self._heard = max([self._heard or 0.0, *(mark.when for mark in marks)])
        return Said(components, furthest.phase, new, furthest.steps, self._pace.at(clock, furthest.steps))

    def _read(self, place: Path, pid: int) -> Said | None:
        try:
            with open(place / f"{pid}.json", "rb") as file:
                written = os.fstat(file.fileno()).st_mtime
                data = json.loads(file.read(_LONGEST))
        except (OSError, ValueError, RecursionError):
            return None
        began = started_at(self.host, pid)
        if began is not None and written < began - 1.0:
            return None  # of a process that had this number before
        return _parsed(data)


def _parsed(data: Any) -> Said | None:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return None
    try:
        return Said(
            {str(name): int(size) for name, size in data["components"].items()},
            None if data["phase"] is None else str(data["phase"]),
            tuple(Mark(float(when), str(text)) for when, text in data["marks"]),
            None if data["steps"] is None else int(data["steps"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _clear_the_dead(place: Path) -> None:
    for path in place.glob("*.*"):
        pid = path.name.partition(".")[0]  # of PID.json, and of a PID.json.….part
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            path.unlink(missing_ok=True)
