"""Find, create and open the stores: one in shared memory, one on a local disk.

A store is the directory ``legroom-<uid>`` below ``/dev/shm`` (or ``LEGROOM_SHM``), and below the first of
``LEGROOM_DIR``, ``SLURM_TMPDIR``, ``/var/tmp``, ``$XDG_CACHE_HOME`` that is writable and local. Its contents are
trusted only if its descriptor shows a directory that this user owns and that no other user can write to.

A Store owns four directory descriptors and closes them.

Every removal renames to ``work/trash-*`` under the store's lock, so a name that was checked under that lock still
stands for the same thing when it is renamed. A process killed in between leaves a ``trash-*`` or ``building-*``
directory, which the next build or gc deletes. Both are in ``work/``, with the locks of builders: listing it does not
take longer with more entries.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from legroom.cache import locks
from legroom.cache.mapped_files_and_checksums import opened
from legroom.errors import LegroomError, NoStore, StoreError
from legroom.messages import joined, say
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.finding_and_alarm import Finding
from legroom.system.lazy_and_optional_imports import import_lock

Backing = Literal["shm", "disk"]
LOCKS, SOURCES = "locks", "sources"
WORK = "work"  # builds and removals in progress: a build lists only this folder
STORE_LOCK = "store.lock"
TRASH, BUILDING, DOWNLOAD, LOCK = "trash-", "building-", "download-", ".lock"  # names in work/
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class UnusableStore(Exception):
    """A candidate that cannot be a store, with the reason for the user."""

    def __init__(self, reason: str, code: str = "store-unusable") -> None:
        super().__init__(reason)
        self.reason, self.code = reason, code


@dataclass(frozen=True, slots=True)
class StoreCandidate:
    """A directory that may contain a store."""

    parent: Path
    backing: Backing
    named: bool  # set by the user, who may choose a network file system
    may_create: bool = False

    @property
    def root(self) -> Path:
        return self.parent / f"legroom-{os.geteuid()}"


@dataclass(eq=False, slots=True)
class Store:
    """An open store."""

    root: Path
    backing: Backing
    fd: int
    locks: int
    sources: int
    work: int

    @property
    def directory(self) -> tuple[int, int]:
        """Device and inode: two stores with the same directory share their lock files."""
        stats = os.fstat(self.fd)
        return stats.st_dev, stats.st_ino

    def close(self) -> None:
        """Close its descriptors. Calling it again does nothing."""
        for name in ("fd", "locks", "sources", "work"):
            number = getattr(self, name)
            setattr(self, name, -1)
            if number >= 0:
                os.close(number)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Stores:
    """The usable stores, shared memory first, and why others are not used."""

    found: tuple[Store, ...]
    findings: tuple[Finding, ...] = field(default=())

    @property
    def distinct(self) -> tuple[Store, ...]:
        """Each directory once: LEGROOM_DIR may name the store in memory."""
        return tuple({store.directory: store for store in reversed(self.found)}.values())[::-1]

    def without(self, store: Store, finding: Finding) -> Stores:
        """The other stores, and why this one is not used."""
        others = tuple(other for other in self.found if other is not store)
        return Stores(others, (*self.findings, finding))

    @property
    def election_store(self) -> Store:
        """Where builders are elected, whichever store gets the data: the same for every process."""
        if not self.found:
            raise NoStore(
                say("no directory is usable for the shared cache"),
                why=joined(finding.why for finding in self.findings) or say("this system has no file locks"),
                fix=(
                    "LEGROOM_DIR=/some/local/directory",
                    say("set LEGROOM_DISABLE=1 to read the data into this process only"),
                ),
            )
        return self.found[0]


def candidates(env: Mapping[str, str]) -> Iterator[StoreCandidate]:
    """Every directory that could contain a store, best first."""
    memory = env.get("LEGROOM_SHM")
    yield StoreCandidate(Path(os.path.expanduser(memory or "/dev/shm")).absolute(), "shm", bool(memory))
    with import_lock:
        from legroom.probe.filesystems_and_cgroups import store_candidates

    for place in store_candidates(Host(env=env)):
        if os.path.isabs(place.path):
            yield StoreCandidate(Path(place.path), "disk", place.asked_for, place.may_create)


def existing_stores() -> Iterator[Store]:
    """The existing stores, each closed when the next is requested.

    An attach that finds its entry in the first never opens the second.
    """
    seen: set[Backing] = set()
    for candidate in candidates(os.environ):
        opened: list[Store] = []
        if candidate.backing not in seen and _open_one(candidate, False, opened, []):
            seen.add(candidate.backing)
        for store in opened:
            with store:
                yield store


@contextmanager
def open_stores(*, make: bool = False) -> Iterator[Stores]:
    """Open all stores together. With ``make``, create the missing ones."""
    opened: list[Store] = []
    findings: list[Finding] = []
    settled: set[Backing] = set()
    try:
        for candidate in candidates(os.environ):
            if candidate.backing not in settled and _open_one(candidate, make, opened, findings):
                settled.add(candidate.backing)
        yield Stores(tuple(opened), tuple(findings))
    except OSError as problem:
        # The builder creates a vanished store again.
        if isinstance(problem, LegroomError) or (make and isinstance(problem, FileNotFoundError)):
            raise
        raise store_error(problem) from problem
    finally:
        for store in opened:
            store.close()


def _not_yet_made(candidate: StoreCandidate) -> bool:
    """Whether a load would make its store here: what lies in other places is not used, before as after that load."""
    if not candidate.named:
        return False
    folder = candidate.parent
    while candidate.may_create and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _what_is_missing(candidate: StoreCandidate) -> str:
    """Why the store could not be created, after a directory was not found. Pseudo file systems say that of new ones."""
    nearest = next(folder for folder in (candidate.parent, *candidate.parent.parents) if folder.exists())
    if nearest != candidate.parent and not candidate.may_create:
        return say("{path} does not exist", path=candidate.parent)
    return say("no directory can be created in {path}", path=nearest)


def _open_one(candidate: StoreCandidate, make: bool, opened: list[Store], findings: list[Finding]) -> bool:
    """Open that store, or note why not; whether the search for a store of its kind ends here."""
    try:
        opened.append(open_store(candidate, make=make))
        return True
    except FileNotFoundError:
        if not make:  # it does not exist yet, which is normal
            return _not_yet_made(candidate)
        findings.append(_passed_over(candidate, UnusableStore(_what_is_missing(candidate))))
    except UnusableStore as unfit:
        findings.append(_passed_over(candidate, unfit))
    except OSError as problem:
        if is_resource_shortage(problem):
            raise
        why = say("{path}: {problem}", path=candidate.root, problem=problem.strerror or problem)
        # The store exists but its content is unknown: it must not be taken for empty.
        findings.append(_passed_over(candidate, UnusableStore(why), there=not make))
    return False


def is_resource_shortage(problem: OSError) -> bool:
    """Whether a call failed for lack of descriptors or memory, which proves nothing about its file."""
    return problem.errno in _SHORT


def store_error(problem: OSError, kind: type[StoreError] = StoreError, path: Path | None = None) -> StoreError:
    """The error for a failed system call on a store."""
    reason = problem.strerror or str(problem)
    fix = say("list the stores:\nlegroom cache list")
    if path is not None:
        fix = say("check the path and its filesystem:\nls -l {path}", path=shlex.quote(str(path)))
    if problem.errno == errno.EMFILE:
        fix = say("close unused files, or raise the limit of open files:\nulimit -n 65536")
    elif problem.errno == errno.ENFILE:
        fix = say("raise the system-wide limit of open files:\nsysctl fs.file-max")
    elif problem.errno == errno.ENOMEM:
        fix = say("free memory, or raise the limit of memory mappings:\nsysctl vm.max_map_count")
    elif problem.errno == errno.EFBIG:
        fix = say("raise the file size limit:\nulimit -f unlimited")
    where = path or problem.filename
    return kind(
        say("{path} cannot be read", path=path) if path else say("the cache cannot be read or written"),
        why=say("{where}: {reason}", where=where, reason=reason) if where and not path else reason,
        fix=(fix, say("set LEGROOM_DISABLE=1 to read without the cache")),
    )


def open_store(candidate: StoreCandidate, *, make: bool) -> Store:
    """Open one store and check it on its descriptors. Raises UnusableStore if it cannot be trusted."""
    root = candidate.root
    if make:
        if candidate.may_create:
            _make_all(candidate.parent)
        _check_parent(candidate.parent)
        _check_local(candidate)
        _make(root)
    opened = [_folder(root, None)]
    try:
        if not make:  # checked at creation, but it may have changed since
            _check_parent(candidate.parent)
            _check_local(candidate)
        for name in (LOCKS, SOURCES, WORK):
            try:
                opened.append(_folder(name, opened[0]))
            except FileNotFoundError:
                if not make and name != WORK:  # stores of earlier versions have none
                    raise
                _make(name, opened[0])
                opened.append(_folder(name, opened[0]))
        if make:
            _check_writable(root, opened)
    except BaseException:
        for number in opened:
            os.close(number)
        raise
    return Store(root, candidate.backing, *opened)


def _check_writable(root: Path, opened: Sequence[int]) -> None:
    """Raise UnusableStore on a read-only file system or an immutable directory: no build is possible there."""
    for folder in opened:
        if not os.access(f"/proc/self/fd/{folder}", os.W_OK | os.X_OK) and os.path.isdir("/proc/self/fd"):
            raise UnusableStore(say("{path} cannot be written to: read-only or immutable", path=root))


def _make_all(folder: Path) -> None:
    """Create a directory and its parents, all private to this user whatever the umask is."""
    try:
        _make(folder)
    except FileNotFoundError:
        if folder == folder.parent:
            raise
        _make_all(folder.parent)
        _make(folder)


def _make(path: Path | str, folder: int | None = None) -> None:
    try:
        os.mkdir(path, 0o700, dir_fd=folder)
    except FileExistsError:
        pass


def _folder(path: Path | str, folder: int | None) -> int:
    try:
        fd = os.open(path, _FOLDER, dir_fd=folder)
    except OSError as problem:
        if problem.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        is_link = stat.S_ISLNK(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode)
        what = say("a symbolic link") if is_link else say("not a directory")
        raise UnusableStore(say("{path} is {what}", path=path, what=what), "store-symlink") from None
    try:
        _require_trusted(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_trusted(path: Path | str, fd: int) -> None:
    """Raise UnusableStore if an open directory cannot be trusted."""
    stats = os.fstat(fd)
    mode = stat.S_IMODE(stats.st_mode)
    if stats.st_uid != os.geteuid():
        why = say("{path} belongs to uid {owner}, not to {uid}", path=path, owner=stats.st_uid, uid=os.geteuid())
        raise UnusableStore(why, "store-squatted")
    if mode & 0o022:
        why = say("{path} is writable by other users (mode {mode})", path=path, mode=oct(mode)[2:])
        raise UnusableStore(why, "store-writable-by-others")
    if stats.st_uid == _overflow_uid() and not _proven(fd, mode):
        why = say(
            "{path} belongs to uid {owner}, which this user namespace shows for every unmapped user",
            path=path, owner=stats.st_uid,
        )  # fmt: skip
        raise UnusableStore(why, "store-squatted")


@cache
def _overflow_uid() -> int:
    """The uid that the kernel shows for users that a user namespace does not map."""
    try:
        return int(read_small_file(None, "/proc/sys/kernel/overflowuid", 64))
    except (OSError, ValueError):
        return 65534


def _proven(fd: int, mode: int) -> bool:
    """Whether a directory of the overflow uid belongs to this user, who has that uid too.

    If the namespace does not map that uid, the number proves nothing. If it does, the number still stands for others as
    well, but only the owner can set the mode.
    """
    if not _mapped(_overflow_uid()):
        return False
    try:
        os.fchmod(fd, mode)
    except OSError:
        return False
    return True


def _mapped(uid: int) -> bool:
    """Whether this process's user namespace maps that uid."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        spans = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    except (OSError, ValueError):
        return True  # a system without user namespaces
    return any(first <= uid < first + count for first, count in spans)


