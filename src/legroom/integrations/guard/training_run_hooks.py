"""What every adapter does for a training run: watch memory, tune at each epoch, log, ask for a checkpoint in time.

No framework is known here; lightning.py, huggingface.py, accelerate.py and ray.py call it from their hooks. Nothing
here ends a training run: what cannot be done is logged. Steps are optimizer steps. Ranks save together, so they agree
on a checkpoint: every ``agree_every`` steps they exchange one number.
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
from legroom.integrations.guard.checkpoint_schedule import HORIZON, CheckpointSchedule, disk_full
from legroom.integrations.guard.epoch_memory_log import MemorySnapshot, epoch_lines, memory_snapshot
from legroom.integrations.guard.loader_prepared_by_accelerate import keep_share
from legroom.integrations.guard.retune_loader import apply_settings, retune
from legroom.loader.rank_sampler import process_group, rank_and_world
from legroom.messages import say
from legroom.monitor.watch_in_script import Watch, watch
from legroom.records.finding_and_alarm import Alarm
from legroom.records.settings_and_overrides import Settings
from legroom.system.argument_checks import check_choice

Tune = Literal["apply", "advise", "off"]
_TUNE_CHOICES = ("apply", "advise", "off")
_LEVEL_NUMBERS = {"warning": 1.0, "critical": 2.0}


class Guard:
    """Guards a training run from ``start`` to ``end``; also a context manager."""

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
        """Create a guard; it begins with ``start``.

        Args:
            log: A file for ``legroom watch --replay``. Ranks other than 0 write files of their own, named after it.
            interval: Time between two memory samples: seconds, or ``"5s"``.
            tune: ``"apply"`` changes the loader's workers, prefetch and pinning between epochs; ``"advise"`` only logs
                what it would choose; ``"off"`` does neither.
            horizon: How many seconds before memory is predicted to run out a checkpoint is requested.
            agree_every: Optimizer steps after which the ranks agree on whether to save.
            on_alarm: Called with each alarm, in the monitoring thread.
        """
        check_choice("tune", tune, _TUNE_CHOICES)
        self._log_file, self._interval, self._tune, self._on_alarm = log, interval, tune, on_alarm
        self._agree_every = max(1, agree_every)
        self._schedule = CheckpointSchedule(horizon)
        self._alarms: deque[Alarm] = deque(maxlen=256)
        self._snapshots: list[MemorySnapshot] = []
        self._pending: tuple[int, list[str]] | None = None  # the epoch that is not logged yet, and its notes
        self._steps = 0
        self._ranks = RankConsensus()
        self.watch: Watch | None = None
        self.settings: Settings | None = None
        self.logger = logging.getLogger("legroom")
        self.report: Callable[[Mapping[str, float]], object] | None = None
        self.main = True  # whether this rank logs for its machine

    # Called in the course of a training run.

    def start(self) -> None:
        """Training begins. Calling it again does nothing."""
        if self.watch is not None:
            return
        self._snapshots = [memory_snapshot(say("at start"))]
        self._ranks = RankConsensus()
        self.watch = watch(self._own_log(), interval=self._interval, on_alarm=self._on_watch_alarm).__enter__()

    def model_ready(self) -> None:
        """The model and its optimizer are on their device."""
        self._snapshots = [*self._snapshots[:1], memory_snapshot(say("after the model"))]

    def epoch(self, number: int, loader: Any = None, accumulation: int = 1) -> Settings | None:
        """An epoch begins: choose settings for it from the memory that is free now."""
        self._log_epoch()
        keep_share(loader)
        if self.watch is not None:
            self.watch.mark(f"epoch {number}")
        notes: list[str] = []
        if loader is not None and self._tune != "off":
            found, note = retune(loader, accumulation=accumulation, previous=self.settings)
            notes += [note] if note else []
            if found is not None:
                self.settings = found
                notes += apply_settings(loader, found) if self._tune == "apply" else []
        self._pending = (number, notes)
        return self.settings

    def step(self) -> str | None:
        """An optimizer step is done. Returns why a checkpoint should be saved now, or None."""
        self._steps += 1
        if self.watch is not None:
            self.watch.step()
        self._log_epoch(memory_snapshot(say("at step 0")) if self._pending is not None else None)
        self._report_alarms()
        return self._checkpoint()

    def end(self) -> None:
        """Training is over, or failed."""
        self._log_epoch()
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
            self.watch = None
        self._report_alarms()

    def __enter__(self) -> Guard:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # Alarms, checkpoints, log.

    def _on_watch_alarm(self, alarm: Alarm) -> None:
        """Log at once, in the monitoring thread: the current step may be the last."""
        self.logger.warning("%s", alarm.message)
        self._alarms.append(alarm)
        if self._on_alarm is not None:
            self._on_alarm(alarm)

    def _report_alarms(self) -> None:
        """Report the alarms since the last step as numbers, for the trainer's loggers."""
        while self._alarms:
            alarm = self._alarms.popleft()
            numbers = {f"legroom/{alarm.code}": _LEVEL_NUMBERS[alarm.level]}
            left = alarm.evidence.get("full_in_seconds")
            if isinstance(left, (int, float)):
                numbers[f"legroom/{alarm.code}/seconds_left"] = float(left)
            if self.report is not None:
                self.report(numbers)

    def _checkpoint(self) -> str | None:
        if self.watch is None or (self._ranks.world_size > 1 and self._steps % self._agree_every):
            return None
        alarms, now = self.watch.alarms, time.monotonic()
        cause = self._schedule.ask(alarms, now)
        full = disk_full(alarms)
        if cause is not None and full is not None:
            self.logger.warning(
                "%s",
                say(
                    "checkpoint skipped ({full}), although one is due: {cause}", cause=cause.message, full=full.message
                ),
            )
            self._schedule.saved(alarms, now)
            cause = None
        (asked,) = self._ranks.maximum([cause is not None])
        if not asked:
            return None
        self._schedule.saved(alarms, now)
        why = cause.message if cause is not None else say("another rank is about to run out of memory")
        self.logger.warning("%s", say("checkpoint requested: {why}", why=why))
        return why

    def _log_epoch(self, last: MemorySnapshot | None = None) -> None:
        """Log the epoch that has begun, unless that is done."""
        if self._pending is None:
            return
        (number, notes), self._pending = self._pending, None
        snapshots = [*self._snapshots, last] if last is not None else self._snapshots
        if self.main:
            self.logger.info("%s", epoch_lines(number, self.settings, snapshots, notes))

    def _own_log(self) -> Path | None:
        if self._log_file is None:
            return None
        path = Path(self._log_file)
        rank, _ = rank_and_world(None, None, os.environ, process_group())
        return path if rank == 0 else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
