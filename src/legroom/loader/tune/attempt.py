"""A loader really run with given settings for a short while: how many samples come a second.

Covers: one attempt, and one in a forked child so that its death is not ours. Does not cover: which settings to try
(budget.climbing).

Owned here: the child of ``attempt_apart``, ended before it returns.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from typing import Any

from legroom.budget.choose import Rung
from legroom.loader.measure.draw import is_iterable
from legroom.loader.tune.transport import Kind, loader_class
from legroom.system.child_processes import ExitStatus
from legroom.words import say

_LIMIT = 60.0  # seconds for a child to come back before the attempt counts as failed


def attempt(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None,
    rung: Rung,
    kind: Kind,
    *,
    step_seconds: float = 0.0,
    seconds: float = 1.0,
) -> float:
    """Samples a second behind a step of ``step_seconds``, once the first batch is there."""
    import torch

    torch.set_num_threads(
        1
    )  # in a forked child other threads of the pool are gone, and the first use would hang
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
        warnings.simplefilter("ignore")  # more workers than cores is what is being tried
        loader = loader_class(kind)(dataset, **arguments)
        batches, started = 0, 0.0
        while True:
            for _ in loader:
                if not started:  # the first fills the queues, and their start is not the pace
                    started = time.perf_counter()
                    continue
                time.sleep(step_seconds)
                batches += 1
                if time.perf_counter() - started > seconds:
                    break
            if time.perf_counter() - started > seconds:
                break
    return batches * rung.batch / (time.perf_counter() - started)


def attempt_apart(dataset: Any, collate_fn: Callable[[Any], Any] | None, rung: Rung, kind: Kind,
                  step_seconds: float) -> float | str:  # fmt: skip
    """The same in a child, where one can be forked; in words, how it failed."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return attempt(dataset, collate_fn, rung, kind, step_seconds=step_seconds)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        try:
            theirs.send(attempt(dataset, collate_fn, rung, kind, step_seconds=step_seconds))
        except Exception as problem:  # whatever the user's own code raises
            theirs.send(f"{type(problem).__name__}: {problem}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 3.12 on warns of forking with threads; the child uses none of them
        child = context.Process(target=work)
        child.start()
    theirs.close()
    try:
        if not ours.poll(_LIMIT):
            return say("nothing came within {limit:.0f} s", limit=_LIMIT)
        found: float | str = ours.recv()
        return found
    except EOFError:
        child.join()
        return say("the process ended: {how}", how=str(ExitStatus.of(child.exitcode or 0)))
    finally:
        child.kill()
        child.join()
        ours.close()
