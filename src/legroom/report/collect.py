"""Collects what a bug report needs from this machine, private things included: redact.py hides them later.

The files that the probes read are recorded, so that `legroom doctor --root` reads the same machine elsewhere; processes
are not. What cannot be read is listed and left out: a report is needed most where things are broken.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from legroom.advice.findings import findings
from legroom.advice.safe_settings import safe_settings
from legroom.errors import LegroomError
from legroom.probe.environment import SUDO_GROUPS, in_initial_namespace
from legroom.probe.host import DiskSpace, Host
from legroom.probe.limits import TAIL, temporary
from legroom.probe.snapshot import snapshot
from legroom.records import Box, Entry
from legroom.report.attachments import attached_parts
from legroom.report.bundle import Attachments, Collected, Part
from legroom.report.redact import SECRET_NAME, shape_of
from legroom.version import VERSION
from legroom.words import language, say

MACHINE = "machine"  # directory of the recording
_MOST = 200  # files of /dev/shm, entries, arrays of an entry
_MOST_PROCESSES = 40
# A fixed list: other packages that are installed are private.
_PACKAGES = (
    "accelerate", "blake3", "click", "datasets", "deepspeed", "deflate", "fsspec", "h5py", "hdf5plugin", "isal",
    "lightning", "matplotlib", "mpi4py", "numpy", "nvidia-ml-py", "pandas", "pillow", "prometheus-client",
    "psutil", "pyarrow", "pytorch-lightning", "ray", "rich", "safetensors", "textual", "tokenizers", "torch",
    "torchaudio", "torchdata", "torchvision", "transformers", "triton", "webdataset", "xxhash", "zarr",
)  # fmt: skip


def collect(attachments: Attachments, host: Host | None = None) -> Collected:
    """Every part that can be read; an error only where an attachment cannot be read."""
    recorder = RecordingHost.of(host or Host())
    box = snapshot(recorder)
    left_out: list[str] = []
    found: list[Entry] = []
    parts = [
        Part(
            "box.json", say("memory pools, limits, environment, findings: what doctor reads"), box_object(box)
        ),
        *attached_parts(attachments, box),
        Part(
            "versions.json", say("versions of Python, the kernel and packages"), versions(), addresses=False
        ),
        Part("settings.json", say("environment variables LEGROOM_*"), settings(recorder.env)),
    ]
    if recorder.live:
        parts += _tried(
            "cache.json", say("entries of the shared cache"), lambda: _cache(found), left_out
        )  # fmt: skip
    for path, text in recorder.tree().items():
        parts.append(
            Part(MACHINE + path, say("file read by the probes"), text, addresses=path != "/recording.json")
        )
    sources = tuple(source for entry in found for source in entry.sources)
    return Collected(tuple(parts), tuple(left_out), sources)


def box_object(box: Box) -> dict[str, Any]:
    """The machine as JSON: only processes that hold memory, and command lines without values."""
    whole = dataclasses.asdict(box)
    holding = [row for row in box.processes if row.shm or row.gpu or row.locked or row.pinned]
    largest = sorted(box.processes, key=lambda row: -(row.rss or 0))
    wanted = list({row.pid: row for row in (*holding, *largest)}.values())[:_MOST_PROCESSES]
    whole["processes"] = [{**dataclasses.asdict(row), "command": shape_of(row.command)} for row in wanted]
    whole["processes_in_all"] = len(box.processes)
    files = whole["shm"]["files"]
    whole["shm"]["files_in_all"] = len(files)
    # Names that programs generate are harmless; others may be private.
    whole["shm"]["files"] = [
        {**file, "name": "other"} if file["kind"] == "other" else file for file in files[:_MOST]
    ]
    for card in whole["gpus"]["cards"]:
        for user in card["processes"] or ():
            user["command"] = None if user["command"] is None else shape_of(user["command"])
    said = [dataclasses.asdict(finding) for finding in findings(box)]
    rows = [dataclasses.asdict(row) for row in safe_settings(box)]
    return {"schema": "legroom.report.box/1", **whole, "findings": said, "settings": rows}


def versions() -> dict[str, Any]:
    """What is installed, by its metadata; nothing is imported."""
    packages = {name: _version(name) for name in _PACKAGES}
    return {
        "legroom": VERSION,
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "platform": sys.platform,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "kernel": platform.release() or None,
        "language": language(),
        "packages": {name: version for name, version in packages.items() if version is not None},
    }


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of Legroom; the value of one that is named like a secret is hidden."""
    ours = {name: environment[name] for name in environment if name.startswith("LEGROOM_")}
    return {name: "<secret>" if SECRET_NAME.fullmatch(name) else ours[name] for name in sorted(ours)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError, OSError):
        return None


