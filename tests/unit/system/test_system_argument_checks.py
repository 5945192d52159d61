"""Arguments out of range: one sentence with the name, the range and the value."""

from __future__ import annotations

import numpy as np
import pytest

from legroom.errors import UsageError
from legroom.system.argument_checks import check_choice, check_integer, check_seconds


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3", None])
def test_what_is_not_an_integer_in_range(value: object) -> None:
    with pytest.raises(UsageError) as caught:
        check_integer("batch_size", value, 1)
    assert caught.value.what == f"batch_size must be an integer >= 1 (got {value!r})" and caught.value.fix


def test_integers_of_any_kind_become_int() -> None:
    assert type(check_integer("seed", np.int64(7), 0)) is int
    assert check_integer("seed", 2**64 - 1, 0) == 2**64 - 1
    with pytest.raises(UsageError, match="less than"):
        check_integer("seed", 2**64, 0)


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_seconds(value: float) -> None:
    assert check_seconds("step_seconds", 0.5) == 0.5
    with pytest.raises(UsageError, match="step_seconds must be a number of seconds"):
        check_seconds("step_seconds", value)


def test_choices() -> None:
    check_choice("format", "numpy", ("torch", "numpy"))
    with pytest.raises(UsageError) as caught:
        check_choice("format", "jax", ("torch", "numpy"))
    assert caught.value.what == "format must be one of torch, numpy (got 'jax')"
