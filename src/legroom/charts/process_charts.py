"""Charts of processes: amounts of memory over time one above the other, and growth over steps by line of code.

``stacked_chart`` shows the processes in a pool, or the kinds of memory of one process; ``growth_chart`` what one
process uses of a pool, and what the lines add that make it grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from legroom.charts.drawing import Drawing, Line, Polygon, Scale, Shape, Text, round_ticks, time_ticks, x_axis, y_axis
from legroom.messages import cut, say
from legroom.units import format_size

_LEFT, _RIGHT, _TOP, _PANEL, _FOOT, _LEGEND = 138, 64, 40, 200, 50, 18
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
    width: int = 900,
    whole: Sequence[float | None] = (),
    whole_name: str = "",
    start: float | None = None,
    steps: bool = False,
) -> Drawing:
    """The layers from the bottom up; ``whole`` is a line above them, such as what a pool has in use.

    ``steps``: the times are numbers of training steps.
    """
    if len(times) < 2 or not layers:
        return Drawing(width, 60, title, (Text(20, 34, say("no readings")),))
    sums = [sum(layer.values[at] or 0 for layer in layers) for at in range(len(times))]
    top = max(1.0, *sums, *(value or 0 for value in whole)) * 1.05
    x = Scale(times[0] if start is None else start, max(times[-1], times[0] + 1), _LEFT, width - _RIGHT)
    y = Scale(0, top, _TOP + _PANEL, _TOP)
    ticks = [(value, format_size(int(value)) if value else "0") for value, _ in round_ticks(top, str, 5, base=2)]
    shapes: list[Shape] = [Text(12, 22, title, 13, bold=True), *y_axis(y, ticks, _LEFT, width - _RIGHT)]
    if steps:
        ticks = [one for one in round_ticks(x.last, str) if one[0] >= x.first]
        shapes += x_axis(x, ticks, _TOP + _PANEL, say("steps"))
    else:
        shapes += x_axis(x, time_ticks(x.first, x.last), _TOP + _PANEL, say("time since the start"))
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
    foot_y = _TOP + _PANEL + _FOOT
    if known and whole_name:
        shapes += [
            Line(((_LEFT, foot_y - 4), (_LEFT + 14, foot_y - 4)), "ink", 2),
            Text(_LEFT + 22, foot_y, whole_name),
        ]
        foot_y += _LEGEND
    for name, colour in reversed(named):  # in the order of the layers on the page, the highest first
        shapes.append(
            Polygon(
                ((_LEFT, foot_y - 9), (_LEFT + 14, foot_y - 9), (_LEFT + 14, foot_y), (_LEFT, foot_y)), colour, 0.75
            )
        )
        shapes.append(Text(_LEFT + 22, foot_y, cut(name, _LONGEST)))
        foot_y += _LEGEND
    return Drawing(width, foot_y, title, tuple(shapes))


_WIDTH, _GROWTH_LEFT, _GROWTH_RIGHT, _GROWTH_TOP, _GROWTH_PANEL, _GROWTH_FOOT = 900, 96, 24, 44, 240, 52
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
    height = _GROWTH_TOP + _GROWTH_PANEL + _GROWTH_FOOT + _GROWTH_LEGEND * (len(lines) + 1)
    if len(points) < 2:
        return Drawing(_WIDTH, 60, label, (Text(20, 34, say("no readings")),))
    low = min(value for _, value in points)
    whole = [(x, value - low) for x, value in points]
    first, last = points[0][0], points[-1][0]
    top = max([1.0, *(value for _, value in whole), *(value for line in lines for _, value in line.points)]) * 1.05
    x, y = (
        Scale(first, max(last, first + 1), _GROWTH_LEFT, _WIDTH - _GROWTH_RIGHT),
        Scale(0, top, _GROWTH_TOP + _GROWTH_PANEL, _GROWTH_TOP),
    )
    ticks = [(value, format_size(int(value)) if value else "0") for value, _ in round_ticks(top, str, base=2)]
    steps = round_ticks(last, str) if per == "step" else round_ticks(last, lambda count: f"{count} s")
    counted = say("steps") if per == "step" else say("time")
    shapes: list[Shape] = [
        Text(12, 22, say("{pool}: growth since the first reading ({size} then)", pool=pool, size=format_size(int(low))),
             13, bold=True),
        *y_axis(y, ticks, _GROWTH_LEFT, _WIDTH - _GROWTH_RIGHT),
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
