"""Measures a user's dataset in a child process, because it may raise, hang, print, crash or exhaust memory.

The parent starts the child (a new interpreter for a named dataset, a fork for an object), ends it after a time limit
and explains how it failed. It owns the child and all that the child started (its own session, killed as a whole), and a
temporary directory with the request, the answer and the child's output.

The child is run as ``python -m legroom.loader.measure.measure_dataset_in_child REQUEST ANSWER``, with JSON files. The
dataset's own output goes to another file, so it is never taken for the answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from legroom.errors import BatchSizeNeeded, DatasetFailed, DatasetOutOfMemory, LegroomError, MissingKey, MissingPackage
from legroom.loader.measure import memory_guard_script
from legroom.loader.measure.dataloader_throughput import run_loader
from legroom.loader.measure.dataloader_trial import prepare_to_be_killed, traceback_tail
from legroom.loader.measure.dataset_bytes_and_seconds import FIX, measure
from legroom.loader.measure.import_dataset import CannotImport, chosen_batch_size, find_dataset, split_name  # fmt: skip
from legroom.loader.measure.start_memory_guard import (
    GuardedRun,
    child_environment,
    fork_guarded,
    last_lines,
    module_command,
    run_guarded,
)  # fmt: skip
from legroom.messages import say
from legroom.records.loader_settings_and_flags import CompleteLoaderSettings
from legroom.records.workload import Measured, Transport
from legroom.system.atomic_file import replace_file
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.system.processes_and_threads import ExitStatus
from legroom.units import format_duration, format_size

_LIMIT_S = 60.0  # until a run of a DataLoader counts as failed
AS_LOADER = "as-loader"  # the transport of the DataLoader that is named, or Legroom's


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
    for name in (spec, *([collate] if collate else [])):
        split_name(name)
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

    def run(folder: Path) -> GuardedRun:
        path = folder / "request"
        where = {"loader_file": str(folder / "loader")} if request["task"] == "measure" else {}
        path.write_text(json.dumps({**request, **where}), encoding="utf-8")
        line = module_command("legroom.loader.measure.measure_dataset_in_child", folder)
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


def main(request: str, answer: str) -> None:
    """Do the task of the request and write the answer, whatever happens."""
    if os.getcwd() not in sys.path:  # absent under PYTHONSAFEPATH
        sys.path.insert(0, os.getcwd())
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
    except BaseException as problem:  # SystemExit too: a script may exit while it is imported
        answer = {"error": DatasetFailed(str(problem), fix=(say(FIX),)).as_dict(), "tail": traceback_tail(problem)}
    replace_file(path, json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads or atexit hooks of a dataset may hang, and are not needed any more


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
