"""Processes of this machine: memory, command line, start time, descendants; limits: descriptors, CPUs, pinned memory.

Processes come and go while they are read. One that vanished is left out, and what may not be read is None. Kernel
threads and zombies are left out: neither holds memory.

Listing /proc is one call; reading two small files of every process takes the time. ProcessTable reads known processes
in turn: a command changes by exec, a parent when it dies, and a pid may be reused. New ones are read at every refresh,
because exec often follows fork.

Pinned memory is taken from RAM, and no counter shows what CUDA pinned. With RLIMIT_MEMLOCK at 64 kB and no capability,
1 GiB of cudaHostAlloc and 1 GiB of cudaHostRegister both succeeded, and VmLck and VmPin stayed 0. The first showed in
RssShmem, the second in RssAnon (Linux 6.18, driver 580; tests/gpu/test_gpu_probe.py repeats it).

CPU weights and shares are not read: they limit nothing on an idle machine.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from legroom.errors import NoSuchProcess, NothingMatches, UsageError
from legroom.messages import joined, say
from legroom.probe.filesystems_and_cgroups import Version, cgroup
from legroom.probe.host_files_and_syscalls import UNLIMITED, Host
from legroom.probe.shm_segments import Segments
from legroom.records.machine import Cpu, Limits, Pool, Process, Temporary
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.units import format_size

# Control characters of a terminal are replaced; line ends and tabs become spaces.
_MOST_HOLDERS = 16  # reading one takes under a millisecond
_BLANK = re.compile("[\t\n\v\f\r\x85\u2028\u2029]")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
# They ask a daemon or another machine to start processes: these are in other cgroups and may have another /dev/shm.
_CLIENTS = frozenset({
    "ssh", "rsh", "pdsh", "docker", "podman", "nerdctl", "ctr", "crictl", "kubectl", "oc", "srun", "qrsh", "blaunch",
    "systemd-run", "machinectl",
})  # fmt: skip
_BEFORE_A_COMMAND = frozenset({"sudo", "env", "nice", "ionice", "nohup", "time", "timeout", "stdbuf", "setsid"})
_KTHREADD = 2
_FLAGS, _PF_EXITING = 6, 0x4  # of a stat file, counted from the state
_DRIVER = "/dev/nvidia"
_SHARED_ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw.s .* /dev/zero \(deleted\)$", re.M)
_TICKS = 100  # ticks per second in /proc/<pid>/stat: the same on every Linux since 2.6


def processes(host: Host) -> list[Process]:
    """All processes, from two small files each, ordered by pid."""
    pids = sorted(int(name) for name in host.names("/proc") if name.isascii() and name.isdecimal())
    return [process for pid in pids if (process := process_at(host, pid)) is not None]


def process_at(host: Host, pid: int) -> Process | None:
    """One process by its status and command line; None if it does not exist."""
    found = parse_status(host.text(f"/proc/{pid}/status") or "", pid)
    if found is None:
        return None
    words = arguments(host, pid)
    return replace(found, command=command_text(words)) if words else found


def parse_status(text: str, pid: int) -> Process | None:
    """A process from the text of its status file; None for kernel threads, zombies and other text."""
    rows = dict(line.split(":", 1) for line in text.split("\n") if ":" in line)
    parent = _number(rows.get("PPid"))
    if parent is None or rows.get("State", "").strip()[:1] in ("Z", "X"):
        return None
    if rows.get("Kthread", "").strip() == "1" or (_KTHREADD in (pid, parent) and "VmRSS" not in rows):
        return None
    return Process(
        pid=pid,
        parent=parent,
        command=f"[{plain(rows.get('Name', '').strip())}]",  # as ps shows processes without a command line
        uid=_number(rows.get("Uid"), 1),  # the effective one
        rss=_size(rows.get("VmRSS")),
        rss_shmem=_size(rows.get("RssShmem")),
        rss_anon=_size(rows.get("RssAnon")),
        rss_file=_size(rows.get("RssFile")),
        swap=_size(rows.get("VmSwap")),
        locked=_size(rows.get("VmLck")),
        pinned=_size(rows.get("VmPin")),
    )


def arguments(host: Host, pid: int) -> list[str]:
    """The words of the command line; empty if it cannot be read."""
    text = (host.text(f"/proc/{pid}/cmdline") or "").rstrip("\0")
    return text.split("\0") if text else []


def client_name(words: Sequence[str]) -> str | None:
    """The program, if that command line starts processes elsewhere, possibly behind sudo or env."""
    for word in words:
        name = os.path.basename(word)
        if name in _CLIENTS:
            return name
        if name not in _BEFORE_A_COMMAND and not word.startswith("-") and "=" not in word and not word[:1].isdigit():
            return None
    return None


def is_ending(host: Host, pid: int) -> bool:
    """Whether it is exiting: in no cgroup any more, and not yet a zombie."""
    fields = stat_fields(host, pid)
    return len(fields) > _FLAGS and fields[_FLAGS].isdecimal() and bool(int(fields[_FLAGS]) & _PF_EXITING)


def stat_fields(host: Host, pid: int) -> list[str]:
    """The fields of its stat file from the state on."""
    # The name in brackets may contain spaces and brackets: count from the last bracket.
    return (host.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()


def started_at(host: Host, pid: int) -> float | None:
    """When that process started, as Unix time; None if it cannot be read."""
    fields = stat_fields(host, pid)
    booted = host.table("/proc/stat").get("btime")
    if len(fields) < 20 or not fields[19].isdecimal() or booted is None:
        return None
    return booted + int(fields[19]) / _TICKS


def command_text(words: Iterable[str]) -> str:
    """A command line as text without control characters."""
    return plain(" ".join(words)).strip()


def plain(text: str) -> str:
    """Text without control characters of a terminal."""
    return _CONTROL.sub("\ufffd", _BLANK.sub(" ", text))


def holdings(host: Host, process: Process, segments: Segments | None = None) -> Process:
    """The process with figures that take longer to read: /dev/shm, PSS and descriptors.

    ``segments`` remembers the sizes of segments between processes.
    """
    segments = segments or Segments.of(host)
    held = segments.of_process(process.pid)
    return replace(
        process,
        pss=pss_of(host, process.pid),
        shm=None if held is None else segments.total(held.inodes),
        shm_mapped=None if held is None else held.address_space,
        pinned=_pinned(process.pinned, host.text(f"/proc/{process.pid}/maps")),
        fds=open_files(host, process.pid),
        fd_limit=parse_limits(host.text(f"/proc/{process.pid}/limits") or "").get("Max open files"),
    )


def with_shm(host: Host, all_processes: Sequence[Process], *, most: int = _MOST_HOLDERS) -> list[Process]:
    """All processes; those likely to use /dev/shm with their use of it, the others with None.

    RssShmem also counts memory outside /dev/shm, so it shows which processes to read, not how much they use.
    """
    segments = Segments.of(host)
    likely = sorted((p for p in all_processes if p.rss_shmem), key=lambda p: -(p.rss_shmem or 0))[:most]
    seen = {process.pid: segments.of_process(process.pid) for process in likely}
    held = {pid: held for pid, held in seen.items() if held is not None}
    return [
        replace(p, shm=segments.total(held[p.pid].inodes), shm_mapped=held[p.pid].address_space) if p.pid in held else p
        for p in all_processes
    ]


def parse_limits(text: str) -> dict[str, int]:
    """The soft limits of a limits file that are numbers: ``unlimited`` is left out."""
    found = {}
    for line in text.split("\n"):
        match = re.fullmatch(r"(Max [a-z ]*[a-z]) +([0-9]+) +\S+(?: +\S+)? *", line)
        if match:
            found[match[1]] = int(match[2])
    return found


def tree(processes: Sequence[Process], pid: int) -> list[Process]:
    """That process and all its descendants, parents before children."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found = [process for process in processes if process.pid == pid]
    if not found:
        raise NoSuchProcess(
            say("there is no process {pid}", pid=pid),
            why=say("{count} processes are visible here, none with that pid", count=len(processes)),
            fix=(
                say("list the processes:\nps -e -o pid,args"),
                say("inside a container, use the container's own pids"),
            ),
        )
    seen = {pid}
    for process in found:  # grows during the loop
        for child in children.get(process.pid, ()):
            if child.pid not in seen:  # reused pids could form a cycle
                seen.add(child.pid)
                found.append(child)
    return found


