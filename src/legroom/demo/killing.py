"""A training killed on purpose, and brought back.

Covers: SIGKILL as anybody might send it, what `legroom run` makes of the death, going on from the newest whole
checkpoint. Does not cover: the verdict itself (rescue).

`legroom run` starts a training again by itself when memory killed it. A kill by somebody's hand may be meant, so there
it says who it was not and leaves the rest to people: here to us, with the same two functions it would use.
"""

from __future__ import annotations

import os
import signal
import time

from legroom.demo.job import Job
from legroom.demo.result import Rescue
from legroom.demo.said import Words
from legroom.demo.stage import Stage
from legroom.errors import DemoFailed
from legroom.rescue.checkpoints import newest_whole
from legroom.rescue.flags import with_resume
from legroom.words import say

_WITHIN = 180.0


def kill_and_rescue(stage: Stage, victim: Job) -> Rescue:
    """Kill it, hear why it died, start it again; it has made a step when this returns."""
    pid, last = victim.pid, victim.ear.last("step")
    if pid is None or last is None:
        raise DemoFailed(say("training {name} had ended before it could be killed", name=victim.name))
    at = int(last["step"])
    when = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    stage.tell(
        say(
            "training {name} killed on purpose at step {step}: kill -9 {pid}",
            name=victim.name,
            step=at,
            pid=pid,
        ),
        mark=say("killed"),
    )
    victim.notes.append(say("killed"))
    stage.until(lambda: victim.ended, _WITHIN, say("legroom run"))
    story = victim.story()
    _tell_verdict(stage, story)
    found = newest_whole(str(victim.folder / "checkpoints" / "step-*.npz"))
    if found.path is None:
        raise DemoFailed(say("training {name} left no whole checkpoint", name=victim.name))
    victim.start(with_resume(victim.command, "--resume", found.path))
    victim.notes[-1] = say("started again")
    stage.until(lambda: _stepped(victim, when) is not None or victim.ended, _WITHIN, say("the rescue"))
    victim.notes.clear()
    resumed = victim.ear.last("resumed")
    step, back = _stepped(victim, when), None
    if resumed is not None and step is not None:
        back = float(step["when"]) - when
        stage.tell(
            say("started again from its newest whole checkpoint, step {step}, {seconds:.1f} s after the kill",
                step=resumed["step"], seconds=back),
            mark=say("rescued"),
        )  # fmt: skip
    return Rescue(
        name=victim.name,
        signal=int(signal.SIGKILL),
        at_step=at,
        verdict=story.get("verdict"),
        confidence=story.get("confidence"),
        summary=story.get("summary"),
        evidence=tuple(story.get("evidence", ())),
        resumed_from=None if resumed is None else int(resumed["step"]),
        back_after=back,
    )


def _stepped(victim: Job, since: float) -> Words | None:
    """Its first step after that moment and after its resuming."""
    resumed = victim.ear.last("resumed")
    if resumed is None or resumed["when"] < since:
        return None
    return next(
        (w for w in victim.ear.heard if w["what"] in ("step", "done") and w["when"] > resumed["when"]), None
    )


def _tell_verdict(stage: Stage, story: dict[str, object]) -> None:
    sure = story.get("confidence")
    stage.tell(
        say("legroom run: {verdict} ({sure:.0%} sure): {summary}",
            verdict=story.get("verdict"), sure=sure if isinstance(sure, float) else 0.0, summary=story.get("summary"))
    )  # fmt: skip
    evidence = story.get("evidence")
    for line in evidence if isinstance(evidence, list) else ():
        stage.tell(say("by: {line}", line=line))
