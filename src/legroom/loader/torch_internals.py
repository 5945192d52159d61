"""What is read of torch's DataLoader beyond its documented interface, all of it here.

A torch that has a name no longer is torch's loader with less: each function says what is lost then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any


def workers(iterator: Any) -> list[BaseProcess] | None:
    """The worker processes of an iterator; None where torch does not tell: then the new child processes are taken."""
    found = getattr(iterator, "_workers", None)
    return list(found) if isinstance(found, list) else None


def batches_ordered(iterator: Any) -> int | None:
    """How many batches the workers have been asked for; None where torch does not tell.

    Without it, workers that start carefully over an empty dataset are waited for when the iterator ends.
    """
    found = getattr(iterator, "_send_idx", None)
    return found if isinstance(found, int) else None


def batches_under_way(iterator: Any) -> Collection[int] | None:
    """The numbers of those that have not been given out; None where torch does not tell.

    Without it, a pass with ``in_order=False`` cannot be resumed.
    """
    found = getattr(iterator, "_task_info", None)
    return found if isinstance(found, dict) else None


def dataset_ended(iterator: Any) -> bool:
    """Whether an iterator without workers has come to the end of its IterableDataset.

    Without it, resuming asks the dataset once more, which has nothing to give.
    """
    return bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))


def watch_parent(lives: Callable[[], bool]) -> None:
    """In a worker: end its loop also when ``lives`` says no.

    torch takes the parent process that a worker has after ``worker_init_fn`` for its program. Without this, a worker
    whose program was killed before that moment lives for ever.
    """
    from torch.utils.data import _utils

    worker: Any = getattr(_utils, "worker", None)
    kind: Any = getattr(worker, "ManagerWatchdog", None)
    if not isinstance(kind, type) or not hasattr(kind, "is_alive"):
        return

    def is_alive(self: Any) -> bool:
        return lives() and bool(kind.is_alive(self))

    worker.ManagerWatchdog = type("ManagerWatchdog", (kind,), {"is_alive": is_alive})


def workers_ending() -> Callable[[], bool] | None:
    """In a worker: asks, without waiting for anything, whether the loader is ending its workers.

    None where torch does not tell. Without it, torch waits five seconds for each worker that waits for memory.
    """
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None and frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back
    event = None if frame is None else frame.f_locals.get("done_event")
    # Not is_set(), which takes a lock: a program that is killed while it holds that lock never releases it.
    semaphore = getattr(getattr(event, "_flag", None), "_semlock", None)
    is_zero: Callable[[], bool] | None = getattr(semaphore, "_is_zero", None)
    return None if is_zero is None else lambda: not is_zero()


def fetching(samples: Any) -> tuple[Any, bool] | None:
    """In a worker, from within a collate function: (torch's fetcher, whether it has drawn exactly these samples).

    The fetcher calls its ``collate_fn`` with what it has drawn, and torch's worker loop sends the result. None in a
    loader that runs inside a worker, and where torch has no such object: then the batch travels torch's way.
    """
    frame = sys._getframe(2) if hasattr(sys, "_getframe") else None
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_name == "fetch":
            variables = frame.f_locals
            found = variables.get("self")
            if hasattr(found, "collate_fn"):
                called_by_loop = caller is not None and caller.f_code.co_name == "_worker_loop"
                drawn = any(value is samples for value in variables.values())
                return (found, drawn) if called_by_loop else None
        frame = caller
    return None


def release_frames(problem: BaseException) -> None:
    """Take torch's frames that hold the very exception they raised out of its traceback.

    Such a frame (``ExceptionWrapper.reraise``) is a reference cycle: the exception, and with it the iterator and its
    workers, would live until garbage is collected. Frames of the program stay, whatever they hold.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [problem]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without(one.__traceback__, one)
        chain += [one.__cause__, one.__context__]


def _without(trace: TracebackType | None, problem: BaseException) -> TracebackType | None:
    kept = []
    while trace is not None:
        frame = trace.tb_frame
        holds = _of_torch(frame.f_code.co_filename) and any(
            value is problem for value in frame.f_locals.values()
        )
        if not holds:
            kept.append(trace)
        trace = trace.tb_next
    for before, after in zip(kept, [*kept[1:], None], strict=True):
        before.tb_next = after
    return kept[0] if kept else None


def _of_torch(filename: str) -> bool:
    import torch

    return filename.startswith(str(Path(torch.__file__).parent))
