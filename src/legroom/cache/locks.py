"""Locks between processes: flock on small files.

Three properties of flock, and what is done about each:

- A lock belongs to the open file description, so a forked child holds it too, even after its parent was
  killed. Builders' locks are closed in children by ``os.register_at_fork``. Leases are kept by children on purpose:
  a forked worker uses the data as its parent does. So a lease is released by closing the descriptor,
  never by LOCK_UN, which would release it for parent and children at once.
- The file may have been unlinked between open and flock: then the lock protects nothing. After every flock the
  descriptor and the name must be the same inode, otherwise it is tried again.
- Process ids prove nothing across pid namespaces. A process is alive if its lock cannot be taken.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

try:
    import fcntl
except ImportError:  # Windows: data is read into each process, as with LEGROOM_DISABLE=1
    SUPPORTED = False
else:
    SUPPORTED = hasattr(os, "register_at_fork")

_NO_LOCK = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR)  # not a file that can be locked
_guard = threading.RLock()  # held while forking, so that no descriptor is missed between open and _work.add
_work: set[int] = set()  # descriptors that children close
_forks: list[int] = []  # an item while this process forks with the guard held
_hooked = False


@dataclass(eq=False, slots=True)
class Lock:
    """A held lock. It ends when the last process that has the descriptor closes it or dies."""

    fd: int
    name: str
    lease: bool
    pid: int = field(default_factory=os.getpid)

    def touch(self) -> None:
        """Set the lock file's mtime to now: the time of the entry's last use."""
        try:
            os.utime(self.fd)
        except OSError:
            pass  # a read-only store: the data is usable, but the entry looks older to eviction

    def release(self) -> None:
        """Release it. Calling it again does nothing."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if self.lease:
            os.close(fd)
        elif self.pid == os.getpid():  # in a child the descriptor was closed at fork
            with _guard:
                _work.discard(fd)
                os.close(fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit() and self.fd >= 0:  # at exit the kernel closes it
            self.release()


def acquire(
    folder: int, name: str, *, shared: bool = False, create: bool = True, block: bool = False, lease: bool = False
) -> Lock | None:
    """Take the lock file ``name`` in the open directory ``folder``. None if another process holds it.

    Raises FileNotFoundError if it does not exist and ``create`` is false.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if block else fcntl.LOCK_NB)
    while True:
        lock = _open(folder, name, flags, lease)
        try:
            fcntl.flock(lock.fd, kind)
            held = os.fstat(lock.fd)
            named = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
                return lock
        except BlockingIOError:
            lock.release()
            return None
        except FileNotFoundError:
            pass  # unlinked meanwhile: the lock protects nothing
        except BaseException:
            lock.release()
            raise
        lock.release()


def held(folder: int, name: str) -> bool:
    """Whether a process holds that lock (shared or not). False if there is no such file.

    The check takes the lock for a moment. The caller holds the store's lock, and so does every process that takes an
    exclusive lock without waiting, so none of them mistakes the check for a use.
    """
    try:
        lock = acquire(folder, name, create=False)
    except OSError as problem:
        if problem.errno not in _NO_LOCK:
            raise
        return False
    if lock is None:
        return True
    lock.release()
    return False


def _open(folder: int, name: str, flags: int, lease: bool) -> Lock:
    if lease:
        return Lock(_descriptor(folder, name, flags), name, lease)
    _hook()
    with _guard:
        fd = _descriptor(folder, name, flags)
        _work.add(fd)
    return Lock(fd, name, lease)


def _descriptor(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as problem:
        if problem.errno != errno.EROFS:
            raise
        # An existing lock file can be locked on a read-only file system too.
        try:
            return os.open(name, flags & ~(os.O_RDWR | os.O_CREAT) | os.O_RDONLY, dir_fd=folder)
        except FileNotFoundError:
            raise problem from None


def _hook() -> None:
    global _hooked
    with _guard:
        if not _hooked:
            os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_close_in_child)
            _hooked = True


def _before_fork() -> None:
    _guard.acquire()
    _forks.append(1)


def _after_fork() -> None:
    if _forks:  # none in a fork that had begun when this was registered
        _forks.pop()
        _guard.release()


def _close_in_child() -> None:
    for fd in _work:
        try:
            os.close(fd)
        except OSError:
            pass  # already closed by other code
    _work.clear()
    _after_fork()
