"""find_batch_size: trials on a fake GPU and on the real CPU, their failures, and ranks that decide together."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import GB, MB, FakeCuda, FakeDevice, OutOfMemoryError
from freed_memory import return_freed_memory

from legroom.errors import DoesNotFit, RanksDisagree, TrialFailed, UsageError
from legroom.gpu import batch_trial_on_gpu, plot, search_batch_size
from legroom.gpu.batch_trial_in_child import ForkTrialRunner
from legroom.gpu.batch_trial_on_gpu import GpuTrialRunner, TrialResult
from legroom.gpu.rank_consensus import RankConsensus
from legroom.records.gpu_results import BatchFound, Trial

torch = pytest.importorskip("torch")
FIXED, EACH = 3 * GB, 20 * MB


@pytest.fixture(autouse=True)
def _fake_oom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        batch_trial_on_gpu, "is_oom", lambda problem: "gpu" if isinstance(problem, OutOfMemoryError) else None
    )


class FakeTraining:
    """A model of FIXED bytes (made by the first step) and EACH bytes a sample, on a fake GPU."""

    def __init__(self, cuda: FakeCuda, leaks: int = 0) -> None:
        self.cuda, self.leaks, self.made = cuda, leaks, False
        self.sizes: list[int] = []

    def step(self, batch: int, worst_case: int = 1) -> None:
        self.sizes.append(batch)
        if not self.made:
            self.cuda.take(FIXED)
            self.made = True
        size = EACH * batch * worst_case
        try:
            self.cuda.take(size)
        except OutOfMemoryError:
            if self.leaks:
                self.cuda.take(self.leaks)
            raise
        self.cuda.give(size)


def search(
    device: FakeDevice, step: Any, margin: float = 0.05, most: int | None = None, **more: Any
) -> tuple[list[Trial], int, list[str]]:
    runner = GpuTrialRunner(device, step, margin, **more)
    try:
        return search_batch_size.run_trials(runner, RankConsensus(NotDistributed()), margin, most)
    finally:
        runner.close()


class NotDistributed:
    def is_available(self) -> bool:
        return False


def test_search_on_a_gpu() -> None:
    cuda = FakeCuda(others=10 * GB)
    trials, bound, notes = search(FakeDevice(cuda), FakeTraining(cuda).step)
    assert bound == cuda.size - cuda.others - cuda.context
    border = int((0.95 * bound - FIXED) / EACH)
    best = max(trial.batch for trial in trials if trial.fits)
    assert border - best <= 0.03 * border and best <= border
    assert len(trials) <= 6 and not notes
    assert cuda.fraction == 1.0  # restored


def test_active_limit_is_the_bound_and_is_restored() -> None:
    cuda = FakeCuda()
    cuda.fraction = 0.25
    _, bound, _ = search(FakeDevice(cuda), FakeTraining(cuda).step)
    assert bound == 20 * GB and cuda.fraction == 0.25


def test_note_reports_memory_left_by_a_failed_trial() -> None:
    cuda = FakeCuda(10 * GB)
    runner = GpuTrialRunner(FakeDevice(cuda), FakeTraining(cuda, leaks=100 * MB).step, 0.05)
    assert runner.try_batch(2).trial.fits
    failed = runner.try_batch(10_000)
    assert not failed.trial.fits and failed.trial.left_over == 100 * MB
    assert "100 MB stayed allocated" in failed.notes[0]
    clean = GpuTrialRunner(FakeDevice(cuda), FakeTraining(cuda).step, 0.05)
    clean.try_batch(2)
    assert clean.try_batch(10_000).trial.left_over == 0


def test_step_error_is_raised_and_limit_restored() -> None:
    cuda = FakeCuda()

    def step(batch: int) -> None:
        raise ValueError("labels out of range")

    emptied = cuda.emptied
    with pytest.raises(ValueError, match="labels"):
        search(FakeDevice(cuda), step)
    assert cuda.emptied > emptied and cuda.fraction == 1.0


def test_uneven_steps_suggest_worst_case() -> None:
    cuda = FakeCuda()
    sizes = iter(range(1, 100))

    def step(batch: int) -> None:
        size = batch * next(sizes) * MB
        cuda.take(size)
        cuda.give(size)

    runner = GpuTrialRunner(FakeDevice(cuda), step, 0.05)
    assert "worst_case" in runner.try_batch(8).notes[0]
    named = GpuTrialRunner(FakeDevice(cuda), lambda batch, length: step(batch * length), 0.05, worst_case=3)
    assert not named.try_batch(8).notes


def test_retries_are_counted() -> None:
    cuda = FakeCuda()

    def step(batch: int) -> None:
        cuda.retries += 1

    assert GpuTrialRunner(FakeDevice(cuda), step, 0.05).try_batch(4).trial.retries == 2


@pytest.mark.parametrize(
    "arguments",
    [{}, {"step": 3}, {"step": len, "isolate": "a:b"}, {"isolate": "nonsense"}, {"step": len, "margin": 1.0},
     {"step": len, "margin": -0.1}, {"step": len, "max_batch": 0}, {"step": len, "effective_batch": 0}],
)  # fmt: skip
def test_invalid_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        search_batch_size.find_batch_size(**arguments)


# Ranks.


class FakeDistributed:
    """torch.distributed of rank 0 of 2; ``others`` holds rank 1's values for each reduction in turn."""

    ReduceOp = type("ReduceOp", (), {"MIN": "MIN", "MAX": "MAX"})

    def __init__(self, others: list[list[int]]) -> None:
        self.others = others

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self) -> int:
        return 2

    def get_backend(self) -> str:
        return "gloo"

    def all_reduce(self, tensor: Any, op: str) -> None:
        other = torch.tensor(self.others.pop(0))
        tensor.copy_((torch.minimum if op == "MIN" else torch.maximum)(tensor, other))


