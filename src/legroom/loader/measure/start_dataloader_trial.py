"""Runs a trial (dataloader_trial.py) under a guard and reads its result: peak memory, or the pool that ran out."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from legroom.errors import DatasetFailed
from legroom.loader.measure.dataloader_trial import run
from legroom.loader.measure.import_dataset import FoundDataset
from legroom.loader.measure.measure_dataset_in_child import measured_from
from legroom.loader.measure.memory_guard_script import RESERVE
from legroom.loader.measure.start_memory_guard import (
    GuardedRun,
    become_guard,
    folder_of_earlier_run,
    fork_guarded,
    last_lines,
    module_command,
    read_result,
    run_guarded,
)
from legroom.messages import say
from legroom.records.workload import CopiedAttribute, LoaderTrial, Measured
from legroom.system.processes_and_threads import ExitStatus
from legroom.units import format_duration

_STEADY, _STEADY_BYTES = 0.01, 2 << 20  # growth in half of the batches that counts as none


def try_named(
    spec: str, collate: str | None, *, timeout: float, leaving: bool, measured: Measured | None,
    own: Mapping[str, Any] | None, known: bool, **settings: Any,
) -> LoaderTrial:  # fmt: skip
    """Run the loop over the dataset ``module:object``, or over tensors of ``sizes``, in a new interpreter.

    ``leaving``: this program has nothing else to do. It is replaced by the guard, so that the loop has all the memory
    that it will have, and starts again afterwards, when it reads ``measured``, ``own`` and the result
    (``tried_before``). ``own``: the settings of the DataLoader that the dataset is given as, if that is ``known``.
    """
    folder = Path(tempfile.mkdtemp(prefix="legroom-"))
    try:
        request = folder / "request"
        request.write_text(
            json.dumps({"spec": spec, "collate": collate, "measured": known, **settings}), encoding="utf-8"
        )
        line = module_command("legroom.loader.measure.dataloader_trial", folder)
        if leaving:
            fields = None if measured is None else asdict(measured)
            (folder / "measured").write_text(json.dumps({"measured": fields, "own": own}), encoding="utf-8")
            become_guard(line, folder, timeout, [sys.executable, "-m", "legroom", *sys.argv[1:]])
        return _result(spec, timeout, run_guarded(line, folder, timeout), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_object(found: FoundDataset, *, timeout: float, **settings: Any) -> LoaderTrial:
    """Run the loop over a dataset object, in a fork of this process."""
    folder = Path(tempfile.mkdtemp(prefix="legroom-"))

    def work() -> None:
        run(lambda: found, str(folder / "answer"), settings)

    try:
        ran = fork_guarded(work, folder, timeout)
        return replace(_result(type(found.dataset).__name__, timeout, ran, folder), forked=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tried_before(spec: str, timeout: float) -> tuple[Measured | None, Mapping[str, Any] | None, LoaderTrial] | None:
    """What this program measured and tried before it was replaced by the guard; None: it did not.

    Between them the settings of the DataLoader that the dataset is given as.
    """
    folder = folder_of_earlier_run()
    if folder is None:
        return None
    try:
        before = json.loads((folder / "measured").read_text(encoding="utf-8"))
        measured = None if before["measured"] is None else measured_from(before["measured"])
        return measured, before["own"], _result(spec, timeout, read_result(folder), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _notes(answer: Path) -> list[dict[str, Any]]:
    try:
        lines = answer.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    notes = []
    for line in lines:
        try:
            notes.append(json.loads(line))
        except ValueError:  # the last one, incomplete because of the kill
            break
    return notes


def _result(name: str, timeout: float, ran: GuardedRun, folder: Path) -> LoaderTrial:
    notes, output = _notes(folder / "answer"), last_lines(folder / "output")
    status, stopped = ran.status, ran.stopped
    error = next((note for note in notes if "error" in note), None)
    ended = next((note for note in notes if note.get("step") == "end"), None)
    epochs = [note for note in notes if "batches" in note]
    growth, over = _growth(ran, epochs)
    started = next((note for note in notes if note.get("step") == "start"), {"process": 0})
    found = LoaderTrial(
        ram=ran.ram if ended is None else ran.peak_at(ended["time"]),  # later it looks up what was copied, and collects
        shm=max((ran.shm, *(note["shm"] for note in epochs if "shm" in note))),
        fds=max((note["fds"] for note in epochs), default=0),
        batches=max((note["batches"] for note in epochs), default=0),
        process=started["process"],
        whole=bool(ended and ended["whole"]),
        filled=bool(epochs) and epochs[0].get("full") is True,  # then no worker has fewer batches to make
        waiting_shm=max((note["shm"] for note in epochs if note.get("full") is True), default=0),
        growth=growth,
        growth_batches=over,
        copied=tuple(CopiedAttribute(**one) for note in notes for one in note.get("attributes", ())),
    )
    # A worker of a stream drops a batch that was refused, and the loop ends without an error.
    if ended is not None and ran.reported is None:
        if not ended["collects"]:
            return found
        tried = any(note.get("step") == "collecting" for note in notes)
        return replace(
            found, collected=_collected(found, ran, notes, tried=tried), collection_expected=tried and ended["expected"]
        )
    if stopped == "time":
        why = say(
            "the trial run did not finish within {limit}; --timeout gives it more time", limit=format_duration(timeout)
        )
        return found.short_of(None, why)
    pool = stopped or (error["pool"] if error is not None else None)
    # A worker prints the reason; the loop only reports that the worker failed.
    pool = pool or ran.reported or ("ram" if ran.killed else None)
    restarted = any(note.get("step") == "epoch" for note in notes)
    if pool == "shm" and restarted and error is not None and error["semaphore"]:
        return replace(found, overlap=True)
    if pool is not None:
        return found.short_of(pool, error["error"] if error else "")
    if error is not None and error["lost"]:
        why = say(
            "a worker of the trial run closed its connection while it sent a batch ({error})", error=error["error"]
        )
        return found.short_of(None, why)
    lines = error["tail"] if error else output
    if error is None:
        how = say("unknown") if status is None else str(ExitStatus.of(status))
        lines = [say("the process ended before its first batch: {how}", how=how), *lines]
    raise DatasetFailed(
        say("loading batches from {name} with the DataLoader failed", name=name),
        why="\n".join(line for line in lines if line),
        fix=(say("first make one epoch of this DataLoader work by itself"),),
    )


def _collected(found: LoaderTrial, ran: GuardedRun, notes: list[dict[str, Any]], *, tried: bool) -> int:
    """The peak with full garbage collections; if that part was not finished, the most that it can be."""
    end = next((note for note in notes if note.get("step") == "collected"), None)
    if end is not None and end["whole"]:
        return max(found.ram, ran.peak_at(end["time"]))
    if tried and end is None and (ran.stopped == "ram" or ran.killed):  # more than there is
        return max(found.ram, ran.ram) + 2 * RESERVE
    workers: int = next(note["workers"] for note in notes if note.get("step") == "start")
    return max(found.ram + found.process * workers, ran.ram + 2 * RESERVE)


def _growth(ran: GuardedRun, epochs: list[dict[str, Any]]) -> tuple[int, int]:
    """How much the peak rose in the second half of the first epoch, and the number of batches in it."""
    first = [note for note in epochs if note["epoch"] == 0]
    if len(first) < 2:
        return 0, 0
    last = first[-1]
    half = max(
        (note for note in first if note["batches"] <= last["batches"] / 2),
        key=lambda note: int(note["batches"]),
        default=first[0],
    )
    before, after = ran.peak_at(half["time"]), ran.peak_at(last["time"])
    if after - before <= max(_STEADY_BYTES, _STEADY * after):
        return 0, 0
    return after - before, last["batches"] - half["batches"]
