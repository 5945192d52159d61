"""A child process that may take more than there is, run below a guard (meter.py) and told of afterwards.

Covers: where the guard reads this machine's figures, running it beside this process, in this process's place where
the program has nothing else to do, or with this process as the guard of its own fork. Does not cover: what runs in
the child (child.py, trial.py).
"""

from __future__ import annotations

import contextlib
import marshal
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legroom.loader.measure import meter
from legroom.probe.host import Host
from legroom.probe.memory import memory

RESERVE = 4 << 20  # bytes that must stay free: less, and the child is stopped
_WITH_GROUP = 64 << 20  # where an OOM kill takes every process of the container
_SHM_RESERVE = 64 << 10
# What torch prints in a worker that cannot hand over a batch.
_MARKS = (
    ("shm", b"unable to allocate shared memory"),
    ("shm", b"unable to write to file </torch_"),
    ("shm", b"unable to mmap"),
    ("shm", b"bus error encountered in worker"),
    ("shm", b"[Errno 28] No space left on device"),
    ("fds", b"[Errno 24] Too many open files"),
    ("fds", b"received 0 items of ancdata"),
    ("fds", b"Too many open files. Communication"),
)
_FOLDER = "LEGROOM_CHECK_FOLDER"  # in the environment of a program that the guard turned into again


@dataclass(frozen=True, slots=True)
class Watched:
    """How a child ended and what it took at its peak."""

    status: int | None  # None: it was stopped
    stopped: str | None  # for "ram", "shm" or "time"
    ram: int
    shm: int
    history: tuple[tuple[float, int], ...]  # peaks of RAM, by the monotonic clock
    killed: bool  # the kernel killed for memory meanwhile
    reported: str | None = None  # the pool that its output reports to have run out

    def peak_at(self, moment: float) -> int:
        """The peak of RAM until then."""
        return max((peak for at, peak in self.history if at <= moment), default=0)


def guarded(command: Sequence[str], folder: Path, timeout: float) -> Watched:
    """Run the command, its output in ``folder``; it and all it started are gone when this returns."""
    plan = _plan(command, folder, timeout)
    try:
        subprocess.run([*_GUARD, str(plan)], check=False, stdin=subprocess.DEVNULL)
    finally:
        plan.unlink(missing_ok=True)
    return finished(folder)


def forked(work: Callable[[], None], folder: Path, timeout: float) -> Watched:
    """Run the function in a fork of this process, its output in ``folder``; this process is the guard meanwhile.

    What this process holds is in neither figure, and the fork ends with it.
    """
    plan = _content(("",), folder, timeout)
    before, parent = memory(Host()).events.oom_kills, os.getpid()

    def start(_: object) -> int:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
                stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forking with threads: torch's loader does no less
            pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            _output_to(folder / "output")
            if torch := sys.modules.get(
                "torch"
            ):  # its other threads are not in a fork, and it would wait for them
                torch.set_num_threads(1)
            if os.getppid() == parent:
                work()
        finally:
            os._exit(0)

    return _watched(meter.watched(plan, start, beside=parent), before)


def _output_to(path: Path) -> None:
    """Everything that this process writes goes there."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    sink = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target, source in ((0, nothing), (1, sink), (2, sink)):
        os.dup2(source, target)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def become_guard(command: Sequence[str], folder: Path, timeout: float, again: Sequence[str]) -> None:
    """Turn this process into the guard, and the guard into ``again``: until then it holds next to nothing."""
    plan = _plan(command, folder, timeout, again)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(_GUARD[0], [*_GUARD, str(plan)])


def earlier_folder() -> Path | None:
    """The folder of the trial run that this program did before it became itself again."""
    name = os.environ.pop(_FOLDER, None)
    return Path(name) if name else None


def finished(folder: Path) -> Watched:
    """What the guard wrote down."""
    with (folder / "kills").open("rb") as file:
        before = marshal.load(file)
    try:
        with (folder / "result").open("rb") as file:
            found: dict[str, Any] = marshal.load(file)
    except (OSError, ValueError, EOFError):  # the guard itself was killed
        found = {"status": None, "stopped": "time", "ram": 0, "shm": 0, "history": []}
    return _watched(found, before)


def _watched(found: dict[str, Any], kills_before: int | None) -> Watched:
    now = memory(Host()).events.oom_kills
    killed = kills_before is not None and now is not None and now > kills_before
    return Watched(**{**found, "history": tuple(found["history"])}, killed=killed)


_GUARD = (sys.executable, "-S", "-E", "-B", str(Path(meter.__file__).resolve()))


def _plan(command: Sequence[str], folder: Path, timeout: float, again: Sequence[str] = ()) -> Path:
    with (folder / "kills").open("wb") as file:
        marshal.dump(memory(Host()).events.oom_kills, file)
    path = folder / "plan"
    with path.open("wb") as file:
        marshal.dump(_content(command, folder, timeout, again), file)
    return path


def _content(
    command: Sequence[str], folder: Path, timeout: float, again: Sequence[str] = ()
) -> dict[str, Any]:
    return {
        "where": _where(Host()),
        "command": [*command],
        "environment": environment(),
        "output": str(folder / "output"),
        "result": str(folder / "result"),
        "timeout": timeout,
        "marks": [*_MARKS],
        "then": [*again],
        "then_environment": {**os.environ, _FOLDER: str(folder)},
    }


def _where(host: Host) -> dict[str, Any]:
    """The files that tell what is used and what is left here."""
    now = memory(host)
    old = now.cgroup == "v1"
    usage, peak = (
        ("memory.usage_in_bytes", "memory.max_usage_in_bytes") if old else ("memory.current", "memory.peak")
    )
    levels = [
        {"usage": f"{path}/{usage}", "stat": f"{path}/memory.stat", "limit": level.limit, "path": path}
        for level in now.levels
        if level.usage is not None
        for path in (level.path.removesuffix("/.."),)
    ]
    together = any((host.text(f"{level['path']}/memory.oom.group") or "").strip() == "1" for level in levels)
    names = (
        ("total_inactive_file", "total_active_file")
        if old
        else ("inactive_file", "active_file", "slab_reclaimable")
    )
    return {
        "own": levels[0] if levels else None,
        "limited": [level for level in levels if level["limit"] is not None],
        "peak": f"{levels[0]['path']}/{peak}" if levels else None,
        "reclaimable": [*names],
        "reserve": _WITH_GROUP if together else RESERVE,
        "shm": "/dev/shm",
        "shm_reserve": _SHM_RESERVE,
    }


def environment() -> dict[str, str]:
    """Ours, with this very Legroom importable whatever the child's own search path."""
    home = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{home}" if path else home}
