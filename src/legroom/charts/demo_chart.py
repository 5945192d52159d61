"""The chart of `legroom demo`: memory of its training runs over time, and its figures as bars.

It is drawn from the object that ``legroom demo --json`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from legroom.charts.drawing import (
    Drawing,
    Line,
    Polygon,
    Scale,
    Shape,
    Text,
    box,
    round_ticks,
    text_width,
    time_ticks,
    x_axis,
    y_axis,
)
from legroom.messages import say
from legroom.units import format_duration, format_size, size_or_unknown

_WIDTH, _HEIGHT = 1000, 590
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 590, 128, 480
_BARS, _NAMES, _LONGEST = 640, 120, 140  # the right column: where it begins, its labels, its longest bar
_SHADES = ("shade1", "shade2", "shade3", "shade4")
_LABEL = 14  # pixels that a label of 11 needs
_Edge = Sequence[tuple[float, float]]
_Bar = tuple[str, float, str, bool]  # name, value, its text, whether it is Legroom's


def demo_chart(result: Mapping[str, Any]) -> Drawing:
    """All of it."""
    count, size = len(result["trainings"]), format_size(result["data_bytes"])
    title = say("{count} training runs on {size} of data", count=count, size=size)
    shapes: list[Shape] = [
        Text(24, 38, title, 20, bold=True),
        Text(24, 60, f"{machine_line(result['machine'])}, {result['machine']['when']}", 11, "soft"),
        *_memory_over_time(result),
        *_bar_groups(result),
        Text(24, _HEIGHT - 14, say("legroom demo: every figure was measured during this run"), 11, "soft"),
    ]
    return Drawing(_WIDTH, _HEIGHT, title, tuple(shapes))


def machine_line(where: Mapping[str, Any]) -> str:
    """The machine in one line, which the demo also prints."""
    packages = ", ".join(f"{name} {number}" for name, number in where["packages"].items())
    return say("{cpus} x {cpu}, {ram} of RAM, Python {python}, {packages}", cpus=where["cpus"], cpu=where["cpu"],
               ram=size_or_unknown(where["memory"]), python=where["python"], packages=packages)  # fmt: skip


def _memory_over_time(result: Mapping[str, Any]) -> list[Shape]:
    stages = {"separate": say("a copy each"), "shared": say("one shared copy")}
    samples = [sample for sample in result["weights"] if sample["act"] in stages and sample["held"]]
    shapes: list[Shape] = [Text(24, _TOP - 34, say("Memory of all training runs (PSS)"), 14, bold=True)]
    if len(samples) < 2:
        return [*shapes, Text(_LEFT, _TOP + 20, say("unknown"), 12, "soft")]
    first, last = samples[0]["when"], samples[-1]["when"]
    top = max(sum(sample["held"].values()) for sample in samples) * 1.02
    x, y = Scale(first, last, _LEFT, _RIGHT), Scale(0, top, _BOTTOM, _TOP)
    shapes += y_axis(y, round_ticks(top, format_size, base=2), _LEFT, _RIGHT)
    names = [training["name"] for training in result["trainings"]]
    unlabelled = set(names)  # one that is too thin in the first stage gets its label in the second
    for act, title in stages.items():
        mine = [sample for sample in samples if sample["act"] == act]
        if mine:
            shapes += _stacked(mine, names, x, y, unlabelled)
            middle = (x(mine[0]["when"]) + x(mine[-1]["when"])) / 2
            shapes.append(Text(middle, _BOTTOM + 58, title, 12, anchor="middle", bold=True))
    for mark in result["marks"]:
        if first <= mark["when"] <= last:
            at = x(mark["when"])
            shapes.append(Line(((at, _TOP), (at, _BOTTOM)), "ink", dash="4 3"))
            shapes.append(Text(at, _TOP - 8, mark["text"], 11, anchor="middle"))
    return [*shapes, *x_axis(x, time_ticks(first, last), _BOTTOM, say("time since the first training run"))]


def _stacked(
    samples: Sequence[Mapping[str, Any]], names: Sequence[str], x: Scale, y: Scale, unlabelled: set[str]
) -> list[Shape]:
    """One area for each training run, on top of the one before; those of ``unlabelled`` get a label if it fits."""
    shapes: list[Shape] = []
    floor = [0] * len(samples)
    for name, colour in zip(names, _SHADES, strict=False):
        roof = [low + sample["held"].get(name, 0) for low, sample in zip(floor, samples, strict=True)]
        up = [(x(sample["when"]), y(size)) for sample, size in zip(samples, roof, strict=True)]
        down = [(x(sample["when"]), y(size)) for sample, size in zip(samples, floor, strict=True)]
        shapes.append(Polygon((*up, *reversed(down)), colour, tip=name))
        if name in unlabelled and (place := _label_place(up, down, text_width(name, 11))):
            unlabelled.discard(name)
            ink = "white" if colour in _SHADES[:2] else "black"
            shapes.append(Text(place[0], place[1] + 4, name, 11, ink, "middle"))
        floor = roof
    return shapes


def _label_place(up: _Edge, down: _Edge, width: float) -> tuple[float, float] | None:
    """Where a label lies inside a layer over its whole width, as near to the layer's middle as possible; or None."""
    middle, found = (up[0][0] + up[-1][0]) / 2, []
    for x, _ in up:
        left, right = x - width / 2, x + width / 2
        if left < up[0][0] or right > up[-1][0]:
            continue
        above = max(y for at, y in up if left <= at <= right)
        below = min(y for at, y in down if left <= at <= right)
        ends = ((_at(up, end), _at(down, end)) for end in (left, right))
        for high, low in ends:
            above, below = max(above, high), min(below, low)
        if below - above >= _LABEL:
            found.append((abs(x - middle), x, (above + below) / 2))
    return min(found)[1:] if found else None


