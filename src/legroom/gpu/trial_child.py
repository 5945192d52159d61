"""The child that tries one batch: ``python -m legroom.gpu.trial_child REQUEST ANSWER``.

Covers: one request in, one answer out, as JSON files. Does not cover: judging how the child ended (meter_child.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from legroom.gpu import host_memory
from legroom.gpu.card import open_card
from legroom.gpu.meter import STEPS, Reading, Step, call
from legroom.gpu.meter_cuda import CudaMeter
from legroom.gpu.oom import is_oom
from legroom.model.gpu import Trial
from legroom.words import say


def main(request: str, answer: str) -> None:
    """Do what the request asks, and write the answer."""
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    host_memory.first_to_go()
    try:
        reading = _on_cpu(asked) if asked["device"] == "cpu" else _on_card(asked)
        told: dict[str, Any] = {
            **dataclasses.asdict(reading.trial), "bound": reading.bound, "notes": reading.notes
        }  # fmt: skip
    except Exception as problem:  # whatever the user's own code raises
        traceback.print_exc()
        told = {"error": f"{type(problem).__name__}: {problem}"}
    scratch = Path(answer + ".part")
    scratch.write_text(json.dumps(told), encoding="utf-8")
    scratch.replace(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the step's threads and hooks are of no use any more


def factory(spec: str) -> Step:
    """The step that ``module:factory`` makes."""
    home, _, name = spec.partition(":")
    found: Any = importlib.import_module(home)
    for part in name.split("."):
        found = getattr(found, part)
    made: Step = found()
    return made


def _on_card(asked: dict[str, Any]) -> Reading:
    card = open_card(asked["device"], say("a batch would be tried"))
    if asked["allowed"] is not None:
        card.set_allowed(asked["allowed"])
    # The bound is taken before the factory puts the model there: the model is part of the trial.
    meter = CudaMeter(card, lambda *_: None, asked["margin"], worst_case=asked["worst_case"])
    try:
        meter.use(factory(asked["spec"]))
    except Exception as problem:
        if is_oom(problem) is None:
            raise
        return Reading(
            Trial(asked["batch"], False, None, why=say("the model itself does not fit")), meter.bound
        )
    return meter.try_batch(asked["batch"])


def _on_cpu(asked: dict[str, Any]) -> Reading:
    batch, bound = asked["batch"], asked["bound"]
    started = time.monotonic()
    try:
        step = factory(asked["spec"])
        for _ in range(STEPS):
            call(step, batch, asked["worst_case"])
    except Exception as problem:
        if is_oom(problem) is None:
            raise
        return Reading(Trial(batch, False, None, why=say("the step itself ran out of memory")), bound)
    peak = host_memory.peak_resident()
    fits = peak <= bound * (1 - asked["margin"])
    why = None if fits else say("it came too near to the limit")
    seconds = time.monotonic() - started
    return Reading(Trial(batch, fits, peak, seconds=seconds, why=why), bound)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
