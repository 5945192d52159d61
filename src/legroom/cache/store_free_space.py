"""How much still fits into a store: measured, reserved, and measured again while it is written.

The limits are the file system, its inodes, ``LEGROOM_DISK_LIMIT``, RAM and memory cgroups. Inside a memory cgroup the
kernel does not refuse pages, it kills. So each allocation step is compared with what the cgroups still allow. A
reservation is the text of the builder's lock file. It counts as long as that lock is held.

The size of all entries is kept in ``work/used``, with the mtime of the store's directory, because reading the size of
every file would make each build slower than the last. The mtime changes whenever an entry comes or goes. A sum that
missed a change (a killed process, an entry removed by hand) does not match it, and the entries are counted again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from legroom.advice.fix_commands import enlarge_shm, raise_ram_limit
from legroom.cache import locks
from legroom.cache.manifest import is_key
from legroom.cache.mapped_files_and_checksums import opened
from legroom.cache.store_directories import BUILDING, LOCK, Store, in_memory, read_small_file
from legroom.errors import NoRoom
from legroom.formats.decoding_memory_budget import Allowed, DecodingMemory
from legroom.messages import joined, say
from legroom.probe.filesystems_and_cgroups import cgroup
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory
from legroom.probe.runtime_environment import environment
from legroom.units import exact_size, format_size, parse_size

STEP = 32 << 20
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class BuildNeed:
    """What one build needs: bytes and files in the store, and memory for decoding outside it."""

    nbytes: int
    files: int = 0
    decoding: int = 0
    several: bool = True  # arrays or columns of which fewer can be asked for


@dataclass(frozen=True, slots=True)
class Bound:
    """One limit of a store, and how many bytes it still allows."""

    free: int
    what: Callable[[], str]  # in words, for an error
    memory: bool = False  # RAM or a cgroup: a larger file system does not help
    group: int | None = None  # the inode of that cgroup: evicting frees only what is charged to it
    inodes: bool = False


def bounds(store: Store) -> list[Bound]:
    """All limits of the store now, before reservations."""
    stats = os.statvfs(store.fd)
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    keep = min(256 * _MB, size // 16) if store.backing == "shm" else min(1024 * _MB, size // 20)
    found = [Bound(free - keep, lambda: say(
        "{root}: {free} free, {keep} kept free", root=store.root, **_pair(free, keep)
    ))]  # fmt: skip
    if store.backing == "disk":
        limit, taken = disk_limit(size, os.environ), store_bytes(store)
        found.append(Bound(limit - taken, lambda: say(
            "{root}: {taken} used of {limit} (LEGROOM_DISK_LIMIT; default: half the file system)",
            root=store.root, limit=format_size(limit), taken=format_size(taken),
        )))  # fmt: skip
    if in_memory(store):
        found.extend(memory_bounds())
    return found


def bounds_now(store: Store) -> list[Bound]:
    """The limits that may have changed since the reservation: the file system and memory. Cheap."""
    stats = os.statvfs(store.fd)
    free = stats.f_bavail * stats.f_frsize
    found = [Bound(free, lambda: say("{root}: {free} free", root=store.root, free=format_size(free)))]
    return found + (memory_bounds() if in_memory(store) else [])


def memory_bounds(host: Host | None = None) -> list[Bound]:
    """What the machine and each memory cgroup of this process still allow."""
    now = memory(host or Host())
    found = []
    if now.available is not None and now.total is not None:
        keep = min(1024 * _MB, now.total // 16)
        found.append(Bound(now.available - keep, partial(_ram_words, now.available, keep), memory=True))
    for level in now.levels:
        if level.room is not None and level.limit is not None:
            keep = max(16 * _MB, min(512 * _MB, level.limit // 16))
            words = partial(_cgroup_words, level.path, level.limit, level.room, keep)
            found.append(Bound(level.room - keep, words, memory=True, group=_inode(level.path)))
    return found


def _ram_words(free: int, keep: int) -> str:
    return say("RAM: {free} available, {keep} kept free", **_pair(free, keep))


def _cgroup_words(path: str, limit: int, free: int, keep: int) -> str:
    return say("memory cgroup {path}: {free} left of {limit}, {keep} kept free",
               path=path, limit=format_size(limit), **_pair(free, keep))  # fmt: skip


def memory_cgroup_inodes() -> tuple[int, ...]:
    """The inodes of this process's memory cgroups, innermost first: its allocations are charged to these.

    Inodes, because the same cgroup has another path in another cgroup namespace.
    """
    found = (_inode(path) for path in cgroup(Host(), "memory").chain)
    return tuple(number for number in found if number is not None and number < 1 << 50)


def _inode(path: str) -> int | None:
    try:
        return os.stat(path.removesuffix("/..")).st_ino
    except OSError:
        return None


def decoding_memory() -> DecodingMemory:
    """The memory that one load may use for decoding, measured again while it runs."""
    return DecodingMemory(decoding_allowance)


def decoding_allowance(promised: int = 0) -> Allowed:
    """What decoding may allocate now, in addition to ``promised`` bytes for the load's own data."""
    found = memory_bounds()
    if not found:
        return Allowed(1 << 62, "")
    bound = tightest(found)
    why = bound.what()
    if promised:
        why = joined([why, say("{bytes} reserved for the data itself", bytes=format_size(promised))])
    return Allowed(bound.free - promised, why, (raise_ram_limit(environment(Host()), None)[0],))


