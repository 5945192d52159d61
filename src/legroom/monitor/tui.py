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
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from legroom.columns import cut
from legroom.errors import MissingPackage
from legroom.model import Moment, PoolPoint
from legroom.monitor import tui_lines as rows
from legroom.monitor.sample_history import ThinningBuffer
from legroom.monitor.timeline import Timeline
from legroom.monitor.watch_loop import Output, feed_outputs
from legroom.words import phrase, say

if TYPE_CHECKING:
    from textual.app import App


_NOTES_KEPT = 4
_ROWS_KEPT = 24  # processes in an old moment
_PATIENCE = 15.0  # seconds for the sample under way


@dataclass(frozen=True, slots=True)
class View:
    """What the screen shows: one moment, each pool's course up to it."""

    moment: Moment | None
    dots: dict[str, list[PoolPoint]]
    ended: bool
    notes: tuple[str, ...]


class TerminalView:
    """An output that is drawn by whoever asks for a view; keeps moments to look back at, in bounded memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._story = Timeline()
        self._moments: ThinningBuffer[Moment] = ThinningBuffer(each=160, tiers=5, older=_thinner)
        self._notes: deque[str] = deque(maxlen=_NOTES_KEPT)
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


def require_textual() -> None:
    """MissingPackage where Textual is not installed."""
    try:
        import textual  # noqa: F401
    except ImportError as problem:
        raise MissingPackage(
            say("the full-screen view needs the package textual"),
            why=str(problem),
            fix=(say("pip install 'legroom[watch]'"), say("or ask for lines with --plain")),
        ) from problem


def run_full_screen(
    stream: Iterable[Moment], outputs: Sequence[Output], terminal: TerminalView, stop: threading.Event
) -> Moment | None:
    """Drive the watch and show it full screen until the person leaves or ``stop`` is set; the last moment."""
    require_textual()

    last: list[Moment | None] = [None]
    trouble: list[BaseException] = []

    def watch() -> None:
        try:
            last[0] = feed_outputs(stream, [*outputs, terminal])
        except BaseException as problem:  # raised again below, where somebody hears it
            trouble.append(problem)
            stop.set()

    thread = threading.Thread(target=watch, name="legroom-watch", daemon=True)
    thread.start()
    try:
        make_app(terminal, stop).run()
    finally:
        stop.set()
        thread.join(_PATIENCE)
    if trouble:
        raise trouble[0]
    return last[0]


_MOST_ALARMS = 3
_MOST_NOTES = 2
_SPANS = ((300.0, "5 min"), (3600.0, "1 h"), (float("inf"), phrase("all")))


class ScreenState:
    """The choices, changed by keys."""

    def __init__(self, terminal: TerminalView) -> None:
        self.terminal = terminal
        self.sort = "p"
        self.cache = False
        self._span = 0
        self._back = 0
        self._seen = -1

    def sort_by(self, key: str) -> None:
        """Processes by another of their columns."""
        self.sort, self.cache = key, False

    def toggle_cache(self) -> None:
        """Cache entries instead of processes, and back."""
        self.cache = not self.cache

    def next_span(self) -> None:
        """More history, then little again."""
        self._span = (self._span + 1) % len(_SPANS)

    def look_back(self, samples: int) -> None:
        """So many samples further back, or nearer."""
        self._back = max(0, min(self._back + samples, self.terminal.kept - 1))

    def newest(self) -> None:
        """Back to now."""
        self._back = 0

    def news(self) -> bool:
        """Whether there is something to draw anew; a moment that is looked back at stays."""
        number = self.terminal.number
        if number == self._seen:
            return False
        if self._back and self._seen >= 0:
            self.look_back(number - self._seen)
        return True

    def lines(self, width: int) -> dict[str, list[Text]]:
        """The lines of each part of the screen, by its name; only the head before the first sample."""
        self._seen = self.terminal.number
        view = self.terminal.view(self._back, _SPANS[self._span][0])
        moment = view.moment
        sample = moment.sample if moment else None
        parts = {"head": [rows.head_line(sample, self._note(view), width)]}
        if moment is None or sample is None:
            return parts
        worst = rows.worst_by_pool(moment.alarms)
        what = say("cache entries") if self.cache else say("{count} processes", count=len(sample.processes))
        notes = [Text(cut(say("note: {note}", note=note), width)) for note in view.notes[-_MOST_NOTES:]]
        return {
            **parts,
            "pools": [
                rows.pool_line(pool, view.dots.get(pool.name, ()), worst.get(pool.name), width)
                for pool in sample.pools
            ],
            "alarms": rows.alarm_lines(moment.alarms, width, _MOST_ALARMS),
            "facts": [*rows.fact_lines(sample, width), *notes],
            "title": [Text(say("{what}; history: {span}", what=what, span=say(_SPANS[self._span][1])))],
            "table": rows.entry_lines(sample.entries, width)
            if self.cache
            else rows.process_lines(sample, self.sort, width),
        }

    def _note(self, view: View) -> str:
        if self._back:
            return say("looking back {count} of {all}", count=self._back, all=self.terminal.kept)
        return say("ended, q leaves") if view.ended else ""


_TICK = 0.2  # seconds between looks at whether there is something new
_CSS = """
Screen { overflow: hidden; }
#head { height: 1; }
#pools-box { height: auto; max-height: 40%; }
#pools, #alarms, #facts { height: auto; }
#lower { height: 1fr; min-height: 3; border-top: solid $primary; }
#table { height: auto; width: auto; }
"""


def make_app(terminal: TerminalView, stop: threading.Event) -> App[None]:
    """The application that shows what the terminal keeps, until the person leaves or ``stop`` is set."""
    from textual.app import App, ComposeResult
    from textual.binding import Binding, BindingType
    from textual.containers import VerticalScroll
    from textual.widgets import Footer, Static

    class WatchApp(App[None]):
        """Redraws when there is a new moment, a key, or another size."""

        CSS = _CSS
        TITLE = "legroom watch"
        ENABLE_COMMAND_PALETTE = False
        BINDINGS: ClassVar[list[BindingType]] = [
            Binding("q", "quit", say("quit")),
            Binding("ctrl+c", "quit", show=False, priority=True),
            Binding("p", "sort('p')", "PSS"),
            Binding("m", "sort('m')", "shm"),
            Binding("w", "sort('w')", "swap"),
            Binding("r", "sort('r')", "RSS"),
            Binding("g", "sort('g')", "GPU"),
            Binding("c", "cache", say("cache")),
            Binding("h", "span", say("history")),
            Binding("left", "look_back(1)", say("back"), key_display="←", priority=True),
            Binding("right", "look_back(-1)", say("forward"), key_display="→", priority=True),
            Binding("shift+left", "look_back(60)", show=False, priority=True),
            Binding("shift+right", "look_back(-60)", show=False, priority=True),
            Binding("end", "newest", show=False, priority=True),
        ]
        desk = ScreenState(terminal)

        def compose(self) -> ComposeResult:
            yield Static(id="head", markup=False)
            with VerticalScroll(id="pools-box"):
                yield Static(id="pools", markup=False)
            yield Static(id="alarms", markup=False)
            yield Static(id="facts", markup=False)
            with VerticalScroll(id="lower"):
                yield Static(id="table", markup=False)
            yield Footer(compact=True, show_command_palette=False)

        def on_mount(self) -> None:
            self.query_one("#lower").focus()
            self.set_interval(_TICK, self.look)
            self.redraw()

        def on_resize(self) -> None:
            self.redraw()

        def action_sort(self, key: str) -> None:
            self.desk.sort_by(key)
            self.redraw()

        def action_cache(self) -> None:
            self.desk.toggle_cache()
            self.redraw()

        def action_span(self) -> None:
            self.desk.next_span()
            self.redraw()

        def action_look_back(self, samples: int) -> None:
            self.desk.look_back(samples)
            self.redraw()

        def action_newest(self) -> None:
            self.desk.newest()
            self.redraw()

        def look(self) -> None:
            """What the clock does."""
            if stop.is_set():
                self.exit()
            elif self.desk.news():
                self.redraw()

        def redraw(self) -> None:
            """Everything anew; some thirty lines of text."""
            for place, lines in self.desk.lines(max(20, self.size.width)).items():
                if place == "title":
                    self.query_one("#lower").border_title = lines[0].plain
                else:
                    self.query_one(f"#{place}", Static).update(Text("\n").join(lines))

    return WatchApp()
