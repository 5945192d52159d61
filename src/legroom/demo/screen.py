"""What is seen while the demo runs: bars on a terminal, lines elsewhere.

Covers: pools, every child's progress and what it holds, events as they come; 80 columns are enough. Does not cover: the
table at the end (table.py), deciding anything.

On a terminal the bars stay at the bottom and events scroll past above them. Elsewhere, and for screen readers, events
are lines, with one line of figures every few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from legroom.columns import left, right
from legroom.demo.job import Job
from legroom.model import Pool
from legroom.units import format_size
from legroom.words import listed, say

if TYPE_CHECKING:
    from rich.text import Text

Wrap = Callable[[str, str], list[str]]  # (what a text hangs on, the text): its lines
_LINE_EVERY = 4.0  # seconds between two lines of figures
_DRAW_EVERY = 0.25
_FULL = 0.95
_NAME, _MIDDLE = 10, 46  # columns


@dataclass(frozen=True, slots=True)
class View:
    """What there is to see at one moment."""

    clock: float
    title: str
    pools: tuple[Pool, ...]
    jobs: tuple[Job, ...]


class Screen(Protocol):
    """Where the demo is seen."""

    def headline(self, clock: float, title: str) -> None:
        """A new act."""

    def tell(self, clock: float, text: str) -> None:
        """Something happened."""

    def draw(self, view: View) -> None:
        """How it is now."""

    def close(self) -> None:
        """No more of it."""


class Lines:
    """Plain lines, through ``write``."""

    def __init__(self, write: Callable[[str], object], wrap: Wrap) -> None:
        self._write, self._wrap = write, wrap
        self._due = _LINE_EVERY

    def headline(self, clock: float, title: str) -> None:
        self._write("")
        self._write(title)
        self._due = clock + _LINE_EVERY

    def tell(self, clock: float, text: str) -> None:
        for line in self._wrap(_stamp(clock), text):
            self._write(line)

    def draw(self, view: View) -> None:
        if view.clock >= self._due and view.jobs:
            self._due = view.clock + _LINE_EVERY
            self.tell(view.clock, figures(view))

    def close(self) -> None:
        """Nothing is held."""


class Bars:
    """A terminal, by rich: drawn only when asked, so that no thread of its own is needed."""

    def __init__(self, wrap: Wrap, *, colour: bool, to: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._wrap, self._due = wrap, 0.0
        self._console = Console(file=to, highlight=False, no_color=not colour)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def headline(self, clock: float, title: str) -> None:
        self._console.print()
        self._console.print(title, style="bold", markup=False)

    def tell(self, clock: float, text: str) -> None:
        for line in self._wrap(_stamp(clock), text):
            self._console.print(line, markup=False, soft_wrap=True)

    def draw(self, view: View) -> None:
        from rich.console import Group

        if view.clock < self._due:
            return
        self._due = view.clock + _DRAW_EVERY
        self._live.update(Group(*bars(view, self._console.width)), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _stamp(clock: float) -> str:
    return say("{clock:>4.0f} s  ", clock=clock)


def figures(view: View) -> str:
    """The moment in one sentence."""
    parts = [say("{name} {share:.0%}", name=job.name, share=job.share or 0.0) for job in view.jobs]
    held = [job.pss for job in view.jobs if job.pss is not None]
    if len(held) > 1:
        parts.append(say("together {size}", size=format_size(sum(held))))
    elif held:
        parts.append(say("holds {size}", size=format_size(held[0])))
    for pool in view.pools:
        if pool.used is not None and pool.size:
            parts.append(
                say("{pool} {used} of {size}", pool=pool.name, used=format_size(pool.used), size=format_size(pool.size))
            )  # fmt: skip
    return listed(parts)


def bars(view: View, width: int) -> list[Text]:
    """The moment as lines with bars."""
    from rich.text import Text

    from legroom.monitor.tui_lines import pool_line

    lines = [Text("")]
    for pool in view.pools:
        level = "critical" if (pool.used_share or 0.0) >= _FULL else None
        lines.append(pool_line(pool, (), level, width))
    if view.jobs:
        heads = (
            (say("progress"), -25),
            (say("step"), 13),
            (say("loss"), 8),
            (say("holds"), 10),
            (say("maps"), 10),
        )
        head = "".join(_padded(word, columns) for word, columns in heads)
        lines.append(Text(" " * _NAME + head, style="dim", no_wrap=True))
    lines += [_job_line(job) for job in view.jobs]
    held = [job.pss for job in view.jobs if job.pss is not None]
    if len(held) > 1:
        words = _padded(say("together (PSS: what is shared is counted once)"), -(_NAME + _MIDDLE))
        lines.append(Text(f"{words}{format_size(sum(held)):>10}", style="dim", no_wrap=True))
    for line in lines:
        line.truncate(width)
    return lines


def _job_line(job: Job) -> Text:
    from rich.text import Text

    from legroom.monitor.tui_lines import bar

    line = Text(no_wrap=True).append(_padded(job.name, -_NAME), style="bold")
    share, told = job.share, job.last_step
    note = job.notes[-1] if job.notes else None
    if share is None or told is None or note is not None:
        style = "dim" if note is None else "bold yellow"
        line.append(_padded(note or say("starting"), -_MIDDLE), style=style)
    else:
        line.append(bar(share, 18), style="cyan").append(f" {share * 100:>3.0f} % ")
        line.append(f"{told['step']:>6} / {told['of']:<5}")
        line.append(f"{told['loss']:>7.2f}" if "loss" in told else " " * 7)
    return line.append(f"{_size(job.pss):>10}{_size(job.rss):>10}")


def _padded(text: str, columns: int) -> str:
    """At the right of so many columns, or of less than none at the left."""
    return right(text, columns) if columns > 0 else left(text, -columns)


def _size(count: int | None) -> str:
    return "" if count is None else format_size(count)
