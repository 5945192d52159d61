"""Measures a dataset, and tries a DataLoader, in a child process: it may raise, hang, print, crash or exhaust memory.

The parent starts the child (a new interpreter for a named dataset, a fork for an object), ends it after a time limit
and explains how it failed. It owns the child and all that the child started (its own session, killed as a whole), and a
temporary directory with the request, the answer and the child's output.

The child is run as ``python -m legroom.loader.measure.measure_in_child REQUEST ANSWER``, with JSON files. The
dataset's own output goes to another file, so it is never taken for the answer. A trial run (dataloader_trial.py) is
a child, too; its result is the peak memory, or the pool that ran out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from legroom.errors import BatchSizeNeeded, DatasetFailed, DatasetOutOfMemory, LegroomError, MissingKey, MissingPackage
from legroom.loader.dataloader.explain_start_failure import explain_full_shm
from legroom.loader.measure import dataloader_trial, memory_guard_script
from legroom.loader.measure.dataloader_throughput import run_loader
from legroom.loader.measure.dataloader_trial import prepare_to_be_killed, traceback_tail
from legroom.loader.measure.dataset_bytes_and_seconds import FIX, measure
from legroom.loader.measure.import_dataset import (  # fmt: skip
    CannotImport,
    FoundDataset,
    chosen_batch_size,
    find_dataset,
    split_name,
)
from legroom.loader.measure.memory_guard_script import RESERVE
from legroom.loader.measure.start_memory_guard import (
    GuardedRun,
    become_guard,
    child_environment,
    folder_of_earlier_run,
    fork_guarded,
    last_lines,
    module_command,
    read_result,
    run_guarded,
)  # fmt: skip
from legroom.messages import say
from legroom.records.loader_settings_and_flags import CompleteLoaderSettings
from legroom.records.workload import CopiedAttribute, LoaderTrial, Measured, Transport
from legroom.system.atomic_file import replace_file
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.system.processes_and_threads import ExitStatus
from legroom.units import format_duration, format_size

_LIMIT_S = 60.0  # until a run of a DataLoader counts as failed
AS_LOADER = "as-loader"  # the transport of the DataLoader that is named, or Legroom's
_STEADY, _STEADY_BYTES = 0.01, 2 << 20  # growth in half of the batches that counts as none


def measure_dataset(
    spec: str,
    *,
    batch_size: int | None = None,
    collate: str | None = None,
    timeout: float = 60,
    seconds: float = 2.0,
    transport: str | None = None,
    method: str | None = None,
) -> Measured:
    """Measure the dataset ``module:object`` in a child; DatasetFailed explains how that failed.

    The object may be a dataset, a function that returns one, or a DataLoader, whose own collate function is used, and
    whose batch size if none is given.
    ``transport`` ("torch", "legroom" or AS_LOADER) also measures what it costs to send a batch from a worker.
    """
    split_name(spec)
    if collate:
        split_name(collate, collate=True)
    answer = in_child(
        spec, timeout, task="measure", spec=spec, collate=collate, batch_size=batch_size,
        seconds=seconds, transport=transport, method=method,
    )  # fmt: skip
    return measured_from(answer)


def measure_object(dataset: Any, *, timeout: float, **how: Any) -> Measured | None:
    """Measure a dataset object in a fork of this process; None: it raised there, and may not in this process."""

    def run(folder: Path) -> GuardedRun:
        def work() -> None:
            _write_answer(lambda: asdict(measure(dataset, **how)), str(folder / "answer"))

        return fork_guarded(work, folder, timeout)

    answer = _answer(type(dataset).__name__, timeout, run)
    return None if "error" in answer else measured_from(answer["result"])


def run_loader_in_child(dataset: Any, collate_fn: Callable[[Any], Any] | None, settings: CompleteLoaderSettings,
                        step_seconds: float, loader: Any = None) -> float | str:  # fmt: skip
    """``run_loader`` of a dataset object in a fork of this process; a string describes a failure.

    A setting that needs more memory than there is ends the fork, not this process. Where memory cannot be watched, it
    runs here.
    """
    run_it = partial(run_loader, dataset, collate_fn, settings, step_seconds=step_seconds, loader=loader)
    if sys.platform != "linux":
        return run_it()

    def run(folder: Path) -> GuardedRun:
        return fork_guarded(lambda: _write_answer(lambda: {"rate": run_it()}, str(folder / "answer")), folder, _LIMIT_S)

    try:
        answer = _answer(type(dataset).__name__, _LIMIT_S, run)
    except DatasetFailed as problem:
        return problem.why
    if "error" in answer:
        return str(answer["tail"][-1] if answer["tail"] else answer["error"]["message"])
    return float(answer["result"]["rate"])


def in_child(
    name: str, timeout: float, *, environment: Mapping[str, str] | None = None, **request: Any
) -> dict[str, Any]:
    """The child's answer to a request about the dataset called ``name``; ``environment``: variables to change."""

    os.getcwd()  # raises where it was removed: the child, which imports from it, would not say so

    def run(folder: Path) -> GuardedRun:
        path = folder / "request"
        where = {"loader_file": str(folder / "loader")} if request["task"] == "measure" else {}
        path.write_text(json.dumps({**request, **where}), encoding="utf-8")
        line = module_command("legroom.loader.measure.measure_in_child", folder)
        run_it = run_guarded if sys.platform == "linux" else _run_unguarded
        return run_it(line, folder, timeout, environment or {})

    answer = _answer(name, timeout, run)
    if "error" in answer:
        raise _raised(name, answer)
    result: dict[str, Any] = answer["result"]
    return result


