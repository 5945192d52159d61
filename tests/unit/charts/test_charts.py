"""Charts: what stands where in them, the SVG and PNG writers, the page template, and the files they go to."""

from __future__ import annotations

import struct
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.charts.batch_size_chart import batch_chart, plot
from legroom.charts.drawing import (
    DARK,
    LIGHT,
    Drawing,
    Line,
    Scale,
    Text,
    check_path,
    free_space,
    render,
    round_ticks,
    since,
    svg,
    text_width,
    time_ticks,
    xml_text,
)
from legroom.charts.html_page import bullets, element, page, table
from legroom.charts.pool_and_process_charts import GrowthLine, Layer, amount, growth_chart, pool_chart, stacked_chart
from legroom.errors import MissingPackage, UsageError
from legroom.records.gpu_results import BatchFound, Trial
from legroom.records.watch_sample import AlarmSpan, Mark, PoolPoint
from legroom.units import format_size
from watch_runs import HOSTILE

MB, GB = 1 << 20, 1 << 30
SVG = "{http://www.w3.org/2000/svg}"


def named(picture: str, kind: str, name: str) -> list[ET.Element]:
    """The elements of that kind with that class."""
    nodes = ET.fromstring(picture).iter(f"{SVG}{kind}")
    return [node for node in nodes if name in (node.get("class") or "").split()]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_text_and_lines_are_readable_on_their_background(palette: dict[str, str]) -> None:
    for name in ("ink", "soft", "warning", "critical"):
        assert contrast(palette[name], palette["paper"]) >= 4.5, name
    assert contrast(palette["blue"], palette["paper"]) >= 3


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_shades_differ_in_brightness_alone(palette: dict[str, str]) -> None:
    shades = [palette[f"shade{number}"] for number in (1, 2, 3, 4)]
    assert all(contrast(one, other) >= 1.4 for one, other in pairwise(shades))


# Axes.


def test_a_value_outside_the_scale_lies_on_its_edge() -> None:
    scale = Scale(10.0, 20.0, 0.0, 100.0)
    assert (scale(10.0), scale(15.0), scale(99.0), scale(-5.0)) == (0, 50, 100, 0)
    assert Scale(5.0, 5.0, 0.0, 1.0)(5.0) == 0.0


@pytest.mark.parametrize("span", [1, 59, 60, 3601, 86400 * 9, 86400 * 400])
def test_time_ticks_are_few_and_differ(span: int) -> None:
    ticks = time_ticks(5.0, 5.0 + span)
    assert 2 <= len(ticks) <= 9 and len({text for _, text in ticks}) == len(ticks)
    assert ticks[0] == (5.0, "0 s") and since(65.0, 5.0) == "1 min"


@pytest.mark.parametrize("top", [1, 7, 64 * MB, 3 * GB, 80 * GB])
def test_number_ticks_are_round(top: int) -> None:
    values = [value for value, _ in round_ticks(top, format_size, base=2)]
    assert values[0] == 0 and 2 <= len(values) <= 7 and values[1].bit_count() == 1
    tens = [text for _, text in round_ticks(top, str)]
    assert tens[0] == "0" and tens[1][0] in "125" and set(tens[1][1:]) <= {"0"}


def test_labels_that_overlap_are_left_out() -> None:
    fits = free_space(100)
    assert [fits(0, 40), fits(30, 40), fits(40, 40), fits(90, 40)] == [True, False, True, False]


# Pools over time.


def test_points_lie_where_the_numbers_are() -> None:
    picture = svg(pool_chart({"ram": [PoolPoint(100.0, 0, 10), PoolPoint(150.0, 5, 10), PoolPoint(200.0, 20, 10)]}))
    (line,) = named(picture, "polyline", "used")
    points = [tuple(map(float, pair.split(","))) for pair in (line.get("points") or "").split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1) and x0 < x1
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and y0 > y1  # more than all of it is drawn as all of it


