"""Trains a small convolutional classifier on a folder of images.

python train_classifier.py --data_dir datas --batch_size 16 --memory_fraction 0.8 --allow_tf32 --image_size 224
"""

from __future__ import annotations

import argparse
from pathlib import Path

import card
import torch
from images import Images
from networks import STRIDE, Classifier
from torch.nn.functional import cross_entropy

import legroom


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, required=True, help="a folder of images for each class")
    parser.add_argument("--batch_size", type=int, default=16, help="images at a time (default 16)")
    parser.add_argument("--image_size", type=int, default=224, help="pixels across and down (default 224)")
    parser.add_argument("--epochs", type=int, default=6, help="(default 6)")
    parser.add_argument("--num_workers", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--out", type=Path, default="classifier.pt", help="(default classifier.pt)")
    card.add_flags(parser)
    args = parser.parse_args(argv)
    if args.batch_size < 1 or args.epochs < 1 or args.num_workers < 0:
        parser.error("--batch_size and --epochs must be at least 1, --num_workers at least 0")
    if args.image_size < STRIDE:
        parser.error(f"--image_size must be at least {STRIDE}")
    if args.out.is_dir():
        parser.error(f"--out: {args.out} is a folder: name a file")
    if not args.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.absolute().parent}")
    try:
        training, held_out = (Images(args.data_dir, args.image_size, held_out=held) for held in (False, True))
    except OSError as problem:
        parser.error(f"--data_dir: {problem}")
    with card.within(parser):
        train(training, held_out, args)


def train(training: Images, held_out: Images, args: argparse.Namespace) -> None:
    device = card.choose(args)
    torch.manual_seed(0)
    model = Classifier(len(training.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loading = {
        "batch_size": args.batch_size,
        "num_workers": args.num_workers,
        "pin_memory": device.type == "cuda",
    }
    batches = legroom.DataLoader(training, shuffle=True, **loading)
    tests = legroom.DataLoader(held_out, **loading)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in batches:
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum(
                (model(images.to(device)).argmax(1).cpu() == labels).sum() for images, labels in tests
            )
        print(f"epoch {epoch + 1}: {right} of {len(held_out)} held-out images right", flush=True)
    card.account(device)
    torch.save({"model": model.state_dict(), "classes": training.classes}, args.out)
    print(f"{args.out}: {len(training.classes)} classes")


if __name__ == "__main__":
    main()
