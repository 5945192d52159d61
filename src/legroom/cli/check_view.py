"""How a check looks: as text and as JSON. Covers: rendering of `legroom check`. Does not cover: checking."""

from __future__ import annotations

from typing import Any

from legroom.cli.layout import labelled, steps
from legroom.cli.needs import note_lines, plan_object, pool_lines, settings_line, term_lines, verdict_lines
from legroom.columns import cells
from legroom.model import Plan
from legroom.words import say


def as_object(plan: Plan) -> dict[str, Any]:
    """The verdict as other programs read it."""
    return {"schema": "legroom.check/1", **plan_object(plan), "largest_batch": plan.largest_batch}


def as_text(plan: Plan) -> str:
    """The verdict as people read it."""
    lines = [
        *verdict_lines(plan),
        *_settings_lines(plan),
        *steps(plan.fix),
        "",
        say("Need"),
        *term_lines(plan.need),
        *note_lines(plan),
        "",
        say("Here now"),
        *pool_lines(plan),
    ]
    return "\n".join(lines)


def _settings_lines(plan: Plan) -> list[str]:
    lines = []
    if plan.settings is None:
        lines.append(say("  no loader setting makes it fit"))
    elif plan.verdict == "too-big":
        label = say("  fits: ")
        lines.append(labelled(label, settings_line(plan.settings)))
        lines += [labelled(" " * cells(label), why) for why in plan.settings.why.values()]
    if plan.largest_batch:
        lines.append(say("  largest batch at these workers: {samples}", samples=plan.largest_batch))
    elif plan.largest_batch == 0:
        lines.append(say("  not even a batch of one fits at these workers"))
    return lines