class FixedResult:
    measure = "test"
    rough = False

    def __init__(self, reading: TrialResult | Exception) -> None:
        self.reading = reading

    def try_batch(self, batch: int) -> TrialResult:
        if isinstance(self.reading, Exception):
            raise self.reading
        return self.reading

    def close(self) -> None:
        pass


RESULT = TrialResult(Trial(8, True, 500, 100, 600, 0), 1000)


def test_worst_rank_decides() -> None:
    combined = search_batch_size.try_on_all_ranks(
        FixedResult(RESULT), RankConsensus(FakeDistributed([[2, 900], [700, 90, 650, 3]])), 8
    )
    assert combined.bound == 900
    assert (combined.trial.peak, combined.trial.steady, combined.trial.reserved, combined.trial.retries) == (
        700,
        100,
        650,
        3,
    )
    failed = search_batch_size.try_on_all_ranks(
        FixedResult(RESULT), RankConsensus(FakeDistributed([[1, 1000], [0, 0, 0, 0]])), 8
    )
    assert not failed.trial.fits and failed.trial.why is not None and "another rank" in failed.trial.why


def test_error_on_one_rank_stops_all() -> None:
    with pytest.raises(TrialFailed, match="another rank"):
        search_batch_size.try_on_all_ranks(FixedResult(RESULT), RankConsensus(FakeDistributed([[0, 0]])), 8)
    with pytest.raises(ValueError, match="mine"):
        search_batch_size.try_on_all_ranks(
            FixedResult(ValueError("mine")), RankConsensus(FakeDistributed([[2, 1000]])), 8
        )


def test_ranks_with_different_arguments() -> None:
    with pytest.raises(RanksDisagree, match="max_batch"):
        RankConsensus(FakeDistributed([[64], [64]])).require_equal(max_batch=32)
    RankConsensus(FakeDistributed([[32], [32]])).require_equal(max_batch=32)


# On the real CPU, in child processes.


def test_cpu_trials_run_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_batch_size, "free_memory", lambda: (200 * MB, "test"))
    return_freed_memory()  # what is free in the inherited heap would be used first, and not be counted
    parent = os.getpid()

    def step(batch: int) -> None:
        assert os.getpid() != parent
        torch.ones(batch, 2 * MB, dtype=torch.uint8).clone()

    found = search_batch_size.find_batch_size(step, margin=0.1, device="cpu", effective_batch=440)
    assert abs(found.largest - 45) <= 3, found.trials  # 4 MB a sample in 180
    assert found.batch * found.accumulation == 440
    assert len(found.trials) <= 6
    assert found.per_sample == pytest.approx(4 * MB, rel=0.2)
    picture = plot(found)
    assert picture.startswith("<svg") and picture.count("<circle") == len(found.curve)


