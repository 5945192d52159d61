"""How often a process is sampled: within a share of its time, however busy the machine is, and however long it loads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from legroom.leak import memory_recorder
from legroom.leak.memory_recorder import Recorder

COST = 0.01  # seconds of CPU time for a sample


def _gap(recorder: Recorder, now: float) -> float:
    recorder._samples += 1
    recorder._plan(now, COST)
    return recorder._due - now


def _stepping(folder: Path, monkeypatch: pytest.MonkeyPatch, *, cpu: float) -> Recorder:
    """A process in its 100th second since its first step, in which it had so much CPU time. The clock stands still."""
    now, began = time.monotonic(), time.process_time()
    monkeypatch.setattr(memory_recorder.time, "monotonic", lambda: now)
    recorder = Recorder(str(folder))
    recorder.running = True
    monkeypatch.setattr(Recorder, "_sample_safely", lambda self, **_: None)
    for _ in range(60):  # it has been sampled by the clock while it loaded its model
        _gap(recorder, time.monotonic())
    for _ in range(4):
        recorder._count("script", 1)
    assert recorder._first_step_at is not None
    recorder._first_step_at = now - 100.0
    monkeypatch.setattr(memory_recorder.time, "process_time", lambda: began + cpu)
    recorder._cpu_at_first = began
    return recorder


def test_samples_before_the_first_step_do_not_use_up_those_that_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = _stepping(tmp_path, monkeypatch, cpu=0.1)
    recorder._cost = 100.0
    for _ in range(40):
        assert _gap(recorder, time.monotonic()) < 5.0
    assert _gap(recorder, time.monotonic()) > 100.0  # then the share counts


@pytest.mark.parametrize("cpu", [100.0, 5.0])
def test_a_busy_machine_has_as_many_samples_for_its_cpu_time_as_an_idle_one(
    cpu: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = _stepping(tmp_path, monkeypatch, cpu=cpu)
    recorder._samples, recorder._cost = 1000, 0.6 + recorder.share * cpu
    gap = _gap(recorder, time.monotonic())
    assert gap == pytest.approx(max(3.0, COST / recorder.share * 100.0 / cpu), rel=0.1)
