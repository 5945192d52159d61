"""The training script of the demo, as a user would write one: open the data, train, save checkpoints, resume.

    python -m legroom.demo.training_script '{"data": …, "steps": …}' [--resume CHECKPOINT]

With LEGROOM_DISABLE=1 the same script holds a copy of the data of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from legroom.demo.demo_child import end_with_parent, send
from legroom.demo.demo_data import CLASSES, ROW_BYTES

BATCH = 64


class Model:
    """Logistic regression on the pixels, by SGD; in torch or numpy, whose functions have the same names here."""

    def __init__(self, engine: str, seed: int, rate: float) -> None:
        import numpy as np

        self._lib: Any = import_module(engine)
        if engine == "torch":
            self._lib.set_num_threads(1)  # four runs share the cores
        self._rate = rate
        self.restore(
            {"weights": np.random.default_rng(seed).normal(0, 0.001, (ROW_BYTES, CLASSES)).astype("f4")}
        )

    def step(self, batch: dict[str, Any]) -> float:
        """Train on one batch; its loss."""
        lib, labels, count = self._lib, batch["labels"], len(batch["labels"])
        pixels = lib.asarray(batch["images"].reshape(count, -1), dtype=lib.float32) / 255 - 0.5
        scores = pixels @ self._weights
        shares = lib.exp(scores - lib.amax(scores, axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        loss = float(-lib.log(shares[lib.arange(count), labels] + 1e-9).mean())
        shares[lib.arange(count), labels] -= 1
        self._weights -= self._rate / count * (pixels.T @ shares)
        return loss

    def arrays(self) -> dict[str, Any]:
        """Its state for a checkpoint."""
        return {"weights": self._weights}

    def restore(self, arrays: dict[str, Any]) -> None:
        """Continue from that state."""
        self._weights: Any = self._lib.asarray(arrays["weights"].copy())


def main() -> None:
    """Train to the last step."""
    end_with_parent(signal.SIGKILL)
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    tell = partial(send, options.messages)
    tell("started")
    model = Model(options.engine, options.seed, options.rate)
    import legroom

    open_data = legroom.open  # imported before the clock starts
    began = time.perf_counter()
    data = open_data(options.data)
    opened = time.perf_counter() - began
    data.ready()
    tell("opened", seconds=opened, ready=time.perf_counter() - began, backing=data.info.backing)
    batches = data.batches(BATCH, shuffle=True, seed=options.seed, drop_last=True, format=options.engine)
    step = 0
    if "--resume" in sys.argv:
        step = _load(sys.argv[-1], model, batches)
        tell("resumed", step=step)
    _train(options, model, batches, step, tell)
    while options.hold and not os.path.exists(options.hold):  # until memory has been measured
        time.sleep(0.05)


def _train(options: SimpleNamespace, model: Model, batches: Any, step: int, tell: Any) -> None:
    told, loss = 0.0, float("nan")
    half, since = step + (options.steps - step) // 2, time.perf_counter()
    while step < options.steps:
        for batch in batches:
            loss = model.step(batch)
            step += 1
            if step == half:
                since = time.perf_counter()  # the rate is that of the second half: the first steps warm up
            if step % options.every == 0:
                _save(Path(options.checkpoints), step, model, batches)
                tell("saved", step=step)
            if time.perf_counter() - told >= 0.1:
                told = time.perf_counter()
                tell("step", step=step, of=options.steps, loss=loss)
            if step == options.steps:
                break
    rate = (step - half) / max(time.perf_counter() - since, 1e-9)
    tell("done", step=step, of=options.steps, loss=loss, rate=rate)


def _save(folder: Path, step: int, model: Model, batches: Any) -> None:
    """Write a checkpoint under another name and rename it, so that none is half written; two are kept."""
    import numpy as np

    scratch = folder / f"scratch-{os.getpid()}"
    with scratch.open("wb") as file:
        np.savez(file, step=step, order=json.dumps(batches.state_dict()), **model.arrays())
    scratch.replace(folder / f"step-{step:06d}.npz")
    for old in sorted(folder.glob("step-*.npz"))[:-2]:
        old.unlink()


def _load(path: str, model: Model, batches: Any) -> int:
    import numpy as np

    with np.load(path) as file:
        kept = {name: file[name] for name in file.files}
    batches.load_state_dict(json.loads(str(kept.pop("order"))))
    step = int(kept.pop("step"))
    model.restore(kept)
    return step


if __name__ == "__main__":
    main()
