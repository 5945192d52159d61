"""Annotations that a training script makes: phase marks, bytes by component, steps.

`legroom.watch` collects them in the script and writes them to one small file per process. A `legroom watch` in another
process reads these files.

They are in ``$XDG_RUNTIME_DIR/legroom-said`` or ``legroom-said-<uid>`` in the temporary directory. A directory that
belongs to another user, is a link, or is open to others is not used.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legroom.monitor.watch_log import from_json
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import started_at
from legroom.records.watch_sample import Annotations, GrowthRow, Mark, ProcessSteps
from legroom.system.argument_checks import check_integer
from legroom.system.atomic_file import replace_file

SCHEMA = "legroom.said/1"
GROWING_SCHEMA = "legroom.growing/1"
STEPS_SCHEMA = "legroom.steps/1"
_MOST_MARKS = 256  # between two samples
_MARKS_KEPT = 32  # in the file
_LONGEST_TEXT = 1000  # characters of a mark in the file
_LONGEST_FILE = 1 << 20  # bytes; a character takes 12 at most
_LONGEST_WRITE = 60.0  # seconds
_RATE_OVER = 10  # samples over which the step rate is measured


@dataclass
class AnnotationCollector:
    """Collects annotations in the script, from any thread."""

    components: dict[str, int] = field(default_factory=dict)
    phase: str | None = None
    steps: int | None = None
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def mark(self, text: str) -> None:
        """Set the phase that begins now."""
        with self._lock:
            self.phase = str(text)
            self.marks.append(Mark(time.time(), self.phase))

    def component(self, **sizes: int | None) -> None:
        """Set the host memory of components in bytes; None removes one."""
        checked = {name: None if size is None else check_integer(name, size, 0) for name, size in sizes.items()}
        with self._lock:
            for name, size in checked.items():
                if size is None:
                    self.components.pop(name, None)
                else:
                    self.components[name] = size

    def step(self, count: int = 1) -> None:
        """Add to the number of steps."""
        if type(count) is not int or count < 0:  # called in every step
            count = check_integer("count", count, 0)
        with self._lock:
            self.steps = (self.steps or 0) + count

    def collect(self) -> Annotations:
        """All annotations so far, with the marks since the last call."""
        with self._lock:
            marks = tuple(self.marks)
            self.marks.clear()
            return Annotations(dict(self.components), self.phase, marks, self.steps)


@dataclass
class StepRate:
    """Steps per second over the last few samples."""

    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_OVER + 1))

    def at(self, clock: float, steps: int | None) -> float | None:
        """The rate now; None where steps are not counted, or before the second sample."""
        if steps is None:
            return None
        if self._seen and steps < self._seen[-1][1]:
            self._seen.clear()  # the script was restarted
        self._seen.append((clock, steps))
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        return (now - before) / (last - first) if last > first else None


def annotation_directory(host: Host, *, create: bool = False) -> Path | None:
    """The directory of the annotation files; None where there is none that only this user can write."""
    uid = host.uid
    if uid is None or not host.live:
        return None
    runtime = host.env.get("XDG_RUNTIME_DIR")
    path = Path(runtime, "legroom-said") if runtime else Path(tempfile.gettempdir(), f"legroom-said-{uid}")
    try:
        if create:
            path.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == uid and not status.st_mode & 0o077
    return path if private else None


class AnnotationFile:
    """The annotation file of this process; removed on close, or by the next process if this one is killed."""

    def __init__(self, host: Host) -> None:
        self._pid = os.getpid()
        self._directory = annotation_directory(host, create=True)
        self._marks: list[Mark] = []
        self._written: dict[str, Any] = {}
        if self._directory is not None:
            _remove_files_of_dead_processes(self._directory)

    def write(self, annotations: Annotations) -> None:
        """Replace the file if anything changed."""
        if self._directory is None:
            return
        self._marks = [*self._marks, *annotations.marks][-_MARKS_KEPT:]
        data = {
            "components": dict(annotations.components),
            "phase": annotations.phase and annotations.phase[:_LONGEST_TEXT],
            "marks": [[mark.when, mark.text[:_LONGEST_TEXT]] for mark in self._marks],
            "steps": annotations.steps,
        }
        if data == self._written:
            return
        try:
            _write(self._directory / f"{self._pid}.json", SCHEMA, data)
            self._written = data
        except OSError:
            self._directory = None  # it is gone or full: only the script's own watch has the annotations

    def close(self) -> None:
        """Remove the file; a forked child does not remove its parent's."""
        if self._directory is not None and os.getpid() == self._pid:
            (self._directory / f"{self._pid}.json").unlink(missing_ok=True)


def write_growing(directory: Path, pid: int, sites: Sequence[Mapping[str, Any]]) -> None:
    """Tell a `legroom watch` which lines make this process grow; OSError where it cannot be written."""
    _write(directory / f"{pid}.growing.json", GROWING_SCHEMA, {"sites": list(sites)})