def measured_from(fields: dict[str, Any]) -> Measured:
    """The record from its JSON."""
    transport = fields.pop("transport")
    return Measured(
        **{**fields, "tensors": tuple(fields["tensors"]), "transport": Transport(**transport) if transport else None}
    )


def _answer(name: str, timeout: float, run: Callable[[Path], GuardedRun]) -> dict[str, Any]:
    """What a child wrote to a folder of its own; an error if it wrote nothing."""
    with tempfile.TemporaryDirectory(prefix="legroom-") as path:
        folder = Path(path)
        ran = run(folder)
        try:
            answer: dict[str, Any] = json.loads((folder / "answer").read_text(encoding="utf-8"))
        except OSError:
            if ran.stopped in ("ram", "shm") or ran.killed:
                raise _out_of_memory(name, ran, folder) from None
            raise _crashed(name, ran.status, timeout, last_lines(folder / "output")) from None
    return answer


def _run_unguarded(line: list[str], folder: Path, timeout: float, environment: Mapping[str, str]) -> GuardedRun:
    """On macOS and Windows, where memory cannot be watched."""
    with (folder / "output").open("wb") as sink:
        child = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
            env={**child_environment(), **environment}, start_new_session=hasattr(os, "setsid"),
        )  # fmt: skip
        try:
            status: int | None = child.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if hasattr(os, "killpg"):
                memory_guard_script.end_group(child.pid, reaped=child.returncode is not None)
            else:
                child.kill()
            child.wait()
    return GuardedRun(status, None if status is not None else "time", 0, 0, (), killed=False)


def _out_of_memory(name: str, ran: GuardedRun, folder: Path) -> DatasetOutOfMemory:
    pool = "shm" if ran.stopped == "shm" else "ram"
    taken = format_size(ran.shm if pool == "shm" else ran.ram)
    if ran.killed:
        why = say("the OOM killer killed it when it had allocated {taken}", taken=taken)
    elif pool == "shm":
        why = say("it was stopped when it used {taken} of /dev/shm, which was almost full", taken=taken)
    else:
        why = say("it was stopped when it had allocated {taken} of RAM, and almost none was free", taken=taken)
    fix = say("load less in the dataset's constructor; legroom.open maps a file instead of reading it")
    error = DatasetOutOfMemory(_failed(name), why=why, fix=(fix,))
    error.pool, error.taken = pool, ran.ram
    with contextlib.suppress(OSError):
        error.loader = json.loads((folder / "loader").read_text(encoding="utf-8"))
        error.found = True
    return error


def _raised(name: str, answer: dict[str, Any]) -> LegroomError:
    error = answer["error"]
    for kind in (MissingKey, MissingPackage, BatchSizeNeeded):  # nothing was loaded: something is missing
        if error["code"] == kind.code:
            return kind(error["message"], why=error["why"], fix=tuple(error["fix"]))
    if answer.get("at_import"):
        return DatasetFailed(error["message"], why=error["why"], fix=tuple(error["fix"]))
    lines = answer["tail"] or [error["message"], error.get("why")]
    return DatasetFailed(_failed(name), why="\n".join(line for line in lines if line), fix=tuple(error["fix"]))


def _crashed(name: str, status: int | None, timeout: float, lines: list[str]) -> DatasetFailed:
    if status is None:
        why = say("no batch within {limit}", limit=format_duration(timeout))
        fix = say("set a longer timeout, or find what it waits for: a lock, a network file system, a prompt")
    elif status < 0:
        why = say("the process ended: {how}", how=str(ExitStatus.of(status)))
        fix = say("run the dataset by itself: native code in it or in its libraries crashed")
    else:
        why = say("the process ended before its first batch: {how}", how=str(ExitStatus.of(status)))
        fix = say("a module that exits while it is imported needs an `if __name__ == '__main__':` guard")
    return DatasetFailed(_failed(name), why="\n".join([why, *lines]), fix=(fix,))


