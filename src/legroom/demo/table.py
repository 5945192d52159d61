"""The table at the end.

Covers: which figures stand against which, and their ratio. Does not cover: measuring, columns (cli).
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.demo.result import Result, Trial
from legroom.units import format_duration, format_size
from legroom.words import say

_NONE = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    what: str
    without: str
    with_us: str
    note: str


def rows(result: Result) -> list[Row]:
    """All comparisons; what was not measured says why."""
    return [_memory(result), _at_once(result), _later(result), *_loaders(result), _kills(result)]


def times(ratio: float) -> str:
    """A ratio as people say it."""
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _memory(result: Result) -> Row:
    held = result.memory
    what = say("memory of {count} trainings", count=len(result.trainings))
    if held.separate is None or held.shared is None:
        return Row(
            what, _size(held.separate), _size(held.shared), say("not everybody could be weighed at once")
        )
    note = say("{times} times less (PSS)", times=times(held.separate / held.shared))
    return Row(what, format_size(held.separate), format_size(held.shared), note)


def _at_once(result: Result) -> Row:
    """All start together: each reads for itself, or one loads for all."""
    opening = result.opening
    what = say("until {count} at once have data", count=len(result.trainings))
    note = say("one of them loads, the others wait for it")
    return Row(what, format_duration(opening.plain_at_once), format_duration(opening.at_once), note)


def _later(result: Result) -> Row:
    """One that comes later, against h5py with nobody else at work."""
    opening = result.opening
    what = say("until a later one has data")
    if opening.later is None or opening.later_ready is None:
        return Row(what, format_duration(opening.plain), _NONE, say("nobody came later"))
    note = say("{ready} with every page mapped", ready=format_duration(opening.later_ready))
    return Row(what, format_duration(opening.plain), format_duration(opening.later), note)


def _loaders(result: Result) -> list[Row]:
    found = result.loaders
    if result.shm_size is None:
        deaths = say("deaths of loaders")
    else:
        deaths = say("deaths in {size} of /dev/shm", size=format_size(result.shm_size))
    speed = say("batches a second, 2 workers")
    none = say("batches a second, no workers")
    why = found.why or ""
    table = []
    if found.rates is None:
        table.append(Row(speed, _NONE, _NONE, why))
    else:
        theirs, ours, batches = (found.rates[name] for name in ("torch", "legroom", "batches"))
        table.append(Row(speed, f"{theirs:.0f}", f"{ours:.0f}", _faster(ours / theirs)))
        table.append(Row(none, _NONE, f"{batches:.0f}", _faster(batches / theirs)))
    if not found.trials:
        return [*table, Row(deaths, _NONE, _NONE, why)]
    theirs_, ours_ = found.trials
    return [*table, Row(deaths, _deaths(theirs_), _deaths(ours_), _how(theirs_))]


def _faster(ratio: float) -> str:
    return say("{times} times torch's", times=times(ratio))


def _deaths(trial: Trial) -> str:
    return say("{count} of 1", count=int(trial.died))


def _how(trial: Trial) -> str:
    if not trial.died:
        return say("torch's loader lived here too")
    how = say("stood still") if trial.stood_still else trial.verdict or say("unknown")
    return say("torch's: {how} after {count} of {all} batches", how=how, count=trial.delivered, all=trial.of)


def _kills(result: Result) -> Row:
    rescue = result.rescue
    note = say("{verdict}, not memory; went on from step {step} of {steps}",
               verdict=rescue.verdict, step=rescue.resumed_from, steps=result.trainings[0].steps)  # fmt: skip
    back = (
        _NONE if rescue.back_after is None else say("back in {time}", time=format_duration(rescue.back_after))
    )
    return Row(say("killed on purpose (kill -9)"), _NONE, back, note)


def _size(count: int | None) -> str:
    return say("unknown") if count is None else format_size(count)
