"""Open a file that a user names, to read it to its end: not a device, and not a FIFO into which no process writes.
The error for a pattern that matches no file.

Reading either would never end. A FIFO with a writer, such as the shell's ``<(COMMAND)``, is read as a file is.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from typing import BinaryIO

from legroom.errors import UnreadableSource
from legroom.messages import say

_WRITER_WITHIN = 10.0  # seconds until a process must have opened a FIFO for writing


def open_to_its_end(path: str) -> tuple[BinaryIO, bytes]:
    """The file, and its first byte if that is read already; ValueError or OSError if it cannot be read to an end."""
    refuse_device(os.stat(path))
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    try:
        kind = os.fstat(file.fileno()).st_mode
        begin = _begin_of_fifo(file.fileno(), path) if stat.S_ISFIFO(kind) else b""
        if not stat.S_ISREG(kind):  # some files in /proc would wait for their next line
            os.set_blocking(file.fileno(), True)
    except BaseException:
        file.close()
        raise
    return file, begin


def refuse_device(status: os.stat_result) -> None:
    """ValueError for a device, such as /dev/zero, which may have no end; a terminal may be standard input."""
    if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
        terminal = os.isatty(0) and os.path.samestat(status, os.fstat(0))
        if not terminal and not os.path.samestat(status, os.stat(os.devnull)):
            raise ValueError(say("it is a device, which may have no end"))


def nothing_matches(pattern: str) -> UnreadableSource:
    """The error for a pattern of file names that matches none."""
    return UnreadableSource(
        say("nothing matches {pattern}", pattern=pattern),
        why=say("the working directory is {cwd}", cwd=os.getcwd()),
        fix=(say("check the pattern"),),
    )


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _begin_of_fifo(number: int, path: str) -> bytes:
    """The first byte from its writer, if there is one by now; ValueError where no process writes into it."""
    deadline = time.monotonic() + _WRITER_WITHIN
    with suppress(BlockingIOError):  # it has a writer, who has written nothing so far
        while not (data := os.read(number, 1)) and os.path.exists(os.path.realpath(path)):  # a shell's has no path
            if time.monotonic() > deadline:
                raise ValueError(say("no process writes into this FIFO"))
            time.sleep(0.05)
        return data
    return b""
