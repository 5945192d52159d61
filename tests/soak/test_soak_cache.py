"""What takes long: hundreds of random kills, minutes of coming and going."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "cache"))
from cache_scenario_process import ScenarioProcess, small_file


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return small_file(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioProcess]:
    stage = ScenarioProcess(tmp_path_factory.mktemp("stage"))
    yield stage
    stage.close()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_builders_killed_at_300_random_moments_are_survived(
    stage: ScenarioProcess, small: tuple[Path, int], seed: int
) -> None:
    path, crc = small
    for part in range(6):
        result = stage.play(
            "kill_randomly", path=str(path), seed=100 * seed + part, rounds=50, waiters=4, longest=0.05
        )
        assert result.get("crc") == crc, result


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_minutes_of_users_and_droppers(stage: ScenarioProcess, small: tuple[Path, int]) -> None:
    path, crc = small
    result = stage.play("churn", path=str(path), seed=11, seconds=50, users=6, droppers=3)
    for one in result["results"]:
        assert one.get("crcs") == [crc], one
    assert result["clean_strays"] == [] and result["clean_left"] == []
