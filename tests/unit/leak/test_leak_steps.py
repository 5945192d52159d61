"""What counts as a step when a script has several optimizers: at once, or one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

import legroom
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


def test_batches_of_legrooms_loader_stay_out_of_dev_shm_while_steps_are_counted() -> None:
    found: list[str] = []
    steps = TorchSteps(found.append)
    steps.install(imported=True)
    try:
        samples = [torch.ones(1 << 16) for _ in range(4)]
        loader = legroom.DataLoader(samples, batch_size=2, num_workers=1, multiprocessing_context="fork")
        for batch in loader:
            assert batch.shape == (2, 1 << 16) and "legroom-batch" in Path("/proc/self/maps").read_text()
    finally:
        steps.remove()
    assert found.count("loader") == 2


def test_a_workers_batches_are_counted_and_the_hook_is_removed() -> None:
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    before, found = _MapDatasetFetcher.__dict__["fetch"], list[str]()
    steps = TorchSteps(found.append)
    steps.install(imported=True)
    try:
        fetcher = _MapDatasetFetcher([1, 2, 3], True, list, False)
        assert [fetcher.fetch([0, 1]), fetcher.fetch([2])] == [[1, 2], [3]]
    finally:
        steps.remove()
    assert found == ["worker"] * 2 and _MapDatasetFetcher.__dict__["fetch"] is before
