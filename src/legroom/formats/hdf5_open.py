"""Open HDF5 files read-only, without waiting for a writer or disturbing one.

Finds the signature, detects a file that is open for writing, and handles filesystems without file locks.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from legroom.errors import DamagedSource, LegroomError, SourceBeingWritten, SourceChanged, UnreadableSource
from legroom.formats.file_reads_and_errors import OwningStream, SourceFile, absolute, damaged, unreadable
from legroom.messages import say

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_WRITING, _SWMR = 0x1, 0x4
# Errors of system calls that do not mean that the file is damaged.
_NO_DAMAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EINTR, errno.EIO}
_MAPS_TO_OPEN = (4 << 20,) * 2 + (mmap.PAGESIZE,) * 6  # more than opening a file was seen to take
_LOCKED = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}


def signature_at(file: SourceFile) -> int | None:
    """Offset of the file's superblock: 0, 512, 1024, 2048 and so on, or None."""
    offset = 0
    while offset + len(SIGNATURE) <= file.size:
        if file.read_at(offset, len(SIGNATURE)) == SIGNATURE:
            return offset
        offset = offset * 2 or 512
    return None


@contextmanager
def hdf5_errors(path: Path, doing: str) -> Iterator[None]:
    """Translate what h5py raises for a damaged file into a SourceError.

    For damage, h5py raises OSError, KeyError, RuntimeError, ValueError, TypeError or UnicodeError, depending on where
    it is. None of them is a mistake of the caller here.
    """
    try:
        yield
    except (LegroomError, MemoryError):
        raise
    except OSError as problem:
        if problem.errno in _NO_DAMAGE:
            raise unreadable(path, problem) from problem
        raise damaged(path, f"{doing}: {_first_line(problem)}") from problem
    except Exception as problem:
        raise damaged(path, f"{doing}: {_first_line(problem)}") from problem


def _first_line(problem: Exception) -> str:
    text = str(problem.args[0]) if isinstance(problem, KeyError) and problem.args else str(problem)
    return (text.splitlines() or [type(problem).__name__])[0]


def open_hdf5(path: Path, *, on_demand: bool = False) -> Any:
    """Open the file with h5py; SourceBeingWritten if a process is writing it.

    With ``on_demand``, HDF5 reads a file that is being downloaded through a stream that waits for what it needs.
    """
    import h5py

    with SourceFile(path) as file:
        start = signature_at(file)
        if start is None:
            raise damaged(path, "it has no HDF5 signature")
        _refuse_flags(file, start)
        arrives = file.is_arriving and on_demand
    if arrives:
        return _open_stream(path)
    _refuse_own_writer(path)
    _require_maps()
    # The default first: within one process, HDF5 requires the same locking for every open of a file. The others
    # are for a process that opened it in another way; False is also for filesystems without locks.
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


def _require_maps() -> None:
    """Raise MemoryError where this process can map no more memory: HDF5 crashes if it gets none."""
    held: list[mmap.mmap] = []
    try:
        for size in _MAPS_TO_OPEN:
            held.append(mmap.mmap(-1, size))
    except OSError as problem:
        raise MemoryError(problem.strerror) from problem
    finally:
        for one in held:
            one.close()


def _open_stream(path: Path) -> Any:
    import h5py

    file = SourceFile(path)  # open as long as the stream, which HDF5 keeps
    try:
        return h5py.File(io.BufferedReader(OwningStream(file), 1 << 16), "r")
    except LegroomError:
        file.close()
        raise
    except Exception as problem:
        file.close()
        raise _cannot_open(path, problem) from problem


def path_of(file: Any, opened: Path) -> Path:
    """The path of an open file. One that is read through a stream is ``opened``: HDF5 does not know its name."""
    return absolute(opened if file.driver == "fileobj" else file.filename)


def descriptor(file: Any) -> int | None:
    """The descriptor that HDF5 reads an open file by; None where its driver has none of its own."""
    return int(file.id.get_vfd_handle()) if file.driver == "sec2" else None


def _refuse_flags(file: SourceFile, start: int) -> None:
    """A superblock of version 3 marks a file that a writer has open, or had open when it crashed."""
    head = file.read_at(start, min(16, file.size - start))
    if len(head) < 12 or head[8] != 3:
        return
    if head[11] & (_WRITING | _SWMR):
        how = say("for single-writer/multiple-reader access") if head[11] & _SWMR else say("for writing")
        raise _being_written(file.path, say("its superblock marks it as open {how}", how=how))


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
            raise _being_written(path, say("this process has it open for writing"))


def _being_written(path: Path, why: str) -> SourceBeingWritten:
    return SourceBeingWritten(
        say("{path} is being written", path=path),
        why=why,
        fix=(
            say("wait until the writer has closed it"),
            say("if the writer crashed, clear the mark when no process is writing:\nh5clear -s {path}",
                path=shlex.quote(str(path))),
        ),
    )  # fmt: skip


def replaced_while_opened(path: Path) -> SourceChanged:
    """The error for another file under the same name than was opened a moment before."""
    return SourceChanged(
        say("{path} was replaced while it was being opened", path=path),
        fix=(say("try again when no process is replacing it"),),
    )


def _cannot_open(path: Path, problem: Exception) -> UnreadableSource | DamagedSource | SourceChanged:
    if "st_ino or st_dev fields changed" in str(problem):  # between two system calls of HDF5's own
        return replaced_while_opened(path)
    number = getattr(problem, "errno", None)
    if number is not None and number not in (0, errno.EINVAL):
        return unreadable(path, OSError(number, os.strerror(number)))
    return damaged(path, f"HDF5 cannot open it: {_first_line(problem)}")
