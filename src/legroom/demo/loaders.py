"""First act: torch's loader and ours in the same small /dev/shm, then their speed.

Covers: the same script run twice, once with our loader put in by `legroom run --loader legroom`; batches a second.
Does not cover: the script (loading.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from legroom.demo.dataset import ROW_BYTES
from legroom.demo.job import Job, end_all
from legroom.demo.loading import WORKERS
from legroom.demo.result import Loaders, Trial
from legroom.demo.scale import Scale, rows_too_many
from legroom.demo.stage import Stage, shm_pool
from legroom.demo.training import BATCH
from legroom.errors import DemoFailed
from legroom.rescue.sweep import names_there, sweep
from legroom.units import format_size
from legroom.words import say

_BATCHES, _BATCHES_QUICK = 12, 8
_ROUNDS, _SECONDS = 3, 0.8
_ROUNDS_QUICK, _SECONDS_QUICK = 1, 0.5
_PATIENCE = 15.0  # seconds without a batch: torch's loader can also hang on a full /dev/shm
_WITHIN = 120.0


def loaders(stage: Stage, scale: Scale, data: Path, folder: Path, environment: Mapping[str, str]) -> Loaders:
    """Both, one after the other."""
    stage.begin("loaders", say("1  Data loaders with {count} workers", count=WORKERS))
    if scale.loaders is not None:
        stage.tell(say("not tried: {why}", why=scale.loaders))
        return Loaders(why=scale.loaders)
    why: str | None = None
    pool = shm_pool(stage.host)
    if pool.size is None:  # a queue between processes needs semaphores, and those lie there
        why = say("no worker processes without /dev/shm: {reason}", reason=pool.reason or say("unknown"))
        stage.tell(say("not tried: {why}", why=why))
        return Loaders(why=why)
    rows = rows_too_many(pool.size, pool.free)
    trials: list[Trial] = []
    if rows is None:
        why = say("/dev/shm is {size}: not small enough to be filled for show", size=format_size(pool.size))
        stage.tell(say("whether a loader dies was not tried: {why}", why=why))
    else:
        batches = _BATCHES_QUICK if scale.quick else _BATCHES
        for loader in ("torch", "legroom"):
            trials.append(_trial(stage, loader, rows, batches, data, folder / f"trial-{loader}", environment))
    rates = _speed(stage, scale, data, folder / "speed", environment)
    return Loaders(tuple(trials), rates, BATCH * ROW_BYTES, why)


def _trial(
    stage: Stage,
    loader: str,
    rows: int,
    batches: int,
    data: Path,
    folder: Path,
    environment: Mapping[str, str],
) -> Trial:
    size = rows * ROW_BYTES * 4
    arguments = ["trial", "--data", str(data), "--batch", str(rows), "--batches", str(batches)]
    job = Job(loader, "legroom.demo.loading", arguments, folder, environment, ("--loader", loader))
    before = names_there(stage.host)
    stage.start(job)
    waiting = _Patience(stage, job)
    stood_still = False
    try:
        stage.until(lambda: job.ended or waiting.over(), _WITHIN, say("a loader"))
        stood_still = not job.ended
    finally:
        end_all([job])
        sweep(stage.host, before)  # what torch's loader left, in a /dev/shm that may be everybody's
    job.ear.listen()
    opened = job.ear.first("opened")
    if opened is None or opened["loader"] != loader:  # it must be the one it is said to be
        raise _failed(job)
    story = job.story()
    attempt = (story.get("attempts") or [{}])[0]
    last = job.ear.last("step")
    trial = Trial(
        loader=loader,
        batch_bytes=size,
        delivered=0 if last is None else int(last["step"]),
        of=batches,
        died=not job.done,
        stood_still=stood_still,
        verdict=story.get("verdict"),
        confidence=story.get("confidence"),
        shm_peak=attempt.get("peaks", {}).get("shm", {}).get("used"),
    )
    stage.shown.remove(job)
    _tell(stage, trial)
    return trial


def _tell(stage: Stage, trial: Trial) -> None:
    name = say("torch's loader") if trial.loader == "torch" else say("Legroom's loader")
    peak = say("unknown") if trial.shm_peak is None else format_size(trial.shm_peak)
    facts = {"name": name, "batch": format_size(trial.batch_bytes), "count": trial.delivered, "all": trial.of,
             "peak": peak}  # fmt: skip
    if trial.stood_still:
        stage.tell(say("{name} stood still after {count} of {all} batches of {batch} and was ended", **facts))
    elif trial.died:
        verdict, sure = trial.verdict, trial.confidence or 0.0
        stage.tell(
            say(
                "{name} died after {count} of {all} batches of {batch}: {verdict} ({sure:.0%} sure), "
                "/dev/shm at {peak}",
                verdict=verdict,
                sure=sure,
                **facts,
            ),
            mark=say("{name} died", name=name),
        )
    else:
        stage.tell(say("{name} lived: all {all} batches of {batch}, /dev/shm at {peak}", **facts))


def _speed(
    stage: Stage, scale: Scale, data: Path, folder: Path, environment: Mapping[str, str]
) -> dict[str, float]:
    rounds, seconds = (_ROUNDS_QUICK, _SECONDS_QUICK) if scale.quick else (_ROUNDS, _SECONDS)
    arguments = [
        "speed",
        "--data",
        str(data),
        "--batch",
        str(BATCH),
        "--rounds",
        str(rounds),
        "--seconds",
        str(seconds),
    ]
    job = Job("speed", "legroom.demo.loading", arguments, folder, environment)
    stage.start(job)
    stage.until(lambda: job.ended, _WITHIN, say("the loaders' speed"))
    job.ear.listen()
    if not job.done:
        raise _failed(job)
    rates = best_rates([words for words in job.ear.heard if words["what"] == "rate"])
    stage.tell(
        say(
            "batches a second: torch's loader {torch:.0f}, Legroom's {legroom:.0f}, data.batches {batches:.0f}",
            **rates,
        )
    )
    return rates


def best_rates(told: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """The best round of each: whatever else the machine does only ever slows one down."""
    found: dict[str, float] = {}
    for words in told:
        way, rate = str(words["way"]), float(str(words["rate"]))
        found[way] = max(rate, found.get(way, 0.0))
    return found


class _Patience:
    """Whether nothing has come for too long."""

    def __init__(self, stage: Stage, job: Job) -> None:
        self._stage, self._job = stage, job
        self._count, self._since = 0, stage.clock

    def over(self) -> bool:
        if len(self._job.ear.heard) != self._count:
            self._count, self._since = len(self._job.ear.heard), self._stage.clock
        delivering = self._job.ear.first("opened") is not None
        return delivering and self._stage.clock - self._since > _PATIENCE


def _failed(job: Job) -> DemoFailed:
    return DemoFailed(
        say("the loaders could not be tried"),
        why=job.complaint(),
        fix=(say("leave them out:\nlegroom demo --no-torch"), say("keep the logs:\nlegroom demo --keep")),
    )
