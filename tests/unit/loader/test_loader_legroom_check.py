"""The verdict by a trial run: what chance decides is neither a yes nor a no, and what the notes of a trial mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines import MB, healthy, with_pool

from legroom.advice.job_settings_to_workload import Batch, Demand
from legroom.loader.legroom_check import _judged_by_trial, _notes
from legroom.loader.measure.measure_in_child import _result
from legroom.loader.measure.start_memory_guard import GuardedRun
from legroom.records.workload import LoaderTrial, Need, Plan

BATCH = Batch((8 * MB,), 8, "measured", rows=800)
TRIAL = LoaderTrial(
    ram=300 * MB, shm=40 * MB, fds=20, batches=100, process=150 * MB, whole=True, filled=True, waiting_shm=40 * MB
)


def _judged(trial: LoaderTrial, *, ram: int = 1000, shm: int = 1000, loader: str = "torch") -> Plan:
    machine = with_pool(with_pool(healthy(), "ram", ram * MB, 0, ram * MB), "shm", shm * MB, 0, shm * MB)
    return _judged_by_trial(Demand(num_workers=2, loader_kind=loader), BATCH, trial, machine, (0.001, 0.001))[0]


@pytest.mark.parametrize("loader", ["torch", "legroom"])
def test_a_trial_that_was_not_finished_is_no_yes(loader: str) -> None:
    assert _judged(TRIAL, loader=loader).verdict == "fits"
    found = _judged(TRIAL.short_of(None, "its time was over"), loader=loader)
    assert found.verdict == "unknown" and found.codes == {"ram": "trial-unfinished"}
    assert "its time was over" in found.unknown["ram"]
    assert _judged(TRIAL.short_of(None, "its time was over"), loader=loader, ram=299).verdict == "too-big"


def test_a_trial_whose_slots_were_never_full_is_no_yes() -> None:
    """What further slots need was not seen; torch's queues are filled up by arithmetic."""
    waiting = replace(TRIAL, filled=False)
    found = _judged(waiting, loader="legroom")
    assert found.verdict == "unknown" and found.codes == {"ram": "trial-unfinished"}
    assert _judged(waiting, loader="torch").verdict == "fits"


@pytest.mark.parametrize(("ram", "said"), [(299, "too-big"), (330, "unknown"), (420, "fits")])
def test_a_full_garbage_collection_is_in_a_yes_and_not_in_a_no(ram: int, said: str) -> None:
    found = _judged(replace(TRIAL, collected=400 * MB), ram=ram)
    assert found.verdict == said
    if said == "unknown":
        assert found.codes == {"ram": "garbage-collection"} and "gc.freeze()" in found.unknown["ram"]
    assert (found.need.ram > 400 * MB) is (said == "fits")


@pytest.mark.parametrize(("ram", "said"), [(299, "too-big"), (330, "too-big"), (420, "fits")])
def test_a_full_garbage_collection_that_is_expected_is_in_a_no_too_and_the_fix_avoids_it(ram: int, said: str) -> None:
    found = _judged(replace(TRIAL, collected=400 * MB, collection_expected=True), ram=ram)
    assert found.verdict == said and found.need.ram > 400 * MB
    assert any("gc.freeze()" in fix for fix in found.fix) is (ram == 330)  # below 300 MB it does not help


@pytest.mark.parametrize(("shm", "said"), [(39, "too-big"), (44, "unknown"), (49, "fits")])
def test_a_batch_that_is_there_by_chance_is_in_a_yes_and_not_in_a_no(shm: int, said: str) -> None:
    for seen in (40, 48):  # the trial may have met it or not: the answer is the same
        found = _judged(replace(TRIAL, shm=seen * MB), shm=shm)
        assert found.verdict == said, seen
        assert found.codes == ({"shm": "batch-overlap"} if said == "unknown" else {})


