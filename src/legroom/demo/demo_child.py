"""A child process of the demo, run by `legroom run`, and the messages that it sends.

Messages are JSON lines in a file of the child's own. Not a pipe: `legroom run` stands between the two and passes no
descriptors on, and a run that was killed continues in the same file. Times are of the clock that all processes share.
As a program, this module is `legroom` that ends with its parent: ``python -m legroom.demo.demo_child run …``.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legroom.system.child_processes import die_with_parent
from legroom.words import say

Message = dict[str, Any]
PARENT = "LEGROOM_DEMO_PARENT"  # variable: the process id that a child's parent must have
_GRACE = 2.0  # seconds from SIGTERM to SIGKILL, for `legroom run` and for the demo
_PYTHON = (sys.executable, "-P", "-m")
_RUN = (*_PYTHON, "legroom.demo.demo_child", "run", "--json", "--fresh", "--grace", f"{_GRACE:g}s")


def end_with_parent(number: int) -> None:
    """Get that signal when the parent ends; a process that has lost its parent already exits at once."""
    die_with_parent(number)
    if os.environ.get(PARENT, "").isdecimal() and os.getppid() != int(os.environ[PARENT]):
        raise SystemExit(128 + number)
    os.environ[PARENT] = str(os.getpid())


def send(path: str, kind: str, **values: Any) -> None:
    """Append a message in one write: a reader sees all of it or nothing."""
    line = json.dumps({"kind": kind, "when": time.monotonic(), "pid": os.getpid(), **values})
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(number, line.encode() + b"\n")
    finally:
        os.close(number)


@dataclass
class Child:
    """One child through all its starts; ``note`` is shown in place of its progress."""

    name: str
    module: str
    arguments: Mapping[str, Any]
    folder: Path
    environment: Mapping[str, str]
    options: Sequence[str] = ()  # of `legroom run`
    starts: int = 0
    messages: list[Message] = field(default_factory=list)
    pss: int | None = None
    rss: int | None = None
    note: str | None = None
    _process: subprocess.Popen[bytes] | None = None
    _offset: int = 0

    @property
    def command(self) -> list[str]:
        """Its command line, without `legroom run`."""
        arguments = {"messages": str(self.folder / "messages.jsonl"), **self.arguments}
        return [*_PYTHON, self.module, json.dumps(arguments)]

    def start(self, command: Sequence[str] | None = None) -> None:
        """Start it, with another command line if one is given."""
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._file("json").open("wb") as report, self._file("log").open("wb") as log:
            # A process group of its own: Ctrl-C reaches the demo alone, which then ends its children in order.
            self._process = subprocess.Popen(
                [*_RUN, *self.options, "--", *(command or self.command)],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=report, stderr=log, process_group=0,
            )  # fmt: skip

    def read_messages(self) -> None:
        """Read what is new; an unfinished line is left for the next time."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "messages.jsonl").open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.messages += [json.loads(line) for line in whole.splitlines()]

    def first(self, kind: str) -> Message | None:
        """The oldest message of that kind."""
        return next((message for message in self.messages if message["kind"] == kind), None)

    def last(self, kind: str) -> Message | None:
        """The newest message of that kind."""
        return next((message for message in reversed(self.messages) if message["kind"] == kind), None)

    @property
    def pid(self) -> int | None:
        """The process below `legroom run`; None before its first message and after its end."""
        started = [message["pid"] for message in self.messages if message["kind"] == "started"]
        return started[-1] if len(started) == self.starts and not self.ended else None

    @property
    def ended(self) -> bool:
        """Whether the last start has ended."""
        return self._process is not None and self._process.poll() is not None

    @property
    def done(self) -> bool:
        """Whether it finished its work."""
        return self.last("done") is not None

    @property
    def progress(self) -> Message | None:
        """The newest message with ``step`` and ``of``."""
        return next((message for message in reversed(self.messages) if "of" in message), None)

    def report(self) -> dict[str, Any]:
        """The report of `legroom run` on the last start; empty if that was ended before it could write one."""
        try:
            return dict(json.loads(self._file("json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def last_lines(self) -> str:
        """The end of its log."""
        lines = [line.strip() for line in self._file("log").read_text(errors="replace").splitlines()]
        return " / ".join([line for line in lines if line][-3:]) or say("it printed nothing")

    def _file(self, kind: str) -> Path:
        return self.folder / f"start-{self.starts}.{kind}"

    def terminate(self) -> None:
        """Send SIGTERM, which `legroom run` passes on."""
        if self._process is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def wait(self, deadline: float) -> None:
        """Wait for its end, and kill it at the deadline; its own child ends with it."""
        if self._process is not None:
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def end_all(children: Sequence[Child]) -> None:
    """End them: SIGTERM first, then SIGKILL."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + 2 * _GRACE
    for child in children:
        child.wait(deadline)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)
    runpy.run_module(
        "legroom", run_name="__main__"
    )  # by name: imports point down, and the command line is above
