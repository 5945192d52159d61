"""The machine that is read: files below a root, and the system calls that files cannot answer.

Live, below another root (``/host`` in a container), or a recording: a directory tree with a ``recording.json`` at its
top, which answers the system calls::

    {"env": {...}, "platform": "linux", "uid": 1000, "groups": ["sudo"], "affinity": 16,
     "rlimits": {"nofile": [1024, 4096], "memlock": [65536, 65536]}, "kernel": "6.8.0",
     "statvfs": {"/dev/shm": [size, free, used]}, "stat": {"/dev/shm": [mode, uid]}, "cwd": "/home/me",
     "vmstat_later": {"pswpin": 0, "pswpout": 0}, "interval": 0.1, "now": 1760000000.0}

(``used`` may be left out: size less free. ``vmstat_later`` is /proc/vmstat again after ``interval`` seconds.)

A missing answer is None and never an exception; ``why`` gives the reason.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from legroom.errors import NoSuchRoot
from legroom.messages import say
from legroom.system.lazy_and_optional_imports import import_lock

UNLIMITED = -1  # an unlimited rlimit
_MOST = 1 << 64


class DiskSpace(NamedTuple):
    """A filesystem's bytes: total, available to this user, used by files."""

    size: int
    free: int
    used: int


def _count(text: str, unit: int = 1) -> int | None:
    """A number of bytes, pages or events; None for other text and for more than any counter of the kernel."""
    try:
        value = int(text) * unit
    except ValueError:
        return None
    return value if 0 <= value < _MOST else None


@dataclass(frozen=True)
class Host:
    """One machine: live at ``/``, or the files below another root."""

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    platform: str = sys.platform
    recording: Mapping[str, Any] | None = None

    @classmethod
    def at(cls, root: str | Path = "/") -> Host:
        """The host below ``root``: a recording if there is one, else live files."""
        root = Path(root)
        if not root.is_dir():
            raise NoSuchRoot(
                say("cannot read a machine from {root}", root=root),
                why=say("does not exist") if not root.exists() else say("not a directory"),
                fix=(say("pass a directory that contains proc/ and sys/, such as / or /host"),),
            )
        notes = root / "recording.json"
        if not notes.is_file():
            return cls(root=root)
        try:
            recording = json.loads(notes.read_text(encoding="utf-8"))
            if not isinstance(recording, dict):
                raise ValueError("not an object")
        except (OSError, ValueError) as problem:
            raise NoSuchRoot(
                say("cannot read the recording in {root}", root=root),
                why=f"recording.json: {problem}",
                fix=(say("record the machine again, or remove recording.json to read only the files"),),
            ) from problem
        return cls(
            root=root, env=recording.get("env", {}), platform=recording.get("platform", "linux"), recording=recording
        )

    # Files. Paths are absolute as on the machine itself: "/proc/meminfo".

    def path(self, path: str) -> Path:
        """The path at which this process reads that file."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """The file's text, or None where it cannot be read."""
        try:
            return self.path(path).read_bytes().decode("utf-8", "replace")
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        """The count in the file; None if it contains something else (``max``)."""
        return _count(self.text(path) or "")

    def table(self, path: str) -> dict[str, int]:
        """A file of ``name value`` lines (memory.stat, vmstat, meminfo); what is no count is left out."""
        rows: dict[str, int] = {}
        for line in (self.text(path) or "").splitlines():
            words = line.replace(":", " ").split()
            unit = 1024 if len(words) > 2 and words[2] == "kB" else 1
            if len(words) >= 2 and (value := _count(words[1], unit)) is not None:
                rows[words[0]] = value
        return rows

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; empty if it cannot be listed."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether that path exists."""
        try:
            return self.path(path).exists()
        except OSError:
            return False

    def link(self, path: str) -> str | None:
        """Where a symbolic link points, or None."""
        try:
            return os.readlink(self.path(path))
        except (OSError, ValueError):
            return None

    def why(self, path: str) -> str:
        """Why that file could not be read, as text."""
        try:
            self.path(path).open("rb").close()
        except FileNotFoundError:
            return say("{path} does not exist", path=path)
        except OSError as problem:
            return f"{path}: {problem.strerror or problem}"
        return say("{path} has unexpected content", path=path)

    # System calls.

    def disk_space(self, path: str) -> DiskSpace | None:
        """The size and free space of the filesystem of ``path``."""
        if self.recording is not None:
            row = self.recording.get("statvfs", {}).get(path)
            return (
                DiskSpace(int(row[0]), int(row[1]), int(row[2] if len(row) > 2 else row[0] - row[1])) if row else None
            )
        try:
            if sys.platform == "win32":
                with import_lock:
                    import shutil

                usage = shutil.disk_usage(self.path(path))
                return DiskSpace(usage.total, usage.free, usage.used)
            stats = os.statvfs(self.path(path))
        except OSError:
            return None
        # Blocks reserved for root are neither available nor used.
        used = stats.f_blocks - stats.f_bfree
        return DiskSpace(stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize, used * stats.f_frsize)

    def owner_mode(self, path: str) -> tuple[int, int] | None:
        """(uid, permission bits) of ``path``."""
        if self.recording is not None:
            pair = self.recording.get("stat", {}).get(path)
            return (int(pair[1]), int(pair[0])) if pair else None
        try:
            stats = os.stat(self.path(path))
        except OSError:
            return None
        return stats.st_uid, stats.st_mode & 0o7777

    def rlimit(self, name: str) -> tuple[int, int] | None:
        """(soft, hard) of ``nofile`` or ``memlock``; UNLIMITED if there is no limit."""
        if self.recording is not None:
            pair = self.recording.get("rlimits", {}).get(name)
            return (int(pair[0]), int(pair[1])) if pair else None
        try:
            with import_lock:
                import resource
        except ImportError:  # Windows
            return None
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        infinite = resource.RLIM_INFINITY
        return (UNLIMITED if soft == infinite else soft, UNLIMITED if hard == infinite else hard)

    @property
    def affinity(self) -> int | None:
        """How many CPUs this process may run on."""
        if self.recording is not None:
            return self.recording.get("affinity")
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count()

    @property
    def uid(self) -> int | None:
        """The effective user id; None where there is none (Windows)."""
        if self.recording is not None:
            return self.recording.get("uid")
        return os.geteuid() if hasattr(os, "geteuid") else None

    @property
    def groups(self) -> frozenset[str]:
        """The names of this user's groups; groups without a name are left out."""
        if self.recording is not None:
            return frozenset(self.recording.get("groups", ()))
        try:
            with import_lock:
                import grp
        except ImportError:  # Windows
            return frozenset()
        names = set()
        for number in os.getgroups():
            try:
                names.add(grp.getgrgid(number).gr_name)
            except KeyError:  # a group of the host that has no name in the container
                continue
        return frozenset(names)

    @property
    def kernel(self) -> str | None:
        """The kernel's release."""
        if self.recording is not None:
            return self.recording.get("kernel")
        return os.uname().release if hasattr(os, "uname") else None

    @property
    def now(self) -> float:
        """The time of day in seconds."""
        if self.recording is not None:
            return float(self.recording.get("now", 0.0))
        return time.time()

    @property
    def live(self) -> bool:
        """Whether a second reading can differ: false for a recording."""
        return self.recording is None
