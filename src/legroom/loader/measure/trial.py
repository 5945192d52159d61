"""The loop of a training without its model: a real loader at the settings asked about, in a child process.

Covers: two epochs, or as much of them as the time allows, with pauses in which the queues fill; telling what failed.
Does not cover: watching and stopping it (trial_guard.py). Imports little: what it holds itself is in the figures.

Run as ``python -m legroom.loader.measure.trial REQUEST ANSWER``. The answer is a line of JSON for each step, so that
what a killed child got done is known.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

_STILL_S, _LOOK_S = 0.1, 0.01  # without CPU time, that a worker waits; between two looks
_PAUSES_S = 20.0  # of all pauses together
_STREAM = 1  # torch's _DatasetKind.Iterable
_TAIL = 5  # lines of a traceback that say where it came from
_FILES = ("too many open files", "ancdata")
_SHM = ("bus error", "shared memory", "no space left on device", "</torch_", "unable to resize file")
_RAM = ("signal: killed", "sigkill", "not enough memory", "can't allocate memory", "cannot allocate memory")

Note = Callable[..., None]


def main(request: str, answer: str) -> None:
    """Run the loop that the request describes."""
    faulthandler.enable()
    with open(request, encoding="utf-8") as file:
        asked = json.load(file)
    if os.getcwd() not in sys.path:  # absent under PYTHONSAFEPATH
        sys.path.insert(0, os.getcwd())
    from legroom.loader.measure.named import resolve

    def found() -> tuple[Any, Any]:
        if sizes := asked.pop("sizes", None):
            asked.pop("spec"), asked.pop("collate")
            return StandIn(sizes, asked.pop("samples")), None
        named = resolve(asked.pop("spec"), asked.pop("collate"))
        return named.dataset, named.collate_fn

    run(found, answer, asked)
    os._exit(0)  # a dataset's threads or atexit hooks may hang


class StandIn:
    """Samples of which only the bytes are known: tensors of these sizes."""

    def __init__(self, sizes: list[int], samples: int) -> None:
        self._sizes, self._samples = sizes, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        import torch

        return tuple(torch.ones(size, dtype=torch.uint8) for size in self._sizes)


def run(found: Callable[[], tuple[Any, Any]], answer: str, asked: dict[str, Any]) -> None:
    """In the child: the loop, with every step noted in the file ``answer``."""
    first_to_go()
    sink = os.open(answer, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(**what: Any) -> None:
        os.write(sink, (json.dumps({**what, "time": time.monotonic()}) + "\n").encode())

    try:
        dataset, collate_fn = found()
        _loop(dataset, collate_fn, note, **asked)
    except BaseException as problem:  # SystemExit too: a script may exit while it is imported
        note(
            error=f"{type(problem).__name__}: {problem}"[:4000], pool=_pool(problem), lost=_lost(problem),
            semaphore=_innermost(problem).endswith("synchronize.py"), tail=_tail(problem),
        )  # fmt: skip


def first_to_go() -> None:
    """Ask the OOM killer to take this process and its workers before anything else, and end with whoever watches."""
    from legroom.system.child_processes import die_with_parent, prefer_oom_kill

    prefer_oom_kill()
    die_with_parent(signal.SIGKILL)


def _loop(
    dataset: Any,
    collate_fn: Any,
    note: Note,
    *,
    kind: str,
    batch_size: int,
    workers: int,
    prefetch: int,
    persistent: bool,
    start_method: str | None,
    seconds: float,
    batch_seconds: float,
) -> None:
    options: dict[str, Any] = {}
    if workers:
        options = {
            "prefetch_factor": prefetch,
            "persistent_workers": persistent,
            "multiprocessing_context": start_method,
        }
    home = "legroom.loader.dataloader" if kind == "legroom" else "torch.utils.data"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads, of more workers than cores
        loader = import_module(home).DataLoader(
            dataset, batch_size=batch_size, num_workers=workers, collate_fn=collate_fn, shuffle=_shuffled(dataset),
            **options,
        )  # fmt: skip
        note(step="start", process=_anonymous())
        pauses = _Pauses(max(_STILL_S, 2 * batch_seconds))
        least = workers * (prefetch + 2) + 3  # by then every worker has made several batches
        whole = True
        batch = None  # stays bound from one epoch to the next, as in a training's for loop
        for epoch, share in enumerate((0.6, 0.4)):
            done, until = 0, 0.0
            enough = least * (
                2 - epoch
            )  # twice in the first epoch: whether it still grows is seen in the second half
            source = iter(loader)
            for batch in source:  # noqa: B007  bound is what it is for
                done += 1
                if done == 1:  # starting the workers is not in the time
                    until = time.monotonic() + share * seconds
                if (
                    done == least or done & (done - 1) == 0
                ):  # early ones fill the queues, later ones show growth
                    full = None
                    if workers:
                        full = pauses.wait(source if kind == "torch" else None)
                    note(step="batch", epoch=epoch, batches=done, fds=_open_files(), full=full)
                if done >= enough and time.monotonic() > until:
                    whole = False
                    break
            del source  # its workers end before those of the next epoch start
            note(step="epoch", epoch=epoch, batches=done, fds=_open_files())
        del batch
        note(step="end", whole=whole)


def _shuffled(dataset: Any) -> bool:
    """Whether samples can be drawn in any order: then they are, which touches most of what the dataset holds."""
    from legroom.loader.measure.draw import is_iterable, length

    return not is_iterable(dataset) and bool(length(dataset))


class _Pauses:
    """Waiting until the workers have filled the queues, within a time for all pauses together."""

    def __init__(self, still: float) -> None:
        self._still, self._left = still, _PAUSES_S

    def wait(self, source: Any) -> bool | None:
        """Until no worker has used a CPU for a while, and every batch they were asked for is in the queue.

        Whether it was; None where that cannot be seen. A worker that waits for a disk uses no CPU either.
        """
        began = since = time.monotonic()
        last, full = _activity(), _all_in_queue(source)
        while (now := time.monotonic()) < began + self._left:
            if now > since + self._still and full is not False:
                break
            time.sleep(_LOOK_S)
            full = _all_in_queue(source)
            if (current := _activity()) != last:
                last, since = current, time.monotonic()
        self._left = max(self._still, self._left - (now - began))
        return full


def _all_in_queue(source: Any) -> bool | None:
    """Whether the workers of torch's iterator have nothing left to do; None: it does not show that."""
    try:
        if source._worker_result_queue.qsize() >= source._tasks_outstanding:
            return True
        # Of a worker whose stream has ended, batches are outstanding that will never come.
        return None if source._dataset_kind == _STREAM else False
    except (AttributeError, NotImplementedError, OSError):
        return None


