"""Shapes on a plane of pixels, axes for them, and the writers of SVG and, by matplotlib, PNG.

A chart is a function that returns a `Drawing`; `svg` and `png` turn it into a file, so both kinds of file show the
same picture. Colours are names in `LIGHT` and `DARK`. The SVG has the light ones as attributes, which every viewer
understands, and the dark ones in a style sheet, which browsers apply by the system's setting. A PNG has the light ones.
"""

from __future__ import annotations

import html
import io
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from legroom.errors import UsageError
from legroom.messages import cells, listed, phrase, say
from legroom.system.argument_checks import refuse_unwritable
from legroom.system.lazy_and_optional_imports import require
from legroom.units import format_duration

# Blue, orange and red differ in brightness too, as the four shades do: readable in grey and with any colour vision.
LIGHT = {
    "ink": "#1d2733", "soft": "#56616e", "grid": "#d5dbe2", "paper": "#ffffff", "blue": "#0072b2", "grey": "#97a1ab",
    "warning": "#b25e00", "critical": "#c02434", "black": "#1d2733", "white": "#ffffff",
    "shade1": "#0b3c6f", "shade2": "#1f6fb2", "shade3": "#62a8dc", "shade4": "#b5d8f2",
}  # fmt: skip
DARK = LIGHT | {
    "ink": "#e4e9ef", "soft": "#9aa7b5", "grid": "#37424f", "paper": "#12181f", "blue": "#56b4e9", "grey": "#7c8792",
    "warning": "#f0a030", "critical": "#ff6b78",
    "shade1": "#2b5f97", "shade2": "#3f8ccc", "shade3": "#7cbbe8", "shade4": "#c4e0f4",
}  # fmt: skip
LETTER = 0.54  # mean width of a letter, as a share of the font's size
# What XML must not contain: a process can be called anything.
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_TIME_STEPS = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
)  # fmt: skip
_TIMES = 8  # on an axis, at most
_FONT = "system-ui,-apple-system,'Segoe UI','Noto Sans CJK SC','Microsoft YaHei',sans-serif"
_DPI = 100  # of the drawing's pixels
_SHARPER = 2  # pixels of the file for each
_POINT = 72 / _DPI  # a pixel, in the points of matplotlib
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_CHINESE = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
    "Microsoft YaHei", "SimHei", "PingFang SC", "Heiti SC", "Arial Unicode MS",
)  # fmt: skip

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points. ``name`` is its class in the SVG, ``tip`` its tooltip."""

    points: tuple[Point, ...]
    colour: str = "ink"
    width: float = 1.0
    dash: str = ""
    name: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Polygon:
    """A filled area."""

    points: tuple[Point, ...]
    colour: str
    opacity: float = 1.0
    name: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Circle:
    """A filled circle."""

    x: float
    y: float
    radius: float
    colour: str
    name: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; ``anchor`` is the part of it that lies at x: start, middle or end."""

    x: float
    y: float
    text: str
    size: int = 12
    colour: str = "ink"
    anchor: str = "start"
    bold: bool = False
    name: str = ""


Shape = Line | Polygon | Circle | Text


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes in the order in which they are drawn; ``label`` describes the picture to a screen reader."""

    width: int
    height: int
    label: str
    shapes: tuple[Shape, ...] = field(default=())


def one_below_another(drawings: Sequence[Drawing]) -> Drawing:
    """Several drawings as one; the label is the first one's."""
    shapes: list[Shape] = []
    top = 0
    for drawing in drawings:
        shapes += [_lower(shape, top) for shape in drawing.shapes]
        top += drawing.height
    return Drawing(max(one.width for one in drawings), top, drawings[0].label, tuple(shapes))