def _check_parent(parent: Path) -> None:
    """Require a sticky bit if other users can write: without it they could replace the store."""
    stats = os.stat(parent)
    mode = stat.S_IMODE(stats.st_mode)
    if mode & 0o022 and not mode & stat.S_ISVTX:
        why = say(
            "{path} is writable by other users and has no sticky bit (mode {mode})", path=parent, mode=oct(mode)[2:]
        )
        raise UnusableStore(why, "store-writable-by-others")
    if stats.st_uid not in (0, os.geteuid()):
        why = say("{path} belongs to uid {owner}", path=parent, owner=stats.st_uid)
        raise UnusableStore(why, "store-squatted")


def _passed_over(candidate: StoreCandidate, unfit: UnusableStore, *, there: bool = False) -> Finding:
    usual = unfit.code == "store-unusable" and not candidate.named and not there
    return Finding(
        code=unfit.code,
        severity="info" if usual else "warning",
        message=say("{path} is not used as a store", path=candidate.root),
        why=unfit.reason,
        fix=(
            say("remove {path}, or have its owner remove it", path=candidate.root),
            "LEGROOM_DIR=/some/local/directory",
        ),
    )


def _check_local(candidate: StoreCandidate) -> None:
    if candidate.backing == "shm" or candidate.named:
        return
    kind = filesystem_at(str(candidate.parent), os.stat(candidate.parent).st_dev)
    if kind is None:
        return
    with import_lock:
        from legroom.probe.filesystems_and_cgroups import is_network

    if is_network(kind):
        why = say("{path} is on a network file system ({kind})", path=candidate.root, kind=kind)
        raise UnusableStore(why, "store-on-network")


