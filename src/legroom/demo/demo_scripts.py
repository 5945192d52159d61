"""The programs that the demo runs as child processes: ``python -m legroom.demo.demo_scripts train '{"data": …}'``.

``run`` is `legroom run …`, which ends with the demo. The others send messages: JSON lines in a file of the child's own.
Not a pipe: `legroom run` stands between the two and passes no descriptors on, and a run that was killed continues in
the same file. Times are of the clock that all processes share.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import chain, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import legroom
from legroom.system.atomic_file import replace_file
from legroom.system.processes_and_threads import die_with_parent

IMAGE, CLASSES = (3, 64, 64), 8
ROW_BYTES = IMAGE[0] * IMAGE[1] * IMAGE[2]
BATCH = 64
WORKERS = 2
MESSAGES, CHECKPOINTS = "messages.jsonl", "step-*.npz"  # in a child's folder
MAY_END = "may-end"  # beside the folders of a stage: its runs may take their last step
PARENT = "LEGROOM_DEMO_PARENT"  # variable: the process id that a child's parent must have
_WARM_UP = 12  # batches before the clock starts: the workers run and have their memory
_EPOCH = 4000  # batches, so that no epoch ends and no worker starts while the clock runs
_STEP = 0.25  # seconds of a step: slower than the workers on a busy machine too, so that batches queue


def end_with_parent(number: int) -> None:
    """Get that signal when the parent ends; a process that has lost its parent already exits at once."""
    die_with_parent(number)
    if os.environ.get(PARENT, "").isdecimal() and os.getppid() != int(os.environ[PARENT]):
        raise SystemExit(128 + number)
    os.environ[PARENT] = str(os.getpid())


def send(path: str, kind: str, **values: Any) -> None:
    """Append a message in one write: a reader sees all of it or nothing."""
    line = json.dumps({"kind": kind, "when": time.monotonic(), "pid": os.getpid(), **values})
    with open(path, "ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


def learn(lib: Any, weights: Any, batch: dict[str, Any], rate: float) -> float:
    """A step of logistic regression on the pixels; its loss. torch and numpy have the same names for all of it."""
    labels, count = batch["labels"], len(batch["labels"])
    pixels = lib.asarray(batch["images"].reshape(count, -1), dtype=lib.float32) / 255 - 0.5
    scores = pixels @ weights
    shares = lib.exp(scores - lib.amax(scores, axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    loss = float(-lib.log(shares[lib.arange(count), labels] + 1e-9).mean())
    shares[lib.arange(count), labels] -= 1
    weights -= rate / count * (pixels.T @ shares)
    return loss


def train(options: SimpleNamespace, tell: Callable[..., None]) -> None:
    """Train as a user's script does; with LEGROOM_DISABLE=1, on a copy of the data of its own.

    Before the last step, wait until the demo has measured this run, or has killed the one to be killed.
    """
    import numpy as np

    lib: Any = import_module(options.engine)
    open_data = legroom.open  # imported before the clock starts
    began = time.perf_counter()
    data = open_data(options.data, backing="disk")
    opened = time.perf_counter() - began
    data.ready()
    tell("opened", seconds=opened, ready=time.perf_counter() - began, backing=data.info.backing)
    batches = data.batches(BATCH, shuffle=True, seed=options.seed, drop_last=True, format=options.engine)
    step, weights = 0, np.random.default_rng(options.seed).normal(0, 0.001, (ROW_BYTES, CLASSES)).astype("f4")
    if "--resume" in sys.argv:
        with np.load(sys.argv[-1]) as saved:
            step, weights = int(saved["step"]), saved["weights"]
            batches.load_state_dict(json.loads(str(saved["order"])))
        tell("resumed", step=step)
    weights, folder = lib.asarray(weights), Path(options.folder)
    half, since, told = step + (options.steps - step) // 2, time.perf_counter(), 0.0
    for batch in islice(chain.from_iterable(repeat(batches)), options.steps - step):
        loss = learn(lib, weights, batch, options.rate)
        step += 1
        if step == half:
            since = time.perf_counter()  # the rate is that of the second half: the first steps warm up
        if step % max(1, options.steps // 10) == 0:
            buffer = io.BytesIO()
            np.savez(buffer, step=step, weights=weights, order=json.dumps(batches.state_dict()))
            replace_file(folder / f"step-{step:06d}.npz", buffer.getvalue())
            for old in sorted(folder.glob(CHECKPOINTS))[:-2]:  # two are kept
                old.unlink()
            tell("saved", step=step)
        if time.perf_counter() - told >= 0.1 or step == options.steps:
            told = time.perf_counter()
            tell("step", step=step, of=options.steps, loss=loss)
        if step == options.steps - 1:
            tell("ready", rate=(step - half) / max(time.perf_counter() - since, 1e-9))
            while not (folder.parent / MAY_END).exists():
                time.sleep(0.05)


def trial(options: SimpleNamespace, tell: Callable[..., None]) -> None:
    """Float batches, as scripts that normalise make them, by torch's DataLoader or by what `--loader` put there."""
    from torch.utils.data import DataLoader

    loader = DataLoader(**_rows(options, options.batches, as_float=True)[1])
    tell("opened", loader=type(loader).__module__.partition(".")[0])
    for number, _ in enumerate(loader, 1):
        tell("step", step=number, of=options.batches)
        time.sleep(_STEP)


