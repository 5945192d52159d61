"""Which remedy belongs to a pool that is too small for a need.

Covers: one fix for each pool of a box. Does not cover: the remedies themselves (remedy.py, remedy_*.py).
"""

from __future__ import annotations

from legroom.budget import remedy
from legroom.budget.sizing import advise
from legroom.model import Box


def relieve(box: Box, pool: str, amount: int) -> tuple[str, ...]:
    """How to get room for ``amount`` in that pool, here."""
    ram, total = box.pool("ram"), box.memory.total
    size = ram.size if ram else None
    if pool == "shm":
        wanted = amount + (box.shm.used or 0)
        advised = advise(wanted, memory=size).recommended
        if advised < wanted:  # more than there is memory behind it
            return (*remedy.use_less_shm(), remedy.check_room("/dev/shm"))
        return remedy.enlarge_shm(box.place, advised)
    if pool == "ram":
        bounded = size is not None and (total is None or size < total)
        return remedy.raise_ram_limit(box.place, size if bounded else None, total)
    if pool == "fds":
        return remedy.raise_nofile(box.place, box.limits.nofile_soft or 0, box.limits.nofile_hard)
    if pool == "disk":
        return remedy.free_disk(next((disk.path for disk in box.disks if disk.role == "store"), "."))
    return remedy.unpin() if pool == "pinned" else remedy.use_less_gpu(box.place)
