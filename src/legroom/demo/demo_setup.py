"""What a demo sets up: how much data fits, the file, a directory, the children's environment and a small /dev/shm.

The memory of a process is only estimated here, on the safe side. The figures that the demo shows are measured.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from legroom.demo.demo_scripts import CLASSES, IMAGE, PARENT, ROW_BYTES
from legroom.errors import NoRoom
from legroom.messages import VARIABLE, language, say
from legroom.probe.filesystems_and_cgroups import disks
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.shm_segments import SHM
from legroom.records.machine import Disk
from legroom.units import format_size, size_or_unknown

RUNS = 4
_MB = 1 << 20
_FEWEST = 2  # a single run shares with no other
_LARGEST, _LARGEST_QUICK, _SMALLEST = 512 * _MB, 96 * _MB, 8 * _MB
_SHARE = 0.8  # of the free memory
_OWN = 90 * _MB  # the demo itself, with its chart
_RUN = {"torch": 180 * _MB, "numpy": 36 * _MB}  # with its supervisor, without data
_LOADERS = 700 * _MB  # torch, its workers, and batches in flight
_DISK_COPIES = 3  # the file, the shared copy, and some to spare
_QUEUED = 5  # batches that torch's DataLoader with two workers keeps in /dev/shm, at least
_LARGEST_SHM = 256 * _MB  # a larger /dev/shm is not filled for a demo

_IN_NAMESPACE = "LEGROOM_DEMO_SHM"  # variable: /dev/shm is the demo's own
_MOUNT = f'mount -t tmpfs -o size=64m,mode=1777,nosuid,nodev tmpfs {SHM} && exec "$@"'
_PREFIX = "legroom-demo-"
_YOUNG = 60.0  # seconds after which an empty directory counts as left over


@dataclass(frozen=True, slots=True)
class DemoSize:
    """What the demo will do, and in ``notes`` what is smaller than elsewhere."""

    engine: str  # torch or numpy
    rows: int
    runs: int
    quick: bool
    no_loaders: str | None = None  # why DataLoaders are not tried
    notes: tuple[str, ...] = ()


def demo_size(ram: int | None, disk: int, *, no_torch: str | None, quick: bool, in_memory: bool = False) -> DemoSize:
    """What fits into that many free bytes; ``in_memory``: the disk is memory too, ``no_torch``: why not with torch."""
    notes: list[str] = []
    if ram is None:
        notes.append(say("free memory is unknown: the demo stays small"))
        ram = 4 * _LARGEST_QUICK + _OWN
    free, engine, no_loaders = format_size(ram), "torch" if no_torch is None else "numpy", no_torch

    def most(runs: int) -> int:
        """The most data of which every run can hold a copy."""
        return int(((ram - _OWN) * _SHARE - runs * _RUN[engine]) / (runs + _DISK_COPIES * in_memory))

    if engine == "torch" and most(RUNS) < _SMALLEST:
        engine, no_loaders = "numpy", say("not enough memory for torch: {free} free", free=free)
        notes.append(say("{why}; the training runs use numpy", why=no_loaders))
    elif engine == "torch" and ram < _LOADERS:
        no_loaders = say("not enough memory for DataLoader workers: {free} free", free=free)
        notes.append(no_loaders)
    runs = next((count for count in range(RUNS, _FEWEST - 1, -1) if most(count) >= _SMALLEST), 0)
    if not runs:
        need = (_FEWEST * _RUN[engine] + (_FEWEST + _DISK_COPIES * in_memory) * _SMALLEST) / _SHARE + _OWN
        raise NoRoom(
            say("not enough memory for the demo: {free} free", free=free),
            why=say("two training runs on {data} need about {need}",
                    data=format_size(_SMALLEST), need=format_size(int(need))),
            fix=(say("free some memory; see what limits it:\nlegroom doctor"),),
        )  # fmt: skip
    if runs < RUNS:
        words = {"count": runs, "all": RUNS, "free": free}
        notes.append(say("{count} training runs instead of {all}: {free} of memory free", **words))
    largest = _LARGEST_QUICK if quick else _LARGEST
    data = min(largest, most(runs), disk // _DISK_COPIES)
    if data < largest:
        sizes = {"data": data, "largest": largest, "ram": ram, "disk": disk}
        notes.append(say("{data} of data instead of {largest}: {ram} of memory and {disk} of disk free",
                         **{name: format_size(size) for name, size in sizes.items()}))  # fmt: skip
    return DemoSize(engine, data // ROW_BYTES, runs, quick, no_loaders, tuple(notes))


def rows_that_overflow(shm_size: int | None) -> int | None:
    """Rows of float images in a batch, so that the batches of torch's DataLoader do not fit; None: not to be tried."""
    if shm_size is None or shm_size > _LARGEST_SHM:
        return None
    return max(1, int(shm_size * 1.5 / _QUEUED / (4 * ROW_BYTES)))


