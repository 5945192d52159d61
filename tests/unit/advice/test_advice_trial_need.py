"""A need that a trial run measured: its terms, what a stopped trial says, growth beyond what was tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
from boxes import GB, MB, healthy, with_pool

from legroom.advice.fit import fit
from legroom.advice.memory_need import calibrated, may_grow, need, overlap, tried_need
from legroom.advice.plan_inputs import Batch, Demand, workload_of
from legroom.records import Trial

BATCH = Batch((8 * MB,), 8, "measured", rows=800)
TRIAL = Trial(ram=300 * MB, shm=40 * MB, fds=20, batches=100, process=150 * MB, whole=True, filled=True)


def test_what_was_measured_counts_with_a_margin_and_once_for_each_rank() -> None:
    one = tried_need(Demand(workers=2), BATCH, TRIAL, healthy())
    assert 300 * MB < one.ram < 310 * MB and one.shm == 40 * MB and one.fds == 20
    both = tried_need(Demand(workers=2, ranks=2), BATCH, TRIAL, healthy())
    assert both.ram == 2 * one.ram and both.shm == 2 * one.shm and both.fds == 20
    assert sum(term.bytes for term in one.terms if term.pool == "ram") == one.ram


def test_what_the_trial_did_not_run_is_added() -> None:
    plain = tried_need(Demand(workers=2), BATCH, TRIAL, healthy())
    more = tried_need(
        Demand(workers=2, params=10_000_000, val_workers=1, process_ram=GB, checkpoint=5),
        BATCH,
        TRIAL,
        healthy(),
    )
    assert more.ram > plain.ram + 40_000_000 + (GB - 150 * MB) and more.shm > plain.shm and more.disk == 5


@pytest.mark.parametrize("pool", ["ram", "shm", "fds"])
def test_a_trial_that_ran_out_is_too_big_by_that_pool(pool: str) -> None:
    box = with_pool(with_pool(healthy(), "ram", 400 * MB, 0, 400 * MB), "shm", 64 * MB, 0, 64 * MB)
    found = fit(tried_need(Demand(workers=2), BATCH, TRIAL.short_of(pool, ""), box), box)
    assert found.verdict == "too-big" and [problem.pool for problem in found.problems] == [pool]
    assert fit(tried_need(Demand(workers=2), BATCH, TRIAL, box), box).verdict == "fits"


def test_other_settings_are_predicted_from_what_was_measured() -> None:
    demand = Demand(workers=2, worker_ram=10 * MB, process_ram=150 * MB, process_ram_source="measured")
    taken = tried_need(demand, BATCH, replace(TRIAL, ram=900 * MB), healthy())
    corrected = calibrated(demand, BATCH, taken)
    predicted = need(workload_of(demand, corrected, 1)).ram
    assert abs(predicted - taken.ram) <= 2 * demand.workers
    assert (
        calibrated(demand, BATCH, replace(taken, ram=0)).making == 8 * MB
    )  # never below the samples themselves


def test_growth_goes_on_until_the_epoch_ends_or_all_is_copied() -> None:
    part = replace(TRIAL, whole=False, batches=20, growth=10 * MB, growth_batches=10)
    demand = Demand(workers=2)
    assert may_grow(demand, BATCH, TRIAL, forked=True) == 0
    assert may_grow(demand, BATCH, part, forked=False) == 8 * 10 * MB  # 80 batches are left
    endless = replace(BATCH, rows=None)
    assert may_grow(demand, endless, part, forked=False) is None
    assert may_grow(demand, endless, part, forked=True) == 2 * 150 * MB  # two copies of the process


def test_queues_that_were_seen_full_are_not_filled_up_by_arithmetic() -> None:
    """One batch is drawn to measure it; the others of a dataset of unlike samples may be smaller."""
    small = replace(TRIAL, shm=3 * MB, filled=True)
    assert tried_need(Demand(workers=2), BATCH, small, healthy()).shm == 3 * MB
    waiting = tried_need(Demand(workers=2), BATCH, replace(small, filled=False), healthy())
    assert waiting.shm > 5 * 8 * MB and waiting.ram > 300 * MB + 37 * MB


def test_a_stream_that_was_run_whole_has_no_more_batches_than_it_gave() -> None:
    endless = replace(BATCH, rows=None)
    short = replace(TRIAL, shm=2 * 8 * MB, batches=2, filled=False)
    found = tried_need(Demand(workers=4, prefetch=8), endless, short, healthy())
    assert found.shm <= 2 * (8 * MB + 4096)
    cut = tried_need(Demand(workers=4, prefetch=8), endless, replace(short, whole=False), healthy())
    assert cut.shm >= 33 * 8 * MB


def test_a_trial_in_a_fork_counts_the_process_once() -> None:
    demand = Demand(process_ram=GB)  # given by the user: 150 MB of it are there already
    found = tried_need(demand, BATCH, replace(TRIAL, forked=True), healthy())
    assert 300 * MB + GB - 150 * MB < found.ram < 310 * MB + GB - 150 * MB
    assert "adds to this process" in found.terms[0].what


def test_semaphores_of_two_epochs_overlap_by_chance() -> None:
    """3 workers: 17 semaphores of a page each; how many of the epoch before are left is not counted as needed."""
    page, demand = 4096, Demand(workers=3)
    for pages, most in ((17, 4), (19, 4), (26, 9)):
        seen = replace(TRIAL, shm=pages * page)
        assert tried_need(demand, BATCH, seen, healthy()).shm == 17 * page
        assert overlap(demand, seen) == ((pages - 17) * page, most * page)
    batches = replace(TRIAL, shm=200 * page)  # they hide it
    assert overlap(demand, batches) == (0, 0) == overlap(replace(demand, persistent=True), seen)
    assert overlap(demand, replace(TRIAL, shm=24 * page, overlap=True))[1] == 8 * page
