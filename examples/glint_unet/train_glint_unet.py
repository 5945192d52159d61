"""Train a small U-Net that finds glints, on one copy of the data that any number of runs share.

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
from legroom.messages import either


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
        near, seconds = (errors < 2).float().mean(), time.perf_counter() - started
        tell(
            f"{flags.loss:<7} epoch {epoch}/{flags.epochs}  loss {loss:.4f}  "
            + either(
                f"error {errors.mean():.2f} px, {near:.0%} within 2 px  {seconds:.1f} s",
                f"误差 {errors.mean():.2f} px，{near:.0%} 在 2 px 以内  {seconds:.1f} s",
            )
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
    return torch.cat([pixel_errors(model(images.to(device)).sigmoid().cpu(), heatmaps) for images, heatmaps in loader])


def save(model: torch.nn.Module, path: Path) -> None:
    """Written beside and renamed: whoever resumes or evaluates never reads half a model."""
    beside = path.with_name(f"{path.name}.tmp")
    torch.save(model.state_dict(), beside)
    os.replace(beside, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=either(
            "Train a small U-Net that finds glints, on one shared copy of the data.",
            "训练一个寻找角膜反光点的小型 U-Net，多个训练任务共用一份数据。",
        )
    )
    add = parser.add_argument
    add("--h5", type=Path, required=True, help=either("data written by make_data.py", "make_data.py 生成的数据"))
    add("--shared_memory", action="store_true", help=either("one copy for every run", "所有训练任务共用一份数据"))
    add(
        "--preload",
        default=True,
        action=argparse.BooleanOptionalAction,
        help=either("load all data before the first epoch (default)", "第一轮之前加载全部数据（默认）"),
    )
    add("--cleanup_shm", action="store_true", help=either("remove the shared copy and exit", "删除共享副本后退出"))
    add("--num_workers", type=int, default=4, help=either("worker processes (default 4)", "worker 进程数（默认 4）"))
    add("--batch", type=int, default=16, help=either("images per step (default 16)", "批大小（默认 16）"))
    add("--epochs", type=int, default=10, help=either("passes over the data (default 10)", "轮数（默认 10）"))
    add("--lr", type=float, default=3e-3, help=either("learning rate (default 0.003)", "学习率（默认 0.003）"))
    add("--loss", choices=LOSSES, default="focal", help=either("default: focal", "损失函数（默认 focal）"))
    add("--model_path", type=Path, help=either("output (default model_<loss>.pt)", "模型文件（默认 model_<loss>.pt）"))
    add("--seed", type=int, default=0)
    flags = parser.parse_args()
    flags.model_path = flags.model_path or Path(f"model_{flags.loss}.pt")
    if flags.num_workers < 0 or min(flags.batch, flags.epochs) < 1 or not flags.lr > 0:
        parser.error(
            either(
                "--num_workers must be 0 or more, --batch and --epochs 1 or more, --lr above 0",
                "--num_workers 至少为 0，--batch 和 --epochs 至少为 1，--lr 大于 0",
            )
        )
    if not 0 <= flags.seed < 2**63:
        parser.error(either("--seed must be 0 or more, and below 2**63", "--seed 应在 0 与 2**63 之间"))
    if flags.model_path.is_dir():
        parser.error(
            either(
                f"--model_path {flags.model_path} is a directory: name a file",
                f"--model_path {flags.model_path} 是目录，请给出文件名",
            )
        )
    if not flags.model_path.parent.is_dir():
        parser.error(
            either(
                f"there is no directory {flags.model_path.parent} for --model_path",
                f"--model_path 的目录 {flags.model_path.parent} 不存在",
            )
        )
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
    count = len(data["images"])
    tell(
        f"{flags.loss:<7} "
        + either(
            f"{count} images from {where}, loaded after {seconds:.2f} s",
            f"{count} 张图像，来自 {where}，{seconds:.2f} s 后可用",
        )
    )
    train(data, flags)
    tell(f"{flags.loss:<7} " + either(f"model: {flags.model_path}", f"模型：{flags.model_path}"))


if __name__ == "__main__":
    main()
