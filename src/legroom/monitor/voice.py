"""What a script says of itself: its components, its phase, its steps.

Covers: gathering it in the script, from any thread; the rate of steps. Does not cover: carrying it to a watch in
another process (board.py), the thread that samples (script.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from legroom.model import Mark, Said
from legroom.words import say

_MOST_MARKS = 256  # between two samples
_RATE_OVER = 10  # looks at the count of steps


@dataclass
class Voice:
    """Filled by the script, read at every sample."""

    components: dict[str, int] = field(default_factory=dict)
    phase: str | None = None
    steps: int | None = None
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def mark(self, text: str) -> None:
        """What begins now."""
        with self._lock:
            self.phase = str(text)
            self.marks.append(Mark(time.time(), self.phase))

    def component(self, **sizes: int | None) -> None:
        """Bytes on the host by component; None takes one back."""
        for name, size in sizes.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
                raise TypeError(
                    say("component {name}: a whole number of bytes, not {size!r}", name=name, size=size)
                )
        with self._lock:
            for name, size in sizes.items():
                if size is None:
                    self.components.pop(name, None)
                else:
                    self.components[name] = size

    def step(self, count: int = 1) -> None:
        """So many steps were done."""
        with self._lock:
            self.steps = (self.steps or 0) + count

    def said(self) -> Said:
        """Everything said so far, with the marks since this was last asked."""
        with self._lock:
            marks = tuple(self.marks)
            self.marks.clear()
            return Said(dict(self.components), self.phase, marks, self.steps)


@dataclass
class Pace:
    """Steps a second, over the last few looks at a count."""

    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_OVER + 1))

    def at(self, clock: float, steps: int | None) -> float | None:
        """The rate now; None where nobody counts, or not for long enough."""
        if steps is None:
            return None
        if self._seen and steps < self._seen[-1][1]:
            self._seen.clear()  # counted anew: a restart
        self._seen.append((clock, steps))
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        return (now - before) / (last - first) if last > first else None
