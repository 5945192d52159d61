"""DataLoader settings that are safe on this box as it stands.

Covers: for torch's loader, how large a batch may be for a given number of workers and prefetch, from what
/dev/shm and RAM have free now. Does not cover: choosing settings for a known dataset and step time.

The bound is facts, not taste: torch's loader holds up to workers × prefetch + 2 batches in /dev/shm, and one more where
workers start anew for each epoch (docs/evidence/loader-peak.md), as they do unless persistent_workers is set: what is
offered fits either way, and `check` says so of it. Each tensor takes whole pages after 64 bytes of header (the header
is there under the file_system strategy only; leaving room for it costs at most a page).
"""

from __future__ import annotations

from legroom.records import Box, LoaderSettings
from legroom.units import format_size
from legroom.words import say

PAGE = 4096
_HEADER = 64
_QUEUE, _EVENT = 3, 5  # semaphores of a multiprocessing.Queue and of an Event
_HEADROOM = 0.8  # what other processes and a kept batch may still take
_CHOICES = ((4, 2), (2, 2), (1, 1))
_PIN_ROOM = 0.1  # pinned memory cannot be reclaimed: not where less than this share of RAM is free


def batches_in_flight(workers: int, prefetch: int, *, again: bool = False) -> int:
    """How many batches torch's loader may hold in /dev/shm at once.

    ``again``: workers start anew for every epoch. While they are forked the last batch of the epoch before is still
    bound to the loop's variable; they inherit the map of it, and keep it alive until their own epoch ends.
    """
    return workers * prefetch + 2 + again if workers else 0


def semaphores(workers: int) -> int:
    """Semaphores of one loader: a queue for each worker, one for the results, an event; each takes a page.

    Twice, because those of one epoch go while those of the next are there already.
    """
    return 2 * (_QUEUE * (workers + 1) + _EVENT) if workers else 0


def largest_batch(room: int, workers: int, prefetch: int, *, making: int = 0) -> int:
    """The largest single-tensor batch for which all in flight, and so many in the making, fit into ``room``."""
    left = int(room * _HEADROOM) - semaphores(workers) * PAGE
    pages = left // (batches_in_flight(workers, prefetch, again=True) + making) // PAGE
    # Less what printing it with three digits may round up: a byte more would be another page for every batch.
    return max(0, pages * PAGE - _HEADER - pages * PAGE // 128)


def safe_settings(box: Box) -> tuple[LoaderSettings, ...]:
    """Settings that fit now, most parallel first; the last, without workers, always fits /dev/shm."""
    cores = usable_cores(box)
    pin, pin_why = _pinning(box)
    rows = []
    for workers, prefetch in _CHOICES:
        if cores is not None and workers > max(1, cores):
            continue
        largest, bound_by, why = _bound(box, workers, prefetch)
        if largest is not None and not largest:
            continue
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


def _bound(box: Box, workers: int, prefetch: int) -> tuple[int | None, str, str]:
    """The largest batch, the pool that bounds it, and why: /dev/shm, or RAM where that has less.

    RAM holds what lies in /dev/shm (tmpfs is charged to it), and with each worker the batch it is making.
    """
    shm, ram = box.pool("shm"), box.pool("ram")
    if shm is None or shm.free is None:
        return None, "shm", say("what /dev/shm has free is unknown here")
    flights = batches_in_flight(workers, prefetch, again=True)
    largest = largest_batch(shm.free, workers, prefetch)
    if ram is not None and ram.free is not None:
        by_ram = largest_batch(ram.free, workers, prefetch, making=workers)
        if by_ram < largest:
            why = say(
                "{room} free in ram, four fifths of it over {count} batches in flight and {workers} in the making",
                room=format_size(ram.free), count=flights, workers=workers,
            )  # fmt: skip
            return by_ram, "ram", why
    why = say(
        "{room} free in {pool}, four fifths of it over {count} batches in flight",
        room=format_size(shm.free), pool="shm", count=flights,
    )  # fmt: skip
    return largest, "shm", why


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
