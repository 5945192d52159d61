"""The terminal view, run by Textual's own pilot on a screen of 80 by 24 and others; its lines; its two threads."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from legroom.errors import MissingPackage
from legroom.messages import cells, speak
from legroom.monitor import tui_lines
from legroom.monitor.tui import ScreenState, TerminalView, require_textual, run_full_screen
from legroom.monitor.watch_loop import MomentStream
from legroom.records.machine import Pool
from legroom.records.watch_sample import Annotations, EntryRow, Moment, PoolPoint, ProcessRow, Sample
from watch_runs import GB, HOSTILE, MB, START, moments, samples

pytest.importorskip("textual")

Work = Callable[[Any, Any], Awaitable[None]]


def _fed(count: int = 120) -> TerminalView:
    terminal = TerminalView()
    for moment in moments(count):
        terminal.show(moment)
    return terminal


def _on_screen(
    terminal: TerminalView, work: Work, size: tuple[int, int] = (80, 24), stop: threading.Event | None = None
) -> None:
    from legroom.monitor.tui import make_app

    async def run() -> None:
        app = make_app(terminal, stop or threading.Event())
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await work(app, pilot)

    asyncio.run(run())


def _shows(terminal: TerminalView, look: Callable[[Any], None], size: tuple[int, int] = (80, 24)) -> None:
    """What it looks at is on the screen."""

    async def work(app: Any, pilot: Any) -> None:
        await _until(pilot, lambda: look(app))

    _on_screen(terminal, work, size)


def _screen(app: Any) -> list[str]:
    """Every line that is on the screen now, as text."""
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


async def _until(pilot: Any, shown: Callable[[], object]) -> None:
    """Wait until it does not fail: on a busy machine the pilot may return before the screen is drawn."""
    deadline = time.monotonic() + 60
    while True:
        try:
            shown()
            return
        except (AssertionError, StopIteration, IndexError):
            if time.monotonic() > deadline:
                raise
        await pilot.pause(0.02)


def test_everything_is_on_a_small_screen() -> None:
    def look(app: Any) -> None:
        lines = _screen(app)
        text = "\n".join(lines)
        assert len(lines) == 24 and all(len(line) == 80 for line in lines)
        for word in ("shm", "ram", "swap", "gpu0", "gpu1", "4711", "RssShmem", "VmSwap", "PSS", "steps/s"):
            assert word in text, word
        assert "data 3 GB · prefetch 180 MB · model 1.4 GB · optimizer 2.8 GB" in text
        assert "unknown: the store's directory may not be read" in text
        assert "WARNING" in text and "gpu0 is 92% full" in text
        assert "2 entries" in text and "quit" in lines[-1]
        assert "<script>document" in text  # as text, not as markup

    _shows(_fed(), look)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_key_stands_with_its_label_in_80_columns(language: str) -> None:
    from textual.widgets._footer import FooterKey

    speak(language)

    def look(app: Any) -> None:
        shown = list(app.query(FooterKey))
        assert len(shown) == 12
        last = _screen(app)[-1]
        assert all(one.region.right <= 80 and one.description in last for one in shown), last

    _shows(_fed(5), look)


def test_unknown_is_a_word_and_never_a_nought() -> None:
    def look(app: Any) -> None:
        hidden = next(line for line in _screen(app) if "somebody else's" in line)
        assert hidden.count("unknown") == 4 and "0 B" not in hidden
        unread = next(line for line in _screen(app) if "<script>" in line)
        assert "not yet" in unread

    _shows(_fed(), look, (100, 30))


def test_keys_sort_show_the_cache_and_the_history() -> None:
    async def work(app: Any, pilot: Any) -> None:
        async def shows(*words: str, first: str = "", hidden: str = "") -> None:
            def look() -> None:
                lines = _screen(app)
                text = "\n".join(lines)
                assert all(word in text for word in words) and not (hidden and hidden in text)
                assert not first or first in lines[next(n for n, line in enumerate(lines) if " pid" in line) + 1]

            await _until(pilot, look)

        await shows(first="4711")
        await pilot.press("r")
        await shows("▾RSS")
        await pilot.press("m")
        await shows("▾RssShmem", first="4711")
        await pilot.press("c")
        await shows("/data/train_256.h5", hidden="somebody")
        await pilot.press("question_mark")
        await shows("sort by PSS, /dev/shm", "cache entries instead of processes", hidden="/data/train_256.h5")
        await pilot.press("question_mark")
        await shows("/data/train_256.h5")
        await pilot.press("p", "h")
        await shows("history: 1 h", first="4711")
        newest = _screen(app)[0]
        await pilot.press("left", "left")
        await shows("2 of 12")
        await pilot.press("end")
        await shows(newest)
        await pilot.press("left")
        await shows("1 of 12")
        app.state.view.show(_later(app))  # what one looks back at stays while the watch goes on
        await shows("2 of 12")

    _on_screen(_fed(), work, (100, 30))


def _later(app: Any) -> Moment:
    moment = app.state.view.snapshot().moment
    return replace(moment, sample=replace(moment.sample, when=moment.sample.when + 1, clock=moment.sample.clock + 1))


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (20, 5), (200, 60)])
def test_any_size_of_screen_and_many_gpus(size: tuple[int, int]) -> None:
    terminal = TerminalView()
    cards = tuple(Pool(f"gpu{n}", 80 * GB, n * GB, (80 - n) * GB, "nvml") for n in range(16))
    for moment in moments(20):
        terminal.show(replace(moment, sample=replace(moment.sample, pools=moment.sample.pools[:4] + cards)))

    def look(app: Any) -> None:
        lines = _screen(app)
        assert len(lines) == size[1] and all(len(line) == size[0] for line in lines)
        assert lines[0].startswith("legroom watch"[: size[0]])
        if size[1] >= 24:
            assert any("4711" in line for line in lines[1:])  # cards do not push the processes off the screen

    _shows(terminal, look, size)


def test_without_colour_levels_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ["NO_COLOR"]  # every test runs under it

    def look(app: Any) -> None:
        drawn = app.screen._compositor.render_strips()
        colours = {
            colour.get_truecolor().hex
            for strip in drawn
            for segment in strip.apply_filter(app._filters[0], app.background_colors[0]) if app._filters
            for colour in ((segment.style.color,) if segment.style and segment.style.color else ())
        }  # fmt: skip
        greys = {one for one in colours if one[1:3] == one[3:5] == one[5:7]}
        assert colours and colours == greys
        assert any("WARNING" in line for line in _screen(app))

    _shows(_fed(), look)


def test_before_the_first_sample_and_after_the_last() -> None:
    terminal = TerminalView()

    async def work(app: Any, pilot: Any) -> None:
        def waits() -> None:
            assert "waiting for the first reading" in _screen(app)[0]

        def ended() -> None:
            text = "\n".join(_screen(app))
            assert "press q to quit" in text and "note: the log is full" in text

        await _until(pilot, waits)
        terminal.report("the log is full")
        for moment in moments(3):
            terminal.show(moment)
        terminal.close()
        app.redraw()
        await _until(pilot, ended)

    _on_screen(terminal, work)


def test_it_leaves_by_key_and_when_it_is_stopped() -> None:
    from legroom.monitor.tui import make_app

    async def run(leave: str) -> None:
        stop = threading.Event()
        app = make_app(_fed(5), stop)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            if leave == "stop":
                stop.set()
            else:
                await pilot.press(leave)
            deadline = time.monotonic() + 60
            while app.is_running and time.monotonic() < deadline:
                await pilot.pause(0.05)
            assert not app.is_running

    for leave in ("q", "ctrl+c", "stop"):
        asyncio.run(run(leave))


# The lines.


@pytest.mark.parametrize(
    ("share", "text"), [(0, "░" * 16), (0.001, "█" + "░" * 15), (0.999, "█" * 15 + "░"), (1, "█" * 16), (2.0, "█" * 16)]
)
def test_bars(share: float, text: str) -> None:
    assert tui_lines.bar(share) == text


def test_history_lines() -> None:
    assert tui_lines.history_line([None, 0.0, 0.5, 1.0, 7.0]) == "·▁▅██"


def test_a_machine_without_swap_has_none() -> None:
    line = tui_lines.pool_line(Pool("swap", 0, 0, 0, "meminfo"), [], None, 80)
    assert line.plain == "swap  none"


def test_history_is_left_out_where_there_is_no_room() -> None:
    pool = Pool("ram", GB, MB, GB - MB, "x")
    points = [PoolPoint(float(n), n * MB, GB) for n in range(50)]
    assert "▁" in tui_lines.pool_line(pool, points, None, 80).plain
    assert "▁" not in tui_lines.pool_line(pool, points, None, 50).plain


def test_unknown_sorts_last_and_control_characters_are_not_passed_on() -> None:
    first = next(samples(1))
    sample = replace(
        first,
        processes=(
            ProcessRow(1, 0, "a\x1b[2Jb\nc", None),
            ProcessRow(2, 0, "b", 5, swap=0),
            ProcessRow(3, 0, HOSTILE, 9),
        ),
        said=Annotations(phase="\x1b]0;owned\x07"),
    )
    lines = [line.plain for line in tui_lines.process_lines(sample, "r", 100)]
    assert [line.split()[0] for line in lines] == ["pid", "3", "2", "1"]
    text = "\n".join(line.plain for line in tui_lines.fact_lines(sample, 100)) + "\n".join(lines)
    assert "\x1b" not in text and "\x07" not in text and "a\ufffd[2Jb\ufffdc" in text


def test_the_gpu_column_is_there_where_gpus_are() -> None:
    first = next(samples(1))
    assert "GPU" in tui_lines.process_lines(first, "p", 100)[0].plain
    bare = replace(first, pools=first.pools[:3])
    assert "GPU" not in tui_lines.process_lines(bare, "g", 100)[0].plain


def test_many_alarms_are_counted() -> None:
    alarm = list(moments(290))[-1].alarms[0]
    lines = tui_lines.alarm_lines([alarm] * 9, 60, 3)
    assert len(lines) == 3 and lines[-1].plain.endswith("(and 6 more)") and len(lines[-1].plain) <= 60
    assert tui_lines.alarm_lines([], 60, 3)[0].plain == "no alarms"


@pytest.mark.parametrize("width", [80, 120])
def test_chinese_stays_within_its_columns(width: int) -> None:
    speak("zh")
    terminal = _fed(290)
    terminal.report("日志已满" * 20)
    desk = ScreenState(terminal)
    for _ in range(2):
        lines = [line.plain for part in desk.lines(width).values() for line in part]
        assert all(cells(line) <= width for line in lines), lines
        assert any("警告" in line for line in lines) and any(line.startswith("注意：日志") for line in lines)
        desk.toggle_cache()


def test_figures_stand_under_their_chinese_heads() -> None:
    speak("zh")
    head, *lines = [line.plain for line in tui_lines.process_lines(next(samples(1)), "p", 200)]
    ends = cells(head[: head.index("PSS 时效") + len("PSS 时效")])
    known = [line for line in lines if " s " in line]
    assert known and all(cells(line[: line.index(" s ") + 2]) == ends for line in known)


# Two threads.


def test_the_watch_runs_beside_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    from legroom.monitor import tui

    terminal, stop = TerminalView(), threading.Event()

    def run() -> None:
        deadline = time.monotonic() + 60
        while not terminal.snapshot().ended and time.monotonic() < deadline:
            stop.wait(0.05)

    monkeypatch.setattr(tui, "make_app", lambda *_: SimpleNamespace(run=run))
    last = run_full_screen(MomentStream(samples(10)), [], terminal, stop)
    assert last is not None and last.sample.when == START + 9 and stop.is_set()


def test_trouble_in_the_watch_reaches_the_person(monkeypatch: pytest.MonkeyPatch) -> None:
    from legroom.monitor import tui

    def broken() -> Iterator[Sample]:
        yield from samples(1)
        raise ValueError("no log")

    terminal, stop = TerminalView(), threading.Event()
    monkeypatch.setattr(tui, "make_app", lambda *_: SimpleNamespace(run=lambda: stop.wait(60)))
    with pytest.raises(ValueError, match="no log"):
        run_full_screen(MomentStream(broken()), [], terminal, stop)


def test_what_is_kept_is_bounded() -> None:
    terminal = TerminalView()
    rows_ = tuple(ProcessRow(pid, 1, "x", pid) for pid in range(100))
    for sample in samples(3000):
        terminal.show(Moment(replace(sample, processes=rows_)))
    assert terminal.kept <= 800
    kept, when = [], None
    for _ in range(terminal.kept):
        kept.append(terminal.snapshot(when).moment)
        when = terminal.moved(when, 1)
    assert sum(len(one.sample.processes) for one in kept if one is not None) < 160 * 100 + 640 * 30
    assert len({one.sample.clock for one in kept if one is not None}) == terminal.kept
    assert terminal.snapshot(-1e9).moment is not None


def test_an_older_moment_stays_while_the_ones_before_it_are_thinned_out() -> None:
    terminal = TerminalView()
    state, taken = ScreenState(terminal), samples(1700)
    for _, sample in zip(range(1500), taken, strict=False):
        terminal.show(Moment(sample))
    state.lines(80)
    state.look_back(300)
    shown = state.lines(80)["head"][0].plain.split()[-1]
    for sample in taken:
        terminal.show(Moment(sample))
        if state.changed():
            now = state.lines(80)["head"][0].plain.split()[-1]
    assert abs(_seconds(now) - _seconds(shown)) <= 16  # one in 16 is kept of that time by now


def _seconds(clock: str) -> int:
    hours, minutes, seconds = map(int, clock.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def test_notes_of_the_newest_sample_are_shown() -> None:
    terminal = TerminalView()
    terminal.show(Moment(replace(next(samples(1)), notes=("whether workers copy is unknown",))))
    parts = ScreenState(terminal).lines(80)
    assert parts["facts"][-1].plain == "note: whether workers copy is unknown"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(MissingPackage, match="textual"):
        require_textual()


def test_processes_whose_pss_is_not_read_sort_by_what_is_known_of_it() -> None:
    rows = (
        ProcessRow(1, 0, "sleep", 2 * MB, pss=100 << 10, pss_at=0.0, rss_anon=MB, pss_anon=MB),
        ProcessRow(2, 0, "just started", 577 * MB, rss_anon=560 * MB),
        ProcessRow(3, 0, "grew", 720 * MB, pss=8 * MB, pss_at=0.0, rss_anon=711 * MB, pss_anon=10 * MB),
        ProcessRow(4, 0, "of another user", 40 * MB, pss_at=0.0),
        ProcessRow(5, 0, "no figures", None),
        ProcessRow(6, 0, "of an earlier log", 90 * MB, pss=80 * MB, pss_at=0.0, rss_anon=70 * MB),
    )
    sample = replace(next(samples(1)), processes=rows, clock=20.0)
    lines = [line.plain.split() for line in tui_lines.process_lines(sample, "p", 120)[1:]]
    assert [int(line[0]) for line in lines] == [3, 2, 6, 4, 1, 5]
    texts = {line[0]: " ".join(line[1:5]) for line in lines}
    assert texts["3"] == "~709 MB 20 s" and texts["2"] == "≤577 MB not yet" and texts["6"] == "80 MB 20 s"
    assert texts["4"].startswith("≤40 MB unknown")
    over_time = [line.plain for line in tui_lines.process_history_lines(sample, [], "p", 120)[1:]]
    assert [int(line[1:8]) for line in over_time] == [3, 2, 6, 4, 1, 5]
    assert "~709 MB" in over_time[0] and "~560 MB" in over_time[1] and " 80 MB" in over_time[2]


def test_long_paths_show_which_file_and_which_script_it_is() -> None:
    folder = "/mnt/storage/projects/imagenet/preprocessed/256x256/"
    entries = tuple(EntryRow(f"{n}", f"{folder}训练-{n:05d}.h5#images", "shm", GB, True) for n in range(9))
    for width in (80, 50, 120):
        lines = [line.plain for line in tui_lines.entry_lines(entries, width)[1:]]
        assert len(set(lines)) == 9 and all(cells(line) <= width for line in lines)
        assert all(line.endswith(f"{n:05d}.h5#images") for n, line in enumerate(lines))
    assert tui_lines.entry_lines(entries, 120)[1].plain.endswith(f" {folder}训练-00000.h5#images")
    rows = tuple(ProcessRow(n, 1, f"/root/.pyenv/versions/3.11.7/bin/python job{n}.py", MB) for n in (1, 2))
    sample = replace(next(samples(1)), processes=rows)
    for lines in (tui_lines.process_lines(sample, "p", 90), tui_lines.process_history_lines(sample, [], "p", 80)):
        assert "python job1.py" in lines[1].plain and "python job2.py" in lines[2].plain
    assert "/root/.pyenv/versions/3.11.7/bin/python job1.py" in tui_lines.process_lines(sample, "p", 160)[1].plain


def test_keys_are_named_where_they_work() -> None:
    state = ScreenState(_fed(90))

    def words() -> str:
        parts = state.lines(80)
        return parts["head"][0].plain + parts["title"][0].plain

    assert "escape" not in words() and "end" not in words()
    state.look_back(3)
    assert "3 of 90 readings back (shift: by 60; end: newest)" in words()
    state.newest()
    state.open_next()
    assert words().endswith("escape: all processes")
    state.close()
    assert "escape" not in words()


def test_any_key_that_changes_the_table_closes_the_list_of_keys() -> None:
    state = ScreenState(_fed(90))

    def table() -> str:
        return state.lines(80)["table"][0].plain

    before = table()
    state.toggle_keys()
    assert table() != before
    state.close()  # escape
    assert table() == before
    for change in (lambda: state.sort_by("r"), state.open_next, state.toggle_over_time, state.toggle_cache):
        state.toggle_keys()
        change()
        assert not state.keys and "sort by PSS" not in table()
    assert state.cache


def test_pools_beside_a_scroll_bar_keep_a_line_each() -> None:
    def look(app: Any) -> None:
        assert app.query_one("#pools-box").show_vertical_scrollbar
        first, second, third = (line.split()[0] for line in _screen(app)[1:4])
        assert (first, second, third) == ("shm", "ram", "swap")
        assert all(line[57] in "▁▂▃▄▅▆▇█" for line in _screen(app)[1:3])  # its newest reading is not below the bar

    async def work(app: Any, pilot: Any) -> None:
        await pilot.resize_terminal(60, 13)
        await _until(pilot, lambda: look(app))

    _on_screen(_fed(), work)