def test_the_last_value_stands_at_the_end_of_its_line_and_the_peak_in_words() -> None:
    def shown(*used: int | None) -> tuple[list[Text], list[str], float]:
        points = [PoolPoint(60.0 * at, None if one is None else one << 20, 100 << 20) for at, one in enumerate(used)]
        shapes = pool_chart({"disk": points}).shapes
        texts = [shape for shape in shapes if isinstance(shape, Text)]
        line = [shape for shape in shapes if isinstance(shape, Line) and shape.name == "used"][-1]
        return [one for one in texts if one.name == "last"], [one.text for one in texts], line.points[-1][1]

    (last,), texts, height = shown(10, 17, 13)
    assert last.text == "13%" and abs(last.y - 4 - height) < 1
    assert {"peak 17%", "17 MB"} <= set(texts) and "17%" not in texts
    (last,), texts, height = shown(10, 17, None)
    assert last.text == "unknown" and abs(last.y - 4 - height) < 1 and "17%" not in texts


def test_an_unknown_point_breaks_the_line_and_a_single_point_is_visible() -> None:
    points = [PoolPoint(0, 1, 9), PoolPoint(1, 2, 9), PoolPoint(2, None, None), PoolPoint(3, 2, 9)]
    assert len(named(svg(pool_chart({"ram": points})), "polyline", "used")) == 2
    assert len(named(svg(pool_chart({"ram": [PoolPoint(5, 1, 9)]})), "circle", "peak")) == 2


def test_no_points_is_a_picture_too() -> None:
    assert "no readings" in svg(pool_chart({})) and ET.fromstring(svg(pool_chart({"ram": []}))) is not None


def test_the_time_axis_can_begin_before_the_first_point() -> None:
    texts = [
        shape.text for shape in pool_chart({"ram": [PoolPoint(8.0, 1, 2)]}, start=0.0).shapes if isinstance(shape, Text)
    ]
    assert {"0 s", "8 s", "time since the start"} <= set(texts)


@given(st.text(max_size=30))
def test_any_name_is_text(name: str) -> None:
    alarm = AlarmSpan(name, None, "warning", name, 0.0)
    picture = svg(pool_chart({name: [PoolPoint(0, 1, 2), PoolPoint(1, 1, 2)]}, [Mark(0.5, name)], [alarm], title=name))
    ET.fromstring(picture.encode())


def test_names_of_processes_become_no_markup() -> None:
    alarm = AlarmSpan("x", None, "warning", HOSTILE, 0.0)
    picture = svg(pool_chart({HOSTILE: [PoolPoint(0, 1, 2)]}, [Mark(0.0, HOSTILE)], [alarm], title=HOSTILE))
    assert "<script" not in picture and "&lt;script" in picture
    assert xml_text("a\x00\x1b\ud800<&\"'") == "a\ufffd\ufffd\ufffd&lt;&amp;&quot;&#x27;"


def test_many_alarms_and_marks_stay_readable() -> None:
    alarms = [AlarmSpan("x", None, "critical", "y" * 500, float(n)) for n in range(50)]
    marks = [Mark(float(n), f"a long name for step {n}") for n in range(50)]
    drawing = pool_chart({"ram": [PoolPoint(float(n), n, 50) for n in range(51)]}, marks, alarms)
    texts = [shape for shape in drawing.shapes if isinstance(shape, Text)]
    labels = [text for text in texts if text.text.startswith("a long")]
    assert 1 < len(labels) < 10 and all(b.x - a.x > text_width(a.text, a.size) for a, b in pairwise(labels))
    assert any(text.text == "and 38 more" for text in texts)
    assert all(text.x + text_width(text.text, text.size) <= drawing.width + 10 for text in texts if "yyy" in text.text)


