"""The error for workers that do not fit, and how much memory there is for them.

Covers: what is left before somebody is killed, the numbers and the settings that fit. Does not cover: when to look
(arena/door.py, arena/pool.py), the arithmetic (budget.crew).
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.advice.memory_need import Each, fits, least, most_samples, most_workers, spare
from legroom.advice.remedies import raise_ram_limit
from legroom.errors import BudgetTooSmall
from legroom.probe.environment import environment
from legroom.probe.host import Host
from legroom.probe.memory import free_memory
from legroom.units import format_size
from legroom.words import say


@dataclass(frozen=True, slots=True)
class Left:
    """What may still be taken before the kernel kills, and where that was read."""

    free: int
    source: str


def left(host: Host | None = None) -> Left | None:
    """RAM and what the cgroups leave of it, with the swap there is: a machine that swaps is slow, not dead."""
    free, source = free_memory(host, with_swap=True)
    return None if free is None else Left(free, source)


def refused(each: Each, workers: int, free: int, source: str, samples: int | None) -> BudgetTooSmall:
    """Why so many workers are not started: what they need, what there is, what fits.

    ``free`` is what there was before any of them. ``samples`` are those of a batch, where a smaller one can be had.
    """
    need = least(each, workers)
    sizes = {
        "own": format_size(each.own), "making": format_size(each.making), "batch": format_size(each.batch),
        "need": format_size(need), "spare": format_size(spare(need)), "free": format_size(free), "source": source,
    }  # fmt: skip
    if each.batch:
        what = say(
            "the memory that is left does not hold one batch for each of {workers} workers", workers=workers
        )
        why = say(
            "a worker takes {own} for itself, {making} while it makes a batch and {batch} to send it; with the batch "
            "in use that is {need}, and {spare} to spare; {free} are free ({source})",
            **sizes,
        )  # fmt: skip
    elif each.making:
        what = say(
            "the memory that is left does not hold the samples of one batch for each of {workers} workers",
            workers=workers,
        )
        why = say(
            "a worker takes {own} for itself, and had taken {making} for its first samples when it was stopped: with "
            "so much for each that is {need}, and {spare} to spare; {free} are free ({source})",
            **sizes,
        )  # fmt: skip
    else:
        what = say("the memory that is left does not hold {workers} workers", workers=workers)
        if each.own:
            why = say(
                "each takes {own} before it draws a sample: {need}, and {spare} to spare; {free} are free ({source})",
                **sizes,
            )  # fmt: skip
        else:
            why = say("{free} are free ({source}), and {spare} must stay free beside the workers", **sizes)
    return BudgetTooSmall(
        what,
        why=why,
        fix=(*_smaller(each, workers, free, samples), *raise_ram_limit(environment(Host()), None)[:1]),
    )


def _smaller(each: Each, workers: int, free: int, samples: int | None) -> list[str]:
    if not each.batch:  # what they need beside themselves is not known yet
        steps = [say("fewer workers, or a smaller batch")] if each.making else []
        if each.own and (most := most_workers(each, free, workers - 1)):
            steps.append(say("num_workers={most} at the most", most=most))
        return [*steps, say("num_workers=0: batches are made in this process")]
    steps = []
    if fewer := most_workers(each, free, workers - 1):
        steps.append(say("num_workers={fewer} fits", fewer=fewer))
    elif fits(each.making + 2 * each.batch, free):
        steps.append(say("num_workers=0 fits: batches are made in this process"))
    if samples is not None and (less := most_samples(each, free, workers, samples)):
        steps.append(say("batch_size={less} fits with {workers} workers", less=less, workers=workers))
    return steps or [say("no number of workers fits")]
