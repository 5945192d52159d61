"""The guard in a worker of Ray Train's, against a stand-in with the names and signatures of Ray's own."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from integrations.fake_watch import FakeWatch, filling
from torch.utils.data import DataLoader, TensorDataset

from legroom.errors import MissingPackage, UsageError
from legroom.integrations import ray as adapter
from legroom.integrations.ray import RayGuard, guarded


class Context:
    """Of ray.train.TrainContext, what an adapter may ask; nothing else is there."""

    __slots__ = ("local_rank", "workers")

    def __init__(self, local_rank: int, workers: int) -> None:
        self.local_rank, self.workers = local_rank, workers

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_world_size(self) -> int:
        return self.workers


class Train(ModuleType):
    """A module ``ray.train``: a wrong name is an AttributeError, a wrong argument a TypeError."""

    def __init__(self) -> None:
        super().__init__("ray.train")
        self.context: Context | Exception = Context(0, 1)
        self.reports: list[tuple[dict[str, Any], Any, str | None]] = []

    def get_context(self) -> Context:
        if isinstance(self.context, Exception):
            raise self.context
        return self.context

    def report(
        self, metrics: dict[str, Any], *, checkpoint: Any = None, checkpoint_dir_name: str | None = None
    ) -> None:
        assert type(metrics) is dict
        self.reports.append((metrics, checkpoint, checkpoint_dir_name))


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Train:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    package, made = ModuleType("ray"), Train()
    package.train = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.setitem(sys.modules, "ray.train", made)
    return made


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(32, 4)), batch_size=4)


def test_a_worker_is_watched_and_its_alarms_ride_with_its_own_reports(
    train: Train, watches: list[FakeWatch], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ray.train.legroom")
    mine = object()
    with guarded() as guard:
        guard.model_ready()
        found = guard.epoch(3, rows(), accumulation=2)
        assert found is not None and found.effective_batch == 8
        assert guard.step() is None
        watches[0].raise_alarm(filling(50))
        why = guard.step()
        assert why == "ram-filling in about 50 s"
        assert train.reports == []  # an alarm is no report: the other workers would have to make one too
        guard.report({"loss": 0.5}, checkpoint=mine, checkpoint_dir_name="step-2")
        guard.report({"loss": 0.4})
    assert train.reports == [
        ({"legroom/ram-filling": 1.0, "legroom/ram-filling/seconds_left": 50.0, "loss": 0.5}, mine, "step-2"),
        ({"loss": 0.4}, None, None),
    ]
    assert (watches[0].marks, watches[0].steps, watches[0].left) == (["epoch 3"], 2, 1)
    assert {record.name for record in caplog.records} == {"ray.train.legroom"}
    assert any("memory after the model" in record.message for record in caplog.records)


def test_of_an_alarm_that_came_again_the_worst_is_reported(train: Train, watches: list[FakeWatch]) -> None:
    with guarded(tune="off") as guard:
        for alarm in (filling(90), filling(30, "critical"), filling(60), filling(20, code="shm-filling")):
            watches[0].raise_alarm(alarm)
            guard.step()
        guard.report({})
    assert train.reports[0][0] == {
        "legroom/ram-filling": 2.0,
        "legroom/ram-filling/seconds_left": 30.0,
        "legroom/shm-filling": 1.0,
        "legroom/shm-filling/seconds_left": 20.0,
    }


def test_one_worker_of_a_machine_logs_the_block(
    train: Train, watches: list[FakeWatch], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="ray.train.legroom")
    monkeypatch.setattr(adapter, "process_group", lambda: (1, 2))
    train.context = Context(1, 2)
    with guarded(tune="off") as guard:
        guard.epoch(0)
        guard.step()
    assert caplog.records == []


def test_workers_that_cannot_agree_are_not_asked_one_by_one(
    train: Train, watches: list[FakeWatch], caplog: pytest.LogCaptureFixture
) -> None:
    """One of them alone in ray.train.report would wait for the others for ever."""
    train.context = Context(0, 2)
    with guarded(tune="off") as guard:
        assert "2 workers need a torch process group" in caplog.text
        watches[0].raise_alarm(filling(50))
        assert guard.step() is None
        guard.report({})
    assert "legroom/ram-filling" in train.reports[0][0]


def test_workers_with_a_process_group_are_asked(
    train: Train, watches: list[FakeWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "process_group", lambda: (0, 2))
    train.context = Context(0, 2)
    with guarded(tune="off") as guard:
        watches[0].raise_alarm(filling(50))
        assert guard.step() == "ram-filling in about 50 s"


def test_the_loader_that_ray_wrapped_is_the_one_that_changes(
    train: Train, watches: list[FakeWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapped(DataLoader[Any]):
        """As ray.train.torch.prepare_data_loader wraps: attributes are copied, the inner one is iterated."""

        def __init__(self, base: DataLoader[Any]) -> None:
            self.__dict__.update(base.__dict__)
            self._dataloader = base

    inner = rows()
    given: list[Any] = []
    guard = RayGuard()
    monkeypatch.setattr(guard.guard, "epoch", lambda *asked: given.append(asked))
    guard.epoch(0, Wrapped(inner))
    guard.epoch(1, inner, accumulation=4)
    guard.epoch(2)
    assert given == [(0, inner, 1), (1, inner, 4), (2, None, 1)]


@pytest.mark.parametrize("raised", [RuntimeError("not in a worker"), DeprecationWarning("not in a worker")])
def test_outside_a_worker_the_error_names_what_to_use(
    train: Train, watches: list[FakeWatch], raised: Exception
) -> None:
    train.context = raised
    with pytest.raises(UsageError, match="not a Ray Train worker") as caught, guarded():
        pass
    assert "not in a worker" in str(caught.value)
    assert any("legroom.integrations.guard.Guard" in fix for fix in caught.value.fix)
    assert watches == []


def test_a_second_start_does_nothing(train: Train, watches: list[FakeWatch]) -> None:
    with guarded() as guard:
        guard.start()
    assert len(watches) == 1


def test_without_ray_the_error_names_what_to_install(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.train"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackage, match="package ray is needed") as caught:
        guarded()
    assert caught.value.fix == ("pip install 'ray[train]'",)