def filesystem_type(store: Store) -> str | None:
    """The type of the file system that the store is on."""
    return filesystem_at(str(store.root), os.fstat(store.fd).st_dev)


IN_MEMORY = ("tmpfs", "ramfs")  # types of file systems


@lru_cache(maxsize=64)
def filesystem_at(root: str, _device: int) -> str | None:
    """The type of the file system at a path; None if it cannot be found out."""
    with import_lock:
        from legroom.probe.filesystems_and_cgroups import filesystem_of

    mount = filesystem_of(Host(), root)
    return None if mount is None else mount.kind


def in_memory(store: Store) -> bool:
    """Whether the store's files are in memory: a tmpfs, wherever it is mounted."""
    kind = filesystem_type(store)
    return store.backing == "shm" if kind is None else kind in IN_MEMORY


log = logging.getLogger("legroom.cache")

step_hook: Callable[[str], None] | None = None


def step(name: str) -> None:
    """Call the hook before the effect ``name``, which other processes can see.

    The store is valid at every one of these points. Tests prove it by killing the process there.
    """
    if step_hook is not None:
        step_hook(name)
    log.debug("%s", name)


@contextmanager
def store_lock(store: Store) -> Iterator[None]:
    """Hold the store's lock, briefly. Its holder takes other locks only without waiting."""
    lock = locks.acquire(store.locks, STORE_LOCK, block=True)
    assert lock is not None  # a blocking lock is never refused
    with lock:
        yield