def speed(options: SimpleNamespace, tell: Callable[..., None]) -> None:
    """Batches per second of each loader, in turns: other work on the machine slows all of them."""
    from torch.utils.data import DataLoader

    data, settings = _rows(options, _EPOCH, as_float=False)
    loaders: dict[str, Callable[[], Any]] = {
        "torch": lambda: DataLoader(**settings),
        "legroom": lambda: legroom.DataLoader(**settings),
        "batches": lambda: data.batches(options.batch, shuffle=True),
    }
    turns = [name for _ in range(options.rounds) for name in loaders]
    for number, name in enumerate(turns, 1):
        batches = chain.from_iterable(repeat(loaders[name]()))
        for _ in range(_WARM_UP):
            next(batches)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < options.seconds:
            next(batches)
            count += 1
        tell("rate", loader=name, rate=count / (time.perf_counter() - began))
        tell("step", step=number, of=len(turns))


def _rows(options: SimpleNamespace, batches: int, *, as_float: bool) -> tuple[Any, dict[str, Any]]:
    """The data, and a DataLoader's arguments for so many batches of random rows."""
    from torch.utils.data import RandomSampler, TensorDataset

    class Rows(TensorDataset):
        def __getitem__(self, index: Any) -> tuple[Any, ...]:
            image, label = super().__getitem__(index)  # type: ignore[no-untyped-call]
            return image.float() / 255 if as_float else image, label

    data = legroom.open(options.data, backing="inplace")  # no cache entry: the training runs shall find none
    data.ready()
    rows = Rows(data.tensors()["images"], data.tensors()["labels"])
    # Workers are forked whatever this Python's default is: the parent of one is then the process that started it.
    return data, {
        "dataset": rows, "sampler": RandomSampler(rows, replacement=True, num_samples=options.batch * batches),
        "batch_size": options.batch, "num_workers": WORKERS, "multiprocessing_context": "fork",
        "worker_init_fn": lambda _number: end_with_parent(signal.SIGKILL),
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "run":
        end_with_parent(signal.SIGTERM)
        runpy.run_module("legroom", run_name="__main__")  # by name: imports point down, the command line is above
    else:
        end_with_parent(signal.SIGKILL)
        given = SimpleNamespace(**json.loads(sys.argv[2]))
        messages = partial(send, os.path.join(given.folder, MESSAGES))
        messages("started")
        {"train": train, "trial": trial, "speed": speed}[sys.argv[1]](given, messages)
        messages("done")
