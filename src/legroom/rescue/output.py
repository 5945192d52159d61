"""A child's output: passed on unchanged, its end kept.

Covers: a pipe where our own stream is a pipe or a file, a pseudo-terminal where it is a terminal (so that progress bars
stay), one channel for both streams where both go to one place (so that their order stays). Does not cover: reading
meaning into it (log_reader.py).

Bytes are passed on as they come. When whoever reads us goes away, so do we: the channel is closed and the child
gets its SIGPIPE as it would without us.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass, field

from legroom.rescue.log_reader import Tail

_CHUNK = 1 << 16


@dataclass
class _Channel:
    source: int  # we read here
    end: int  # the child writes here; closed in us once it has started
    target: int
    terminal: bool
    within_line: bool = False  # what was passed on last did not end with a line feed: a progress bar
    thread: threading.Thread | None = None


@dataclass
class Output:
    """The two streams of one attempt."""

    stdout: int = 1  # where they go
    stderr: int = 2
    tail: Tail = field(default_factory=Tail)
    count: int = 0  # bytes passed on
    _channels: list[_Channel] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> tuple[int, int]:
        """The descriptors for the child's standard output and error."""
        first = self._channel(self.stdout)
        second = first if _one_place(self.stdout, self.stderr) else self._channel(self.stderr)
        return first.end, second.end

    def start(self) -> None:
        """Pass on from now; the child has its own copies of the ends."""
        for channel in self._channels:
            os.close(channel.end)
            channel.thread = threading.Thread(target=self._pump, args=(channel,), daemon=True)
            channel.thread.start()

    def abandon(self) -> None:
        """Close everything: there was no child."""
        for channel in self._channels:
            os.close(channel.end)
            os.close(channel.source)
        self._channels.clear()

    def finish(self, within: float) -> None:
        """Wait until all is passed on; what still holds the other end after that long is left alone."""
        deadline = time.monotonic() + within
        for channel in self._channels:
            if channel.thread is not None:
                channel.thread.join(max(0.0, deadline - time.monotonic()))

    def begin_line(self, target: int = 2) -> None:
        """End the line that the child is in the middle of, where it and ``target`` go to one place.

        Otherwise what we write there would stand behind a progress bar, or be drawn over by it.
        """
        with self._lock:
            for channel in self._channels:
                if channel.within_line and _one_place(channel.target, target):
                    channel.within_line = False
                    with contextlib.suppress(OSError):
                        os.write(target, b"\n")

    def resize(self) -> None:
        """Tell the pseudo-terminals how large the terminal is now."""
        for channel in self._channels:
            if channel.terminal:
                _copy_size(channel.target, channel.source)

    def _channel(self, target: int) -> _Channel:
        terminal = os.isatty(target) and sys.platform != "win32"
        if terminal:
            source, end = _pseudo_terminal(target)
        else:
            source, end = os.pipe()
        channel = _Channel(source, end, target, terminal)
        self._channels.append(channel)
        return channel

    def _pump(self, channel: _Channel) -> None:
        try:
            while data := _read(channel.source):
                with self._lock:
                    self.tail.feed(data)
                    self.count += len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(channel.target, view) :]
                channel.within_line = not data.endswith(b"\n")
        except OSError:
            pass  # whoever read us has gone
        finally:
            with contextlib.suppress(OSError):
                os.close(channel.source)


def _read(source: int) -> bytes:
    try:
        return os.read(source, _CHUNK)
    except OSError:  # a pseudo-terminal whose other side was closed gives EIO
        return b""


def _one_place(first: int, second: int) -> bool:
    if first == second:
        return True
    try:
        one, two = os.fstat(first), os.fstat(second)
    except OSError:
        return False
    return (one.st_dev, one.st_ino, one.st_rdev) == (two.st_dev, two.st_ino, two.st_rdev)


def _pseudo_terminal(target: int) -> tuple[int, int]:
    import pty
    import tty

    source, end = pty.openpty()
    tty.setraw(end)  # the real terminal turns line feeds into new lines; twice would be a change
    _copy_size(target, source)
    return source, end


def _copy_size(from_terminal: int, to_terminal: int) -> None:
    import fcntl
    import termios

    with contextlib.suppress(OSError):
        fcntl.ioctl(
            to_terminal, termios.TIOCSWINSZ, fcntl.ioctl(from_terminal, termios.TIOCGWINSZ, b"\0" * 8)
        )