def is_locked(store: Store, lock_file: str) -> bool:
    """Whether a process holds that lock. Checked under the store's lock, so no process mistakes the check for a use."""
    with store_lock(store):
        return locks.held(store.locks, lock_file)


def read_small_file(folder: int | None, name: str, size: int) -> bytes:
    """The first ``size`` bytes of a file in an open directory. Follows no link; what is no file has no bytes."""
    with opened(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder) as fd:
        stats = os.fstat(fd)
        if not stat.S_ISREG(stats.st_mode):
            return b""
        return os.read(fd, min(size, stats.st_size + 1) if stats.st_size else 4096)  # files in /proc state no size


def move_to_trash(store: Store, name: str, folder: int | None = None) -> str | None:
    """Rename to trash, under the store's lock. Returns the new name, None if it does not exist.

    ``folder`` is the directory it is in, by default the store itself.
    """
    target = TRASH + os.urandom(8).hex()
    source = store.fd if folder is None else folder
    step("trash")
    try:
        try:
            os.rename(name, target, src_dir_fd=source, dst_dir_fd=store.work)
        except PermissionError:
            # A directory without write permission cannot be moved to another parent.
            with opened(name, _FOLDER, dir_fd=source) as fd:
                os.fchmod(fd, 0o700)
            os.rename(name, target, src_dir_fd=source, dst_dir_fd=store.work)
    except FileNotFoundError:
        return None
    return target


def delete_trash(store: Store, name: str) -> None:
    """Delete a trash directory. Several processes may do so at once."""
    with import_lock:  # takes milliseconds, and opening an entry deletes nothing
        import shutil

    step("delete")
    if not name.startswith(TRASH):
        raise ValueError(name)
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=store.work, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=store.work, ignore_errors=True)
        else:
            os.unlink(name, dir_fd=store.work)  # rmtree would open it, and hang on a FIFO
    except OSError:
        pass  # gone, or not empty yet: the next gc or build tries again


def leftovers(store: Store) -> tuple[list[str], list[str]]:
    """What dead builders and interrupted removals left in ``work/``: builders, trash. Under the store's lock.

    A builder holds its lock from before its directory exists until after it is gone. So a lock file or directory whose
    lock is not held belongs to a dead builder. Both of one builder count as one.
    """
    found = os.listdir(store.work)
    names = {name.removesuffix(LOCK) for name in found if name.startswith(BUILDING)}
    dead = [name for name in sorted(names) if not locks.held(store.work, name + LOCK)]
    return dead, [name for name in found if name.startswith(TRASH)]


def delete_leftovers(store: Store) -> int:
    """Delete what dead builders and interrupted removals left, under the store's lock. Returns how many they were."""
    dead, trash = leftovers(store)
    for name in trash:
        delete_trash(store, name)
    for name in dead:
        for part in (name, name + LOCK):
            moved = move_to_trash(store, part, store.work)
            if moved is not None:
                delete_trash(store, moved)
    return len(dead) + len(trash)