def _lower(shape: Shape, by: float) -> Shape:
    if isinstance(shape, (Line, Polygon)):
        return replace(shape, points=tuple((x, y + by) for x, y in shape.points))
    return replace(shape, y=shape.y + by)


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels; a value outside the range lies on the edge."""

    first: float
    last: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        span = self.last - self.first
        share = (value - self.first) / span if span else 0.0
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))


Ticks = Sequence[tuple[float, str]]


def box(x: float, y: float, width: float, height: float) -> tuple[Point, ...]:
    """The corners of a rectangle."""
    return ((x, y), (x + width, y), (x + width, y + height), (x, y + height))


def text_width(text: str, size: float) -> float:
    """About the width of a text in pixels; a Chinese character is twice as wide as a letter."""
    return cells(text) * size * LETTER


def x_axis(scale: Scale, ticks: Ticks, y: float, title: str) -> list[Shape]:
    """Labels below a chart, and what they count under them."""
    labels: list[Shape] = [Text(scale(value), y + 18, text, 11, "soft", "middle") for value, text in ticks]
    return [*labels, Text((scale.start + scale.end) / 2, y + 36, title, 11, "soft", "middle")]


def y_axis(scale: Scale, ticks: Ticks, left: float, right: float) -> list[Shape]:
    """A grid line and its label for each tick."""
    shapes: list[Shape] = []
    for value, text in ticks:
        y = scale(value)
        shapes.append(Line(((left, y), (right, y)), "grid", name="grid"))
        shapes.append(Text(left - 8, y + 4, text, 11, "soft", "end"))
    return shapes


def time_ticks(first: float, last: float) -> list[tuple[float, str]]:
    """Round times since ``first`` and their labels."""
    span = last - first
    step = next((step for step in _TIME_STEPS if span / step <= _TIMES), span / _TIMES)
    return [(first + step * n, since(first + step * n, first)) for n in range(int(span / step) + 1)]


def round_ticks(top: float, write: Callable[[int], str], most: int = 6, base: int = 10) -> list[tuple[float, str]]:
    """Round numbers from 0 to ``top``: 1, 2 and 5 times a power of ten, or with ``base`` 2 powers of two."""
    steps = [m * 10**power for power in range(16) for m in (1, 2, 5)]
    if base == 2:
        steps = [2**power for power in range(60)]
    step = next(step for step in steps if top / step <= most)
    return [(value, write(value) if value else "0") for value in range(0, int(top) + 1, step)]


def since(when: float, first: float) -> str:
    """A moment as the time since the first one."""
    return format_duration(when - first) if when > first else "0 s"


def free_space(right: float) -> Callable[[float, float], bool]:
    """A function to call from left to right: whether a label at x of that width overlaps no earlier one."""
    taken = float("-inf")

    def fits(x: float, width: float) -> bool:
        nonlocal taken
        if x < taken or x + width > right:
            return False
        taken = x + width
        return True

    return fits


def xml_text(text: str) -> str:
    """Text escaped for a page or picture, or for the value of an attribute."""
    return html.escape(_NOT_TEXT.sub("\ufffd", text))


def svg(drawing: Drawing) -> str:
    """The drawing as an SVG file that needs nothing else."""
    label, width, height = xml_text(drawing.label), drawing.width, drawing.height
    dark = "".join(f".c-{name}{{--c:{value}}}" for name, value in DARK.items())
    dark += ".chart .fill{fill:var(--c)}.chart .stroke{stroke:var(--c)}"
    style = f"@media (prefers-color-scheme:dark){{{dark}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{label}" font-family="{_FONT}"><title>{label}</title><style>{style}</style>'
        f'<rect class="fill c-paper" width="{width}" height="{height}" fill="{LIGHT["paper"]}"/>'
        + "".join(map(_element, drawing.shapes))
        + "</svg>\n"
    )


def _element(shape: Shape) -> str:
    kind = "stroke" if isinstance(shape, Line) else "fill"
    names = f'class="{kind} c-{shape.colour}{" " + shape.name if shape.name else ""}"'
    colour = f'{kind}="{LIGHT[shape.colour]}"'
    if isinstance(shape, Text):
        more = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
        more += ' font-weight="600"' if shape.bold else ""
        return (
            f'<text {names} x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" {colour}{more}>'
            f"{xml_text(shape.text)}</text>"
        )
    tip = f"<title>{xml_text(shape.tip)}</title>" if shape.tip else ""
    if isinstance(shape, Circle):
        return f'<circle {names} cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}" {colour}>{tip}</circle>'
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
    if isinstance(shape, Polygon):
        return f'<polygon {names} points="{points}" {colour} opacity="{shape.opacity:g}">{tip}</polygon>'
    dash = f' stroke-dasharray="{shape.dash}"' if shape.dash else ""
    return (
        f'<polyline {names} points="{points}" fill="none" {colour} stroke-width="{shape.width:g}"{dash}'
        f' stroke-linejoin="round">{tip}</polyline>'
    )


def png(drawing: Drawing) -> bytes:
    """The drawing as the content of a PNG file."""
    _require_matplotlib()
    import matplotlib

    with matplotlib.rc_context({"font.family": _font_families()}):
        return _png(drawing)


def _require_matplotlib() -> None:
    instead = (phrase("or draw an .svg or .html, which need no package"),)
    require("matplotlib.figure", "plot", phrase("drawing a PNG"), instead=instead)


def _font_families() -> list[str]:
    """matplotlib's own font, and after it an installed one that has Chinese characters."""
    from matplotlib import font_manager, rcParams

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [*rcParams["font.family"], *[name for name in _CHINESE if name in installed][:1]]


