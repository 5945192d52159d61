"""Workers' memory: the least they take, and the settings that fit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from machines import MB, healthy, with_pool

from legroom.advice.fit_on_machine import judged
from legroom.advice.job_settings_to_workload import Demand, batch_of
from legroom.advice.memory_need import Each, fits, least, most_samples, most_workers, spare

each = st.builds(Each, st.integers(0, 200 * MB), st.integers(0, 200 * MB), st.integers(1, 200 * MB))


def test_one_batch_a_worker_and_the_one_in_use() -> None:
    assert least(Each(10, 24, 20), 4) == 4 * 54 + 20
    assert spare(80 * MB) == 26 * MB
    assert fits(80 * MB, 106 * MB) and not fits(80 * MB, 106 * MB - 1)


@given(each, st.integers(0, 4000 * MB), st.integers(1, 16))
def test_the_most_that_fits_is_just_that(one: Each, free: int, asked: int) -> None:
    most = most_workers(one, free, asked)
    assert most == 0 or fits(least(one, most), free)
    assert most == asked or not fits(least(one, most + 1), free)


@given(each, st.integers(0, 4000 * MB), st.integers(1, 8), st.integers(1, 64))
def test_a_smaller_batch_that_is_reported_to_fit_fits(one: Each, free: int, workers: int, samples: int) -> None:
    less = most_samples(one, free, workers, samples)
    assert 0 <= less < samples
    if less:
        part = replace(one, making=-(-one.making * less // samples), batch=-(-one.batch * less // samples))
        assert fits(least(part, workers), free)


def test_our_loader_makes_do_with_less_before_it_is_too_big() -> None:
    demand = Demand(num_workers=4, loader_kind="legroom", worker_ram=10 * MB)
    batch = batch_of(6 * MB, 4)
    full = judged(demand, batch, with_pool(healthy(), "ram", 4000 * MB, 0, 4000 * MB))
    assert full.verdict == "fits" and not full.notes
    squeezed = judged(demand, batch, with_pool(healthy(), "ram", 400 * MB, 0, 400 * MB))
    assert squeezed.verdict == "fits" and squeezed.need.ram < full.need.ram
    assert "full speed needs" in squeezed.notes[0]
    assert judged(demand, batch, with_pool(healthy(), "ram", 250 * MB, 0, 250 * MB)).verdict == "too-big"
