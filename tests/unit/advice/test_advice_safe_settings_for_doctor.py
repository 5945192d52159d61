"""The settings offered fit what is free, by the arithmetic torch's loader follows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from machines import GB, MB, healthy, with_pool

from legroom.advice.choose_settings import largest_batch, safe_settings
from legroom.advice.fit_on_machine import judged
from legroom.advice.job_settings_to_workload import Demand, batch_of
from legroom.advice.memory_need import batches_in_flight
from legroom.records.machine import Gpu, Gpus
from legroom.units import format_size, parse_size


@given(st.integers(0, 1 << 40), st.integers(1, 64), st.integers(1, 8))
def test_what_is_offered_fits(room: int, workers: int, prefetch: int) -> None:
    batch = largest_batch(room, workers, prefetch)
    pages = -(-(batch + 64) // 4096) if batch else 0
    assert 0 <= pages * 4096 * batches_in_flight(workers, prefetch, again=True) <= room


@given(st.integers(0, 1 << 40), st.integers(1, 64), st.integers(1, 8))
def test_more_in_flight_means_smaller_batches(room: int, workers: int, prefetch: int) -> None:
    assert largest_batch(room, workers + 1, prefetch) <= largest_batch(room, workers, prefetch)
    assert largest_batch(room, workers, prefetch + 1) <= largest_batch(room, workers, prefetch)
    assert largest_batch(room + 4096, workers, prefetch) >= largest_batch(room, workers, prefetch)


def test_rows_go_from_parallel_to_none_and_the_last_always_fits() -> None:
    rows = safe_settings(with_pool(healthy(), "shm", 64 * MB, 0, 64 * MB))
    assert [row.num_workers for row in rows] == [4, 2, 1, 0]
    assert [row.max_batch_bytes is None for row in rows] == [False, False, False, True]
    assert 4 * MB < (rows[0].max_batch_bytes or 0) < 5 * MB


def test_no_more_workers_than_cores() -> None:
    machine = healthy(cpu=replace(healthy().cpu, affinity=16, quota=2.0))
    assert max(row.num_workers for row in safe_settings(machine)) == 2


def test_a_full_shm_leaves_only_no_workers() -> None:
    rows = safe_settings(with_pool(healthy(), "shm", 64 * MB, 64 * MB, 0))
    assert [row.num_workers for row in rows] == [0]


def test_ram_limits_where_it_has_less() -> None:
    rows = safe_settings(with_pool(healthy(), "ram", 8 * GB, 7 * GB, GB))
    assert rows[0].bound_by == "ram" and "1 GB free RAM" in rows[0].why


def test_an_unknown_shm_is_an_unknown_limit() -> None:
    rows = safe_settings(with_pool(healthy(), "shm", None, None, None, reason="no /dev/shm on this platform"))
    assert rows[0].max_batch_bytes is None and "unknown" in rows[0].why
    assert [row.known for row in rows] == [False, False, False, True], "without workers there is no limit"


def test_pinning_needs_a_gpu_and_ram() -> None:
    card = Gpu(0, "card", "u", 80 * GB, 0, 80 * GB, ())
    with_card = healthy(gpus=Gpus((card,), 1, "580", "NVML"))
    assert not safe_settings(healthy())[0].pin_memory
    assert safe_settings(with_card)[0].pin_memory
    assert not safe_settings(with_pool(with_card, "ram", 64 * GB, 60 * GB, 4 * GB))[0].pin_memory


@given(st.integers(0, 64 * GB), st.integers(0, 64 * GB), st.integers(1, 64), st.none() | st.floats(1.0, 64.0))
def test_what_doctor_prints_check_accepts(shm: int, ram: int, cores: int, quota: float | None) -> None:
    machine = healthy(cpu=replace(healthy().cpu, affinity=cores, quota=quota))
    machine = with_pool(with_pool(machine, "shm", 64 * GB, 64 * GB - shm, shm), "ram", 64 * GB, 64 * GB - ram, ram)
    for row in safe_settings(machine):
        if not row.num_workers or row.max_batch_bytes is None:
            continue
        printed = parse_size(format_size(row.max_batch_bytes))
        demand = Demand(num_workers=row.num_workers, prefetch_factor=row.prefetch_factor or 0)
        assert judged(demand, batch_of(printed, 1), machine).verdict == "fits", (row, printed)


@given(st.integers(0, 64 * GB), st.integers(1, 64), st.integers(1, 8))
def test_what_fits_shm_fits_it_with_workers_that_start_anew(shm: int, workers: int, prefetch: int) -> None:
    machine = with_pool(with_pool(healthy(), "shm", 64 * GB, 0, shm), "ram", 1 << 50, 0, 1 << 50)
    largest = largest_batch(shm, workers, prefetch)
    if largest >= 4096 - 64:
        printed = batch_of(parse_size(format_size(largest)), 1)
        assert judged(Demand(num_workers=workers, prefetch_factor=prefetch), printed, machine).verdict == "fits"


def test_a_container_default_of_64_mb_is_offered_what_check_accepts() -> None:
    machine = with_pool(healthy(), "shm", 64 * MB, 0, 64 * MB)
    alone = next(row for row in safe_settings(machine) if row.num_workers == 1)
    assert alone.max_batch_bytes is not None and 12 * MB < alone.max_batch_bytes < 13 * MB
    assert judged(Demand(num_workers=1, prefetch_factor=1), batch_of(17 * MB, 1), machine).verdict == "too-big"
