"""Chooses between the paths for registered memory: copy engines, a kernel of few blocks, or torch's index_select.

The copy engines leave the GPU's cores to the training step, but each row costs the CPU two microseconds. A kernel costs
the CPU less and the GPU more. Which is cheaper depends on the rows and on the training step, so shuffled loops try both
in their first batches and keep the one with which the steps took less time. The rows are the same on every path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches.batch_settings import BatchSettings
from legroom.loader.batches.cuda_copy_engine import PATH as ENGINE_PATH
from legroom.loader.batches.cuda_copy_engine import CopyEngineGatherer
from legroom.loader.batches.cuda_gather_base import CudaGatherer, RowLayout
from legroom.loader.batches.cuda_registered import KERNEL_PATH, SELECT_PATH, RegisteredColumns, RegisteredGatherer
from legroom.loader.batches.cuda_runtime import Driver
from legroom.messages import say

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
PHASE = 16  # batches before the trial changes to the other path
_SETTLING = 6  # of these, not counted: the GPU still works on batches of the other path
_PHASES = 8
_AS_GOOD = 1.01  # the copy engines are kept where they cost at most this much
_chosen: dict[tuple[Any, ...], tuple[str, str]] = {}  # path and why, by device, batch size and row sizes


def open_registered(
    driver: Driver, rows: Mapping[str, RowLayout], registered: RegisteredColumns, settings: BatchSettings
) -> CudaGatherer | PathTrial:
    """A gatherer on registered memory; it owns ``registered``, unless it raises."""
    shuffled = settings.shuffle

    def engine(why: str) -> CudaGatherer:
        return CopyEngineGatherer(driver, rows, registered, why, shuffled=shuffled)

    def kernel(why: str) -> CudaGatherer:
        return RegisteredGatherer(driver, rows, registered, why, driver.gather_kernel())

    def select(why: str) -> CudaGatherer:
        return RegisteredGatherer(driver, rows, registered, why)

    openers = {ENGINE_PATH: engine, KERNEL_PATH: kernel, SELECT_PATH: select}
    why_not = driver.why_no_copy_engines()
    if settings.path is not None:
        if settings.path == ENGINE_PATH and why_not is not None:
            raise CudaRefused(why_not)
        return openers[settings.path](say("path={path!r} was given", path=settings.path))
    if why_not is not None:
        return select(why_not)
    if not shuffled:
        return engine(say("consecutive rows are one copy for the GPU's copy engines"))
    key = (str(driver.device), settings.batch_size, *sorted(kind.nbytes for kind in rows.values()))
    if key in _chosen:
        path, why = _chosen[key]
        return openers[path](why)
    try:
        by_cores = kernel("")
    except CudaRefused:
        by_cores = select("")
    registered.users += 1
    try:
        return PathTrial(engine(""), by_cores, lambda *found: _chosen.__setitem__(key, found))
    except BaseException:
        by_cores.close()
        raise


class PathTrial:
    """Two gatherers of the same rows: they take turns in the first batches, and the better one stays."""

    def __init__(self, engine: CudaGatherer, by_cores: CudaGatherer, on_choice: Callable[[str, str], None]) -> None:
        self._engine, self._by_cores, self._on_choice = engine, by_cores, on_choice
        self._seconds: dict[str, list[float]] = {engine.path: [], by_cores.path: []}
        self._handed = 0  # batches, until the choice
        self._since = 0.0
        self._begun: tuple[NDArray, CudaGatherer] | None = None
        self._kept: CudaGatherer | None = None
        self._why = say("the paths are being compared in the first {count} batches", count=PHASE * _PHASES)

    @property
    def path(self) -> str:
        """The path of the next batch; it may change until the choice is made."""
        return self._current().path

    @property
    def why(self) -> str:
        return self._why

    def gather(self, rows: NDArray) -> dict[str, torch.Tensor]:
        """The batch of these rows; until the choice, the time since the batch before is counted."""
        begun, self._begun = self._begun, None
        gatherer = begun[1] if begun is not None and begun[0] is rows else self._current()
        batch = gatherer.gather(rows)
        if self._kept is None:
            self._count(gatherer)
        return batch

    def begin(self, rows: NDArray) -> None:
        """Prefetch the next batch."""
        gatherer = self._current()
        self._begun = rows, gatherer
        gatherer.begin(rows)

    def close(self) -> None:
        """Close both gatherers."""
        self._begun = None
        self._engine.close()
        self._by_cores.close()

    def _current(self) -> CudaGatherer:
        if self._kept is not None:
            return self._kept
        return self._by_cores if self._handed // PHASE % 2 else self._engine

    def _count(self, gatherer: CudaGatherer) -> None:
        now = time.perf_counter()
        place = self._handed % PHASE
        if place == _SETTLING:
            self._since = now
        elif place == PHASE - 1:
            self._seconds[gatherer.path].append((now - self._since) / (PHASE - 1 - _SETTLING))
        self._handed += 1
        if self._handed == PHASE * _PHASES:
            path, self._why = choose(self._seconds)
            kept, other = (
                (self._engine, self._by_cores) if path == self._engine.path else (self._by_cores, self._engine)
            )
            self._kept = kept
            other.close()
            self._on_choice(path, self._why)


def choose(seconds: Mapping[str, list[float]]) -> tuple[str, str]:
    """The path with the shorter steps, and why; the copy engines where the difference is small.

    ``seconds`` has the mean time per batch of each phase, by path.
    """
    # The best phase of each: others were lengthened by warming up, by an evaluation or by a checkpoint.
    steps = {path: min(taken) for path, taken in seconds.items()}
    other = next(path for path in steps if path != ENGINE_PATH)
    path = ENGINE_PATH if steps[ENGINE_PATH] <= _AS_GOOD * steps[other] else other
    rest = other if path == ENGINE_PATH else ENGINE_PATH
    return path, say(
        "compared in this loop: {step:.2f} ms per batch, with {rest} {slower:.2f} ms",
        step=1e3 * steps[path], rest=rest, slower=1e3 * steps[rest],
    )  # fmt: skip
