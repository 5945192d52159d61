"""Play real torch DataLoaders and tell how much of /dev/shm each took at its peak.

Run as a script inside a private mount namespace: cases as JSON lines on stdin, results as JSON lines on stdout. The
consumer stalls after a batch until every queue is full, so that the peak is what the settings can reach and not what
a fast consumer happened to see. Each case has a process group of its own, which is ended with it: torch takes many
seconds to end the workers of a loader that failed. With ``check`` in a case, `legroom.check` is asked first, about the same dataset.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

SAMPLES = 4  # in a batch
STILL = 1.0  # seconds without change that mean, where room may be short, that no worker will write any more
PATIENCE = 60.0
_STALLS = 3
_failed: list[Exception] = []  # with the loaders in their frames: torch would take its time to end those


class Same(Dataset[Any]):
    """The same tensors for every index: their bytes are what is measured."""

    def __init__(self, tensors: list[int], batches: int) -> None:
        self.sample = tuple(torch.ones(nbytes // SAMPLES, dtype=torch.uint8) for nbytes in tensors)
        self.length = batches * SAMPLES

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.sample


def used() -> int:
    room = os.statvfs("/dev/shm")
    return (room.f_blocks - room.f_bfree) * room.f_frsize


class Peak:
    """The most that was in use while the block ran, by a thread that looks as often as it can."""

    def __enter__(self) -> Peak:
        self.most, self._end = used(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end:
            self.most = max(self.most, used())
            time.sleep(0.0005)

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._thread.join()


def emptied() -> None:
    """Wait until all that a case held is gone; what it left by name, as killed programs do, is removed."""
    for name in os.listdir("/dev/shm"):
        os.unlink(f"/dev/shm/{name}")
    deadline = time.monotonic() + PATIENCE
    while used():
        assert time.monotonic() < deadline, "something still holds /dev/shm"
        time.sleep(0.002)


def settle(full: int, still: float) -> None:
    """Wait until the queues are full, or until nothing has changed for ``still`` seconds."""
    last, since = used(), time.monotonic()
    while last < full and time.monotonic() < since + still:
        time.sleep(0.002)
        now = used()
        if now != last:
            last, since = now, time.monotonic()


def play(case: dict[str, Any]) -> dict[str, Any]:
    """Run one setting and tell its peak, or how it failed."""
    torch.multiprocessing.set_sharing_strategy(case["sharing"])
    data = Same(case["tensors"], case["batches"])
    settings = {"num_workers": case["workers"], "prefetch_factor": case["prefetch"] if case["workers"] else None}
    asked = ask(data, settings) if case.get("check") else None
    loaders = [
        DataLoader(data, batch_size=SAMPLES, multiprocessing_context="fork" if case["workers"] else None, **settings)
        for _ in range(case["loaders"])
    ]
    gc.collect()
    before, failure = used(), None
    with Peak() as peak:
        try:
            consume(loaders, case, before)
        except (RuntimeError, OSError) as problem:
            failure = str(problem)[:200]
            _failed.append(problem)
    return {"peak": peak.most - before, "failure": failure, "check": asked}


def ask(data: Same, settings: dict[str, Any]) -> dict[str, Any]:
    """What `legroom.check` says of it beforehand."""
    import legroom

    found = legroom.check(data, batch_size=SAMPLES, **settings)
    shm = [problem for problem in found.problems if problem.pool == "shm"]
    return {
        "verdict": found.verdict,
        "codes": found.codes,
        "missing": shm[0].missing if shm else 0,
        "need": found.need.shm,
    }


def consume(loaders: list[Any], case: dict[str, Any], before: int) -> None:
    """All loaders side by side, each batch kept until the next one is there, as a for loop does."""
    held: list[Any] = [None] * len(loaders)
    for _ in range(case.get("epochs", 1)):
        running = [iter(loader) for loader in loaders]
        for done in range(1, case["batches"] + 1):
            for number in range(len(running)):  # no name of its own for an iterator: it would outlive its epoch
                held[number] = next(running[number])
            if done <= _STALLS and case["workers"]:
                ahead = min(case["workers"] * case["prefetch"], case["batches"] - done)
                # Without a tensor's header, which is there under one strategy only: the least that full queues take.
                batch = sum(-(-nbytes // 4096) * 4096 for nbytes in case["tensors"])
                full = before + (ahead + 1) * batch * len(loaders)
                settle(full, STILL if case.get("check") else PATIENCE)
        del running


def play_apart(case: dict[str, Any]) -> str:
    """Play it in a child; the result as JSON."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        with os.fdopen(send, "w") as answer:
            answer.write(json.dumps(play(case)) + "\n")
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as answer:
        line = answer.readline()
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return line


def main() -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: workers of a dead child are ours to wait for
    for line in sys.stdin:
        result = play_apart(json.loads(line))
        emptied()
        print(result, end="", flush=True)
    try:
        while True:  # torch_shm_manager, too, ends when its last client has
            os.wait()
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
