"""Courses that keep every peak, stories, and the three kinds of picture."""

from __future__ import annotations

import random
import struct
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import MissingPackage, UsageError
from legroom.monitor.timeline import RECENT, PoolSeries, Timeline, column_shares, thin_points
from legroom.monitor.watch_plot import Plot, drawn
from legroom.records.machine import Pool
from legroom.records.watch_sample import Annotations, Mark, Moment, PoolPoint
from watch_runs import HOSTILE, START, moments, samples

SVG = "{http://www.w3.org/2000/svg}"


# Courses.


def test_a_time_series_is_bounded_and_loses_no_peak() -> None:
    rng = random.Random(3)
    series, used = PoolSeries(), [rng.randrange(100) for _ in range(20_000)]
    used[1234], used[1300] = 9999, -1  # one spike and one dip, long ago
    for place, one in enumerate(used):
        series.add(PoolPoint(float(place), one, 10_000))
    points = series.points()
    assert len(points) <= RECENT + 1024
    assert [point.when for point in points] == sorted(point.when for point in points)
    assert max(points, key=lambda point: point.used or 0) == PoolPoint(1234.0, 9999, 10_000)
    assert PoolPoint(1300.0, -1, 10_000) in points
    assert points[-RECENT:] == [
        PoolPoint(float(place), used[place], 10_000) for place in range(20_000 - RECENT, 20_000)
    ]


@given(st.lists(st.one_of(st.none(), st.integers(0, 50)), max_size=60))
def test_thinning_keeps_extremes_gaps_and_order(used: list[int | None]) -> None:
    points = [PoolPoint(float(place), one, 50) for place, one in enumerate(used)]
    kept = thin_points(points)
    assert len(kept) <= 2 * -(-len(points) // 4)
    assert [point.when for point in kept] == sorted({point.when for point in kept})
    assert set(kept) <= set(points)
    known = [one for one in used if one is not None]
    if known:
        assert max(point.used for point in kept if point.used is not None) == max(known)
    assert any(one is None for one in used) == any(point.used is None for point in kept)


def test_columns_show_the_highest_and_leave_gaps() -> None:
    points = [PoolPoint(0, 1, 10), PoolPoint(1, 9, 10), PoolPoint(2, None, None), PoolPoint(4, 5, 10)]
    assert column_shares(points, 4) == [0.1, 0.9, None, 0.5]
    assert column_shares([], 4) == [] and column_shares(points[:1], 3) == [0.1]


def test_the_first_minute_is_a_short_line_without_gaps() -> None:
    points = [PoolPoint(at + at % 3 / 5, at, 100) for at in range(40)]  # each a little late or not
    assert column_shares(points[:2], 60) == [0, 0.01]
    for count in (8, 20, 40):
        shares = column_shares(points[:count], 60)
        assert (
            0.8 * count <= len(shares) <= count
            and None not in shares
            and max(filter(None, shares)) == (count - 1) / 100
        )
    assert len(column_shares(points, 12)) == 12
    stopped = column_shares(points[:10] + points[25:], 60)  # the machine slept
    assert stopped.count(None) >= 13 and stopped[0] == 0 and stopped[-1] == 0.39


# Stories.


def _timeline(count: int = 300) -> Timeline:
    timeline = Timeline()
    for moment in moments(count):
        timeline.add(moment)
    return timeline


def test_a_timeline_shows_alarms_as_they_began() -> None:
    every = list(moments(300))
    timeline = _timeline()
    begun = {alarm.key: alarm for moment in reversed(every) for alarm in moment.begun}
    spells = timeline.alarm_spans()
    assert {spell.code for spell in spells} >= {"shm-filling", "shm-nearly-full", "gpu-nearly-full"}
    assert [spell.since for spell in spells] == sorted(spell.since for spell in spells)
    for spell in spells:
        assert spell.message == begun[(spell.code, spell.pool)].message
    assert [mark.text for mark in timeline.marks] == ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]


def test_an_alarm_that_ended_has_an_end() -> None:
    timeline = Timeline()
    full = Pool("shm", 100, 95, 5, "x")
    empty = replace(full, used=5, free=95)
    run = [replace(one, pools=(full if place < 5 else empty,)) for place, one in enumerate(samples(40))]
    from legroom.monitor.watch_loop import MomentStream

    for moment in MomentStream(run):
        timeline.add(moment)
    (spell,) = timeline.alarm_spans()
    assert spell.code == "shm-nearly-full" and spell.until is not None and spell.since < spell.until < START + 39


