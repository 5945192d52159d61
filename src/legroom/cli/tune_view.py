"""Settings as text and as JSON. Covers: `legroom tune`'s output. Does not cover: the settings."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from legroom.cli.layout import paint, paragraph, steps
from legroom.columns import right
from legroom.model import Measured, Settings
from legroom.units import format_size
from legroom.words import say

# Which of them matters: what fits with ours may be a bus error with torch's.
_LOADERS = {"legroom": "legroom.DataLoader", "torch": "torch.utils.data.DataLoader"}


def as_json(settings: Settings) -> str:
    """One object, as other programs read it."""
    plan, measured = settings.plan, settings.measured
    report: dict[str, Any] = {
        "schema": "legroom.tune/1",
        "verdict": plan.verdict if plan else "unknown",
        "settings": settings.values(),
        "effective_batch": settings.effective_batch,
        "why": dict(settings.why),
        "loader": settings.loader(),
        "training_arguments": settings.training_arguments(),
        "lightning": settings.lightning(),
        "environment": settings.environment(),
        "levers": [asdict(lever) for lever in settings.levers],
        "need": {name: getattr(plan.need, name) for name in ("shm", "ram", "pinned", "fds")}
        if plan
        else None,
        "problems": [asdict(problem) for problem in plan.problems] if plan else [],
        "measured": asdict(measured) if measured else None,
        "before": dict(settings.before),
    }
    return json.dumps(report, ensure_ascii=False)


def as_text(settings: Settings) -> str:
    """The settings as people read them, a reason a line."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.loader().items())
    lines = [
        *_measured_lines(settings.measured),
        paragraph(f"{_LOADERS[settings.loader_kind]}(dataset, {arguments})", "", "  "),
        say("gradient accumulation {steps}", steps=settings.accumulation),
        *(f"{name}={value}" for name, value in settings.environment().items()),
        "",
        say("Why"),
        *(paragraph(line, "  ", "    ") for line in settings.why.values()),
        "",
        *_need_lines(settings),
    ]
    if settings.levers:
        lines += ["", say("What is left to you, and what it saves")]
    for lever in settings.levers:
        saves = say("unknown") if lever.saves is None else format_size(lever.saves)
        lines.append(paragraph(lever.what, f"  {lever.name:<25}{lever.pool:<5}{right(saves, 8)}  ", " " * 42))
    return "\n".join(lines).rstrip()


def _measured_lines(measured: Measured | None) -> list[str]:
    if measured is None:
        return []
    waiting = measured.wait_seconds / measured.sample_seconds if measured.sample_seconds else 0.0
    text = say(
        "{batch} a batch of {count}, {each} and {seconds:.2f} ms a sample ({waiting:.0%} of it waiting); {source}",
        batch=format_size(measured.batch_bytes), count=measured.batch_size, source=measured.source,
        each=format_size(measured.sample_bytes), seconds=measured.sample_seconds * 1000, waiting=waiting,
    )  # fmt: skip
    return [paragraph(text, "", "  "), ""]


def _need_lines(settings: Settings) -> list[str]:
    plan = settings.plan
    if plan is None:
        return []
    lines = [
        say(
            "Takes {ram} of RAM, {shm} of it in /dev/shm",
            ram=format_size(plan.need.ram),
            shm=format_size(plan.need.shm),
        )
    ]
    for problem in plan.problems:
        lines.append(paragraph(problem.message, paint(say("  too big: "), "critical", bold=True), "    "))
        lines += steps(problem.fix)
    lines += [
        paragraph(say("{name}: {why}", name=pool, why=why), say("  unknown: "), "    ")
        for pool, why in plan.unknown.items()
    ]
    return lines
