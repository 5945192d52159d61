"""Leak or not, by the shape of a series: no process, no torch."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.leak.leak_or_plateau import FEWEST, trend
from legroom.monitor.history_and_trend import theil_sen

MB = 1 << 20


def _steps(count: int = 120, last: int = 600) -> list[float]:
    return [3 + (last - 3) * number / (count - 1) for number in range(count)]


def _series(function, count: int = 120, last: int = 600) -> list[tuple[float, float]]:
    return [(step, function(step)) for step in _steps(count, last)]


LEAKS = {
    "from the first step": lambda s: 50 * MB + 0.1 * MB * s,
    "after a large warm-up": lambda s: 900 * MB * min(1, s / 120) + 0.1 * MB * s,
    "in stairs, one every 20 steps": lambda s: MB * (s // 20),
    "with noise of a batch": lambda s: 0.1 * MB * s + 4 * MB * math.sin(s * 12.9898),
    "since a quarter of the run": lambda s: 0.2 * MB * max(0, s - 150),
    "slowly accelerating": lambda s: 0.1 * MB * s * (1 + s / 2000),
}
CLEAN = {
    "constant": lambda s: 300 * MB,
    "warm-up that ends": lambda s: 900 * MB * min(1, s / 200),
    "cache that is full at 60 %": lambda s: MB * min(s, 360),
    "cache that is full at 85 %": lambda s: MB * min(s, 510),
    "one jump": lambda s: 500 * MB if s > 450 else 10 * MB,
    "two jumps in the first half": lambda s: 100 * MB * ((s > 50) + (s > 200)),
    "sawtooth of an epoch": lambda s: MB * (s % 100),
    "sawtooth of a long epoch": lambda s: MB * (s % 280),
    "noise": lambda s: 10 * MB * math.sin(s * 78.233),
    "falls": lambda s: 900 * MB - MB * s,
    "levels off": lambda s: 500 * MB * (1 - math.exp(-s / 100)),
}


@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.parametrize("count", [40, 120, 400])
def test_a_leak_is_seen_with_its_rate(name: str, count: int) -> None:
    points = _series(LEAKS[name], count)
    found = trend(points, least=MB / 4)
    assert found.leaks, found
    true = (LEAKS[name](600) - LEAKS[name](303)) / 297
    assert found.rate == pytest.approx(true, rel=0.35)


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("count", [40, 120, 400])
@pytest.mark.parametrize("exact", [False, True])
def test_what_is_no_leak_is_not_called_one(name: str, count: int, exact: bool) -> None:
    found = trend(_series(CLEAN[name], count), exact=exact, least=MB / 4)
    assert not found.leaks, found


@pytest.mark.parametrize("stop", [0.6, 0.8, 0.9, 0.95])
def test_a_count_that_has_stopped_is_not_a_leak_however_late(stop: float) -> None:
    found = trend(_series(lambda s: min(s, stop * 600) // 1), exact=True)
    assert found.shape in ("plateau", "jump"), found


def test_growth_that_has_only_begun_is_not_sure_yet() -> None:
    assert trend(_series(lambda s: MB * max(0, s - 470)), least=MB).shape in ("recent", "jump")


def test_since_is_the_step_at_which_the_growth_began() -> None:
    found = trend(_series(lambda s: MB * max(0, s - 200)), exact=True)
    assert found.leaks and 120 <= found.since <= 260
    assert trend(_series(lambda s: MB * s), exact=True).since == 3


def test_too_few_points_are_too_short() -> None:
    assert trend([]).shape == "short"
    assert trend([(step, step) for step in range(FEWEST - 1)]).shape == "short"
    assert trend([(0.0, 0.0)] * 50).shape == "short"
    assert trend([(step * 0.01, step) for step in range(20)] + [(1000.0, 20.0)]).shape == "short"  # one late point


def test_growth_below_the_least_that_counts_is_flat() -> None:
    assert trend(_series(lambda s: 10 * s), least=MB).shape == "flat"


def test_the_slope_is_robust_against_outliers() -> None:
    steps = list(range(20))
    values = [2.0 * step for step in steps]
    values[3] = values[11] = values[17] = 1e9
    assert theil_sen(steps, values) == pytest.approx(2.0, rel=0.2)


@settings(max_examples=150, deadline=None)
@given(
    rate=st.floats(1e3, 1e8), base=st.floats(0, 1e10), count=st.integers(16, 300), seed=st.integers(0, 1 << 30),
    noise=st.floats(0, 0.01),
)  # fmt: skip
def test_any_steady_growth_is_a_leak(rate: float, base: float, count: int, seed: int, noise: float) -> None:
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(3, 5000), count))
    whole = rate * (steps[-1] - steps[0])
    points = [(float(step), base + rate * step + whole * noise * chance.uniform(-1, 1)) for step in steps]
    found = trend(points)
    assert found.leaks or found.shape == "short", found
    if found.leaks:
        assert found.rate == pytest.approx(rate, rel=0.3)


@settings(max_examples=150, deadline=None)
@given(
    growth=st.floats(1e3, 1e10), stop=st.floats(0.05, 0.7), count=st.integers(16, 300), seed=st.integers(0, 1 << 30),
    noise=st.floats(0, 0.02),
)  # fmt: skip
def test_no_growth_that_stopped_is_a_leak(growth: float, stop: float, count: int, seed: int, noise: float) -> None:
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(3, 5000), count))
    end = steps[0] + stop * (steps[-1] - steps[0])
    points = [
        (float(s), growth * min(1.0, (s - steps[0]) / (end - steps[0])) + growth * noise * chance.uniform(-1, 1))
        for s in steps
    ]
    assert not trend(points, least=growth * 0.05).leaks


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e12, 1e12)), max_size=80), st.booleans())
def test_any_series_gets_an_answer(points: list[tuple[float, float]], exact: bool) -> None:
    found = trend(sorted(points), exact=exact)
    assert found.shape in ("steady", "flat", "plateau", "jump", "falls", "recent", "short")
    assert not math.isnan(found.rate)
