"""Three sizes: powers of two that follow from the need, and never above the memory behind them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import GB, MB

from legroom.advice.fit_on_machine import FLOOR, advise, power_of_two


@pytest.mark.parametrize(
    ("need", "minimum", "recommended", "conservative"),
    [
        (276 * MB, 512 * MB, 1 * GB, 2 * GB),
        (552 * MB, 1 * GB, 2 * GB, 4 * GB),
        (46 * MB, 64 * MB, 512 * MB, 1 * GB),
        (230 * MB, 256 * MB, 512 * MB, 1 * GB),
        (256 * MB, 256 * MB, 512 * MB, 1 * GB),
        (256 * MB + 1, 512 * MB, 1 * GB, 2 * GB),
    ],
)
def test_the_rule(need: int, minimum: int, recommended: int, conservative: int) -> None:
    sizes = advise(need)
    assert (sizes.minimum, sizes.recommended, sizes.conservative) == (minimum, recommended, conservative)
    assert sizes.capped_by is None


@given(st.integers(0, 1 << 44))
def test_powers_of_two_above_the_need(need: int) -> None:
    sizes = advise(need)
    for size in (sizes.minimum, sizes.recommended, sizes.conservative):
        assert size & (size - 1) == 0
    assert sizes.minimum >= need and sizes.recommended >= max(2 * need, FLOOR)
    assert sizes.minimum <= sizes.recommended <= sizes.conservative == 2 * sizes.recommended


@given(st.integers(0, 1 << 44), st.integers(1, 1 << 40))
def test_more_need_never_less_advice(need: int, more: int) -> None:
    small, large = advise(need), advise(need + more)
    assert small.minimum <= large.minimum and small.recommended <= large.recommended


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_never_above_the_limit_less_what_processes_need(need: int, memory: int, processes: int) -> None:
    sizes = advise(need, memory=memory, processes=processes)
    room = max(0, memory - processes)
    free = advise(need)
    assert max(sizes.minimum, sizes.recommended, sizes.conservative) <= max(room, 0) or sizes == free
    assert (sizes.capped_by is not None) == (free.conservative > room // 4096 * 4096)
    assert 0 <= sizes.minimum <= sizes.recommended <= sizes.conservative


def test_the_cap_names_what_limits() -> None:
    sizes = advise(276 * MB, memory=GB, processes=600 * MB, bound="the cgroup's memory limit of")
    assert sizes.recommended == 424 * MB and sizes.minimum == 424 * MB
    assert sizes.capped_by == "the cgroup's memory limit of 1 GB less 600 MB for the processes"


def test_powers() -> None:
    assert [power_of_two(n) for n in (0, 1, 4096, 4097)] == [4096, 4096, 4096, 8192]
