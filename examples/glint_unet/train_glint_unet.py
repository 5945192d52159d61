"""Train a small U-Net that finds glints, on one copy of the data that any number of trainings share.

    python train_glint_unet.py --h5 train_256.h5 --shared_memory --num_workers 6 --batch 16 --epochs 10

The last eighth of the images is kept for testing. The error is the distance in pixels from each true glint to the
nearest one found. `--cleanup_shm` removes the shared copy instead of training.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from eyes import Eyes, open_data, why_unfit
from glints import DOWNSCALED_BY, LOSSES, GlintUNet, pixel_errors
from shm_manager import legroom_cache

import legroom


def train(data: Mapping[str, np.ndarray], flags: argparse.Namespace) -> None:
    """Train, test and save, epoch by epoch."""
    torch.manual_seed(flags.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = len(data["images"])
    split = count - max(1, count // 8)
    loader = legroom.DataLoader(  # batches past /dev/shm: no Bus error, however small it is
        Eyes(data, range(split), augment=True),
        batch_size=flags.batch,
        shuffle=True,
        num_workers=flags.num_workers,
        persistent_workers=flags.num_workers > 0,
        pin_memory=device.type == "cuda",
    )
    held_out = legroom.DataLoader(Eyes(data, range(split, count), augment=False), batch_size=flags.batch)
    model = GlintUNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=flags.lr)
    for epoch in range(1, flags.epochs + 1):
        started = time.perf_counter()
        loss = train_epoch(model, loader, optimizer, LOSSES[flags.loss], device)
        errors = test(model, held_out, device)
        save(model, flags.model_path)
        tell(
            f"{flags.loss:<7} epoch {epoch}/{flags.epochs}  loss {loss:.4f}  error {errors.mean():.2f} px, "
            f"{(errors < 2).float().mean():.0%} within 2 px  {time.perf_counter() - started:.1f} s"
        )


def tell(line: str) -> None:
    """A line in one piece: two trainings may write to one terminal, and ``print`` writes a line's end by itself."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def train_epoch(model, loader, optimizer, loss_of, device) -> float:
    """The mean loss of one pass."""
    model.train()
    total = 0.0
    for images, heatmaps in loader:
        loss = loss_of(model(images.to(device)), heatmaps.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def test(model, loader, device) -> torch.Tensor:
    """The error of every glint in the images that are not learnt from."""
    model.eval()
    return torch.cat(
        [pixel_errors(model(images.to(device)).sigmoid().cpu(), heatmaps) for images, heatmaps in loader]
    )


def save(model: torch.nn.Module, path: Path) -> None:
    """Written beside and renamed: whoever resumes or evaluates never reads half a model."""
    beside = path.with_name(f"{path.name}.tmp")
    torch.save(model.state_dict(), beside)
    os.replace(beside, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--h5", type=Path, required=True, help="the data, as make_data.py writes them")
    parser.add_argument("--shared_memory", action="store_true", help="one copy for every training")
    parser.add_argument(
        "--preload", default=True, action=argparse.BooleanOptionalAction,
        help="all data in memory before the first epoch (the default)",
    )  # fmt: skip
    parser.add_argument("--cleanup_shm", action="store_true", help="remove the shared copy, and no more")
    parser.add_argument("--num_workers", type=int, default=4, help="loader processes (default 4)")
    parser.add_argument("--batch", type=int, default=16, help="images a step (default 16)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (default 10)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default 0.003)")
    parser.add_argument("--loss", choices=LOSSES, default="focal", help="default: focal")
    parser.add_argument("--model_path", type=Path, help="where the model goes (default model_<loss>.pt)")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    flags.model_path = flags.model_path or Path(f"model_{flags.loss}.pt")
    if flags.num_workers < 0 or min(flags.batch, flags.epochs) < 1 or not flags.lr > 0:
        parser.error("--num_workers must be 0 or more, --batch and --epochs 1 or more, --lr above 0")
    if not 0 <= flags.seed < 2**63:
        parser.error("--seed must be 0 or more, and below 2**63")
    if flags.model_path.is_dir():
        parser.error(f"--model_path {flags.model_path} is a directory: name a file")
    if not flags.model_path.parent.is_dir():
        parser.error(f"there is no directory {flags.model_path.parent} for --model_path")
    if flags.cleanup_shm:
        sys.exit(legroom_cache("drop", str(flags.h5)))

    started = time.perf_counter()
    try:
        data, where = open_data(flags.h5, shared=flags.shared_memory, preload=flags.preload)
        unfit = why_unfit(data, DOWNSCALED_BY)
    except legroom.LegroomError as error:
        parser.exit(error.exit_status, f"{error}\n")
    if unfit:
        parser.error(f"{flags.h5}: {unfit}")
    seconds = time.perf_counter() - started
    tell(f"{flags.loss:<7} {len(data['images'])} images from {where}, there after {seconds:.2f} s")
    train(data, flags)
    tell(f"{flags.loss:<7} model: {flags.model_path}")


if __name__ == "__main__":
    main()
