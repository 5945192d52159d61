"""What processes take before they hold data: measured for a demand that only states its bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from legroom.advice.job_settings_to_workload import Demand
from legroom.advice.memory_need import SPARE
from legroom.loader import legroom_check, measure_process_memory
from legroom.loader.measure_process_memory import BareProcess, FreeMemory, bare_process, with_bare_processes

MB = 1 << 20
FOUND = BareProcess(process=146 * MB, forked=11 * MB)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the command line: this process has not imported torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(measure_process_memory, "bare_process", lambda _: FOUND)


@pytest.mark.parametrize(("method", "each"), [("fork", 11 * MB), ("spawn", 146 * MB), ("forkserver", 146 * MB)])
def test_a_worker_that_is_not_forked_takes_as_much_as_a_process(
    method: str, each: int, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_process_memory, "start_method", lambda: method)
    found = with_bare_processes(Demand(num_workers=4), 1.0)
    assert (found.worker_ram, found.process_ram) == (each, 146 * MB)
    assert method in found.worker_ram_source and "imported torch" in found.process_ram_source


def test_what_was_given_of_the_process_stays(elsewhere: None) -> None:
    assert with_bare_processes(Demand(num_workers=4, process_ram=5), 1.0).process_ram == 5


def test_what_could_not_be_measured_is_not_counted(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_process_memory, "bare_process", lambda _: BareProcess())
    assert with_bare_processes(Demand(num_workers=4), 1.0) == Demand(num_workers=4)


def test_a_process_that_had_to_be_stopped_is_more_than_is_free(
    elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = iter([FreeMemory(60 * MB, "here"), FreeMemory(50 * MB, "here"), FreeMemory(SPARE - 1, "here")])
    monkeypatch.setattr(measure_process_memory, "free_memory_now", lambda: next(rooms))
    # A child that does not end by itself: another could be done before the third reading.
    pipes = {"DEVNULL": subprocess.DEVNULL, "PIPE": subprocess.PIPE}
    start = subprocess.Popen
    fake = SimpleNamespace(Popen=lambda _, **given: start(["sleep", "600"], **given), **pipes)
    monkeypatch.setattr(measure_process_memory, "subprocess", fake)
    stopped = measure_process_memory._measured_process(60.0)
    assert stopped == BareProcess(process=60 * MB - SPARE + 1, stopped=True)
    monkeypatch.setattr(measure_process_memory, "bare_process", lambda _: stopped)
    found = with_bare_processes(Demand(num_workers=4), 1.0)
    assert found.process_ram is not None and found.process_ram > 60 * MB
    assert "was stopped" in found.process_ram_source


def test_torch_is_imported_once_whatever_the_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def measured(timeout: float) -> BareProcess:
        asked.append(timeout)
        return FOUND if len(asked) > 1 else BareProcess()

    monkeypatch.setattr(measure_process_memory, "_bare", [])
    monkeypatch.setattr(measure_process_memory, "_measured_process", measured)
    assert bare_process(0.1) == BareProcess()  # not in that time
    assert bare_process(60.0) == bare_process() == bare_process(5.0) == FOUND and asked == [0.1, 60.0]


def test_the_training_process_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(measure_process_memory, "start_method", lambda: "fork")
    monkeypatch.setattr(measure_process_memory, "idle_worker", lambda: 12 * MB)
    found = with_bare_processes(Demand(num_workers=4), 1.0)
    assert found.worker_ram == 12 * MB and found.process_ram is None
    assert "this process" in found.worker_ram_source


def test_check_shows_the_figure_and_where_it_was_measured(
    elsewhere: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from legroom.cli.main import run

    monkeypatch.setattr(measure_process_memory, "start_method", lambda: "fork")
    monkeypatch.setattr(legroom_check, "_tried", lambda *_, **__: None)  # as without torch
    run(["check", "--batch", "4", "--sample-bytes", "1KB", "--workers", "3", "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    terms = {term["source"]: term for term in report["terms"] if "measured" in term["source"]}
    assert sorted(term["bytes"] for term in terms.values()) == [33 * MB, 146 * MB]
    assert any("3 workers of 11 MB" in term["what"] for term in terms.values())
    assert any("memory of the dataset object" in note for note in report["notes"])
    assert not any("--process-ram" in note or "was not measured" in note for note in report["notes"])


def test_another_machine_is_not_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from rigs import TREES

    from legroom.probe.host_files_and_syscalls import Host

    monkeypatch.setattr(legroom_check, "with_bare_processes", lambda *_: pytest.fail("measured"))
    plan = legroom_check.check(batch_size=4, num_workers=2, sample_bytes=1, host=Host.at(TREES / "docker-v2"))
    assert any("worker processes was not measured" in note for note in plan.notes)


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
def test_a_real_one() -> None:
    pytest.importorskip("torch")
    found = bare_process()
    assert found.process is not None and found.forked is not None and not found.stopped
    assert found.process > 30 * MB and MB < found.forked < found.process
