"""Runs a DataLoader with given settings for about a second, and times the training step on a few real batches."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from legroom.advice.recommend import Rung, Step
from legroom.errors import UsageError
from legroom.loader.measure.clock import Clock
from legroom.loader.measure.draw import draw, is_iterable, length
from legroom.loader.measure.transport import LoaderKind, loader_class
from legroom.system.child_processes import ExitStatus
from legroom.words import say

_LIMIT = 60.0  # seconds until a run in a child counts as failed


def run_loader(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None,
    rung: Rung,
    kind: LoaderKind,
    *,
    step_seconds: float = 0.0,
    seconds: float = 1.0,
) -> float:
    """Samples per second with a step of ``step_seconds``, measured after the first batch."""
    import torch

    # In a forked child the other threads of torch's pool do not exist, and their first use would hang.
    torch.set_num_threads(1)
    arguments: dict[str, Any] = {
        "batch_size": rung.batch,
        "num_workers": rung.workers,
        "collate_fn": collate_fn,
    }
    if rung.workers:
        arguments["prefetch_factor"] = rung.prefetch
    if not is_iterable(dataset):
        arguments["shuffle"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of more workers than cores, which is what is measured
        loader = loader_class(kind)(dataset, **arguments)
        batches, started = 0, 0.0
        while True:
            for _ in loader:
                if not started:  # the first batch includes the start of the workers
                    started = time.perf_counter()
                    continue
                time.sleep(step_seconds)
                batches += 1
                if time.perf_counter() - started > seconds:
                    break
            if time.perf_counter() - started > seconds:
                break
    return batches * rung.batch / (time.perf_counter() - started)


def run_loader_in_child(dataset: Any, collate_fn: Callable[[Any], Any] | None, rung: Rung, kind: LoaderKind,
                  step_seconds: float) -> float | str:  # fmt: skip
    """The same in a forked child, so that its crash is not ours; a string describes a failure."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return run_loader(dataset, collate_fn, rung, kind, step_seconds=step_seconds)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        try:
            theirs.send(run_loader(dataset, collate_fn, rung, kind, step_seconds=step_seconds))
        except Exception as problem:  # any exception of the user's code
            theirs.send(f"{type(problem).__name__}: {problem}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 3.12 on warns of forking with threads; the child uses none of them
        child = context.Process(target=work)
        child.start()
    theirs.close()
    try:
        if not ours.poll(_LIMIT):
            return say("no batch within {limit:.0f} s", limit=_LIMIT)
        found: float | str = ours.recv()
        return found
    except EOFError:
        child.join()
        return say("the process ended: {how}", how=str(ExitStatus.of(child.exitcode or 0)))
    finally:
        child.kill()
        child.join()
        ours.close()


_SECONDS = 1.5
_MOST = 5


def time_step(
    dataset: Any, collate_fn: Callable[[Any], Any] | None, batch_size: int, step: Callable[[Any], Any]
) -> Step:
    """Time one call with a batch. It is the real step and changes the model. The first call is a warm-up."""
    if collate_fn is None:
        from torch.utils.data import default_collate

        collate_fn = default_collate
    drawn = draw(dataset, length(dataset), together=batch_size, samples=batch_size, seconds=_SECONDS / 3)
    batch = collate_fn([drawn.samples[number % len(drawn.samples)] for number in range(batch_size)])
    laps: list[Clock] = []
    deadline = time.monotonic() + _SECONDS
    while len(laps) < 1 + _MOST and (len(laps) < 2 or time.monotonic() < deadline):
        before = Clock.now()
        try:
            step(batch)
            _synchronize()
        except Exception as problem:  # any exception of the user's code
            raise UsageError(
                say("step(batch) failed on a batch of {count}", count=batch_size),
                why=say("{kind}: {text}", kind=type(problem).__name__, text=problem),
                fix=(say("run step(batch) on one batch of the dataset first"),),
            ) from problem
        laps.append(Clock.now().since(before))
    seconds = statistics.median(lap.undisturbed for lap in laps[1:])
    cpu = statistics.median(lap.cpu for lap in laps[1:])
    return Step(seconds, cpu)


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
