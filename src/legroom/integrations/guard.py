"""What every adapter does for a training: watch it, tune at each epoch, log one block, ask for a checkpoint in time.

Covers: the order of these and what they share, without knowing any framework. Does not cover: a framework's hooks
(lightning.py, huggingface.py, accelerate.py, ray.py), the parts themselves (monitor, loader.tuning, epoch_log.py,
checkpoint_due.py).

Nothing in here ends a training: what cannot be done is said. Steps are optimizer steps. Ranks agree on a checkpoint,
because saving is something they do together: every ``agree_every`` steps they exchange one number.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from legroom.gpu.rank_consensus import RankConsensus
from legroom.integrations.checkpoint_due import HORIZON, Due, no_room
from legroom.integrations.epoch_log import Look, block, look
from legroom.integrations.retune import apply, retune
from legroom.loader.rows.ranks import process_group, rank_and_world
from legroom.model import Alarm, Settings
from legroom.monitor.script import Watch, watch
from legroom.system.argument_checks import check_choice
from legroom.words import say

Tune = Literal["apply", "advise", "off"]
_TUNES = ("apply", "advise", "off")
_LEVEL = {"warning": 1.0, "critical": 2.0}


class Guard:
    """A training under guard, from ``start`` to ``end``; also a context manager."""

    def __init__(
        self,
        *,
        log: str | os.PathLike[str] | None = None,
        interval: float | str = 1.0,
        tune: Tune = "apply",
        horizon: float = HORIZON,
        agree_every: int = 16,
        on_alarm: Callable[[Alarm], object] | None = None,
    ) -> None:
        """Guard a training, once it starts.

        Args:
            log: A file for ``legroom watch --replay``; each further rank writes its own, named after it.
            interval: Between two samples of the watch: seconds, or ``"5s"``.
            tune: ``"apply"`` changes the loader's workers, prefetch and pinning between epochs, ``"advise"`` only says
                what it would choose, ``"off"`` does neither.
            horizon: How many seconds before a predicted death a checkpoint is asked for.
            agree_every: Optimizer steps between two agreements of the ranks on whether to save.
            on_alarm: Called with each alarm, in the watch's thread.
        """
        check_choice("tune", tune, _TUNES)
        self._log_file, self._interval, self._tune, self._on_alarm = log, interval, tune, on_alarm
        self._agree_every = max(1, agree_every)
        self._due = Due(horizon)
        self._alarms: deque[Alarm] = deque(maxlen=256)
        self._looks: list[Look] = []
        self._pending: tuple[int, list[str]] | None = None  # the epoch whose block is still to be logged
        self._steps = 0
        self._ranks = RankConsensus()
        self.watch: Watch | None = None
        self.settings: Settings | None = None
        self.logger = logging.getLogger("legroom")
        self.report: Callable[[Mapping[str, float]], object] | None = None
        self.main = True  # whether this rank speaks for its machine

    # The life of a training.

    def start(self) -> None:
        """Training begins; a second time does nothing."""
        if self.watch is not None:
            return
        self._looks = [look(say("at start"))]
        self._ranks = RankConsensus()
        self.watch = watch(self._own_log(), interval=self._interval, on_alarm=self._heard).__enter__()

    def model_ready(self) -> None:
        """The model and its optimizer are where they will be trained."""
        self._looks = [*self._looks[:1], look(say("after the model"))]

    def epoch(self, number: int, loader: Any = None, accumulation: int = 1) -> Settings | None:
        """An epoch begins: decide the settings for it, from what memory there is now."""
        self._flush()
        if self.watch is not None:
            self.watch.mark(say("epoch {number}", number=number))
        notes: list[str] = []
        if loader is not None and self._tune != "off":
            found, why_not = retune(loader, accumulation=accumulation, previous=self.settings)
            notes += [why_not] if why_not else []
            if found is not None:
                self.settings = found
                notes += apply(loader, found) if self._tune == "apply" else []
        self._pending = (number, notes)
        return self.settings

    def step(self) -> str | None:
        """An optimizer step is done. Why a checkpoint should be saved now, or None."""
        self._steps += 1
        if self.watch is not None:
            self.watch.step()
        self._flush(look(say("at step 0")) if self._pending is not None else None)
        self._tell()
        return self._checkpoint()

    def end(self) -> None:
        """Training is over, or failed."""
        self._flush()
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
            self.watch = None
        self._tell()

    def __enter__(self) -> Guard:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # What becomes of it.

    def _heard(self, alarm: Alarm) -> None:
        """In the watch's thread, at once: the step that is under way may be the last."""
        self.logger.warning("%s", alarm.message)
        self._alarms.append(alarm)
        if self._on_alarm is not None:
            self._on_alarm(alarm)

    def _tell(self) -> None:
        """Alarms since the last step, as numbers for the trainer's loggers."""
        while self._alarms:
            alarm = self._alarms.popleft()
            numbers = {f"legroom/{alarm.code}": _LEVEL[alarm.level]}
            left = alarm.evidence.get("full_in_seconds")
            if isinstance(left, (int, float)):
                numbers[f"legroom/{alarm.code}/seconds_left"] = float(left)
            if self.report is not None:
                self.report(numbers)

    def _checkpoint(self) -> str | None:
        if self.watch is None or (self._ranks.world_size > 1 and self._steps % self._agree_every):
            return None
        alarms, now = self.watch.alarms, time.monotonic()
        cause = self._due.ask(alarms, now)
        full = no_room(alarms)
        if cause is not None and full is not None:
            self.logger.warning(
                "%s", say("no checkpoint though {cause}: {full}", cause=cause.message, full=full.message)
            )
            self._due.saved(alarms, now)
            cause = None
        (asked,) = self._ranks.maximum([cause is not None])
        if not asked:
            return None
        self._due.saved(alarms, now)
        why = cause.message if cause is not None else say("another rank is about to run out of memory")
        self.logger.warning("%s", say("checkpoint asked for: {why}", why=why))
        return why

    def _flush(self, last: Look | None = None) -> None:
        """Log the block of the epoch that has begun, if it was not."""
        if self._pending is None:
            return
        (number, notes), self._pending = self._pending, None
        looks = [*self._looks, last] if last is not None else self._looks
        if self.main:
            self.logger.info("%s", block(number, self.settings, looks, notes))

    def _own_log(self) -> Path | None:
        if self._log_file is None:
            return None
        path = Path(self._log_file)
        rank, _ = rank_and_world(None, None, os.environ, process_group())
        return path if rank == 0 else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