def matching(processes: Sequence[Process], pattern: str, us: int | None = None) -> list[Process]:
    """The processes whose command line matches, without this process and its ancestors.

    ``us`` is this process's pid in that host's /proc, which may number processes differently.
    """
    try:
        expression = re.compile(pattern)
    except re.error as problem:
        raise UsageError(
            say("cannot read {pattern!r} as a regular expression", pattern=pattern),
            why=str(problem),
            fix=(say("escape . * + ? ( ) [ ] with a backslash to match them literally"),),
        ) from problem
    ours = _ancestry(processes, os.getpid() if us is None else us)
    found = [p for p in processes if p.pid not in ours and expression.search(p.command)]
    if not found:
        raise NothingMatches(
            say("no process's command line matches {pattern!r}", pattern=pattern),
            why=say(
                "{count} processes were checked; this one and its {above} ancestors are left out",
                count=len(processes),
                above=max(0, len(ours) - 1),
            ),
            fix=(say("list the command lines:\nps -e -o pid,args"), say("pass the pid instead")),
        )
    return found


def our_pid(host: Host) -> int | None:
    """This process's pid in that host's /proc; None if it is not in it (a recording)."""
    name = host.link("/proc/self") or ""
    return int(name) if name.isdecimal() else None


def _ancestry(processes: Sequence[Process], pid: int) -> set[int]:
    parents = {process.pid: process.parent for process in processes}
    found: set[int] = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


