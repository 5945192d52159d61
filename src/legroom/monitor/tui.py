"""The full-screen terminal view of `legroom watch`, drawn by Textual. What its lines show is in tui_lines.py.

The screen runs in the main thread, as signals and Textual require, and the watch in another. Neither waits for the
other: the screen draws the newest moment when it is ready.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from legroom.errors import UsageError
from legroom.messages import counted, cut, phrase, say
from legroom.monitor import tui_lines
from legroom.monitor.history_and_trend import ThinningBuffer, keep_largest_processes
from legroom.monitor.timeline import ProcessFrame, Timeline, taken
from legroom.monitor.watch_loop import Output, feed_outputs
from legroom.records.watch_sample import Moment, PoolPoint, Sample
from legroom.system.lazy_and_optional_imports import require
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread

if TYPE_CHECKING:
    from textual.app import App

_NOTES_KEPT = 4
_NOTES_SHOWN = 2
_ALARMS_SHOWN = 3
_ROWS_KEPT = 24  # processes in an old moment
_SPANS = ((300.0, "5 min"), (3600.0, "1 h"), (float("inf"), phrase("all")))
_KEYS = (
    ("p/m/w/r/g", phrase("sort by PSS, /dev/shm, swap, RSS, GPU memory")),
    ("t", phrase("the course of each process instead of its figures; again: back")),
    ("o", phrase("one process alone, the largest first; again: the next; escape: all")),
    ("c", phrase("cache entries instead of processes; again: back")),
    ("h", phrase("a longer history; after the longest the shortest")),
    ("← →", phrase("an older or newer reading; with shift: by 60; end: the newest")),
    ("?", phrase("these keys; again: back")),
    ("q", phrase("quit")),
)
_JOIN_TIMEOUT = 15.0  # seconds for the sample being taken
THREADS = 4  # the watch, a slow output, and two of Textual
_TICK = 0.2  # seconds between checks for a new moment
_CSS = """
Screen { overflow: hidden; }
#head { height: 1; }
#pools-box { height: auto; max-height: 40%; }
#alarms, #facts { height: auto; }
#pools { height: auto; width: auto; }
#lower { height: 1fr; min-height: 3; border-top: solid $primary; }
#table { height: auto; width: auto; }
"""


def require_textual() -> None:
    """Raise MissingPackage where Textual is not installed."""
    require("textual", "watch", phrase("the full-screen view"), instead=(phrase("or use --plain"),))


def run_full_screen(
    moments: Iterable[Moment], outputs: Sequence[Output], view: TerminalView, stop: threading.Event
) -> Moment | None:
    """Run the watch and show it full screen until the user quits or ``stop`` is set; returns the last moment."""
    last: list[Moment | None] = [None]
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            last[0] = feed_outputs(moments, [*outputs, view])
        except BaseException as error:  # raised again in the main thread
            errors.append(error)
            stop.set()

    thread = start_daemon_thread(watch, "legroom-watch")
    if thread is None:
        raise UsageError(say("cannot start the full-screen view"), why=why_no_thread(), fix=(say("use --plain"),))
    try:
        make_app(view, stop).run()
    finally:
        stop.set()
        thread.join(_JOIN_TIMEOUT)
    if errors:
        raise errors[0]
    return last[0]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the screen shows: one moment, and the points of each pool up to it."""

    moment: Moment | None
    points: dict[str, list[PoolPoint]]
    ended: bool
    notes: tuple[str, ...]
    frames: tuple[ProcessFrame, ...] = ()  # the processes over the same time
    back: int = 0  # how many kept moments are newer


class TerminalView:
    """An output that keeps moments for the screen to draw, in bounded memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timeline = Timeline()
        self._moments: ThinningBuffer[Moment] = ThinningBuffer(each=160, tiers=5, shrink=_smaller)
        self._notes: deque[str] = deque(maxlen=_NOTES_KEPT)
        self._ended = False
        self.changes = 0

    def show(self, moment: Moment) -> None:
        with self._lock:
            self._timeline.add(moment)
            self._moments.add(moment)
            self.changes += 1

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self.changes += 1

    def report(self, text: str) -> None:
        """Add a note. Printing it would damage the screen."""
        with self._lock:
            self._notes.append(text)
            self.changes += 1

    @property
    def notes(self) -> tuple[str, ...]:
        """The last few notes."""
        with self._lock:
            return tuple(self._notes)

    @property
    def kept(self) -> int:
        """The number of moments kept."""
        return len(self._moments)

    def moved(self, when: float | None, older: int) -> float | None:
        """The time of the moment that many before the one at ``when``; None is the newest moment."""
        with self._lock:
            kept = list(self._moments)
        at = max(0, _place(kept, when) - older)
        return kept[at].sample.when if at < len(kept) - 1 else None

    def snapshot(self, when: float | None = None, span: float = float("inf")) -> Snapshot:
        """The moment at ``when``, or the newest, and ``span`` seconds of points up to it."""
        with self._lock:
            kept = list(self._moments)
            points = self._timeline.points()
            frames = self._timeline.processes.frames()
            ended, notes = self._ended, tuple(self._notes)
        at = _place(kept, when)
        moment = kept[at] if kept else None
        if moment is not None:
            until = moment.sample.when
            points = {
                name: [point for point in series if until - span <= point.when <= until]
                for name, series in points.items()
            }
            frames = [frame for frame in frames if until - span <= frame.when <= until]
        return Snapshot(moment, points, ended, notes, tuple(frames), max(0, len(kept) - 1 - at))


def _place(kept: Sequence[Moment], when: float | None) -> int:
    """The index of the moment at that time; of the one before where it is not kept any more."""
    if when is None:
        return len(kept) - 1
    return max(0, bisect_right(kept, when, key=lambda moment: moment.sample.when) - 1)


def _smaller(moment: Moment) -> Moment:
    return replace(moment, sample=keep_largest_processes(moment.sample, _ROWS_KEPT))


class ScreenState:
    """What the user has chosen with keys (sorting, cache or processes, history, looking back), and its lines."""

    def __init__(self, view: TerminalView) -> None:
        self.view = view
        self.sort = "p"
        self.cache = False
        self.over_time = False
        self.keys = False
        self.opened: int | None = None  # the pid of the process that is shown alone
        self._span = 0
        self._when: float | None = None  # of the moment that is shown; None: the newest
        self._drawn = -1  # changes of the view that are on the screen

    def sort_by(self, key: str) -> None:
        """Sort processes by another column."""
        self.sort, self.cache, self.opened, self.keys = key, False, None, False

    def toggle_over_time(self) -> None:
        """Show the course of each process instead of its figures, or the figures again."""
        self.over_time = self.keys or not self.over_time or self.opened is not None
        self.cache, self.opened, self.keys = False, None, False

    def open_next(self) -> None:
        """Show one process alone: the largest first, then the next one."""
        self.keys = False
        moment = self.view.snapshot(self._when).moment
        rows = sorted(moment.sample.processes, key=lambda row: (-taken(row), row.pid)) if moment else []
        pids = [row.pid for row in rows]
        if pids:
            at = pids.index(self.opened) + 1 if self.opened in pids else 0
            self.opened, self.cache = pids[at % len(pids)], False

    def close(self) -> None:
        """Show all processes again; where the keys are shown, what was shown before."""
        if self.keys:
            self.keys = False
        else:
            self.opened = None

    def toggle_cache(self) -> None:
        """Show cache entries instead of processes, or processes again."""
        self.cache, self.keys = self.keys or not self.cache, False

    def toggle_keys(self) -> None:
        """Show what the keys do, or what was shown before."""
        self.keys = not self.keys

    def next_span(self) -> None:
        """Show more history; after the longest the shortest."""
        self._span = (self._span + 1) % len(_SPANS)

    def look_back(self, samples: int) -> None:
        """Show an older moment, or a newer one for a negative number."""
        self._when = self.view.moved(self._when, samples)

    def newest(self) -> None:
        """Show the newest moment."""
        self._when = None

    def changed(self) -> bool:
        """Whether to redraw."""
        return self.view.changes != self._drawn

    def lines(self, width: int, pools_width: int | None = None) -> dict[str, list[Text]]:
        """The lines of each part of the screen by name; only the head before the first sample.

        ``pools_width``: where those of the pools have less room, because a scroll bar is beside them.
        """
        self._drawn = self.view.changes
        shown = self.view.snapshot(self._when, _SPANS[self._span][0])
        moment = shown.moment
        sample = moment.sample if moment else None
        parts = {"head": [tui_lines.head_line(sample, self._status(shown), width)]}
        if moment is None or sample is None:
            return parts
        levels = tui_lines.level_by_pool(moment.alarms)
        processes = counted(len(sample.processes), phrase("{count} process"), phrase("{count} processes"))
        what = say("cache entries") if self.cache else processes
        noted = (*sample.notes, *shown.notes)[-_NOTES_SHOWN:]
        notes = [Text(cut(say("note: {note}", note=note), width)) for note in noted]
        return {
            **parts,
            "pools": [
                tui_lines.pool_line(pool, shown.points.get(pool.name, ()), levels.get(pool.name), pools_width or width)
                for pool in sample.pools
            ],
            "alarms": tui_lines.alarm_lines(moment.alarms, width, _ALARMS_SHOWN),
            "facts": [*tui_lines.fact_lines(sample, width), *notes],
            "title": [Text(self._title(what))],
            "table": self._table(sample, shown, width),
        }

    def _table(self, sample: Sample, shown: Snapshot, width: int) -> list[Text]:
        if self.keys:
            return [Text(cut(f"{key:<10} {say(what)}", width)) for key, what in _KEYS]
        if self.cache:
            return tui_lines.entry_lines(sample.entries, width)
        if self.opened is not None:
            return tui_lines.opened_lines(sample, shown.frames, self.opened, width)
        if self.over_time:
            return tui_lines.process_history_lines(sample, shown.frames, self.sort, width)
        return tui_lines.process_lines(sample, self.sort, width)

    def _title(self, what: str) -> str:
        span = say(_SPANS[self._span][1])
        if self.opened is not None and not self.cache:
            return say("{what}; history: {span}; escape: all processes", what=what, span=span)
        return say("{what}; history: {span}", what=what, span=span)

    def _status(self, shown: Snapshot) -> str:
        if self._when is not None:
            return say("{count} of {all} readings back (shift: by 60; end: newest)",
                       count=shown.back, all=self.view.kept)  # fmt: skip
        return say("ended, press q to quit") if shown.ended else ""


def make_app(view: TerminalView, stop: threading.Event) -> App[None]:
    """The Textual application.

    Its class is defined here because Textual is optional and takes a third of a second to import.
    """
    from textual.app import App, ComposeResult
    from textual.binding import Binding, BindingType
    from textual.containers import VerticalScroll
    from textual.widgets import Footer, Static

    class WatchApp(App[None]):
        """Redraws on a new moment, a key or a resize; exits when ``stop`` is set."""

        CSS = _CSS
        TITLE = "legroom watch"
        ENABLE_COMMAND_PALETTE = False
        BINDINGS: ClassVar[list[BindingType]] = [
            Binding("q", "quit", say("quit")),
            Binding("ctrl+c", "quit", show=False, priority=True),
            Binding("p", "do('sort_by', 'p')", "PSS"),
            Binding("m", "do('sort_by', 'm')", "shm"),
            Binding("w", "do('sort_by', 'w')", "swap"),
            Binding("r", "do('sort_by', 'r')", "RSS"),
            Binding("g", "do('sort_by', 'g')", "GPU"),
            Binding("t", "do('toggle_over_time')", say("time")),
            Binding("o", "do('open_next')", say("one")),
            Binding("escape", "do('close')", show=False),
            Binding("c", "do('toggle_cache')", say("cache")),
            Binding("h", "do('next_span')", say("span")),
            Binding("question_mark", "do('toggle_keys')", say("keys"), key_display="?"),
            Binding("left", "do('look_back', 1)", say("back"), key_display="←→", priority=True),
            Binding("right", "do('look_back', -1)", show=False, priority=True),
            Binding("shift+left", "do('look_back', 60)", show=False, priority=True),
            Binding("shift+right", "do('look_back', -60)", show=False, priority=True),
            Binding("end", "do('newest')", show=False, priority=True),
        ]
        state = ScreenState(view)

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
            self.set_interval(_TICK, self.check)
            self.redraw()

        def on_resize(self) -> None:
            self.call_after_refresh(self.redraw)  # before, the screen has its old size

        def action_do(self, name: str, *given: object) -> None:
            """Call that method of the state."""
            getattr(self.state, name)(*given)
            self.redraw()

        def check(self) -> None:
            if stop.is_set():
                self.exit()
            elif self.state.changed():
                self.redraw()

        def redraw(self) -> None:
            width, box = max(20, self.size.width), self.query_one("#pools-box")
            bar = box.scrollbar_size_vertical if box.show_vertical_scrollbar else 0
            for part, lines in self.state.lines(width, width - bar).items():
                if part == "title":
                    self.query_one("#lower").border_title = lines[0].plain
                else:
                    self.query_one(f"#{part}", Static).update(Text("\n").join(lines))

    return WatchApp()
