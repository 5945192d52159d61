"""A /dev/shm of 64 MB, as containers have it, that only this process and its children see.

Covers: a mount namespace of our own and a small tmpfs in it, as root or in a user namespace; why it cannot be had.
Does not cover: what is done in it. Nothing needs undoing: the mount goes with the last process that sees it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from legroom.words import say

SHM = "/dev/shm"
SIZE = 64 << 20
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MS_NOSUID, _MS_NODEV = 0x2, 0x4


@dataclass(frozen=True, slots=True)
class SmallShm:
    """Whether there is one, or why not."""

    own: bool
    why: str | None = None


def enter(size: int = SIZE) -> SmallShm:
    """Move this process into a namespace with a small /dev/shm; nothing has changed where that fails.

    For a process that has one thread: another one would stay outside.
    """
    if sys.platform != "linux":
        return SmallShm(False, say("{platform} has no /dev/shm", platform=sys.platform))
    # A step may fail after one that cannot be undone, so a child tries all of them first.
    problem = _tried(size)
    if problem is None:
        try:
            _enter(size)
        except OSError as failed:
            problem = _words(failed)
    return SmallShm(problem is None, problem)


def _tried(size: int) -> str | None:
    """Why a child could not do it, or None."""
    source, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _enter(size)
            status = 0
        except BaseException as problem:  # nothing may get back into the parent's program
            os.write(end, _words(problem).encode())
        finally:
            os._exit(status)
    os.close(end)
    with os.fdopen(source, "rb") as file:
        told = file.read().decode()
    _, status = os.waitpid(pid, 0)
    return (
        None if status == 0 else told or say("a child that tried ended with status {status}", status=status)
    )


def _enter(size: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments) != 0:
            code = ctypes.get_errno()
            raise OSError(code, say("{call}: {why}", call=name, why=os.strerror(code)))

    uid, gid = os.geteuid(), os.getegid()
    try:
        call("unshare", _CLONE_NEWNS)
    except PermissionError:  # root of a container may lack the right to mount, too
        call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    none = ctypes.c_char_p(None)
    call("mount", b"none", b"/", none, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), none)
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    call("mount", b"tmpfs", SHM.encode(), b"tmpfs", flags, f"size={size},mode=1777".encode())


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _words(problem: BaseException) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem) or repr(problem)
