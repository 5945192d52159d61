"""Files that this process makes in /dev/shm, by the line that made them, as long as they exist.

Python reports the opening of files and of shared memory to an audit hook. A hook cannot be removed: there is one
for all recordings, and without one it returns at once. Files that libraries make by themselves are not reported to it.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import Any

from legroom.leak.user_source_files import CodeLine, user_line

FOLDER = "/dev/shm"
_INSIDE = FOLDER + "/"
_MOST_FILES = 20_000
_EVENTS = frozenset({"open", "os.truncate", "os.rename"})
_DIGITS = re.compile(r"\d+|(?<=psm_)[0-9a-f]+")


class ShmFiles:
    """The files made so far."""

    def __init__(self) -> None:
        self._made: dict[str, CodeLine] = {}

    def listen(self) -> None:
        """Begin to note files."""
        _add_hook()
        _listening.append(self)

    def stop(self) -> None:
        """Note no more files."""
        if self in _listening:
            _listening.remove(self)

    def forget(self) -> None:
        """In a forked process: the files so far are the parent's."""
        self._made.clear()

    def by_line(self) -> dict[CodeLine, tuple[int, int, str]]:
        """For each line the number of its files that exist, their bytes, and a name with ``*`` for numbers."""
        found: dict[CodeLine, tuple[int, int, str]] = {}
        for path, line in list(self._made.items()):
            try:
                size = os.stat(path).st_blocks * 512
            except OSError:
                self._made.pop(path, None)
                continue
            count, before, _ = found.get(line, (0, 0, ""))
            found[line] = count + 1, before + size, _DIGITS.sub("*", path)
        return found

    def note(self, event: str, given: tuple[Any, ...]) -> None:
        """Note a file, if the event makes one. Called by the hook, in the frame below which the event happened."""
        try:
            path = self._path(event, given)
            if path is None or path in self._made or len(self._made) >= _MOST_FILES:
                return
            line = user_line(sys._getframe(2))  # not there while the interpreter opens the script itself
            if line is not None:
                self._made[path] = line
        except Exception:  # an error here would reach the script
            return

    def _path(self, event: str, given: tuple[Any, ...]) -> str | None:
        if event == "os.truncate":
            if not isinstance(given[0], int):
                return None
            path = os.readlink(f"/proc/self/fd/{given[0]}")
        elif event == "os.rename":
            path = os.fsdecode(given[1])
        else:
            name, mode, flags = given[0], given[1], given[2]
            if isinstance(name, int) or not (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                return None
            if not isinstance(mode, (str, type(None))):
                return None
            path = os.fsdecode(name)
        return path if path.startswith(_INSIDE) else None


_listening: list[ShmFiles] = []


@cache
def _add_hook() -> None:
    """One for all recordings of the process."""

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if _listening and event in _EVENTS:
            for one in _listening:
                one.note(event, given)

    sys.addaudithook(hook)
