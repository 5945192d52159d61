"""Find the newest complete checkpoint.

Checks torch files (zip and old pickles), safetensors, npz, HDF5 and directories of them as transformers, DeepSpeed and
torch.distributed.checkpoint write them. A job that dies while saving leaves a truncated file, the newest of all. A zip
has its directory at the end and safetensors stores its length, so truncation shows without loading a tensor.

Files of an earlier run also match the pattern. They are recognized by inode, size and modification time: clocks of file
servers differ, and a renamed or linked file is still the same file.
"""

from __future__ import annotations

import glob
import json
import os
import re
import struct
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from legroom.messages import say

_ZIP_LOCAL = b"PK\x03\x04"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_LARGEST_HEADER = 100 << 20
_SHORTEST = 64  # bytes: no checkpoint is shorter
_WEIGHTS = re.compile(r"\.(?:safetensors|pt|pth|bin|ckpt|npz|h5|distcp)$")


Stamp = frozenset[tuple[int, int, int, int]]  # of its files: device, inode, size, mtime


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The newest complete checkpoint, and the newer incomplete ones, each with the reason."""

    path: str | None
    skipped: tuple[str, ...] = ()
    older: str | None = None  # the newest complete one that is older than this run


def newest_complete(pattern: str, before: Collection[Stamp] = ()) -> FoundCheckpoint:
    """The newest complete checkpoint that matches the pattern and is not in ``before``."""
    passed: list[str] = []
    older: str | None = None
    for path in _matches(pattern):
        old = bool(before) and stamp(Path(path)) in before
        if old and older is not None:
            continue  # checking all shards of a checkpoint takes long on a network file system
        problem = why_incomplete(Path(path))
        if old:
            older = path if problem is None else None
        elif problem is None:
            return FoundCheckpoint(path, tuple(passed))
        else:
            passed.append(say("{path}: {why}", path=path, why=problem))
    return FoundCheckpoint(None, tuple(passed), older)


def stamps(pattern: str) -> frozenset[Stamp]:
    """Stamps of the checkpoints that match the pattern now."""
    return frozenset(stamp(Path(path)) for path in _matches(pattern)) - {frozenset()}


def stamp(path: Path) -> Stamp:
    """Changes when a checkpoint is rewritten; for a directory, from its weight files."""
    files = [path]
    if path.is_dir():
        files = [entry for entry in path.rglob("*") if entry.is_file()]
        files = [entry for entry in files if _WEIGHTS.search(entry.name)] or files
    found = set()
    for file in files:
        try:
            stat = file.stat()
        except OSError:  # being replaced right now
            continue
        found.add((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return frozenset(found)


def _matches(pattern: str) -> list[str]:
    return sorted(glob.glob(os.path.expanduser(pattern), recursive=True), key=_age, reverse=True)


def _age(path: str) -> tuple[int, list[tuple[int, str]]]:
    """Sort key: time, then the numbers in the name, so that the step decides within one second."""
    parts = re.findall(r"\d+|\D+", path)
    natural = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
    try:
        return os.stat(path).st_mtime_ns, natural
    except OSError:
        return 0, natural


def why_incomplete(path: Path) -> str | None:
    """Why that checkpoint is incomplete, or None."""
    try:
        return _directory(path) if path.is_dir() else _file(path)
    except (OSError, ValueError, struct.error, zipfile.BadZipFile) as problem:
        return str(problem) or type(problem).__name__
    except Exception:  # a header of another shape than its format's: anything may fail
        return say("damaged")


def _file(path: Path) -> str | None:
    size = path.stat().st_size
    if size == 0:
        return say("empty")
    with path.open("rb") as file:
        head = file.read(_SHORTEST)
        if len(head) < _SHORTEST and _WEIGHTS.search(path.name):
            return say("only {size} bytes", size=size)
        if path.suffix == ".safetensors":
            return _safetensors(file, head, size)
        if head.startswith(_ZIP_LOCAL):
            return _zip(file)
        if head.startswith(_HDF5):
            return _hdf5(head, size)
        if path.suffix in (".pkl", ".pickle"):
            file.seek(-1, os.SEEK_END)
            return None if file.read(1) == b"." else say("the pickle is truncated")
    if _WEIGHTS.search(path.name) and not head.strip(b"\0"):
        return say("starts with zeros: the data never reached the disk")
    return None  # another format: its full length is unknown


def _zip(file: BinaryIO) -> str | None:
    # The directory is written last. Blocks that never reached the disk read as zeros, so headers are checked too.
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            file.seek(info.header_offset)
            if file.read(4) != _ZIP_LOCAL:
                return say("{name} in the archive never reached the disk", name=info.filename)
    return None


def _safetensors(file: BinaryIO, head: bytes, size: int) -> str | None:
    (length,) = struct.unpack("<Q", head[:8])
    if length > min(size - 8, _LARGEST_HEADER):
        return say("its header of {length} bytes is truncated", length=length)
    file.seek(8)
    header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    wanted = 8 + length + max(ends, default=0)
    return None if size == wanted else say("{size} of {wanted} bytes", size=size, wanted=wanted)


def _hdf5(head: bytes, size: int) -> str | None:
    """The superblock stores the file's length."""
    version = head[8]
    if version < 2:
        if head[13] != 8:
            return None  # unusual width of offsets
        (end,) = struct.unpack_from("<Q", head, 40 if version == 0 else 44)
    else:
        if head[9] != 8:
            return None
        (end,) = struct.unpack_from("<Q", head, 28)
    return None if size >= end else say("{size} of {wanted} bytes", size=size, wanted=end)


def _directory(path: Path) -> str | None:
    """A checkpoint of several files: all complete, none of the index missing, the last-written one present."""
    names = {entry.name for entry in path.iterdir()}
    if not names:
        return say("empty")
    for index in sorted(name for name in names if name.endswith(".index.json")):
        wanted = set(json.loads((path / index).read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(wanted - names):
            return say("{name} is missing", name=missing[0])
    if any(name.endswith(".distcp") for name in names) and ".metadata" not in names:
        return say(".metadata is missing: it is written last")
    if "optimizer.pt" in names and "trainer_state.json" not in names:
        return say("trainer_state.json is missing: it is written last")
    weights = [entry for entry in sorted(path.rglob("*")) if entry.is_file() and _WEIGHTS.search(entry.name)]
    if not weights:
        return say("it contains no weights")
    for entry in weights:
        if (problem := why_incomplete(entry)) is not None:
            return say("{name}: {why}", name=entry.name, why=problem)
    return None
