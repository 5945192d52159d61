"""Trial batch sizes against the GPU memory they needed: the picture of a batch-size search."""

from __future__ import annotations

import os

from legroom.charts.drawing import (
    Circle,
    Drawing,
    Line,
    Scale,
    Shape,
    Text,
    free_space,
    round_ticks,
    svg,
    text_width,
    x_axis,
    y_axis,
)
from legroom.messages import say
from legroom.records.gpu_results import BatchFound
from legroom.system.argument_checks import check_arguments
from legroom.system.atomic_file import replace_file
from legroom.units import format_size

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 380, 84, 600, 76, 316


def plot(found: BatchFound, path: str | os.PathLike[str] | None = None) -> str:
    """Draw the trials of a batch-size search, the line fitted to them and the memory limit, as SVG.

    Args:
        found: What ``find_batch_size`` returned.
        path: A file to write the picture to as well.
    """
    check_arguments(plot, locals())
    text = svg(batch_chart(found))
    if path is not None:
        replace_file(path, text)
    return text


def batch_chart(found: BatchFound) -> Drawing:
    """Peak memory over batch size; a trial that did not fit is a cross."""
    title = say(
        "batch {batch}: {size} of {bound}",
        batch=found.largest, size=format_size(found.predicted(found.largest)), bound=format_size(found.bound),
    )  # fmt: skip
    usable = say("limit less {share:.0%}: {size}", share=found.margin, size=format_size(found.cap))
    widest = max(trial.batch for trial in found.trials) * 1.05
    highest = max([found.bound, *(peak for _, peak in found.curve)]) * 1.05
    x, y = Scale(0, widest, _LEFT, _RIGHT), Scale(0, highest, _BOTTOM, _TOP)
    shapes: list[Shape] = [
        Text(16, 24, title, 14, bold=True),
        Text(16, 50, say("peak GPU memory of one training step"), 11, "soft"),
        *y_axis(y, round_ticks(highest, format_size, base=2), _LEFT, _RIGHT),
        *_limit(x, y, found.bound, "critical", say("limit {size}", size=format_size(found.bound))),
        *_limit(x, y, found.cap, "warning", usable, below=True),
        Line(((x(0), y(found.predicted(0))), (x(widest), y(found.predicted(round(widest))))), "blue", 1.5),
    ]  # fmt: skip
    for trial in found.trials:
        at, height = x(trial.batch), y(trial.peak if trial.peak is not None else found.cap)
        if trial.fits and trial.peak is not None:
            tip = say("batch {batch}: {size}", batch=trial.batch, size=format_size(trial.peak))
            shapes.append(Circle(at, height, 4, "blue", tip=tip))
        else:
            tip = say("batch {batch} does not fit", batch=trial.batch)
            for sign in (1, -1):
                ends = ((at - 4, height - 4 * sign), (at + 4, height + 4 * sign))
                shapes.append(Line(ends, "critical", 2, tip=tip))
    shapes += x_axis(x, _batch_ticks(found, x), _BOTTOM, say("batch size"))
    return Drawing(_WIDTH, _HEIGHT, title, tuple(shapes))


def _limit(x: Scale, y: Scale, size: int, colour: str, text: str, below: bool = False) -> list[Shape]:
    height = y(size)
    return [
        Line(((x.start, height), (x.end, height)), colour, 1.5, "6 4"),
        Text(x.start + 6, height + (14 if below else -5), text, 12, colour),
    ]


def _batch_ticks(found: BatchFound, x: Scale) -> list[tuple[float, str]]:
    """The batch sizes that were tried, from the largest down where labels would overlap."""
    fits = free_space(float("inf"))
    ticks = []
    for batch in sorted({trial.batch for trial in found.trials}, reverse=True):
        text = str(batch)
        if fits(-x(batch), text_width(text, 11) + 6):
            ticks.append((float(batch), text))
    return ticks
