"""What counts as a step when a script has several optimizers: at once, or one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable

from legroom.leak.torch_step_hooks import TorchSteps


class _Optimizer:
    pass


def _steps() -> tuple[list[str], Callable[[object], None]]:
    found: list[str] = []
    steps = TorchSteps(found.append)
    return found, steps._optimizer_stepped


def test_two_optimizers_of_one_loop_are_one_step() -> None:
    found, stepped = _steps()
    generator, critic = _Optimizer(), _Optimizer()
    for _ in range(10):
        for _ in range(5):
            stepped(critic)
        stepped(generator)
    assert found == ["optimizer"] * 50  # the critic makes five in each round


def test_a_sweep_with_a_new_optimizer_for_each_trial_goes_on_counting() -> None:
    found, stepped = _steps()
    for _ in range(4):
        optimizer = _Optimizer()
        gc.collect()
        for _ in range(20):
            stepped(optimizer)
        del optimizer
    assert len(found) == 80


def test_one_that_is_made_late_begins_to_count_when_the_first_is_gone() -> None:
    found, stepped = _steps()
    first, second = _Optimizer(), _Optimizer()
    for _ in range(20):
        stepped(first)
    for _ in range(5):
        stepped(second)
    assert len(found) == 20
    del first
    gc.collect()
    for _ in range(5):
        stepped(second)
    assert len(found) == 25
