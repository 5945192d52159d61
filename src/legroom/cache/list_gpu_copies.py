"""Which processes have copies of data or weights in GPU memory, asked through the sockets in a store's folder ``gpu``.

loader/shared_gpu_memory.py makes the copies and answers; there is no daemon to ask. A socket whose process is gone
refuses connections and is removed here.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from legroom.cache.mapped_files_and_checksums import opened
from legroom.cache.store_directories import existing_stores
from legroom.records.watch_sample import GpuCopyRow
from legroom.system.unix_sockets import FOLDER_FLAGS, HIDDEN, address, require_same_user, unlink

FOLDER = "gpu"  # in a store
SOCKET = ".sock"
VERSION = 1
MESSAGE = 64 << 10  # bytes of a question or an answer, at most
PATIENCE_S = 2.0  # for a process that has a copy to answer: it may be stopped, or hold the interpreter lock
_LOOK_S = 0.2  # the same, for a list: a stopped process is left out of it
_UNFINISHED_S = 60.0


def gpu_copies() -> tuple[GpuCopyRow, ...]:
    """The copies in GPU memory that processes of this user share, each with its users, the largest first."""
    about: dict[tuple[str, str], tuple[str, int]] = {}
    users: dict[tuple[str, str], set[int]] = {}
    for store in existing_stores():
        for holder in holders(store.root, _LOOK_S):
            for key, size in holder["copies"].items():
                told = holder.get("about", {}).get(key, {})
                gpu, name = str(told.get("gpu", "")), str(told.get("name", ""))
                about.setdefault((gpu, key), (name, int(size)))
                users.setdefault((gpu, key), set()).add(int(holder["pid"]))
    rows = [
        GpuCopyRow(gpu, key, name, size, tuple(sorted(users[gpu, key]))) for (gpu, key), (name, size) in about.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.gpu, row.key)))


def holders(store: Path, patience: float = PATIENCE_S) -> list[dict[str, Any]]:
    """The processes that have copies in GPU memory: pid, bytes by key, and what each copy is."""
    with suppress(OSError), opened(store / FOLDER, FOLDER_FLAGS) as folder:
        answers = [answer for answer, _ in ask_all(folder, {"list": True}, patience=patience)]
        return [answer for answer in answers if isinstance(answer.get("copies"), dict) and "pid" in answer]
    return []


def ask_all(
    folder: int, question: dict[str, Any], skip: str = "", patience: float = PATIENCE_S
) -> Iterator[tuple[dict[str, Any], int | None]]:
    """The answers of all processes that listen, with the descriptor that came with each."""
    for name in sorted(os.listdir(folder)):
        if not name.endswith((SOCKET, HIDDEN)) or name == skip:
            continue
        if name.endswith(HIDDEN):
            _remove_unfinished(folder, name)
            continue
        try:
            yield _ask(folder, name, question, patience)
        except ConnectionRefusedError:
            unlink(folder, name)
        except (OSError, ValueError):
            continue  # stopped, closing, or not one of ours


def _ask(folder: int, name: str, question: dict[str, Any], patience: float) -> tuple[dict[str, Any], int | None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
        there.settimeout(patience)
        there.connect(address(folder, name))
        require_same_user(there)
        there.send(json.dumps({"version": VERSION, **question}).encode())
        message, fds, flags, _ = socket.recv_fds(there, MESSAGE, 1)
    fd = fds[0] if fds else None
    try:
        if fd is not None:
            os.set_inheritable(fd, False)
        answer = json.loads(message)
        if not isinstance(answer, dict) or flags & socket.MSG_CTRUNC:
            raise ValueError("not an answer")
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise
    return answer, fd


def _remove_unfinished(folder: int, name: str) -> None:
    """Remove the socket of a process that was killed before it listened; others listen within milliseconds."""
    try:
        if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_ctime > _UNFINISHED_S:
            unlink(folder, name)
    except OSError:
        pass
