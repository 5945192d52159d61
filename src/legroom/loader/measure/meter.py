"""Run a command, watch what it takes of RAM and /dev/shm, and stop it while some memory is left.

Run as a script of its own, ``python -S meter.py PLAN``, with nothing of Legroom imported: next to a job that may or may
not fit, the memory of whoever watches decides. Figures are taken every millisecond or so, above what they were at the
start: by the cgroup's own counters, which include every process in it, else by summing over the processes. Where to
read them, what to run and what to become afterwards stands in the plan (guarded.py).

Does not cover: what the figures mean.
"""

from __future__ import annotations

import marshal
import os
import sys
import time

TYPE_CHECKING = False  # the typing module takes a megabyte
if TYPE_CHECKING:
    from typing import Any

TICK_S, STAT_S, OUTPUT_S = 0.001, 0.02, 0.25
TREE_S, UNSEEN = 0.05, 8  # between two sums over processes, and the share that may come and go between them
TRACKER_S = 2.0  # for the resource tracker of a command that was killed
REAP_S = 5.0  # for a killed command to go: one that waits for a dead network file system cannot
GRACE_S = 1.5  # for a command that has said that it failed
_STEP = 256 << 10  # a rise worth remembering


class Meter:
    """RAM and /dev/shm, above what they were at the start."""

    def __init__(self, where: dict[str, Any], beside: int | None = None) -> None:
        """``beside``: the process that a command is a fork of; pages that they share are counted in neither."""
        self._where, self._beside = where, beside
        self._caches: dict[str, int] = {}
        self._most_cache = 0
        self._available: int | None = None
        self._shm_free: int | None = None
        self.pid: int | None = None
        self.ram = self.shm = 0
        self._tree = self._sum()  # what the processes hold by themselves, where no cgroup counts it
        self._read_caches()
        self._stat_at = time.monotonic()
        self._kernel_peak = _count(where["peak"])
        self._base_shm = self._shm_used()
        self._base = self._used()
        self.history: list[tuple[float, int]] = []

    def look(self) -> str | None:
        """Take the figures; the pool of which too little is left."""
        now = time.monotonic()
        if now > self._stat_at + (TREE_S if self._where["own"] is None else STAT_S):
            self._read_caches()
            self._tree = self._sum()
            self._stat_at = time.monotonic()
        if self._used() - self._base > self.ram + _STEP:  # a new peak, or page cache that is not known yet
            self._read_caches()
            grown = self._used() - self._base
            if grown > self.ram:
                self.ram = grown
                self.history.append((now, grown))
        self.shm = max(self.shm, self._shm_used() - self._base_shm)
        if self._free() < self._where["reserve"]:
            self._read_caches()
            if self._free() < self._where["reserve"]:
                return "ram"
        # Where others hold something in /dev/shm that may grow, they are not driven to the end of it.
        if self._base_shm and self._shm_free is not None and self._shm_free < self._where["shm_reserve"]:
            return "shm" if self.shm else None
        return None

    def finish(self) -> None:
        """Take in the kernel's own peak, where it has risen: exact to the page. Else allow for what was not seen."""
        if self._where["own"] is None:
            self.ram += self.ram // UNSEEN
        after = _count(self._where["peak"])
        if self._kernel_peak is not None and after is not None and after > self._kernel_peak:
            self.ram = max(self.ram, after - self._most_cache - self._base)

    def _sum(self) -> int:
        """What the processes hold, where no cgroup counts it."""
        if self._where["own"] is not None:
            return 0
        beside = 0 if self._beside is None else _anonymous(str(self._beside))
        return beside + (0 if self.pid is None else _held(self.pid, self.shm))

    def _used(self) -> int:
        own = self._where["own"]
        if own is None:
            return self._tree
        return (_count(own["usage"]) or 0) - self._caches.get(own["stat"], 0)

    def _free(self) -> int:
        rooms = [
            level["limit"] - (_count(level["usage"]) or 0) + self._caches.get(level["stat"], 0)
            for level in self._where["limited"]
        ]
        if self._available is not None:
            rooms.append(self._available)
        return min(rooms, default=1 << 62)

    def _read_caches(self) -> None:
        """What the kernel would give back, and what the machine has left: dearer to read than a counter."""
        self._available = _fields("/proc/meminfo", {"MemAvailable:"}, self._available) * 1024 or None
        own = self._where["own"]
        for level in (*self._where["limited"], *((own,) if own else ())):
            self._caches[level["stat"]] = _fields(level["stat"], self._where["reclaimable"], 0)
        if own:
            self._most_cache = max(self._most_cache, self._caches[own["stat"]])

    def _shm_used(self) -> int:
        try:
            room = os.statvfs(self._where["shm"])
        except OSError:
            return 0
        self._shm_free = room.f_bavail * room.f_frsize if room.f_blocks else None
        return (room.f_blocks - room.f_bfree) * room.f_frsize


def _held(pid: int, shm: int) -> int:
    """Memory of a process and all below it, what they share counted once."""
    anonymous, shared, waiting = 0, shm, [str(pid)]
    mapped = 0
    while waiting:
        one = waiting.pop()
        anonymous += _anonymous(one)
        mapped += _fields(f"/proc/{one}/smaps_rollup", ["Pss_Shmem:"], 0) * 1024
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{task}/children", "rb", buffering=0) as file:
                    waiting += file.read(1 << 16).decode("ascii").split()
        except OSError:  # gone, or a kernel without the file
            continue
    return anonymous + max(shared, mapped)


