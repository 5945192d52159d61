"""Runs a command, watches its RAM and /dev/shm, and stops it before memory runs out.

A script without imports of Legroom, run as ``python -S memory_guard_script.py PLAN``: beside a job that only just fits,
the memory of the guard itself matters. It reads every millisecond how much memory is used more than at the start: from
the cgroup's counters if the command is alone in its cgroup, else as the sum over its processes, because memory that
others free would hide what the command takes. The plan (start_memory_guard.py) has the files to read, the command to
run and the program to start afterwards.

While memory is scarce, the guard opens no file and allocates no kernel memory: where the cgroup is full, that would
let the OOM killer choose among the processes that have not been killed yet, and the guard may be the last of them.
"""

from __future__ import annotations

import marshal
import os
import sys
import time
from errno import ENOMEM

TYPE_CHECKING = False  # the typing module takes a megabyte
if TYPE_CHECKING:
    from typing import Any

# The command is stopped if fewer bytes are free. That avoids most OOM kills, but not all: workers on several cores can
# allocate it within a millisecond. The OOM killer also takes the command, and the answer is the same.
RESERVE = 2 << 20
GROUP_RESERVE, GROUP_SHARE = 64 << 20, 16  # where an OOM kill ends every process of the container
SHM_RESERVE = 64 << 10
TICK_S, STAT_S, OUTPUT_S = 0.001, 0.02, 0.25
TREE_S, UNSEEN = 0.05, 8  # between two sums over processes, and the share that may come and go between them
SUM_SPACE = 16 << 20  # free bytes below which no sum is made: it opens files
TRACKER_S = 2.0  # for the resource tracker of a killed command
REAP_S = 5.0  # for a killed command to end: one that waits for a dead network file system cannot
GRACE_S = 1.5  # for a command that has reported its failure
RELEASE_S = 2.0  # for the memory of a killed command to become free
UNLINK_S = 10.0  # for torch_shm_manager, which unlinks the files of ended processes after 2 seconds
_FIRST = -20  # nice value of the guard
_STEP = 256 << 10  # a rise that is recorded
_BLOCKED = 1 << 1 | 1 << 14  # SIGINT and SIGTERM
_opened: dict[str, int] = {}  # descriptors of the counters that are read again and again