def _activity() -> list[tuple[str, str, bool]]:
    """CPU time of each child, and whether it is about to run."""
    found = []
    for pid in _children():
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        found.append((fields[11], fields[12], fields[0] in "RD"))
    return [] if any(running for _, _, running in found) else found


def _children() -> list[str]:
    found = []
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                found += file.read().split()
    except OSError:  # a kernel without the file: the pause is a fixed one
        pass
    return found


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return 0


def _anonymous() -> int:
    """Anonymous memory of this process: all that forked workers could come to copy, and more."""
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
    except (OSError, StopIteration, ValueError):
        return 0


def _pool(problem: BaseException | None) -> str | None:
    """The pool whose end an error tells of; None: it tells of something else."""
    while problem is not None:
        number = getattr(problem, "errno", None)
        if number in (errno.EMFILE, errno.ENFILE):
            return "fds"
        if isinstance(problem, MemoryError) or number == errno.ENOMEM:
            return "ram"
        if getattr(problem, "code", None) == "budget-too-small":
            return "ram"
        text = str(problem).lower()
        for pool, marks in (("fds", _FILES), ("shm", _SHM), ("ram", _RAM)):
            if any(mark in text for mark in marks):
                return pool
        problem = problem.__cause__ or problem.__context__
    return None


def _lost(problem: BaseException) -> bool:
    """Whether a worker closed the connection by which it hands over a batch: it died, or could not open a file."""
    return isinstance(problem, EOFError | ConnectionError) and "multiprocessing" in _innermost(problem)


def _innermost(problem: BaseException) -> str:
    """The file whose code raised it."""
    frames = traceback.extract_tb(problem.__traceback__)
    return frames[-1].filename if frames else ""


def _tail(problem: BaseException) -> list[str]:
    lines = (line.strip() for line in "".join(traceback.format_exception(problem)).splitlines())
    return [line for line in lines if line.strip("^~ ")][-_TAIL:]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
