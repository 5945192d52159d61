"""GPU memory options that both training scripts share: a limit, TF32, mixed precision, accumulation, an account."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import legroom
from legroom.errors import NoCuda
from legroom.messages import either
from legroom.units import format_size

FULL = 0.9  # beyond this, little is needed to run out; Windows begins to move memory to the host


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--memory_fraction``, ``--allow_tf32``, ``--amp`` and ``--accumulation``."""
    add = parser.add_argument
    add(
        "--memory_fraction",
        type=fraction,
        help=either(
            "share of the GPU to use at most, with the CUDA context: 0.8", "最多使用的显存比例，含 CUDA 上下文：0.8"
        ),
    )
    add("--allow_tf32", action="store_true", help=either("TF32 for matmuls and convolutions", "矩阵乘和卷积使用 TF32"))
    add(
        "--amp",
        action="store_true",
        help=either(
            "mixed precision: bfloat16, or float16 with a scaler", "混合精度：bfloat16，不支持时用 float16 加缩放"
        ),
    )
    add(
        "--accumulation",
        type=int,
        default=1,
        help=either("batches in one optimizer step (default 1)", "梯度累积的批次数（默认 1）"),
    )


def choose(args: argparse.Namespace) -> torch.device:
    """The GPU with the limits asked for, or the CPU; prints which, and what is not applied there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else either("the CPU", "CPU")
    print(either(f"training on {name}", f"训练设备：{name}"))
    if args.memory_fraction is not None:
        try:
            limit = legroom.gpu.limit(args.memory_fraction)
        except NoCuda as problem:
            print(
                either(
                    f"--memory_fraction {args.memory_fraction} is not applied: {problem.why}",
                    f"--memory_fraction {args.memory_fraction} 未生效：{problem.why}",
                )
            )
        else:
            asked, size, rest = (format_size(part) for part in (limit.asked, limit.size, limit.allowed))
            print(
                either(
                    f"limited to {asked} of {size}, {rest} of that for tensors",
                    f"显存上限 {asked}（共 {size}），其中张量可用 {rest}",
                ),
                *limit.notes,
                sep="\n  ",
            )
    if args.allow_tf32:
        tf32 = legroom.gpu.tf32()
        print(f"--allow_tf32: {tf32.note or either('on', '已开启')}")
    if args.accumulation > 1:
        effective = args.batch_size * args.accumulation
        print(
            either(
                f"effective batch {args.batch_size} × {args.accumulation} = {effective}",
                f"有效批大小 {args.batch_size} × {args.accumulation} = {effective}",
            )
        )
    return device


class Steps:
    """Backward passes and optimizer steps, with mixed precision and accumulation as asked for.

    bfloat16 needs no scaling; a GPU without it gets float16, whose small gradients are scaled up to survive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, args: argparse.Namespace) -> None:
        self.optimizer, self.device, self.amp, self.count = optimizer, device, args.amp, args.accumulation
        half = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        self.dtype = torch.float16 if half else torch.bfloat16
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.amp and half)

    def autocast(self) -> torch.autocast:
        """For the forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.amp)

    def take(self, loss: Tensor, number: int, batches: int) -> None:
        """Batch ``number`` (from 1) of ``batches``: the last of every ``accumulation`` of them takes the step."""
        begun = (number - 1) // self.count * self.count
        together = min(self.count, batches - begun)
        self.scaler.scale(loss / together).backward()
        if number - begun == together:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()


@contextmanager
def within(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End in a sentence instead of a traceback when GPU memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        if legroom.gpu.is_oom(problem) != "gpu":
            raise
        advice = either(
            "lower --batch_size and raise --accumulation, or use --amp, or smaller images",
            "请减小 --batch_size 并增大 --accumulation，或使用 --amp，或缩小图像",
        )
        parser.exit(1, f"{parser.prog}: {problem}\n{advice}\n")


def account(device: torch.device) -> None:
    """Print how full the GPU is, and whether any of it lies in host memory."""
    if device.type != "cuda":
        return
    gpu = legroom.gpu.account(device)
    size, peak = format_size(gpu.size), format_size(torch.cuda.max_memory_allocated(device))
    print(
        either(
            f"GPU memory of {size} is {gpu.used / gpu.size:.0%} full; the peak of our tensors was {peak}",
            f"显存 {size}，已用 {gpu.used / gpu.size:.0%}；张量峰值 {peak}",
        )
    )
    if gpu.spilled:
        spilled = format_size(gpu.spilled)
        print(
            either(
                f"{spilled} lie in host RAM, far slower: lower --batch_size or --memory_fraction",
                f"{spilled} 在主机内存中，速度慢得多：请减小 --batch_size 或 --memory_fraction",
            )
        )
    elif gpu.used > FULL * gpu.size:
        print(
            either(
                f"that is more than {FULL:.0%}: lower --batch_size or --memory_fraction",
                f"超过 {FULL:.0%}：请减小 --batch_size 或 --memory_fraction",
            )
        )


def fraction(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(
            either(f"{number} is not above 0 and at most 1", f"{number} 应大于 0 且不超过 1")
        )
    return number