def _pinned(locked_in: int | None, maps: str | None) -> int | None:
    """VmPin, plus memory pinned by CUDA, which has no counter.

    cudaHostAlloc (torch's pin_memory) shows as shared memory without a file in a process that has the driver
    mapped: 300 MB were a mapping of 512, all of it resident. Without maps a GPU's user cannot be told, and VmPin
    of 0 says nothing.
    """
    if maps is None:
        return locked_in or None
    if _DRIVER not in maps:
        return locked_in
    areas = _SHARED_ANONYMOUS.findall(maps)
    return (locked_in or 0) + sum(int(end, 16) - int(start, 16) for start, end in areas)


def open_files(host: Host, pid: int) -> int | None:
    """Open descriptors of that process; None if they may not be read."""
    try:
        return len(os.listdir(host.path(f"/proc/{pid}/fd")))
    except OSError:
        return None


def _number(text: str | None, index: int = 0) -> int | None:
    words = (text or "").split()
    return int(words[index]) if len(words) > index and words[index].isdecimal() else None


def _size(text: str | None) -> int | None:
    count = _number(text)
    return None if count is None else count * 1024


_IN_TURN = 8  # known processes that each refresh reads again
_YOUNG = 3  # refreshes during which a new process is always read


@dataclass
class ProcessTable:
    """All processes of a host, as last read."""

    host: Host
    known: dict[int, Process | None] = field(default_factory=dict)  # None: a kernel thread or a zombie
    _ages: dict[int, int] = field(default_factory=dict)  # refreshes left, of new processes
    _turn: int = 0  # the pid after which the next refresh continues

    def refresh(self) -> Mapping[int, Process]:
        """All processes now, by pid."""
        there = {int(name) for name in self.host.names("/proc") if name.isascii() and name.isdecimal()}
        for pid in self.known.keys() - there:
            del self.known[pid]
            self._ages.pop(pid, None)
        for pid in there - self.known.keys():
            self._ages[pid] = 0
        for pid in [*self._ages, *self._next_in_turn()]:
            self.known[pid] = process_at(self.host, pid)
        self._ages = {pid: looks + 1 for pid, looks in self._ages.items() if looks < _YOUNG}
        return {pid: found for pid, found in sorted(self.known.items()) if found is not None}

    def is_running(self, pid: int) -> bool:
        """Whether that process still runs; an ended one is left out of the next refresh."""
        found = None if is_ending(self.host, pid) else process_at(self.host, pid)
        if pid in self.known:
            self.known[pid] = found
        return found is not None

    def _next_in_turn(self) -> list[int]:
        pids = sorted(self.known)
        start = bisect_right(pids, self._turn)
        chosen = (pids[start:] or pids)[:_IN_TURN]
        self._turn = chosen[-1] if chosen else 0
        return chosen


