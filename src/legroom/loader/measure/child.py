"""The child that draws from a dataset which may raise, hang, print, crash or eat all memory.

Covers: one request in, one answer out, as JSON files beside each other. Does not cover: judging how the child ended
(apart.py).

Run as ``python -m legroom.loader.measure.child REQUEST ANSWER``. What the dataset prints goes where the parent sends
the child's output, so nothing it says can be taken for the answer.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from legroom.advice.recommend import Rung
from legroom.errors import DatasetFailed, LegroomError
from legroom.loader.measure.benchmark import run_loader
from legroom.loader.measure.measuring import FIX, measure
from legroom.loader.measure.named import resolve
from legroom.loader.measure.trial import first_to_go
from legroom.words import say

_TAIL = 5  # lines of a traceback that say where it came from


def main(request: str, answer: str) -> None:
    """Do what the request asks and write the answer, whatever happens."""
    if os.getcwd() not in sys.path:  # absent under PYTHONSAFEPATH
        sys.path.insert(0, os.getcwd())
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    work = _WORK[asked.pop("work")]
    write_answer(lambda: work(**asked), answer)


def write_answer(work: Callable[[], dict[str, Any]], answer: str) -> None:
    """Do the work, write what it returned or raised, and end this process."""
    faulthandler.enable()
    first_to_go()
    try:
        told: dict[str, Any] = {"result": work()}
    except LegroomError as problem:
        cause = problem.__cause__
        told = {"error": problem.as_dict(), "tail": _tail(cause) if cause else []}
    except BaseException as problem:  # SystemExit too: a script may exit while it is imported
        told = {"error": DatasetFailed(str(problem), fix=(say(FIX),)).as_dict(), "tail": _tail(problem)}
    scratch = Path(answer + ".part")
    scratch.write_text(json.dumps(told), encoding="utf-8")
    scratch.replace(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a dataset's threads or atexit hooks may hang, and nothing of theirs is wanted any more


def _measure(spec: str, collate: str | None, **how: Any) -> dict[str, Any]:
    found = resolve(spec, collate)
    return dataclasses.asdict(measure(found.dataset, collate_fn=found.collate_fn, **how))


def _attempt(spec: str, collate: str | None, rung: dict[str, Any], **how: Any) -> dict[str, Any]:
    found = resolve(spec, collate)
    return {"rate": run_loader(found.dataset, found.collate_fn, Rung(**rung), **how)}


_WORK: dict[str, Callable[..., dict[str, Any]]] = {"measure": _measure, "attempt": _attempt}


def _tail(problem: BaseException) -> list[str]:
    lines = (line.strip() for line in "".join(traceback.format_exception(problem)).splitlines())
    return [line for line in lines if line.strip("^~ ")][-_TAIL:]  # without the marks under the code


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
