"""A drawing as PNG, by matplotlib. Covers: the same shapes as picture_svg.py. Does not cover: what is drawn."""

from __future__ import annotations

import io
import warnings

from legroom.demo.picture import HEIGHT, WIDTH, Area, Drawing, Line
from legroom.monitor.plot_png import families, ready

_DPI = 100  # of the plane's pixels
_SHARPER = 2  # pixels of the file for each
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_POINT = 72 / _DPI


def png(drawing: Drawing) -> bytes:
    """The file; MissingPackage where matplotlib is not installed."""
    ready()
    import matplotlib

    with matplotlib.rc_context({"font.family": families()}):
        return _drawn(drawing)


def _drawn(drawing: Drawing) -> bytes:
    from matplotlib.figure import Figure  # no pyplot: it would choose a window system

    figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI * _SHARPER)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(HEIGHT, 0)
    axes.axis("off")
    for shape in drawing.shapes:
        if isinstance(shape, Area):
            axes.fill(*zip(*shape.points, strict=True), color=shape.colour, linewidth=0)
        elif isinstance(shape, Line):
            style = "--" if shape.dashed else "-"
            axes.plot(*zip(*shape.points, strict=True), color=shape.colour, linewidth=0.8, linestyle=style)
        else:
            axes.text(
                shape.x, shape.y, shape.text.replace("$", r"\$"), fontsize=shape.size * _POINT, color=shape.colour,
                ha=_ANCHORS[shape.anchor], va="baseline", weight="bold" if shape.bold else "normal",
            )  # fmt: skip
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph", category=UserWarning
        )  # a letter that its font lacks
        figure.savefig(file, format="png", metadata={"Title": drawing.label})
    return file.getvalue()
