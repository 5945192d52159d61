"""Whether a job that neither prints nor uses CPU hangs on a full /dev/shm: it waits for a batch that did not fit.

A torch >= 2.10 worker whose queue thread cannot get shared memory prints a traceback, drops the batch and continues.
The trainer waits for that batch forever. No process exits, so no exit status shows it. Healthy jobs also wait for
minutes, for a peer or a disk. A job counts as hanging only if all of these hold: its DataLoader workers are alive; its
own processes hold about half of /dev/shm or more (63 to 99 % measured with batches of 9 to 40 MB in 64 MB), or have a
segment open without pages that is larger than what is free; and the allocation error is near the end of its output.

job_sampling.py measures for how long a job has been idle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.shm_segments import SHM, Segments
from legroom.records.failure import Level, LogFacts
from legroom.rescue.find_failures_in_log import WINDOW

_HELD_SHARE = 0.45  # of /dev/shm, by the job's own processes


def held_shm(host: Host, pids: Sequence[int]) -> int | None:
    """Bytes of /dev/shm that these processes map or have open; None if unreadable."""
    if not pids:
        return 0
    segments = Segments.of(host, pids[0])
    inodes: set[int] = set()
    for pid in pids:
        held = segments.of_process(pid)
        if held is None:
            return None
        inodes |= held.inodes
    return segments.total(inodes)


def refused_shm(host: Host, pids: Sequence[int]) -> int:
    """Bytes without pages of the largest /dev/shm segment that these processes have open: a failed allocation.

    torch sets the file size before it allocates pages, and keeps a file whose allocation failed.
    """
    most = 0
    for pid in pids:
        folder = host.path(f"/proc/{pid}/fd")
        try:
            names = os.listdir(folder)
        except OSError:  # exited, or not readable
            continue
        for name in names:
            # Read the link before stat: stat on a dead network file system would hang.
            if (host.link(f"/proc/{pid}/fd/{name}") or "").startswith(SHM + "/"):
                try:
                    found = os.stat(folder / name)
                except OSError:
                    continue
                most = max(most, found.st_size - found.st_blocks * 512)
    return most


def hangs_on_shm(level: Level | None, held: int | None, log: LogFacts, *, loader: bool, refused: int = 0) -> bool:
    """Whether an idle job waits for a batch that did not fit into /dev/shm. Pure.

    ``refused``: bytes of the job's own segment that got no pages. A segment larger than what is free cannot fit,
    however little the job holds.
    """
    if not loader or level is None or held is None:
        return False
    if held < level.size * _HELD_SHARE and refused <= level.size - level.used:
        return False
    return any(sign.code == "shm" and sign.number <= WINDOW for sign in log.signs)
