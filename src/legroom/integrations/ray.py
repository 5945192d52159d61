"""A guard for a loop of one's own in a worker of Ray Train's.

    def train_loop_per_worker(config):
        with guarded() as guard:
            for epoch in range(epochs):
                guard.epoch(epoch, loader)
                for batch in loader:
                    ...
                    if guard.step() is not None:
                        guard.report(metrics, checkpoint=...)
                guard.report(metrics)

Covers: Ray's ranks, its logger, its wrapped loaders, alarms as metrics of ``ray.train.report``. Does not cover: what is
done at each call (guard.py), the checkpoint itself, which is the loop's.

``ray.train.report`` is a barrier that every worker passes equally often. So an alarm waits for the loop's next report
and makes none of its own, and a checkpoint is asked for on all workers at the same step or on none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from legroom.errors import UsageError
from legroom.integrations.guard import Guard
from legroom.loader.ranks import process_group
from legroom.model import Settings
from legroom.system.imports import require
from legroom.words import say

LOGGER = "ray.train.legroom"  # below Ray Train's own, which a worker shows and keeps


class RayGuard:
    """A worker's training under guard, from ``start`` to ``end``; also a context manager."""

    def __init__(self, **options: Any) -> None:
        self.guard = Guard(**options)
        self.guard.report = self._keep
        self._train = require("ray.train", "", say("this callback"), package="'ray[train]'")
        self._together = True
        self._numbers: dict[str, float] = {}

    def start(self) -> None:
        """Training begins; a second time does nothing."""
        if self.guard.watch is not None:
            return
        local_rank, workers = self._place()
        self.guard.logger = logging.getLogger(LOGGER)
        self.guard.main = local_rank == 0
        self._together = workers == 1 or process_group() is not None
        if not self._together and self.guard.main:
            self.guard.logger.warning(
                "%s",
                say("no checkpoint is asked for: {workers} workers have no process group of torch's to agree in",
                    workers=workers),
            )  # fmt: skip
        self.guard.start()

    def model_ready(self) -> None:
        """The model and its optimizer are where they will be trained."""
        self.guard.model_ready()

    def epoch(self, number: int, loader: Any = None, accumulation: int = 1) -> Settings | None:
        """An epoch begins, over that loader, prepared by Ray or not."""
        return self.guard.epoch(number, _inside(loader), accumulation)

    def step(self) -> str | None:
        """An optimizer step is done. Why every worker should report a checkpoint now, or None."""
        why = self.guard.step()
        return why if self._together else None

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, **options: Any) -> None:
        """``ray.train.report``, with the alarms up to the last step among the metrics.

        Args:
            metrics: The loop's own.
            checkpoint: A ``ray.train.Checkpoint``, or None.
            **options: Further ones of ``ray.train.report``.
        """
        self._train.report({**self._numbers, **metrics}, checkpoint=checkpoint, **options)
        self._numbers.clear()

    def end(self) -> None:
        """Training is over, or failed."""
        self.guard.end()

    def __enter__(self) -> RayGuard:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _keep(self, numbers: Mapping[str, float]) -> None:
        """Of an alarm that comes more than once between two reports, the worst: the highest level, the least time."""
        for name, number in numbers.items():
            worse = min if name.endswith("/seconds_left") else max
            self._numbers[name] = worse(number, self._numbers.get(name, number))

    def _place(self) -> tuple[int, int]:
        """The rank on this machine, and how many workers there are on all."""
        try:
            context = self._train.get_context()
            return context.get_local_rank(), context.get_world_size()
        except (
            RuntimeError,
            DeprecationWarning,
        ) as problem:  # the latter is what Ray raises in a function of Tune's
            raise UsageError(
                say("this process is no worker of Ray Train's"),
                why=str(problem),
                fix=(
                    say("call guarded() inside train_loop_per_worker"),
                    say("or use legroom.integrations.guard.Guard, which needs no framework"),
                ),
            ) from problem


def guarded(**options: Any) -> RayGuard:
    """A guard for this worker's training, to use in a ``with``.

    Outside a worker of Ray Train's, entering it is a UsageError: there is nobody to report to.

    Args:
        **options: Those of ``legroom.integrations.guard.Guard``.
    """
    return RayGuard(**options)


def _inside(loader: Any) -> Any:
    """The loader that ``prepare_data_loader`` wrapped: it is the one iterated, and so the one to change."""
    return getattr(loader, "_dataloader", loader)
