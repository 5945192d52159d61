"""Trains a transformer on features that extract_features.py wrote.

    python train_transformer.py --features_224_dir features_224 --batch_size 32 --memory_fraction 0.7 --allow_tf32

A row needs no work of its own, so there are no workers: batches are gathered straight from the mapped file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gpu_options
import torch
from networks import FEATURES, FeatureTransformer
from torch.nn.functional import cross_entropy
from train_classifier import check_out, score

import legroom
from legroom.messages import either


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=either("Train a transformer on extracted features.", "用提取的特征训练 Transformer。")
    )
    add = parser.add_argument
    add(
        "--features_224_dir",
        type=Path,
        required=True,
        help=either("from extract_features.py", "extract_features.py 的输出目录"),
    )
    add("--batch_size", type=int, default=32, help=either("rows per batch (default 32)", "批大小（默认 32）"))
    add("--epochs", type=int, default=10, help=either("default 10", "轮数（默认 10）"))
    add("--out", type=Path, help=either("write the model there", "模型输出文件"))
    gpu_options.add_flags(parser)
    args = parser.parse_args(argv)
    if min(args.batch_size, args.epochs, args.accumulation) < 1:
        parser.error(
            either(
                "--batch_size, --epochs and --accumulation must be at least 1",
                "--batch_size、--epochs、--accumulation 至少为 1",
            )
        )
    if args.out:
        check_out(parser, args.out)
    training, held_out = (args.features_224_dir / name for name in ("train.h5", "held_out.h5"))
    try:
        with legroom.open(training, backing="inplace") as rows, legroom.open(held_out, backing="inplace") as tests:
            if "classes" not in rows.attributes or rows["features"].shape[2:] != (FEATURES,):
                parser.error(
                    either(
                        f"{training} does not hold features of classes: is it from extract_features.py?",
                        f"{training} 中没有类别特征：是 extract_features.py 生成的吗？",
                    )
                )
            with gpu_options.within(parser):
                train(rows, tests, args)
    except legroom.LegroomError as problem:
        parser.exit(problem.exit_status, f"{parser.prog}: {problem}\n")


def train(rows, tests, args: argparse.Namespace) -> None:
    device = gpu_options.choose(args)
    torch.manual_seed(0)
    places, classes = rows["features"].shape[1], len(rows.attributes["classes"])
    model = FeatureTransformer(places, classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = gpu_options.Steps(optimizer, device, args)
    for epoch in range(args.epochs):
        batches = rows.batches(args.batch_size, shuffle=True, device=device)
        for number, batch in enumerate(batches, 1):
            with steps.autocast():
                loss = cross_entropy(model(batch["features"]), batch["labels"])
            steps.take(loss, number, len(batches))
        with torch.no_grad(), steps.autocast():
            right = sum(
                (model(batch["features"]).argmax(1) == batch["labels"]).sum().item()
                for batch in tests.batches(args.batch_size, device=device)
            )
        print(score(epoch, right, len(tests["labels"])), flush=True)
    gpu_options.account(device)
    if args.out:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
