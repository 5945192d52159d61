"""How often a process is sampled, within a share of its time; what is left when a recording has ended."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from legroom.leak import leak_report, memory_recorder
from legroom.leak import shm_files_by_line as shm
from legroom.leak.memory_recorder import Recorder
from legroom.records.memory_growth import SourceLine
from legroom.system import training_step_listeners

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


def test_a_recording_that_has_ended_keeps_nothing(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path))
    recorder.start()
    recorder._window_holders, recorder._window_sizes = {0: [1]}, {0: 1}  # the block ends within a window
    recorder.stop()
    assert recorder._window_holders == {} == recorder._window_sizes
    gone = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert gone() is None


def test_after_an_error_the_end_removes_what_was_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(str(tmp_path))
    recorder.start()
    recorder.torch.install(imported=True)
    recorder._window_holders = {0: [1]}
    monkeypatch.setattr(recorder, "_sample", lambda **_: 1 / 0)
    recorder._sample_safely()
    assert not recorder.running and recorder._window_holders == {}
    recorder.stop()
    assert (
        not recorder.torch.installed and not training_step_listeners.listeners and recorder._shm not in shm._listening
    )
    recorder._writer.write("note", text="too late")
    assert "too late" not in recorder._writer.path.read_text() and "ZeroDivision" in recorder._writer.path.read_text()


def test_one_audit_hook_serves_all_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(shm.sys, "addaudithook", hooks.append)
    monkeypatch.setattr(shm, "_INSIDE", f"{tmp_path}/")
    monkeypatch.setattr(shm, "_listening", [])
    shm._add_hook.cache_clear()
    one, other = shm.ShmFiles(), shm.ShmFiles()
    one.listen()
    other.listen()
    one.stop()
    (hook,) = hooks
    (tmp_path / "made").touch()
    hook("open", (str(tmp_path / "made"), "wb", os.O_WRONLY))
    assert not one.by_line() and len(other.by_line()) == 1
    other.stop()
    shm._add_hook.cache_clear()


def test_a_report_in_a_directory_that_was_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def relpath(path: str) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(leak_report.os.path, "relpath", relpath)
    assert leak_report.place(SourceLine("/work/train.py", 31)) == "/work/train.py:31"