def test_a_second_run_in_one_log_breaks_the_line() -> None:
    timeline = Timeline()
    for one in [*samples(5), *samples(5, start=START + 4000)]:
        timeline.add(Moment(one))
    assert [point.used is None for point in timeline.points()["shm"]] == [False] * 5 + [True] + [False] * 5


def test_pools_of_no_size_are_left_out() -> None:
    timeline = Timeline()
    timeline.add(Moment(replace(next(samples(1)), pools=(Pool("swap", 0, 0, 0, "x"), Pool("ram", 5, 1, 4, "x")))))
    assert list(timeline.points()) == ["ram"]


# The picture.


def _parts(svg: str, kind: str, name: str) -> list[ET.Element]:
    return [node for node in ET.fromstring(svg).iter(f"{SVG}{kind}") if name in (node.get("class") or "").split()]


def test_the_picture_has_a_panel_for_each_pool_with_marks_and_alarms() -> None:
    timeline = _timeline()
    svg = drawn(timeline, ".svg").decode()
    names = [node.text for node in _parts(svg, "text", "pool")]
    assert names == ["shm", "ram", "swap", "disk", "gpu0", "gpu1"]
    assert len(_parts(svg, "polyline", "used")) == 5 and "unknown" in svg  # the disk is not known, so not drawn
    assert len(_parts(svg, "polyline", "mark")) == 4 and "epoch 3" in svg
    bands = _parts(svg, "polygon", "alarm")
    assert len(bands) == len(timeline.alarm_spans()) == 3 and "shm-filling" in svg


# Files.


class _Reads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name in ("src", "href") or name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def _written(path: Path, count: int = 120) -> tuple[bytes, list[str]]:
    told: list[str] = []
    plot = Plot(path, told.append)
    for moment in moments(count):
        plot.show(moment)
    plot.close()
    return path.read_bytes(), told


def test_html_stands_alone(tmp_path: Path) -> None:
    content, told = _written(tmp_path / "out.html")
    page = _Reads()
    page.feed(content.decode())
    assert "script" not in page.tags and {"h1", "table", "svg", "th"} <= set(page.tags)
    assert "epoch 2" in page.text and "gpu-nearly-full" in page.text and "unknown" in page.text
    assert b"http://" not in content.replace(b"http://www.w3.org/2000/svg", b"") and told == [
        f"plot written to {tmp_path / 'out.html'}"
    ]


def test_html_escapes_what_a_script_writes() -> None:
    timeline = Timeline()
    one = next(samples(1))
    timeline.add(Moment(replace(one, watched=HOSTILE, said=Annotations(marks=(Mark(one.when, HOSTILE),)))))
    page = _Reads()
    page.feed(drawn(timeline, ".html").decode())
    assert "script" not in page.tags and "img" not in page.tags and HOSTILE in page.text


def test_svg_and_png(tmp_path: Path) -> None:
    content, _ = _written(tmp_path / "out.svg")
    assert ET.fromstring(content).tag == f"{SVG}svg"
    pytest.importorskip("matplotlib")
    content, _ = _written(tmp_path / "OUT.PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width > 800 and height > 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["OUT.PNG", "out.svg"]


def test_without_matplotlib_the_watch_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match=r"\.svg or \.html"):
        Plot(tmp_path / "out.png", print)


@pytest.mark.parametrize("name", ["out.pdf", "out", "nowhere/out.svg", "folder.svg"])
def test_what_cannot_be_drawn_is_reported_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(UsageError, match="cannot"):
        Plot(tmp_path / name, print)


def test_nothing_seen_leaves_no_file(tmp_path: Path) -> None:
    told: list[str] = []
    Plot(tmp_path / "out.svg", told.append).close()
    assert "no readings" in told[0] and not (tmp_path / "out.svg").exists()


def test_a_disk_that_is_gone_is_reported(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "gone").mkdir()
    plot = Plot(tmp_path / "gone" / "out.svg", told.append)
    plot.show(next(moments(1)))
    (tmp_path / "gone").rmdir()
    plot.close()
    assert "cannot write" in told[0] and plot.failed
