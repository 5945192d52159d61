"""The chart of a demo: memory of the training runs over time, and the figures of the table as bars."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from legroom.charts.chart_file import check_path
from legroom.charts.drawing import (
    Drawing,
    Line,
    Polygon,
    Scale,
    Shape,
    Text,
    box,
    round_ticks,
    time_ticks,
    x_axis,
    y_axis,
)
from legroom.demo.machine import in_words
from legroom.demo.result import SEPARATE, SHARED, Result
from legroom.demo.stage import Weight
from legroom.units import format_duration, format_size
from legroom.words import say

_WIDTH, _HEIGHT = 1000, 590
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 590, 128, 480
_BARS, _NAMES, _LONGEST = 640, 120, 140  # the right column: where it begins, its labels, its longest bar
_SHADES = ("shade1", "shade2", "shade3", "shade4")
_Bar = tuple[str, float, str, bool]  # name, value, its text, whether it is Legroom's


def picture_path(asked: str | None) -> Path:
    """The file to draw: the given one, or one in this directory, or in the one for temporary files."""
    if asked is not None:
        return check_path(Path(asked).absolute(), (".png", ".svg"))
    kind = ".png" if importlib.util.find_spec("matplotlib") is not None else ".svg"
    folder = Path.cwd() if os.access(".", os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"legroom-demo{kind}"


def demo_chart(result: Result) -> Drawing:
    """All of it."""
    count, size = len(result.trainings), format_size(result.data_bytes)
    title = say("{count} training runs on {size} of data", count=count, size=size)
    shapes: list[Shape] = [
        Text(24, 38, title, 20, bold=True),
        Text(24, 60, f"{in_words(dict(result.machine))}, {result.machine['when']}", 11, "soft"),
        *_memory_over_time(result),
        *_bar_groups(result),
        Text(24, _HEIGHT - 14, say("legroom demo: every figure was measured during this run"), 11, "soft"),
    ]
    return Drawing(_WIDTH, _HEIGHT, title, tuple(shapes))


def _memory_over_time(result: Result) -> list[Shape]:
    weights = [weight for weight in result.weights if weight.act in (SEPARATE, SHARED) and weight.held]
    shapes: list[Shape] = [Text(24, _TOP - 34, say("Memory of all training runs (PSS)"), 14, bold=True)]
    if len(weights) < 2:
        return [*shapes, Text(_LEFT, _TOP + 20, say("unknown"), 12, "soft")]
    first, last = weights[0].when, weights[-1].when
    top = max(weight.total for weight in weights) * 1.02
    x, y = Scale(first, last, _LEFT, _RIGHT), Scale(0, top, _BOTTOM, _TOP)
    shapes += y_axis(y, round_ticks(top, format_size, base=2), _LEFT, _RIGHT)
    names = [training.name for training in result.trainings]
    for act, title in ((SEPARATE, say("a copy each")), (SHARED, say("one shared copy"))):
        mine = [weight for weight in weights if weight.act == act]
        if mine:
            shapes += _stacked(mine, names, x, y)
            middle = (x(mine[0].when) + x(mine[-1].when)) / 2
            shapes.append(Text(middle, _BOTTOM + 58, title, 12, anchor="middle", bold=True))
    for when, text in result.marks:
        if first <= when <= last:
            shapes.append(Line(((x(when), _TOP), (x(when), _BOTTOM)), "ink", dash="4 3"))
            shapes.append(Text(x(when), _TOP - 8, text, 11, anchor="middle"))
    return [*shapes, *x_axis(x, time_ticks(first, last), _BOTTOM, say("time since the first training run"))]


def _stacked(weights: Sequence[Weight], names: Sequence[str], x: Scale, y: Scale) -> list[Shape]:
    """One area for each training run, on top of the one before."""
    shapes: list[Shape] = []
    floor = [0] * len(weights)
    for name, colour in zip(names, _SHADES, strict=False):
        roof = [low + dict(weight.held).get(name, 0) for low, weight in zip(floor, weights, strict=True)]
        up = [(x(weight.when), y(size)) for weight, size in zip(weights, roof, strict=True)]
        down = [(x(weight.when), y(size)) for weight, size in zip(weights, floor, strict=True)]
        shapes.append(Polygon((*up, *reversed(down)), colour, tip=name))
        at = len(weights) // 2
        ink = "white" if colour in _SHADES[:2] else "black"
        if weights[0].act == SEPARATE and down[at][1] - up[at][1] > 14:
            shapes.append(Text(up[at][0], (up[at][1] + down[at][1]) / 2 + 4, name, 11, ink, "middle"))
        floor = roof
    return shapes


def _bar_groups(result: Result) -> list[Shape]:
    """The figures of the table, each group on a scale of its own."""
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


def _groups(result: Result) -> list[tuple[str, list[_Bar]]]:
    held, opening, found = result.memory, result.opening, result.loaders
    loaders = {"torch": say("torch DataLoader"), "legroom": say("Legroom"), "batches": "data.batches"}
    groups: list[tuple[str, list[_Bar]]] = []
    if held.separate is not None and held.shared is not None:
        groups.append((say("Memory"), [
            (say("a copy each"), held.separate, format_size(held.separate), False),
            (say("one shared copy"), held.shared, format_size(held.shared), True),
        ]))  # fmt: skip
    if opening.later is not None:
        groups.append((say("Time until a later run has its data"), [
            ("h5py", opening.plain, format_duration(opening.plain), False),
            ("Legroom", opening.later, format_duration(opening.later), True),
        ]))  # fmt: skip
    if found.rates is not None:
        rates = [
            (loaders[key], found.rates[key], f"{found.rates[key]:.0f}", key != "torch") for key in loaders
        ]
        groups.append((say("Batches per second"), rates))
    if found.trials and result.shm_size is not None:
        title = say("Crashes with {size} of /dev/shm", size=format_size(result.shm_size))
        crashes = [
            (loaders[trial.loader], float(trial.died), say("{count} of 1", count=int(trial.died)), number > 0)
            for number, trial in enumerate(found.trials)
        ]
        groups.append((title, crashes))
    return groups
