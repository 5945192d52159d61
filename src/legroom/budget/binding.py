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
    """The job with the pool named that it will run out of first, by the share of it in use."""
    shares: list[tuple[float, str, str]] = []
    for pool in box.pools:
        if pool.name == "fds" or (pool.name.startswith("gpu") and not job.held.get("gpu")):
            continue
        if pool.name not in _SHARED and not pool.name.startswith("gpu"):
            continue
        if pool.size and pool.free is not None:
            share = 1 - pool.free / pool.size
            text = say("{free} of {size} left", free=format_size(pool.free), size=format_size(pool.size))
            shares.append((share, pool.name, text))
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
    return replace(
        job,
        binds=name,
        binds_why=say("{name} is {share:.0%} used, {text}", name=name, share=share, text=text),
    )