def tightest(found: list[Bound]) -> Bound:
    """The bound with the fewest free bytes."""
    return min(found, key=lambda bound: bound.free)


def shortfalls(store: Store, need: BuildNeed, promised: int) -> list[tuple[int, Bound]]:
    """(missing bytes, bound) of each limit that ``need`` exceeds, counting the reservations of others."""
    in_ram = in_memory(store)
    found = bounds(store)
    if need.files:
        found += _inodes(store, need.files)
    if need.decoding and not in_ram:
        found += memory_bounds()
    missing = []
    for bound in found:
        wanted = need.nbytes + promised if in_ram or not bound.memory else 0
        wanted += need.decoding if bound.memory else 0
        if wanted > bound.free:
            missing.append((wanted - bound.free, bound))
    return missing


def fills_memory(store: Store, need: BuildNeed) -> bool:
    """Whether files on a disk are larger than the memory that is free now beside decoding: they are written through."""
    return not in_memory(store) and any(need.nbytes + need.decoding > bound.free for bound in memory_bounds())


def check_now(store: Store, count: int, need: BuildNeed) -> int:
    """Raise NoRoom if ``count`` bytes of ``need`` no longer fit. Returns how many bytes are free."""
    bound = tightest(bounds_now(store))
    if count > bound.free:
        raise no_room_error(store, need, count - bound.free, bound)
    return bound.free


def check_fits(store: Store, need: BuildNeed, *, mine: str | None = None, evicts: bool = False) -> None:
    """Raise NoRoom if ``need`` does not fit, counting the reservations of others. ``evicts``: as in no_room_error."""
    promised = outstanding_reservations(store, mine)
    missing = shortfalls(store, need, promised)
    if missing:
        raise no_room_error(store, need, *max(missing, key=lambda pair: pair[0]), promised, evicts=evicts)


def no_room_error(
    store: Store, need: BuildNeed, missing: int, bound: Bound, promised: int = 0, *, evicts: bool = False
) -> NoRoom:
    """NoRoom, with the numbers.

    ``evicts``: the load removes unused entries by itself. If it still fails, removing them by hand would cost them and
    not make the room, so that is not among the fixes.
    """
    fewer = (say("load only what you need: keys=[…]"),) if need.several else ()
    why = [bound.what()]
    if promised:
        why.append(say("{bytes} reserved by other processes that are loading", bytes=format_size(promised)))
    if need.decoding and bound.memory:
        why.append(say("decoding needs {size} of memory at a time", size=format_size(need.decoding)))
    if bound.memory and not in_memory(store):
        return NoRoom(
            say(
                "not enough memory to decode into {root}: {missing} more needed",
                missing=format_size(missing),
                root=store.root,
            ),
            why=joined(why),
            fix=(_fix_for(store, missing, bound), say("write the file with smaller chunks, batches or pages"), *fewer),
        )
    return NoRoom(
        say("{need} does not fit into {root}: {missing} more needed",
            missing=format_size(missing), need=format_size(need.nbytes), root=store.root),
        why=joined(why),
        fix=(
            *(() if evicts or bound.inodes else ("legroom cache gc --free " + exact_size(need.nbytes),)),
            _fix_for(store, missing, bound),
            *fewer,
        ),
    )  # fmt: skip


def _inodes(store: Store, files: int) -> list[Bound]:
    """A bound if too few inodes are free. Empty if the file system does not count them, or has enough."""
    stats = os.statvfs(store.fd)
    if not stats.f_files or stats.f_favail >= files:
        return []
    text = say("{root}: {free} of {all} inodes free, {files} files to write",
               root=store.root, free=stats.f_favail, all=stats.f_files, files=files)  # fmt: skip
    return [Bound(0, lambda: text, inodes=True)]


