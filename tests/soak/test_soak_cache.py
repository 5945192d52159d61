"""What takes long: hundreds of random kills, minutes of coming and going."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_scenario_process import ScenarioProcess, small_file


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return small_file(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioProcess]:
    scenarios = ScenarioProcess(tmp_path_factory.mktemp("scenarios"))
    yield scenarios
    scenarios.close()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_builders_killed_at_300_random_moments_are_survived(
    scenarios: ScenarioProcess, small: tuple[Path, int], seed: int
) -> None:
    path, crc = small
    for part in range(6):
        result = scenarios.play(
            "kill_randomly", path=str(path), seed=100 * seed + part, rounds=50, waiters=4, longest=0.05
        )
        assert result.get("crc") == crc, result


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_minutes_of_users_and_droppers(scenarios: ScenarioProcess, small: tuple[Path, int]) -> None:
    path, crc = small
    result = scenarios.play("churn", path=str(path), seed=11, seconds=50, users=6, droppers=3)
    for one in result["results"]:
        assert one.get("crcs") == [crc], one
    assert result["clean_strays"] == [] and result["clean_left"] == []