def _png(drawing: Drawing) -> bytes:
    from matplotlib.figure import Figure  # no pyplot: it would choose a window system
    from matplotlib.patches import Circle as Patch

    figure = Figure(figsize=(drawing.width / _DPI, drawing.height / _DPI), dpi=_DPI * _SHARPER)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for order, shape in enumerate(drawing.shapes):
        colour = LIGHT[shape.colour]
        if isinstance(shape, Polygon):
            x, y = zip(*shape.points, strict=True)
            axes.fill(x, y, color=colour, alpha=shape.opacity, linewidth=0, zorder=order)
        elif isinstance(shape, Line):
            width = shape.width * _POINT
            dash = [float(part) / shape.width for part in shape.dash.split()]
            style = (0, dash) if dash else "-"
            x, y = zip(*shape.points, strict=True)
            axes.plot(x, y, color=colour, linewidth=width, linestyle=style, zorder=order)
        elif isinstance(shape, Circle):
            axes.add_patch(Patch((shape.x, shape.y), shape.radius, color=colour, linewidth=0, zorder=order))
        else:
            text = shape.text.replace("$", r"\$")  # a dollar sign would begin a formula
            axes.text(
                shape.x, shape.y, text, fontsize=shape.size * _POINT, color=colour, ha=_ANCHORS[shape.anchor],
                va="baseline", weight="bold" if shape.bold else "normal", zorder=order,
            )  # fmt: skip
    file = io.BytesIO()
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a rectangle, without an error.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(file, format="png", metadata={"Title": drawing.label})
    return file.getvalue()


def check_path(path: str | os.PathLike[str], kinds: Sequence[str]) -> Path:
    """The path, where a file of one of these kinds (``.svg``) can be written there."""
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in kinds:
        raise UsageError(
            say("cannot draw {path}", path=target),
            why=say("the suffix selects the format, and {kind!r} is not one of them", kind=kind),
            fix=(say("use a name that ends in {kinds}", kinds=listed(kinds)),),
        )
    refuse_unwritable(target, target)
    if kind == ".png":
        _require_matplotlib()  # now, not after a long run
    return target


def render(drawing: Drawing, kind: str) -> bytes:
    """The drawing as the content of a ``.png`` or ``.svg`` file."""
    return png(drawing) if kind == ".png" else svg(drawing).encode()
