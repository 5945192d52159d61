"""A trial run of a loop below a guard: what it takes at its peak, or what it runs out of.

Covers: starting it (trial.py), reading what it got done, which pool ran out. Does not cover: watching it (meter.py),
the verdict (preflight.py).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from legroom.errors import DatasetFailed
from legroom.loader.measure.apart import last_words
from legroom.loader.measure.guarded import Watched, become_guard, earlier_folder, finished, forked, guarded
from legroom.records import Measured, Transport, Trial
from legroom.system.child_processes import ExitStatus
from legroom.units import format_duration
from legroom.words import say

_STEADY, _STEADY_BYTES = 0.01, 2 << 20  # growth in half of the batches tried that counts as none


def why_not() -> str | None:
    """Why no trial can be run here, or None."""
    from importlib.util import find_spec

    return None if find_spec("torch") is not None else say("torch is not installed")


def try_named(
    spec: str, collate: str | None, *, timeout: float, leaving: bool, measured: Measured | None, **asked: Any
) -> Trial:
    """The loop of the dataset that ``module:object`` names, or of tensors of ``sizes``, in a new interpreter.

    ``leaving``: this program has nothing else to do meanwhile. It becomes the guard, so that the loop has the memory it
    will have, and starts again when that is through; what was ``measured`` it finds then.
    """
    folder = Path(tempfile.mkdtemp(prefix="legroom-"))
    try:
        request = folder / "request"
        request.write_text(json.dumps({"spec": spec, "collate": collate, **asked}), encoding="utf-8")
        line = [sys.executable, "-m", "legroom.loader.measure.trial", str(request), str(folder / "answer")]
        if leaving:
            told = None if measured is None else asdict(measured)
            (folder / "measured").write_text(json.dumps(told), encoding="utf-8")
            become_guard(line, folder, timeout, [sys.executable, "-m", "legroom", *sys.argv[1:]])
        return _result(spec, timeout, guarded(line, folder, timeout), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_object(dataset: Any, collate_fn: Any, *, timeout: float, **asked: Any) -> Trial:
    """The loop of a dataset object, in a fork of this process."""
    from legroom.loader.measure.trial import run

    folder = Path(tempfile.mkdtemp(prefix="legroom-"))

    def work() -> None:
        run(lambda: (dataset, collate_fn), str(folder / "answer"), asked)

    try:
        ran = forked(work, folder, timeout)
        return replace(_result(type(dataset).__name__, timeout, ran, folder), forked=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tried_before(spec: str, timeout: float) -> tuple[Measured | None, Trial] | None:
    """What this program measured and tried before it became itself again; None: it did not."""
    folder = earlier_folder()
    if folder is None:
        return None
    try:
        told = json.loads((folder / "measured").read_text(encoding="utf-8"))
        measured = None
        if told is not None:
            way = told.pop("transport")
            tensors = tuple(told.pop("tensors"))
            measured = Measured(tensors=tensors, transport=Transport(**way) if way else None, **told)
        return measured, _result(spec, timeout, finished(folder), folder)
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
        except ValueError:  # the last one, cut short by the kill
            break
    return notes


def _result(name: str, timeout: float, ran: Watched, folder: Path) -> Trial:
    notes, words = _notes(folder / "answer"), last_words(folder / "output")
    status, stopped = ran.status, ran.stopped
    error = next((note for note in notes if "error" in note), None)
    ended = next((note for note in notes if note.get("step") == "end"), None)
    epochs = [note for note in notes if "batches" in note]
    growth, over = _growth(ran, epochs)
    found = Trial(
        ram=ran.ram,
        shm=ran.shm,
        fds=max((note["fds"] for note in epochs), default=0),
        batches=max((note["batches"] for note in epochs), default=0),
        process=next((note["process"] for note in notes if note.get("step") == "start"), 0),
        whole=bool(ended and ended["whole"]),
        filled=bool(epochs) and epochs[0].get("full") is True,  # by then no worker has fewer batches to make
        growth=growth,
        growth_batches=over,
    )
    # A worker of a stream drops a batch that was refused, and the loop ends well without it.
    if ended is not None and stopped is None and ran.reported is None:
        return found
    if stopped == "time":
        why = say(
            "the trial run was not finished within {limit} (--timeout gives it more time)",
            limit=format_duration(timeout),
        )
        return found.short_of(None, why)
    pool = stopped or (error["pool"] if error is not None else None)
    pool = (
        pool or ran.reported or ("ram" if ran.killed else None)
    )  # a worker writes the reason, the loop an echo of it
    restarted = any(note.get("step") == "epoch" for note in notes)
    if pool == "shm" and restarted and error is not None and error["semaphore"]:
        return replace(found, overlap=True)
    if pool is not None:
        return found.short_of(pool, error["error"] if error else "")
    if error is not None and error["lost"]:
        why = say(
            "a worker of the trial run closed its connection while it handed over a batch ({error})",
            error=error["error"],
        )
        return found.short_of(None, why)
    lines = error["tail"] if error else words
    if error is None:
        how = say("unknown") if status is None else str(ExitStatus.of(status))
        lines = [say("the process ended before it gave a batch: {how}", how=how), *lines]
    raise DatasetFailed(
        say("drawing batches from {name} through the loader failed", name=name),
        why="\n".join(line for line in lines if line),
        fix=(say("make one epoch of this loader work on its own first"),),
    )


def _growth(ran: Watched, epochs: list[dict[str, Any]]) -> tuple[int, int]:
    """By how much the peak rose in the second half of the first epoch's batches, and how many those are."""
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
