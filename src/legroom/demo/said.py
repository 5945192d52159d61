"""What a child says while it works: one JSON object a line in a file of its own.

Covers: saying it in the child, hearing it in the demo. Does not cover: what it means (job.py, the acts).

A file, not a pipe: `legroom run` stands between the two and passes no descriptors on, and a training that was killed
and started again goes on writing in the same place. Times are of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Words = dict[str, Any]


@dataclass
class Mouth:
    """The child's end."""

    path: Path

    def say(self, what: str, **values: Any) -> None:
        """One line, in one write: a reader sees all of it or none."""
        line = json.dumps({"what": what, "when": time.monotonic(), "pid": os.getpid(), **values})
        number = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(number, line.encode() + b"\n")
        finally:
            os.close(number)


@dataclass
class Ear:
    """The demo's end."""

    path: Path
    heard: list[Words] = field(default_factory=list)
    _at: int = 0

    def listen(self) -> list[Words]:
        """What was said since the last time."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        new: list[Words] = [json.loads(line) for line in whole.splitlines()]
        self.heard += new
        return new

    def last(self, what: str) -> Words | None:
        """The newest of that kind."""
        return next((words for words in reversed(self.heard) if words["what"] == what), None)

    def first(self, what: str) -> Words | None:
        """The oldest of that kind."""
        return next((words for words in self.heard if words["what"] == what), None)
