"""What the person at the screen has chosen to look at, and the lines that makes.

Covers: sorting, cache or processes, how much history, looking back. Does not cover: the lines themselves
(terminal_rows.py), keys and drawing (terminal_app.py).
"""

from __future__ import annotations

from rich.text import Text

from legroom.columns import cut
from legroom.monitor import terminal_rows as rows
from legroom.monitor.terminal import Terminal, View
from legroom.words import phrase, say

_MOST_ALARMS = 3
_MOST_NOTES = 2
_SPANS = ((300.0, "5 min"), (3600.0, "1 h"), (float("inf"), phrase("all")))


class Desk:
    """The choices, changed by keys."""

    def __init__(self, terminal: Terminal) -> None:
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
