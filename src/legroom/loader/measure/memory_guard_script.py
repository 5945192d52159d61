"""Runs a command, watches its RAM and /dev/shm, and stops it before memory runs out.

A script without imports of Legroom, run as ``python -S memory_guard_script.py PLAN``: beside a job that only just fits,
the memory of the guard itself matters. It reads every millisecond how much memory is used more than at the start: from
the cgroup's counters if the command is alone in its cgroup, else as the sum over its processes, because memory that
others free would hide what the command takes. The plan (start_memory_guard.py) has the files to read, the command to
run and the program to start afterwards.

While memory is scarce, the guard opens no file and allocates no kernel memory: where the cgroup is full, that would
let the OOM killer choose among the processes that have not been killed yet, and the guard may be the last of them.

Killed processes leave files of torch in /dev/shm, named after the process that made them. The guard removes those of
the processes that the command was seen to have. If the guard itself is killed, a fork of it does that, which waits for
its end from the start.
"""

from __future__ import annotations

import _signal as signals  # type: ignore[import-not-found]  # the signal module imports enum, which takes a megabyte
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
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the machine's own, fixed in the kernel
_DONE = b"done"
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
            if self.has_space():
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

    def has_space(self) -> bool:
        """Whether enough is free to open files."""
        return self._free() > SUM_SPACE

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
        waiting += _children(one)
    return anonymous + max(shared, mapped)


def _children(pid: str) -> list[str]:
    """The processes that a process has started; none if it has ended, or the kernel lacks the file."""
    found: list[str] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                found += file.read(1 << 16).decode("ascii").split()
    except OSError:
        pass
    return found


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


class Leftovers:
    """The files in /dev/shm that the command's processes leave if they are killed.

    A torch that cannot allocate the whole of a file keeps it, and one that is killed while it sends a batch too.
    """

    def __init__(self, shm: str, notebook: int | None = None) -> None:
        """``notebook``: a descriptor to which the processes are written as they are seen."""
        self._shm, self._notebook = shm, notebook
        self.earlier = _torch_files(shm)
        self.pids: set[str] = set()
        self._next = 0.0

    def add(self, pids: list[str]) -> None:
        """Add processes of the command."""
        new = set(pids) - self.pids
        self.pids |= new
        if new and self._notebook is not None:
            tell(self._notebook, b"".join(b"%d\n" % int(pid) for pid in new))

    def look(self, pid: int, *, may_open: bool, now: float) -> None:
        """Look for the workers, which the main thread starts, and, if that ``may_open`` files, for a fork server's."""
        path = f"/proc/{pid}/task/{pid}/children"
        if now < self._next or not (may_open or path in _opened):
            return
        self._next = now + STAT_S
        try:
            workers = _content(path, 1 << 16).decode("ascii").split()
        except OSError:  # it has ended, or the kernel lacks the file
            return
        self.add(workers)
        if may_open:
            self._next = now + TREE_S
            for worker in workers:
                self.add(_children(worker))

    def remove(self) -> None:
        """Remove them, after the processes have ended."""
        for name in _torch_files(self._shm) - self.earlier:
            maker = name.split("_")[1]
            if maker in self.pids and not _is_alive(maker) and _may_remove(f"{self._shm}/{name}"):
                try:
                    os.unlink(f"{self._shm}/{name}")
                except OSError:  # its manager was quicker
                    pass


def _may_remove(path: str) -> bool:
    """Whether a file that is named after a process of the command is certainly the command's.

    Containers may have the same /dev/shm, and their processes the same numbers. There it is only certain of a file
    that did not get all of its memory: nobody can use it.
    """
    try:
        found = os.lstat(path)
        unique = os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False
    return found.st_uid == os.geteuid() and (unique or found.st_blocks * 512 < found.st_size)


