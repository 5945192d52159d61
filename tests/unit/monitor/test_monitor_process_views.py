"""Memory of each process over time: the timeline, the charts, the screen's lines."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.unit.monitor.monitor_samples import sample as base_sample

from legroom.charts.drawing import svg
from legroom.monitor import tui_lines
from legroom.monitor.timeline import ProcessFrame, ProcessPoint, ProcessTimeline, Timeline, largest_pids, over_steps
from legroom.monitor.tui import ScreenState, TerminalView
from legroom.monitor.watch_log import json_line, parse_sample
from legroom.monitor.watch_plot import kinds_chart, processes_chart, watch_page
from legroom.records.watch_sample import Annotations, GrowthRow, Moment, ProcessRow, ProcessSteps, Sample

MB = 1 << 20


def _row(pid: int, number: int, **more: int) -> ProcessRow:
    values = {"rss": 900 * MB, "rss_anon": (100 + number) * MB, "rss_file": 50 * MB, "rss_shmem": 10 * MB, "swap": 0}
    return ProcessRow(pid, 1, f"python train.py {pid}", **{**values, **more})


def _sample(number: int, processes: int = 3) -> Sample:
    growing = (GrowthRow(1, "train.py:31", "tensors in RAM: history", 2.0 * MB, "step", "high"),)
    rows = tuple(_row(pid, number * pid) for pid in range(1, processes + 1))
    return replace(
        base_sample(), when=1000.0 + number, clock=float(number), processes=rows, said=Annotations(growing=growing)
    )


def test_what_a_process_takes_is_its_pss_once_that_is_read() -> None:
    timeline = ProcessTimeline()
    timeline.add(replace(_sample(0), processes=(_row(1, 0), _row(2, 0, pss=30 * MB, swap=5 * MB))))
    (frame,) = timeline.frames()
    assert {point.pid: point.taken for point in frame.points} == {1: 100 * MB, 2: 35 * MB}


def test_many_processes_are_kept_in_bounded_memory() -> None:
    timeline = ProcessTimeline()
    for number in range(3000):
        timeline.add(_sample(number, 40))
    frames = timeline.frames()
    assert len(frames) < 1200 and all(len(frame.points) <= 16 and frame.others > 0 for frame in frames)
    assert frames[0].when < 2000 and len(timeline.commands) <= 40 * 16
    assert largest_pids(frames, 2) == [40, 39]


def test_the_screen_stacks_processes_under_the_rest_of_the_pool() -> None:
    def frame(number: int) -> ProcessFrame:
        points = (ProcessPoint(7, 300 * MB, 0, 0, 0, 0), ProcessPoint(8, (100 + number) * MB, 0, 0, 0, 0))
        return ProcessFrame(1000.0 + number, 800 * MB, 1 << 30, points, 100 * MB)

    lines = [line.plain for line in tui_lines.stacked_lines([frame(number) for number in range(100)], 112)]
    assert len(lines) == 9 and lines[0].startswith("   800 MB ") and lines[4].startswith("   400 MB ")
    first, last = ([line[10 + at] for line in lines[:8]] for at in (0, 99))
    assert "".join(first) == "░░░+2111" and "".join(last) == "░░+22111"  # from the top: rest, others, pid 8, pid 7
    many = [ProcessFrame(float(at), None, None, tuple(ProcessPoint(pid, MB, 0, 0, 0, 0) for pid in range(16)), 0)
            for at in range(9)]  # fmt: skip
    drawn = "".join(line.plain[10:] for line in tui_lines.stacked_lines(many, 80)[:8])
    assert set(drawn) == set("246+")  # six of 16 have a layer of their own, and a row is as high as two
    assert tui_lines.stacked_lines(many[:1], 80) == []


def test_only_processes_in_the_list_have_a_digit() -> None:
    points = tuple(ProcessPoint(pid, size * MB, 0, 0, 0, 0) for pid, size in ((7, 400), (8, 300), (9, 200)))
    frames = [ProcessFrame(1000.0 + at, 900 * MB, 1 << 30, points, 0) for at in range(4)]
    sample = _sample(5)
    alive = replace(sample, processes=tuple(replace(sample.processes[0], pid=pid, rss=90 * MB) for pid in (8, 9)))
    lines = [line.plain for line in tui_lines.process_history_lines(alive, frames, "p", 80)]
    drawn, rows = "".join(line[10:] for line in lines[:8]), lines[10:]
    assert set(drawn) - set(" ░") == set("12+"), "pid 7 has ended: it is one of the others"
    assert [row[:8] for row in rows] == ["1      8", "2      9"] and "ended" in lines[8]


def test_charts_show_each_process_and_its_kinds_of_memory() -> None:
    timeline = Timeline()
    for number in range(50):
        timeline.add(Moment(_sample(number)))
    drawn = svg(processes_chart(timeline))
    assert all(f"pid {pid}: python train.py {pid}" in drawn for pid in (1, 2, 3)) and "RAM in use" in drawn
    assert "anonymous (RssAnon)" in svg(kinds_chart(timeline, 1)) and "VmSwap" not in svg(kinds_chart(timeline, 1))
    assert "train.py:31" in watch_page(timeline)
    assert "no readings" in svg(processes_chart(Timeline()))


def test_the_screen_opens_one_process_after_the_other() -> None:
    view = TerminalView()
    for number in range(50):
        view.show(Moment(_sample(number)))
    state = ScreenState(view)
    state.toggle_over_time()
    table = [line.plain for line in state.lines(80)["table"]]
    stacked, table = table[:9], table[9:]
    assert "░" in stacked[0] and "over time" in table[0] and len(table) == 4 and all(len(line) <= 80 for line in table)
    state.open_next()
    assert state.opened == 3
    state.open_next()
    state.open_next()
    lines = [line.plain for line in state.lines(80)["table"]]
    assert state.opened == 1 and lines[0] == "pid 1: python train.py 1"
    assert "train.py:31: tensors in RAM: history, 2 MB per step (sure: high)" in lines
    assert any(line.startswith("anonymous") and "149 MB" in line for line in lines)
    state.open_next()
    assert state.opened == 3 and any("legroom leak" in line.plain for line in state.lines(80)["table"])
    state.close()
    assert "over time" in state.lines(80)["table"][9].plain
    assert tui_lines.opened_lines(_sample(1), [], 99, 80)[0].plain == "pid 99 has ended"


def _stepping(number: int) -> Moment:
    """A sample every second, a step every two."""
    said = Annotations(process_steps=(ProcessSteps(1, 10 + number // 2),))
    return Moment(replace(_sample(number), said=said))


def test_one_process_is_shown_over_its_steps_where_they_are_known() -> None:
    timeline, view = Timeline(), TerminalView()
    for number in range(50):
        timeline.add(_stepping(number))
        view.show(_stepping(number))
    places = [place for place, _ in over_steps(timeline.processes.of(1))]
    assert places[:4] == [10, 10.5, 11, 11.5] and places[-1] == 34 and len(places) == 50
    assert over_steps(timeline.processes.of(2)) == []
    by_step, by_time = svg(kinds_chart(timeline, 1)), svg(kinds_chart(timeline, 2))
    assert ">steps<" in by_step and "time since" not in by_step and "time since" in by_time
    state = ScreenState(view)
    for _ in range(3):
        state.open_next()
    assert state.opened == 1 and any("from step 10 to step 34" in line.plain for line in state.lines(80)["table"])


def test_steps_that_are_counted_anew_begin_anew() -> None:
    point = ProcessPoint(1, MB, MB, 0, 0, 0)
    series = [(float(at), point._replace(steps=steps)) for at, steps in enumerate((5, 6, 7, 0, 1, 8))]
    places = [place for place, _ in over_steps(series)]
    assert places == [0, 1, 8]


def test_steps_are_in_the_log() -> None:
    moment = _stepping(4)
    assert parse_sample(json.loads(json_line(moment))).said.process_steps == (ProcessSteps(1, 12),)


def test_a_process_that_grew_since_its_pss_was_read_counts_with_its_growth() -> None:
    timeline = ProcessTimeline()
    grown = _row(1, 400, pss=30 * MB, pss_anon=100 * MB)
    timeline.add(replace(_sample(0), processes=(grown, _row(2, 0, pss=200 * MB, pss_anon=100 * MB))))
    (frame,) = timeline.frames()
    assert {point.pid: point.taken for point in frame.points} == {1: 430 * MB, 2: 200 * MB}
    assert largest_pids([frame], 1) == [1]
