"""All that is used of torch beyond its documented interface.

Each function tests for the private name when it is called, and describes what happens where a torch version lacks it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

_ITERABLE = 1  # _DatasetKind.Iterable


# The iterator, in the training process


def workers(iterator: Any) -> list[BaseProcess] | None:
    """The worker processes of an iterator. None if unknown: then new child processes are taken for them."""
    found = getattr(iterator, "_workers", None)
    return list(found) if isinstance(found, list) else None


def workers_of_failed_start(problem: BaseException) -> list[BaseProcess]:
    """The workers of the iterator in one of whose methods this was raised, when torch made it or began an epoch.

    Empty if unknown: then torch's error is not explained.
    """
    trace = problem.__traceback__
    # Not the frame that has caught it: f_locals would keep the exception there, and with it the workers.
    while trace is not None and (trace := trace.tb_next) is not None:
        if found := workers(trace.tb_frame.f_locals.get("self")):
            return found
    return []


def drop_iterator(loader: Any) -> None:
    """Drop the iterator that a loader keeps for persistent workers, which ends them.

    Without the attribute there is nothing to drop.
    """
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None


def batches_ordered(iterator: Any) -> int | None:
    """How many batches were requested from the workers.

    None if unknown: then workers that were started under admission with an empty dataset delay the iterator's end.
    """
    found = getattr(iterator, "_send_idx", None)
    return found if isinstance(found, int) else None


def batches_in_flight(iterator: Any) -> Collection[int] | None:
    """The numbers of the requested batches that were not returned yet.

    None if unknown: then an epoch with ``in_order=False`` cannot be resumed.
    """
    found = getattr(iterator, "_task_info", None)
    return found if isinstance(found, dict) else None


def all_batches_queued(iterator: Any) -> bool | None:
    """Whether the workers have made every batch that was requested; None if unknown."""
    try:
        if iterator._worker_result_queue.qsize() >= iterator._tasks_outstanding:
            return True
        # A worker whose stream has ended keeps outstanding requests that it will never answer.
        return None if iterator._dataset_kind == _ITERABLE else False
    except (AttributeError, NotImplementedError, OSError):
        return None


def all_requests_taken(iterator: Any) -> bool:
    """Whether the workers have taken every request for a batch; False if unknown."""
    try:
        return all(queue.empty() for queue in iterator._index_queues)
    except (AttributeError, OSError, TypeError):
        return False


def is_resume_message(message: Any) -> bool:
    """Whether torch tells persistent workers with it that an epoch begins.

    False if unknown: then it goes through a queue's thread, and so do all later messages to that worker.
    """
    return type(message).__name__ == "_ResumeIteration" and type(message).__module__.startswith("torch.")


def dataset_ended(iterator: Any) -> bool:
    """Whether an iterator without workers has reached the end of its IterableDataset.

    False if unknown: then a resumed run asks the dataset once more, which has nothing left.
    """
    return bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))


def index_drawn(problem: BaseException) -> bool:
    """Whether an iterator without workers had drawn the indices of a batch when this was raised in it.

    False if unknown: then a state that is saved after a batch has failed counts from the batches that were returned.
    """
    trace = problem.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_next_data" and _of_torch(trace.tb_frame.f_code.co_filename):
            return "index" in trace.tb_frame.f_locals
        trace = trace.tb_next
    return False


# The worker loop


def add_liveness_check(alive: Callable[[], bool]) -> None:
    """In a worker: end torch's loop also when ``alive`` returns False.

    torch compares the worker's parent with the one after ``worker_init_fn``. Without this check, a worker whose program
    was killed earlier never ends by itself.
    """
    from torch.utils.data import _utils

    worker: Any = getattr(_utils, "worker", None)
    kind: Any = getattr(worker, "ManagerWatchdog", None)
    if not isinstance(kind, type) or not hasattr(kind, "is_alive"):
        return

    def is_alive(self: Any) -> bool:
        return alive() and bool(kind.is_alive(self))

    worker.ManagerWatchdog = type("ManagerWatchdog", (kind,), {"is_alive": is_alive})


def workers_ending() -> Callable[[], bool] | None:
    """In a worker: a function that returns, without a lock, whether the loader is ending its workers.

    None if unknown: then torch waits five seconds for each worker that waits for memory.
    """
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None and frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back
    event = None if frame is None else frame.f_locals.get("done_event")
    # Not is_set() of multiprocessing's event, which takes a lock: a killed process would never release it.
    semaphore = getattr(getattr(event, "_flag", None), "_semlock", None)
    is_zero: Callable[[], bool] | None = getattr(semaphore, "_is_zero", None)
    return None if is_zero is None else lambda: not is_zero()


def current_fetcher(samples: Any) -> tuple[Any, bool] | None:
    """In a worker, within a collate function: (torch's fetcher, whether it loaded exactly these samples).

    The fetcher calls its ``collate_fn`` with the samples, and torch's worker loop sends the result. None in a loader
    that runs inside a worker, and where torch has no such object: then the batch is sent by torch.
    """
    frame = sys._getframe(2) if hasattr(sys, "_getframe") else None
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_name == "fetch":
            variables = frame.f_locals
            found = variables.get("self")
            if hasattr(found, "collate_fn"):
                called_by_loop = caller is not None and caller.f_code.co_name == "_worker_loop"
                loaded = any(value is samples for value in variables.values())
                return (found, loaded) if called_by_loop else None
        frame = caller
    return None


def collate_call() -> tuple[CodeType, int, CodeType] | None:
    """Two calls down from a collate function: the instruction of torch's fetcher that called it, and the loop's code.

    None if something else called it. An instruction that was seen to call ``collate_fn`` always does, and comparing it
    costs a tenth of ``current_fetcher``. The code object is not enough: ``fetch`` also calls the dataset, which may be
    ``map(collate_fn, ...)``.
    """
    frame = sys._getframe(3) if hasattr(sys, "_getframe") else None
    loop = None if frame is None else frame.f_back
    if frame is None or loop is None or frame.f_code.co_name != "fetch" or loop.f_code.co_name != "_worker_loop":
        return None
    return frame.f_code, frame.f_lasti, loop.f_code


def replace_tensor_collate(replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace what ``default_collate`` does with tensors, in this process.

    False where another library has replaced it already, or torch has no such table: then torch stacks the batch, and it
    is copied into the slot.
    """
    import torch

    try:
        from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
    except ImportError:
        return False
    if default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        return False
    default_collate_fn_map[torch.Tensor] = replacement(collate_tensor_fn)
    return True


def storage_id(tensor: Any) -> int:
    """The identity of a tensor's storage, by its address where torch does not expose the object's."""
    storage = tensor.untyped_storage()
    found = getattr(storage, "_cdata", None)
    return found if isinstance(found, int) else int(storage.data_ptr())


# Exceptions


def release_frames(problem: BaseException) -> None:
    """Remove torch's frames that hold the exception they raised from its traceback.

    Such a frame (``ExceptionWrapper.reraise``) makes a reference cycle: the exception, and with it the iterator and its
    workers, would live until the next garbage collection. Frames of the program stay.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [problem]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_cycles(one.__traceback__, one)
        chain += [one.__cause__, one.__context__]


def _without_cycles(trace: TracebackType | None, problem: BaseException) -> TracebackType | None:
    kept = []
    while trace is not None:
        frame = trace.tb_frame
        holds = _of_torch(frame.f_code.co_filename) and any(value is problem for value in frame.f_locals.values())
        if not holds:
            kept.append(trace)
        trace = trace.tb_next
    for before, after in zip(kept, [*kept[1:], None], strict=True):
        before.tb_next = after
    return kept[0] if kept else None


def _of_torch(filename: str) -> bool:
    import torch

    return filename.startswith(str(Path(torch.__file__).parent))
