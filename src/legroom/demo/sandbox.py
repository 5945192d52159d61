"""Where a demo runs: its directories, the environment that keeps children in them, and a small /dev/shm.

A demo locks its directories. One that is not locked belongs to a demo that was killed, and the next demo removes it.
The small /dev/shm is a mount that ends with the last process that sees it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from legroom.demo.demo_child import PARENT
from legroom.errors import NoRoom
from legroom.probe.filesystem import filesystem_of, store_candidates, why_not
from legroom.probe.host import Host
from legroom.probe.limits import TAIL, longest_socket
from legroom.units import format_size
from legroom.words import VARIABLE, joined, language, say

SHM = "/dev/shm"
_IN_NAMESPACE = "LEGROOM_DEMO_SHM"  # variable: /dev/shm is the demo's own
_MOUNT = f'mount -t tmpfs -o size=64m,mode=1777,nosuid,nodev tmpfs {SHM} && exec "$@"'
_PREFIX = "legroom-demo-"
# Workers of torch's DataLoader make sockets in TMPDIR. With a longer path batches are lost and the loader hangs.
_LONGEST = longest_socket(sys.platform) - TAIL - len(_PREFIX) - 9
_YOUNG = 60.0  # seconds after which an empty directory counts as left over


def small_shm() -> str | None:
    """Restart this program with a /dev/shm of 64 MB that no other process sees; the reason where that fails."""
    if os.environ.get(_IN_NAMESPACE):
        return None
    reason = ""
    for more in ([], ["--map-root-user"]):  # as root, or in a user namespace
        command = ["unshare", "--mount", *more, "sh", "-c", _MOUNT, "sh"]
        try:
            tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
        except OSError as problem:
            return f"unshare: {problem.strerror}"
        if tried.returncode == 0:
            sys.stdout.flush()
            os.environ[_IN_NAMESPACE] = "1"
            os.execvp(command[0], [*command, *sys.orig_argv])
        reason = tried.stderr.strip()
    return reason or say("unknown")


@dataclass
class Sandbox:
    """The directories of one demo."""

    folder: Path
    tmp: Path | None = None  # for sockets: a short path
    shm: Path | None = None  # in a /dev/shm that other processes use too
    in_memory: bool = False  # whether ``folder`` is on a tmpfs
    _locks: list[int] = field(default_factory=list)

    def add(self, parent: Path) -> Path:
        """A new directory there, locked while the demo runs."""
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._locks.append(_lock(folder))
        (folder / ".locked").touch()  # an empty directory may be one that is not locked yet
        return folder

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables for children: they write below these directories only, and import this Legroom."""
        for name in ("store", "state", "tmp"):
            (self.folder / name).mkdir(exist_ok=True, mode=0o700)
        source = str(Path(__file__).parents[2])
        path = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one not in ("", source)]
        kept = {name: value for name, value in environment.items() if not name.startswith("LEGROOM_")}
        return kept | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {
            "LEGROOM_DIR": str(self.folder / "store"), "XDG_STATE_HOME": str(self.folder / "state"),
            "TMPDIR": str(self.tmp or self.folder / "tmp"), VARIABLE: language(), PARENT: str(os.getpid()),
            "PYTHONPATH": os.pathsep.join([source, *path]),
        } | ({} if self.shm is None else {"LEGROOM_SHM": str(self.shm)})  # fmt: skip

    def remove(self, *, keep: bool = False) -> Path | None:
        """Remove everything; with ``keep`` the data, logs and checkpoints stay, in the directory it returns."""
        for folder in filter(None, (self.tmp, self.shm, self.folder / "store" if keep else self.folder)):
            shutil.rmtree(folder, ignore_errors=True)
        # Under another name, so that no later demo removes it.
        kept = self.folder.rename(self.folder.with_name(f"kept-{self.folder.name}")) if keep else None
        for number in self._locks:
            os.close(number)
        self._locks.clear()
        return kept


def make_sandbox(host: Host, least: int, shm: str | None) -> Sandbox:
    """Directories with at least so many bytes free, one of them in ``shm`` if given; those of dead demos go first."""
    remove_leftovers(host)
    refused = []
    for parent in _parents(host):
        free = free_bytes(parent)
        if not _writable(parent) or free < least:
            sizes = say("{free} free, {need} needed", free=format_size(free), need=format_size(least))
            refused.append(
                say("{path}: {why}", path=parent, why=sizes if _writable(parent) else say("not writable"))
            )
            continue
        mount = filesystem_of(host, str(parent))
        sandbox = Sandbox(parent, in_memory=mount is not None and mount.kind in ("tmpfs", "ramfs"))
        sandbox.folder = sandbox.add(parent)
        sandbox.tmp = next((sandbox.add(path) for path in _short_parents()), None)
        if shm is not None and _writable(Path(shm)):
            sandbox.shm = sandbox.add(Path(shm))
        return sandbox
    raise NoRoom(
        say("no directory for the demo"),
        why=joined(refused),
        fix=(say("LEGROOM_DIR=/some/local/directory with {size} free", size=format_size(least)),),
    )


def remove_leftovers(host: Host) -> list[Path]:
    """Remove the directories of demos that were killed; what was removed."""
    removed = []
    for parent in {*_parents(host), *_short_parents(), Path(SHM)}:
        for folder in sorted(parent.glob(_PREFIX + "*")):
            with contextlib.suppress(OSError):
                stats = folder.lstat()
                young = time.time() - stats.st_mtime < _YOUNG and not any(folder.iterdir())
                if stats.st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink() and not young:
                    os.close(_lock(folder, wait=False))
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder)
    return removed


def free_bytes(folder: Path) -> int:
    """The free space of the file system there."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _lock(folder: Path, *, wait: bool = True) -> int:
    """A descriptor that holds the lock on a directory; BlockingIOError where another process has it."""
    import fcntl

    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(number)
        raise
    return number


def _parents(host: Host) -> Iterator[Path]:
    for candidate in store_candidates(host):
        if why_not(host, candidate) is None and os.path.isdir(candidate.path):
            yield Path(candidate.path)
    yield Path(tempfile.gettempdir())


def _short_parents() -> list[Path]:
    paths = (Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"))
    return [path for path in paths if len(os.fsencode(path)) <= _LONGEST and _writable(path)]


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)
