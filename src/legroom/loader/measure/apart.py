"""Work on a user's dataset in a child process, and what to say when the child does not come back.

Covers: starting the child (a new interpreter for a named dataset, a fork for an object), its time limit, its last
words, which signal or OOM kill ended it. Does not cover: the work (measure/child.py).

Owned here: the child and all it started (its own session, killed as a whole), and a temporary directory with the
request, the answer and the child's output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from legroom.errors import DatasetFailed, DatasetOutOfMemory, LegroomError, MissingKey, MissingPackage
from legroom.loader.measure import meter
from legroom.loader.measure.guarded import Watched, environment, forked, guarded
from legroom.loader.measure.named import split
from legroom.records import Measured, Transport
from legroom.system.child_processes import ExitStatus
from legroom.units import format_duration, format_size
from legroom.words import say

__all__ = ["in_child", "measure_dataset", "measure_object"]

_TAIL_BYTES = 16384
_TAIL_LINES = 6


def measure_dataset(
    spec: str,
    *,
    batch_size: int,
    collate: str | None = None,
    samples: int = 32,
    timeout: float = 60,
    seconds: float = 2.0,
    transport: str | None = None,
    method: str | None = None,
) -> Measured:
    """Draw from the dataset that ``module:object`` names, in a child; DatasetFailed says how it went wrong.

    The object may be a dataset, a factory called without arguments, or a DataLoader, whose own collate is used.
    ``transport`` ("torch" or "legroom") also measures what a batch costs on its way from a worker.
    """
    for name in (spec, *([collate] if collate else [])):
        split(name)
    told = in_child(
        spec, timeout, work="measure", spec=spec, collate=collate, batch_size=batch_size, samples=samples,
        seconds=seconds, transport=transport, method=method,
    )  # fmt: skip
    return _measured(told)


def measure_object(dataset: Any, *, timeout: float, **how: Any) -> Measured | None:
    """Draw from a dataset object in a fork of this process; None: it raised there, and may not in this process."""
    from legroom.loader.measure.child import write_answer
    from legroom.loader.measure.measuring import measure

    def run(folder: Path) -> Watched:
        def work() -> None:
            write_answer(lambda: asdict(measure(dataset, **how)), str(folder / "answer"))

        return forked(work, folder, timeout)

    told = _answer(type(dataset).__name__, timeout, run)
    return None if "error" in told else _measured(told["result"])


def in_child(name: str, timeout: float, **request: Any) -> dict[str, Any]:
    """The child's answer to a request about the dataset called ``name``."""

    def run(folder: Path) -> Watched:
        asked = folder / "request"
        asked.write_text(json.dumps(request), encoding="utf-8")
        line = [sys.executable, "-m", "legroom.loader.measure.child", str(asked), str(folder / "answer")]
        return (
            guarded(line, folder, timeout) if sys.platform == "linux" else _unguarded(line, folder, timeout)
        )

    told = _answer(name, timeout, run)
    if "error" in told:
        raise _raised(name, told)
    result: dict[str, Any] = told["result"]
    return result


def _answer(name: str, timeout: float, run: Callable[[Path], Watched]) -> dict[str, Any]:
    """What a child wrote down in a folder of its own; an error where it wrote nothing."""
    with tempfile.TemporaryDirectory(prefix="legroom-") as place:
        folder = Path(place)
        ran = run(folder)
        try:
            told: dict[str, Any] = json.loads((folder / "answer").read_text(encoding="utf-8"))
        except OSError:
            if ran.stopped in ("ram", "shm") or ran.killed:
                raise _out_of_room(name, ran) from None
            raise _died(name, ran.status, timeout, last_words(folder / "output")) from None
    return told


def _measured(told: dict[str, Any]) -> Measured:
    way = told.pop("transport")
    return Measured(
        **{**told, "tensors": tuple(told["tensors"]), "transport": Transport(**way) if way else None}
    )


def _unguarded(line: list[str], folder: Path, timeout: float) -> Watched:
    """Where memory cannot be watched: macOS, Windows."""
    with (folder / "output").open("wb") as sink:
        child = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment(),
            start_new_session=hasattr(os, "setsid"),
        )  # fmt: skip
        try:
            status: int | None = child.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(child)
    return Watched(status, None if status is not None else "time", 0, 0, (), killed=False)


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child and whatever it left running."""
    if hasattr(os, "killpg"):
        meter.end_group(child.pid)
    else:
        child.kill()
    child.wait()


def last_words(output: Path) -> list[str]:
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:  # it was ended before it opened the file
        return []
    lines = [line for line in text.splitlines() if line.strip()]
    # faulthandler writes the innermost call first, Python's own traceback last. Other threads may come before the one
    # that crashed.
    crash = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return lines[-_TAIL_LINES:]
    own = next(
        (at for at, line in enumerate(lines) if at > crash and line.startswith("Current thread")), crash + 1
    )
    return [lines[crash], *lines[own : own + _TAIL_LINES - 1]]


def _out_of_room(name: str, ran: Watched) -> DatasetOutOfMemory:
    pool = "shm" if ran.stopped == "shm" else "ram"
    taken = format_size(ran.shm if pool == "shm" else ran.ram)
    why = (
        say("the kernel killed it for memory when it had taken {taken}", taken=taken)
        if ran.killed
        else say(
            "it was stopped when it had taken {taken} of {pool}: almost nothing was left",
            taken=taken,
            pool=pool,
        )
    )
    fix = say("load less in the dataset's constructor; legroom.open maps a file instead of reading it")
    error = DatasetOutOfMemory(say("drawing a batch from {name} failed", name=name), why=why, fix=(fix,))
    error.pool, error.taken = pool, ran.ram
    return error


def _raised(name: str, told: dict[str, Any]) -> LegroomError:
    error = told["error"]
    if error["code"] == MissingKey.code:  # nothing was drawn: what was named is not there
        return MissingKey(error["message"], why=error["why"], fix=error["fix"])
    if error["code"] == MissingPackage.code:
        return MissingPackage(error["message"], why=error["why"], fix=error["fix"])
    lines = told["tail"] or [error["message"], error.get("why")]
    return DatasetFailed(
        say("drawing a batch from {name} failed", name=name),
        why="\n".join(line for line in lines if line),
        fix=tuple(error["fix"]),
    )


def _died(name: str, status: int | None, timeout: float, words: list[str]) -> DatasetFailed:
    if status is None:
        how = say("it did not give a batch within {limit}", limit=format_duration(timeout))
        fix = say("give it more time, or find what it waits for: a lock, a network file system, a prompt")
    elif status < 0:
        how = say("the process ended: {how}", how=str(ExitStatus.of(status)))
        fix = say("run it alone: native code in the dataset or its libraries crashed")
    else:
        how = say("the process ended before it gave a batch: {how}", how=str(ExitStatus.of(status)))
        fix = say("a module that exits while it is imported needs an `if __name__ == '__main__':` guard")
    said = "".join(f"\n{line}" for line in words)
    return DatasetFailed(say("drawing a batch from {name} failed", name=name), why=how + said, fix=(fix,))
