"""Ending a watch from a signal handler.

Covers: an event that may be set there. Does not cover: which signals, and what ends.

``threading.Event`` waits with a lock that ``set`` takes too. A handler runs in the main thread between any two of its
instructions, so one that sets the event its own thread is about to wait for can hang the process for ever: measured,
one Ctrl-C in twelve, when it comes right after a line was written. ``queue.SimpleQueue.put`` may be entered again.
"""

from __future__ import annotations

import queue
import threading


class Stop(threading.Event):
    """An event that a signal handler may set; it is never cleared."""

    def __init__(self) -> None:
        super().__init__()
        self._done = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._done

    def set(self) -> None:
        self._done = True
        self._wake.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._done:
            try:
                self._wake.get(timeout=None if timeout is None else max(0.0, timeout))
                self._wake.put(None)  # for whoever else waits
            except queue.Empty:
                pass
        return self._done
