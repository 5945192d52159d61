"""DataLoader settings that are safe on this box as it stands.

Covers: for torch's loader, how large a batch may be for a given number of workers and prefetch, from what
/dev/shm and RAM have free now. Does not cover: choosing settings for a known dataset and step time.

The bound is facts, not taste: torch's loader holds up to workers × prefetch + 2 batches in /dev/shm, and one more where
workers start anew for each epoch
(docs/evidence/loader-peak.md), each tensor in whole pages after 64 bytes of header (the header is there under the
file_system strategy only; leaving room for it costs at most a page).
"""

from __future__ import annotations

from legroom.model import Box, LoaderSettings
from legroom.units import format_size
from legroom.words import say

PAGE = 4096
_HEADER = 64
_HEADROOM = 0.8  # what other processes and a kept batch may still take
_CHOICES = ((4, 2), (2, 2), (1, 1))
_PIN_ROOM = 0.1  # pinned memory cannot be reclaimed: not where less than this share of RAM is free


def batches_in_flight(workers: int, prefetch: int, *, again: bool = False) -> int:
    """How many batches torch's loader may hold in /dev/shm at once.

    ``again``: workers start anew for every epoch. While they are forked the last batch of the epoch before is still
    bound to the loop's variable; they inherit the map of it, and keep it alive until their own epoch ends.
    """
    return workers * prefetch + 2 + again if workers else 0


def largest_batch(room: int, workers: int, prefetch: int) -> int:
    """The largest single-tensor batch for which everything in flight fits into ``room``."""
    pages = int(room * _HEADROOM) // batches_in_flight(workers, prefetch) // PAGE
    return max(0, pages * PAGE - _HEADER)


def safe_settings(box: Box) -> tuple[LoaderSettings, ...]:
    """Settings that fit now, most parallel first; the last, without workers, always fits /dev/shm."""
    cores = usable_cores(box)
    pin, pin_why = _pinning(box)
    room, bound_by = _room(box)
    rows = []
    for workers, prefetch in _CHOICES:
        if cores is not None and workers > max(1, cores):
            continue
        if room is None:
            largest, why = None, say("what /dev/shm has free is unknown here")
        else:
            largest = largest_batch(room, workers, prefetch)
            if largest < PAGE - _HEADER:
                continue
            why = say(
                "{room} free in {pool}, four fifths of it over {count} batches in flight",
                room=format_size(room), pool=bound_by, count=batches_in_flight(workers, prefetch),
            )  # fmt: skip
        rows.append(
            LoaderSettings(
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
        LoaderSettings(
            num_workers=0,
            prefetch_factor=None,
            pin_memory=pin,
            persistent_workers=False,
            max_batch_bytes=None,
            bound_by="none",
            why=say("no worker, no shared memory"),
            pin_why=pin_why,
        )
    )
    return tuple(rows)


def usable_cores(box: Box) -> int | None:
    """Whole cores this process may really use: its affinity, less where a quota allows less."""
    cores = box.cpu.affinity
    if box.cpu.quota is not None:
        quota = max(1, int(box.cpu.quota))
        cores = quota if cores is None else min(cores, quota)
    return cores


def _room(box: Box) -> tuple[int | None, str]:
    """What batches in flight may take: /dev/shm, or RAM where that has less (tmpfs is charged to it)."""
    shm, ram = box.pool("shm"), box.pool("ram")
    shm_free = shm.free if shm else None
    ram_free = ram.free if ram else None
    if shm_free is None:
        return None, "shm"
    if ram_free is not None and ram_free < shm_free:
        return ram_free, "ram"
    return shm_free, "shm"


def _pinning(box: Box) -> tuple[bool, str]:
    if not box.gpus.cards:
        return False, say("pin_memory off: no GPU seen")
    ram = box.pool("ram")
    if ram is None or ram.free is None or ram.size is None:
        return False, say("pin_memory off: free RAM is unknown")
    if ram.free < _PIN_ROOM * ram.size:
        return False, say(
            "pin_memory off: it takes host RAM, of which {free} of {size} is free",
            free=format_size(ram.free), size=format_size(ram.size),
        )  # fmt: skip
    return True, say("pin_memory on: it takes host RAM, never /dev/shm")
