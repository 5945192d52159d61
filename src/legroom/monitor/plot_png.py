"""A story as a PNG, by matplotlib. Covers: the same panels as chart_svg.py. Does not cover: the other kinds."""

from __future__ import annotations

import io
import warnings
from typing import Any

from legroom.errors import MissingPackage
from legroom.monitor.chart_scale import scale_of
from legroom.monitor.chart_svg import amount
from legroom.monitor.course import Dot
from legroom.monitor.story import Story
from legroom.words import say

_COLOURS = {"warning": "#b25e00", "critical": "#c02434"}
_LINE = "#1f6fb2"
_MOST_LABELS = 12
_CHINESE = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
    "Microsoft YaHei", "SimHei", "PingFang SC", "Heiti SC", "Arial Unicode MS",
)  # fmt: skip


def ready() -> None:
    """Say now, not after hours, if it cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as problem:
        raise MissingPackage(
            say("drawing a PNG needs the package matplotlib"),
            why=str(problem),
            fix=(say("pip install matplotlib"), say("or draw an .svg or .html, which need nothing")),
        ) from problem


def families() -> list[str]:
    """The fonts to draw with: matplotlib's own, and after it one for the letters it lacks, where there is one."""
    from matplotlib import font_manager, rcParams

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [*rcParams["font.family"], *[name for name in _CHINESE if name in installed][:1]]


def picture(story: Story) -> bytes:
    """The PNG."""
    ready()
    import matplotlib

    with matplotlib.rc_context({"font.family": families()}):
        return _drawn(story)


def _drawn(story: Story) -> bytes:
    from matplotlib.figure import Figure  # no pyplot: it would choose a window system

    pools = story.dots()
    began = story.began or 0.0
    figure = Figure(figsize=(10, 1.0 + 1.3 * max(1, len(pools))), dpi=120, layout="constrained")
    axes = figure.subplots(max(1, len(pools)), 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(_plain(story.sample.watched) if story.sample else "", fontsize=10)
    for one, (name, dots) in zip(axes, pools.items(), strict=False):
        _panel(one, name, dots, began)
        here = [spell for spell in story.spells() if spell.pool in (name, None)]
        for place, spell in enumerate(here):
            since = spell.since - began
            until = (spell.until if spell.until is not None else dots[-1].when) - began
            one.axvspan(since, until, color=_COLOURS[spell.level], alpha=0.16)
            # From the bottom up, one above the other: the line is mostly elsewhere when there is an alarm.
            height = 6 + 16 * (place % 5)
            one.text(since, height, f" {spell.code}", fontsize=7, color=_COLOURS[spell.level], clip_on=True)
        for number, mark in enumerate(story.marks):
            one.axvline(mark.when - began, color="#5b6775", linewidth=0.7, linestyle=":")
            if one is axes[0] and number < _MOST_LABELS:
                one.annotate(
                    _plain(mark.text[:24]),
                    (mark.when - began, 1.02),
                    xycoords=("data", "axes fraction"),
                    fontsize=7,
                )
    scale = scale_of(0.0, max((dots[-1].when - began for dots in pools.values()), default=0.0), 0.0, 1.0)
    ticks = scale.ticks()
    axes[-1].set_xlim(scale.first, scale.last)
    axes[-1].set_xticks([when for when, _ in ticks], [words for _, words in ticks], fontsize=8)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph", category=UserWarning
        )  # a letter that its font lacks
        figure.savefig(file, format="png")
    return file.getvalue()


def _panel(axes: Any, name: str, dots: list[Dot], began: float) -> None:
    shares = [dot.share for dot in dots]
    axes.plot(
        [dot.when - began for dot in dots],
        [float("nan") if share is None else share * 100 for share in shares],
        color=_LINE,
        linewidth=1.3,
    )
    size = next((dot.size for dot in reversed(dots) if dot.size), None)
    words = (
        "unknown" if size is None else f"of {amount(name, size)}"
    )  # English: matplotlib's font has no other letters
    axes.set_ylabel(f"{name}\n{words}", rotation=0, ha="right", va="center", fontsize=9)
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"], fontsize=7)
    axes.grid(alpha=0.3)


def _plain(text: str) -> str:
    """A dollar sign would begin a formula."""
    return text.replace("$", r"\$")
