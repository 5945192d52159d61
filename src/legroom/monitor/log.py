"""A watch kept in a file, one JSON object a line, for later.

Covers: appending so that a kill at any moment costs at most the line being written.
Does not cover: reading it back (replay.py), what a line holds (record.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from legroom.errors import UsageError
from legroom.model import Moment
from legroom.monitor.record import line_of
from legroom.words import say


class Log:
    """Appends to a file. Trouble on the way (a full disk) is told once; watching goes on without the log."""

    def __init__(self, path: str | os.PathLike[str], tell: Callable[[str], object]) -> None:
        self.path = Path(path)
        self._tell = tell
        try:
            # Unbuffered and appending: a line is one write, whoever else appends to the file.
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as problem:
            raise UsageError(
                say("cannot write the log {path}", path=self.path),
                why=problem.strerror or str(problem),
                fix=(say("name a file in a directory that exists and is yours to write in"),),
            ) from problem
        try:
            if _ends_in_the_middle(self.path):
                self._file.write(b"\n")  # a watch was killed while it wrote; its half line stays its own
        except OSError:
            pass  # a pipe or a device: nothing to look at

    def show(self, moment: Moment) -> None:
        if self._file.closed:
            return
        try:
            line = memoryview(line_of(moment).encode("utf-8", "replace") + b"\n")
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError as problem:
            self._file.close()
            self._tell(
                say(
                    "cannot write to {path} any more ({why}); watching goes on without a log",
                    path=self.path,
                    why=problem.strerror or problem,
                )
            )

    def close(self) -> None:
        self._file.close()


def _ends_in_the_middle(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
