"""Removes what a process leaves in /dev/shm that is killed while it makes a semaphore.

The C library writes a new semaphore to a file ``sem.`` and six characters, links that to its name and unlinks the file.
Tests kill processes at random moments, and nothing that they start can remove the file in between.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

_NAME = re.compile(r"sem\.[0-9A-Za-z]{6}")
_SIZE, _MAKING_S = 32, 2.0  # bytes of a semaphore; making one takes microseconds


def remove_killed_semaphores(since: float, folder: Path = Path("/dev/shm")) -> list[str]:
    """Remove those of this user that were begun after ``since`` and will not be finished; returns their names."""
    removed = []
    for path in folder.glob("sem.*"):
        try:
            found = path.stat()
            begun = since <= found.st_mtime <= time.time() - _MAKING_S
            if _NAME.fullmatch(path.name) and found.st_size == _SIZE and found.st_uid == os.geteuid() and begun:
                path.unlink()
                removed.append(path.name)
        except FileNotFoundError:
            continue
    return removed
