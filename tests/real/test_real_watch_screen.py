"""The full-screen view on a real pseudo-terminal: it draws, it answers keys and signals, it leaves the screen clean."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from legroom.monitor.watch_log import WatchLog
from watch_runs import moments

pytest.importorskip("textual")
PATIENCE = 90.0


class Screen:
    """A watch at a terminal of 80 by 24."""

    def __init__(self, *options: str, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self._ours)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "legroom", "watch", *(() if "--replay" in options else ("--interval", "0.2s")), *options],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(theirs)
        self.seen = b""

    def until(self, words: bytes) -> None:
        """Read what is drawn until the words were seen."""
        deadline = time.monotonic() + PATIENCE
        while words not in self.seen:
            assert time.monotonic() < deadline, self.seen[-3000:]
            assert self._read() or self.process.poll() is None, self.seen[-3000:]

    def type(self, keys: bytes) -> None:
        self.seen = b""
        os.write(self._ours, keys)

    def ends(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 0.1)[0]:
            return False
        try:
            piece = os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += piece
        return bool(piece)


@contextlib.contextmanager
def _screen(*options: str, **environment: str) -> Iterator[Screen]:
    screen = Screen(*options, **environment)
    try:
        yield screen
    finally:
        screen.close()


@pytest.mark.parametrize("leave", [b"q", b"\x03"])
def test_it_draws_and_leaves_by_key(leave: bytes, tmp_path: Path) -> None:
    log, plot = tmp_path / "run.jsonl", tmp_path / "out.svg"
    with _screen("--pid", str(os.getpid()), "--log", str(log), "--plot", str(plot)) as screen:
        for words in (b"legroom watch", b"RssShmem", str(os.getpid()).encode()):
            screen.until(words)
        screen.type(b"r")
        screen.until("▾RSS".encode())
        screen.type(leave)
        assert screen.ends() == 0
        assert b"\x1b[?1049l" in screen.seen and b"Traceback" not in screen.seen  # the screen from before is back
        assert b"plot written to" in screen.seen.split(b"\x1b[?1049l")[1]
    assert log.read_bytes().endswith(b"\n") and plot.exists()


def test_sigterm_ends_it_cleanly() -> None:
    with _screen("--pid", str(os.getpid())) as screen:
        screen.until(b"RssShmem")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.ends() == 0 and b"\x1b[?1049l" in screen.seen


def test_it_stays_when_what_it_watches_ends() -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        with _screen("--pid", str(sleeper.pid)) as screen:
            screen.until(b"RssShmem")
            sleeper.kill()
            sleeper.wait()
            screen.until(b"ended, press q to quit")
            screen.type(b"q")
            assert screen.ends() == 0
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_finished_watch_and_a_file_that_is_none(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    kept = WatchLog(log, print)
    for moment in moments(100):
        kept.show(moment)
    kept.close()
    with _screen("--replay", str(log)) as screen:
        screen.until(b"ended, press q to quit")
        screen.type(b"\x1b[D")
        screen.until(b"1 of 100 readings back")
        screen.type(b"q")
        assert screen.ends() == 0
    log.write_text("nonsense\nnonsense\n")
    with _screen("--replay", str(log)) as screen:
        assert screen.ends() == 2
        screen.until(b"is not a log of legroom watch")
        assert b"Traceback" not in screen.seen


def test_no_colour_is_asked_for_where_none_is_wanted() -> None:
    with _screen("--pid", str(os.getpid()), NO_COLOR="1") as screen:
        screen.until(b"RssShmem")
        time.sleep(0.5)
        screen.type(b"q")
        assert screen.ends() == 0
        # Greys only: red, green and blue of every colour that was set are the same.
        import re

        for red, green, blue in re.findall(rb"[34]8;2;(\d+);(\d+);(\d+)", screen.seen):
            assert red == green == blue


@pytest.mark.parametrize(("options", "environment"), [(("--plain",), {}), ((), {"TERM": "dumb"})])
def test_lines_where_they_are_wanted(options: tuple[str, ...], environment: dict[str, str]) -> None:
    with _screen("--pid", str(os.getpid()), *options, **environment) as screen:
        screen.until(b"watching process")
        screen.until(b"ram ")
        assert b"\x1b[?1049h" not in screen.seen
        screen.type(b"\x03")
        screen.process.send_signal(signal.SIGINT)
        assert screen.ends() == 0
