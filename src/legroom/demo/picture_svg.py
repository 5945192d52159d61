"""A drawing as SVG: needs nothing. Covers: shapes as text. Does not cover: what is drawn (picture.py)."""

from __future__ import annotations

from legroom.demo.picture import HEIGHT, WIDTH, Area, Drawing, Line, Shape
from legroom.monitor.chart_svg import text_of


def svg(drawing: Drawing) -> bytes:
    """The file."""
    words = text_of(drawing.label)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" aria-label="{words}" font-family="system-ui,sans-serif"><title>{words}</title>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    )
    return (head + "".join(map(_shape, drawing.shapes)) + "</svg>\n").encode()


def _shape(shape: Shape) -> str:
    if isinstance(shape, Area):
        return f'<polygon points="{_points(shape.points)}" fill="{shape.colour}"/>'
    if isinstance(shape, Line):
        dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
        return f'<polyline points="{_points(shape.points)}" fill="none" stroke="{shape.colour}"{dashes}/>'
    weight = ' font-weight="600"' if shape.bold else ""
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" fill="{shape.colour}"'
        f' text-anchor="{shape.anchor}"{weight}>{text_of(shape.text)}</text>'
    )


def _points(points: tuple[tuple[float, float], ...]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