def test_cpu_step_errors_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_batch_size, "free_memory", lambda: (200 * MB, "test"))

    def step(batch: int) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        search_batch_size.find_batch_size(step, device="cpu")

    def too_big(batch: int) -> None:
        torch.empty(1 << 50)

    with pytest.raises(DoesNotFit, match="not even a batch of 1"):
        search_batch_size.find_batch_size(too_big, device="cpu")

    def dies(batch: int) -> None:
        os._exit(3)

    with pytest.raises(TrialFailed, match="exit code 3"):
        search_batch_size.find_batch_size(dies, device="cpu")


FACTORY = """
import torch
kept = []
def make():
    kept.append(torch.ones(10 << 20, dtype=torch.uint8))
    def step(batch, length=1):
        torch.ones(batch, length << 20, dtype=torch.uint8)
    return step
def broken():
    raise ValueError("no data here")
"""


def test_isolated_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factory_for_trials.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = search_batch_size.find_batch_size(
        isolate="factory_for_trials:make", device="cpu", max_batch=2, worst_case=20
    )
    assert found.batch == 2 and found.trials[0].peak is not None and found.trials[0].peak > 50 * MB
    assert "factory_for_trials" not in sys.modules
    with pytest.raises(TrialFailed, match="no data here"):
        search_batch_size.find_batch_size(isolate="factory_for_trials:broken", device="cpu")
    with pytest.raises(TrialFailed, match="JSON"):
        search_batch_size.find_batch_size(isolate="factory_for_trials:make", device="cpu", worst_case=object())


def test_keep_restores_state() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    from legroom.gpu.search_batch_size import SavedState

    with SavedState([model, optimizer]):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight, before["weight"])
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not optimizer.state and model.weight.grad is None


def test_batch_found_properties() -> None:
    found = BatchFound(
        4, 4, 1, 4, 1, 1000, 0.1, (Trial(2, True, 300), Trial(4, True, 500), Trial(9, False, None)), 100, 100.0, "x"
    )
    assert found.cap == 900 and found.predicted(6) == 700 and found.curve == ((2, 300), (4, 500))


def test_keep_restores_the_versions_of_modules_and_random_numbers_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Versioned(torch.nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    on_gpus = ["the state of one GPU"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(on_gpus))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", on_gpus.extend)
    with search_batch_size.SavedState([Versioned(2, 2)]):
        on_gpus.clear()
    assert seen == [7] and on_gpus == ["the state of one GPU"]


def test_an_effective_batch_that_no_rank_can_have_is_refused_before_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    class EightRanks(RankConsensus):
        def __init__(self) -> None:
            super().__init__()
            self.world_size = 8

    monkeypatch.setattr(search_batch_size, "RankConsensus", EightRanks)
    with pytest.raises(UsageError, match="8 ranks"):
        search_batch_size.find_batch_size(lambda _: pytest.fail("a trial ran"), effective_batch=100, device="cpu")


def test_a_trial_does_not_wait_for_processes_that_its_step_leaves(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def step(_: int) -> None:
        pid = os.fork()
        if pid == 0:
            time.sleep(120)
            os._exit(0)
        with pids.open("a") as file:
            file.write(f"{pid}\n")

    started = time.monotonic()
    try:
        assert ForkTrialRunner(step, 0.1, 1 << 40, "x").try_batch(1).trial.fits
        assert time.monotonic() - started < 60
    finally:
        for pid in pids.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def test_a_trial_process_finds_modules_in_the_order_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemError('not the library')")
    (tmp_path / "made_here.py").write_text("import random\ndef make():\n    return lambda batch: random.random()")
    monkeypatch.chdir(tmp_path)
    found = search_batch_size.find_batch_size(isolate="made_here:make", device="cpu", max_batch=2)
    assert found.batch == 2
