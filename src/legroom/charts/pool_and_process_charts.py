"""Charts of a watch: memory pools over time with marks and alarms, and what processes use.

``stacked_chart`` shows the processes in a pool, or the kinds of memory of one process; ``growth_chart`` what one
process uses of a pool over its steps, and what the lines of code add that make it grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    round_ticks,
    since,
    text_width,
    time_ticks,
    x_axis,
    y_axis,
)
from legroom.messages import cut, say
from legroom.records.watch_sample import AlarmSpan, Mark, PoolPoint
from legroom.units import format_size

_WIDTH, _LEFT, _RIGHT, _TOP, _HEADER, _FOOT = 900, 138, 64, 20, 38, 46
_PANEL, _GAP, _LINE = 88, 24, 18
_LISTED = 12  # alarms in words under the panels, at most
_LONGEST_MARK = 24  # columns
_PERCENT = [(0.0, "0%"), (0.5, "50%"), (1.0, "100%")]
_COUNTED = frozenset({"fds"})  # pools that are not bytes


def pool_chart(
    pools: Mapping[str, Sequence[PoolPoint]],
    marks: Sequence[Mark] = (),
    alarms: Sequence[AlarmSpan] = (),
    *,
    title: str = "",
    start: float | None = None,
    listed: bool = True,
) -> Drawing:
    """How full each pool was over time.

    Args:
        pools: The points of each pool in the order of time. None as use or size is unknown and breaks the line.
        marks: Vertical lines with a text, for moments such as the start of an epoch.
        alarms: Coloured bands with a number, explained under the panels.
        title: A heading above the panels.
        start: Where the time axis begins; the first point, if not given.
        listed: Whether the alarms are explained under the panels.
    """
    label = say("Use of each resource over time")
    drawn = {name: points for name, points in pools.items() if points}
    if not drawn:
        return _nothing(label)
    times = [point.when for points in drawn.values() for point in (points[0], points[-1])]
    first = min(times) if start is None else start
    scale = Scale(first, max(*times, first + 1.0), _LEFT, _WIDTH - _RIGHT)
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
    return Drawing(_WIDTH, height, label, tuple(shapes))


def _nothing(label: str, *, one: bool = False) -> Drawing:
    text = say("one reading: nothing to draw over time") if one else say("no readings")
    return Drawing(_WIDTH, 60, label, (Text(20, 34, text),))


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
        Text(12, top + 50, say("peak {share:.0f}%", share=share * 100), 11, "soft"),
        Text(12, top + 66, used, 11, "soft"),
        _last_value(points[-1], known[-1][1], x, y, top),
    ]


def _last_value(last: PoolPoint, height: float, x: Scale, y: Scale, top: int) -> Text:
    """The last value, at the right edge at its height; at the last known height that it is unknown."""
    text = say("unknown") if last.share is None else f"{last.share * 100:.0f}%"
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


_STACK_TOP, _STACK_PANEL, _STACK_FOOT, _STACK_LEGEND = 40, 200, 50, 18
_COLOURS = ("blue", "warning", "shade1", "shade3", "critical", "shade2", "shade4", "grey")
_LONGEST = 104  # columns of a legend


@dataclass(frozen=True, slots=True)
class Layer:
    """One of the amounts: its name, and bytes at each time; None where it did not exist."""

    name: str
    values: Sequence[float | None]
    colour: str | None = None


def stacked_chart(
    title: str,
    times: Sequence[float],
    layers: Sequence[Layer],
    *,
    whole: Sequence[float | None] = (),
    whole_name: str = "",
    start: float | None = None,
    steps: bool = False,
) -> Drawing:
    """The layers from the bottom up; ``whole`` is a line above them, such as what a pool has in use.

    ``steps``: the times are numbers of training steps.
    """
    if len(times) < 2 or not layers:
        return _nothing(title, one=len(times) == 1)
    sums = [sum(layer.values[at] or 0 for layer in layers) for at in range(len(times))]
    top = max(1.0, *sums, *(value or 0 for value in whole)) * 1.05
    x = Scale(times[0] if start is None else start, max(times[-1], times[0] + 1), _LEFT, _WIDTH - _RIGHT)
    y = Scale(0, top, _STACK_TOP + _STACK_PANEL, _STACK_TOP)
    ticks = round_ticks(top, format_size, 5, base=2)
    shapes: list[Shape] = [Text(12, 22, title, 13, bold=True), *y_axis(y, ticks, _LEFT, _WIDTH - _RIGHT)]
    if steps:
        ticks = [one for one in round_ticks(x.last, str) if one[0] >= x.first]
        shapes += x_axis(x, ticks, _STACK_TOP + _STACK_PANEL, say("steps"))
    else:
        shapes += x_axis(x, time_ticks(x.first, x.last), _STACK_TOP + _STACK_PANEL, say("time since the start"))
    below = [0.0] * len(times)
    named: list[tuple[str, str]] = []
    for number, layer in enumerate(layers):
        colour = layer.colour or _COLOURS[number % len(_COLOURS)]
        above = [low + (value or 0) for low, value in zip(below, layer.values, strict=True)]
        edge = [(x(when), y(value)) for when, value in zip(times, above, strict=True)]
        foot = [(x(when), y(value)) for when, value in zip(times, below, strict=True)]
        shapes.append(Polygon((*edge, *reversed(foot)), colour, 0.75, name="layer", tip=layer.name))
        named.append((layer.name, colour))
        below = above
    known = [(x(when), y(value)) for when, value in zip(times, whole, strict=False) if value is not None]
    if len(known) > 1:
        shapes.append(Line(tuple(known), "ink", 1.5, name="whole", tip=whole_name))
    foot_y = _STACK_TOP + _STACK_PANEL + _STACK_FOOT
    if known and whole_name:
        shapes += [
            Line(((_LEFT, foot_y - 4), (_LEFT + 14, foot_y - 4)), "ink", 2),
            Text(_LEFT + 22, foot_y, whole_name),
        ]
        foot_y += _STACK_LEGEND
    for name, colour in reversed(named):  # in the order of the layers on the page, the highest first
        shapes.append(Polygon(box(_LEFT, foot_y - 9, 14, 9), colour, 0.75))
        shapes.append(Text(_LEFT + 22, foot_y, cut(name, _LONGEST)))
        foot_y += _STACK_LEGEND
    return Drawing(_WIDTH, foot_y, title, tuple(shapes))


_GROWTH_LEFT, _GROWTH_RIGHT, _GROWTH_TOP, _GROWTH_PANEL, _GROWTH_FOOT = 96, 24, 44, 240, 52
_GROWTH_COLOURS = ("critical", "blue", "warning", "shade3", "shade1", "grey")
_GROWTH_LEGEND, _LONGEST_GROWTH = 20, 100


@dataclass(frozen=True, slots=True)
class GrowthLine:
    """One site: its name, and (step, bytes) points."""

    name: str
    points: Sequence[tuple[float, float]]


def growth_chart(
    pool: str, points: Sequence[tuple[float, float]], lines: Sequence[GrowthLine], *, per: str = "step"
) -> Drawing:
    """The pool's use as a grey line, what each site has added as coloured ones, all from zero at the first step."""
    label = say("{pool} over steps, and what makes it grow", pool=pool)
    lines = lines[: len(_GROWTH_COLOURS)]
    height = _GROWTH_TOP + _GROWTH_PANEL + _GROWTH_FOOT + _GROWTH_LEGEND * (len(lines) + 1)
    if len(points) < 2:
        return _nothing(label, one=len(points) == 1)
    low = min(value for _, value in points)
    whole = [(x, value - low) for x, value in points]
    first, last = points[0][0], points[-1][0]
    top = max([1.0, *(value for _, value in whole), *(value for line in lines for _, value in line.points)]) * 1.05
    x, y = (
        Scale(first, max(last, first + 1), _GROWTH_LEFT, _WIDTH - _GROWTH_RIGHT),
        Scale(0, top, _GROWTH_TOP + _GROWTH_PANEL, _GROWTH_TOP),
    )
    steps = round_ticks(last, str) if per == "step" else round_ticks(last, lambda count: f"{count} s")
    counted = say("steps") if per == "step" else say("time")
    shapes: list[Shape] = [
        Text(12, 22, say("{pool}: growth since the first reading ({size} then)", pool=pool, size=format_size(int(low))),
             13, bold=True),
        *y_axis(y, round_ticks(top, format_size, base=2), _GROWTH_LEFT, _WIDTH - _GROWTH_RIGHT),
        *x_axis(x, [one for one in steps if one[0] >= first], _GROWTH_TOP + _GROWTH_PANEL, counted),
        Line(tuple((x(at), y(value)) for at, value in whole), "grey", 2, name="pool", tip=pool),
    ]  # fmt: skip
    for line, colour in zip(lines, _GROWTH_COLOURS, strict=False):
        inside = [(at, value) for at, value in line.points if first <= at <= last]
        if len(inside) > 1:
            drawn = tuple((x(at), y(max(0.0, value))) for at, value in inside)
            shapes.append(Line(drawn, colour, 2, name="site", tip=line.name))
    below = _GROWTH_TOP + _GROWTH_PANEL + _GROWTH_FOOT + 4
    named = [(say("all of {pool} that this process uses", pool=pool), "grey")]
    named += [(line.name, colour) for line, colour in zip(lines, _GROWTH_COLOURS, strict=False)]
    for number, (name, colour) in enumerate(named):
        at = below + number * _GROWTH_LEGEND
        shapes += [
            Line(((_GROWTH_LEFT, at - 4), (_GROWTH_LEFT + 22, at - 4)), colour, 3),
            Text(_GROWTH_LEFT + 30, at, cut(name, _LONGEST_GROWTH)),
        ]
    return Drawing(_WIDTH, height, label, tuple(shapes))