def _is_alive(pid: str) -> bool:
    """Whether a process runs; one that has ended may wait for a parent that never asks."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(1024).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def tell(notebook: int, text: bytes) -> None:
    """Write to the cleaner, which may have been killed."""
    try:
        os.write(notebook, text)
    except OSError:
        pass


def _start_cleaner(plan: dict[str, Any]) -> tuple[int, int] | None:
    """A fork that cleans up if this process is killed: its pid, and where to write the processes that it then ends."""
    try:
        reading, writing = os.pipe()
    except OSError:
        return None
    try:
        pid = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        return None
    if pid:
        os.close(reading)
        return pid, writing
    try:
        os.setsid()
        for number in (1, 2, 15):
            signals.signal(number, signals.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2, writing):  # who reads the output does not wait for this process
            os.dup2(nothing, target)
        _clean_up(reading, plan)
    finally:
        os._exit(0)


def _clean_up(reading: int, plan: dict[str, Any]) -> None:
    """In the cleaner: wait for the end of the guard; if it was killed, end the command and remove what is left."""
    leftovers, told = Leftovers(plan["where"]["shm"]), b""
    while text := os.read(reading, 1 << 16):
        told += text
    if told.endswith(_DONE):
        return
    pids = told.decode("ascii").split()
    leftovers.add(pids)
    if pids:
        end_group(int(pids[0]), reaped=True)
        leftovers.remove()
    remove_folder(plan["folder"])


def remove_folder(path: str) -> None:
    """Remove a folder with all that is in it."""
    for folder, below, files in os.walk(path, topdown=False):
        for remove, names in ((os.unlink, files), (os.rmdir, below)):
            for name in names:
                try:
                    remove(f"{folder}/{name}")
                except OSError:
                    pass
    try:
        os.rmdir(path)
    except OSError:
        pass


def _watch(
    pid: int, meter: MemoryMeter, output: _Output, leftovers: Leftovers, timeout: float
) -> tuple[int | None, str | None]:
    """The exit status, or why it was stopped."""
    parent, deadline = os.getppid(), time.monotonic() + timeout
    while True:
        leftovers.look(pid, may_open=meter.has_space(), now=time.monotonic())
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


def run_watched(
    plan: dict[str, Any], start: Any, beside: int | None = None, notebook: int | None = None
) -> dict[str, Any]:
    """Call ``start``, watch the command to its end and return its peak memory; ``notebook``: of the cleaner."""
    meter = MemoryMeter(plan["where"], beside)
    output = _Output(plan["output"], plan["marks"])
    shm = plan["where"]["shm"]
    leftovers = Leftovers(shm, notebook)
    try:
        pid = meter.pid = start(plan)
    except OSError as problem:  # too little memory for a fork, or too many processes
        close_files()
        return not_started(problem, plan["output"])
    leftovers.add([str(pid)])
    status = stopped = None
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    _set_nice(_FIRST)  # after the start: the command keeps the nice value that it has in training
    try:
        status, stopped = _watch(pid, meter, output, leftovers, plan["timeout"])
    finally:
        reaped = status is not None  # then the number may belong to another process soon
        kill_without_memory(pid, reaped=reaped)  # the OOM killer may have taken the command alone: its workers go on
        meter.wait_released()
        end_group(pid, reaped=reaped)
        leftovers.remove()
        _set_nice(nice)
    meter.finish()
    _wait_unlinked(shm, leftovers.earlier)
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
    parent, cleaner = os.getppid(), _start_cleaner(plan)
    try:
        for number in (1, 15):
            if signals.getsignal(number) == signals.SIG_DFL:
                signals.signal(number, _stop)
        found = run_watched(plan, _start, notebook=cleaner and cleaner[1])
    except (KeyboardInterrupt, _Stopped) as stop:
        remove_folder(plan["folder"])
        if isinstance(stop, _Stopped):
            signals.signal(stop.args[0], signals.SIG_DFL)
            os.kill(os.getpid(), stop.args[0])
        sys.exit(130)
    finally:
        if cleaner is not None:
            tell(cleaner[1], _DONE)
            os.close(cleaner[1])
            os.waitpid(cleaner[0], 0)
    with open(plan["result"] + ".part", "wb") as file:
        marshal.dump(found, file)
    os.replace(plan["result"] + ".part", plan["result"])
    if plan["then"]:
        os.execve(plan["then"][0], plan["then"], plan["then_environment"])
    if os.getppid() != parent:  # nobody reads the result
        remove_folder(plan["folder"])


class _Stopped(Exception):
    """A signal that ends this process."""


def _stop(number: int, _: object) -> None:
    raise _Stopped(number)


if __name__ == "__main__":
    main(sys.argv[1])
