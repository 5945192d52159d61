"""Arguments out of range: one sentence with the name, the range and the value."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from legroom.errors import UsageError
from legroom.system.argument_checks import check_arguments, check_choice, check_integer, check_path, check_seconds

if TYPE_CHECKING:
    Unknown = object


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3", None])
def test_what_is_not_an_integer_in_range(value: object) -> None:
    with pytest.raises(UsageError) as caught:
        check_integer("batch_size", value, 1)
    assert caught.value.what == f"batch_size must be an integer >= 1 (got {value!r})" and caught.value.fix


def test_integers_of_any_kind_become_int() -> None:
    assert type(check_integer("seed", np.int64(7), 0)) is int
    assert check_integer("seed", 2**64 - 1, 0) == 2**64 - 1
    with pytest.raises(UsageError, match="less than") as caught:
        check_integer("seed", 2**64, 0)
    assert caught.value.fix == ("pass a number between 0 and 2**64 - 1",)


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_seconds(value: float) -> None:
    assert check_seconds("step_seconds", 0.5) == 0.5
    with pytest.raises(UsageError, match="timeout must be a number of seconds") as caught:
        check_seconds("timeout", value)
    assert caught.value.fix == ("pass timeout=0 or more",)


def test_choices() -> None:
    check_choice("format", "numpy", ("torch", "numpy"))
    with pytest.raises(UsageError) as caught:
        check_choice("format", "jax", ("torch", "numpy"))
    assert caught.value.what == "format must be one of torch, numpy (got 'jax')"


def _example(
    count: int,
    flag: bool = True,
    path: str | os.PathLike[str] | None = None,
    kind: Literal["a", "b"] = "a",
    names: str | Iterable[str] | None = None,
    call: Callable[[int | str], None] | None = None,
    later: Unknown = 3,
) -> None:
    check_arguments(_example, locals())  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": 1.0}, "count must be an integer (got 1.0)"),
        ({"count": True}, "count must be an integer (got True)"),
        ({"flag": "yes"}, "flag must be True or False (got 'yes')"),
        ({"flag": 2}, "flag must be True or False (got 2)"),
        ({"path": b"x"}, "path must be a path (str or os.PathLike) or None (got b'x')"),
        ({"path": ""}, "path is empty"),
        ({"kind": "c"}, "kind must be one of a, b (got 'c')"),
        ({"names": 3}, "names must be a string, a list or None (got 3)"),
        ({"call": "x" * 200}, f"call must be a function or None (got '{'x' * 99}…)"),
    ],
)
def test_arguments_are_compared_with_their_annotations(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        _example(**{"count": 1} | given)
    assert caught.value.what == said and caught.value.why and caught.value.fix


def test_arguments_of_the_annotated_types() -> None:
    _example(np.int64(3), np.bool_(True), Path("x"), "b", ["x"], print, object())
    _example(3, False, "x", "b", "x", None, None)
    _example(3, 1, None)  # type: ignore[arg-type]
    check_path("path", ".")
