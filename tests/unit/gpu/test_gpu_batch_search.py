"""next_batch on simulated memory: the right batch within six trials; and the split of an effective batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import UsageError
from legroom.gpu.search_batch_size import MOST_TRIALS, fit_line, largest_fitting, next_batch, split_effective_batch
from legroom.records.gpu_results import Trial

GB = 1 << 30


def search_trials(
    peak: Callable[[int], int], cap: int, border: int, steady: int = 0, most: int | None = None, *, rough: bool = False
) -> list[Trial]:
    """Every trial of a search in which batches up to ``border`` fit."""
    trials: list[Trial] = []
    while (batch := next_batch(trials, cap, most, rough=rough)) is not None:
        assert batch >= 1 and batch not in {trial.batch for trial in trials}
        assert most is None or batch <= most
        fits = batch <= border
        trials.append(Trial(batch, fits, peak(batch) if fits else None, steady=steady))
        assert len(trials) <= MOST_TRIALS
    return trials


@settings(max_examples=400)
@given(
    cap=st.sampled_from([1 * GB, 8 * GB, 80 * GB]),
    fixed=st.floats(0, 0.5),  # beyond, and with most of it hidden at first, six trials can be too few
    per_sample=st.floats(5, 9).map(lambda power: 10**power),
    loss=st.sampled_from([1.0, 0.99, 0.97, 0.95, 0.93, 0.9]),
    known=st.floats(0.6, 1),
)
def test_within_three_percent_or_one_sample(
    cap: int, fixed: float, per_sample: float, loss: float, known: float
) -> None:
    """``loss``: the share of the cap that the allocator can use; ``known``: the share of the fixed part seen at once."""
    held = fixed * cap
    border = int(loss * (cap - held) / per_sample)
    trials = search_trials(lambda batch: int(held + per_sample * batch), cap, border, int(known * held))
    found = largest_fitting(trials)
    assert found <= border
    assert border - found <= max(1, 0.03 * border) or (loss < 0.95 and border - found <= max(2, 0.05 * border))


@given(st.integers(0, 3))
def test_three_samples_or_fewer_fit(border: int) -> None:
    trials = search_trials(lambda batch: batch * GB, 4 * GB, border)
    assert largest_fitting(trials) == border


def test_search_ends_if_memory_does_not_grow() -> None:
    assert largest_fitting(search_trials(lambda _: GB, 8 * GB, 10**12)) > 1000
    assert largest_fitting(search_trials(lambda _: GB, 8 * GB, 10**12, most=100)) == 100


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_never_above_max_batch(most: int, border: int) -> None:
    trials = search_trials(lambda batch: 10**6 * batch, 5000 * 10**6, border, most=most)
    assert largest_fitting(trials) <= min(most, border)


def test_wrong_line_still_finds_a_large_batch() -> None:
    """Small batches take far less per sample than large ones."""
    border = 2000

    def peak(batch: int) -> int:
        return batch * 10**5 if batch < 100 else batch * 4 * 10**6

    assert largest_fitting(search_trials(peak, 8 * 10**9, border)) >= border // 2


@given(st.integers(150, 400), st.integers(20, 120), st.floats(1.2, 2.2), st.integers(5, 40), st.floats(2.2, 3))
def test_search_continues_where_a_larger_batch_takes_less(
    room: int, border: int, waste: float, fixed: int, each: float
) -> None:
    """glibc uses its heap below a block size and mmap above: no trial is killed, and no memory is left unused."""
    cap = room * 10**6

    def peak(batch: int) -> int:
        used = int((fixed + each * batch) * 10**6)
        return int(used * waste) if batch < border else used

    best = max((batch for batch in range(1, 1000) if peak(batch) <= cap), default=0)
    trials: list[Trial] = []
    while (batch := next_batch(trials, cap, rough=True)) is not None:
        trials.append(Trial(batch, peak(batch) <= cap, peak(batch)))
    found = largest_fitting(trials)
    assert found <= best and len(trials) <= MOST_TRIALS
    if found >= border:  # it crossed the threshold
        assert all((trial.peak or 0) <= 1.1 * cap for trial in trials)  # over the cap, short of a kill
        assert len(trials) == MOST_TRIALS or best - found <= max(1, 0.05 * best)


def test_search_crosses_glibc_mmap_threshold() -> None:
    """Measured: blocks of a network on the CPU that reach 32 MB at 64 samples."""
    cap = 360 * 10**6

    def peak(batch: int) -> int:
        return int((10 + (5.3 if batch < 64 else 2.5) * batch) * 10**6)

    trials: list[Trial] = []
    while (batch := next_batch(trials, cap, rough=True)) is not None:
        trials.append(Trial(batch, peak(batch) <= cap, peak(batch)))
    assert all(trial.fits for trial in trials)
    assert 0.97 * 140 <= largest_fitting(trials) <= 140


def test_next_trial_beyond_mmap_threshold_is_near_the_top() -> None:
    """Measured in a cgroup of 700 MB: the fourth trial took less than the third."""
    peaks = {2: 14.7, 17: 81.4, 57: 249.2, 74: 204.6}
    trials = [Trial(batch, True, int(peak * 10**6)) for batch, peak in peaks.items()]
    assert 108 <= (next_batch(trials, 310 * 10**6, rough=True) or 0) <= 112
    assert (next_batch(trials[:3], 310 * 10**6, rough=True) or 0) <= 1.4 * 57  # before it: careful
    # But at most twice as far.
    assert (next_batch(trials, 620 * 10**6, rough=True) or 0) <= 0.8 * 620 / 204.6 * 74


def test_a_trial_just_above_the_cap_says_where_the_cap_is() -> None:
    """Measured in a cgroup of 700 MB: 165 samples ended 1 MB above the cap, and the search fell back to 146."""
    cap = 451 * 10**6
    peaks = {2: 14.4, 25: 92.0, 91: 252.0, 130: 356.0, 165: 452.0}
    trials = [Trial(batch, peak * 10**6 <= cap, int(peak * 10**6)) for batch, peak in peaks.items()]
    assert 160 <= (next_batch(trials, cap, rough=True) or 0) < 165
    # Where the largest that fits is as near as the measurement is exact, the search is over.
    assert next_batch([*trials[:-2], Trial(162, True, 445 * 10**6), trials[-1]], cap, rough=True) is None


def test_search_continues_after_cudnn_drops_workspace() -> None:
    """Measured on an H200: 22 MB per sample while memory suffices, 16 where it does not."""
    cap = 6788 * 10**6
    trials: list[Trial] = []
    while (batch := next_batch(trials, cap)) is not None:
        comfort, least = batch * 22 * 10**6 + 10**8, batch * 16 * 10**6 + 10**8
        fits = least <= 0.9 * cap  # the allocator cannot use all of it
        short = comfort > 0.95 * cap
        peak = min(comfort, int(0.99 * cap)) if fits else None
        trials.append(Trial(batch, fits, peak, steady=10**7, retries=6 if short else 0))
    assert len(trials) <= MOST_TRIALS
    assert 340 <= largest_fitting(trials) <= 375


def test_line_ignores_points_too_close_together() -> None:
    trials = [Trial(2, True, 120), Trial(100, True, 1100), Trial(101, True, 1109)]
    fixed, slope = fit_line(trials) or (0, 0)
    assert slope == pytest.approx((1109 - 120) / 99)
    assert fixed == pytest.approx(1109 - slope * 101)
    assert fit_line(trials[:1]) is None


def test_line_uses_failures_with_a_measured_peak() -> None:
    """On the CPU a batch may finish and still be above the cap."""
    assert fit_line([Trial(2, True, 200), Trial(10, False, 1000)]) == (0, 100)


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 8))
def test_effective_batch_is_exact_or_a_note_reports_it(largest_: int, effective: int, ranks: int) -> None:
    if effective % ranks:
        with pytest.raises(UsageError):
            split_effective_batch(largest_, effective, ranks)
        return
    batch, steps, note = split_effective_batch(largest_, effective, ranks)
    assert 1 <= batch <= largest_ and steps >= 1
    made = batch * steps * ranks
    assert made == effective if note is None else made != effective and str(made) in note
    assert made >= effective


def test_effective_batch_examples() -> None:
    assert split_effective_batch(60, 256, 1) == (32, 8, None)
    assert split_effective_batch(64, 192, 3) == (64, 1, None)
    assert split_effective_batch(48, None, 2) == (48, 1, None)
    batch, steps, note = split_effective_batch(10, 97, 1)
    assert (batch, steps) == (10, 10) and note is not None and "make 100 instead of 97" in note
