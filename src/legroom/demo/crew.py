"""The trainings: four at once, first with a copy each, then on one copy, one of them killed and rescued.

Covers: both acts with the same program, told apart by LEGROOM_DISABLE alone, and what they show. Does not cover: the
program (training.py), the killing (killing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from legroom.demo.job import Job
from legroom.demo.killing import kill_and_rescue
from legroom.demo.result import SEPARATE, SHARED, Memory, Opening, Rescue, Training
from legroom.demo.scale import Scale, steps_for
from legroom.demo.stage import Stage, peak
from legroom.errors import DemoFailed
from legroom.units import format_duration, format_size
from legroom.words import say

NAMES = ("one", "two", "three", "four")
_RATES = (0.05, 0.03, 0.02, 0.01)  # what the four try out
_VICTIM = 2
_FEW_STEPS = 40  # of a training that is there to be weighed
_LASTS, _LASTS_QUICK = 12.0, 4.0  # seconds the trainings should take
_ALL_OF_IT = 70.0  # seconds into the demo at which they should be done
_CHECKPOINTS = 10  # over a training
_KILL_AT = 0.4  # of the way
_WITHIN = 180.0


@dataclass
class Crew:
    """Both acts, and what they found."""

    stage: Stage
    scale: Scale
    data: Path
    folder: Path
    environment: Mapping[str, str]
    plain_seconds: float  # in which h5py read the data, alone
    rescue: Rescue | None = None
    _plain: list[Job] = field(default_factory=list)
    _jobs: list[Job] = field(default_factory=list)

    def separate(self) -> None:
        """Every training with a copy of its own, until all of them have been weighed together."""
        stage = self.stage
        stage.begin(SEPARATE, say("2  {count} trainings with a copy each", count=self.scale.trainings))
        hold = self.folder / "weighed"
        environment = {**self.environment, "LEGROOM_DISABLE": "1"}
        self._plain = [
            self._job(number, SEPARATE, _FEW_STEPS, environment, ["--hold", str(hold)])
            for number in range(self.scale.trainings)
        ]
        stage.start(*self._plain)
        self._wait(self._plain, lambda: all(job.done for job in self._plain), say("the trainings"))
        weighed = len(stage.weights) + 2
        self._wait(self._plain, lambda: len(stage.weights) >= weighed, say("their weight"))
        hold.touch()
        stage.until(lambda: all(job.ended for job in self._plain), _WITHIN, say("their end"))
        held = peak(stage.weights, SEPARATE, self.scale.trainings)
        stage.tell(say("they held {size} together", size=_size(held)))

    def shared(self) -> None:
        """All on one copy, to the end, one of them killed on the way."""
        stage, scale = self.stage, self.scale
        stage.begin(SHARED, say("3  {count} trainings on one copy", count=scale.trainings))
        # On a busy machine everything before took longer: less is left for this.
        lasts = _LASTS_QUICK if scale.quick else min(_LASTS, max(_LASTS_QUICK, _ALL_OF_IT - stage.clock))
        steps = steps_for(self._pace(), lasts)
        self._jobs = [
            self._job(number, SHARED, steps, self.environment, []) for number in range(scale.trainings)
        ]
        stage.start(*self._jobs)
        self._wait(self._jobs, lambda: all(job.ear.first("step") for job in self._jobs), say("the trainings"))
        self._tell_opening()
        victim = self._jobs[min(_VICTIM, len(self._jobs) - 1)]
        kill_at = steps * _KILL_AT
        weighed = len(stage.weights) + 2

        def far_enough() -> bool:
            kept = victim.ear.last("kept")
            return kept is not None and kept["step"] >= kill_at and len(stage.weights) >= weighed

        self._wait(self._jobs, far_enough, say("a checkpoint"))
        self.rescue = kill_and_rescue(stage, victim)
        self._wait(self._jobs, lambda: all(job.done and job.ended for job in self._jobs), say("their end"))
        held = peak(stage.weights, SHARED, scale.trainings)
        stage.tell(
            say("all {count} finished; they held {size} together", count=scale.trainings, size=_size(held))
        )

    def trainings(self) -> tuple[Training, ...]:
        """How each of those on one copy ended."""
        found = []
        for job in self._jobs:
            done = job.ear.last("done") or {}
            found.append(Training(job.name, int(done.get("step", 0)), job.done, done.get("loss"), job.starts))
        return tuple(found)

    def memory(self) -> Memory:
        """What each crew held together."""
        weights, count = self.stage.weights, self.scale.trainings
        return Memory(peak(weights, SEPARATE, count), peak(weights, SHARED, count))

    def opening(self) -> Opening:
        """How long each waited for its data."""
        first = [words for job in self._jobs if (words := job.ear.first("opened"))]
        later = [words for job in self._jobs if job.starts > 1 and (words := job.ear.last("opened"))]
        plain = [words["seconds"] for job in self._plain if (words := job.ear.first("opened"))]
        return Opening(
            at_once=max(words["seconds"] for words in first),
            later=later[0]["seconds"] if later else None,
            later_ready=later[0]["ready"] if later else None,
            plain=self.plain_seconds,
            plain_at_once=max(plain),
            backing=first[0]["backing"],
        )

    def _job(self, number: int, act: str, steps: int, environment: Mapping[str, str], more: list[str]) -> Job:
        folder = self.folder / act / NAMES[number]
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir(parents=True)
        arguments = [
            "--data", str(self.data), "--checkpoints", str(checkpoints), "--engine", self.scale.engine,
            "--steps", str(steps), "--every", str(max(1, steps // _CHECKPOINTS)), "--seed", str(number),
            "--rate", str(_RATES[number]), *more,
        ]  # fmt: skip
        return Job(NAMES[number], "legroom.demo.training", arguments, folder, environment)

    def _wait(self, jobs: list[Job], reached: Callable[[], object], what: str) -> None:
        """Until that is so, or one of them ends in another way than it should."""

        def over() -> bool:
            return bool(reached()) or any(job.ended and not job.done for job in jobs)

        self.stage.until(over, _WITHIN, what)
        for job in jobs:
            job.ear.listen()
            if job.ended and not job.done:
                verdict = job.story().get("summary") or say("it ended by itself")
                raise DemoFailed(
                    say("training {name} of the demo died: {verdict}", name=job.name, verdict=verdict),
                    why=job.complaint(),
                    fix=(
                        say("see what is short here:\nlegroom doctor"),
                        say("keep the logs:\nlegroom demo --keep"),
                    ),
                )

    def _pace(self) -> float:
        """Steps a second of one training among so many, as the first crew had it."""
        done = [words for job in self._plain if (words := job.ear.last("done"))]
        return float(median(words["pace"] for words in done))

    def _tell_opening(self) -> None:
        found = self.opening()
        where = say("in /dev/shm") if found.backing == "shm" else say("on disk, in the page cache")
        self.stage.tell(
            say(
                "one of them loaded the data {where}; all had them after {shared} (with a copy each: {plain})",
                where=where,
                shared=format_duration(found.at_once),
                plain=format_duration(found.plain_at_once),
            )
        )


def _size(count: int | None) -> str:
    return say("unknown") if count is None else format_size(count)
