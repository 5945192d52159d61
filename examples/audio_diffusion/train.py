"""Trains a small music model (rectified flow) on mel spectrograms and text features.

    python train.py --data clips.h5 --global_batch_size 32 --num_workers 4 --accum_iter 1 [--resume FILE]

The loader is torch's own, as in most trainings: in a 64 MB /dev/shm it dies when the clips become longer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from clips import ARRAYS, Clips
from flow import Flow
from torch.utils.data import DataLoader

import legroom
from legroom.errors import UnsupportedData

SHORTER = 4  # clips are this much shorter in the first epochs


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="clips.h5", help="what make_data.py wrote (default clips.h5)")
    parser.add_argument("--global_batch_size", type=positive, default=32, help="clips at a time (default 32)")
    parser.add_argument("--accum_iter", type=positive, default=1, help="batches to a step (default 1)")
    parser.add_argument("--num_workers", type=int, default=4, help="worker processes (default 4)")
    parser.add_argument("--epochs", type=positive, default=8, help="in all (default 8)")
    parser.add_argument("--short_epochs", type=int, default=1, help="first ones on short clips (default 1)")
    parser.add_argument(
        "--ckpt_dir", type=Path, default="checkpoints", help="one an epoch (default checkpoints)"
    )
    parser.add_argument("--resume", metavar="FILE", help="go on from this checkpoint")
    args = parser.parse_args(argv)
    if min(args.num_workers, args.short_epochs) < 0:
        parser.error("--num_workers must be at least 0, and so must --short_epochs")
    try:
        # Uncompressed and on a disk of this machine: mapped where it lies, one copy for all workers and trainings.
        with legroom.open(args.data, backing="inplace") as data:
            if missing := set(ARRAYS) - set(data):
                parser.error(f"{args.data} has no {', '.join(sorted(missing))}: is it from make_data.py?")
            if data["mels"].ndim != 3:
                parser.error(
                    f"{args.data}: mels must be (clips, bands, frames), and are {data['mels'].shape}"
                )
            train(data, args, parser)
    except UnsupportedData as problem:
        parser.error(f"{problem.what}: {problem.why}. --data takes what make_data.py writes")
    except legroom.LegroomError as problem:
        parser.exit(problem.exit_status, f"{parser.prog}: {problem}\n")


def train(data: Mapping[str, np.ndarray], args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    rows, bands, frames = data["mels"].shape
    effective = args.global_batch_size * args.accum_iter
    steps = rows // effective
    if steps == 0:
        parser.error(f"{rows} clips are less than one effective batch of {effective}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Flow(bands, text=data["text_whole"].shape[1]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        done = resume(args.resume, model, optimizer) if args.resume else 0
    except OSError as problem:
        parser.error(f"cannot resume from {args.resume}: {problem.strerror}")
    except Exception as problem:  # torn, another model's: torch has an error for each
        parser.error(
            f"cannot resume from {args.resume}: it is no whole checkpoint of this model ({type(problem).__name__})"
        )
    try:
        args.ckpt_dir.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser.error(f"cannot write checkpoints to {args.ckpt_dir}: {problem}")
    print(
        f"effective batch {args.global_batch_size} × {args.accum_iter} = {effective}, {steps} steps an epoch"
    )

    for epoch in range(done, args.epochs):
        torch.manual_seed(epoch)  # the same order and noise, whether it was resumed or not
        order = torch.randperm(rows)[: steps * effective].tolist()
        clips = Clips(data, frames // SHORTER if epoch < args.short_epochs else frames, epoch)
        loader = DataLoader(clips, args.global_batch_size, sampler=order, num_workers=args.num_workers)
        total = 0.0
        for number, batch in enumerate(loader, 1):
            loss = model.loss(*(part.to(device) for part in batch)) / args.accum_iter
            loss.backward()
            total += loss.item()
            if number % args.accum_iter == 0:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch + 1}: {clips.frames} frames, loss {total / steps:.4f}", flush=True)
        state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(state, args.ckpt_dir / f"epoch{epoch + 1:03}.pt")
    listen(model, data, frames // SHORTER, device)


def save(state: dict[str, object], path: Path) -> None:
    """Written beside and renamed: a training killed in the middle of it leaves no half of a checkpoint."""
    beside = path.with_suffix(".tmp")
    torch.save(state, beside)
    os.replace(beside, path)


def resume(path: str, model: Flow, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint; how many epochs it has behind it."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print(f"resumed from {path}: epoch {state['epoch']} is done", flush=True)
    return state["epoch"]


def listen(model: Flow, data: Mapping[str, np.ndarray], frames: int, device: torch.device) -> None:
    """Make a clip for every caption: how many are loudest at the pitch where the data are?"""
    known = np.unique(data["captions"])
    real = [data["mels"][data["captions"] == one].mean((0, 2), dtype=np.float32).argmax() for one in known]
    words, text = (torch.from_numpy(data[name][known]).to(device) for name in ("text_words", "text_whole"))
    made = model.generate(words, text, frames).mean(2).argmax(1).cpu().numpy()
    print(f"made a clip for each of {len(known)} captions: {sum(abs(made - real) <= 1)} at the right pitch")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


if __name__ == "__main__":
    main()
