"""What to do about a verdict here, in lines to type. Covers: a fix for each cause and place. Pure.

Does not cover: changing a supervised run's settings (policy.py); the lines themselves are budget.remedy's.
"""

from __future__ import annotations

from legroom.budget import remedy
from legroom.model import Place
from legroom.model.death import Cause, Level
from legroom.probe.limits import NAMES, TAIL, longest_socket
from legroom.units import format_size
from legroom.words import say

_LEAST_SHM = 512 << 20


def fixes(
    cause: Cause,
    place: Place,
    *,
    ram: int | None,
    shm: Level | None,
    nofile: int | None,
    here: int | None = None,
    machine: int | None = None,
    keyboard: bool = False,
) -> tuple[str, ...]:
    """The lines for that cause at that place.

    ``ram`` is what RAM's pool allows, ``machine`` all the RAM there is, ``here`` the size of /dev/shm now;
    ``keyboard``: Ctrl-C at this terminal.
    """
    if cause == "shm-full":
        wanted = remedy.advised_shm(ram)
        if shm is not None:
            bigger = max(_LEAST_SHM, 2 * _power_of_two(shm.size))
            wanted = max(wanted, bigger if ram is None else min(bigger, ram // 2))
        # A log may come from elsewhere, and a large /dev/shm may be full: setting it to less than it has helps nobody.
        larger = (_large_already(here),) if here and here >= wanted else remedy.enlarge_shm(place, wanted)
        return (
            say("num_workers=0 uses no shared memory; fewer workers, prefetch_factor=1 and smaller batches use less"),
            say("legroom.DataLoader does not use it; for a script as it is:\nlegroom run --loader legroom -- …"),
            *larger,
        )  # fmt: skip
    if cause in ("ram-oom-kill", "ram-allocation"):
        return _more_ram(place, ram, machine)
    if cause == "swap-thrash":
        return remedy.settle_swap(place, moving=True)
    if cause == "gpu-oom":
        return remedy.use_less_gpu(place)
    if cause == "pinned-exhausted":
        less = say("pin_memory=False, or fewer batches in flight: prefetch_factor=1, fewer workers")
        return (less, *_more_ram(place, ram, machine))
    if cause == "fds-exhausted":
        return remedy.raise_nofile(place, nofile or 1024, None)
    if cause == "processes-exhausted":
        return _more_processes(place)
    if cause == "map-count":
        return _more_maps(place)
    if cause == "disk-full":
        return remedy.free_disk(".")
    if cause == "tmpdir-too-long":
        return remedy.shorten_temporary(NAMES[0], longest_socket(place.platform) - TAIL)
    if cause == "worker-killed":
        who = say("see who kills: a time limit, a colleague, a daemon for memory (journalctl, dmesg)")
        return (who, say("check:\nlegroom doctor"))
    if cause == "killed" and keyboard:
        return ()
    if cause == "killed":
        return (say("ask who sent it: a scheduler's time limit, a colleague, a daemon such as earlyoom"),)
    if cause == "unknown":
        return (say("have the next run watched, with the kernel's counters:\nlegroom run -- COMMAND …"),)
    return (
        say("read the lines above and the program's own last lines: no pool that ran out is named there"),
    )


def _more_ram(place: Place, ram: int | None, machine: int | None) -> tuple[str, ...]:
    """A limit can be raised only where there is one below the machine's RAM; and the process is gone: no `ps`."""
    limited = ram is not None and (machine is None or ram < machine)
    return remedy.raise_ram_limit(place, ram if limited else None, machine, running=False)


def _more_processes(place: Place) -> tuple[str, ...]:
    lines = [say("fewer threads for each process, fewer workers:\nexport OMP_NUM_THREADS=1")]
    if place.kind in ("docker", "podman"):
        lines.append(say("start the container again with:\n{tool} run --pids-limit -1 …", tool=place.kind))
    lines.append(say("in the shell that starts the training:\nulimit -u $(ulimit -Hu)"))
    return (*lines, say("check:\nulimit -u\nps -eLf | wc -l"))


def _more_maps(place: Place) -> tuple[str, ...]:
    fewer = say(
        "fewer tensors in a sample and in a batch, fewer batches in flight: each shared tensor is a mapping"
    )
    more = say("as root on the machine (also for its containers):\nsysctl -w vm.max_map_count=1048576")
    return (fewer, more, say("check:\nsysctl vm.max_map_count"))


def _large_already(size: int) -> str:
    return say(
        "/dev/shm has {size} on this machine, and more than that is not advised: see who holds it, or how large it "
        "is where the training died:\nlegroom doctor",
        size=format_size(size),
    )


def _power_of_two(size: int) -> int:
    return 1 << max(0, (size - 1).bit_length())
