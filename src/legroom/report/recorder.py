"""A machine that is written down while the probes read it.

Covers: the files of /proc and of the cgroups that a snapshot opens, and what it asked the system; as a recording that
`legroom doctor --root` reads elsewhere. Does not cover: taking out what is private (redact.py), processes: what other
programs do is no part of a report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from legroom.probe.environment import SUDO_GROUPS, in_initial_namespace
from legroom.probe.host import DiskSpace, Host
from legroom.probe.limits import TAIL, temporary

LONGEST = 128 << 10  # characters of one file: the mounts of a machine with a thousand containers
_WRITTEN = (
    "/proc/meminfo", "/proc/vmstat", "/proc/swaps", "/proc/pressure/", "/proc/sys/", "/proc/self/cgroup",
    "/proc/self/mountinfo", "/proc/self/status", "/proc/self/limits", "/sys/fs/cgroup/",
)  # fmt: skip
_PRIVATE = ("/proc/sys/kernel/hostname", "/proc/sys/kernel/domainname", "/proc/sys/kernel/random/")
# Files whose being there is all that a probe asks for.
_SIGNS = ("/.dockerenv", "/run/.containerenv", "/.singularity.d")
_MOUNTED = "/sys/fs/cgroup"
# Variables that say where this runs; only whether they are set matters.
_SET = (
    "KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "WSL_DISTRO_NAME", "APPTAINER_CONTAINER", "APPTAINER_NAME",
    "SINGULARITY_CONTAINER", "SINGULARITY_NAME",
)  # fmt: skip
_SAID = ("container", "HOME", "XDG_CACHE_HOME", "SLURM_TMPDIR", "LEGROOM_DIR", "CUDA_VISIBLE_DEVICES")


@dataclass
class Notes:
    """What was read and what was answered."""

    files: dict[str, str] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    rooms: dict[str, DiskSpace] = field(default_factory=dict)
    owners: dict[str, tuple[int, int]] = field(default_factory=dict)
    rlimits: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorder(Host):
    """The host it is made of, which takes notes."""

    notes: Notes = field(default_factory=Notes)

    @classmethod
    def of(cls, host: Host) -> Recorder:
        """That host, taking notes."""
        return cls(root=host.root, env=host.env, platform=host.platform, recording=host.recording)

    def text(self, path: str) -> str | None:
        found = super().text(path)
        if found is not None and path.startswith(_WRITTEN) and not path.startswith(_PRIVATE):
            self.notes.files[path] = found[:LONGEST]
        return found

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        if found and path.startswith((*_SIGNS, _MOUNTED)):
            self.notes.there.add(path)
        return found

    def disk_space(self, path: str) -> DiskSpace | None:
        found = super().disk_space(path)
        if found is not None:
            self.notes.rooms[path] = found
        return found

    def owner_mode(self, path: str) -> tuple[int, int] | None:
        found = super().owner_mode(path)
        if found is not None:
            self.notes.owners[path] = found
        return found

    def rlimit(self, name: str) -> tuple[int, int] | None:
        found = super().rlimit(name)
        if found is not None:
            self.notes.rlimits[name] = found
        return found

    def tree(self) -> dict[str, str]:
        """The recording: a text for each path, ``recording.json`` among them."""
        # A recording has no namespaces by which to tell an image's leftover from a container's sign.
        leftovers = _SIGNS if in_initial_namespace(self, "pid") else ()
        there = {path for path in self.notes.there if path not in leftovers and not self.path(path).is_dir()}
        empty = dict.fromkeys(there, "")
        # A folder for temporary files counts only where it is there.
        short = dict.fromkeys(self._temporary().values(), "")
        files = dict(sorted({**empty, **short, **self.notes.files}.items()))
        return {**files, "/recording.json": json.dumps(self._answers(), ensure_ascii=False, indent=1)}

    def _answers(self) -> dict[str, Any]:
        return {
            "env": _environment(self.env) | self._temporary(),
            "platform": self.platform,
            "uid": self.uid,
            "groups": sorted(self.groups & SUDO_GROUPS),
            "affinity": self.affinity,
            "kernel": self.kernel,
            "now": self.now,
            "cwd": _here() if self.live else (self.recording or {}).get("cwd"),
            "rlimits": {name: list(pair) for name, pair in self.notes.rlimits.items()},
            "statvfs": {path: list(room) for path, room in self.notes.rooms.items()},
            "stat": {path: [mode, uid] for path, (uid, mode) in self.notes.owners.items()},
        }

    def _temporary(self) -> dict[str, str]:
        """The variable that names the folder for temporary files, with a path of as many bytes: only those matter."""
        found = temporary(self)
        if found is None or found.socket - TAIL < 2:
            return {}
        return {found.source: _path_of(found.socket - TAIL)}


def _path_of(length: int) -> str:
    """A path of so many bytes, at least two, that says nothing; no name in it is too long for a file system."""
    return (("/" + "x" * 99) * (length // 100 + 1))[: length - 1] + "x"


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # removed under us
        return None


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: "set" for name in _SET if env.get(name)} | {
        name: env[name] for name in _SAID if env.get(name)
    }
