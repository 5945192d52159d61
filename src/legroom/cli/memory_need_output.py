"""The output that plan and check share: terms of a need, verdict, notes and settings, as text and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from legroom.cli.options import note_in_options
from legroom.cli.text_layout import elide, labelled, paint, paragraph, pool_line
from legroom.messages import phrase, say
from legroom.records.finding_and_alarm import Severity
from legroom.records.settings_and_overrides import Settings
from legroom.records.workload import Need, Plan, Term
from legroom.units import format_size

_POOLS = ("shm", "ram", "gpu", "pinned", "fds", "disk")
_WORDS = {"fits": phrase("fits"), "too-big": phrase("too big"), "unknown": phrase("unknown")}
_SETTINGS = (
    "batch_size", "accumulation", "ranks", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory",
    "loader_kind",
)  # fmt: skip


def need_object(need: Need) -> dict[str, Any]:
    """Bytes by pool."""
    return {name: getattr(need, name) for name in _POOLS}


def plan_object(plan: Plan) -> dict[str, Any]:
    """The fields that both commands print as JSON."""
    return {
        "need": need_object(plan.need),
        "terms": [dataclasses.asdict(term) for term in plan.need.terms],
        "verdict": plan.verdict,
        "problems": [{**dataclasses.asdict(one), "missing": one.missing} for one in plan.problems],
        "unknown": dict(plan.unknown),
        "codes": dict(plan.codes),
        "settings": settings_object(plan.settings),
        "notes": list(map(note_in_options, plan.notes)),
    }


def settings_object(settings: Settings | None) -> dict[str, Any]:
    """The settings for JSON; empty if none fit."""
    if settings is None:
        return {}
    return {**{name: getattr(settings, name) for name in _SETTINGS}, "why": dict(settings.why)}


def pool_lines(plan: Plan) -> list[str]:
    """The pools of the need, as they are now."""
    if plan.machine is None:
        return []
    wanted = {name for name in _POOLS if getattr(plan.need, name)} | {"shm", "ram"}
    return [
        pool_line(pool, plain=False)
        for pool in plan.machine.pools
        if pool.name in wanted - {"pinned"} or (plan.need.gpu and pool.name.startswith("gpu"))
    ]


def term_lines(need: Need) -> list[str]:
    """The need, term by term, each pool with its sum."""
    lines = []
    for name in _POOLS:
        terms = [term for term in need.terms if term.pool == name]
        total = getattr(need, name) or 0
        if len(terms) == 1:
            lines.append(_term(f"  {name:<7}{_amount(name, total):>8}  ", terms[0]))
        elif terms:
            lines.append(f"  {name:<7}{_amount(name, total):>8}  =")
            lines += [_term(f"{'+ ' + _amount(name, term.bytes):>17}  ", term) for term in terms]
    return lines or [say("  nothing")]


def _term(start: str, term: Term) -> str:
    return paragraph(say("{what}; {source}", what=term.what, source=elide(term.source)), start, " " * 19)


def _amount(name: str, amount: int) -> str:
    return str(amount) if name == "fds" else format_size(amount)


def verdict_lines(plan: Plan) -> list[str]:
    """The verdict, every pool that is too small, and what is unknown."""
    severity: Severity | None = "critical" if plan.verdict == "too-big" else None
    lines = [paint(say("Verdict: {word}", word=say(_WORDS[plan.verdict])), severity, bold=True)]
    lines += [paragraph(problem.message, "  ", "    ") for problem in plan.problems]
    lines += [
        paragraph(say("{pool}: unknown, {why}", pool=pool, why=elide(why)), "  ", "    ")
        for pool, why in plan.unknown.items()
    ]
    return lines


def note_lines(plan: Plan) -> list[str]:
    """What the figures do not include."""
    return [labelled(say("  note: "), elide(note_in_options(note))) for note in plan.notes]


def arguments(settings: Mapping[str, Any]) -> str:
    """Settings of a DataLoader as its arguments; names of functions and samplers as they are."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def settings_line(settings: Settings) -> str:
    """The settings on one line, as DataLoader arguments."""
    parts = [f"batch_size={settings.batch_size}", f"num_workers={settings.num_workers}"]
    if settings.prefetch_factor is not None:
        parts.append(f"prefetch_factor={settings.prefetch_factor}")
    if settings.pin_memory:
        parts.append("pin_memory=True")
    if settings.accumulation > 1:
        parts.append(say("accumulation {times}", times=settings.accumulation))
    return ", ".join(parts)
