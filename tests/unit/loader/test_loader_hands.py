"""Rows copied by several threads: right, whoever copies, and settled on what was fastest."""

from __future__ import annotations

import _thread
import itertools
from typing import Any

import numpy as np
import pytest

from legroom.loader.rows import hands
from legroom.loader.rows.hands import Copier

NDArray = np.ndarray[Any, Any]
ROW = 1 << 18


@pytest.fixture
def source() -> NDArray:
    return np.random.default_rng(0).integers(0, 256, (16, ROW), dtype=np.uint8)


def copied(copier: Copier, source: NDArray, rows: NDArray, **how: bool) -> bool:
    out = np.zeros((len(rows), ROW), np.uint8)
    copier.copy(rows, out, **how)
    return bool((out == source[rows]).all())


@pytest.mark.parametrize("cpus", [1, 2, 3, 4, 64])
def test_whoever_copies_the_rows_are_right(
    cpus: int, source: NDArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hands, "usable_cpus", lambda: cpus)
    copier, draw = Copier(source), np.random.default_rng(1)
    for count in [16, *range(1, 17), *[16] * 12]:
        assert copied(copier, source, draw.integers(0, 16, count))


def played(source: NDArray, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> list[int]:
    """Which numbers of threads copied, where each takes that long."""
    seen: list[int] = []
    now = itertools.count()
    times = [0.0]

    def clock() -> float:
        if next(now) % 2:
            times[0] += seconds[seen[-1]]
        return times[0]

    def fake(_source: NDArray, _rows: NDArray, _out: NDArray, count: int) -> None:
        seen.append(count)

    monkeypatch.setattr(hands, "usable_cpus", lambda: 4)
    monkeypatch.setattr(hands, "_copied", fake)
    copier, out = Copier(source, clock), np.empty((16, ROW), np.uint8)
    for _ in range(20):
        copier.copy(np.arange(16), out)
    return seen


@pytest.mark.parametrize("best", [1, 2, 4])
def test_the_fastest_stays(best: int, source: NDArray, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = played(source, monkeypatch, {count: 1.0 if count == best else 2.0 for count in (1, 2, 4)})
    assert sorted(seen[:9]) == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert seen[9:] == [best] * 11


def test_one_thread_beside_a_consumer_and_for_small_batches(
    source: NDArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(*_: object) -> None:
        raise AssertionError("this copy was divided")

    monkeypatch.setattr(hands, "_copied", nobody)
    assert copied(Copier(source), source, np.arange(16), alone=True)
    assert copied(Copier(source), source, np.arange(2))


def test_where_no_thread_is_to_be_had(source: NDArray, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", none_left)
    monkeypatch.setattr(hands, "usable_cpus", lambda: 4)
    assert copied(Copier(source), source, np.arange(16))


def test_a_threads_error_comes_out(source: NDArray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hands, "usable_cpus", lambda: 4)
    with pytest.raises((ValueError, TypeError, IndexError)):
        Copier(source).copy(np.arange(16), np.empty((16, ROW + 1), np.uint8))
