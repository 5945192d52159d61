"""One child of the demo: a program under `legroom run`, on a tether.

Covers: starting it, hearing what it says, its story when it has ended, ending it early. Does not cover: which programs
(the acts), waiting (stage.py).

Every child runs under `legroom run`, the way a user would start it: whatever ends it, the story says what it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legroom.demo.said import Ear, Words
from legroom.words import say

_GRACE = 2.0  # seconds from SIGTERM to SIGKILL, for `legroom run` and for us
_TAIL = 3  # lines of a log worth showing
_PYTHON = (sys.executable, "-P", "-m")
_RUN = (*_PYTHON, "legroom.demo.tether", "run", "--json", "--fresh", "--grace", f"{_GRACE:g}s")


@dataclass
class Job:
    """One child, through all its starts."""

    name: str
    module: str
    arguments: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    options: Sequence[str] = ()  # of `legroom run`
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _ear: Ear | None = None
    pss: int | None = None
    rss: int | None = None
    notes: list[str] = field(default_factory=list)

    def start(self, command: Sequence[str] | None = None) -> None:
        """Start it; ``command`` is another one than the first time."""
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._file("json").open("wb") as story, self._file("log").open("wb") as log:
            self._process = subprocess.Popen(
                [*_RUN, *self.options, "--", *(self.command if command is None else command)],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=story,
                stderr=log,
                process_group=0,  # Ctrl-C is for the demo alone, which then ends everybody in order
            )

    @property
    def command(self) -> list[str]:
        """Its own command line."""
        return [*_PYTHON, self.module, *self.arguments, "--said", str(self.folder / "said.jsonl")]

    @property
    def ear(self) -> Ear:
        """What it has said so far."""
        if self._ear is None:
            self._ear = Ear(self.folder / "said.jsonl")
        return self._ear

    @property
    def pid(self) -> int | None:
        """Its own process, not the supervisor's; None before it has said a word and after its end."""
        if self.ended:
            return None
        begun = [words for words in self.ear.heard if words["what"] == "begun"]
        return int(begun[-1]["pid"]) if len(begun) == self.starts else None

    @property
    def ended(self) -> bool:
        """Whether the last start is over."""
        return self._process is not None and self._process.poll() is not None

    @property
    def done(self) -> bool:
        """Whether it did all it had to."""
        return self.ear.last("done") is not None

    @property
    def last_step(self) -> Words | None:
        """Its last word on how far it is."""
        return next((words for words in reversed(self.ear.heard) if "step" in words and "of" in words), None)

    @property
    def share(self) -> float | None:
        """How far it is."""
        told = self.last_step
        return None if told is None else float(told["step"] / told["of"])

    def story(self) -> dict[str, Any]:
        """What `legroom run` told about the last start; empty where it was ended before it could."""
        try:
            found: dict[str, Any] = json.loads(self._file("json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    def complaint(self) -> str:
        """Why it failed, in its own last words."""
        lines = [
            line.strip()
            for line in self._file("log").read_text(errors="replace").splitlines()
            if line.strip()
        ]
        return " / ".join(lines[-_TAIL:]) or say("it said nothing")

    def end(self) -> None:
        """Ask it to end; `legroom run` passes that on."""
        if self._process is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def finish(self, deadline: float) -> None:
        """Wait for its end, and make it end when the deadline is over."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()  # its child is on a tether
            self._process.wait()

    def _file(self, kind: str) -> Path:
        return self.folder / f"start-{self.starts}.{kind}"


def end_all(jobs: Sequence[Job]) -> None:
    """End everybody, politely first."""
    for job in jobs:
        job.end()
    deadline = time.monotonic() + 2 * _GRACE
    for job in jobs:
        job.finish(deadline)
