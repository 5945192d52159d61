"""The picture at the end: what goes where. Pure.

Covers: memory over time of both crews, and the table's figures as bars, as shapes on a plane of pixels. Does not cover:
turning shapes into a file (picture_svg.py, picture_png.py), so that both kinds are the same picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from legroom.demo.machine import in_words
from legroom.demo.result import SEPARATE, SHARED, Result
from legroom.demo.stage import Weight
from legroom.units import format_duration, format_size
from legroom.words import say

WIDTH, HEIGHT = 1000, 560
INK, SOFT, GRID = "#1d2733", "#5b6775", "#d5dbe2"
WITHOUT, WITH = "#9aa3ad", "#1f6fb2"
# Four shades, apart in brightness too: told apart in grey and by everybody.
SHADES = ("#0b3c6f", "#1f6fb2", "#62a8dc", "#b5d8f2")
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 590, 128, 490
_BARS, _BAR_END = 640, 900  # the right column
_STEPS = tuple(1 << power for power in range(22, 42))
_MOST_TICKS = 6


@dataclass(frozen=True, slots=True)
class Area:
    """A filled polygon."""

    points: tuple[tuple[float, float], ...]
    colour: str


@dataclass(frozen=True, slots=True)
class Line:
    """From one point to another."""

    points: tuple[tuple[float, float], ...]
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """A text; ``anchor``: which part of it lies at x."""

    x: float
    y: float
    text: str
    size: int = 12
    colour: str = INK
    anchor: str = "start"
    bold: bool = False


Shape = Area | Line | Words
_Axis = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes, first drawn first, and what they show in words."""

    shapes: tuple[Shape, ...]
    label: str


def drawing(result: Result) -> Drawing:
    """All of it."""
    title = say(
        "{count} trainings on {size} of data",
        count=len(result.trainings),
        size=format_size(result.data_bytes),
    )
    shapes: list[Shape] = [
        Words(24, 38, title, 20, bold=True),
        Words(24, 60, f"{in_words(dict(result.machine))}, {result.machine['when']}", 11, SOFT),
        *_course(result),
        *_bars(result),
        Words(24, HEIGHT - 16, say("legroom demo: everything here was measured while it ran"), 11, SOFT),
    ]
    return Drawing(tuple(shapes), title)


def _course(result: Result) -> list[Shape]:
    """Memory over time, the crew with a copy each and then the one on one copy."""
    weights = [weight for weight in result.weights if weight.act in (SEPARATE, SHARED) and weight.held]
    shapes: list[Shape] = [Words(24, _TOP - 34, say("Memory together (PSS)"), 14, bold=True)]
    if len(weights) < 2:
        return [*shapes, Words(_LEFT, _TOP + 20, say("unknown"), 12, SOFT)]
    first, last = weights[0].when, weights[-1].when
    top = max(weight.total for weight in weights)
    step = next((step for step in _STEPS if top / step <= _MOST_TICKS), _STEPS[-1])

    def x(when: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (when - first) / max(last - first, 1e-9)

    def y(size: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * size / (top * 1.02)

    for size in range(0, top + 1, step):
        shapes.append(Line(((_LEFT, y(size)), (_RIGHT, y(size))), GRID))
        shapes.append(Words(_LEFT - 8, y(size) + 4, format_size(size) if size else "0", 11, SOFT, "end"))
    names = [training.name for training in result.trainings]
    for act, title in ((SEPARATE, say("a copy each")), (SHARED, say("one copy for all"))):
        mine = [weight for weight in weights if weight.act == act]
        if mine:
            shapes += _stack(mine, names, x, y)
            middle = (x(mine[0].when) + x(mine[-1].when)) / 2
            shapes.append(Words(middle, _BOTTOM + 20, title, 12, anchor="middle", bold=True))
    for when, text in result.marks:
        if first <= when <= last:
            shapes.append(Line(((x(when), _TOP), (x(when), _BOTTOM)), INK, dashed=True))
            shapes.append(Words(x(when), _TOP - 8, text, 11, anchor="middle"))
    return shapes


def _stack(weights: Sequence[Weight], names: Sequence[str], x: _Axis, y: _Axis) -> list[Shape]:
    """One area a training, one on the other."""
    shapes: list[Shape] = []
    floor = [0] * len(weights)
    for name, colour in zip(names, SHADES, strict=False):
        roof = [low + dict(weight.held).get(name, 0) for low, weight in zip(floor, weights, strict=True)]
        up = [(x(weight.when), y(size)) for weight, size in zip(weights, roof, strict=True)]
        down = [(x(weight.when), y(size)) for weight, size in zip(weights, floor, strict=True)]
        shapes.append(Area((*up, *reversed(down)), colour))
        floor = roof
    return shapes


@dataclass(frozen=True, slots=True)
class _Bar:
    name: str
    value: float
    words: str
    ours: bool


def _bars(result: Result) -> list[Shape]:
    """The figures of the table, each against its own largest."""
    shapes: list[Shape] = []
    at = float(_TOP - 34)
    for title, bars in _groups(result):
        shapes.append(Words(_BARS, at, title, 14, bold=True))
        at += 10
        largest = max((bar.value for bar in bars), default=0.0)
        for bar in bars:
            length = 0.0 if largest <= 0 else max(1.5, (_BAR_END - _BARS - 110) * bar.value / largest)
            left, low = _BARS + 110.0, at + 16
            shapes.append(Words(left - 8, at + 13, bar.name, 12, SOFT, "end"))
            if bar.value > 0:
                box = ((left, at + 2), (left + length, at + 2), (left + length, low), (left, low))
                shapes.append(Area(box, WITH if bar.ours else WITHOUT))
            shapes.append(Words(left + length + 6, at + 13, bar.words, 12))
            at += 20
        at += 32
    return shapes


def _groups(result: Result) -> list[tuple[str, list[_Bar]]]:
    held, opening, found = result.memory, result.opening, result.loaders
    groups: list[tuple[str, list[_Bar]]] = []
    if held.separate is not None and held.shared is not None:
        groups.append((say("Memory"), [
            _Bar(say("a copy each"), held.separate, format_size(held.separate), False),
            _Bar(say("one copy"), held.shared, format_size(held.shared), True),
        ]))  # fmt: skip
    if opening.later is not None:
        groups.append((say("Until a later training has its data"), [
            _Bar("h5py", opening.plain, format_duration(opening.plain), False),
            _Bar("Legroom", opening.later, format_duration(opening.later), True),
        ]))  # fmt: skip
    if found.rates is not None:
        names = (("torch", say("torch's loader")), ("legroom", say("Legroom's")), ("batches", "data.batches"))
        bars = [
            _Bar(name, found.rates[key], f"{found.rates[key]:.0f}", key != "torch") for key, name in names
        ]
        groups.append((say("Batches a second"), bars))
    if found.trials and result.shm_size is not None:
        title = say("Deaths in {size} of /dev/shm", size=format_size(result.shm_size))
        words = {True: say("1 of 1"), False: say("0 of 1")}
        names_ = {"torch": say("torch's loader"), "legroom": say("Legroom's")}
        bars = [
            _Bar(names_[t.loader], float(t.died), words[t.died], t.loader != "torch") for t in found.trials
        ]
        groups.append((title, bars))
    return groups
