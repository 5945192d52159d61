"""`legroom watch --plot FILE.png|svg|html`: the watch is collected while it runs and drawn when it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from legroom.charts.drawing import Drawing, check_path, one_below_another, render, since
from legroom.charts.html_page import element, figure, page, table
from legroom.charts.pool_and_process_charts import Layer, amount, pool_chart, stacked_chart
from legroom.messages import cut, say
from legroom.monitor.timeline import ProcessPoint, Timeline, largest_pids, over_steps
from legroom.monitor.tui_lines import growth_rate
from legroom.records.watch_sample import Moment, PoolPoint
from legroom.system.atomic_file import replace_file
from legroom.units import format_duration

KINDS = (".png", ".svg", ".html")
_CHARTED = 7  # processes with a colour of their own
_DETAILED = 4  # processes whose kinds of memory are charted


class Plot:
    """Draws what it was shown when it is closed. A path that cannot work is refused before the watch begins."""

    def __init__(self, path: str | os.PathLike[str], report: Callable[[str], object]) -> None:
        self.path = check_path(path, KINDS)
        self._report = report
        self._timeline = Timeline()
        self.failed = False  # the file could not be written

    def show(self, moment: Moment) -> None:
        self._timeline.add(moment)

    def close(self) -> None:
        if self._timeline.moment is None:
            self._report(say("no readings: {path} is not drawn", path=self.path))
            return
        try:
            replace_file(self.path, drawn(self._timeline, self.path.suffix.lower()))
        except OSError as problem:
            self.failed = True
            why = problem.strerror or problem
            self._report(say("cannot write {path}: {why}", path=self.path, why=why))
        else:
            self._report(say("plot written to {path}", path=self.path))


def drawn(timeline: Timeline, kind: str) -> bytes:
    """The watch as the content of a file of that kind."""
    if kind == ".html":
        return watch_page(timeline).encode()
    title = timeline.sample.watched if timeline.sample else ""
    pools = pool_chart(timeline.points(), timeline.marks, timeline.alarm_spans(), title=title)
    return render(one_below_another([pools, processes_chart(timeline)]), kind)


def processes_chart(timeline: Timeline) -> Drawing:
    """RAM and swap of each process over time, one above the other, under what the pool has in use."""
    frames = timeline.processes.frames()
    pids = largest_pids(frames, _CHARTED)
    layers = [
        Layer(
            say("pid {pid}: {command}", pid=pid, command=timeline.processes.commands.get(pid, "")),
            [next((float(point.taken) for point in frame.points if point.pid == pid), None) for frame in frames],
        )
        for pid in pids
    ]
    others = [
        float(frame.others + sum(point.taken for point in frame.points if point.pid not in pids)) for frame in frames
    ]
    if any(others):
        layers.append(Layer(say("other watched processes"), others, "grid"))
    return stacked_chart(
        say("Memory of each process"),
        [frame.when for frame in frames],
        layers,
        whole=[None if frame.used is None else float(frame.used) for frame in frames],
        whole_name=say("RAM in use, by all processes"),
        start=timeline.began,
    )


def kinds_chart(timeline: Timeline, pid: int) -> Drawing:
    """The kinds of memory of one process over its steps, or over time where its steps are not known."""
    by_step = over_steps(timeline.processes.of(pid))
    series: list[tuple[float, ProcessPoint | None]] = [*by_step] or list(timeline.processes.of(pid))
    kinds = (say("anonymous (RssAnon)"), say("shared memory (RssShmem)"), say("files (RssFile)"), say("swap (VmSwap)"))
    columns = [
        [None if point is None else (point.anonymous, point.shmem, point.file, point.swap)[at] for _, point in series]
        for at in range(len(kinds))
    ]
    layers = [Layer(name, values) for name, values in zip(kinds, columns, strict=True) if any(values)]
    title = say("pid {pid}: {command}", pid=pid, command=cut(timeline.processes.commands.get(pid, ""), 90))
    start = None if by_step else timeline.began
    return stacked_chart(title, [when for when, _ in series], layers, start=start, steps=bool(by_step))


def _growing_table(timeline: Timeline) -> str:
    sample = timeline.sample
    rows = sample.said.growing if sample is not None else ()
    if not rows:
        return ""
    return table(
        say("Lines of code that make memory grow"),
        (say("pid"), say("rate"), say("sure"), say("where"), say("what")),
        ((str(row.pid), growth_rate(row), row.certainty, row.where, row.what) for row in rows),
    )


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
            figure(processes_chart(timeline)),
            _growing_table(timeline),
            *(
                figure(kinds_chart(timeline, pid))
                for pid in largest_pids(timeline.processes.frames(), _DETAILED)
            ),
            table(
                say("Resources"),
                (say("resource"), say("size"), say("peak"), say("share"), say("when")),
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
        say("unknown") if peak.share is None else f"{peak.share * 100:.0f}%",
        since(peak.when, began),
    )
