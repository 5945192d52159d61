"""Workers' sockets, where the path for temporary files is too long for one.

Covers: having multiprocessing put its sockets below /tmp instead, as newer Pythons do by themselves; refusing where
that is not possible. Does not cover: how long is too long (probe.limits), saying it beforehand (budget).

A pass needs such sockets where workers are started by forkserver, and for batches that travel torch's way.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile

from legroom.errors import LoaderError
from legroom.probe.limits import TAIL, longest_socket
from legroom.words import say

_log = logging.getLogger("legroom")
_NAME = len("/listener-12345678")
_SHORT = ("/tmp", "/var/tmp")


def make_room(*, needed: bool) -> None:
    """Leave a folder in which no socket can be made; raise where there is no other and they are ``needed``."""
    given = tempfile.gettempdir()
    if sys.platform == "win32" or _fits(given):
        return
    from multiprocessing.util import get_temp_dir

    short = next((path for path in _SHORT if _fits(path) and os.access(path, os.W_OK | os.X_OK)), given)
    before = tempfile.tempdir
    tempfile.tempdir = short
    try:
        # The folder is made once, at the first socket; workers, however they are started, get it from this process.
        folder = get_temp_dir()
    finally:
        tempfile.tempdir = before
    longest = longest_socket(sys.platform)
    taken = len(os.fsencode(folder)) + _NAME
    if taken <= longest:
        _log.info(
            say(
                "{path} is too long for sockets: those of the workers lie in {short}", path=given, short=short
            )
        )
    elif needed:
        raise LoaderError(
            say(
                "there is no room for a socket's name, through which workers and this process find one another"
            ),
            why=say(
                "a socket in {path} takes {taken} bytes, {longest} are allowed",
                path=folder,
                taken=taken,
                longest=longest,
            ),
            fix=(
                say(
                    "before Python starts, with this or another short path that can be written:\nexport TMPDIR=/tmp"
                ),
            ),
        )


def _fits(folder: str) -> bool:
    return len(os.fsencode(folder)) + TAIL <= longest_socket(sys.platform)
