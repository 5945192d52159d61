"""What a dead job left in /dev/shm, removed before the next attempt.

Covers: segments of torch and of Python's SharedMemory that appeared during the job and that no process uses.
Does not cover: anybody else's files, and files that were there before.

Killing a process frees no tmpfs: what lies there under a name stays until somebody unlinks it, and would doom the
next attempt before it begins.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from legroom.probe.host import Host
from legroom.probe.shm import shm

_OURS = ("torch", "python")


def names_there(host: Host) -> frozenset[str]:
    """The files in /dev/shm."""
    return frozenset(host.names("/dev/shm"))


def sweep(host: Host, before: Collection[str]) -> int:
    """Remove what appeared since and is unused; the bytes that freed."""
    freed = 0
    for file in shm(host).files:
        if (
            file.name in before
            or file.kind not in _OURS
            or file.mapped is not False
            or file.owner != host.uid
        ):
            continue
        with contextlib.suppress(OSError):
            os.unlink(host.path(f"/dev/shm/{file.name}"))
            freed += file.size
    return freed