def _anonymous(pid: str) -> int:
    """Anonymous memory of a process, what it shares with others in proportion."""
    return _fields(f"/proc/{pid}/smaps_rollup", ["Pss_Anon:"], 0) * 1024


def _count(path: str | None) -> int | None:
    if path is None:
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            return int(file.read(64))
    except (OSError, ValueError):
        return None


def _fields(path: str, names: set[str] | list[str], otherwise: int | None) -> int:
    """The sum of those lines of a table."""
    try:
        with open(path, "rb", buffering=0) as file:
            lines = file.read(1 << 16).decode("ascii", "replace").splitlines()
    except OSError:
        return otherwise or 0
    total = 0
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] in names:
            total += int(words[1])
    return total


def _start(plan: dict[str, Any]) -> int:
    """The command in a session of its own, its output in a file."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(plan["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for target, source in ((0, nothing), (1, output), (2, output)):
            os.dup2(source, target)
        os.execve(plan["command"][0], plan["command"], plan["environment"])
    finally:
        os._exit(127)


class _Output:
    """The command's output, read for signs that it will wait for ever.

    torch loses a batch whose memory a worker's queue could not get: a thread there prints an error and goes on, and the
    loop waits for that batch.
    """

    def __init__(self, path: str, marks: list[tuple[str, bytes]]) -> None:
        self._path, self._marks = path, marks
        self._size, self._next = 0, 0.0
        self._pool: str | None = None
        self._since = 0.0

    def look(self, now: float) -> str | None:
        """The pool that ran out, once the command has had time to end by itself."""
        if self._pool is not None:
            return self._pool if now > self._since + GRACE_S else None
        if now < self._next:
            return None
        self._next = now + OUTPUT_S
        self._read(now)
        return None

    def reported(self) -> str | None:
        """The pool that the whole output of a command that has ended reports to have run out."""
        while self._pool is None and self._read(time.monotonic()):
            pass
        return self._pool

    def _read(self, now: float) -> bool:
        """Read on; whether there was more."""
        before = self._size
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(max(0, before - 256))  # a sign may lie across two reads
                text = file.read(1 << 20)
                self._size = file.tell()
        except OSError:
            return False
        for pool, mark in self._marks:
            if mark in text:
                self._pool, self._since = pool, now
        return self._size > before


def _watch(pid: int, meter: Meter, output: _Output, timeout: float) -> tuple[int | None, str | None]:
    """The exit status, or what it was stopped for."""
    parent, deadline = os.getppid(), time.monotonic() + timeout
    while True:
        try:
            gone, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # a handler of SIGCHLD took it; what it wrote down tells how it went
            return 0, None
        if gone:
            return os.waitstatus_to_exitcode(status), None
        if pool := meter.look() or output.look(time.monotonic()):
            return None, pool
        if time.monotonic() > deadline or os.getppid() != parent:
            return None, "time"
        time.sleep(TICK_S)


def end_group(pid: int) -> None:
    """End a child that leads a process group, and everything in the group.

    multiprocessing's resource tracker goes last and by itself: it unlinks the semaphores of those that were killed,
    which would stay in /dev/shm.
    """
    deadline = time.monotonic() + TRACKER_S
    while (others := _in_group(pid)) and time.monotonic() < deadline:
        for one, tracks in others.items():
            if not tracks:
                _signal(os.kill, one)
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
        time.sleep(0.01)
    _signal(os.kill, pid)  # it may not lead its group yet
    _signal(os.killpg, pid)
    deadline = time.monotonic() + REAP_S
    try:
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(0.01)
    except ChildProcessError:
        pass


def _signal(send: Any, pid: int) -> None:
    try:
        send(pid, 9)
    except (ProcessLookupError, PermissionError):
        pass


def _in_group(leader: int) -> dict[int, bool]:
    """The processes of a group that have not ended, each with whether it is a resource tracker."""
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                state, _, group = file.read(1024).rpartition(b")")[2].split()[:3]
            if int(group) != leader or state in (b"Z", b"X"):
                continue
            with open(f"/proc/{name}/cmdline", "rb", buffering=0) as file:
                found[int(name)] = b"resource_tracker" in file.read(4096)
        except (OSError, ValueError):
            continue  # it has ended meanwhile
    return found


def watched(plan: dict[str, Any], start: Any, beside: int | None = None) -> dict[str, Any]:
    """Start the command that ``start`` starts, watch it to its end and say what it took."""
    meter = Meter(plan["where"], beside)
    output = _Output(plan["output"], plan["marks"])
    pid = meter.pid = start(plan)
    status = stopped = None
    try:
        status, stopped = _watch(pid, meter, output, plan["timeout"])
    finally:
        end_group(pid)
    meter.finish()
    return {
        "status": status,
        "stopped": stopped,
        "ram": meter.ram,
        "shm": meter.shm,
        "history": meter.history,
        "reported": output.reported(),
    }


def main(path: str) -> None:
    """Do what the plan says."""
    with open(path, "rb") as file:
        plan = marshal.load(file)
    try:
        found = watched(plan, _start)
    except KeyboardInterrupt:
        sys.exit(130)
    with open(plan["result"] + ".part", "wb") as file:
        marshal.dump(found, file)
    os.replace(plan["result"] + ".part", plan["result"])
    if plan["then"]:
        os.execve(plan["then"][0], plan["then"], plan["then_environment"])


if __name__ == "__main__":
    main(sys.argv[1])