def write_steps(directory: Path, pid: int, steps: int) -> None:
    """Tell a `legroom watch` how many steps this process has made; OSError where it cannot be written."""
    _write(directory / f"{pid}.steps.json", STEPS_SCHEMA, {"steps": steps})


def _write(path: Path, schema: str, data: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps({"schema": schema, "namespace": _pid_namespace(), **data}))


def _pid_namespace() -> str | None:
    """Which processes the pid in the file's name counts: containers may share the directory, not the numbers."""
    return Host().link("/proc/self/ns/pid")


@dataclass
class AnnotationReader:
    """Reads the annotation files of watched processes and combines them."""

    host: Host
    _step_rate: StepRate = field(default_factory=StepRate)
    _newest_mark: float | None = None  # the time of the newest mark that was returned

    def read(self, clock: float, pids: Collection[int]) -> Annotations:
        """Components added up; steps and phase of the process with the most steps; marks of all."""
        files = self._files(set(pids))
        by_pid = {pid: one for pid in pids if (one := _parsed(files.get((pid, SCHEMA)))) is not None}
        found = list(by_pid.values())
        components: dict[str, int] = {}
        for one in found:
            for name, size in one.components.items():
                components[name] = components.get(name, 0) + size
        furthest = max(found, key=lambda one: one.steps or 0, default=Annotations())
        marks = sorted({mark for one in found for mark in one.marks}, key=lambda mark: mark.when)
        new = tuple(mark for mark in marks if self._newest_mark is not None and mark.when > self._newest_mark)
        self._newest_mark = max([self._newest_mark or 0.0, *(mark.when for mark in marks)])
        rate = self._step_rate.at(clock, furthest.steps)
        growing = tuple(row for pid in pids for row in _growing(files.get((pid, GROWING_SCHEMA)), pid))
        steps: list[ProcessSteps] = []
        for pid in pids:
            count = by_pid[pid].steps if pid in by_pid else None
            if count is None:  # else it counts them itself, with legroom.watch
                count = files.get((pid, STEPS_SCHEMA), {}).get("steps")
            if isinstance(count, int):
                steps.append(ProcessSteps(pid, count))
        return Annotations(components, furthest.phase, new, furthest.steps, rate, growing, tuple(steps))

    def _files(self, pids: set[int]) -> dict[tuple[int, str], dict[str, Any]]:
        """What these processes wrote, by pid and schema."""
        directory = annotation_directory(self.host)
        try:
            names = [] if directory is None else os.listdir(directory)
        except OSError:
            return {}
        found = {}
        for path in (Path(directory or "", name) for name in names if name.endswith(".json")):
            pid = path.name.partition(".")[0]
            if pid.isdecimal() and int(pid) in pids and (data := self._load(path, int(pid))) is not None:
                found[int(pid), str(data.get("schema"))] = data
        return found

    def _load(self, path: Path, pid: int) -> dict[str, Any] | None:
        """The content of a file that this very process wrote; None if there is none."""
        try:
            with open(path, "rb") as file:
                written = os.fstat(file.fileno()).st_mtime
                data = json.loads(file.read(_LONGEST_FILE))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(data, dict) or data.get("namespace") not in (None, _pid_namespace()):
            return None
        started = started_at(self.host, pid)
        return None if started is not None and written < started - 1.0 else data  # of an earlier one with this pid


def _growing(data: dict[str, Any] | None, pid: int) -> list[GrowthRow]:
    """The lines of code that make that process grow, where it runs under `legroom leak`."""
    try:
        return [] if data is None else [from_json(GrowthRow, {**row, "pid": pid}) for row in data["sites"]]
    except (KeyError, TypeError, ValueError):
        return []


def _parsed(data: dict[str, Any] | None) -> Annotations | None:
    if data is None:
        return None
    try:
        return Annotations(
            {str(name): int(size) for name, size in data["components"].items()},
            None if data["phase"] is None else str(data["phase"]),
            tuple(Mark(float(when), str(text)) for when, text in data["marks"]),
            None if data["steps"] is None else int(data["steps"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _remove_files_of_dead_processes(directory: Path) -> None:
    ours = _pid_namespace()
    for path in directory.glob("*.*"):
        pid = path.name.partition(".")[0]  # of PID.json, and of a PID.json.….part
        if not pid.isdecimal() or Path(f"/proc/{pid}").exists() or not Path("/proc/self").exists():
            continue
        try:
            if path.suffix == ".part":
                other = time.time() - path.stat().st_mtime < _LONGEST_WRITE  # it may be being written
            else:
                data = json.loads(path.read_bytes())
                other = isinstance(data, dict) and data.get("namespace") not in (None, ours)
        except ValueError:
            other = False
        except OSError:
            continue
        if not other:
            path.unlink(missing_ok=True)
