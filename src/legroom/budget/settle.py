"""Settings from a choice: everything that is known about it in one record.

Covers: putting choice, reasons and levers together; obeying what a person set by hand; what changed between two
settings. Does not cover: measuring and remembering (loader).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from legroom.budget.around import around
from legroom.budget.choose import Ask, Choice, Rung, choose, plan_of
from legroom.budget.climbing import Climbed
from legroom.budget.levers import levers
from legroom.budget.reasons import reasons
from legroom.model import Box, Measured, Settings
from legroom.words import say


def settle(
    measured: Measured,
    box: Box,
    ask: Ask,
    by_hand: Mapping[str, Any] | None = None,
    climbed: Climbed | None = None,
) -> Settings:
    """The settings for this dataset on this box; ``by_hand`` overrides, setting by setting."""
    choice = choose(measured, box, ask)
    if climbed is not None:
        choice = _at(climbed.rung, measured, box, ask, choice)
    settings = _settings(measured, box, ask, choice)
    if climbed is not None:
        settings = replace(settings, why={**settings.why, "num_workers": climbed.why})
    if not by_hand:
        return settings
    overridden = settings.override(**by_hand)
    wanted = {name: getattr(overridden, name) for name in overridden.before}
    # What goes with settings set by hand is chosen for those, not for the ones they replace.
    around_them = _settings(
        measured, box, ask, _at(_by_hand(choice.rung, wanted), measured, box, ask, choice)
    )
    return replace(
        around_them,
        **wanted,
        why={**around_them.why, **{name: overridden.why[name] for name in wanted}},
        before=overridden.before,
    )


def _at(rung: Rung, measured: Measured, box: Box, ask: Ask, choice: Choice) -> Choice:
    return replace(choice, rung=rung, ideal=rung, refused=None, plan=plan_of(measured, box, ask, rung))


def _settings(measured: Measured, box: Box, ask: Ask, choice: Choice) -> Settings:
    rest = around(measured, box, ask, choice)
    return Settings(
        batch_size=choice.rung.batch,
        accumulation=choice.together // choice.rung.batch,
        ranks=ask.ranks,
        num_workers=choice.rung.workers,
        prefetch_factor=choice.rung.prefetch if choice.rung.workers else None,
        persistent_workers=rest.persistent_workers,
        pin_memory=choice.rung.pin,
        low_memory=rest.low_memory,
        threads=rest.threads,
        allocator=rest.allocator,
        loader_kind=ask.loader_kind,
        why={**reasons(measured, box, ask, choice), **rest.why},
        levers=levers(measured, ask, choice),
        measured=measured,
        plan=choice.plan,
    )


def _by_hand(rung: Rung, wanted: Mapping[str, Any]) -> Rung:
    return Rung(
        batch=wanted.get("batch_size", rung.batch),
        workers=wanted.get("num_workers", rung.workers),
        prefetch=wanted.get("prefetch_factor", rung.prefetch),
        pin=wanted.get("pin_memory", rung.pin),
    )


def changes(before: Settings, after: Settings) -> dict[str, str]:
    """Setting by setting, what is no longer as it was, with the new reason."""
    old, new = before.values(), after.values()
    return {
        name: say(
            "{name} {old} → {new} ({why})",
            name=name,
            old=old[name],
            new=new[name],
            why=after.why.get(name, ""),
        )
        for name in new
        if old[name] != new[name]
    }
