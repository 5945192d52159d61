"""The folder for temporary files, and whether a worker's socket has room in its path.

Covers: where Python puts temporary files (TMPDIR, TEMP, TMP), this process or another; how long a socket's path would
be there. Does not cover: room on its disk (disk.py).

Processes of Python hand descriptors to one another through a socket in a folder of its own below the one for temporary
files, and the path of a socket is bounded: 107 bytes on Linux, 103 on macOS and the BSDs. torch's DataLoader hands over
batches that way. Measured with torch 2.13, Python 3.11: at 75 bytes of TMPDIR all is well; from 76 on, under fork and
spawn, every batch is lost and the loader waits for ever, and under forkserver the workers do not start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from legroom.model import Temporary
from legroom.probe.host import Host

NAMES = ("TMPDIR", "TEMP", "TMP")  # in the order in which tempfile looks
TAIL = len("/pymp-12345678/listener-12345678")
_SHORT_TAIL = len("/pymp-12345678/sock-12345678")


def temporary(host: Host, pid: str = "self") -> Temporary | None:
    """The folder the environment names; None where none is named, or where there are no such sockets (Windows)."""
    if host.platform == "win32":
        return None
    env = _environment(host, pid)
    for name in NAMES:
        path = env.get(name)
        if path and host.exists(path):
            path = os.path.abspath(path)
            length = len(os.fsencode(path))
            longest = longest_socket(host.platform)
            taken = length + TAIL
            # Pythons that go to /tmp by themselves count so, whatever they name the socket.
            if host.live and _moves_away() and length + _SHORT_TAIL > longest:
                taken = len("/tmp") + TAIL
            return Temporary(path, name, taken, longest)
    return None


def longest_socket(platform: str) -> int:
    """The longest path of a socket in bytes: the field that holds it, less the zero at its end."""
    return 107 if platform == "linux" else 103


def _environment(host: Host, pid: str) -> Mapping[str, str]:
    """The process's own, as it was started; ours where that may not be read."""
    text = None if pid == "self" else host.text(f"/proc/{pid}/environ")
    if not text:
        return host.env
    pairs = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, _, value in pairs}


def _moves_away() -> bool:
    """Whether this Python leaves a folder that is too long by itself, as 3.14 does and some older ones since."""
    from multiprocessing import util

    return hasattr(util, "_get_base_temp_dir")