def _failed(name: str) -> str:
    return say("loading a batch from {name} failed", name=name)


# In the child


def try_named(
    spec: str, collate: str | None, *, timeout: float, leaving: bool, measured: Measured | None,
    own: Mapping[str, Any] | None, known: bool, **settings: Any,
) -> LoaderTrial:  # fmt: skip
    """Run the loop over the dataset ``module:object``, or over tensors of ``sizes``, in a new interpreter.

    ``leaving``: this program has nothing else to do. It is replaced by the guard, so that the loop has all the memory
    that it will have, and starts again afterwards, when it reads ``measured``, ``own`` and the result
    (``tried_before``). ``own``: the settings of the DataLoader that the dataset is given as, if that is ``known``.
    """
    os.getcwd()  # as in in_child
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
        dataloader_trial.run(lambda: found, str(folder / "answer"), settings)

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
    what = say("loading batches from {name} with the DataLoader failed", name=name)
    fix = say("first make one epoch of this DataLoader work by itself")
    if not name:  # the tensors are Legroom's own: what fails is torch, or the process that it runs in
        what = say("loading batches of dummy tensors with the DataLoader failed")
        fix = say("check whether torch works here:\n{command}", command="python -c 'import torch; torch.ones(1)'")
    raise DatasetFailed(what, why="\n".join(line for line in lines if line), fix=(fix,))


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


def main(request: str, answer: str) -> None:
    """Do the task of the request and write the answer, whatever happens."""
    if os.getcwd() not in sys.path:  # absent under PYTHONSAFEPATH
        sys.path.insert(0, os.getcwd())
    del sys.argv[1:]  # ours: a script that parses its command line while it is imported must find none
    arguments = json.loads(Path(request).read_text(encoding="utf-8"))
    task = _TASKS[arguments.pop("task")]
    _write_answer(lambda: task(**arguments), answer)


def _write_answer(work: Callable[[], dict[str, Any]], path: str) -> None:
    """Do the work, write what it returned or raised, and end this process."""
    faulthandler.enable()
    prepare_to_be_killed(os.path.dirname(path))
    try:
        answer: dict[str, Any] = {"result": work()}
    except CannotImport as problem:
        answer = {"error": problem.error.as_dict(), "at_import": True}
    except LegroomError as problem:
        cause = problem.__cause__
        answer = {"error": problem.as_dict(), "tail": traceback_tail(cause) if cause else []}
        _add_full_shm(answer, cause)
    except BaseException as problem:  # SystemExit too: a script may exit while it is imported
        answer = {"error": DatasetFailed(str(problem), fix=(say(FIX),)).as_dict(), "tail": traceback_tail(problem)}
        _add_full_shm(answer, problem)
    replace_file(path, json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads or atexit hooks of a dataset may hang, and are not needed any more


def _add_full_shm(answer: dict[str, Any], problem: BaseException | None) -> None:
    """Where /dev/shm was full, say so and what to do: the dataset is not to blame."""
    if (found := explain_full_shm(problem)) is not None:
        answer["tail"].append(found[0])
        answer["error"]["fix"] = list(found[1])


def _measure(
    spec: str, collate: str | None, batch_size: int | None, method: str | None, transport: Any, loader_file: str,
    **how: Any,
) -> dict[str, Any]:  # fmt: skip
    found = find_dataset(spec, collate)
    settings = found.settings
    replace_file(loader_file, json.dumps(settings))  # before anything that may exhaust the memory
    if transport == AS_LOADER:
        transport = "legroom" if settings is None else settings["loader"]
    measured = measure(
        found.dataset, collate_fn=found.collate_fn, batch_size=chosen_batch_size(batch_size, settings),
        method=method or (settings or {}).get("start_method"), transport=transport, rows=found.rows(),
        settings=settings, **how,
    )  # fmt: skip
    return asdict(measured)


def _run_loader(spec: str, collate: str | None, settings: dict[str, Any], **how: Any) -> dict[str, Any]:
    found = find_dataset(spec, collate)
    rate = run_loader(found.dataset, found.collate_fn, CompleteLoaderSettings(**settings), loader=found.loader, **how)
    return {"rate": rate}


def _digests(**how: Any) -> dict[str, Any]:
    with import_lock:
        from legroom.loader.measure.compare_batches_made_twice import batches_digests

    return {str(number): parts for number, parts in batches_digests(**how).items()}


_TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "measure": _measure, "run_loader": _run_loader, "digests": _digests
}  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
