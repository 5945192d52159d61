"""Unix sockets in a private folder: processes of one user find each other there and hand on file descriptors.

A folder is used only if this user owns it and no other user may enter it. Both sides of a connection ask the kernel for
the other's user (SO_PEERCRED) before they read anything. A socket is bound under a hidden name and renamed once it
listens: a process that finds it can connect.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from legroom.messages import say

HIDDEN = ".new"  # ends the name of a socket that does not listen yet
FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def open_private_folder(path: Path) -> int:
    """A descriptor of the folder, which is made if it is missing; PermissionError if others may use it."""
    try:
        folder = os.open(path, FOLDER_FLAGS)
    except FileNotFoundError:
        path.mkdir(0o700, exist_ok=True)
        folder = os.open(path, FOLDER_FLAGS)
    stats = os.fstat(folder)
    if stats.st_uid != os.geteuid() or stats.st_mode & 0o077:
        os.close(folder)
        raise PermissionError(1, say("it belongs to another user, or others may use it"), str(path))
    return folder


def address(folder: int, name: str) -> str:
    """A path of fewer than 108 characters, however long the folder's is."""
    return f"/proc/self/fd/{folder}/{name}"


def listen(folder: int, name: str) -> socket.socket:
    """A socket that listens under this name; one of that name is replaced. No other process may do so meanwhile."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    hidden = name + HIDDEN
    unlink(folder, hidden)  # of a process that was killed before it listened: a name is bound only once
    try:
        listening.bind(address(folder, hidden))
        os.chmod(hidden, 0o600, dir_fd=folder)
        listening.listen(64)
        os.rename(hidden, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        listening.close()
        unlink(folder, hidden)
        raise
    return listening


def require_same_user(there: socket.socket) -> int:
    """The process id at the other end; ValueError if it belongs to another user."""
    pid, uid, _ = _CREDENTIALS.unpack(there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise ValueError("another user's process")
    return int(pid)


def unlink(folder: int, name: str) -> None:
    """Remove a file of the folder, if it is there."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass
