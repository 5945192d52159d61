"""The full-screen view, drawn by Textual. Covers: layout, keys. Does not cover: what the lines say (terminal_rows.py).

Imported only where there is a screen: Textual takes a third of a second to import.
"""

from __future__ import annotations

import threading
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from legroom.monitor import terminal_rows as rows
from legroom.monitor.terminal import Terminal, View
from legroom.words import say

_TICK = 0.2  # seconds between looks at whether there is something new
_MOST_ALARMS = 3
_SPANS = ((300.0, "5 min"), (3600.0, "1 h"), (float("inf"), "all"))


class WatchApp(App[None]):
    """Redraws when there is a new moment, a key, or another size."""

    CSS = """
    Screen { overflow: hidden; }
    #head { height: 1; }
    #pools-box { height: auto; max-height: 40%; }
    #pools, #alarms, #facts { height: auto; }
    #lower { height: 1fr; min-height: 3; border-top: solid $primary; }
    #table { height: auto; width: auto; }
    """
    TITLE = "legroom watch"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("p", "sort('p')", "PSS"),
        Binding("m", "sort('m')", "shm"),
        Binding("w", "sort('w')", "swap"),
        Binding("r", "sort('r')", "RSS"),
        Binding("g", "sort('g')", "GPU"),
        Binding("c", "cache", "cache"),
        Binding("h", "span", "history"),
        Binding("left", "look_back(1)", "back", key_display="←", priority=True),
        Binding("right", "look_back(-1)", "on", key_display="→", priority=True),
        Binding("shift+left", "look_back(60)", show=False, priority=True),
        Binding("shift+right", "look_back(-60)", show=False, priority=True),
        Binding("end", "newest", show=False, priority=True),
    ]

    def __init__(self, terminal: Terminal, stop: threading.Event) -> None:
        super().__init__()
        self._terminal, self._stop = terminal, stop
        self._seen = -1
        self._sort = "p"
        self._cache = False
        self._span = 0
        self._back = 0

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
        self.set_interval(_TICK, self._look)
        self.redraw()

    def on_resize(self) -> None:
        self.redraw()

    def action_sort(self, key: str) -> None:
        self._sort, self._cache = key, False
        self.redraw()

    def action_cache(self) -> None:
        self._cache = not self._cache
        self.redraw()

    def action_span(self) -> None:
        self._span = (self._span + 1) % len(_SPANS)
        self.redraw()

    def action_look_back(self, samples: int) -> None:
        self._back = max(0, min(self._back + samples, self._terminal.kept - 1))
        self.redraw()

    def action_newest(self) -> None:
        self._back = 0
        self.redraw()

    def _look(self) -> None:
        if self._stop.is_set():
            self.exit()
        elif self._terminal.number != self._seen:
            new = self._terminal.number - self._seen
            if self._back and self._seen >= 0:  # looking back at one moment: it stays on the screen
                self._back = min(self._back + new, self._terminal.kept - 1)
            self.redraw()

    def redraw(self) -> None:
        """Everything anew; some thirty lines of text."""
        self._seen = self._terminal.number
        seconds, name = _SPANS[self._span]
        view = self._terminal.view(self._back, seconds)
        width = max(20, self.size.width)
        sample = view.moment.sample if view.moment else None
        self._put("#head", [rows.head_line(sample, self._note(view), width)])
        if view.moment is None or sample is None:
            return
        worst = rows.worst_by_pool(view.moment.alarms)
        pools = [
            rows.pool_line(pool, view.dots.get(pool.name, ()), worst.get(pool.name), width)
            for pool in sample.pools
        ]
        self._put("#pools", pools)
        self._put("#alarms", rows.alarm_lines(view.moment.alarms, width, _MOST_ALARMS))
        notes = [Text(say("note: {note}", note=note)[:width], style="italic") for note in view.notes]
        self._put("#facts", [*rows.fact_lines(sample, width), *notes])
        lower = (
            rows.entry_lines(sample.entries, width)
            if self._cache
            else rows.process_lines(sample, self._sort, width)
        )
        self._put("#table", lower)
        what = say("cache entries") if self._cache else say("{count} processes", count=len(sample.processes))
        self.query_one("#lower").border_title = say("{what}; history: {span}", what=what, span=name)

    def _note(self, view: View) -> str:
        if self._back:
            return say("looking back {count} of {all}", count=self._back, all=self._terminal.kept)
        return say("ended, q leaves") if view.ended else ""

    def _put(self, place: str, lines: list[Text]) -> None:
        self.query_one(place, Static).update(Text("\n").join(lines))
