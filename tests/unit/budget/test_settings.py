"""The settings offered fit what is free, by the arithmetic torch's loader follows."""

from __future__ import annotations

from dataclasses import replace

from boxes import GB, MB, healthy, with_pool
from hypothesis import given
from hypothesis import strategies as st

from legroom.budget.settings import batches_in_flight, largest_batch, safe_settings
from legroom.model import Gpu, Gpus


@given(st.integers(0, 1 << 40), st.integers(1, 64), st.integers(1, 8))
def test_what_is_offered_fits(room: int, workers: int, prefetch: int) -> None:
    batch = largest_batch(room, workers, prefetch)
    pages = -(-(batch + 64) // 4096) if batch else 0
    assert 0 <= pages * 4096 * batches_in_flight(workers, prefetch) <= room


@given(st.integers(0, 1 << 40), st.integers(1, 64), st.integers(1, 8))
def test_more_in_flight_means_smaller_batches(room: int, workers: int, prefetch: int) -> None:
    assert largest_batch(room, workers + 1, prefetch) <= largest_batch(room, workers, prefetch)
    assert largest_batch(room, workers, prefetch + 1) <= largest_batch(room, workers, prefetch)
    assert largest_batch(room + 4096, workers, prefetch) >= largest_batch(room, workers, prefetch)


def test_rows_go_from_parallel_to_none_and_the_last_always_fits() -> None:
    rows = safe_settings(with_pool(healthy(), "shm", 64 * MB, 0, 64 * MB))
    assert [row.num_workers for row in rows] == [4, 2, 1, 0]
    assert [row.max_batch_bytes is None for row in rows] == [False, False, False, True]
    assert 5 * MB < (rows[0].max_batch_bytes or 0) < 6 * MB


def test_no_more_workers_than_cores() -> None:
    box = healthy(cpu=replace(healthy().cpu, affinity=16, quota=2.0))
    assert max(row.num_workers for row in safe_settings(box)) == 2


def test_a_full_shm_leaves_only_no_workers() -> None:
    rows = safe_settings(with_pool(healthy(), "shm", 64 * MB, 64 * MB, 0))
    assert [row.num_workers for row in rows] == [0]


def test_ram_binds_where_it_has_less() -> None:
    rows = safe_settings(with_pool(healthy(), "ram", 8 * GB, 7 * GB, GB))
    assert rows[0].bound_by == "ram" and "1 GB free in ram" in rows[0].why


def test_unknown_shm_bounds_nothing_and_says_so() -> None:
    rows = safe_settings(with_pool(healthy(), "shm", None, None, None, reason="no /dev/shm on this platform"))
    assert rows[0].max_batch_bytes is None and "unknown" in rows[0].why


def test_pinning_needs_a_card_and_ram() -> None:
    card = Gpu(0, "card", "u", 80 * GB, 0, 80 * GB, ())
    with_card = healthy(gpus=Gpus((card,), 1, "580", "NVML"))
    assert not safe_settings(healthy())[0].pin_memory
    assert safe_settings(with_card)[0].pin_memory
    assert not safe_settings(with_pool(with_card, "ram", 64 * GB, 60 * GB, 4 * GB))[0].pin_memory
