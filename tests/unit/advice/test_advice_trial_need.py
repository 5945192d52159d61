"""A need that a trial run measured: its terms, what a stopped trial says, growth beyond what was tried."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from machines import GB, MB, healthy, with_pool

from legroom.advice.fit_on_machine import fit, judged
from legroom.advice.job_settings_to_workload import Batch, Demand, batch_of, workload_of
from legroom.advice.memory_need import (
    calibrated,
    collected,
    may_grow,
    need,
    overlap,
    tried_need,
    with_overlap,
    without_overlap,
)
from legroom.records.machine import Machine
from legroom.records.workload import LoaderTrial
from legroom.units import parse_size

BATCH = Batch((8 * MB,), 8, "measured", rows=800)
TRIAL = LoaderTrial(ram=300 * MB, shm=40 * MB, fds=20, batches=100, process=150 * MB, whole=True, filled=True)


def test_what_was_measured_counts_with_a_margin_and_once_for_each_rank() -> None:
    one = tried_need(Demand(num_workers=2), BATCH, TRIAL, healthy())
    assert 300 * MB < one.ram < 310 * MB and one.shm == 40 * MB and one.fds == 20
    both = tried_need(Demand(num_workers=2, ranks=2), BATCH, TRIAL, healthy())
    assert both.ram == 2 * one.ram and both.shm == 2 * one.shm and both.fds == 20
    assert sum(term.bytes for term in one.terms if term.pool == "ram") == one.ram


def test_a_pickled_batch_on_its_way_is_added_where_there_are_workers() -> None:
    plain = {workers: tried_need(Demand(num_workers=workers), BATCH, TRIAL, healthy()).ram for workers in (0, 2)}
    objects = replace(BATCH, pickled=2 * MB).of(16)
    assert objects.pickled == 4 * MB
    more = {workers: tried_need(Demand(num_workers=workers), objects, TRIAL, healthy()).ram for workers in (0, 2)}
    assert more[0] == plain[0] and more[2] == plain[2] + 4 * MB
    large = tried_need(Demand(num_workers=2), replace(BATCH, pickled=GB), TRIAL, healthy()).ram
    assert large == plain[2] + 300 * MB // 16


def test_what_the_trial_did_not_run_is_added() -> None:
    plain = tried_need(Demand(num_workers=2), BATCH, TRIAL, healthy())
    more = tried_need(
        Demand(num_workers=2, params=10_000_000, val_workers=1, process_ram=GB, checkpoint=5), BATCH, TRIAL, healthy()
    )
    assert more.ram > plain.ram + 40_000_000 + (GB - 150 * MB) and more.shm > plain.shm and more.disk == 5
    pinned = tried_need(Demand(num_workers=2, pin_memory=True), BATCH, TRIAL, healthy())
    assert pinned.pinned >= 2 * 8 * MB and pinned.ram == plain.ram + pinned.pinned


@pytest.mark.parametrize("batch", [BATCH, replace(BATCH, tensors=())], ids=["tensors", "objects"])
@pytest.mark.parametrize("pool", ["ram", "shm", "fds"])
def test_a_trial_that_ran_out_is_too_big_by_that_pool(pool: str, batch: Batch) -> None:
    machine = with_pool(with_pool(healthy(), "ram", 400 * MB, 0, 400 * MB), "shm", 64 * MB, 0, 64 * MB)
    found = fit(tried_need(Demand(num_workers=2), batch, TRIAL.short_of(pool, ""), machine), machine)
    assert found.verdict == "too-big" and [problem.pool for problem in found.problems] == [pool]
    assert fit(tried_need(Demand(num_workers=2), BATCH, TRIAL, machine), machine).verdict == "fits"


def test_other_settings_are_predicted_from_what_was_measured() -> None:
    demand = Demand(num_workers=2, worker_ram=10 * MB, process_ram=150 * MB, process_ram_source="measured")
    taken = tried_need(demand, BATCH, replace(TRIAL, ram=900 * MB), healthy())
    corrected = calibrated(demand, BATCH, taken)
    predicted = need(workload_of(demand, corrected, 1)).ram
    assert abs(predicted - taken.ram) <= 2 * demand.num_workers
    assert calibrated(demand, BATCH, replace(taken, ram=0)).making == 8 * MB  # never below the samples themselves


def test_growth_continues_until_the_epoch_ends_or_all_is_copied() -> None:
    part = replace(TRIAL, whole=False, batches=20, growth=10 * MB, growth_batches=10)
    demand = Demand(num_workers=2)
    assert may_grow(demand, BATCH, TRIAL, forked=True) == 0
    assert may_grow(demand, BATCH, part, forked=False) == 8 * 10 * MB  # 80 batches are left
    endless = replace(BATCH, rows=None)
    assert may_grow(demand, endless, part, forked=False) is None
    assert may_grow(demand, endless, part, forked=True) == 2 * 150 * MB  # two copies of the process


def test_queues_that_were_seen_full_are_not_filled_up_by_arithmetic() -> None:
    """One batch is drawn to measure it; the others of a dataset of unlike samples may be smaller."""
    small = replace(TRIAL, shm=3 * MB, filled=True)
    assert tried_need(Demand(num_workers=2), BATCH, small, healthy()).shm == 3 * MB
    waiting = tried_need(Demand(num_workers=2), BATCH, replace(small, filled=False), healthy())
    assert waiting.shm > 5 * 8 * MB and waiting.ram > 300 * MB + 37 * MB


def test_a_stream_that_was_run_whole_has_no_more_batches_than_it_gave() -> None:
    endless = replace(BATCH, rows=None)
    short = replace(TRIAL, shm=2 * 8 * MB, batches=2, filled=False)
    found = tried_need(Demand(num_workers=4, prefetch_factor=8), endless, short, healthy())
    assert found.shm <= 2 * (8 * MB + 4096)
    cut = tried_need(Demand(num_workers=4, prefetch_factor=8), endless, replace(short, whole=False), healthy())
    assert cut.shm >= 33 * 8 * MB


def test_a_trial_in_a_fork_counts_the_process_once() -> None:
    demand = Demand(process_ram=GB)  # given by the user: 150 MB of it are there already
    found = tried_need(demand, BATCH, replace(TRIAL, forked=True), healthy())
    assert 300 * MB + GB - 150 * MB < found.ram < 310 * MB + GB - 150 * MB
    assert "adds to this process" in found.terms[0].what


def test_semaphores_of_two_epochs_overlap_by_chance() -> None:
    """3 workers: 17 semaphores of a page each; how many of the epoch before are left is not counted as needed."""
    page, demand = 4096, Demand(num_workers=3)
    for pages, most in ((17, 4), (19, 4), (26, 9)):
        seen = replace(TRIAL, shm=pages * page)
        assert tried_need(demand, BATCH, seen, healthy()).shm == 17 * page
        assert overlap(demand, seen) == ((pages - 17) * page, most * page)
    batches = replace(TRIAL, shm=200 * page)  # they hide it
    assert overlap(demand, batches) == (0, 0) == overlap(replace(demand, persistent_workers=True), seen)
    assert overlap(demand, replace(TRIAL, shm=24 * page, overlap=True))[1] == 8 * page


def test_a_batch_that_was_there_by_chance_is_not_in_the_least_need_and_is_in_the_most() -> None:
    """Queues of 32 MB; the ninth batch was seen once, before the loop had dropped the one before."""
    demand = Demand(num_workers=2)
    for peak in (32, 33, 40):
        seen = replace(TRIAL, shm=peak * MB, waiting_shm=32 * MB)
        assert without_overlap(demand, BATCH, seen).shm == 32 * MB
        assert 40 * MB <= with_overlap(demand, BATCH, seen, 0.001, 0.001).shm <= 40 * MB + 4096
    seen = replace(TRIAL, shm=33 * MB, waiting_shm=32 * MB)
    assert with_overlap(demand, BATCH, seen, 1.0, 0.0).shm == 33 * MB  # it is not made in so short a time
    assert 35 * MB < with_overlap(demand, BATCH, seen, 0.0, 0.2).shm < 37 * MB  # half of it is
    assert without_overlap(demand, BATCH, replace(TRIAL, shm=60 * MB, waiting_shm=32 * MB)).shm > 51 * MB


def test_full_queues_that_were_not_seen_are_counted_and_so_is_the_batch_by_chance() -> None:
    """Two workers, prefetch 2: four batches ahead, one in use, one more by chance."""
    demand, seen = Demand(num_workers=2), replace(TRIAL, shm=33 * MB, filled=False)
    assert without_overlap(demand, BATCH, seen) is seen
    assert 48 * MB <= with_overlap(demand, BATCH, seen, 0.0, 0.0).shm <= 48 * MB + 8 * 4096


@pytest.mark.parametrize(
    ("demand", "trial"),
    [
        (Demand(num_workers=2), replace(TRIAL, waiting_shm=32 * MB, batches=4)),  # all are requested at the start
        (Demand(num_workers=2, loader_kind="legroom"), replace(TRIAL, waiting_shm=32 * MB)),
        (Demand(num_workers=2), replace(TRIAL, waiting_shm=32 * MB).short_of("shm", "")),
        (Demand(), replace(TRIAL, waiting_shm=32 * MB)),
    ],
)
def test_what_was_measured_stays_where_no_batch_can_be_there_by_chance(demand: Demand, trial: LoaderTrial) -> None:
    assert with_overlap(demand, BATCH, trial, 0.001, 0.001) is trial


def test_full_garbage_collections_never_lower_the_need() -> None:
    assert collected(TRIAL).ram == 300 * MB and collected(replace(TRIAL, collected=1)).ram == 300 * MB
    assert collected(replace(TRIAL, collected=400 * MB)).ram == 400 * MB


def test_a_stopped_trial_of_a_stream_is_not_filled_up() -> None:
    """How long the stream is is not known: the queues may never be full."""
    stream = replace(BATCH, rows=None)
    stopped = replace(TRIAL, shm=8 * MB, filled=False, whole=False).short_of("ram", "")
    machine = with_pool(healthy(), "ram", 310 * MB, 0, 310 * MB)
    found = tried_need(Demand(num_workers=4, prefetch_factor=8), stream, stopped, machine)
    assert found.shm == 8 * MB and found.ram < 320 * MB and "ram" in found.at_least
    assert "ram: at least 312 MB needed" in fit(found, machine).problems[0].message


STOPPED = LoaderTrial(ram=200 * MB, shm=0, fds=0, batches=0, process=150 * MB, whole=False).short_of("shm", "")


@pytest.mark.parametrize("free", [1, 64, 512])
@pytest.mark.parametrize("rows", [None, 64_000])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_what_a_trial_got_before_it_ran_out_is_not_the_need_and_the_advised_size_fits(
    free: int, rows: int | None, workers: int
) -> None:
    """Batches of 96 MB, as plan counts them: the trial was refused the first one, or one of the next."""
    demand, batch = Demand(num_workers=workers), replace(batch_of(3 * MB // 2, 64), rows=rows)
    machine = _with_shm(free * MB)
    found = fit(tried_need(demand, batch, replace(STOPPED, shm=free * MB // 2), machine), machine)
    predicted = need(workload_of(demand, batch, 1))
    plain = free * MB < predicted.shm
    assert found.need.shm >= predicted.shm and ("at least" not in found.problems[0].message) == plain
    assert sum(term.bytes for term in found.need.terms if term.pool == "shm") == found.need.shm
    assert found.need.ram >= 200 * MB - free * MB // 2 + found.need.shm  # /dev/shm is RAM too
    larger = _with_shm(_advised(found.fix))
    assert judged(demand, batch, larger).verdict == "fits"
    assert fit(found.need, larger).verdict == "fits"


def test_more_than_predicted_is_a_lower_bound() -> None:
    """Of samples that differ in size, small ones were drawn: the trial had more in /dev/shm than 7 such batches."""
    machine = _with_shm(64 * MB)
    found = fit(tried_need(Demand(num_workers=2), replace(BATCH, tensors=(MB,)), STOPPED, machine), machine)
    assert found.need.at_least and found.problems[0].message.startswith("shm: at least 64 MB needed")
    known = fit(tried_need(Demand(num_workers=2), replace(BATCH, tensors=(99 * MB,)), STOPPED, machine), machine)
    assert found.need.shm == 64 * MB + 4096 and known.problems[0].message.startswith("shm: 693 MB needed")
    unmeasured = tried_need(Demand(num_workers=99), replace(BATCH, tensors=(0,)), STOPPED, _with_shm(MB))
    assert "shm" in unmeasured.at_least  # only its semaphores are known


def test_the_memory_of_validation_and_pinning_is_added_to_what_is_predicted() -> None:
    machine, batch = _with_shm(64 * MB), batch_of(MB, 64)
    plain = tried_need(Demand(num_workers=2), batch, STOPPED, machine)
    more = tried_need(Demand(num_workers=2, val_workers=1, pin_memory=True, ranks=2), batch, STOPPED, machine)
    whole = need(workload_of(Demand(num_workers=2, val_workers=1, pin_memory=True, ranks=2), batch, 2))
    assert more.shm == whole.shm > 2 * plain.shm and more.pinned == whole.pinned
    assert more.ram == whole.ram + 2 * 150 * MB


def test_where_ram_is_short_too_a_larger_shm_is_not_the_only_advice() -> None:
    machine = with_pool(_with_shm(64 * MB), "ram", 2 * GB, 0, 2 * GB)
    found = fit(tried_need(Demand(num_workers=8), batch_of(3 * MB // 2, 64), STOPPED, machine), machine)
    assert [problem.pool for problem in found.problems] == ["shm", "ram"]
    assert set(found.fix) == {step for problem in found.problems for step in problem.fix}
    assert set(found.problems[1].fix) <= set(found.fix)


def _with_shm(size: int) -> Machine:
    machine = with_pool(healthy(), "shm", size, 0, size)
    return replace(machine, shm=replace(machine.shm, size=size, used=0, free=size))


def _advised(fix: Sequence[str]) -> int:
    (size,) = {found[1] for step in fix for found in re.finditer(r"(?:--shm-|remount,)size=(\w+)", step)}
    return parse_size(size)