def status_of(host: Host, process: Process) -> Process | None:
    """The process with the figures of its status file as they are now; None where it has ended."""
    found = parse_status(host.text(f"/proc/{process.pid}/status") or "", process.pid)
    return None if found is None else replace(found, command=process.command)


def pss_of(host: Host, pid: int) -> int | None:
    """Its PSS. The kernel walks its page tables for it, so read it rarely."""
    return host.table(f"/proc/{pid}/smaps_rollup").get("Pss")


def limits(host: Host) -> Limits:
    """The limits of this process; what could not be read is None, with a ``reason``."""
    reasons: list[str] = []
    soft, hard = _rlimit(host, "nofile", reasons)
    locked, _ = _rlimit(host, "memlock", reasons)
    open_fds = _open_fds(host)
    if open_fds is None:
        reasons.append(say("open descriptors unknown: {why}", why=_cannot_list(host)))
    overcommit = host.number("/proc/sys/vm/overcommit_memory")
    if overcommit is None and host.platform == "linux":
        reasons.append(host.why("/proc/sys/vm/overcommit_memory"))
    return Limits(
        nofile_soft=soft,
        nofile_hard=hard,
        memlock_soft=locked,
        open_fds=open_fds,
        source=say("getrlimit, {fds}", fds=_fd_folder(host)),
        overcommit=overcommit,
        reason=joined(reasons) or None,
    )


def fds_pool(limits: Limits, process: Process | None = None) -> Pool:
    """File descriptors: the limit is per process, so ``used`` is known for a given process only."""
    if process is None:
        reason = say("the limit is per process, and no process was given")
        if limits.nofile_soft is None:
            reason = limits.reason or reason
        return Pool("fds", limits.nofile_soft, None, None, "RLIMIT_NOFILE, soft", reason)
    size = limits.nofile_soft if process.fd_limit is None else process.fd_limit
    used = process.fds
    free = None if size is None or used is None else max(0, size - used)
    reason_named = None
    if used is None:
        reason_named = say("no permission to list the descriptors of process {pid}", pid=process.pid)
    elif size is None:
        reason_named = limits.reason
    return Pool("fds", size, used, free, f"/proc/{process.pid}/limits, /proc/{process.pid}/fd", reason_named)


def pinned_pool(ram: Pool, limits: Limits, pinned: int | None = None) -> Pool:
    """Page-locked memory: its size is the free RAM; ``pinned`` is the kernel's VmPin, if read."""
    bound = (
        say(
            "RLIMIT_MEMLOCK is {size}, which does not limit CUDA's pinned memory", size=format_size(limits.memlock_soft)
        )
        if limits.memlock_soft is not None
        else say("no RLIMIT_MEMLOCK found")
    )
    # VmPin misses what CUDA pins, so 0 means unknown and more than 0 is a lower bound.
    used = pinned or None
    known = (
        say("the kernel does not count memory pinned by CUDA")
        if used is None
        else say("lower bound (VmPin): memory pinned by CUDA is not counted")
    )
    return Pool(
        "pinned", ram.size, used, ram.free, say("taken from ram: {source}", source=ram.source), joined((known, bound))
    )


def _rlimit(host: Host, name: str, reasons: list[str]) -> tuple[int | None, int | None]:
    label = f"RLIMIT_{name.upper()}"
    try:
        pair = host.rlimit(name)
    except (OSError, ValueError, TypeError, IndexError, AttributeError):  # a system or a recording without it
        pair = None
    if pair is None:
        reasons.append(say("{label} is not available here", label=label))
        return None, None
    if pair[0] == UNLIMITED:
        reasons.append(say("{label} is unlimited", label=label))
    soft, hard = (None if value == UNLIMITED else value for value in pair)
    return soft, hard


def _fd_folder(host: Host) -> str:
    return "/dev/fd" if host.platform == "darwin" else "/proc/self/fd"


def _open_fds(host: Host) -> int | None:
    folder = _fd_folder(host)
    names = [name for name in host.names(folder) if name.isdigit()]
    # Listing the directory itself uses a descriptor, which is closed afterwards.
    still = sum(1 for name in names if host.exists(f"{folder}/{name}") or host.link(f"{folder}/{name}") is not None)
    return still or None