def _fix_for(store: Store, missing: int, bound: Bound) -> str:
    """The command or setting that raises this limit."""
    if bound.inodes and not in_memory(store):
        return say("set LEGROOM_DIR to a directory of another file system")
    if bound.inodes:
        return say("remount {root} with more inodes: -o remount,nr_inodes=…", root=store.root.parent)
    if bound.memory:
        return raise_ram_limit(environment(Host()), None)[0]
    if store.backing == "disk":
        return say("set LEGROOM_DIR to a larger disk, or raise LEGROOM_DISK_LIMIT")
    if not _on_dev_shm(store):
        return say(
            "set LEGROOM_SHM to a directory with more space, or enlarge the file system of {root}", root=store.root
        )
    stats = os.statvfs(store.fd)
    size = stats.f_blocks * stats.f_frsize + missing
    return enlarge_shm(environment(Host()), 1 << (size - 1).bit_length())[0]


def _on_dev_shm(store: Store) -> bool:
    """Whether the store is where a larger /dev/shm helps: LEGROOM_SHM may name any directory."""
    try:
        return os.fstat(store.fd).st_dev == os.stat("/dev/shm").st_dev
    except OSError:
        return False


def outstanding_reservations(store: Store, mine: str | None = None) -> int:
    """Bytes that running builders have reserved and not yet written."""
    total = 0
    for name in os.listdir(store.work):
        if not name.startswith(BUILDING) or not name.endswith(LOCK):
            continue
        if name != mine and locks.held(store.work, name):
            taken = directory_bytes(store.work, name.removesuffix(LOCK))
            total += max(0, read_reservation(store, name)[0] - taken)
    return total


def read_reservation(store: Store, name: str) -> tuple[int, int, int]:
    """(reserved, done, total) as the builder wrote them. Zeros if it has written nothing."""
    try:
        numbers = [int(word) for word in read_small_file(store.work, name, 200).split()]
    except (OSError, ValueError):
        return 0, 0, 0
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else (0, 0, 0)


def write_reservation(fd: int, reserved: int, done: int, total: int) -> None:
    """Write the reservation and the progress for other processes, in one call."""
    os.pwrite(fd, f"{reserved:>20} {done:>20} {total:>20}\n".encode(), 0)


def disk_limit(size: int, env: Mapping[str, str]) -> int:
    """The size limit of a disk store: LEGROOM_DISK_LIMIT, or half the file system."""
    text = env.get("LEGROOM_DISK_LIMIT")
    return parse_size(text) if text else size // 2


def allocate_blocks(fd: int, offset: int, length: int) -> None:
    """Allocate the blocks of a range that are not allocated yet."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, length)


def _pair(free: int, keep: int) -> dict[str, str]:
    return {"free": format_size(free), "keep": format_size(keep)}


_COUNT = "used"


def directory_bytes(folder: int, name: str) -> int:
    """The allocated bytes of the files in directory ``name`` of ``folder``."""
    total = 0
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with suppress(OSError), opened(name, flags, dir_fd=folder) as fd, os.scandir(fd) as entries:
        for entry in entries:
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def store_bytes(store: Store) -> int:
    """The bytes of entries, builds and removals in progress. Lock files and records are not counted.

    Call it under the store's lock: two changes within one tick of the file system's clock have the same mtime.
    """
    changed = os.fstat(store.fd).st_mtime_ns
    total = _read(store)
    if total is None:
        total = sum(directory_bytes(store.fd, name) for name in os.listdir(store.fd) if is_key(name))
        _write(store, total, changed)
    return total + sum(directory_bytes(store.work, name) for name in os.listdir(store.work))


@contextmanager
def keep_count(store: Store, name: str, *, comes: bool = False) -> Iterator[None]:
    """Update the count around the rename that removes entry ``name``, or publishes ``work/name``.

    Call it under the store's lock. The count is absent during the rename: a kill leaves no count, not a wrong one.
    """
    total = _read(store)
    if total is None:  # not kept in this store, or to be counted by the next reader
        yield
        return
    change = directory_bytes(store.work, name) if comes else -directory_bytes(store.fd, name)
    forget_count(store)
    yield
    _write(store, total + change)


def forget_count(store: Store) -> None:
    """Delete the count: the next reader counts the entries."""
    with suppress(OSError):
        os.unlink(_COUNT, dir_fd=store.work)


def _read(store: Store) -> int | None:
    """The count of all entries. None if there is none that is valid for the store as it is now."""
    try:
        data = read_small_file(store.work, _COUNT, 100)
        changed, total = (int(word) for word in data.removesuffix(b"\n").split(b" "))
    except (OSError, ValueError):
        return None
    return total if data.endswith(b"\n") and changed == os.fstat(store.fd).st_mtime_ns else None


def _write(store: Store, total: int, changed: int | None = None) -> None:
    """Write the count. If that fails the next reader counts again."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW
    with suppress(OSError):
        changed = os.fstat(store.fd).st_mtime_ns if changed is None else changed
        with opened(_COUNT, flags, 0o600, dir_fd=store.work) as fd:
            os.write(fd, f"{changed} {total}\n".encode())
