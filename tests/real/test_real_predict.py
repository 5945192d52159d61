"""Prediction against reality: what torch's loaders really take of a real tmpfs, and whether check was right."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rigs

from legroom.advice.memory_need import batch_pages, need
from legroom.records.workload import PlannedLoader, Workload

pytest.importorskip("torch")

PLAYER = Path(__file__).with_name("peak_player.py")
MB = 1 << 20
WORKERS, PREFETCH, BYTES, LOADERS, TENSORS = ((0, 1, 2, 4), (1, 2, 4), (MB // 2, 4 * MB, 24 * MB), (1, 2), (1, 50))
SHARING = ("file_descriptor", "file_system")
GRID = list(itertools.product(WORKERS, PREFETCH, BYTES, LOADERS, SHARING, TENSORS))

pytestmark = [pytest.mark.real("mount"), pytest.mark.timeout(3000)]


def _case(setting: tuple[Any, ...], batches: int | None = None, **more: Any) -> dict[str, Any]:
    workers, prefetch, total, loaders, sharing, count = setting
    tensors = [max(4, total // count // 4 * 4)] * count
    return {
        "tensors": tensors,
        "workers": workers,
        "prefetch": prefetch,
        "batches": batches or workers * prefetch + 3,
        "loaders": loaders,
        "sharing": sharing,
        "batch_pages": batch_pages(tensors),
        **more,
    }


def _predicted(case: dict[str, Any]) -> int:
    loader = PlannedLoader(
        tensors=tuple(case["tensors"]), num_workers=case["workers"], prefetch_factor=case["prefetch"],
        batches=case["batches"],
        persistent_workers=case.get("epochs", 1) == 1,  # one epoch starts its workers once, too
    )  # fmt: skip
    return need(Workload(loaders=(loader,) * case["loaders"])).shm


def _play(cases: list[dict[str, Any]], size: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each case with what really happened, all in one private /dev/shm."""
    command = rigs.small_shm([sys.executable, "-W", "ignore", str(PLAYER)], size)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        for case in cases:
            child.stdin.write(json.dumps(case) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            assert line, f"the player died of {case}"
            yield case, json.loads(line)
        child.stdin.close()
    assert child.returncode == 0


def _pairwise() -> list[tuple[Any, ...]]:
    """The fewest settings, found greedily, in which every two values of two factors meet at least once."""
    left = {pair for setting in GRID for pair in _pairs(setting)}
    chosen = []
    while left:
        best = max(GRID, key=lambda setting: len(_pairs(setting) & left))
        left -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(setting: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(enumerate(setting), 2))


def _assert_predicted(cases: list[dict[str, Any]]) -> None:
    for case, real in _play(cases, "6g"):
        assert real["failure"] is None, (case, real)
        predicted, spare = _predicted(case), 2 * case["batch_pages"] * case["loaders"]
        if not case["workers"]:
            assert real["peak"] == predicted == 0, (case, real)
        assert predicted - spare <= real["peak"] <= predicted, (case, real, predicted)


def test_the_peak_is_predicted_within_two_batches() -> None:
    _assert_predicted([_case(setting) for setting in _pairwise()])


def test_the_last_batch_of_an_epoch_lives_into_the_next() -> None:
    settings = [(2, 4, MB, 1, sharing, 1) for sharing in SHARING]
    _assert_predicted([_case(setting, batches, epochs=2) for setting in settings for batches in (1, 3)])


def test_workers_of_the_next_epoch_hold_the_last_batch_to_its_end() -> None:
    settings = [(2, 2, 4 * MB, 1, sharing, 1) for sharing in SHARING]
    _assert_predicted([_case(setting, 8, epochs=3) for setting in settings])


@pytest.mark.soak
def test_the_peak_is_predicted_over_the_whole_grid() -> None:
    _assert_predicted([_case(setting) for setting in GRID])


def _drawn(count: int, seed: int) -> list[dict[str, Any]]:
    """Settings around the edge of 64 MB: half of them should fit."""
    chance = random.Random(seed)
    cases = []
    for _ in range(count):
        workers, prefetch = chance.randint(1, 4), chance.randint(1, 4)
        batches = chance.choice((workers * prefetch + 3, chance.randint(1, 12)))
        flying = min(workers * prefetch + 3, batches + 1)
        total = int(64 * MB / flying * chance.uniform(0.7, 1.5))
        setting = (workers, prefetch, total, 1, chance.choice(SHARING), chance.choice((1, 2, 7, 50)))
        cases.append(_case(setting, batches, epochs=2, check=True))
    return cases


def _assert_checked(cases: list[dict[str, Any]]) -> None:
    answers = set()
    for case, real in _play(cases, "64m"):
        said, survived = real["check"], real["failure"] is None
        answers.add(said["verdict"])
        assert said["verdict"] in ("fits", "too-big") or said["codes"] == {"shm": "batch-overlap"}, (case, real)
        if said["verdict"] == "fits":
            assert survived, ("a wrong yes", case, real)
        elif said["verdict"] == "too-big" and survived:
            assert said["missing"] <= 2 * case["batch_pages"], ("a wrong no, far from the edge", case, real)
    assert answers >= {"fits", "too-big"}  # else the draw proved nothing


@pytest.mark.soak  # a few random settings are in test_real_check.py
def test_check_is_right_about_a_64_mb_shm_many_times() -> None:
    _assert_checked(_drawn(80, seed=1))
