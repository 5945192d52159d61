"""What to do about a verdict here, in lines to type. Covers: a fix for each cause and place. Pure.

Does not cover: changing a supervised run's settings (policy.py); the lines themselves are budget.remedy's.
"""

from __future__ import annotations

from legroom.budget import remedy
from legroom.model import Place
from legroom.model.death import Cause, Level
from legroom.words import say

_LEAST_SHM = 512 << 20


def fixes(
    cause: Cause, place: Place, *, ram: int | None, shm: Level | None, nofile: int | None
) -> tuple[str, ...]:
    """The lines for that cause at that place; ``ram`` is what RAM's pool allows."""
    if cause == "shm-full":
        wanted = remedy.advised_shm(ram)
        if shm is not None:
            bigger = max(_LEAST_SHM, 2 * _power_of_two(shm.size))
            wanted = max(wanted, bigger if ram is None else min(bigger, ram // 2))
        return (
            say("num_workers=0 uses no shared memory; fewer workers, prefetch_factor=1 and smaller batches use less"),
            say("legroom.DataLoader does not use it (for a script as it is: legroom run --loader legroom -- …)"),
            *remedy.enlarge_shm(place, wanted),
        )  # fmt: skip
    if cause in ("ram-oom-kill", "ram-allocation"):
        return remedy.raise_ram_limit(place, ram)
    if cause == "swap-thrash":
        return remedy.settle_swap(place, moving=True)
    if cause == "gpu-oom":
        return remedy.use_less_gpu(place)
    if cause == "pinned-exhausted":
        less = say("pin_memory=False, or fewer batches in flight: prefetch_factor=1, fewer workers")
        return (less, *remedy.raise_ram_limit(place, ram))
    if cause == "fds-exhausted":
        return remedy.raise_nofile(place, nofile or 1024, None)
    if cause == "disk-full":
        return remedy.free_disk(".")
    if cause == "worker-killed":
        who = say("see who kills: a time limit, a colleague, a daemon for memory (journalctl, dmesg)")
        return (who, say("check: legroom doctor"))
    if cause == "killed":
        return (say("ask who sent it: a scheduler's time limit, a colleague, a daemon such as earlyoom"),)
    return (say("read the program's own last lines: memory has no part in this"),)


def _power_of_two(size: int) -> int:
    return 1 << max(0, (size - 1).bit_length())
