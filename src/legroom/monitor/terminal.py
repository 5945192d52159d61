"""The terminal view of a watch: what it keeps, and running the screen beside the watch.

Covers: handing moments from the watch's thread to the screen's. Does not cover: the screen (terminal_app.py, which
needs Textual), what is on it (terminal_desk.py, terminal_rows.py).

The screen has the main thread, because signals and Textual want it; the watch runs in another, and neither waits for
the other: the screen looks for the newest moment when it is ready to draw.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from legroom.errors import MissingPackage
from legroom.model import Moment, PoolPoint
from legroom.monitor.story import Story
from legroom.monitor.stream import Output, drive
from legroom.monitor.tiers import Tiers
from legroom.words import say

_MOST_NOTES = 4
_ROWS_KEPT = 24  # processes in an old moment
_PATIENCE = 15.0  # seconds for the sample under way


@dataclass(frozen=True, slots=True)
class View:
    """What the screen shows: one moment, each pool's course up to it."""

    moment: Moment | None
    dots: dict[str, list[PoolPoint]]
    ended: bool
    notes: tuple[str, ...]


class Terminal:
    """An output that is drawn by whoever asks for a view; keeps moments to look back at, in bounded memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._story = Story()
        self._moments: Tiers[Moment] = Tiers(each=160, tiers=5, older=_thinner)
        self._notes: deque[str] = deque(maxlen=_MOST_NOTES)
        self._ended = False
        self.number = 0  # of changes so far

    def show(self, moment: Moment) -> None:
        with self._lock:
            self._story.add(moment)
            self._moments.add(moment)
            self.number += 1

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self.number += 1

    def tell(self, text: str) -> None:
        """A sentence for the person, which would spoil the screen if it were printed."""
        with self._lock:
            self._notes.append(text)
            self.number += 1

    @property
    def notes(self) -> tuple[str, ...]:
        """The last few sentences that were told."""
        with self._lock:
            return tuple(self._notes)

    @property
    def kept(self) -> int:
        """How many moments there are to look back at."""
        return len(self._moments)

    def view(self, back: int = 0, span: float = float("inf")) -> View:
        """The moment so many before the newest, and so many seconds of the courses up to it."""
        with self._lock:
            moment = self._story.moment
            if back:
                kept = list(self._moments)
                moment = kept[max(0, len(kept) - 1 - back)] if kept else None
            dots = self._story.dots()
            ended, notes = self._ended, tuple(self._notes)
        if moment is not None:
            until = moment.sample.when
            dots = {
                name: [dot for dot in one if until - span <= dot.when <= until] for name, one in dots.items()
            }
        return View(moment, dots, ended, notes)


def _thinner(moment: Moment) -> Moment:
    """An old moment without the processes that hold least."""
    rows = moment.sample.processes
    if len(rows) <= _ROWS_KEPT:
        return moment
    most = sorted(rows, key=lambda row: max(row.host or 0, row.rss_shmem or 0, row.gpu or 0))[-_ROWS_KEPT:]
    return replace(moment, sample=replace(moment.sample, processes=tuple(most)))


def why_no_screen() -> str | None:
    """Why there is no screen to draw on, or None."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return say("not a terminal")
    if os.environ.get("TERM") in (None, "", "dumb"):
        return say("a terminal without a screen (TERM)")
    return None


def ready() -> None:
    """MissingPackage where Textual is not installed."""
    try:
        import textual  # noqa: F401
    except ImportError as problem:
        raise MissingPackage(
            say("the full-screen view needs the package textual"),
            why=str(problem),
            fix=(say("pip install 'legroom[watch]'"), say("or ask for lines with --plain")),
        ) from problem


def at_the_screen(
    stream: Iterable[Moment], outputs: Sequence[Output], terminal: Terminal, stop: threading.Event
) -> Moment | None:
    """Drive the watch and show it full screen until the person leaves or ``stop`` is set; the last moment."""
    ready()
    from legroom.monitor.terminal_app import app_for

    last: list[Moment | None] = [None]
    trouble: list[BaseException] = []

    def watch() -> None:
        try:
            last[0] = drive(stream, [*outputs, terminal])
        except BaseException as problem:  # raised again below, where somebody hears it
            trouble.append(problem)
            stop.set()

    thread = threading.Thread(target=watch, name="legroom-watch", daemon=True)
    thread.start()
    try:
        app_for(terminal, stop).run()
    finally:
        stop.set()
        thread.join(_PATIENCE)
    if trouble:
        raise trouble[0]
    return last[0]
