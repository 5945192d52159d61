"""A drawing as PNG, by matplotlib: the same shapes as in the SVG, in the light colours."""

from __future__ import annotations

import io
import warnings

from legroom.charts.drawing import LIGHT, Circle, Drawing, Line, Polygon
from legroom.errors import MissingPackage
from legroom.words import say

_DPI = 100  # of the drawing's pixels
_SHARPER = 2  # pixels of the file for each
_POINT = 72 / _DPI  # a pixel, in the points of matplotlib
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_CHINESE = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
    "Microsoft YaHei", "SimHei", "PingFang SC", "Heiti SC", "Arial Unicode MS",
)  # fmt: skip


def require_matplotlib() -> None:
    """Raise MissingPackage where no PNG can be drawn: before a long run, not after it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as problem:
        raise MissingPackage(
            say("drawing a PNG needs the package matplotlib"),
            why=str(problem),
            fix=(say("pip install matplotlib"), say("or draw an .svg or .html, which need no package")),
        ) from problem


def png(drawing: Drawing) -> bytes:
    """The content of the file."""
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context({"font.family": _font_families()}):
        return _render(drawing)


def _font_families() -> list[str]:
    """matplotlib's own font, and after it an installed one that has Chinese characters."""
    from matplotlib import font_manager, rcParams

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [*rcParams["font.family"], *[name for name in _CHINESE if name in installed][:1]]


def _render(drawing: Drawing) -> bytes:
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
            axes.fill(
                *zip(*shape.points, strict=True), color=colour, alpha=shape.opacity, linewidth=0, zorder=order
            )
        elif isinstance(shape, Line):
            width = shape.width * _POINT
            dash = [float(part) / shape.width for part in shape.dash.split()]
            style = (0, dash) if dash else "-"
            axes.plot(
                *zip(*shape.points, strict=True), color=colour, linewidth=width, linestyle=style, zorder=order
            )
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
        # A font that lacks a character is no error: the character becomes a box.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(file, format="png", metadata={"Title": drawing.label})
    return file.getvalue()
