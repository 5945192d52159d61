"""Files by what they take: blocks, owner, age, inode.

Covers: one file's facts, every file below a directory (bounded), whether anybody at all writes to a file.
Does not cover: contents, or which processes use a file (segments.py).

A recording answers from its ``files``, because a copied tree keeps neither inodes nor owners nor holes::

    "files": {"/dev/shm/torch_7_1_0": {"inode": 12, "blocks": 2048, "uid": 1000, "mode": 384, "mtime": 1.7e9}}

``blocks`` counts 512 bytes each, as stat does; ``/proc/7/fd/5`` may be there too and tells of an open file
that has no name any more.
"""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from typing import Any

from legroom.probe.host import Host

MOST_FILES = 20_000
_DEEPEST = 16


@dataclass(frozen=True, slots=True)
class File:
    """What stat says about a file."""

    path: str
    inode: int
    size: int  # by blocks: what it takes, not how long it claims to be
    owner: int
    mode: int
    mtime: float
    device: str | None = None  # "major:minor"; None: a recording does not say


@dataclass(frozen=True, slots=True)
class Listing:
    """The files below a directory."""

    files: tuple[File, ...]
    cut: bool = False  # there was more than one look may take


def file_at(host: Host, path: str, *, follow: bool = False) -> File | None:
    """One file's facts; ``follow`` goes through a link such as /proc/<pid>/fd/<n>."""
    if _recorded(host) is not None:
        return _from_recording(host, path)
    try:
        facts = os.stat(host.path(path), follow_symlinks=follow)
    except (OSError, ValueError):
        return None
    return _file(path, facts)


def files_below(host: Host, path: str, *, most: int = MOST_FILES) -> Listing:
    """Every file below ``path`` that is not a directory, on the same filesystem; links are not followed."""
    recorded = _recorded(host)
    if recorded is not None:
        names = sorted(name for name in recorded if name.startswith(path + "/"))
        found = [file for name in names[:most] if (file := _from_recording(host, name)) is not None]
        return Listing(tuple(found), cut=len(names) > most)
    try:
        device = os.stat(host.path(path)).st_dev
    except OSError:
        return Listing(())
    files: list[File] = []
    cut = False
    waiting = [(path, 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(host.path(folder)) as entries:
                for entry in entries:
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except OSError:  # gone since it was listed
                        continue
                    if facts.st_dev != device:
                        continue
                    here = f"{folder}/{entry.name}"
                    if stat.S_ISDIR(facts.st_mode):
                        cut = cut or depth >= _DEEPEST
                        if depth < _DEEPEST:
                            waiting.append((here, depth + 1))
                    elif len(files) >= most:
                        cut = True
                        break
                    else:
                        files.append(_file(here, facts))
        except OSError:
            continue  # not ours to list: what lies there stays unexplained
        if len(files) >= most and cut:
            break
    return Listing(tuple(sorted(files, key=lambda file: file.path)), cut)


def has_writer(host: Host, path: str) -> bool | None:
    """Whether anybody, seen from here or not, has that file open or mapped for writing; None: cannot tell.

    The kernel refuses a read lease on a file that is open for writing, whichever container or user the writer
    is in: the one answer that does not depend on whose /proc may be read. Only a file's owner (or root) may ask.
    """
    if sys.platform != "linux" or not host.live:
        return None
    import fcntl
    import signal

    try:
        opened = os.open(host.path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        # Should a writer come between these calls, it waits for the second one, and the kernel tells us by a
        # signal. The usual one, SIGIO, would end this process; SIGURG is ignored unless somebody listens.
        fcntl.fcntl(opened, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:  # not ours, or a kernel without leases
        return None
    finally:
        os.close(opened)
    return False


def _file(path: str, facts: os.stat_result) -> File:
    blocks = getattr(facts, "st_blocks", 0)  # Windows has none; nothing there asks
    device = f"{os.major(facts.st_dev)}:{os.minor(facts.st_dev)}" if hasattr(os, "major") else None
    mode = facts.st_mode & 0o7777
    return File(path, facts.st_ino, blocks * 512, facts.st_uid, mode, facts.st_mtime, device)


def _recorded(host: Host) -> dict[str, Any] | None:
    found = None if host.recording is None else host.recording.get("files")
    return found if isinstance(found, dict) else None


def _from_recording(host: Host, path: str) -> File | None:
    facts = (_recorded(host) or {}).get(path)
    if not isinstance(facts, dict):
        return None
    return File(
        path=path,
        inode=int(facts.get("inode", 0)),
        size=int(facts.get("blocks", 0)) * 512,
        owner=int(facts.get("uid", 0)),
        mode=int(facts.get("mode", 0o600)),
        mtime=float(facts.get("mtime", 0.0)),
        device=facts.get("device"),
    )
