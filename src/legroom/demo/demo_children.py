"""Child processes of the demo under `legroom run`, and the loop that reads their messages, measures them and draws."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from legroom.demo.demo_scripts import MESSAGES
from legroom.errors import DemoFailed
from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.memory import memory, ram_pool
from legroom.probe.shm import shm_space
from legroom.records import Pool
from legroom.system.process_control import handling_signals

SHM = "/dev/shm"
Message = dict[str, Any]
_GRACE = 2.0  # seconds from SIGTERM to SIGKILL, for `legroom run` and for the demo
_SCRIPT = (sys.executable, "-P", "-m", "legroom.demo.demo_scripts")
_RUN = (*_SCRIPT, "run", "--json", "--fresh", "--grace", f"{_GRACE:g}s")
_WITHIN = 180.0  # seconds to wait for anything
_TURN = 0.1  # seconds
_MEASURE = 0.5  # seconds between two measurements: for each the kernel walks every page table


@dataclass
class Child:
    """One child through all its starts; ``note`` is shown in place of its progress."""

    name: str
    command: Sequence[str]  # a script of demo_scripts and its options
    folder: Path  # for logs
    environment: Mapping[str, str]
    options: Sequence[str] = ()  # of `legroom run`
    starts: int = 0
    ended: bool = False
    messages: list[Message] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None  # of `legroom run`
    pss: int | None = None
    rss: int | None = None
    note: str | None = None
    _offset: int = 0

    def start(self, cwd: Path, *more: str) -> None:
        """Start it in that directory; ``more`` goes to the end of its command line."""
        self.starts, self.ended = self.starts + 1, False
        with self._file("json").open("wb") as report, self._file("log").open("wb") as log:
            # A process group of its own: Ctrl-C reaches the demo alone, which then ends its children in order.
            self.process = subprocess.Popen(
                [*_RUN, *self.options, "--", *_SCRIPT, *self.command, *more], cwd=cwd, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=report, stderr=log, process_group=0,
            )  # fmt: skip

    def update(self) -> None:
        """Read the new messages. One that counts as ended can write no more, so all of its messages are read."""
        self.ended = self.process is not None and self.process.poll() is not None
        with contextlib.suppress(FileNotFoundError), (self.folder / MESSAGES).open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]  # an unfinished line is left for the next time
            self._offset += len(whole)
            self.messages += [json.loads(line) for line in whole.splitlines()]

    def all(self, kind: str) -> list[Message]:
        """Its messages of that kind, oldest first."""
        return [message for message in self.messages if message["kind"] == kind]

    def last(self, kind: str) -> Message | None:
        """The newest message of that kind."""
        return next(reversed(self.all(kind)), None)

    @property
    def pid(self) -> int | None:
        """The process below `legroom run`; None before its first message and after its end."""
        started = self.all("started")
        return started[-1]["pid"] if len(started) == self.starts and not self.ended else None

    @property
    def done(self) -> bool:
        """Whether it finished its work."""
        return bool(self.all("done"))

    def report(self) -> dict[str, Any]:
        """The report of `legroom run` on the last start; empty if that was ended before it could write one."""
        try:
            return dict(json.loads(self._file("json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def failed(self) -> DemoFailed:
        """An error that shows the end of its log."""
        lines = [line.strip() for line in self._file("log").read_text(errors="replace").splitlines()]
        verdict = self.report().get("summary") or say("it ended by itself")
        return DemoFailed(
            say("the child process {name} failed: {verdict}", name=self.name, verdict=verdict),
            why=" / ".join([line for line in lines if line][-3:]) or say("it printed nothing"),
            fix=(say("see what is running out:\nlegroom doctor"), say("keep the logs:\nlegroom demo --keep")),
        )

    def _file(self, kind: str) -> Path:
        return self.folder / f"start-{self.starts}.{kind}"


def end_all(children: Sequence[Child]) -> None:
    """End them: SIGTERM first, which `legroom run` passes on, then SIGKILL; their own children end with them."""
    running = [child.process for child in children if child.process is not None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + 2 * _GRACE
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in children:
        child.update()


class Screen(Protocol):
    """Where the demo is shown: stages, events, and the state now. ``clock`` is in seconds since the start."""

    def headline(self, clock: float, title: str) -> None: ...
    def tell(self, clock: float, text: str) -> None: ...
    def draw(self, clock: float, pools: Sequence[Pool], children: Sequence[Child]) -> None: ...
    def close(self) -> None: ...


@dataclass
class EventLoop:
    """What all stages share: how a child is started, measured and waited for. It has one thread.

    Signals are noted when they come and obeyed between two turns, so that no child is started and then forgotten.
    """

    screen: Screen
    host: Host = field(default_factory=Host)
    began: float = field(default_factory=time.monotonic)
    folder: Path = Path()  # of the demo
    environment: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    children: list[Child] = field(default_factory=list)  # of this stage
    started: list[Child] = field(default_factory=list)  # of all stages
    samples: list[dict[str, Any]] = field(default_factory=list)  # when, act (the stage), held: PSS by name
    marks: list[dict[str, Any]] = field(default_factory=list)  # when, text
    _pools: tuple[Pool, ...] = ()
    _signal: int = 0
    _measured: float = 0.0

    @property
    def clock(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def begin(self, stage: str, title: str) -> None:
        """Begin the next stage."""
        self.stage, self.children = stage, []
        self.screen.headline(self.clock, title)

    def tell(self, text: str, mark: str | None = None) -> None:
        """Report an event; ``mark`` is its label in the chart."""
        if mark is not None:
            self.marks.append({"when": round(self.clock, 3), "text": mark})
        self.screen.tell(self.clock, text)

    def start(self, name: str, script: str, given: Mapping[str, Any], *options: str, **variables: str) -> Child:
        """Start a child of this stage, with options of `legroom run` and environment variables of its own."""
        folder = self.folder / self.stage / name
        folder.mkdir(parents=True)
        arguments = json.dumps({"folder": str(folder), "data": str(self.folder / "train.h5"), **given})
        child = Child(name, (script, arguments), folder, {**self.environment, **variables}, options)
        self.started.append(child)
        self.children.append(child)
        child.start(self.folder)
        return child

    def until(self, reached: Callable[[], object], what: str, *, may_end: Child | None = None) -> None:
        """Run until that is true; an error where a child other than ``may_end`` ended before it was done."""
        deadline = time.monotonic() + _WITHIN
        while True:
            self._turn()
            if reached():
                return
            for child in self.children:
                if child.ended and not child.done and child is not may_end:
                    raise child.failed()
            if time.monotonic() >= deadline:
                raise DemoFailed(
                    say("the demo timed out waiting for {what}", what=what),
                    why=say("{seconds:.0f} s passed", seconds=_WITHIN),
                    fix=(say("keep the logs:\nlegroom demo --keep"),),
                )
            time.sleep(_TURN)

    def obey_signals(self) -> None:
        """Raise where Ctrl-C or SIGTERM came."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal:
            raise SystemExit(128 + self._signal)

    def _turn(self) -> None:
        self.obey_signals()
        for child in self.children:
            child.update()
        if time.monotonic() - self._measured >= _MEASURE:
            self._measured = time.monotonic()
            for child in self.children:
                table = {} if child.pid is None else self.host.table(f"/proc/{child.pid}/smaps_rollup")
                child.pss, child.rss = table.get("Pss"), table.get("Rss")
            held = {child.name: child.pss for child in self.children if child.pss is not None}
            self.samples.append({"when": round(self.clock, 3), "act": self.stage, "held": held})
            self._pools = (shm_space(self.host, SHM), ram_pool(memory(self.host)))
        self.screen.draw(self.clock, self._pools, self.children)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Signals are noted, not obeyed, so that nothing is left half made or half removed."""

        def note(number: int, _frame: object) -> None:
            self._signal = self._signal or number

        with handling_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), note):
            try:
                yield
            finally:
                self.screen.close()
