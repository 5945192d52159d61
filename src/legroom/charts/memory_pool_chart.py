"""Memory pools over time: one panel for each pool on a common time axis, with marks and alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from legroom.charts.drawing import (
    Circle,
    Drawing,
    Line,
    Polygon,
    Scale,
    Shape,
    Text,
    box,
    free_space,
    since,
    text_width,
    time_ticks,
    x_axis,
    y_axis,
)
from legroom.messages import cut, say
from legroom.records.watch_sample import AlarmSpan, Mark, PoolPoint
from legroom.units import format_size

_LEFT, _RIGHT, _TOP, _HEADER, _FOOT = 138, 64, 20, 38, 46
_PANEL, _GAP, _LINE = 88, 24, 18
_LISTED = 12  # alarms in words under the panels, at most
_LONGEST_MARK = 24  # columns
_PERCENT = [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")]
_COUNTED = frozenset({"fds"})  # pools that are not bytes


def pool_chart(
    pools: Mapping[str, Sequence[PoolPoint]],
    marks: Sequence[Mark] = (),
    alarms: Sequence[AlarmSpan] = (),
    *,
    title: str = "",
    width: int = 900,
    start: float | None = None,
    listed: bool = True,
) -> Drawing:
    """How full each pool was over time.

    Args:
        pools: The points of each pool in the order of time. None as use or size is unknown and breaks the line.
        marks: Vertical lines with a text, for moments such as the start of an epoch.
        alarms: Coloured bands with a number, explained under the panels.
        title: A heading above the panels.
        width: Pixels.
        start: Where the time axis begins; the first point, if not given.
        listed: Whether the alarms are explained under the panels.
    """
    label = say("Use of each resource over time")
    drawn = {name: points for name, points in pools.items() if points}
    if not drawn:
        return Drawing(width, 60, label, (Text(20, 34, say("no readings")),))
    times = [point.when for points in drawn.values() for point in (points[0], points[-1])]
    first = min(times) if start is None else start
    scale = Scale(first, max(*times, first + 1.0), _LEFT, width - _RIGHT)
    shapes: list[Shape] = [Text(12, 20, title, 13, bold=True)] if title else []
    numbered = list(enumerate(alarms, 1))
    if listed:
        numbered = numbered[:_LISTED]
    top = _TOP + (_HEADER if title or marks else 0)
    head = top
    for name, points in drawn.items():
        shapes += _panel(name, points, scale, top)
        shapes += _alarm_bands([one for one in numbered if one[1].pool in (name, None)], scale, top)
        top += _PANEL + _GAP
    bottom = top - _GAP
    shapes += _mark_lines(marks, scale, head, bottom)
    shapes += x_axis(scale, time_ticks(scale.first, scale.last), bottom, say("time since the start"))
    height = bottom + _FOOT
    if listed and alarms:
        shapes += _alarm_list(numbered, len(alarms), scale, height + _LINE)
        height += (len(numbered) + (len(alarms) > len(numbered))) * _LINE + 12
    return Drawing(width, height, label, tuple(shapes))


def amount(pool: str, count: int) -> str:
    """An amount of that pool with its unit; file descriptors have none."""
    return str(count) if pool in _COUNTED else format_size(count)


def _panel(name: str, points: Sequence[PoolPoint], x: Scale, top: int) -> list[Shape]:
    y = Scale(0.0, 1.0, top + _PANEL, top)
    shapes: list[Shape] = [Text(12, top + 16, name, 14, bold=True, name="pool")]
    shapes += y_axis(y, _PERCENT, x.start, x.end)
    known = [(point, point.share) for point in points if point.share is not None]
    if not known:
        middle = (x.start + x.end) / 2
        return [*shapes, Text(middle, top + 26, say("unknown"), 11, "soft", "middle")]
    size = known[-1][0].size or 0
    shapes.append(Text(12, top + 34, say("of {size}", size=amount(name, size)), 11, "soft"))
    for run in _runs(points):
        line = tuple((x(when), y(share)) for when, share in run)
        floor = ((line[-1][0], y(0)), (line[0][0], y(0)))
        shapes.append(Polygon((*line, *floor), "blue", 0.15, name="area"))
        if len(line) == 1:
            shapes.append(Circle(*line[0], 2, "blue", name="peak"))
        shapes.append(Line(line, "blue", 1.8, name="used"))
    point, share = max(known, key=lambda one: one[1])
    used = amount(name, point.used or 0)
    tip = say("peak {used} at {time}", used=used, time=since(point.when, x.first))
    return [
        *shapes,
        Circle(x(point.when), y(share), 3.5, "blue", name="peak", tip=tip),
        Text(12, top + 50, say("peak {share:.0f} %", share=share * 100), 11, "soft"),
        Text(12, top + 66, used, 11, "soft"),
        _last_value(points[-1], known[-1][1], x, y, top),
    ]


def _last_value(last: PoolPoint, height: float, x: Scale, y: Scale, top: int) -> Text:
    """The last value, at the right edge at its height; at the last known height that it is unknown."""
    text = say("unknown") if last.share is None else f"{last.share * 100:.0f} %"
    return Text(
        x.end + 6, max(y(height) + 4, top + 9), text, colour="soft" if last.share is None else "ink", name="last"
    )


def _runs(points: Sequence[PoolPoint]) -> list[list[tuple[float, float]]]:
    """The parts of the line between unknown points."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point.share is not None:
            runs[-1].append((point.when, point.share))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _alarm_bands(numbered: Sequence[tuple[int, AlarmSpan]], x: Scale, top: int) -> list[Shape]:
    """A band for each alarm, and its number above; numbers that would overlap are joined to a range."""
    shapes: list[Shape] = []
    groups: list[tuple[float, str, int, int]] = []  # place, level, first and last number
    for number, alarm in numbered:
        left = x(alarm.since)
        width = max(2.0, x(x.last if alarm.until is None else alarm.until) - left)
        tip = f"{alarm.level} {alarm.code}: {alarm.message}"
        shapes.append(Polygon(box(left, top, width, _PANEL), alarm.level, 0.18, name="alarm", tip=tip))
        shapes.append(Line(((left, top), (left, top + _PANEL)), alarm.level, 1.2, "3 3"))
        if groups and left - groups[-1][0] < 20:
            place, level, begin, _ = groups[-1]
            groups[-1] = (place, "critical" if "critical" in (level, alarm.level) else level, begin, number)
        else:
            groups.append((left, alarm.level, number, number))
    for left, level, begin, end in groups:
        shapes += _badge(left, top, level, str(begin) if begin == end else f"{begin}–{end}")
    return shapes


