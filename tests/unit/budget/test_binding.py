"""Of what a job draws on, the pool nearest its end binds."""

from __future__ import annotations

from boxes import GB, healthy, with_pool

from legroom.budget.binding import bind
from legroom.model import Job, Process

JOB = Job(
    1, "python train.py", (Process(1, 0, "python train.py", 0, fds=100, fd_limit=1024),), held={"gpu": None}
)


def test_ram_binds_when_it_is_fullest() -> None:
    box = with_pool(healthy(), "ram", 32 * GB, 30 * GB, 2 * GB)
    bound = bind(box, JOB)
    assert bound.binds == "ram" and "94% used, 2 GB of 32 GB left" in bound.binds_why


def test_a_card_counts_only_when_the_job_is_on_it() -> None:
    box = with_pool(healthy(), "gpu0", 20 * GB, 19 * GB, GB)
    assert bind(box, JOB).binds != "gpu0"
    on_card = Job(1, "x", (), held={"gpu": 19 * GB})
    assert bind(box, on_card).binds == "gpu0"


def test_descriptors_of_one_process_can_bind() -> None:
    job = Job(1, "x", (Process(7, 1, "x", 0, fds=1000, fd_limit=1024),))
    bound = bind(healthy(), job)
    assert bound.binds == "fds" and "pid 7 holds 1000 of 1024" in bound.binds_why


def test_nothing_known_binds_nothing() -> None:
    from dataclasses import replace

    bound = bind(replace(healthy(), pools=()), Job(1, "x", ()))
    assert bound.binds is None and "known size" in bound.binds_why
