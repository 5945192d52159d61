"""Trains a small music model (rectified flow) on mel spectrograms and text features.

    python train.py --data clips.h5 --global_batch_size 32 --num_workers 4 --accum_iter 1 [--resume FILE]
    torchrun --nproc_per_node 2 train.py --data clips.h5 --accum_iter 1

The loader is torch's own, as in most training scripts: in a 64 MB /dev/shm it fails when the clips become longer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from clips import ARRAYS, Clips
from flow import Flow, flow_loss
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import legroom
from legroom.errors import UnsupportedData
from legroom.messages import either

SHORTER = 4  # clips are this much shorter in the first epochs
LATEST = "checkpoint_latest.pt"


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that torchrun started; one alone without it."""

    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", 0)))
    world: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", 1)))
    local: int = field(default_factory=lambda: int(os.environ.get("LOCAL_RANK", 0)))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=either("Train a small music model on mel spectrograms.", "在梅尔频谱图上训练一个小型音乐生成模型。")
    )
    add = made.add_argument
    add("--data", default="clips.h5", help=either("what make_data.py wrote", "make_data.py 生成的文件"))
    add(
        "--global_batch_size",
        type=positive,
        default=32,
        help=either("clips in one batch, all GPUs together", "所有显卡合计的批大小"),
    )
    add("--accum_iter", type=positive, default=16, help=either("batches in one step", "梯度累积的批次数"))
    add("--num_workers", type=int, default=4, help=either("worker processes per rank", "每个 rank 的 worker 数"))
    add("--epochs", type=positive, default=8, help=either("epochs in all", "总轮数"))
    add("--short_epochs", type=int, default=1, help=either("first epochs, on short clips", "前几轮只用短片段"))
    add(
        "--ckpt_dir",
        type=Path,
        default="checkpoints",
        help=either("checkpoints: one per epoch, and checkpoint_latest.pt", "检查点目录，含 checkpoint_latest.pt"),
    )
    add("--resume", metavar="FILE", help=either("resume from this checkpoint", "从该检查点断点续训"))
    made.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    return made


def main(argv: list[str] | None = None) -> None:
    flags = parser()
    args = flags.parse_args(argv)
    ranks = Ranks()
    if min(args.num_workers, args.short_epochs) < 0:
        flags.error(
            either("--num_workers and --short_epochs must be at least 0", "--num_workers 和 --short_epochs 不能小于 0")
        )
    if args.global_batch_size % ranks.world:
        flags.error(
            either(
                f"--global_batch_size {args.global_batch_size} cannot be divided among {ranks.world} ranks",
                f"--global_batch_size {args.global_batch_size} 无法平均分给 {ranks.world} 个 rank",
            )
        )
    try:
        # Uncompressed and on a disk of this machine: mapped where it lies, one copy for all workers and ranks.
        with legroom.open(args.data, backing="inplace") as data:
            if missing := set(ARRAYS) - set(data):
                names = ", ".join(sorted(missing))
                flags.error(
                    either(
                        f"{args.data} has no {names}: was it written by make_data.py?",
                        f"{args.data} 中没有 {names}：是 make_data.py 生成的吗？",
                    )
                )
            if data["mels"].ndim != 3:
                flags.error(
                    either(
                        f"{args.data}: mels must be (clips, bands, frames), got {data['mels'].shape}",
                        f"{args.data}：mels 的形状应为 (clips, bands, frames)，实为 {data['mels'].shape}",
                    )
                )
            with group(ranks) as device:
                train(data, args, flags, ranks, device)
    except UnsupportedData as problem:
        flags.error(
            either(
                f"{problem.what}: {problem.why}. --data takes what make_data.py writes",
                f"{problem.what}：{problem.why}。--data 应为 make_data.py 生成的文件",
            )
        )
    except legroom.LegroomError as problem:
        flags.exit(problem.exit_status, f"{flags.prog}: {problem}\n")


