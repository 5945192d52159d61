"""One training of the demo, as a program of its own: what a user's script would be.

Covers: opening the data, learning from batches, checkpoints, resuming exactly. Does not cover: who starts, kills and
measures it (acts), what it learns (model_torch.py, model_numpy.py).

With LEGROOM_DISABLE=1 the very same program holds a copy of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from legroom.demo.said import Mouth
from legroom.demo.tether import tether

BATCH = 64
_SAY_EVERY = 0.1  # seconds between two words about steps
_KEPT = 2  # checkpoints


def main() -> None:
    """Train to the last step, saying so."""
    tether(signal.SIGKILL)
    options = _options()
    mouth = Mouth(options.said)
    mouth.say("begun")
    module: Any = import_module(f"legroom.demo.model_{options.engine}")
    model = module.Model(options.seed, options.rate)
    import legroom

    open_data = legroom.open  # imported now, not while the clock runs
    began = time.perf_counter()
    data = open_data(options.data)
    opened = time.perf_counter() - began
    data.ready()
    ready = time.perf_counter() - began
    mouth.say("opened", seconds=opened, ready=ready, backing=data.info.backing, bytes=data.info.bytes)
    batches = data.batches(BATCH, shuffle=True, seed=options.seed, drop_last=True, format=module.FORMAT)
    step = 0
    if options.resume is not None:
        step = _load(options.resume, model, batches)
        mouth.say("resumed", step=step)
    _learn(options, model, batches, step, mouth)
    if options.hold is not None:  # until everybody has been weighed
        while not options.hold.exists():
            time.sleep(0.05)


def _learn(options: argparse.Namespace, model: Any, batches: Any, step: int, mouth: Mouth) -> None:
    told, loss = 0.0, float("nan")
    half, since = step + (options.steps - step) // 2, time.perf_counter()
    while step < options.steps:
        for batch in batches:
            loss = model.step(batch)
            step += 1
            if step == half:
                since = time.perf_counter()  # the pace is that of the second half: the first ones warm up
            if step % options.every == 0:
                _save(options.checkpoints, step, model, batches)
                mouth.say("kept", step=step)
            if time.perf_counter() - told >= _SAY_EVERY:
                told = time.perf_counter()
                mouth.say("step", step=step, of=options.steps, loss=loss)
            if step == options.steps:
                break
    seconds = time.perf_counter() - since
    mouth.say("done", step=step, of=options.steps, loss=loss, pace=(step - half) / max(seconds, 1e-9))


def _save(folder: Path, step: int, model: Any, batches: Any) -> None:
    """Written beside and renamed: a reader never sees half a checkpoint, however it ends."""
    import numpy as np

    scratch = folder / f"scratch-{os.getpid()}"
    with scratch.open("wb") as file:
        np.savez(file, step=step, order=json.dumps(batches.state_dict()), **model.numbers())
    scratch.replace(folder / f"step-{step:06d}.npz")
    for old in sorted(folder.glob("step-*.npz"))[:-_KEPT]:
        old.unlink()


def _load(path: Path, model: Any, batches: Any) -> int:
    import numpy as np

    with np.load(path) as file:
        kept = {name: file[name] for name in file.files}
    batches.load_state_dict(json.loads(str(kept.pop("order"))))
    step = int(kept.pop("step"))
    model.restore(kept)
    return step


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="legroom.demo.training", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--said", type=Path, required=True, help="where to say how it goes")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--engine", choices=("torch", "numpy"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--hold", type=Path, help="stay until this file is there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
