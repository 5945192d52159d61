"""Opening HDF5 files, read-only, without ever waiting for or disturbing a writer.

Covers: finding the signature, the flags of a file that is open for writing, file locks on filesystems that
have none. Does not cover: what is inside (hdf5_walk.py) and which other files it needs (hdf5_files.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from legroom.errors import DamagedSource, LegroomError, SourceBeingWritten, SourceChanged, UnreadableSource
from legroom.formats.source_file import SourceFile, damaged, unreadable
from legroom.words import say

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_WRITING, _SWMR = 0x1, 0x4
# Errors of system calls that say nothing about the file's bytes.
_NO_DAMAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EINTR, errno.EIO}
_LOCKED = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}


def signature_at(file: SourceFile) -> int | None:
    """Where the file's superblock begins: at 0, 512, 1024, 2048 and so on, or None."""
    offset = 0
    while offset + len(SIGNATURE) <= file.size:
        if file.read_at(offset, len(SIGNATURE)) == SIGNATURE:
            return offset
        offset = offset * 2 or 512
    return None


@contextmanager
def hdf5_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn whatever the library says about a file that breaks its rules into one error.

    h5py raises OSError, KeyError, RuntimeError, ValueError, TypeError and UnicodeError for damage, depending
    on the place; none of them is a fault of the caller's here.
    """
    try:
        yield
    except (LegroomError, MemoryError):
        raise
    except OSError as problem:
        if problem.errno in _NO_DAMAGE:
            raise unreadable(path, problem) from problem
        raise damaged(path, say("{doing}: {problem}", doing=doing, problem=_first_line(problem))) from problem
    except Exception as problem:
        raise damaged(path, say("{doing}: {problem}", doing=doing, problem=_first_line(problem))) from problem


def _first_line(problem: Exception) -> str:
    text = str(problem.args[0]) if isinstance(problem, KeyError) and problem.args else str(problem)
    return (text.splitlines() or [type(problem).__name__])[0]


def open_hdf5(path: Path) -> Any:
    """The file as h5py opens it; refused where somebody is writing it."""
    import h5py

    with SourceFile(path) as file:
        start = signature_at(file)
        if start is None:
            raise damaged(path, say("it has no HDF5 signature"))
        _refuse_flags(file, start)
    _refuse_own_writer(path)
    # The default first: HDF5 wants all openers in one process to agree about locking. The others are for a
    # process that opened the file another way, and False also for filesystems without locks.
    for locking in (None, "best-effort", True, False):
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as problem:
            text = str(problem)
            lock = "unable to lock file" in text
            if lock and problem.errno in _LOCKED:
                raise _being_written(path, say("another process holds its lock")) from problem
            if "open for write" in text or "open for SWMR" in text:
                raise _being_written(path, _first_line(problem)) from problem
            if not lock and "flag values don't match" not in text:
                raise _cannot_open(path, problem) from problem
            last = problem
        except (ValueError, RuntimeError, KeyError, TypeError, UnicodeError) as problem:
            raise _cannot_open(path, problem) from problem
    raise _cannot_open(path, last)


def descriptor(file: Any) -> int | None:
    """The descriptor that HDF5 reads an open file by; None where its driver has none of its own."""
    return int(file.id.get_vfd_handle()) if file.driver == "sec2" else None


def _refuse_flags(file: SourceFile, start: int) -> None:
    """The superblock of version 3 says whether a writer has it open (or died with it open)."""
    head = file.read_at(start, min(16, file.size - start))
    if len(head) < 12 or head[8] != 3:
        return
    if head[11] & (_WRITING | _SWMR):
        how = say("for single-writer/multiple-reader access") if head[11] & _SWMR else say("for writing")
        raise _being_written(file.path, say("its superblock says that it is open {how}", how=how))


def _refuse_own_writer(path: Path) -> None:
    """HDF5 would share an open file within the process, half-written or not."""
    from h5py import h5f

    for handle in h5f.get_obj_ids(h5f.OBJ_ALL, h5f.OBJ_FILE):
        try:
            same = os.path.samefile(os.fsdecode(handle.name), path)
            writes = handle.get_intent() & h5f.ACC_RDWR
        except (OSError, ValueError, RuntimeError):  # not a file on disk, or just closed
            continue
        if same and writes:
            raise _being_written(path, say("this very process has it open for writing"))


def _being_written(path: Path, why: str) -> SourceBeingWritten:
    return SourceBeingWritten(
        say("{path} is being written", path=path),
        why=why,
        fix=(
            say("wait until the writer has closed it"),
            say("if the writer died, clear its mark once nobody writes:\nh5clear -s {path}", path=path),
        ),
    )


def _cannot_open(path: Path, problem: Exception) -> UnreadableSource | DamagedSource | SourceChanged:
    if "st_ino or st_dev fields changed" in str(problem):  # between two system calls of HDF5's own
        return SourceChanged(
            say("{path} was replaced while it was being opened", path=path),
            fix=(say("try again once nobody replaces it"),),
        )
    number = getattr(problem, "errno", None)
    if number is not None and number not in (0, errno.EINVAL):
        return UnreadableSource(
            say("cannot read {path}", path=path),
            why=os.strerror(number),
            fix=(say("check the file and its filesystem:\nls -l {path}", path=path),),
        )
    return damaged(path, say("HDF5 cannot open it: {problem}", problem=_first_line(problem)))