def _answered(folder: Path, *notes: dict[str, Any], **ran: Any) -> LoaderTrial:
    (folder / "answer").write_text("".join(json.dumps({"time": at, **note}) + "\n" for at, note in enumerate(notes)))
    history = ((0.5, 200 * MB), (2.5, 240 * MB), (4.5, 300 * MB))
    found = {"status": 0, "stopped": None, "ram": 300 * MB, "shm": 50 * MB, "history": history, "killed": False, **ran}
    return _result("data", 60, GuardedRun(**found), folder)


START = {"step": "start", "process": 100 * MB, "workers": 2}
PAUSE = {"step": "batch", "epoch": 0, "batches": 1, "fds": 9, "full": True, "shm": 40 * MB}
EPOCH = {"step": "epoch", "epoch": 0, "batches": 4, "fds": 9}
END = {"step": "end", "whole": True, "collects": True, "expected": False}
COLLECTING = {"step": "collecting"}


def test_the_peak_before_and_with_full_collections(tmp_path: Path) -> None:
    found = _answered(tmp_path, START, PAUSE, EPOCH, END, COLLECTING, {"step": "collected", "whole": True})
    assert (found.ram, found.collected, found.waiting_shm, found.filled) == (240 * MB, 300 * MB, 40 * MB, True)
    without = _answered(tmp_path, START, PAUSE, EPOCH, {**END, "collects": False})
    assert (without.ram, without.collected) == (240 * MB, 0)


def test_what_the_trial_does_after_its_loop_is_not_the_loops_need(tmp_path: Path) -> None:
    """It looks up which attributes were copied: if memory runs out then, the loop had fitted."""
    found = _answered(tmp_path, START, PAUSE, EPOCH, {**END, "collects": False}, stopped="ram", status=None)
    assert found.ram == 240 * MB and found.short is None and found.unfinished is None


@pytest.mark.parametrize("how", [{"stopped": "ram", "status": None}, {"stopped": "time", "status": None}, {}])
def test_full_collections_that_were_not_finished_count_with_all_that_can_be_copied(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    """Nor is it known why memory ran out if they had not begun."""
    last = [] if how else [COLLECTING, {"step": "collected", "whole": False}]
    found = _answered(tmp_path, START, PAUSE, EPOCH, END, *last, **how)
    assert found.ram == 240 * MB and found.collected == 440 * MB and found.short is None and found.unfinished is None


@pytest.mark.parametrize("how", [{"stopped": "ram", "status": None}, {"killed": True}])
def test_full_collections_that_run_out_of_memory_need_more_than_there_is_and_not_all_that_can_be_copied(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    found = _answered(tmp_path, START, PAUSE, EPOCH, {**END, "expected": True}, COLLECTING, **how)
    assert found.ram == 240 * MB and 300 * MB < found.collected < 310 * MB and found.collection_expected
    before = _answered(tmp_path, START, PAUSE, EPOCH, {**END, "expected": True}, **how)  # they had not begun
    assert not before.collection_expected


def test_a_pool_that_ran_out_before_is_a_no_all_the_same(tmp_path: Path) -> None:
    assert _answered(tmp_path, START, PAUSE, EPOCH, END, reported="shm").short == "shm"
    assert _answered(tmp_path, START, PAUSE, EPOCH, stopped="ram", status=None).short == "ram"


@pytest.mark.parametrize("workers", [0, 2])
def test_files_of_others_in_shm_are_noted(workers: int) -> None:
    demand, trial = (
        Demand(num_workers=workers, process_ram=MB),
        LoaderTrial(ram=MB, shm=MB, fds=9, batches=9, process=MB, whole=True),
    )
    nothing = Need(terms=(), shm=0, ram=0, pinned=0, fds=0, disk=0, gpu=0)
    found = [_notes(demand, None, None, trial, nothing, tries=True, others_shm=others) for others in (0, 5 * MB)]
    assert [any("files of other processes, 5 MB" in note for note in notes) for notes in found] == [False, workers > 0]
