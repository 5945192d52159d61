"""Delete the shared-memory files that a crashed job left in /dev/shm, before the job is started again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.shm import shm

_REMOVABLE = ("torch", "python")  # kinds of files


def shm_names(host: Host) -> frozenset[str]:
    """The files in /dev/shm."""
    return frozenset(host.names("/dev/shm"))


def remove_leftover_shm(host: Host, before: Collection[str]) -> int:
    """Remove unused shared-memory files of torch and Python that are not in ``before``; return the bytes freed."""
    freed = 0
    for file in shm(host).files:
        if file.name in before or file.kind not in _REMOVABLE or file.mapped is not False or file.owner != host.uid:
            continue
        with contextlib.suppress(OSError):
            os.unlink(host.path(f"/dev/shm/{file.name}"))
            freed += file.size
    return freed
