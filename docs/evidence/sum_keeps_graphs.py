"""A sum of losses keeps the autograd graph of every step; a sum of detached losses keeps nothing.

Covers: bytes that malloc has given out after 100 and after 600 steps, for four ways to add up losses.
Does not cover: GPU memory, where the same graphs hold the same tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import experiment as ex

FIRST, LAST = 100, 600


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "mapped", "f", "g", "used", "i", "j")]


def in_use() -> int:
    """Bytes that malloc has given out."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Mallinfo
    found = ask()
    return int(found.used + found.mapped)


def per_step(add: Callable[[Any, Any], Any], backward: bool) -> float:
    """Bytes per step, between the first and the last reading."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    total: Any = 0
    before = 0
    for step in range(1, LAST + 1):
        loss = nn.functional.cross_entropy(model(x), y)
        if backward:
            loss.backward()
        total = add(total, loss)
        if step == FIRST:
            before = in_use()
    return (in_use() - before) / (LAST - FIRST)


def main() -> None:
    ex.need_module("torch")
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        ex.not_shown("this C library has no mallinfo2")
    ways: list[tuple[str, Callable[[Any, Any], Any], bool]] = [
        ("total += loss, after backward()", lambda total, loss: total + loss, True),
        ("total += loss, without backward()", lambda total, loss: total + loss, False),
        ("total += loss.detach()", lambda total, loss: total + loss.detach(), True),
        ("total += loss.item()", lambda total, loss: total + loss.item(), True),
    ]
    found = {name: per_step(add, backward) for name, add, backward in ways}
    ex.table(
        ("how the losses are added up", "bytes per step"), [(name, f"{rate:,.0f}") for name, rate in found.items()]
    )
    after, without, detached, number = found.values()
    ex.verdict(
        {
            "a graph after backward takes more than 1 kB": after > 1000,
            "a graph without backward takes more than 20 kB": without > 20_000,
            "a detached loss takes less than 100 bytes": detached < 100,
            "a number takes less than 100 bytes": number < 100,
        }
    )


if __name__ == "__main__":
    main()
