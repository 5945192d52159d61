"""`legroom watch --plot FILE.png|svg|html`: the watch is collected while it runs and drawn when it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from legroom.charts.chart_file import check_path, render
from legroom.charts.drawing import since
from legroom.charts.page import element, figure, page, table
from legroom.charts.pool_chart import amount, pool_chart
from legroom.monitor.timeline import Timeline
from legroom.records import Moment, PoolPoint
from legroom.system.atomic_file import replace_file
from legroom.units import format_duration
from legroom.words import say

KINDS = (".png", ".svg", ".html")


class Plot:
    """Draws what it was shown when it is closed. A path that cannot work is refused before the watch begins."""

    def __init__(self, path: str | os.PathLike[str], report: Callable[[str], object]) -> None:
        self.path = check_path(path, KINDS)
        self._report = report
        self._timeline = Timeline()

    def show(self, moment: Moment) -> None:
        self._timeline.add(moment)

    def close(self) -> None:
        if self._timeline.moment is None:
            self._report(say("no samples: {path} is not drawn", path=self.path))
            return
        try:
            replace_file(self.path, drawn(self._timeline, self.path.suffix.lower()))
        except OSError as problem:
            why = problem.strerror or problem
            self._report(say("cannot write {path}: {why}", path=self.path, why=why))
        else:
            self._report(say("plot written to {path}", path=self.path))


def drawn(timeline: Timeline, kind: str) -> bytes:
    """The watch as the content of a file of that kind."""
    if kind == ".html":
        return watch_page(timeline).encode()
    title = timeline.sample.watched if timeline.sample else ""
    return render(pool_chart(timeline.points(), timeline.marks, timeline.alarm_spans(), title=title), kind)


def watch_page(timeline: Timeline) -> str:
    """The watch as a page: the chart, and its peaks, alarms and marks as tables."""
    sample, began = timeline.sample, timeline.began or 0.0
    lasted = max(0.0, sample.when - began) if sample else 0.0
    start = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(began))
    pools, alarms = timeline.points(), timeline.alarm_spans()
    return page(
        say("Memory of {what}", what=sample.watched if sample else ""),
        (
            element("p", say("Started {start}, ran for {time}.", start=start, time=format_duration(lasted)), "soft"),
            figure(pool_chart(pools, timeline.marks, alarms)),
            table(
                say("Pools"),
                (say("pool"), say("size"), say("peak"), say("share"), say("when")),
                (_peak_row(name, points, began) for name, points in pools.items()),
            ),
            table(
                say("Alarms"),
                (say("when"), say("lasted"), say("level"), say("code"), say("message")),
                (
                    (
                        since(alarm.since, began),
                        say("until the end") if alarm.until is None else format_duration(alarm.until - alarm.since),
                        alarm.level,
                        alarm.code,
                        alarm.message,
                    )
                    for alarm in alarms
                ),
            ),
            table(say("Marks"), (say("when"), say("mark")), ((since(m.when, began), m.text) for m in timeline.marks)),
        ),
    )  # fmt: skip


def _peak_row(name: str, points: Sequence[PoolPoint], began: float) -> tuple[str, ...]:
    known = [point for point in points if point.used is not None]
    if not known:
        return name, say("unknown"), say("unknown"), "", ""
    peak = max(known, key=lambda point: point.used or 0)
    return (
        name,
        say("unknown") if peak.size is None else amount(name, peak.size),
        amount(name, peak.used or 0),
        say("unknown") if peak.share is None else f"{peak.share * 100:.0f} %",
        since(peak.when, began),
    )
