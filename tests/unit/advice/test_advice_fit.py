"""Need against Machine: the verdict, which pool breaks first, and the largest settings that fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import GB, MB, healthy, with_pool

from legroom.advice.fit_on_machine import fit, fits, largest_batch, largest_settings
from legroom.advice.job_settings_to_workload import Batch, Demand, batch_of
from legroom.advice.memory_need import need
from legroom.records.machine import Machine
from legroom.records.workload import PlannedLoader, Workload


def _shm(free: int) -> Machine:
    return with_pool(healthy(), "shm", free, 0, free)


LOADER = Workload(loaders=(PlannedLoader(tensors=(24 * MB,), num_workers=4, prefetch_factor=2),))


def test_it_fits_a_healthy_machine() -> None:
    plan = fit(need(LOADER), healthy())
    assert plan.verdict == "fits" and plan.problems == () and plan.unknown == {} and plan.fix == ()


def test_a_small_shm_breaks_by_so_much() -> None:
    plan = fit(need(LOADER), _shm(64 * MB))
    (problem,) = plan.problems
    assert plan.verdict == "too-big" and problem.pool == "shm"
    assert problem.missing == need(LOADER).shm - 64 * MB and problem.free == 64 * MB
    assert "shm: 264 MB needed, 64 MB free, 200 MB short" in problem.message
    assert any("remount,size=1G" in step for step in plan.fix)
    assert plan.fix[-1].startswith("check:")


def test_the_worst_pool_comes_first() -> None:
    machine = with_pool(_shm(200 * MB), "ram", GB, GB - 10 * MB, 10 * MB)
    assert [problem.pool for problem in fit(need(LOADER), machine).problems] == ["ram", "shm"]


def test_what_is_unknown_is_unknown_unless_another_breaks() -> None:
    machine = with_pool(healthy(), "shm", None, None, None, reason="macOS has no /dev/shm")
    plan = fit(need(LOADER), machine)
    assert plan.verdict == "unknown" and plan.unknown == {"shm": "macOS has no /dev/shm"}
    tight = with_pool(machine, "ram", MB, 0, MB)
    assert fit(need(LOADER), tight).verdict == "too-big"
    assert fit(need(Workload(process_ram=MB)), machine).verdict == "fits"  # nothing is needed of it


def test_descriptors_disk_and_gpus_count() -> None:
    many = Workload(loaders=(PlannedLoader(tensors=(20,) * 500, num_workers=8, prefetch_factor=4),))
    machine = with_pool(healthy(), "fds", 1024, None, None)
    assert [one.pool for one in fit(need(many), machine).problems] == ["fds"]
    disk = with_pool(healthy(), "disk", 10 * GB, 9 * GB, GB)
    assert [one.pool for one in fit(need(Workload(checkpoint=2 * GB)), disk).problems] == ["disk"]
    cards = with_pool(with_pool(healthy(), "gpu0", 16 * GB, 0, 16 * GB), "gpu1", 16 * GB, 12 * GB, 4 * GB)
    assert [one.pool for one in fit(need(Workload(gpu=8 * GB)), cards).problems] == ["gpu1"]
    assert fit(need(Workload(gpu=8 * GB)), healthy()).verdict == "unknown"


def test_largest_settings_come_down_prefetch_first() -> None:
    batch = batch_of(MB, 8)
    asked = Demand(num_workers=4, prefetch_factor=4)
    assert largest_settings(asked, batch, healthy()).num_workers == 4  # type: ignore[union-attr]
    less = largest_settings(asked, batch, _shm(64 * MB))
    assert less is not None and (less.num_workers, less.prefetch_factor) == (4, 1)
    assert set(less.why) == {"prefetch_factor"}
    least = largest_settings(asked, batch, _shm(16 * MB))
    assert least is not None and (least.num_workers, least.prefetch_factor) == (0, None)
    assert "0 workers instead of 4" in least.why["num_workers"]
    one = largest_settings(Demand(num_workers=2, prefetch_factor=1), batch, _shm(40 * MB))
    assert one is not None and "1 worker instead of 2" in one.why["num_workers"]


def test_a_smaller_batch_keeps_the_effective_batch() -> None:
    machine = with_pool(_shm(0), "ram", 64 * MB, 0, 64 * MB)
    found = largest_settings(Demand(num_workers=2), batch_of(MB, 48), machine)
    assert found is not None and found.num_workers == 0
    assert (found.batch_size, found.accumulation) == (16, 3) and found.effective_batch == 48


def test_nothing_helps_a_disk_that_is_full() -> None:
    machine = with_pool(healthy(), "disk", GB, GB, 0)
    assert largest_settings(Demand(checkpoint=MB), batch_of(MB, 8), machine) is None
    assert largest_batch(Demand(checkpoint=MB), batch_of(MB, 8), machine) == 0


def test_without_a_bound_there_is_no_largest_batch() -> None:
    machine = with_pool(healthy(), "ram", None, None, None, reason="unreadable")
    assert largest_batch(Demand(num_workers=0), batch_of(1000, 8), machine) is None


demands = st.builds(
    Demand,
    num_workers=st.integers(0, 6),
    prefetch_factor=st.integers(1, 5),
    pin_memory=st.booleans(),
    loader_kind=st.sampled_from(["torch", "legroom"]),
    val_workers=st.none() | st.integers(0, 4),
    ranks=st.integers(1, 4),
)
batches = st.builds(
    lambda sample, samples: Batch((sample * samples, 8 * samples), samples, "drawn"),
    st.integers(1, 4 * MB),
    st.integers(1, 96),
)


@given(demands, batches, st.integers(0, 512 * MB), st.integers(0, 2 * GB))
def test_what_is_reported_to_fit_fits(demand: Demand, batch: Batch, shm: int, ram: int) -> None:
    machine = with_pool(_shm(shm), "ram", 2 * GB, 0, ram)
    found = largest_settings(demand, batch, machine)
    if found is not None:
        assert found.batch_size * found.accumulation == batch.samples
        val = None if demand.val_workers is None else min(demand.val_workers, found.num_workers)
        same = replace(
            demand, num_workers=found.num_workers, prefetch_factor=found.prefetch_factor or 1, val_workers=val
        )
        assert fits(same, batch.of(found.batch_size), machine)
        assert found.num_workers <= demand.num_workers
    most = largest_batch(demand, batch, machine)
    if most:
        assert fits(demand, batch.of(most), machine) and not fits(demand, batch.of(most + 1), machine)
    elif most == 0:
        assert not fits(demand, batch.of(1), machine)


short_datasets = st.builds(
    lambda batch, rows: replace(batch, rows=max(batch.samples, rows)), batches, st.integers(1, 200)
)


@given(demands, short_datasets, st.integers(0, 512 * MB), st.integers(0, 2 * GB), st.none() | st.booleans())
def test_the_largest_batch_agrees_with_the_verdict(
    demand: Demand, batch: Batch, shm: int, ram: int, tried: bool | None
) -> None:
    machine = with_pool(_shm(shm), "ram", 2 * GB, 0, ram)
    fitting = fits(demand, batch, machine) if tried is None else tried
    most = largest_batch(demand, batch, machine, fitting=tried)
    assert (most is None or most >= batch.samples) is fitting


def test_a_batch_of_the_whole_dataset_does_not_hide_sizes_that_do_not_fit() -> None:
    demand, whole = Demand(num_workers=2), replace(batch_of(MB, 600), rows=1000)
    room = next(room for room in range(1000 * MB, 4000 * MB, 10 * MB) if fits(demand, whole.of(1000), _shm(room)))
    machine = _shm(room)
    assert fits(demand, whole, machine) and not fits(demand, whole.of(999), machine)
    most = largest_batch(demand, whole, machine)
    assert most is not None and 600 <= most < 999


@pytest.mark.parametrize("free", [10 * MB, 240 * MB, 241 * MB])
def test_the_edge_is_the_need_itself(free: int) -> None:
    exactly = need(LOADER).shm
    assert fit(need(LOADER), _shm(exactly)).verdict == "fits"
    assert fit(need(LOADER), _shm(exactly - 1)).verdict == "too-big"
    assert (fit(need(LOADER), _shm(free)).verdict == "fits") == (free >= exactly)
