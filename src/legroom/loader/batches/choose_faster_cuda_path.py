"""Chooses between the paths for registered memory: copy engines, a kernel of few blocks, or torch's index_select.

The copy engines leave the GPU's cores to the training step, but each row costs the CPU two microseconds. A kernel costs
the CPU less and the GPU more. Which is cheaper depends on the rows and on the training step, so loops over scattered
rows (shuffled, or chosen by ``rows=``) try both in their first batches and keep the one with which the steps took less
time. The rows are the same on every path.

Time is taken on the GPU, with events on the consumer's stream. The CPU runs ahead of the GPU: its clock would count how
fast it queues work, and a path would live on what was prepared while the other one was measured.

A later loop over the same rows may train something else. It starts with the path that was chosen and tries both
shortly. If the other one was better this time, they are compared as in a first loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches.batch_settings import BatchSettings
from legroom.loader.batches.cuda_calls_for_gather import Driver
from legroom.loader.batches.cuda_copy_engine import PATH as ENGINE_PATH
from legroom.loader.batches.cuda_copy_engine import CopyEngineGatherer
from legroom.loader.batches.cuda_gather_base import CudaGatherer, RowLayout
from legroom.loader.batches.cuda_registered import KERNEL_PATH, SELECT_PATH, RegisteredColumns, RegisteredGatherer
from legroom.messages import joined, listed, say

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
PHASE = 20  # batches before the trial changes to the other path
_SETTLING = 10  # of these, not counted: the first ones were begun on the path before, and the GPU is behind the CPU
_PHASES = 10  # five for each path
_AS_GOOD = 1.01  # the copy engines are kept where they cost at most this much
_PHASES_AGAIN = 4  # of a later loop over the same rows


@dataclass(frozen=True, slots=True)
class PathChoice:
    """A path, and why it was chosen."""

    path: str
    why: str


_chosen: dict[tuple[Any, ...], PathChoice] = {}  # by device, batch size and row sizes


def open_registered(
    driver: Driver, rows: Mapping[str, RowLayout], register: Callable[[], RegisteredColumns], settings: BatchSettings
) -> CudaGatherer | PathTrial:
    """A gatherer on registered memory. Each gatherer registers for itself: the same files are locked once."""

    def engine(why: str) -> CudaGatherer:
        scattered = not settings.consecutive
        return _owning(register(), lambda owned: CopyEngineGatherer(driver, rows, owned, why, scattered=scattered))

    def kernel(why: str) -> CudaGatherer:
        compiled = driver.gather_kernel()
        return _owning(register(), lambda owned: RegisteredGatherer(driver, rows, owned, why, compiled))

    def select(why: str) -> CudaGatherer:
        return _owning(register(), lambda owned: RegisteredGatherer(driver, rows, owned, why))

    def kernel_or_select(why: str) -> CudaGatherer:
        try:
            return kernel(why)
        except CudaRefused as refusal:
            return select(joined([why, str(refusal)] if why else [str(refusal)]))

    openers = {ENGINE_PATH: engine, KERNEL_PATH: kernel, SELECT_PATH: select}
    why_not = driver.why_no_copy_engines()
    if settings.path is not None:
        if settings.path == ENGINE_PATH and why_not is not None:
            raise CudaRefused(why_not)
        return openers[settings.path](say("path={path!r} was given", path=settings.path))
    if why_not is not None:
        return kernel_or_select(why_not)
    if settings.consecutive:
        return engine(say("consecutive rows are one copy for the GPU's copy engines"))
    key = (str(driver.device), settings.batch_size, *sorted(kind.nbytes for kind in rows.values()))
    return PathTrial(driver, (engine, kernel_or_select), partial(_chosen.__setitem__, key), _chosen.get(key))


def _owning(registered: RegisteredColumns, make: Callable[[RegisteredColumns], CudaGatherer]) -> CudaGatherer:
    try:
        return make(registered)
    except BaseException:
        registered.release()
        raise


Opener = Callable[[str], CudaGatherer]


class PathTrial:
    """Gatherers of the same rows: they take turns in the first batches, and the best one stays."""

    def __init__(
        self,
        driver: Driver,
        openers: Sequence[Opener],
        on_choice: Callable[[PathChoice], None],
        before: PathChoice | None = None,
    ) -> None:
        self._driver, self._on_choice, self._before = driver, on_choice, before
        self._gatherers: list[CudaGatherer] = []
        self._handed = 0  # batches, until the choice
        self._since: Any = None  # the event after which a phase counts
        self._phases: list[tuple[str, Any, Any]] = []  # path, and the events between which batches count
        self._begun: list[tuple[NDArray, CudaGatherer]] = []
        self._kept: CudaGatherer | None = None
        self._why = say("the paths are being compared in the first {count} batches", count=PHASE * _PHASES)
        with ExitStack() as opened:
            for open_one in openers:
                self._gatherers.append(open_one(""))
                opened.callback(self._gatherers[-1].close)
            opened.pop_all()
        if before is not None:
            self._gatherers.sort(key=lambda gatherer: gatherer.path != before.path)

    @property
    def path(self) -> str:
        """The path of the next batch; it may change until the choice is made."""
        return self._current().path

    @property
    def why(self) -> str:
        return self._why

    @property
    def ahead(self) -> int:
        """That of the path of the next batch."""
        return self._current().ahead

    def gather(self, rows: NDArray) -> dict[str, torch.Tensor]:
        """The batch of these rows; until the choice, the time since the batch before is counted."""
        gatherer = self._current()
        for place, (asked, of_begun) in enumerate(self._begun):
            if asked is rows:
                del self._begun[: place + 1]  # those begun before it are of a loop that was left
                gatherer = of_begun
                break
        batch = gatherer.gather(rows)
        if self._kept is None:
            self._count(gatherer)
        elif len(self._gatherers) > 1:
            self._close_others()
        return batch

    def begin(self, rows: NDArray) -> None:
        """Prefetch a batch."""
        gatherer = self._current()
        self._begun = [*self._begun[-_SETTLING:], (rows, gatherer)]
        gatherer.begin(rows)

    def close(self) -> None:
        """Close all gatherers."""
        self._begun.clear()
        for gatherer in self._gatherers:
            gatherer.close()

    def _current(self) -> CudaGatherer:
        if self._kept is not None:
            return self._kept
        return self._gatherers[self._handed // PHASE % len(self._gatherers)]

    def _count(self, gatherer: CudaGatherer) -> None:
        """Mark where batches begin and end to count on the GPU; decide when it has passed all marks."""
        wanted = _PHASES if self._before is None else _PHASES_AGAIN
        if len(self._phases) < wanted:
            place = self._handed % PHASE
            self._handed += 1
            if place == _SETTLING:
                self._since = self._mark()
            elif place == PHASE - 1:
                self._phases.append((gatherer.path, self._since, self._mark()))
        elif all(end.query() for _, _, end in self._phases):  # never waited for
            self._decide()

    def _mark(self) -> Any:
        return self._driver.mark(self._driver.current(), timing=True)

    def _decide(self) -> None:
        seconds: dict[str, list[float]] = {gatherer.path: [] for gatherer in self._gatherers}
        for path, start, end in self._phases:
            seconds[path].append(start.elapsed_time(end) / 1e3 / (PHASE - 1 - _SETTLING))
        choice = choose(seconds)
        if self._before is None or choice.path == self._before.path:
            self._keep(choice)
        else:
            self._before, self._handed, self._phases = None, 0, []

    def _keep(self, choice: PathChoice) -> None:
        self._why = choice.why
        self._kept = next(gatherer for gatherer in self._gatherers if gatherer.path == choice.path)
        self._close_others()
        self._on_choice(choice)

    def _close_others(self) -> None:
        """Close what was not kept, once the batches that it began are taken."""
        needed = [self._kept, *(begun for _, begun in self._begun)]
        for gatherer in self._gatherers:
            if gatherer not in needed:
                gatherer.close()
        self._gatherers = [gatherer for gatherer in self._gatherers if gatherer in needed]


def choose(seconds: Mapping[str, list[float]]) -> PathChoice:
    """The path with the shortest steps, and why; the copy engines where the difference is small.

    ``seconds`` has the mean time per batch of each phase, by path.
    """
    # Not the mean: a phase with an evaluation or a checkpoint is long. Not the best one: that may be luck.
    steps = {path: median_low(taken) for path, taken in seconds.items()}
    best = min(steps, key=steps.__getitem__)
    path = ENGINE_PATH if steps.get(ENGINE_PATH, np.inf) <= _AS_GOOD * steps[best] else best
    rest = [
        say("with {path} {time:.2f} ms", path=other, time=1e3 * taken)
        for other, taken in steps.items()
        if other != path
    ]
    why = say("compared in this loop: {step:.2f} ms per batch, {rest}", step=1e3 * steps[path], rest=listed(rest))
    return PathChoice(path, why)
