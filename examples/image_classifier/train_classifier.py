"""Trains a small convolutional classifier on a folder of images.

    python train_classifier.py --data_dir datas --batch_size 16 --memory_fraction 0.8 --allow_tf32 --image_size 224

--amp and --accumulation 4 lower what a step needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gpu_options
import torch
from images import Images
from networks import STRIDE, Classifier
from torch.nn.functional import cross_entropy

import legroom
from legroom.messages import either


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=either("Train a small convolutional classifier.", "训练一个小型卷积分类器。")
    )
    add = parser.add_argument
    add("--data_dir", type=Path, required=True, help=either("a folder of images per class", "每类一个文件夹的图像目录"))
    add("--batch_size", type=int, default=16, help=either("images per batch (default 16)", "批大小（默认 16）"))
    add(
        "--image_size",
        type=int,
        default=224,
        help=either("pixels across and down (default 224)", "图像边长（默认 224）"),
    )
    add("--epochs", type=int, default=6, help=either("default 6", "轮数（默认 6）"))
    add("--num_workers", type=int, default=2, help=either("worker processes (default 2)", "worker 进程数（默认 2）"))
    add("--out", type=Path, default="classifier.pt", help=either("default classifier.pt", "输出（默认 classifier.pt）"))
    gpu_options.add_flags(parser)
    args = parser.parse_args(argv)
    if min(args.batch_size, args.epochs, args.accumulation) < 1 or args.num_workers < 0:
        parser.error(
            either(
                "--batch_size, --epochs and --accumulation must be at least 1, --num_workers at least 0",
                "--batch_size、--epochs、--accumulation 至少为 1，--num_workers 至少为 0",
            )
        )
    if args.image_size < STRIDE:
        parser.error(either(f"--image_size must be at least {STRIDE}", f"--image_size 至少为 {STRIDE}"))
    check_out(parser, args.out)
    try:
        training, held_out = (Images(args.data_dir, args.image_size, held_out=held) for held in (False, True))
    except OSError as problem:
        parser.error(f"--data_dir: {problem}")
    with gpu_options.within(parser):
        train(training, held_out, args)


def check_out(parser: argparse.ArgumentParser, path: Path) -> None:
    """End now where the model could not be written at the end."""
    if path.is_dir():
        parser.error(either(f"--out: {path} is a folder: name a file", f"--out：{path} 是目录，请给出文件名"))
    folder = path.absolute().parent
    if not folder.is_dir():
        parser.error(either(f"--out: there is no folder {folder}", f"--out：目录 {folder} 不存在"))


def train(training: Images, held_out: Images, args: argparse.Namespace) -> None:
    device = gpu_options.choose(args)
    torch.manual_seed(0)
    model = Classifier(len(training.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loading = {"batch_size": args.batch_size, "num_workers": args.num_workers, "pin_memory": device.type == "cuda"}
    batches = legroom.DataLoader(training, shuffle=True, **loading)
    tests = legroom.DataLoader(held_out, **loading)
    steps = gpu_options.Steps(optimizer, device, args)
    for epoch in range(args.epochs):
        model.train()
        for number, (images, labels) in enumerate(batches, 1):
            with steps.autocast():
                loss = cross_entropy(model(images.to(device)), labels.to(device))
            steps.take(loss, number, len(batches))
        model.eval()
        with torch.no_grad(), steps.autocast():
            right = sum((model(images.to(device)).argmax(1).cpu() == labels).sum() for images, labels in tests)
        print(score(epoch, right, len(held_out)), flush=True)
    gpu_options.account(device)
    torch.save({"model": model.state_dict(), "classes": training.classes}, args.out)
    count = len(training.classes)
    print(either(f"{args.out}: {count} classes", f"{args.out}：{count} 个类别"))


def score(epoch: int, right: int, of: int) -> str:
    return either(
        f"epoch {epoch + 1}: {right} of {of} held-out images right",
        f"第 {epoch + 1} 轮：验证集 {of} 张中 {right} 张正确",
    )


if __name__ == "__main__":
    main()
