"""Everything a bug report needs from this machine, as it is: private things and all.

Covers: the box with its findings, the recorded machine, versions, the cache, settings. Does not cover: files that the
user names (given.py), hiding anything (redact.py).

What cannot be had is said and left out: a report is wanted most where things are broken.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from legroom.budget.findings import findings
from legroom.budget.settings import safe_settings
from legroom.errors import LegroomError
from legroom.model import Box, Entry
from legroom.probe.host import Host
from legroom.probe.snapshot import snapshot
from legroom.report.commands import shape_of
from legroom.report.given import given
from legroom.report.parts import Asked, Gathered, Part
from legroom.report.patterns import SECRET_NAME
from legroom.report.recorder import Recorder
from legroom.version import VERSION
from legroom.words import language, say

MACHINE = "machine"  # the folder of the recorded machine
_MOST = 200  # files of /dev/shm, entries, arrays of an entry
_MOST_PROCESSES = 40
# A fixed list: which other packages somebody has installed is theirs to tell.
_PACKAGES = (
    "accelerate", "blake3", "click", "datasets", "deepspeed", "deflate", "fsspec", "h5py", "hdf5plugin", "isal",
    "lightning", "matplotlib", "mpi4py", "numpy", "nvidia-ml-py", "pandas", "pillow", "prometheus-client",
    "psutil", "pyarrow", "pytorch-lightning", "ray", "rich", "safetensors", "textual", "tokenizers", "torch",
    "torchaudio", "torchdata", "torchvision", "transformers", "triton", "webdataset", "xxhash", "zarr",
)  # fmt: skip


def gather(asked: Asked, host: Host | None = None) -> Gathered:
    """Every part that can be had; an error only where a file that was asked for cannot be read."""
    recorder = Recorder.of(host or Host())
    box = snapshot(recorder)
    left_out: list[str] = []
    found: list[Entry] = []
    parts = [
        Part("box.json", say("pools, limits, place, findings: what doctor reads"), box_object(box)),
        *given(asked, box),
        Part("versions.json", say("of Python, the kernel and packages"), versions(), addresses=False),
        Part("settings.json", say("variables whose names begin with LEGROOM_"), settings(recorder.env)),
    ]
    if recorder.live:
        parts += _tried(
            "cache.json", say("what the shared cache holds"), lambda: _cache(found), left_out
        )  # fmt: skip
    for path, text in recorder.tree().items():
        parts.append(
            Part(MACHINE + path, say("read by the probes"), text, addresses=path != "/recording.json")
        )
    sources = tuple(source for entry in found for source in entry.sources)
    return Gathered(tuple(parts), tuple(left_out), sources)


def box_object(box: Box) -> dict[str, Any]:
    """The box as JSON: of processes only those that hold something, of their commands only the shape."""
    whole = dataclasses.asdict(box)
    holding = [row for row in box.processes if row.shm or row.gpu or row.locked or row.pinned]
    largest = sorted(box.processes, key=lambda row: -(row.rss or 0))
    wanted = list({row.pid: row for row in (*holding, *largest)}.values())[:_MOST_PROCESSES]
    whole["processes"] = [{**dataclasses.asdict(row), "command": shape_of(row.command)} for row in wanted]
    whole["processes_in_all"] = len(box.processes)
    files = whole["shm"]["files"]
    whole["shm"]["files_in_all"] = len(files)
    # Names that programs make up by a rule say nothing; others may be anybody's.
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
    """What is installed, by its metadata: nothing is imported for it."""
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
    """Our own variables; what is named like a secret only by its name."""
    ours = {name: environment[name] for name in environment if name.startswith("LEGROOM_")}
    return {name: "<secret>" if SECRET_NAME.fullmatch(name) else ours[name] for name in sorted(ours)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError, OSError):
        return None


def _cache(found: list[Entry]) -> dict[str, Any]:
    from legroom.cache.catalog import entries, store_rooms

    found += entries(with_users=True)
    rooms, passed_over = store_rooms()
    return {
        "entries": [_entry(entry) for entry in found[-_MOST:]],
        "entries_in_all": len(found),
        "stores": [dataclasses.asdict(room) for room in rooms],
        "findings": [dataclasses.asdict(finding) for finding in passed_over],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    """An entry without its attributes, which are the dataset's own texts."""
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