def bytes_kept_free(group_limits: list[int]) -> int:
    """Below how many free bytes the command is stopped.

    ``group_limits``: of the cgroups in which an OOM kill ends every process (memory.oom.group), 0 for none.
    """
    return max(GROUP_RESERVE, max(group_limits) // GROUP_SHARE) if group_limits else RESERVE


class MemoryMeter:
    """Use of RAM and /dev/shm, more than at the start."""

    def __init__(self, where: dict[str, Any], beside: int | None = None) -> None:
        """``beside``: the process of which the command is a fork; pages that they share are not counted."""
        self._where, self._beside = where, beside
        # The cgroup's own counter is the command's use only if no other process allocates or frees memory in it.
        self._own = None if where["shared"] else where["own"]
        self._caches: dict[str, int] = {}
        self._most_cache = 0
        self._available: int | None = None
        self._shm_free: int | None = None
        self.pid: int | None = None
        self.ram = self.shm = 0
        self._tree = self._sum()
        self._read_caches()
        self._stat_at = time.monotonic()
        self._kernel_peak = None if self._own is None else _count(where["peak"])
        self._kills = self._oom_kills()
        self._base_shm = self._shm_used()
        self._base = self._used()
        self.history: list[tuple[float, int]] = []

    def read(self) -> str | None:
        """Read the use; returns the memory pool that is almost full."""
        now = time.monotonic()
        if now > self._stat_at + (TREE_S if self._own is None else STAT_S):
            self._read_caches()
            if self._free() > SUM_SPACE:
                self._tree = self._sum()
            self._record_kernel_peak(now)
            self._stat_at = time.monotonic()
            if self._oom_kills() > self._kills:
                return "ram"
        if self._used() - self._base > self.ram + _STEP:  # a new peak, or page cache that was not read yet
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
        # If other processes use /dev/shm, which may grow, it is not filled up.
        if self._base_shm and self._shm_free is not None and self._shm_free < self._where["shm_reserve"]:
            return "shm" if self.shm else None
        return None

    def finish(self) -> None:
        """Use the kernel's own peak if it has risen: it is exact. Otherwise add a margin for what was not seen."""
        if self._own is None:
            self.ram += self.ram // UNSEEN
            self.history = [(at, peak + peak // UNSEEN) for at, peak in self.history]
        self._record_kernel_peak(time.monotonic())

    def wait_released(self) -> None:
        """Wait until a killed command has returned memory: the next open file may not be the one too many."""
        deadline = time.monotonic() + RELEASE_S
        while self._free() < 2 * self._where["reserve"] and time.monotonic() < deadline:
            time.sleep(TICK_S)
            self._read_caches()

    def _record_kernel_peak(self, now: float) -> None:
        after = _count(self._where["peak"])
        if self._kernel_peak is None or after is None or after <= self._kernel_peak:
            return
        grown = after - self._most_cache - self._base
        if grown > self.ram:
            self.ram = grown
            self.history.append((now, grown))

    def _oom_kills(self) -> int:
        return _fields(self._where["kills"], ["oom_kill"], 0) if self._where["kills"] else 0

    def _sum(self) -> int:
        """Memory of the processes, where no cgroup counts it for them alone."""
        if self._own is not None:
            return 0
        beside = 0 if self._beside is None else _anonymous(str(self._beside))
        return beside + (0 if self.pid is None else _held(self.pid, self.shm))

    def _used(self) -> int:
        if self._own is None:
            return self._tree
        return (_count(self._own["usage"]) or 0) - self._caches.get(self._own["stat"], 0)

    def _free(self) -> int:
        rooms = [
            level["limit"] - (_count(level["usage"]) or 0) + self._caches.get(level["stat"], 0)
            for level in self._where["limited"]
        ]
        if self._available is not None:
            rooms.append(self._available)
        return min(rooms, default=1 << 62)

    def _read_caches(self) -> None:
        """Reclaimable page cache, and the free memory of the machine: slower to read than a counter."""
        self._available = _fields("/proc/meminfo", {"MemAvailable:"}, (self._available or 0) // 1024) * 1024 or None
        own = self._own
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
    """Memory of a process and its descendants; what they share is counted once."""
    anonymous, shared, waiting = 0, shm, [str(pid)]
    mapped = 0
    while waiting:
        one = waiting.pop()
        anonymous += _anonymous(one)
        mapped += _fields(f"/proc/{one}/smaps_rollup", ["Pss_Shmem:"], 0, again=False) * 1024
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{task}/children", "rb", buffering=0) as file:
                    waiting += file.read(1 << 16).decode("ascii").split()
        except OSError:  # it has ended, or the kernel lacks the file
            continue
    return anonymous + max(shared, mapped)


def _anonymous(pid: str) -> int:
    """Anonymous memory of a process, with its share of shared pages."""
    return _fields(f"/proc/{pid}/smaps_rollup", ["Pss_Anon:"], 0, again=False) * 1024


def _content(path: str, size: int) -> bytes:
    """The start of a counter's file, which stays open: opening it takes kernel memory that the cgroup counts."""
    if path not in _opened:
        _opened[path] = os.open(path, os.O_RDONLY)
    return os.pread(_opened[path], size, 0)


def close_files() -> None:
    """Close the counters' files; a fork that is not the guard calls this too."""
    while _opened:
        os.close(_opened.popitem()[1])


def _count(path: str | None) -> int | None:
    if path is None:
        return None
    try:
        return int(_content(path, 64))
    except (OSError, ValueError):
        return None


def _fields(path: str, names: set[str] | list[str], otherwise: int | None, *, again: bool = True) -> int:
    """The sum of these lines of a table; ``again``: it is read all the time."""
    try:
        if again:
            text = _content(path, 1 << 14)
        else:
            with open(path, "rb", buffering=0) as file:
                text = file.read(1 << 14)
    except OSError:
        return otherwise or 0
    lines = text.decode("ascii", "replace").splitlines()
    total = 0
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] in names:
            total += int(words[1])
    return total


def _start(plan: dict[str, Any]) -> int:
    """Start the command in its own session, its output in a file; the OOM killer takes it before any other process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        try:
            with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
                file.write(b"1000")
        except OSError:
            pass
        redirect(plan["output"])
        os.execve(plan["command"][0], plan["command"], plan["environment"])
    finally:
        os._exit(127)


def redirect(output: str) -> None:
    """Let this process read nothing, and write its output to a file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target, source in ((0, nothing), (1, sink), (2, sink)):
        os.dup2(source, target)


class _Output:
    """The command's output, read for errors after which it would wait forever.

    torch loses a batch for which a worker could not allocate memory: a thread of the worker prints an error and
    continues, and the loop waits for that batch.
    """

    def __init__(self, path: str, marks: list[tuple[str, bytes]]) -> None:
        self._path, self._marks = path, marks
        self._size, self._next = 0, 0.0
        self._pool: str | None = None
        self._since = 0.0

    def check(self, now: float) -> str | None:
        """The memory pool that ran out, once the command has had time to end by itself."""
        if self._pool is not None:
            return self._pool if now > self._since + GRACE_S else None
        if now < self._next:
            return None
        self._next = now + OUTPUT_S
        self._read(now)
        return None

    def reported(self) -> str | None:
        """The memory pool that ran out, according to the whole output of a command that has ended."""
        while self._pool is None and self._read(time.monotonic()):
            pass
        return self._pool

    def _read(self, now: float) -> bool:
        """Read what was added; whether there was anything."""
        before = self._size
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(max(0, before - 256))  # an error may extend across two reads
                text = file.read(1 << 20)
                self._size = file.tell()
        except OSError:
            return False
        for pool, mark in self._marks:
            if mark in text and (pool != "shm" or _is_of_shm(text, mark)):
                self._pool, self._since = pool, now
        return self._size > before


def _is_of_shm(text: bytes, mark: bytes) -> bool:
    """Whether an error names no file, or one in /dev/shm, such as '/dev/shm/x' or '/psm_x': other disks fill up too."""
    for rest in text.split(mark)[1:]:
        name = rest[3:].partition(b"'")[0] if rest.startswith(b": '") else b"/"
        if name.startswith(b"/dev/shm/") or (name.startswith(b"/") and name.count(b"/") == 1):
            return True
    return False


def _watch(pid: int, meter: MemoryMeter, output: _Output, timeout: float) -> tuple[int | None, str | None]:
    """The exit status, or why it was stopped."""
    parent, deadline = os.getppid(), time.monotonic() + timeout
    while True:
        try:
            gone, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # a handler of SIGCHLD took the status; its answer shows how it ended
            return 0, None
        if gone:
            return os.waitstatus_to_exitcode(status), None
        if pool := meter.read() or output.check(time.monotonic()):
            return None, pool
        if time.monotonic() > deadline or os.getppid() != parent:
            return None, "time"
        time.sleep(TICK_S)


def kill_without_memory(pid: int, *, reaped: bool = False) -> None:
    """End a child that leads a process group, and the group, without reading /proc; ``reaped``: the child has ended.

    The OOM killer frees no shared memory: that stays until the last process that has it open is gone. SIGTERM ends
    workers, and multiprocessing's resource tracker ignores it.
    """
    if not reaped:
        _signal(os.kill, pid)
    _signal(os.killpg, pid, 15)


def end_group(pid: int, *, reaped: bool = False) -> None:
    """End a child that leads a process group, and every process of the group.

    multiprocessing's resource tracker ends last and by itself: it unlinks the semaphores of the killed processes, which
    would stay in /dev/shm.
    """
    if not reaped:
        _signal(os.kill, pid)
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
    if reaped and not others and os.path.isdir("/proc"):  # nothing holds the number any more
        return
    if not reaped:
        _signal(os.kill, pid)  # it may not be the leader of its group yet
    _signal(os.killpg, pid)
    deadline = time.monotonic() + REAP_S
    try:
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(0.01)
    except ChildProcessError:
        pass


def _torch_files(shm: str) -> set[str]:
    """The names of torch's files in /dev/shm."""
    try:
        return {name for name in os.listdir(shm) if name.startswith("torch_")}
    except OSError:
        return set()


def _wait_unlinked(shm: str, earlier: set[str]) -> None:
    """Wait until files of ended processes are gone: a training run that starts now needs the space.

    With the sharing strategy file_system a daemon of torch, in a session of its own, unlinks what its clients left.
    """
    deadline = time.monotonic() + UNLINK_S
    while time.monotonic() < deadline:
        new = _torch_files(shm) - earlier
        if all(os.path.exists(f"/proc/{name.split('_')[1]}") for name in new):
            return
        time.sleep(0.01)


def _set_nice(value: int) -> None:
    """If allowed: on a busy machine the guard gets a core before the processes that it watches."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, value)
    except OSError:
        pass


def _signal(send: Any, pid: int, number: int = 9) -> None:
    try:
        send(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _in_group(leader: int) -> dict[int, bool]:
    """The running processes of a group; True for a resource tracker."""
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
                found[int(name)] = b"resource_tracker" in file.read(4096) or _is_starting(name)
        except (OSError, ValueError):
            continue  # it has ended
    return found


def _is_starting(name: str) -> bool:
    """Whether a process is a resource tracker to be: multiprocessing forks it with SIGINT and SIGTERM blocked."""
    with open(f"/proc/{name}/status", "rb", buffering=0) as file:
        for line in file.read(8192).splitlines():
            if line.startswith(b"SigBlk:"):
                return int(line.split()[1], 16) & _BLOCKED == _BLOCKED
    return False


def run_watched(plan: dict[str, Any], start: Any, beside: int | None = None) -> dict[str, Any]:
    """Call ``start``, watch the command to its end and return its peak memory."""
    meter = MemoryMeter(plan["where"], beside)
    output = _Output(plan["output"], plan["marks"])
    shm = plan["where"]["shm"]
    earlier = _torch_files(shm)
    try:
        pid = meter.pid = start(plan)
    except OSError as problem:  # too little memory for a fork, or too many processes
        close_files()
        return not_started(problem, plan["output"])
    status = stopped = None
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    _set_nice(_FIRST)  # after the start: the command keeps the nice value that it has in training
    try:
        status, stopped = _watch(pid, meter, output, plan["timeout"])
    finally:
        reaped = status is not None  # then the number may belong to another process soon
        kill_without_memory(pid, reaped=reaped)  # the OOM killer may have taken the command alone: its workers go on
        meter.wait_released()
        end_group(pid, reaped=reaped)
        _set_nice(nice)
    meter.finish()
    _wait_unlinked(shm, earlier)
    close_files()
    return {
        "status": status,
        "stopped": stopped,
        "ram": meter.ram,
        "shm": meter.shm,
        "history": meter.history,
        "reported": output.reported(),
    }


def not_started(problem: OSError, output: str) -> dict[str, Any]:
    """The result where no process could be started: out of memory, or the error's words as the command's output."""
    with open(output, "wb") as file:
        file.write(f"{problem}\n".encode())
    short = problem.errno == ENOMEM
    return {
        "status": None if short else 1, "stopped": "ram" if short else None, "ram": 0, "shm": 0, "history": [],
        "reported": None,
    }  # fmt: skip


def main(path: str) -> None:
    """Execute the plan."""
    with open(path, "rb") as file:
        plan = marshal.load(file)
    try:
        found = run_watched(plan, _start)
    except KeyboardInterrupt:
        sys.exit(130)
    with open(plan["result"] + ".part", "wb") as file:
        marshal.dump(found, file)
    os.replace(plan["result"] + ".part", plan["result"])
    if plan["then"]:
        os.execve(plan["then"][0], plan["then"], plan["then_environment"])


if __name__ == "__main__":
    main(sys.argv[1])
