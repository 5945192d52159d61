"""A need that a trial run measured: its terms, what a stopped trial says, growth beyond what was tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
from boxes import GB, MB, healthy, with_pool

from legroom.budget.demand import Batch, Demand, workload_of
from legroom.budget.fit import fit
from legroom.budget.predict import need
from legroom.budget.tried import calibrated, may_grow, tried_need
from legroom.model import Trial

BATCH = Batch((8 * MB,), 8, "measured", rows=800)
TRIAL = Trial(ram=300 * MB, shm=40 * MB, fds=20, batches=100, process=150 * MB, whole=True)


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