class group:  # noqa: N801  used like a function
    """This rank's device, inside the process group that torchrun's ranks form."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __enter__(self) -> torch.device:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", self.ranks.local % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if self.ranks.world > 1:
            distributed.init_process_group("nccl" if cuda else "gloo")
        return device

    def __exit__(self, *_: object) -> None:
        if self.ranks.world > 1:
            distributed.destroy_process_group()


def train(
    data: Mapping[str, np.ndarray],
    args: argparse.Namespace,
    flags: argparse.ArgumentParser,
    ranks: Ranks,
    device: torch.device,
) -> None:
    rows, bands, frames = data["mels"].shape
    batch = args.global_batch_size // ranks.world
    effective = args.global_batch_size * args.accum_iter
    steps = -(-rows // effective)

    torch.manual_seed(0)
    model = Flow(bands, text=data["text_whole"].shape[1]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = resumed(args, flags, model, optimizer, ranks) if args.resume else 0
    wrapped: nn.Module = DistributedDataParallel(model) if ranks.world > 1 else model
    try:
        args.ckpt_dir.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        flags.error(
            either(
                f"cannot write checkpoints to {args.ckpt_dir}: {problem}",
                f"无法把检查点写入 {args.ckpt_dir}：{problem}",
            )
        )
    ranks.say(
        either(
            f"effective batch {args.global_batch_size} × {args.accum_iter} = {effective}, steps per epoch: {steps}",
            f"有效批大小 {args.global_batch_size} × {args.accum_iter} = {effective}，每轮步数：{steps}",
        )
    )
    if rows < effective:
        ranks.say(either(f"only {rows} clips: each step takes all of them", f"只有 {rows} 个片段：每步使用全部片段"))

    for epoch in range(done, args.epochs):
        # The same order and noise, whether it was resumed or not; another noise on each rank.
        torch.manual_seed(epoch)
        order = share_of(torch.randperm(rows).tolist(), ranks)
        torch.manual_seed(epoch * ranks.world + ranks.rank)
        clips = Clips(data, frames // SHORTER if epoch < args.short_epochs else frames, epoch)
        loader = DataLoader(clips, batch, sampler=order, num_workers=args.num_workers)
        total = 0.0
        for parts, weight, last in weighted(loader, len(order), batch * args.accum_iter):
            # Gradients of several batches are one step's; ranks exchange them with the last of these.
            alone = wrapped.no_sync() if ranks.world > 1 and not last else nullcontext()
            with alone:
                loss = weight * flow_loss(wrapped, *(part.to(device) for part in parts))
                loss.backward()
            total += loss.item()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        loss_text = f"{total / steps:.4f}"
        ranks.say(
            either(
                f"epoch {epoch + 1}: {clips.frames} frames, loss {loss_text}",
                f"第 {epoch + 1} 轮 (epoch {epoch + 1}): {clips.frames} 帧, loss {loss_text}",
            )
        )
        if ranks.rank == 0:
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(state, args.ckpt_dir, epoch + 1)
    if ranks.rank == 0:
        listen(model, data, frames // SHORTER, device)


def share_of(order: list[int], ranks: Ranks) -> list[int]:
    """This rank's clips; some come twice where the ranks would not have equally many."""
    short = -len(order) % ranks.world
    return (order + order[:short])[ranks.rank :: ranks.world]


def weighted(loader: DataLoader[object], clips: int, a_step: int) -> Iterator[tuple[list[torch.Tensor], float, bool]]:
    """Each batch, its share of the clips of its step, and whether it is the step's last."""
    seen = 0
    for parts in loader:
        count = len(parts[0])
        begin = seen // a_step * a_step
        end = min(begin + a_step, clips)
        seen += count
        yield parts, count / (end - begin), seen == end


def save(state: dict[str, object], folder: Path, epoch: int) -> None:
    """Written beside and renamed: a process killed in the middle of it leaves no half of a checkpoint."""
    beside = folder / "writing.tmp"
    torch.save(state, beside)
    latest = folder / "latest.tmp"
    latest.unlink(missing_ok=True)
    os.link(beside, latest)
    os.replace(beside, folder / f"epoch{epoch:03}.pt")
    os.replace(latest, folder / LATEST)


def resumed(
    args: argparse.Namespace,
    flags: argparse.ArgumentParser,
    model: Flow,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> int:
    """Load the checkpoint that was asked for; how many epochs it has behind it."""
    path = Path(args.resume)
    if not path.exists() and (args.ckpt_dir / path).exists():
        path = args.ckpt_dir / path  # `--resume checkpoint_latest.pt`
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except OSError as problem:
        flags.error(
            either(
                f"cannot resume from {args.resume}: {problem.strerror}",
                f"无法从 {args.resume} 续训：{problem.strerror}",
            )
        )
    except Exception as problem:  # torn, another model's: torch has an error for each
        flags.error(
            either(
                f"cannot resume from {args.resume}: not a whole checkpoint of this model ({type(problem).__name__})",
                f"无法从 {args.resume} 续训：不是这个模型的完整检查点（{type(problem).__name__}）",
            )
        )
    ranks.say(
        either(
            f"resumed from {path}: epoch {state['epoch']} is done", f"已从 {path} 续训：第 {state['epoch']} 轮已完成"
        )
    )
    return int(state["epoch"])


def listen(model: Flow, data: Mapping[str, np.ndarray], frames: int, device: torch.device) -> None:
    """Make a clip for every caption: how many are loudest at the pitch where the data are?"""
    known = np.unique(data["captions"])
    real = [data["mels"][data["captions"] == one].mean((0, 2), dtype=np.float32).argmax() for one in known]
    words, text = (torch.from_numpy(data[name][known]).to(device) for name in ("text_words", "text_whole"))
    made = model.generate(words, text, frames).mean(2).argmax(1).cpu().numpy()
    right = sum(abs(made - real) <= 1)
    print(
        either(
            f"made a clip for each of {len(known)} captions: {right} at the right pitch",
            f"为 {len(known)} 条文字各生成了一个片段：{right} 个音高正确",
        )
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(either(f"{number} is not at least 1", f"{number} 小于 1"))
    return number


if __name__ == "__main__":
    main()
