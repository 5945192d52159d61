"""The folder a demo works in, and what one that was killed left behind.

Covers: a folder on a local disk and, where /dev/shm is everybody's, one there; the environment that keeps children
within them; removing all of it, and that of dead demos. Does not cover: what is put there.

A demo holds a lock on a file in each of its folders for as long as it lives. Whoever finds such a folder with a lock
that nobody holds may remove it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from legroom.demo.tether import TETHER
from legroom.errors import NoRoom
from legroom.probe.filesystem import filesystem_of, store_candidates, why_not
from legroom.probe.host import Host
from legroom.probe.limits import TAIL, longest_socket
from legroom.units import format_size
from legroom.words import VARIABLE, joined, language, say

_PREFIX = "legroom-demo-"
_ALIVE = "alive"
# Of a folder below whose ``tmp`` the workers of torch's loader have room for a socket's path; in a longer one batches
# are lost without a word and the loader waits for ever.
_LONGEST = longest_socket(sys.platform) - TAIL - len("/tmp")
_SHORT = (Path("/tmp"), Path("/var/tmp"))
_YOUNG = 60.0  # seconds in which a folder without a lock may be one that is just being made
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NETWORK_OR_MEMORY = ("tmpfs", "ramfs")


@dataclass
class Place:
    """Where one demo works."""

    folder: Path
    shm: Path | None = None  # a folder of its own in a /dev/shm that is not its own
    sockets: Path | None = (
        None  # for children's temporary files, where the folder's path is too long for sockets
    )
    in_memory: bool = False  # the folder itself is memory
    _locks: list[int] = field(default_factory=list)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """For children: whatever they make, they make here."""
        mine = {name: value for name, value in environment.items() if not name.startswith("LEGROOM_")}
        mine |= dict.fromkeys(_THREADS, "1")
        for name in ("store", "state", "tmp"):
            (self.folder / name).mkdir(exist_ok=True, mode=0o700)
        mine |= {
            "LEGROOM_DIR": str(self.folder / "store"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "TMPDIR": str(self.sockets or self.folder / "tmp"),
            VARIABLE: language(),
            TETHER: str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(_import_path(environment)),
        }
        if self.shm is not None:
            mine["LEGROOM_SHM"] = str(self.shm)
        return mine

    def _hold(self, folder: Path) -> Path:
        """Lock a folder for as long as the demo lives."""
        self._locks.append(_lock(folder))
        return folder

    def remove(self, *, keep: bool = False) -> None:
        """Remove everything; with ``keep`` the folder on disk stays, and no later demo removes it."""
        for folder in (self.folder, self.shm, self.sockets):
            if folder is not None and not (keep and folder is self.folder):
                shutil.rmtree(folder, ignore_errors=True)
        if keep:
            shutil.rmtree(self.folder / "store", ignore_errors=True)
            with contextlib.suppress(OSError):
                (self.folder / _ALIVE).unlink()
        for number in self._locks:
            os.close(number)
        self._locks.clear()


def make_place(host: Host, least: int, shm: str | None) -> Place:
    """A folder with at least so much room, and one in ``shm`` where that is named; old ones are removed first."""
    remove_all_old(host)
    refused = []
    for parent in _parents(host):
        if problem := _why_not(host, parent, least):
            refused.append(say("{path}: {why}", path=parent, why=problem))
            continue
        mount = filesystem_of(host, str(parent))
        place = Place(_fresh(parent), in_memory=mount is not None and mount.kind in _NETWORK_OR_MEMORY)
        place._hold(place.folder)
        if shm is not None and os.access(shm, os.W_OK | os.X_OK):
            place.shm = place._hold(_fresh(Path(shm)))
        short = _short()
        if len(os.fsencode(place.folder)) > _LONGEST and short is not None:
            place.sockets = place._hold(_fresh(short))
        return place
    raise NoRoom(
        say("there is no folder for the demo to work in"),
        why=joined(refused),
        fix=(say("LEGROOM_DIR=/some/local/directory with {size} free", size=format_size(least)),),
    )


def remove_old(parent: Path) -> list[Path]:
    """Remove what demos that are dead left there; what was removed."""
    removed = []
    for folder in sorted(parent.glob(_PREFIX + "*")):
        with contextlib.suppress(OSError):
            stats = folder.lstat()
            if stats.st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink() and _dead(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def remove_all_old(host: Host) -> None:
    """Wherever a demo may have been."""
    for parent in {*_parents(host), *_SHORT, Path("/dev/shm")}:
        remove_old(parent)


def room_at(folder: Path) -> int:
    """Bytes that may still be written there."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _parents(host: Host) -> Iterator[Path]:
    for candidate in store_candidates(host):
        if why_not(host, candidate) is None and os.path.isdir(candidate.path):
            yield Path(candidate.path)
    yield Path(tempfile.gettempdir())


def _short() -> Path | None:
    """A folder whose path leaves room for a socket's name."""
    longest = _LONGEST - len(_PREFIX) - 9
    for parent in (Path(tempfile.gettempdir()), *_SHORT):
        if len(os.fsencode(parent)) <= longest and os.access(parent, os.W_OK | os.X_OK):
            return parent
    return None


def _why_not(host: Host, parent: Path, least: int) -> str | None:
    if not os.access(parent, os.W_OK | os.X_OK):
        return say("not writable")
    free = room_at(parent)
    if free < least:
        return say("{free} free, {need} needed", free=format_size(free), need=format_size(least))
    return None


def _fresh(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def _lock(folder: Path) -> int:
    import fcntl

    number = os.open(folder / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(number, fcntl.LOCK_EX)
    return number


def _dead(folder: Path) -> bool:
    """Whether nobody holds its lock. One that is kept on purpose has none, and stays."""
    import fcntl

    try:
        number = os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _YOUNG and not any(folder.iterdir())
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(number)
    return True


def _import_path(environment: Mapping[str, str]) -> list[str]:
    """Children import this very legroom, wherever they are started."""
    source = str(Path(__file__).parents[2])
    old = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [source, *(entry for entry in old if entry != source)]
