"""The log message of an epoch: active settings, and memory at the start, after the model and at step 0.

Host memory is measured against the cgroup limit, not against the machine's RAM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from legroom.messages import say
from legroom.probe.gpu_devices import gpu_pools, gpus
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory, ram_pool, read_swap_counters, swap, swap_pool
from legroom.records.machine import Pool
from legroom.records.settings_and_overrides import Settings
from legroom.units import format_size

_SETTINGS_SHOWN = (
    "low_memory",
    "batch_size",
    "accumulation",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "threads",
)


@dataclass(frozen=True, slots=True)
class TorchMemory:
    """GPU memory that torch holds for this process on one device."""

    device: str
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Memory at one moment of a training run."""

    moment: str
    ram: Pool
    swap: Pool
    gpus: tuple[Pool, ...] = ()  # of all processes
    torch: tuple[TorchMemory, ...] = ()  # of this process


def memory_snapshot(moment: str, host: Host | None = None, torch: Any = None) -> MemorySnapshot:
    """Memory now, under that name. Does not initialize CUDA."""
    host = host or Host()
    counters = read_swap_counters(host)
    ram = memory(host)
    return MemorySnapshot(
        moment, ram_pool(ram), swap_pool(swap(host, ram, counters)), gpu_pools(gpus(host)), _torch_memory(torch)
    )


def _torch_memory(torch: Any) -> tuple[TorchMemory, ...]:
    torch = torch or sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    cuda = torch.cuda
    return tuple(
        TorchMemory(f"cuda:{index}", cuda.memory_allocated(index), cuda.memory_reserved(index))
        for index in range(cuda.device_count())
    )


def epoch_lines(
    epoch: int, settings: Settings | None, snapshots: Sequence[MemorySnapshot], notes: Sequence[str] = ()
) -> str:
    """The log message of one epoch: active settings and memory."""
    lines = [f"epoch {epoch}"]
    if settings is not None:
        mode = say("low-memory: map or stream the data") if settings.low_memory else say("normal")
        lines.append(say("  mode: {mode}", mode=mode))
        lines += [f"  {settings.why[name]}" for name in _SETTINGS_SHOWN if name in settings.why]
        lines.append(say("  effective batch: {count}", count=settings.effective_batch))
    lines += [f"  {note}" for note in notes]
    for one in snapshots:
        lines += _snapshot_lines(one)
    return "\n".join(lines)


def _snapshot_lines(snapshot: MemorySnapshot) -> list[str]:
    return [
        say(
            "  memory {moment}: {ram}; swap {swap}",
            moment=snapshot.moment,
            ram=_pool_usage(snapshot.ram),
            swap=_pool_usage(snapshot.swap),
        ),
        *(
            say(
                "    {device}: {allocated} allocated, {reserved} reserved by this process",
                device=held.device, allocated=format_size(held.allocated), reserved=format_size(held.reserved),
            )
            for held in snapshot.torch
        ),
        *(say("    {name}: {used}", name=gpu.name, used=_pool_usage(gpu)) for gpu in snapshot.gpus),
    ]  # fmt: skip


def _pool_usage(pool: Pool) -> str:
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