def make_dataset(path: Path, rows: int, between: Callable[[], object] = lambda: None) -> int:
    """Write noisy images whose bright stripe is the label, calling ``between`` now and then; the bytes written."""
    import h5py
    import numpy as np

    random, stripe = np.random.default_rng(rows), IMAGE[2] // CLASSES
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (rows, *IMAGE), dtype=np.uint8)
        labels = file.create_dataset("labels", (rows,), dtype=np.int64)
        for start in range(0, rows, 512):
            count = min(512, rows - start)
            chunk = random.integers(0, 200, (count, *IMAGE), dtype=np.uint8)
            labels[start : start + count] = where = random.integers(0, CLASSES, count)
            for image, label in zip(chunk, where, strict=True):
                image[:, :, label * stripe : (label + 1) * stripe] += 40
            images[start : start + count] = chunk
            between()
    return path.stat().st_size


def h5py_seconds(path: Path) -> float:
    """The time in which h5py reads all of the file into memory."""
    import h5py

    began = time.perf_counter()
    with h5py.File(path) as file:
        arrays = [file[name][:] for name in file]  # all held at once
        return time.perf_counter() - began if arrays else 0.0


def small_shm() -> str | None:
    """Restart this program with a /dev/shm of 64 MB that ends with it and its children; the reason if that fails."""
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


def environment(folder: Path) -> dict[str, str]:
    """Variables for children: one thread each, written files below the demo's directory, imports as in the demo.

    With a long path of TMPDIR, where workers of torch's DataLoader make sockets, batches are lost and the loader
    hangs. Every child works in the demo's directory, so this path is short whatever the directory is called.
    """
    for name in ("store", "state", "tmp"):
        (folder / name).mkdir(mode=0o700)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LEGROOM_")}
    return kept | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {
        "LEGROOM_DIR": str(folder / "store"), "LEGROOM_SHM": str(folder / "state"), "TMPDIR": "/proc/self/cwd/tmp",
        "XDG_STATE_HOME": str(folder / "state"), VARIABLE: language(), PARENT: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }  # fmt: skip


@dataclass
class WorkDirectory:
    """The only directory that a demo writes to. One that is not locked belongs to a demo that was killed."""

    path: Path
    disk: Disk
    _lock: int  # descriptor

    def remove(self, *, keep: bool) -> Path | None:
        """Remove everything; with ``keep`` the data, logs and checkpoints stay, in the directory it returns."""
        shutil.rmtree(self.path / "store" if keep else self.path, ignore_errors=True)
        # Under another name, so that no later demo removes it.
        kept = self.path.rename(self.path.with_name(f"kept-{self.path.name}")) if keep else None
        os.close(self._lock)
        return kept


def make_directory(host: Host) -> WorkDirectory:
    """A directory on the disk where a cache would be; those of dead demos are removed first."""
    disk, need = disks(host)[0], _DISK_COPIES * _SMALLEST
    if disk.free is None or disk.free < need:
        sizes = {"path": disk.path, "free": size_or_unknown(disk.free), "need": format_size(need)}
        why = disk.reason or "" if disk.free is None else say("{path}: {free} free, {need} needed", **sizes)
        fix = say("LEGROOM_DIR=/some/local/directory with {size} free", size=format_size(need))
        raise NoRoom(say("no directory for the demo"), why=why, fix=(fix,))
    os.makedirs(disk.path, exist_ok=True)
    remove_leftovers(Path(disk.path))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=disk.path))
    made = WorkDirectory(folder, disk, _lock(folder))
    (folder / ".locked").touch()  # an empty directory may be one that is not locked yet
    return made


def remove_leftovers(parent: Path) -> None:
    """Remove the directories of demos that were killed."""
    for folder in sorted(parent.glob(_PREFIX + "*")):
        with contextlib.suppress(OSError):
            stats = folder.lstat()
            young = time.time() - stats.st_mtime < _YOUNG and not any(folder.iterdir())
            if stats.st_uid == os.geteuid() and not young:
                os.close(_lock(folder))  # OSError where it is locked, or not a directory
                shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    """A descriptor that holds the lock on a directory; BlockingIOError where another process has it."""
    import fcntl

    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        raise
    return number
