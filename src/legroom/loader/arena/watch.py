"""The first worker while it draws its first samples: stopped before the kernel stops somebody.

Covers: looking at this process's growth, asking whether it may go on, ending the draw. Does not cover: the answer
(arena/door.py).

What a batch takes is judged when it is there. Where its samples alone are more than is left there never comes such a
moment: the kernel kills, perhaps the training itself, or reclaims code pages for minutes. So while samples are drawn a
thread looks every few milliseconds, and a draw that cannot end well ends with a MemoryError, in the worker. What goes
on drawing after that ends its process, without an error of its own: the answer has been given.

A single call that holds the interpreter and takes all that is left is not seen in time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from enum import Enum, auto

_LOOK_S = 0.002
_STEP = 1 << 20  # growth that is worth a look at the machine, which takes a millisecond


class May(Enum):
    """Whether a draw may go on."""

    GO_ON = auto()
    STOP = auto()
    NO_MORE = auto()  # it was stopped before, and draws again


class Watch:
    """A look at this process while it draws, from another thread, for as long as it is ``needed``.

    ``may`` is asked with the growth in bytes.
    """

    def __init__(self, needed: Callable[[], bool], may: Callable[[int], May]) -> None:
        self._needed, self._may, self._drawing = needed, may, threading.get_ident()
        self._low = self._asked = _resident()
        self._lock, self._held = threading.Lock(), False
        threading.Thread(target=self._look, name="legroom-watch", daemon=True).start()

    def hold(self) -> None:
        """Stop nobody from here on: when this returns, whoever was to be stopped has been."""
        with self._lock:
            self._held = True

    def go_on(self) -> None:
        """Look again."""
        self._held = False

    def _look(self) -> None:
        while self._needed():
            time.sleep(_LOOK_S)
            now = _resident()
            self._low, self._asked = min(self._low, now), min(self._asked, now)
            if now < self._asked + _STEP:
                continue
            self._asked = now
            with self._lock:
                answer = May.GO_ON if self._held else self._may(now - self._low)
                if answer is May.STOP:
                    raised = ctypes.py_object(MemoryError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._drawing), raised)
            if answer is May.NO_MORE:
                os._exit(0)


def _resident() -> int:
    """Anonymous memory of this process, copies that a fork still shares included; 0 where nobody says."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * mmap.PAGESIZE
