"""Which remedy belongs to a pool that is too small for a need.

Covers: one fix for each pool of a box. Does not cover: the remedies themselves (remedy.py, remedy_*.py).
"""

from __future__ import annotations

from legroom.budget import remedy
from legroom.budget.sizing import advise
from legroom.model import Box


def relieve(box: Box, pool: str, amount: int) -> tuple[str, ...]:
    """How to get room for ``amount`` in that pool, here."""
    if pool == "shm":
        return remedy.enlarge_shm(box.place, advise(amount + (box.shm.used or 0)).recommended)
    if pool == "ram":
        ram = box.pool("ram")
        return remedy.raise_ram_limit(box.place, ram.size if ram else None)
    if pool == "fds":
        return remedy.raise_nofile(box.place, box.limits.nofile_soft or 0, box.limits.nofile_hard)
    if pool == "disk":
        return remedy.free_disk(next((disk.path for disk in box.disks if disk.role == "store"), "."))
    return remedy.unpin() if pool == "pinned" else remedy.use_less_gpu(box.place)