def _cannot_list(host: Host) -> str:
    folder = _fd_folder(host)
    return say("{folder} is empty", folder=folder) if host.exists(folder) else host.why(folder)


def cpu(host: Host, pid: str = "self") -> Cpu:
    """The CPUs ``pid`` may run on, and the smallest quota of its cgroups, in cores."""
    affinity, source = _affinity(host, pid)
    group = cgroup(host, "cpu", pid)
    quotas = [
        (quota, file) for path in group.chain for quota, file in (_cpu_quota(host, group.version, path),) if quota
    ]
    if not quotas:
        return Cpu(affinity, None, source)
    quota, file = min(quotas)
    return Cpu(affinity, quota, f"{source}, {file}")


def _affinity(host: Host, pid: str) -> tuple[int | None, str]:
    if pid == "self":
        count = host.affinity
        return (count if isinstance(count, int) and count > 0 else None), "sched_getaffinity"
    file = f"/proc/{pid}/status"
    for line in (host.text(file) or "").split("\n"):
        name, _, value = line.partition(":")
        if name == "Cpus_allowed":  # a mask in hexadecimal, 32 bits between commas
            try:
                return int(value.strip().replace(",", ""), 16).bit_count() or None, file
            except ValueError:
                break
    return None, file


def _cpu_quota(host: Host, version: Version | None, path: str) -> tuple[float | None, str]:
    """The cores that a cgroup's quota allows (None: no quota), and the file it was read from."""
    if version == "v2":
        file = f"{path}/cpu.max"
        words = (host.text(file) or "").split()
    else:
        file = f"{path}/cpu.cfs_quota_us"
        words = f"{host.text(file) or ''} {host.text(f'{path}/cpu.cfs_period_us') or ''}".split()
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", empty, invalid
        return None, file
    # v1 writes -1 for no quota. A period is at least 1 ms and a quota fits in 64 bits; anything else is invalid.
    return (quota / period if 0 < quota < 1 << 64 and period > 0 else None), file


# Python processes send descriptors through a socket in the temporary directory; torch's DataLoader sends batches that
# way. A socket path has at most 107 bytes on Linux, 103 on macOS and the BSDs. Measured (torch 2.13, Python 3.11):
# 75 bytes of TMPDIR work. From 76 on, under fork and spawn, every batch is lost and the loader waits for ever; under
# forkserver the workers do not start.
TMPDIR_VARIABLES = ("TMPDIR", "TEMP", "TMP")  # in the order in which tempfile reads them
SOCKET_TAIL = len("/pymp-12345678/listener-12345678")
_SHORT_SOCKET_TAIL = len("/pymp-12345678/sock-12345678")


def temporary(host: Host, pid: str = "self") -> Temporary | None:
    """The directory that the environment names; None if none is named, or without such sockets (Windows)."""
    if host.platform == "win32":
        return None
    env = _environment(host, pid)
    for name in TMPDIR_VARIABLES:
        path = env.get(name)
        if path and host.exists(path):
            path = os.path.abspath(path)
            length = len(os.fsencode(path))
            longest = longest_socket(host.platform)
            taken = length + SOCKET_TAIL
            # Pythons that switch to /tmp by themselves assume this length, whatever the socket's name.
            if host.live and _moves_away() and length + _SHORT_SOCKET_TAIL > longest:
                taken = len("/tmp") + SOCKET_TAIL
            return Temporary(path, name, taken, longest)
    return None


def longest_socket(platform: str) -> int:
    """The longest path of a socket in bytes: the size of its field, less the final zero."""
    return 107 if platform == "linux" else 103


def _environment(host: Host, pid: str) -> Mapping[str, str]:
    """The environment the process was started with; this process's if it may not be read."""
    text = None if pid == "self" else host.text(f"/proc/{pid}/environ")
    if not text:
        return host.env
    pairs = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, _, value in pairs}


def _moves_away() -> bool:
    """Whether this Python itself avoids a directory that is too long, as 3.14 and some older ones do."""
    with import_lock:
        from multiprocessing import util

    return hasattr(util, "_get_base_temp_dir")
