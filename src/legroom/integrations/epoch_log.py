"""One block of lines an epoch: the settings in force, and the memory at the start, after the model and at step 0.

Covers: looking at the memory at a named moment, and the block's words. Does not cover: when to look (guard.py), the
choice of the settings (budget).

Host memory is what the cgroup leaves, not what the machine has. What torch holds of a card is this process's own and
is asked without touching the card; what everybody holds of it stands beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from legroom.model import Pool, Settings
from legroom.probe.gpu_devices import gpu_pools, gpus
from legroom.probe.host import Host
from legroom.probe.memory import memory, ram_pool, read_swap_counters, swap, swap_pool
from legroom.units import format_size
from legroom.words import say

_IN_ORDER = (
    "low_memory",
    "batch_size",
    "accumulation",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "threads",
)


@dataclass(frozen=True, slots=True)
class Held:
    """What torch holds of one card for this process."""

    device: str
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Look:
    """The memory at one moment of a training."""

    moment: str
    ram: Pool
    swap: Pool
    cards: tuple[Pool, ...] = ()
    held: tuple[Held, ...] = ()


def look(moment: str, host: Host | None = None, torch: Any = None) -> Look:
    """The memory now, under that name."""
    host = host or Host()
    counters = read_swap_counters(host)
    ram = memory(host)
    return Look(
        moment, ram_pool(ram), swap_pool(swap(host, ram, counters)), gpu_pools(gpus(host)), _held(torch)
    )


def _held(torch: Any) -> tuple[Held, ...]:
    torch = torch or sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    cuda = torch.cuda
    return tuple(
        Held(f"cuda:{index}", cuda.memory_allocated(index), cuda.memory_reserved(index))
        for index in range(cuda.device_count())
    )


def block(epoch: int, settings: Settings | None, looks: Sequence[Look], notes: Sequence[str] = ()) -> str:
    """The lines of one epoch, to be logged as one message."""
    lines = [say("epoch {epoch}", epoch=epoch)]
    if settings is not None:
        mode = say("low-memory: map or stream the data") if settings.low_memory else say("normal")
        lines.append(say("  mode: {mode}", mode=mode))
        lines += [f"  {settings.why[name]}" for name in _IN_ORDER if name in settings.why]
        lines.append(say("  effective batch: {count}", count=settings.effective_batch))
    lines += [f"  {note}" for note in notes]
    for one in looks:
        lines += _look_lines(one)
    return "\n".join(lines)


def _look_lines(one: Look) -> list[str]:
    return [
        say(
            "  memory {moment}: {ram}; swap {swap}",
            moment=one.moment,
            ram=_pool_words(one.ram),
            swap=_pool_words(one.swap),
        ),
        *(
            say(
                "    {device}: {allocated} allocated, {reserved} reserved by this process",
                device=held.device, allocated=format_size(held.allocated), reserved=format_size(held.reserved),
            )
            for held in one.held
        ),
        *(say("    {name}: {used}", name=card.name, used=_pool_words(card)) for card in one.cards),
    ]  # fmt: skip


def _pool_words(pool: Pool) -> str:
    if pool.size == 0:
        return say("none")
    if pool.used is None or pool.size is None:
        return say("unknown ({reason})", reason=pool.reason or pool.source)
    return say(
        "{used} of {size} used ({share:.1%})",
        used=format_size(pool.used),
        size=format_size(pool.size),
        share=pool.used / pool.size,
    )
