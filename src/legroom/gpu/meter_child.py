"""A batch tried in a fresh child process, which leaves nothing behind: ``isolate="module:factory"``.

Covers: starting the child, passing the request, judging its ending. Does not cover: the trial itself (trial_child.py).

Owned here: the child, and a temporary directory with request, answer and the child's output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from legroom.errors import TrialFailed
from legroom.gpu import host_memory
from legroom.gpu.meter import Reading
from legroom.model.gpu import Trial
from legroom.words import say

_LAST_LINES = 8


class ChildMeter:
    """Tries each batch in a process of its own; ``spec`` names what makes the step there."""

    def __init__(
        self,
        spec: str,
        margin: float,
        device: str,
        *,
        allowed: int | None,
        worst_case: Any,
        bound: int | None,
    ) -> None:
        self.measure = say(
            "the peak of a process that runs {spec} alone on {device}", spec=spec, device=device
        )
        self._request = {
            "spec": spec, "margin": margin, "device": device, "allowed": allowed, "bound": bound,
            "worst_case": worst_case,
        }  # fmt: skip
        self._bound = bound
        self.rough = device == "cpu"
        try:
            json.dumps(worst_case)
        except TypeError as problem:
            raise TrialFailed(
                say("worst_case cannot be handed to another process"),
                why=say("it is sent as JSON: {problem}", problem=problem),
                fix=(say("give a length, or let the factory know the worst case itself"),),
            ) from problem

    def try_batch(self, batch: int) -> Reading:
        """One child."""
        kills = host_memory.oom_kills()
        told, status, words = self._ask({**self._request, "batch": batch})
        if told is not None and "error" in told:
            raise TrialFailed(
                say("the step failed in its own process"),
                why=told["error"],
                fix=(say("see its last lines:\n{lines}", lines=words),) if words else (),
            )
        if told is None:
            killed = status == -getattr(signal, "SIGKILL", 9)
            now = host_memory.oom_kills()
            if not killed or self._bound is None:
                raise TrialFailed(
                    say("the trial of a batch of {batch} died", batch=batch),
                    why=say("status {status}; its last lines:\n{lines}", status=status, lines=words),
                )
            why = say("killed; the kernel counted {old} OOM kills before and {new} after", old=kills, new=now)
            return Reading(Trial(batch, False, None, why=why), self._bound)
        bound = int(told.pop("bound"))
        notes = tuple(told.pop("notes"))
        return Reading(Trial(**told), bound, notes)

    def close(self) -> None:
        """Every child is gone."""

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any] | None, int, str]:
        with tempfile.TemporaryDirectory(prefix="legroom-") as folder:
            asked, answer, output = (Path(folder) / name for name in ("request", "answer", "output"))
            asked.write_text(json.dumps(request), encoding="utf-8")
            with output.open("wb") as sink:
                status = subprocess.run(
                    [sys.executable, "-m", "legroom.gpu.trial_child", str(asked), str(answer)],
                    stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=_environment(), check=False,
                ).returncode  # fmt: skip
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            told = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None
        return told, status, "\n".join(lines)


def _environment() -> dict[str, str]:
    """Ours, with this very Legroom importable, and whatever the parent itself can import."""
    parts = [os.getcwd(), *(part for part in sys.path if part), str(Path(__file__).resolve().parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(parts))}
