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
_LONGEST_S = 20.0  # of a pause
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
        note(error=f"{type(problem).__name__}: {problem}"[:4000], pool=_pool(problem), tail=_tail(problem))


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
        least = workers * (prefetch + 2) + 3  # by then every worker has made several batches
        whole = True
        batch = None  # stays bound from one epoch to the next, as in a training's for loop
        for epoch, share in enumerate((0.6, 0.4)):
            done, until = 0, 0.0
            enough = least * (
                2 - epoch
            )  # twice in the first epoch: whether it still grows is seen in the second half
            for batch in loader:  # noqa: B007  bound is what it is for
                done += 1
                if done == 1:  # starting the workers is not in the time
                    until = time.monotonic() + share * seconds
                if (
                    done == least or done & (done - 1) == 0
                ):  # early ones fill the queues, later ones show growth
                    if workers:
                        _pause(max(_STILL_S, 2 * batch_seconds))
                    note(step="batch", epoch=epoch, batches=done, fds=_open_files())
                if done >= enough and time.monotonic() > until:
                    whole = False
                    break
            note(step="epoch", epoch=epoch, batches=done, fds=_open_files())
        del batch
        note(step="end", whole=whole)


def _shuffled(dataset: Any) -> bool:
    """Whether samples can be drawn in any order: then they are, which touches most of what the dataset holds."""
    from legroom.loader.measure.draw import is_iterable, length

    return not is_iterable(dataset) and bool(length(dataset))


def _pause(still: float) -> None:
    """Wait until the workers have filled the queues: for ``still`` seconds, in which any would have made a batch, none
    has used a CPU."""
    now = time.monotonic()
    end, since, last = now + _LONGEST_S, now, _activity()
    while (now := time.monotonic()) < end and now < since + still:
        time.sleep(_LOOK_S)
        if (current := _activity()) != last:
            last, since = current, time.monotonic()


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


def _tail(problem: BaseException) -> list[str]:
    lines = (line.strip() for line in "".join(traceback.format_exception(problem)).splitlines())
    return [line for line in lines if line.strip("^~ ")][-_TAIL:]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
