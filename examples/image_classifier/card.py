"""The card's memory, for both trainings: a share of it, TF32, a clear end when it is out, an account of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import legroom
from legroom.errors import NoCuda
from legroom.units import format_size

FULL = 0.9  # beyond this, little is needed to run out; Windows begins to move memory to the host


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--memory_fraction`` and ``--allow_tf32``."""
    parser.add_argument("--memory_fraction", type=fraction, help="of the card at most, context included: 0.8")
    parser.add_argument("--allow_tf32", action="store_true", help="TF32 for products and convolutions")


def choose(args: argparse.Namespace) -> torch.device:
    """The card with the limits asked for, or the CPU; says which, and what is not applied there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"training on {torch.cuda.get_device_name() if device.type == 'cuda' else 'the CPU'}")
    if args.memory_fraction is not None:
        try:
            limit = legroom.gpu.limit(args.memory_fraction)
        except NoCuda as problem:
            print(f"--memory_fraction {args.memory_fraction} is not applied: {problem.why}")
        else:
            share = f"{format_size(limit.asked)} of {format_size(limit.size)}"
            print(
                f"limited to {share}, {format_size(limit.allowed)} of that for tensors",
                *limit.notes,
                sep="\n  ",
            )
    if args.allow_tf32:
        tf32 = legroom.gpu.tf32()
        print(f"--allow_tf32: {tf32.note or 'on'}")
    return device


@contextmanager
def within(parser: argparse.ArgumentParser) -> Iterator[None]:
    """A training that ends in a sentence instead of a traceback when the card's memory is out."""
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        if legroom.gpu.is_oom(problem) != "gpu":
            raise
        parser.exit(1, f"{parser.prog}: {problem}\nlower --batch_size, then the size of the images\n")


def account(device: torch.device) -> None:
    """Say how full the card is, and whether any of it lies in the host's memory."""
    if device.type != "cuda":
        return
    card = legroom.gpu.account(device)
    peak = format_size(torch.cuda.max_memory_allocated(device))
    print(
        f"the card's {format_size(card.size)} are {card.used / card.size:.0%} full; our tensors' peak was {peak}"
    )
    if card.spilled:
        print(
            f"{format_size(card.spilled)} lie in the host's RAM, far slower: lower --batch_size or --memory_fraction"
        )
    elif card.used > FULL * card.size:
        print(f"that is more than {FULL:.0%}: lower --batch_size or --memory_fraction")


def fraction(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0 and at most 1")
    return number
