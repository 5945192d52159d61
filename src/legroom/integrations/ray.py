"""A guard for your own training loop in a Ray Train worker, and the nodes of a cluster: warm, doctor, entries, drop.

    def train_loop_per_worker(config):
        with guarded() as guard:
            for epoch in range(epochs):
                guard.epoch(epoch, loader)
                for batch in loader:
                    ...
                    if guard.step() is not None:
                        guard.report(metrics, checkpoint=...)
                guard.report(metrics)

Uses Ray's ranks, logger and wrapped loaders, and reports alarms as metrics of ``ray.train.report``; guard/ does the
rest. Your loop saves the checkpoint itself.

``ray.train.report`` is a barrier that every worker must pass equally often. So alarms wait for the loop's next report,
and a checkpoint is requested on all workers at the same step or on none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from legroom.errors import UsageError
from legroom.integrations.guard import Guard
from legroom.integrations.ray_cluster_commands import doctor, drop, entries, warm
from legroom.loader.rank_sampler import process_group
from legroom.messages import phrase, say
from legroom.records.settings_and_overrides import Settings
from legroom.system.lazy_and_optional_imports import require

__all__ = ["RayGuard", "doctor", "drop", "entries", "guarded", "warm"]

LOGGER = "ray.train.legroom"  # a child of Ray Train's logger, which a worker prints and stores


class RayGuard:
    """Guards a worker's training run from ``start`` to ``end``; also a context manager."""

    def __init__(self, **options: Any) -> None:
        self.guard = Guard(**options)
        self.guard.report = self._keep
        self._train = require("ray.train", "", phrase("this callback"), package="'ray[train]'")
        self._together = True
        self._numbers: dict[str, float] = {}

    def start(self) -> None:
        """Training begins. Calling it again does nothing."""
        if self.guard.watch is not None:
            return
        local_rank, workers = self._ranks()
        self.guard.logger = logging.getLogger(LOGGER)
        self.guard.main = local_rank == 0
        self._together = workers == 1 or process_group() is not None
        if not self._together and self.guard.main:
            self.guard.logger.warning(
                "%s",
                say("checkpoints are off: the {workers} workers need a torch process group to agree on one",
                    workers=workers),
            )  # fmt: skip
        self.guard.start()

    def model_ready(self) -> None:
        """The model and its optimizer are on their device."""
        self.guard.model_ready()

    def epoch(self, number: int, loader: Any = None, accumulation: int = 1) -> Settings | None:
        """An epoch over that loader begins, prepared by Ray or not."""
        return self.guard.epoch(number, _inside(loader), accumulation)

    def step(self) -> str | None:
        """An optimizer step is done. Returns why every worker should report a checkpoint now, or None."""
        why = self.guard.step()
        return why if self._together else None

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, **options: Any) -> None:
        """Call ``ray.train.report`` with the alarms up to the last step among the metrics.

        Args:
            metrics: Your metrics.
            checkpoint: A ``ray.train.Checkpoint``, or None.
            **options: Further options of ``ray.train.report``.
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
        """Keep the worst value of an alarm raised repeatedly between two reports: highest level, least time."""
        for name, number in numbers.items():
            worse = min if name.endswith("/seconds_left") else max
            self._numbers[name] = worse(number, self._numbers.get(name, number))

    def _ranks(self) -> tuple[int, int]:
        """The rank on this machine, and the number of workers on all machines."""
        try:
            context = self._train.get_context()
            return context.get_local_rank(), context.get_world_size()
        except (RuntimeError, DeprecationWarning) as problem:  # Ray raises the latter inside a Tune function
            raise UsageError(
                say("this process is not a Ray Train worker"),
                why=str(problem),
                fix=(
                    say("call guarded() inside train_loop_per_worker"),
                    say("or use legroom.integrations.guard.Guard, which needs no framework"),
                ),
            ) from problem


def guarded(**options: Any) -> RayGuard:
    """A guard for this worker's training run; use it in a ``with`` statement.

    Entering it outside a Ray Train worker raises UsageError, because there is nothing to report to.

    Args:
        **options: Those of ``legroom.integrations.guard.Guard``.
    """
    return RayGuard(**options)


def _inside(loader: Any) -> Any:
    """The loader that ``prepare_data_loader`` wrapped: it is iterated, so it is the one to change."""
    return getattr(loader, "_dataloader", loader)
