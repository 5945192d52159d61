"""run at a terminal: its size, Ctrl-Z in a pipeline, fg and bg."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests use pseudo-terminals as Linux has them")
RUN = [sys.executable, "-m", "legroom", "run", "--quiet", "--"]


class Terminal:
    """The user's side of a pseudo-terminal. What is read behind a text that was waited for is kept for the next one."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self._rest = b""

    def until(self, text: bytes) -> bytes:
        """What is shown up to the end of `text`, from where the last call ended."""
        while text not in self._rest:
            assert select.select([self.ours], [], [], 60)[0], self._rest
            self._rest += os.read(self.ours, 4096)
        shown, text, self._rest = self._rest.partition(text)
        return shown + text

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    one = Terminal()
    yield one
    os.close(one.ours)
    os.close(one.theirs)


# The shell of that terminal: it starts a pipeline in a process group of its own, in the foreground.
SHELL = """
import fcntl, os, signal, subprocess, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
def foreground(group): os.tcsetpgrp(0, group)
def state(pid):
    status = os.waitpid(pid, os.WUNTRACED)[1]
    return "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
def start(words, piped):
    read, write = os.pipe()
    first = subprocess.Popen(words, stdout=write if piped else None, process_group=0)
    foreground(first.pid)
    others = [subprocess.Popen(["cat"], stdin=read, process_group=first.pid).pid] if piped else []
    os.close(read), os.close(write)
    return first.pid, *others
"""


def _at(terminal: Terminal, shell: str, job: str, folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", SHELL + shell, *RUN, sys.executable, "-c", job]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.Popen(
        words, stdin=terminal.theirs, stdout=terminal.theirs, stderr=terminal.theirs, cwd=folder, env=environment
    )


def test_the_job_learns_the_new_size_of_the_terminal(terminal: Terminal, tmp_path: Path) -> None:
    job = (
        "import os, signal\n"
        "def told(*_): print('columns', os.get_terminal_size(1).columns, flush=True)\n"
        "signal.signal(signal.SIGWINCH, told)\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()"
    )
    with _at(terminal, "pids = start(sys.argv[1:], False)\nprint(state(pids[0]))", job, tmp_path) as shell:
        terminal.until(b"ready")
        fcntl.ioctl(terminal.ours, termios.TIOCSWINSZ, struct.pack("4H", 30, 77, 0, 0))
        terminal.until(b"columns 77")
        terminal.type(b"\x03")
        shell.wait(60)


PIPELINE = """
pids = start(sys.argv[1:], True)
print(*(state(pid) for pid in pids), flush=True)  # after Ctrl-Z
foreground(os.getpgrp())
{then}
os.killpg(pids[0], signal.SIGCONT)
print(*(state(pid) for pid in pids), flush=True)
print("ours" if os.tcgetpgrp(0) == os.getpgrp() else "theirs", flush=True)
"""
WAITS = """
import os, signal, time
continued = []
signal.signal(signal.SIGCONT, lambda *_: continued.append(1))
print("ready", flush=True)
while not continued: time.sleep(0.05)
print("foreground" if os.tcgetpgrp(0) == os.getpgrp() else "background", flush=True)
"""


@pytest.mark.parametrize(
    ("then", "where", "end"), [("foreground(pids[0])", b"foreground", b"theirs"), ("", b"background", b"ours")],
    ids=["fg", "bg"],
)  # fmt: skip
def test_ctrl_z_stops_the_whole_pipeline(
    then: str, where: bytes, end: bytes, terminal: Terminal, tmp_path: Path
) -> None:
    with _at(terminal, PIPELINE.replace("{then}", then), WAITS, tmp_path) as shell:
        terminal.until(b"ready")
        terminal.type(b"\x1a")
        terminal.until(b"stopped stopped")
        shown = terminal.until(b"rs\r\n")
        assert where in shown and b"0 0" in shown and end in shown, shown
        assert shell.wait(60) == 0


def test_ctrl_z_where_nobody_could_continue_it_does_not_stop_it(terminal: Terminal, tmp_path: Path) -> None:
    """As under `ssh -t` or in a container: the session consists of the command."""
    job = "import time\nprint('ready', flush=True)\nfor n in range(20): time.sleep(0.1)\nprint('end')"
    with _at(terminal, "os.execv(sys.argv[1], sys.argv[1:])", job, tmp_path) as shell:
        terminal.until(b"ready")
        terminal.type(b"\x1a")
        terminal.until(b"end")
        assert shell.wait(60) == 0
