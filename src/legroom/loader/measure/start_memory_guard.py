"""Runs a child process that may need more memory than is free, under a guard (memory_guard_script.py).

The guard runs beside this process, in its place if the program has nothing else to do, or is this process itself, for a
fork of it. measure_in_child.py and dataloader_trial.py run in the child.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legroom.loader.measure import memory_guard_script
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory

_TAIL_BYTES, _TAIL_LINES = 16384, 6
# What torch prints in a worker that cannot send a batch.
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
_FOLDER = "LEGROOM_CHECK_FOLDER"  # environment variable of the program that the guard starts again


@dataclass(frozen=True, slots=True)
class GuardedRun:
    """How a child ended, and its peak memory."""

    status: int | None  # None: the guard stopped it
    stopped: str | None  # why: "ram", "shm" or "time"
    ram: int
    shm: int
    history: tuple[tuple[float, int], ...]  # peaks of RAM, with the monotonic time
    killed: bool  # there was an OOM kill meanwhile
    reported: str | None = None  # the memory pool that ran out, according to its output

    def peak_at(self, moment: float) -> int:
        """The peak of RAM until then."""
        return max((peak for at, peak in self.history if at <= moment), default=0)


def module_command(name: str, folder: Path) -> list[str]:
    """The command line of a module of Legroom that reads a request and writes an answer."""
    return [sys.executable, "-m", name, str(folder / "request"), str(folder / "answer")]


def run_guarded(
    command: Sequence[str], folder: Path, timeout: float, environment: Mapping[str, str] | None = None
) -> GuardedRun:
    """Run the command, its output in ``folder``; it and all that it started have ended when this returns."""
    plan = _plan(command, folder, timeout, environment=environment)
    try:
        subprocess.run([*_GUARD, str(plan)], check=False, stdin=subprocess.DEVNULL)
    except OSError as problem:
        return _guarded_run(memory_guard_script.not_started(problem, str(folder / "output")), None)
    finally:
        plan.unlink(missing_ok=True)
    return read_result(folder)


def fork_guarded(work: Callable[[], None], folder: Path, timeout: float) -> GuardedRun:
    """Run the function in a fork of this process, its output in ``folder``; this process is the guard meanwhile.

    The memory of this process is not counted, and the fork ends with it.
    """
    plan = _content(("",), folder, timeout)
    before, parent = memory(Host()).events.oom_kills, os.getpid()

    def start(_: object) -> int:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # it is missing or closed
                stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forking with threads: torch's DataLoader does the same
            pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            memory_guard_script.close_files()
            _output_to(folder / "output")
            if torch := sys.modules.get("torch"):
                torch.set_num_threads(1)  # its other threads are not in a fork, and it would wait for them
            if os.getppid() == parent:
                work()
        finally:
            os._exit(0)

    return _guarded_run(memory_guard_script.run_watched(plan, start, beside=parent), before)


def _output_to(path: Path) -> None:
    """Redirect all output of this process."""
    memory_guard_script.redirect(str(path))
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def become_guard(command: Sequence[str], folder: Path, timeout: float, again: Sequence[str]) -> None:
    """Replace this process by the guard, and the guard by ``again``: until then it needs almost no memory."""
    plan = _plan(command, folder, timeout, again)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(_GUARD[0], [*_GUARD, str(plan)])


def folder_of_earlier_run() -> Path | None:
    """The folder of the trial run before which this program was replaced by the guard; None: there was none."""
    name = os.environ.pop(_FOLDER, None)
    return Path(name) if name else None


def read_result(folder: Path) -> GuardedRun:
    """What the guard wrote."""
    with (folder / "kills").open("rb") as file:
        before = marshal.load(file)
    try:
        with (folder / "result").open("rb") as file:
            found: dict[str, Any] = marshal.load(file)
    except (OSError, ValueError, EOFError):  # the guard itself was killed
        found = {"status": None, "stopped": "time", "ram": 0, "shm": 0, "history": []}
    return _guarded_run(found, before)


def _guarded_run(found: dict[str, Any], kills_before: int | None) -> GuardedRun:
    now = memory(Host()).events.oom_kills
    killed = kills_before is not None and now is not None and now > kills_before
    return GuardedRun(**{**found, "history": tuple(found["history"])}, killed=killed)


_GUARD = (sys.executable, "-S", "-E", "-B", str(Path(memory_guard_script.__file__).resolve()))


def _plan(
    command: Sequence[str],
    folder: Path,
    timeout: float,
    again: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Path:
    with (folder / "kills").open("wb") as file:
        marshal.dump(memory(Host()).events.oom_kills, file)
    path = folder / "plan"
    with path.open("wb") as file:
        content = _content(command, folder, timeout, again)
        marshal.dump({**content, "environment": {**content["environment"], **(environment or {})}}, file)
    return path


def _content(command: Sequence[str], folder: Path, timeout: float, again: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "where": _memory_files(Host()),
        "command": [*command],
        "environment": child_environment(),
        "folder": str(folder),
        "output": str(folder / "output"),
        "result": str(folder / "result"),
        "timeout": timeout,
        "marks": [*_MARKS],
        "then": [*again],
        "then_environment": {**os.environ, _FOLDER: str(folder)},
    }


def _memory_files(host: Host) -> dict[str, Any]:
    """The files with the used and the free memory of this machine."""
    now = memory(host)
    old = now.cgroup == "v1"
    usage, peak = ("memory.usage_in_bytes", "memory.max_usage_in_bytes") if old else ("memory.current", "memory.peak")
    levels = [
        {"usage": f"{path}/{usage}", "stat": f"{path}/memory.stat", "limit": level.limit, "path": path}
        for level in now.levels
        if level.usage is not None
        for path in (level.path.removesuffix("/.."),)
    ]
    together = [
        level.limit or 0
        for level in now.levels
        if (host.text(f"{level.path.removesuffix('/..')}/memory.oom.group") or "").strip() == "1"
    ]
    names = (
        ("total_inactive_file", "total_active_file") if old else ("inactive_file", "active_file", "slab_reclaimable")
    )
    return {
        "own": levels[0] if levels else None,
        "shared": bool(levels) and _others_in_cgroup(host, str(levels[0]["path"])),
        "limited": [level for level in levels if level["limit"] is not None],
        "peak": f"{levels[0]['path']}/{peak}" if levels else None,
        "kills": f"{levels[0]['path']}/{'memory.oom_control' if old else 'memory.events'}" if levels else None,
        "reclaimable": [*names],
        "reserve": memory_guard_script.bytes_kept_free(together),
        "shm": "/dev/shm",
        "shm_reserve": memory_guard_script.SHM_RESERVE,
    }


def _others_in_cgroup(host: Host, path: str) -> bool:
    """Whether a process that is not above this one runs in the cgroup or below it; True if that cannot be read."""
    above, pid = {0}, os.getpid()
    while pid not in above:
        above.add(pid)
        fields = (host.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
    for folder, _, _ in os.walk(path):
        inside = host.text(f"{folder}/cgroup.procs")
        if inside is None and folder != path:  # it was removed meanwhile
            continue
        if inside is None or any(int(one) not in above for one in inside.split()):
            return True
    return False


def child_environment() -> dict[str, str]:
    """The environment for a child that imports this installation of Legroom, with any search path."""
    source = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{source}" if path else source}


def last_lines(output: Path) -> list[str]:
    """The end of a child's output: where it crashed, or its last lines."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:  # it was ended before it opened the file
        return []
    lines = [line for line in text.splitlines() if line.strip()]
    # faulthandler prints the innermost call first, Python's traceback prints it last. Other threads may be printed
    # before the one that crashed.
    crash = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if crash is None:
        return lines[-_TAIL_LINES:]
    own = next((at for at, line in enumerate(lines) if at > crash and line.startswith("Current thread")), crash + 1)
    return [lines[crash], *lines[own : own + _TAIL_LINES - 1]]
