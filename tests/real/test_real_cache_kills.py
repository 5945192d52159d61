"""SIGKILL at every step and at random moments, with others waiting and forked children alive."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_scenario_process import BUILD_STEPS, ScenarioProcess, small_file


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioProcess]:
    if sys.platform != "linux":
        pytest.skip("needs /dev/shm and /proc")
    scenarios = ScenarioProcess(tmp_path_factory.mktemp("scenarios"))
    yield scenarios
    scenarios.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return small_file(tmp_path_factory.mktemp("data"))


@pytest.mark.real()
@pytest.mark.parametrize("at", BUILD_STEPS)
def test_a_builder_killed_at_any_step_is_survived(scenarios: ScenarioProcess, small: tuple[Path, int], at: str) -> None:
    path, crc = small
    result = scenarios.play("kill_at", path=str(path), at=at, waiters=4, forks=2)
    assert result["signal"] == 9
    assert [one.get("crc") for one in result["results"]] == [crc] * 4, result["results"]
    assert result["strays"] == []
    assert result["whole"]
    assert (result["kept"], result["dropped"], result["left"]) == (0, 1, [])


@pytest.mark.real()
def test_builders_killed_at_random_moments_are_survived(scenarios: ScenarioProcess, small: tuple[Path, int]) -> None:
    path, crc = small
    result = scenarios.play("kill_randomly", path=str(path), seed=7, rounds=20, waiters=4, longest=0.05)
    assert result.get("crc") == crc, result
    assert result["signals"].count(9) > 7  # or the kills came too late to mean anything


@pytest.mark.real()
@pytest.mark.parametrize("forks", [0, 3])
def test_a_killed_users_lease_goes_with_the_last_of_its_processes(
    scenarios: ScenarioProcess, small: tuple[Path, int], forks: int
) -> None:
    result = scenarios.play("users_die", path=str(small[0]), forks=forks)
    assert result["refused"] == ["entry-in-use"] * (2 if forks else 1)
    assert result["at_once"] == "dropped"
    assert result["left"] == []


@pytest.mark.real()
def test_users_and_droppers_at_once(scenarios: ScenarioProcess, small: tuple[Path, int]) -> None:
    path, crc = small
    result = scenarios.play("churn", path=str(path), seed=3, seconds=4, users=4, droppers=2, least=10)
    for one in result["results"]:
        assert one.get("crcs") == [crc], one
        assert one["count"] >= 10
    assert all(one["dropped"] >= 10 for one in result["removed"]), result["removed"]
    assert result["clean_strays"] == [] and result["clean_left"] == []
