"""A training script that saves after every step and may be killed at any moment; also a server that forks such runs.

    resume_train.py stream|batches|loader DATA FOLDER       one training, its end in FOLDER/end
    resume_train.py serve DATA                              one training a line of JSON on standard input

Covers: model with dropout, optimizer, scheduler, loader and random generators through ``integrations.checkpoint``.
Does not cover: judging. The server imports torch once; each training is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet  # noqa: F401
import torch
import torch._dynamo  # which the first optimizer imports: a second in every training otherwise
from torch.nn.functional import cross_entropy

import legroom
import legroom.loader.batches.batch_iterator
import legroom.loader.batches.legroom_open
import legroom.loader.dataloader.dataloader
import legroom.loader.stream.stream_dataset
from legroom.integrations import checkpoint

FEATURES = [f"c{number}" for number in range(8)]
EPOCHS = 2


def batches_of(kind: str, data: str) -> Any:
    if kind == "stream":
        return legroom.stream(data, batch_size=16, memory="32MB", shuffle_buffer=40, seed=3, format="torch")
    opened = legroom.open(data)
    if kind == "batches":
        return opened.batches(16, shuffle=True, seed=3)
    rows = torch.stack([torch.from_numpy(opened[name].copy()) for name in FEATURES], 1)
    pairs = torch.utils.data.TensorDataset(rows, torch.from_numpy(opened["label"].copy()))
    return legroom.DataLoader(pairs, batch_size=16, shuffle=True)


def inputs(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, dict):
        return torch.stack([batch[name] for name in FEATURES], 1), batch["label"]
    return batch[0], batch[1]


def train(kind: str, data: str, folder: Path, die: str = "") -> None:
    """To the end, or to the death asked for: ``STEP-before``, ``STEP-during`` or ``STEP-after`` its save."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    batches = batches_of(kind, data)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    kept = checkpoint.restore(folder / "last.pt", **parts) or {"epoch": 0, "step": 0}
    epoch, step = kept["epoch"], kept["step"]
    while epoch < EPOCHS:
        for batch in batches:
            x, y = inputs(batch)
            x = x + 0.01 * (random.random() + np.random.rand())  # what a script draws goes on too
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            _die_at(die, f"{step}-before")
            if die == f"{step}-during":
                os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            checkpoint.save(folder / "last.pt", epoch=epoch, step=step, **parts)
            _die_at(die, f"{step}-after")
        epoch += 1
    states = [*model.state_dict().values()]
    states += [state for one in optimizer.state_dict()["state"].values() for state in one.values()]
    digest = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()
    (folder / "end").write_text(json.dumps({"digest": digest, "steps": step}))


def _die_at(wanted: str, here: str) -> None:
    if wanted == here:
        os.kill(os.getpid(), signal.SIGKILL)


def serve(data: str) -> None:
    """Fork a training for each request, kill it after so many seconds if asked to, answer with how it ended."""
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                train(asked["kind"], data, Path(asked["folder"]), asked["die"])
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        print(_ended(pid, asked["kill_after"]), flush=True)


def _ended(pid: int, kill_after: float | None) -> int:
    """Only its parent can kill it for sure: until it is waited for, the number stays its own."""
    deadline = time.monotonic() + (600 if kill_after is None else kill_after)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
