"""Rules about /dev/shm. Covers: its size, use, leftovers, rights. Does not cover: RAM behind it (rules_ram)."""

from __future__ import annotations

from collections.abc import Iterator

from legroom.advice.remedies import (
    advised_shm,
    bound_shm,
    check_room,
    doubled_shm,
    enlarge_shm,
    remove_leftovers,
    use_less_shm,
)
from legroom.advice.safe_settings import batches_in_flight
from legroom.records import Box, Finding
from legroom.units import format_size
from legroom.words import joined, listed, say

DEFAULT_SIZE = 64 << 20  # what docker, podman and kubernetes give when nothing is asked for
SMALL = 512 << 20  # the floor of every recommendation: twice two workers' worth of 40 MB batches
NEARLY_FULL = 0.80
ABOUT_TO_FAIL = 0.95
_LEFTOVER_KINDS = frozenset({"torch", "python", "semaphore", "nccl"})
_LEFTOVER_AGE = 60.0  # younger than this, its owner may just be starting


def too_small(box: Box) -> Iterator[Finding]:
    """The container default, and sizes below what two workers with ordinary batches need."""
    size = box.shm.size
    if size is None or not box.shm.mounted or size >= SMALL:
        return
    ram = box.pool("ram")
    wanted = advised_shm(ram.size if ram else None)
    # Where the memory behind it allows no more, a larger one would only turn an error into an OOM kill.
    fix = enlarge_shm(box.place, wanted) if wanted > size else (*use_less_shm(), check_room("/dev/shm"))
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
                "/dev/shm is {size}, the default of containers: data loaders with workers die here", **numbers
            ),
            say(
                "torch's DataLoader with 4 workers and prefetch 2 keeps up to {flights} batches in /dev/shm, so a "
                "batch above {largest} fails: RuntimeError 'unable to allocate shared memory' or 'Bus error'. "
                "GPU memory and RAM have no part in it",
                **numbers,
            ),
            fix,
        )
    else:
        yield Finding(
            "shm-small",
            "warning",
            say("/dev/shm is {size}: little for data loaders with workers", **numbers),
            say(
                "4 workers with prefetch 2 keep up to {flights} batches there: at most {largest} each",
                **numbers,
            ),
            fix,
        )


def nearly_full(box: Box) -> Iterator[Finding]:
    """Little left: the next batch fails."""
    pool = box.pool("shm")
    share = pool.used_share if pool else None
    if pool is None or share is None or pool.free is None or share < NEARLY_FULL:
        return
    holders = sorted(
        (process for process in box.processes if process.shm),
        key=lambda process: process.shm or 0,
        reverse=True,
    )
    held = listed(f"{process.pid} {format_size(process.shm or 0)}" for process in holders[:3])
    size = pool.size or 0
    yield Finding(
        "shm-nearly-full",
        "critical" if share >= ABOUT_TO_FAIL else "warning",
        say("/dev/shm is {share:.0%} full: {free} left", share=share, free=format_size(pool.free)),
        say(
            "{used} of {size} in use (largest holders: {held}); a batch that finds no room ends the training"
            if held
            else "{used} of {size} in use; a batch that finds no room ends the training",
            used=format_size(pool.used or 0),
            size=format_size(size),
            held=held,
        ),
        (
            say("end or shrink what holds it: fewer workers, smaller prefetch, smaller batches"),
            *_enlarged(box, size),
        ),
    )


def _enlarged(box: Box, size: int) -> tuple[str, ...]:
    """How to get a larger one here, where the memory behind it allows more."""
    ram = box.pool("ram")
    wanted = doubled_shm(size, ram.size if ram else None)
    if wanted is not None:
        return enlarge_shm(box.place, wanted)
    behind = say("an unknown amount") if ram is None or ram.size is None else format_size(ram.size)
    return (
        say(
            "a larger one is not advised: it has {size}, what lies in it is memory, and there is {ram} of that",
            size=format_size(size),
            ram=behind,
        ),
        check_room("/dev/shm"),
    )


