"""Which memory binds a running training.

Covers: of the pools a job draws on, the one nearest its end. Does not cover: measuring the job (probe).
"""

from __future__ import annotations

from dataclasses import replace

from legroom.model import Box, Job
from legroom.units import format_size
from legroom.words import say

_SHARED = ("shm", "ram")


def bind(box: Box, job: Job) -> Job:
    """The job with its share of each card, and the pool named that it will run out of first."""
    job = replace(job, held={**job.held, **_on_cards(box, job)})
    shares: list[tuple[float, str, str]] = []
    for pool in box.pools:
        ours = pool.name in _SHARED or (pool.name.startswith("gpu") and pool.name in job.held)
        if ours and pool.size and pool.free is not None:
            text = say("{free} of {size} left", free=format_size(pool.free), size=format_size(pool.size))
            shares.append((1 - pool.free / pool.size, pool.name, text))
    for process in job.processes:
        if process.fds is not None and process.fd_limit:
            text = say(
                "pid {pid} holds {fds} of {limit} descriptors",
                pid=process.pid, fds=process.fds, limit=process.fd_limit,
            )  # fmt: skip
            shares.append((process.fds / process.fd_limit, "fds", text))
    if not shares:
        return replace(job, binds=None, binds_why=say("no pool it uses has a known size"))
    share, name, text = max(shares)
    why = say("{name} is {share:.0%} used, {text}", name=name, share=share, text=text)
    return replace(job, binds=name, binds_why=why)


def _on_cards(box: Box, job: Job) -> dict[str, int | None]:
    """What the job's processes hold of each card they are on; None where the driver does not tell."""
    pids = {process.pid for process in job.processes}
    held: dict[str, int | None] = {}
    for card in box.gpus.cards:
        ours = [process.used for process in card.processes or () if process.pid in pids]
        if ours:
            held[f"gpu{card.index}"] = None if None in ours else sum(used or 0 for used in ours)
    return held