def _badge(x: float, y: float, colour: str, text: str) -> list[Shape]:
    """A number on a coloured disc, or on a longer one for a range."""
    half = max(0.0, text_width(text, 10) / 2 - 5)
    discs: list[Shape] = [Circle(x + side, y, 7.5, colour) for side in {-half, half}]
    middle = Polygon(box(x - half, y - 7.5, 2 * half, 15), colour)
    return [*discs, *([middle] if half else []), Text(x, y + 3.5, text, 10, "paper", "middle", bold=True)]


def _mark_lines(marks: Sequence[Mark], x: Scale, top: int, bottom: int) -> list[Shape]:
    """A line for each mark, and its text where the one before leaves space."""
    shapes: list[Shape] = []
    fits = free_space(x.end + _RIGHT)
    for mark in sorted(marks, key=lambda one: one.when):
        if not x.first <= mark.when <= x.last:
            continue
        place, text = x(mark.when), cut(mark.text, _LONGEST_MARK)
        line = ((place, top - 14.0), (place, float(bottom)))
        shapes.append(Line(line, "soft", dash="2 3", name="mark", tip=mark.text))
        if fits(place, text_width(text, 11) + 10):
            shapes.append(Text(place + 2, top - 18, text, 11, "soft"))
    return shapes


def _alarm_list(numbered: Sequence[tuple[int, AlarmSpan]], count: int, x: Scale, top: float) -> list[Shape]:
    shapes: list[Shape] = []
    longest = int((x.end + _RIGHT - 40) / text_width("m", 12))
    for row, (number, alarm) in enumerate(numbered):
        text = say(
            "{time} {level} {code}: {message}",
            time=since(alarm.since, x.first), level=alarm.level, code=alarm.code, message=alarm.message,
        )  # fmt: skip
        y = top + row * _LINE
        shapes += [*_badge(19, y - 4, alarm.level, str(number)), Text(34, y, cut(text, longest))]
    if count > len(numbered):
        more = say("and {count} more", count=count - len(numbered))
        shapes.append(Text(34, top + len(numbered) * _LINE, more, 12, "soft"))
    return shapes
