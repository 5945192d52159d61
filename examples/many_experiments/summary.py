"""How the plan and the outcome of many experiments read.

Covers: text. Does not cover: planning, running or measuring (run_experiments.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.model import Plan
from legroom.units import format_duration, format_size


@dataclass(frozen=True)
class Row:
    """One experiment."""

    number: int
    card: int
    rate: float
    seed: int
    opened: float  # seconds until it had the data
    held: int  # bytes of RAM by PSS: what several processes share is divided among them
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """All of them, measured at one moment."""

    rows: list[Row]
    data_bytes: int
    backing: str  # shm, disk, or memory: each process has a copy of its own

    @property
    def held(self) -> int:
        return sum(row.held for row in self.rows)


def plan_text(plan: Plan, jobs: int) -> str:
    """What the plan says, and what is done about it."""
    asked = plan.jobs_per_gpu
    advice = [*(problem.message for problem in plan.problems), *plan.fix] if plan.problems else []
    size = plan.sizes.recommended
    enough = f"{format_size(size)} recommended" if size >= plan.need.shm else "more than memory allows"
    lines = [
        f"plan: {plan.gpus} GPUs x {asked} jobs, from one experiment that runs",
        f"  /dev/shm  {format_size(plan.need.shm)} needed, {enough}",
        f"  RAM       {format_size(plan.need.ram)} needed, all of that included",
        *(f"  {sentence}" for sentence in advice),
    ]
    fit = "as many as are asked for" if plan.fits_now is None else f"{plan.fits_now} jobs a GPU"
    verb = "run" if jobs == asked else "are all that run"
    return "\n".join([*lines, f"  here fit {fit}: {plan.gpus} x {jobs} {verb}"])


def outcome_text(outcome: Outcome) -> str:
    """A line for each experiment, then all of them together."""
    lines = ["", "  #  GPU      lr  seed   has data after  RAM (PSS)  accuracy"]
    for row in outcome.rows:
        lines.append(
            f"{row.number:>3}  {row.card:>3}  {row.rate:>6g}  {row.seed:>4}  {format_duration(row.opened):>15}  "
            f"{format_size(row.held):>9}  {row.accuracy:>7.0%}"
        )
    count, data = len(outcome.rows), format_size(outcome.data_bytes)
    where = {
        "shm": f"one copy of {data} of data in /dev/shm",
        "disk": f"one copy of {data} of data on disk, in the page cache",
        "memory": f"{count} copies of {data} of data",
    }
    lines += ["", f"together {format_size(outcome.held)} of RAM, with {where[outcome.backing]}"]
    if outcome.backing != "memory":
        apart = format_size(outcome.held + (count - 1) * outcome.data_bytes)
        lines.append(f"with a copy each it would be {count - 1} x {data} more: {apart}")
    return "\n".join(lines)