def test_alarm_numbers_that_would_overlap_are_joined() -> None:
    points = {"ram": [PoolPoint(0.0, 1, 2), PoolPoint(100.0, 1, 2)]}
    alarms = [AlarmSpan("x", "ram", "warning", "", when, when) for when in (50.0, 50.5, 51.0, 90.0)]
    texts = [shape.text for shape in pool_chart(points, (), alarms, listed=False).shapes if isinstance(shape, Text)]
    assert "1–3" in texts and "4" in texts


def test_file_descriptors_have_no_unit() -> None:
    assert amount("fds", 1024) == "1024" and amount("ram", GB) == "1 GB" and amount("shm", 64 * MB) == "64 MB"


# Batch sizes.


def test_a_growth_chart_is_as_high_as_what_it_names() -> None:
    lines = [GrowthLine(f"line {number}", ((0, 0), (9, 9))) for number in range(9)]
    drawing = growth_chart("ram", ((0, 5), (9, 50)), lines)
    lowest = max(shape.y for shape in drawing.shapes if isinstance(shape, Text))
    assert 0 < drawing.height - lowest < 40


def test_a_batch_search_shows_trials_limits_and_units(tmp_path: Path) -> None:
    trials = (Trial(8, True, 2 * GB), Trial(64, True, 11 * GB), Trial(96, False, None))
    found = BatchFound(64, 88, 1, 64, 1, 16 * GB, 0.1, trials, GB, 0.15 * GB, "measured")
    picture = plot(found, tmp_path / "out.svg")
    assert (tmp_path / "out.svg").read_text() == picture and picture.count("<circle") == 2
    texts = {shape.text for shape in batch_chart(found).shapes if isinstance(shape, Text)}
    assert {"limit 16 GB", "limit less 10%: 14.4 GB", "batch size", "8", "64", "96", "4 GB", "0"} <= texts


# Writers.


def test_an_svg_needs_nothing_and_follows_dark_mode() -> None:
    picture = svg(pool_chart({"ram": [PoolPoint(0, 1, 2)]}))
    for node in ET.fromstring(picture).iter():
        assert node.tag.removeprefix(SVG) not in ("script", "image", "a", "foreignObject")
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "") and "prefers-color-scheme:dark" in picture


def test_a_png_has_the_size_of_the_drawing_and_survives_formulas() -> None:
    pytest.importorskip("matplotlib")
    drawing = pool_chart({"$x_{": [PoolPoint(0, 1, 2)]}, [Mark(0, "$\\frac 第1")], title="$\\frac")
    content = render(drawing, ".png")
    assert content.startswith(b"\x89PNG") and struct.unpack(">II", content[16:24]) == (
        2 * drawing.width,
        2 * drawing.height,
    )


def test_without_matplotlib_a_png_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match=r"\.svg or \.html"):
        check_path(tmp_path / "out.png", (".png",))


@pytest.mark.parametrize("name", ["out.pdf", "out", "nowhere/out.svg", "folder.svg"])
def test_a_path_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(UsageError, match="cannot"):
        check_path(tmp_path / name, (".svg",))


# The page.


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_escapes_every_text() -> None:
    body = [element("p", HOSTILE), bullets([HOSTILE, f"x\n{HOSTILE}"]), table(HOSTILE, [HOSTILE], [[HOSTILE]])]
    reader = _Reader()
    reader.feed(page(HOSTILE, body))
    assert not {"script", "img"} & set(reader.tags) and reader.text.count(HOSTILE) == 8
    assert {"pre", "li", "th", "td", "h1", "h2"} <= set(reader.tags)


def test_empty_lists_and_tables() -> None:
    assert bullets([]) == "" and "none" in table("Alarms", ["x"], []) and Drawing(1, 1, "x").shapes == ()


def test_one_reading_is_not_called_none() -> None:
    assert "no readings" in svg(stacked_chart("RAM", [], []))
    alone = svg(stacked_chart("RAM", [1.0], [Layer("a", [1])]))
    assert "no readings" not in alone and "one reading" in alone
