"""Ending a watch from a signal handler.

Covers: an event that may be set there. Does not cover: which signals, and what ends.

``threading.Event`` waits with a lock that ``set`` takes too. A handler runs in the main thread between any two of its
instructions, so one that sets the event its own thread is about to wait for can hang the process for ever: measured,
one Ctrl-C in twelve, when it comes right after a line was written. A bare lock may be released anywhere.
"""

from __future__ import annotations

import _thread
import threading


class Stop(threading.Event):
    """An event that a signal handler may set; it is never cleared."""

    def __init__(self) -> None:
        super().__init__()
        self._done = False
        self._shut = _thread.allocate_lock()
        self._shut.acquire()

    def is_set(self) -> bool:
        return self._done

    def set(self) -> None:
        self._done = True
        self._open()

    def wait(self, timeout: float | None = None) -> bool:
        # Not a queue.SimpleQueue: one that a signal interrupted at the end of its timeout was seen to wait for ever.
        if not self._done and self._shut.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            self._open()  # for whoever else waits
        return self._done

    def _open(self) -> None:
        try:
            self._shut.release()
        except RuntimeError:  # it is open: it was set before, or a handler came between
            pass