def above_limit(box: Box) -> Iterator[Finding]:
    """A /dev/shm larger than the memory behind it: a clean error becomes an OOM kill."""
    size, ram = box.shm.size, box.pool("ram")
    if size is None or ram is None or ram.size is None or not box.shm.mounted or size <= ram.size:
        return
    by_cgroup = box.memory.total is None or ram.size < box.memory.total
    half = 1 << max(
        26, (ram.size // 2).bit_length() - 1
    )  # the largest power of two that leaves half to processes
    yield Finding(
        "shm-above-cgroup-limit",
        "warning" if by_cgroup else "info",
        say(
            "/dev/shm may grow to {size}, {whose} is {ram}",
            size=format_size(size),
            whose=say("the cgroup's memory limit") if by_cgroup else say("the machine's RAM"),
            ram=format_size(ram.size),
        ),
        say(
            "pages in /dev/shm count as memory, so filling it does not give an error: the OOM killer ends a process "
            "first, and not always the guilty one"
        ),
        bound_shm(box.place, half, own=by_cgroup, shared=by_cgroup and _is_machines(box)),
    )


def _is_machines(box: Box) -> bool:
    """Whether /dev/shm is the machine's own, seen from a cgroup: a container that was given one has a smaller one."""
    size, total = box.shm.size, box.memory.total
    return (
        size is not None and total is not None and size >= total * 2 // 5
    )  # half of RAM, where nothing is set


def leftovers(box: Box) -> Iterator[Finding]:
    """Files of dead programs that still take room."""
    dead = [
        file
        for file in box.shm.files
        if file.kind in _LEFTOVER_KINDS and file.mapped is False and file.age >= _LEFTOVER_AGE and file.size
    ]
    unclear = sum(1 for file in box.shm.files if file.kind in _LEFTOVER_KINDS and file.mapped is None)
    if not dead:
        return
    total = sum(file.size for file in dead)
    size = box.shm.size or 0
    names = tuple(file.name for file in sorted(dead, key=lambda file: -file.size))
    kinds = listed(sorted({file.kind for file in dead}))
    yield Finding(
        "shm-leftovers",
        "warning" if size and total >= size // 10 else "info",
        say(
            "{count} files in /dev/shm that no process uses hold {total}",
            count=len(dead),
            total=format_size(total),
        ),
        joined(
            (
                say(
                    "they were left by killed programs ({kinds}); killing a process frees no file of its in /dev/shm",
                    kinds=kinds,
                ),
                *([say("of {count} more it cannot be told without root", count=unclear)] if unclear else []),
            )
        ),
        remove_leftovers(names, total),
    )


def permissions(box: Box) -> Iterator[Finding]:
    """A /dev/shm that cannot be written, or that anybody may delete from."""
    shm = box.shm
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
            say(
                "its mode is {mode} and its owner uid {owner}; it should be 1777", mode=mode, owner=shm.owner
            ),
            (say("as root:\nchmod 1777 /dev/shm"), say("check:\nls -ld /dev/shm")),
        )
    elif shm.mode is not None and shm.mode & 0o1002 == 0o0002:
        yield Finding(
            "shm-permissions",
            "warning",
            say("anybody may delete anybody's files in /dev/shm"),
            say(
                "its mode is {mode:04o}: writable by all without the sticky bit; it should be 1777",
                mode=shm.mode,
            ),
            (say("as root:\nchmod 1777 /dev/shm"), say("check:\nls -ld /dev/shm")),
        )


def removed_at_logout(box: Box) -> Iterator[Finding]:
    """logind deletes a user's files in /dev/shm when the last session ends."""
    if not box.shm.removed_at_logout:
        return
    yield Finding(
        "shm-removed-at-logout",
        "info",
        say("logind removes your files from /dev/shm when you log out"),
        say(
            "{how}: a training under nohup or setsid loses its shared memory with your last session",
            how=box.shm.removed_how,
        ),
        (
            say("keep your user's services alive:\nloginctl enable-linger"),
            say("or, by the administrator: RemoveIPC=no in /etc/systemd/logind.conf"),
            say("check:\nloginctl show-user $USER -p Linger"),
        ),
    )


SHM_RULES = (too_small, nearly_full, above_limit, leftovers, permissions, removed_at_logout)
