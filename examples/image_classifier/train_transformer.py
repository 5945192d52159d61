"""Trains a transformer on features that extract_features.py wrote.

    python train_transformer.py --features_224_dir features_224 --batch_size 32 --memory_fraction 0.7 --allow_tf32

A row needs no work of its own, so there are no workers: batches are gathered straight from the mapped file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import card
import torch
from networks import FEATURES, FeatureTransformer
from torch.nn.functional import cross_entropy

import legroom


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features_224_dir", type=Path, required=True, help="from extract_features.py")
    parser.add_argument("--batch_size", type=int, default=32, help="rows at a time (default 32)")
    parser.add_argument("--epochs", type=int, default=10, help="(default 10)")
    parser.add_argument("--out", type=Path, help="write the model there")
    card.add_flags(parser)
    args = parser.parse_args(argv)
    if args.batch_size < 1 or args.epochs < 1:
        parser.error("--batch_size and --epochs must be at least 1")
    if args.out and args.out.is_dir():
        parser.error(f"--out: {args.out} is a folder: name a file")
    if args.out and not args.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.absolute().parent}")
    training, held_out = (args.features_224_dir / name for name in ("train.h5", "held_out.h5"))
    try:
        with (
            legroom.open(training, backing="inplace") as rows,
            legroom.open(held_out, backing="inplace") as tests,
        ):
            if "classes" not in rows.attributes or rows["features"].shape[2:] != (FEATURES,):
                parser.error(f"{training} does not hold features of classes: is it from extract_features.py?")
            with card.within(parser):
                train(rows, tests, args)
    except legroom.LegroomError as problem:
        parser.exit(problem.exit_status, f"{parser.prog}: {problem}\n")


def train(rows, tests, args: argparse.Namespace) -> None:
    device = card.choose(args)
    torch.manual_seed(0)
    places, classes = rows["features"].shape[1], len(rows.attributes["classes"])
    model = FeatureTransformer(places, classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        for batch in rows.batches(args.batch_size, shuffle=True, device=device):
            loss = cross_entropy(model(batch["features"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = sum(
                (model(batch["features"]).argmax(1) == batch["labels"]).sum().item()
                for batch in tests.batches(args.batch_size, device=device)
            )
        print(f"epoch {epoch + 1}: {right} of {len(tests['labels'])} held-out images right", flush=True)
    card.account(device)
    if args.out:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