def _at(edge: _Edge, x: float) -> float:
    """The height of an edge at x, between its points."""
    for (x0, y0), (x1, y1) in pairwise(edge):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return edge[-1][1]


def _bar_groups(result: Mapping[str, Any]) -> list[Shape]:
    """Figures of the table, each group on a scale of its own."""
    shapes: list[Shape] = []
    y = float(_TOP - 34)
    left = float(_BARS + _NAMES)
    for title, bars in _groups(result):
        shapes.append(Text(_BARS, y, title, 14, bold=True))
        y += 10
        largest = max(value for _, value, _, _ in bars) or 1.0
        for name, value, text, ours in bars:
            length = max(1.5, _LONGEST * value / largest) if value else 0.0
            shapes.append(Text(left - 8, y + 13, name, 12, "soft", "end"))
            if value:
                shapes.append(Polygon(box(left, y + 2, length, 14), "blue" if ours else "grey"))
            shapes.append(Text(left + length + 6, y + 13, text))
            y += 20
        y += 32
    return shapes


def _groups(result: Mapping[str, Any]) -> list[tuple[str, list[_Bar]]]:
    memory, opening, loaders = result["memory"], result["opening"], result["loaders"]
    names = {"torch": say("torch's DataLoader"), "legroom": "Legroom", "batches": "data.batches"}
    groups: list[tuple[str, list[_Bar]]] = []
    if None not in memory.values():
        groups.append((say("Memory"), [
            (say("a copy each"), memory["separate"], format_size(memory["separate"]), False),
            (say("one shared copy"), memory["shared"], format_size(memory["shared"]), True),
        ]))  # fmt: skip
    if opening["later"] is not None:
        groups.append((say("Time until a later run has its data"), [
            ("h5py", opening["plain"], format_duration(opening["plain"]), False),
            ("Legroom", opening["later"], format_duration(opening["later"]), True),
        ]))  # fmt: skip
    if loaders["rates"] is not None:
        rates = [
            (names[key], rate, f"{rate:.0f}", key != "torch") for key in names if (rate := loaders["rates"].get(key))
        ]
        groups.append((say("Batches per second"), rates))
    if loaders["trials"] and result["shm_size"] is not None:
        told = say("crashes with {size} of /dev/shm", size=format_size(result["shm_size"]))
        crashes = [(names[trial["loader"]], float(trial["died"]), say("{count} of 1", count=int(trial["died"])),
                    trial["loader"] != "torch") for trial in loaders["trials"]]  # fmt: skip
        groups.append((told[:1].upper() + told[1:], crashes))
    return groups
