"""Starts a producer: a fresh interpreter in a session of its own, which gets the dataset as a pickle.

It inherits no descriptor but that pickle, its log, the group's lock and a connection to the trainer that starts it. It
sees no GPU. A dataset that cannot be pickled is handed over by fork, but only while this process has one thread and no
CUDA: locks of other threads would stay locked, and CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from legroom.errors import Unpicklable
from legroom.loader.dataloader.sharing.group_folder import GroupFiles
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import Position
from legroom.loader.dataloader.sharing.producer_messages import Connection
from legroom.messages import say
from legroom.system.lazy_and_optional_imports import lazy_import

PRODUCER_VARIABLE = "LEGROOM_SHARE_PRODUCER"  # set in a producer and its workers
_MOST_PARTS = 10_000
_CODE = (
    "import os; os.fork() and os._exit(0); os.setsid(); "
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from legroom.loader.dataloader.sharing.producer_main import main; main(given)"
)


@dataclass
class Recipe:
    """What a producer needs to make batches."""

    name: str
    settings: dict[str, str]
    seed: int
    dataset: Any
    sampler: Any  # of batches, or of single samples
    batched: bool
    generator: Any
    collate_fn: Any
    worker_init_fn: Any
    num_workers: int
    prefetch_factor: int | None
    timeout: float
    method: str  # how workers are started
    memory_budget: int | str
    persistent_workers: bool
    dtype: str  # torch's default
    stream: bool = False  # an IterableDataset, of which this is needed:
    batch_size: int | None = None
    drop_last: bool = False


def loader_class() -> Any:
    """``legroom.DataLoader``, which uses this package: imported by its name when it is needed."""
    return lazy_import("legroom.loader.dataloader.dataloader").DataLoader


def pickled(recipe: Recipe) -> int:
    """A memfd with the recipe; Unpicklable with the part that cannot be pickled."""
    file = io.BytesIO()
    try:
        pickle.dump(recipe, file, 5)
    except Exception as problem:
        raise unpicklable(recipe, problem) from problem
    head = pickle.dumps(_preparation(needs_main=re.search(b"__main__", file.getbuffer()) is not None), 5)
    fd = os.memfd_create("legroom-dataset", os.MFD_CLOEXEC)
    try:
        with open(os.dup(fd), "wb") as target:
            target.write(head)
            target.write(file.getbuffer())
    except BaseException:
        os.close(fd)
        raise
    return fd


def unpickled(fd: int) -> Recipe:
    """In a producer: the recipe. The program's main module is imported first, if it is needed."""
    from multiprocessing import spawn

    with open(f"/proc/self/fd/{fd}", "rb") as file:  # with a position of its own
        spawn.prepare(pickle.load(file))
        recipe = pickle.load(file)
    assert isinstance(recipe, Recipe)
    return recipe


def copy_of_dataset(fd: int) -> Any:
    """In a trainer: the dataset as it was pickled."""
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        pickle.load(file)  # what a producer needs first
        recipe = pickle.load(file)
    assert isinstance(recipe, Recipe)
    return recipe.dataset


def _preparation(*, needs_main: bool) -> dict[str, Any]:
    """What multiprocessing tells a spawned process: paths, arguments, the main module."""
    from multiprocessing import spawn

    data: dict[str, Any] = spawn.get_preparation_data("legroom-producer")
    data.pop("authkey", None)
    if not needs_main:
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


def start(files: GroupFiles, blob: int, settings: dict[str, str], position: Position, lock: int) -> Connection:
    """Start a producer at this position, which inherits the lock; the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given = {
        "path": sys.path, "folder": str(files.path), "key": files.key, "settings": settings, "start": position,
        "socket": theirs.fileno(), "lock": lock,
    }  # fmt: skip
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    log = files.open_log()
    try:
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _CODE, json.dumps(given)], stdin=blob, stdout=log, stderr=log,
            pass_fds=[theirs.fileno(), lock], start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", PRODUCER_VARIABLE: "1"},
        )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    finally:
        os.close(log)
        theirs.close()
    process.wait()  # of the interpreter that forks at once: the producer is no child of this process
    return Connection(ours)


def why_no_fork() -> str | None:
    """Why this process cannot hand a dataset over by fork, or None."""
    import torch

    if torch.cuda.is_initialized():
        return say("this process uses CUDA")
    threads = len(os.listdir("/proc/self/task"))
    return None if threads == 1 else say("this process has {count} threads", count=threads)


def fork(files: GroupFiles, recipe: Recipe, position: Position, lock: int, serve: Callable[..., None]) -> Connection:
    """Hand the recipe over by fork; ``serve`` runs the producer in the child and does not return."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = files.open_log()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.environ.update({"CUDA_VISIBLE_DEVICES": "", PRODUCER_VARIABLE: "1"})
            _keep_only(log, theirs.fileno(), lock)
            serve(recipe, str(files.path), files.key, position, theirs.fileno(), lock)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(log)
    theirs.close()
    os.waitpid(pid, 0)  # the child in between, which ends at once
    return Connection(ours)


def _keep_only(log: int, *others: int) -> None:
    """Close every other descriptor: the terminal, files and locks of the trainer."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in map(int, os.listdir("/proc/self/fd")):  # not up to the limit, which may have been lowered
        if fd not in (0, 1, 2, *others):
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(fd)


# What cannot be pickled


def unpicklable(recipe: Recipe, problem: Exception) -> Unpicklable:
    """The error with the path of the part that cannot be pickled."""
    parts = {"dataset": recipe.dataset, "collate_fn": recipe.collate_fn, "worker_init_fn": recipe.worker_init_fn,
             "sampler": recipe.sampler, "generator": recipe.generator}  # fmt: skip
    for name, part in parts.items():
        if (cause := _pickling_problem(part)) is not None:
            path, value = find_unpicklable(part, name)
            why_not = why_no_fork()
            return Unpicklable(
                say("{path} cannot be sent to the process that makes the batches", path=path),
                why=say("{value} must be pickled, which fails: {problem}", value=_short(value), problem=cause)
                if why_not is None
                else say(
                    "{value} must be pickled, which fails: {problem}. It is not handed over by fork: {why_not}",
                    value=_short(value), problem=cause, why_not=why_not,
                ),
                fix=(
                    say("define it at the top level of a module: no lambda, no function inside a function"),
                    say("open files and connections at first use, not in __init__"),
                    say("or begin the first epoch before CUDA and threads are used"),
                ),
            )  # fmt: skip
    return Unpicklable(say("the dataset cannot be sent to the process that makes the batches"), why=str(problem))


def find_unpicklable(value: Any, path: str) -> tuple[str, Any]:
    """The deepest part that cannot be pickled, and its path: ``dataset.transform.transforms[2]``."""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for name, part in _parts(value):
            if _pickling_problem(part) is not None:
                path, value = path + name, part
                break
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    found: Iterator[tuple[str, Any]]
    if isinstance(value, Mapping):
        found = ((f"[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, (list, tuple)):
        found = ((f"[{number}]", one) for number, one in enumerate(value))
    else:
        found = ((f".{name}", one) for name, one in getattr(value, "__dict__", {}).items())
        if isinstance(value, type) or hasattr(value, "__code__"):
            found = iter(())
    for number, one in enumerate(found):
        if number >= _MOST_PARTS:
            return
        yield one


def _pickling_problem(value: Any) -> str | None:
    try:
        pickle.dumps(value, 5)
    except Exception as problem:
        return str(problem)
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
