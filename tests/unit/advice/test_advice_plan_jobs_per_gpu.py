"""Plans: seed figures, the table, what fits now, and the cap that memory puts on advice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from machines import GB, MB, healthy, with_pool

from legroom.advice.fit_on_machine import TABLE, plan_for
from legroom.records.machine import Machine
from legroom.records.workload import Workload

SEED = Workload(process_shm=23 * MB // 4)


def _docker(size: int, used: int = 0, ram: int = 64 * GB) -> Machine:
    machine = with_pool(with_pool(healthy(), "shm", size, used, size - used), "ram", ram, 0, ram)
    return replace(
        machine,
        shm=replace(machine.shm, size=size, used=used, free=size - used),
        runtime=replace(machine.runtime, kind="docker", may_mount=False),
    )


def test_the_seeds_machine() -> None:
    plan = plan_for(SEED, _docker(64 * MB, 46 * MB), gpus=8, jobs_per_gpu=6, held_shm=46 * MB)
    assert plan.need.shm == 276 * MB and plan.others == 0 and plan.verdict == "too-big"
    sizes = plan.sizes
    assert sizes is not None
    assert (sizes.minimum, sizes.recommended, sizes.conservative) == (512 * MB, GB, 2 * GB)
    assert [row.jobs_per_gpu for row in plan.table] == list(TABLE)
    rows = {row.jobs_per_gpu: (row.processes, row.need, row.recommended) for row in plan.table}
    assert rows[1] == (8, 46 * MB, 512 * MB) and rows[5] == (40, 230 * MB, 512 * MB)
    assert rows[6] == (48, 276 * MB, GB) and rows[12] == (96, 552 * MB, 2 * GB)
    assert plan.fits_now == 1  # the eight that run are counted as themselves, not as others
    assert any("docker run --shm-size=1G" in step for step in plan.fix)
    assert plan.fix[-1] == "check:\ndf -h /dev/shm"


def test_others_are_added_before_sizes_are_chosen() -> None:
    plan = plan_for(SEED, _docker(GB, 300 * MB), gpus=8, jobs_per_gpu=6)
    assert plan.others == 300 * MB and plan.need.shm == 276 * MB
    assert plan.sizes is not None and plan.sizes.minimum == GB and plan.sizes.recommended == 2 * GB
    assert plan.fits_now == (GB - 300 * MB) // (46 * MB)


def test_advice_is_capped_by_the_cgroup_and_names_it() -> None:
    machine = _docker(64 * MB, ram=GB)
    plan = plan_for(replace(SEED, process_ram=10 * MB), machine, gpus=8, jobs_per_gpu=6)
    assert plan.sizes is not None
    assert plan.sizes.recommended == plan.sizes.conservative == GB - 480 * MB
    assert plan.sizes.capped_by == "the cgroup's memory limit of 1 GB less 480 MB for the processes"
    assert any("capped by the cgroup's" in note for note in plan.notes)
    tight = plan_for(replace(SEED, process_ram=20 * MB), machine, gpus=8, jobs_per_gpu=6)
    assert tight.sizes is not None and tight.sizes.recommended < tight.need.shm
    assert any("fewer jobs" in note for note in tight.notes) and tight.fix == ()
    assert "ram" in [problem.pool for problem in tight.problems]


def test_a_large_enough_shm_needs_no_setting() -> None:
    plan = plan_for(SEED, healthy(), gpus=8, jobs_per_gpu=6)
    assert plan.verdict == "fits" and plan.fix == ()


def test_a_number_of_jobs_off_the_table_gets_a_row() -> None:
    plan = plan_for(SEED, healthy(), gpus=1, jobs_per_gpu=9)
    assert [row.jobs_per_gpu for row in plan.table] == sorted({*TABLE, 9})


def test_what_was_not_given_is_reported_as_left_out() -> None:
    plan = plan_for(replace(SEED, processes=4), healthy(), gpus=2, jobs_per_gpu=1)
    assert plan.table[0].processes == 8
    assert any("not included" in note and "RAM" in note for note in plan.notes)
    assert any("NCCL" in note for note in plan.notes)


def test_an_unknown_shm_gives_no_number_of_jobs() -> None:
    machine = with_pool(healthy(), "shm", None, None, None, reason="macOS has no /dev/shm")
    machine = replace(
        machine, shm=replace(machine.shm, size=None, used=None, free=None, reason="macOS has no /dev/shm")
    )
    plan = plan_for(SEED, machine, gpus=8, jobs_per_gpu=6)
    assert plan.verdict == "unknown" and plan.fits_now is None and plan.others is None
    assert any("unknown" in note for note in plan.notes)


def test_no_need_no_bound() -> None:
    assert plan_for(Workload(), healthy(), gpus=1, jobs_per_gpu=1).fits_now is None


@given(st.integers(0, 64 * MB), st.integers(1, 16), st.integers(1, 12), st.integers(0, 4 * GB), st.integers(0, 8 * GB))
def test_what_fits_now_fits_and_one_more_does_not(each: int, gpus: int, jobs: int, shm: int, ram: int) -> None:
    one, machine = Workload(process_shm=each), _docker(shm, ram=ram)
    plan = plan_for(one, machine, gpus=gpus, jobs_per_gpu=jobs)
    if plan.fits_now is None:
        assert each * gpus * (1 << 15) <= min(shm, ram)
    else:
        assert plan.fits_now * gpus * each <= min(shm, ram) < (plan.fits_now + 1) * gpus * each
        assert (plan.verdict == "fits") == (jobs <= plan.fits_now)
    needs = [row.need for row in plan.table]
    assert needs == sorted(needs)
    assert plan.sizes is not None
    assert plan.sizes.recommended <= ram or plan.sizes.capped_by is None
