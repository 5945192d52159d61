"""Findings about /dev/shm: its size, use, leftover files and permissions."""

from __future__ import annotations

from collections.abc import Iterator

from legroom.advice.fix_commands import (
    advised_shm,
    bound_shm,
    check_room,
    doubled_shm,
    enlarge_shm,
    remove_leftovers,
    use_less_shm,
)
from legroom.advice.memory_need import batches_in_flight
from legroom.messages import joined, listed, phrase, say
from legroom.records.finding_and_alarm import Finding
from legroom.records.machine import Machine
from legroom.units import exact_size, format_size

DEFAULT_SIZE = 64 << 20  # the default of docker, podman and kubernetes
SMALL = 512 << 20  # the floor of every recommendation: twice two workers' worth of 40 MB batches
NEARLY_FULL = 0.80
ABOUT_TO_FAIL = 0.95
_LEFTOVER_KINDS = frozenset({"torch", "python", "semaphore", "nccl"})
_CHARGED = 64 << 20
_LEFTOVER_AGE = 60.0  # younger than this, its owner may just be starting


def too_small(machine: Machine) -> Iterator[Finding]:
    """The container default, and sizes below what two workers with ordinary batches need."""
    size = machine.shm.size
    if size is None or not machine.shm.mounted or size >= SMALL:
        return
    ram = machine.pool("ram")
    wanted = advised_shm(ram.size if ram else None)
    # Without more RAM to back it, a larger /dev/shm would only turn an error into an OOM kill.
    fix = enlarge_shm(machine.runtime, wanted) if wanted > size else (*use_less_shm(), check_room("/dev/shm"))
    flights = batches_in_flight(4, 2, again=True)
    numbers = {
        "size": format_size(size),
        "flights": flights,
        "largest": format_size(size // flights),
        "wanted": format_size(wanted),
    }
    if size <= DEFAULT_SIZE:
        yield Finding(
            "shm-default-64mb",
            "critical",
            say(
                "/dev/shm is {size}, the container default: multi-worker DataLoaders will crash"
                if size == DEFAULT_SIZE
                else "/dev/shm is {size}, less than the container default of {default}: multi-worker DataLoaders will "
                "crash",
                default=format_size(DEFAULT_SIZE),
                **numbers,
            ),
            say(
                "torch's DataLoader with 4 workers and prefetch_factor=2 keeps up to {flights} batches "
                "in /dev/shm. With all {size} free, batches above {largest} fail with these settings: 'unable to "
                "allocate shared memory' or 'Bus error', however much RAM and GPU memory is free",
                **numbers,
            ),
            fix,
        )
    else:
        yield Finding(
            "shm-small",
            "warning",
            say("/dev/shm is {size}: small for multi-worker DataLoaders", **numbers),
            say(
                "4 workers with prefetch_factor=2 keep up to {flights} batches there: at most {largest} each, with all "
                "{size} free",
                **numbers,
            ),
            fix,
        )


def nearly_full(machine: Machine) -> Iterator[Finding]:
    """Little space left: the next batch may fail."""
    pool = machine.pool("shm")
    share = pool.used_share if pool else None
    if pool is None or share is None or pool.free is None or share < NEARLY_FULL:
        return
    holders = sorted(
        (process for process in machine.processes if process.shm), key=lambda process: process.shm or 0, reverse=True
    )
    held = listed(f"{process.pid} {format_size(process.shm or 0)}" for process in holders[:3])
    size = pool.size or 0
    yield Finding(
        "shm-nearly-full",
        "critical" if share >= ABOUT_TO_FAIL else "warning",
        say("/dev/shm is {share:.0%} full: {free} free", share=share, free=format_size(pool.free)),
        say(
            "{used} of {size} in use (largest: {held}); a batch that does not fit crashes the training run"
            if held
            else "{used} of {size} in use; a batch that does not fit crashes the training run",
            used=format_size(pool.used or 0),
            size=format_size(size),
            held=held,
        ),
        (
            say("stop processes that use it, or use fewer workers, lower prefetch, smaller batches"),
            *_enlarged(machine, size),
        ),
    )


def _enlarged(machine: Machine, size: int) -> tuple[str, ...]:
    """How to enlarge /dev/shm here, if there is enough RAM to back it."""
    ram = machine.pool("ram")
    wanted = doubled_shm(size, ram.size if ram else None)
    if wanted is not None:
        return enlarge_shm(machine.runtime, wanted)
    behind = say("an unknown amount") if ram is None or ram.size is None else format_size(ram.size)
    return (
        say(
            "a larger /dev/shm is not advised: its {size} are backed by RAM, of which {ram} exists",
            size=format_size(size),
            ram=behind,
        ),
        check_room("/dev/shm"),
    )


def above_limit(machine: Machine) -> Iterator[Finding]:
    """A /dev/shm larger than RAM: instead of an error there is an OOM kill."""
    size, ram = machine.shm.size, machine.pool("ram")
    if size is None or ram is None or ram.size is None or not machine.shm.mounted or size <= ram.size:
        return
    by_cgroup = machine.ram_limit is not None
    half = 1 << max(26, (ram.size // 2).bit_length() - 1)  # the largest power of two that leaves half to processes
    yield Finding(
        "shm-above-cgroup-limit",
        "warning" if by_cgroup else "info",
        say(
            "/dev/shm can grow to {size}, but {whose} is {ram}",
            size=format_size(size),
            whose=say("the cgroup's memory limit") if by_cgroup else say("the machine's RAM"),
            ram=format_size(ram.size),
        ),
        say(
            "pages in /dev/shm count as RAM. Filling it triggers the OOM killer before any 'No space "
            "left' error, and the killed process may be another one"
        ),
        bound_shm(machine.runtime, half, own=by_cgroup, shared=by_cgroup and _is_machines(machine)),
    )


def charged_from_earlier(machine: Machine) -> Iterator[Finding]:
    """Files in a pod's /dev/shm whose pages this container does not pay for: an earlier container wrote them."""
    used, levels = machine.shm.used, machine.memory.levels
    if machine.runtime.kind != "kubernetes" or used is None or not machine.shm.mounted or not levels:
        return
    own, limit = levels[0].shmem, levels[0].limit
    if own is None or limit is None or _is_machines(machine):
        return
    earlier = used - own
    if earlier < max(_CHARGED, limit // 10):
        return
    yield Finding(
        "tmpfs-charged-from-earlier-container",
        "warning",
        say("{size} in /dev/shm was written before this container started", size=format_size(earlier)),
        say(
            "an emptyDir in memory outlives a restart of the container. {used} is in /dev/shm, {own} of it charged to "
            "this container. The rest still counts against the pod's limit, so an OOM kill comes earlier than this "
            "container's {limit} suggest",
            used=format_size(used), own=format_size(own), limit=format_size(limit),
        ),
        (
            say("remove what no process uses:\nlegroom cache gc --free {size}", size=exact_size(earlier)),
            say("or delete the pod: its emptyDir goes with it"),
            check_room("/dev/shm"),
        ),
    )  # fmt: skip


def _is_machines(machine: Machine) -> bool:
    """Whether the /dev/shm of this cgroup is the machine's: a container's own one is smaller."""
    size, total = machine.shm.size, machine.memory.total
    return size is not None and total is not None and size >= total * 2 // 5  # half of RAM, where nothing is set


def leftovers(machine: Machine) -> Iterator[Finding]:
    """Files of killed processes that still take space."""
    dead = [
        file
        for file in machine.shm.files
        if file.kind in _LEFTOVER_KINDS and file.mapped is False and file.age >= _LEFTOVER_AGE and file.size
    ]
    unclear = sum(1 for file in machine.shm.files if file.kind in _LEFTOVER_KINDS and file.mapped is None)
    if not dead:
        return
    total = sum(file.size for file in dead)
    size = machine.shm.size or 0
    names = tuple(file.name for file in sorted(dead, key=lambda file: -file.size))
    kinds = listed(sorted({file.kind for file in dead}))
    yield Finding(
        "shm-leftovers",
        "warning" if size and total >= size // 10 else "info",
        say(
            phrase("1 unused file takes {total} of /dev/shm")
            if len(dead) == 1
            else phrase("{count} unused files take {total} of /dev/shm"),
            count=len(dead),
            total=format_size(total),
        ),
        joined(
            (
                say(
                    "killed processes left them behind ({kinds}); files in /dev/shm are not removed when "
                    "their process is killed",
                    kinds=kinds,
                ),
                *([say("{count} more can only be checked by root", count=unclear)] if unclear else []),
            )
        ),
        remove_leftovers(names, total),
    )


def permissions(machine: Machine) -> Iterator[Finding]:
    """A /dev/shm that cannot be written, or where any user can delete any file."""
    shm = machine.shm
    if shm.writable is False and shm.mode is not None and shm.mode & 0o7777 == 0o1777:
        yield Finding(
            "shm-permissions",
            "critical",
            say("/dev/shm is mounted read-only"),
            say("its mode is 1777, as it should be; the mount itself does not allow writing"),
            (say("as root:\nmount -o remount,rw /dev/shm"), say("check:\ngrep /dev/shm /proc/mounts")),
        )
    elif shm.writable is False:
        mode = say("unknown") if shm.mode is None else format(shm.mode, "04o")
        yield Finding(
            "shm-permissions",
            "critical",
            say("/dev/shm cannot be written by this user"),
            say("its mode is {mode} and its owner uid {owner}; it should be 1777", mode=mode, owner=shm.owner),
            (say("as root:\nchmod 1777 /dev/shm"), say("check:\nls -ld /dev/shm")),
        )
    elif shm.mode is not None and shm.mode & 0o1002 == 0o0002:
        yield Finding(
            "shm-permissions",
            "warning",
            say("any user can delete files of other users in /dev/shm"),
            say("its mode is {mode:04o}, writable by all without the sticky bit; it should be 1777", mode=shm.mode),
            (say("as root:\nchmod 1777 /dev/shm"), say("check:\nls -ld /dev/shm")),
        )


def removed_at_logout(machine: Machine) -> Iterator[Finding]:
    """logind deletes a user's files in /dev/shm when the last session ends."""
    if not machine.shm.removed_at_logout:
        return
    yield Finding(
        "shm-removed-at-logout",
        "info",
        say("logind removes your files from /dev/shm when you log out"),
        say(
            "{how}: a job started with nohup or setsid loses its shared memory when your last session ends",
            how=machine.shm.removed_how,
        ),
        (
            say("keep your user's services alive:\nloginctl enable-linger"),
            say("or, as the administrator, set RemoveIPC=no in /etc/systemd/logind.conf"),
            say("check:\nloginctl show-user $USER -p Linger"),
        ),
    )


SHM_RULES = (too_small, nearly_full, above_limit, charged_from_earlier, leftovers, permissions, removed_at_logout)
