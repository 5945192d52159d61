"""DataLoader settings that fit this machine now, without knowing the dataset.

For torch's DataLoader: the largest batch for a number of workers and prefetch. It keeps up to workers × prefetch + 2
batches in /dev/shm, and one more without persistent_workers (docs/evidence/loader-peak.md). The settings fit either
way, and `check` agrees. Each tensor takes whole pages after a header of 64 bytes; only the file_system strategy has
that header, and counting it always costs at most a page.
"""

from __future__ import annotations

from legroom.advice.memory_need_of_loaders_and_processes import PAGE, TENSOR_HEADER, batches_in_flight, semaphores
from legroom.messages import say
from legroom.records.loader_settings_and_flags import SafeSettings
from legroom.records.machine import Machine
from legroom.units import format_size

_HEADROOM = 0.8  # the rest is for other processes and kept batches
_CHOICES = ((4, 2), (2, 2), (1, 1))
_PIN_ROOM = 0.1  # pinned memory cannot be reclaimed: do not pin if less than this share of RAM is free


def largest_batch(room: int, workers: int, prefetch: int, *, making: int = 0) -> int:
    """The largest single-tensor batch for which all in flight, and ``making`` being assembled, fit into ``room``."""
    left = int(room * _HEADROOM) - semaphores(workers) * PAGE
    pages = left // (batches_in_flight(workers, prefetch, again=True) + making) // PAGE
    # Printing three digits may round up, and one byte more would be another page per batch: subtract that.
    return max(0, pages * PAGE - TENSOR_HEADER - pages * PAGE // 128)


def safe_settings(machine: Machine) -> tuple[SafeSettings, ...]:
    """Settings that fit now, most workers first; the last, without workers, needs no /dev/shm."""
    cores = usable_cores(machine)
    pin, pin_why = _pinning(machine)
    rows = []
    for workers, prefetch in _CHOICES:
        if cores is not None and workers > max(1, cores):
            continue
        largest, bound_by, why = _bound(machine, workers, prefetch)
        if largest is not None and not largest:
            continue
        rows.append(
            SafeSettings(
                num_workers=workers,
                prefetch_factor=prefetch,
                pin_memory=pin,
                persistent_workers=True,
                max_batch_bytes=largest,
                bound_by=bound_by,
                why=why,
                pin_why=pin_why,
            )
        )
    rows.append(
        SafeSettings(
            num_workers=0,
            prefetch_factor=None,
            pin_memory=pin,
            persistent_workers=False,
            max_batch_bytes=None,
            bound_by="none",
            why=say("without workers no shared memory is used"),
            pin_why=pin_why,
        )
    )
    return tuple(rows)


def usable_cores(machine: Machine) -> int | None:
    """Whole cores this process may use: its affinity, or its CPU quota if lower."""
    cores = machine.cpu.affinity
    if machine.cpu.quota is not None:
        quota = max(1, int(machine.cpu.quota))
        cores = quota if cores is None else min(cores, quota)
    return cores


def _bound(machine: Machine, workers: int, prefetch: int) -> tuple[int | None, str, str]:
    """The largest batch, the pool that limits it (/dev/shm, or RAM if lower), and why.

    RAM also backs /dev/shm, and each worker has the batch that it is assembling.
    """
    shm, ram = machine.pool("shm"), machine.pool("ram")
    if shm is None or shm.free is None:
        return None, "shm", say("free space in /dev/shm is unknown")
    flights = batches_in_flight(workers, prefetch, again=True)
    largest = largest_batch(shm.free, workers, prefetch)
    if ram is not None and ram.free is not None:
        by_ram = largest_batch(ram.free, workers, prefetch, making=workers)
        if by_ram < largest:
            why = say(
                "80 % of {room} free RAM, divided by {count} batches in flight and {workers} being "
                "assembled",
                room=format_size(ram.free), count=flights, workers=workers,
            )  # fmt: skip
            return by_ram, "ram", why
    why = say(
        "80 % of {room} free in {pool}, divided by {count} batches in flight",
        room=format_size(shm.free), pool="shm", count=flights,
    )  # fmt: skip
    return largest, "shm", why


def _pinning(machine: Machine) -> tuple[bool, str]:
    if not machine.gpus.cards:
        return False, say("pin_memory off: no GPU found")
    ram = machine.pool("ram")
    if ram is None or ram.free is None or ram.size is None:
        return False, say("pin_memory off: free RAM is unknown")
    if ram.free < _PIN_ROOM * ram.size:
        return False, say(
            "pin_memory off: it uses host RAM, of which {free} of {size} is free",
            free=format_size(ram.free), size=format_size(ram.size),
        )  # fmt: skip
    return True, say("pin_memory on: uses host RAM, not /dev/shm")