def _cache(found: list[Entry]) -> dict[str, Any]:
    from legroom.cache.list_and_verify import entries, store_rooms

    found += entries(with_users=True)
    rooms, passed_over = store_rooms()
    return {
        "entries": [_entry(entry) for entry in found[-_MOST:]],
        "entries_in_all": len(found),
        "stores": [dataclasses.asdict(room) for room in rooms],
        "findings": [dataclasses.asdict(finding) for finding in passed_over],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    """An entry without its attributes, which are texts of the dataset."""
    whole = dataclasses.asdict(entry)
    whole.pop("attributes")
    for kind in ("arrays", "tables"):
        whole[kind] = dict(list(whole[kind].items())[:_MOST])
        for item in whole[kind].values():
            item.pop("attributes")
    for user in whole["users"] or ():
        user["command"] = shape_of(user["command"])
    return whole


def _tried(name: str, about: str, read: Callable[[], Any], left_out: list[str]) -> list[Part]:
    try:
        return [Part(name, about, read())]
    except (LegroomError, OSError) as problem:
        what = problem.what if isinstance(problem, LegroomError) else os.strerror(problem.errno or 0)
        left_out.append(say("{name}: {why}", name=name, why=what))
        return []


# The recording.

LONGEST = 128 << 10  # characters of one file: mounts of a machine with a thousand containers
_RECORDED_FILES = (
    "/proc/meminfo", "/proc/vmstat", "/proc/swaps", "/proc/pressure/", "/proc/sys/", "/proc/self/cgroup",
    "/proc/self/mountinfo", "/proc/self/status", "/proc/self/limits", "/sys/fs/cgroup/",
)  # fmt: skip
_PRIVATE = ("/proc/sys/kernel/hostname", "/proc/sys/kernel/domainname", "/proc/sys/kernel/random/")
# Files of which a probe only checks whether they exist.
_MARKERS = ("/.dockerenv", "/run/.containerenv", "/.singularity.d")
_MOUNTED = "/sys/fs/cgroup"
# Variables that show where this runs; only whether they are set is recorded.
_SET = (
    "KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "WSL_DISTRO_NAME", "APPTAINER_CONTAINER", "APPTAINER_NAME",
    "SINGULARITY_CONTAINER", "SINGULARITY_NAME",
)  # fmt: skip
_RECORDED_VARIABLES = (
    "container",
    "HOME",
    "XDG_CACHE_HOME",
    "SLURM_TMPDIR",
    "LEGROOM_DIR",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass
class RecordedAnswers:
    """What the probes read and what the system answered."""

    files: dict[str, str] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    rooms: dict[str, DiskSpace] = field(default_factory=dict)
    owners: dict[str, tuple[int, int]] = field(default_factory=dict)
    rlimits: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordingHost(Host):
    """A host that records what is read from it."""

    answers: RecordedAnswers = field(default_factory=RecordedAnswers)

    @classmethod
    def of(cls, host: Host) -> RecordingHost:
        """That host, recorded."""
        return cls(root=host.root, env=host.env, platform=host.platform, recording=host.recording)

    def text(self, path: str) -> str | None:
        found = super().text(path)
        if found is not None and path.startswith(_RECORDED_FILES) and not path.startswith(_PRIVATE):
            self.answers.files[path] = found[:LONGEST]
        return found

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        if found and path.startswith((*_MARKERS, _MOUNTED)):
            self.answers.there.add(path)
        return found

    def disk_space(self, path: str) -> DiskSpace | None:
        found = super().disk_space(path)
        if found is not None:
            self.answers.rooms[path] = found
        return found

    def owner_mode(self, path: str) -> tuple[int, int] | None:
        found = super().owner_mode(path)
        if found is not None:
            self.answers.owners[path] = found
        return found

    def rlimit(self, name: str) -> tuple[int, int] | None:
        found = super().rlimit(name)
        if found is not None:
            self.answers.rlimits[name] = found
        return found

    def tree(self) -> dict[str, str]:
        """The recording: the text of each path, with ``recording.json``."""
        # A recording has no namespaces, by which a leftover of an image is told from a running container.
        leftovers = _MARKERS if in_initial_namespace(self, "pid") else ()
        there = {
            path for path in self.answers.there if path not in leftovers and not self.path(path).is_dir()
        }
        empty = dict.fromkeys(there, "")
        # A directory for temporary files counts only where it exists.
        short = dict.fromkeys(self._temporary().values(), "")
        files = dict(sorted({**empty, **short, **self.answers.files}.items()))
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
            "rlimits": {name: list(pair) for name, pair in self.answers.rlimits.items()},
            "statvfs": {path: list(room) for path, room in self.answers.rooms.items()},
            "stat": {path: [mode, uid] for path, (uid, mode) in self.answers.owners.items()},
        }

    def _temporary(self) -> dict[str, str]:
        """The variable that names the directory for temporary files, with another path of the same length."""
        found = temporary(self)
        if found is None or found.socket - TAIL < 2:
            return {}
        return {found.source: _path_of(found.socket - TAIL)}


def _path_of(length: int) -> str:
    """A meaningless path of so many bytes, at least two; no name in it is too long for a file system."""
    return (("/" + "x" * 99) * (length // 100 + 1))[: length - 1] + "x"


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # removed meanwhile
        return None


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: "set" for name in _SET if env.get(name)} | {
        name: env[name] for name in _RECORDED_VARIABLES if env.get(name)
    }
