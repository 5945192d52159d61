"""The full-screen view, drawn by Textual. Covers: layout and keys. Does not cover: what is shown (terminal_desk.py).

The class is made in a function because Textual is optional, takes a third of a second to import, and does not import
on every platform that the rest of the package does.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from legroom.monitor.terminal import Terminal
from legroom.monitor.terminal_desk import Desk
from legroom.words import say

if TYPE_CHECKING:
    from textual.app import App

_TICK = 0.2  # seconds between looks at whether there is something new
_CSS = """
Screen { overflow: hidden; }
#head { height: 1; }
#pools-box { height: auto; max-height: 40%; }
#pools, #alarms, #facts { height: auto; }
#lower { height: 1fr; min-height: 3; border-top: solid $primary; }
#table { height: auto; width: auto; }
"""


def app_for(terminal: Terminal, stop: threading.Event) -> App[None]:
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
        desk = Desk(terminal)

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
