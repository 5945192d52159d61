"""A memory cgroup for the job, so that the kernel counts its OOM kills separately; which process an OOM kill took.

No limit is set: the job stays under the limits of our own cgroup, because the new one is created *below* ours.
cgroup v2 allows processes or child controllers in a group, not both. There we first move into a child group, which
requires that no other process is in ours. `close` undoes everything.

A container usually may not create cgroups, so its OOM counter covers every process in it. Its processes can be listed
with one system call per sample. If the counter rises while only the job loses a process, the victim is the job's; if
only another loses one, it is the other's. Otherwise it is unknown.

The kernel log names the process, and the journal those that an OOM daemon killed. Both are often unreadable in a
container: then the answer is None with a reason, not an empty list. In a PID namespace they may be readable, but show
the machine's process ids.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from legroom.messages import phrase, say
from legroom.probe.filesystems_and_cgroups import Version, cgroup
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import arguments, client_name, command_text, is_ending, stat_fields
from legroom.probe.runtime_environment import in_initial_namespace
from legroom.records.failure import LogFacts, Role, Victim
from legroom.rescue.find_failures_in_log import OOM_KILL

_CLOSE_WITHIN = 5.0  # seconds for processes that were killed to be gone


@dataclass
class JobCgroup:
    """The job's cgroup, or the one it shares with the supervisor."""

    path: str | None  # None: no memory cgroup
    version: Version | None
    own: bool
    reason: str | None = None  # why it is not the job's own
    stepped_into: str | None = None  # v2: the child group that we moved into
    _listed: list[bytes] = field(default_factory=list)
    _members: set[int] = field(default_factory=set)
    _inner: dict[str, int] = field(
        default_factory=dict
    )  # v1: OOM kills in groups that the job created, removed ones included

    def counters(self, host: Host) -> tuple[int | None, str]:
        """OOM kills so far, including groups that the job created, and the file they are read from."""
        if self.path is None:
            return None, "/proc/vmstat"
        if self.version == "v2":  # includes the groups below
            file = f"{self.path}/memory.events"
            return host.table(file).get("oom_kill"), file
        file = f"{self.path}/memory.oom_control"
        kills = host.table(file).get("oom_kill")
        if kills is None or not self.own:
            return kills, file
        for group in self._groups()[1:]:
            inside = host.table(f"{group}/memory.oom_control").get("oom_kill")
            if inside is not None:
                self._inner[group] = max(inside, self._inner.get(group, 0))
        return kills + sum(self._inner.values()), file

    def swapped_back(self, host: Host) -> int | None:
        """Pages swapped in so far."""
        if self.path is None:
            return None
        table = host.table(f"{self.path}/memory.stat")
        return table.get("total_workingset_refault_anon", table.get("workingset_refault_anon"))

    def peak(self, host: Host) -> int | None:
        """The kernel's peak of the job's own group, page cache included."""
        if not self.own or self.path is None:
            return None
        return host.number(f"{self.path}/memory.{'max_usage_in_bytes' if self.version == 'v1' else 'peak'}")

    def killed_by_oomd(self) -> str | None:
        """What systemd-oomd recorded in the group's extended attributes after a kill."""
        if self.path is None or not hasattr(os, "getxattr"):
            return None
        for name in ("user.oomd_kill", "user.oomd_ooms"):
            with contextlib.suppress(OSError, ValueError):
                if int(os.getxattr(self.path, name)) > 0:
                    return say("systemd-oomd killed processes in {path} ({name})", path=self.path, name=name)
        return None

    def members(self) -> set[int] | None:
        """The processes in the group, and below it if it is the job's own; None if unreadable."""
        if self.path is None:
            return None
        listed = []
        for group in self._groups() if self.own else [self.path]:
            try:
                with open(f"{group}/cgroup.procs", "rb", buffering=0) as file:
                    listed.append(file.readall() or b"")
            except OSError:
                if group == self.path:
                    return None  # an inner group may just have been removed
        if listed != self._listed:  # read many times a second and usually unchanged
            self._listed = listed
            self._members = {int(word) for text in listed for word in text.split()} - {0}
        return self._members  # 0 is a process of another PID namespace

    def _groups(self) -> list[str]:
        """The job's own group and the groups below it, parents first."""
        assert self.path is not None
        found = [self.path]
        for group in found:  # grows during the loop
            with contextlib.suppress(OSError):
                if os.stat(group).st_nlink != 2:  # one more link per subdirectory
                    found += [entry.path for entry in os.scandir(group) if entry.is_dir(follow_symlinks=False)]
        return found

    def pids(self) -> list[int]:
        """The job's processes, if the group is its own."""
        return sorted(self.members() or ()) if self.own else []

    def close(self) -> None:
        """Remove the group. Processes that outlive the job are moved to our group, not killed."""
        if not self.own or self.path is None:
            return
        folder = Path(self.path)
        parent = folder.parent
        deadline = time.monotonic() + _CLOSE_WITHIN
        if self.stepped_into is not None:
            with contextlib.suppress(OSError):
                (parent / "cgroup.subtree_control").write_text("-memory")
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(str(os.getpid()))
            with contextlib.suppress(OSError):
                os.rmdir(self.stepped_into)
        while True:
            for pid in self.pids():
                with contextlib.suppress(OSError):
                    (parent / "cgroup.procs").write_text(str(pid))
            try:
                for inner in reversed(self._groups()[1:]):
                    os.rmdir(inner)
                folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    break  # a zombie without a waiting parent keeps it; it is empty and harmless
                time.sleep(0.02)
        self.own = False


def make_job_cgroup(host: Host, name: str) -> JobCgroup:
    """Create a cgroup for the job; if not possible, the one it shares with us, with the reason."""
    group = cgroup(host, "memory")
    if group.version is None or not group.chain or host.platform != "linux":
        return JobCgroup(None, None, False, group.reason or say("no memory cgroup here"))
    base = group.chain[0]
    if group.reason is not None:
        return JobCgroup(base, group.version, False, group.reason)
    name = _unused(base, name)
    if group.version == "v1":
        return _make(host, base, "v1", name)
    return _make_v2(host, base, name, is_root=group.is_root)


def _unused(base: str, name: str) -> str:
    """That name, with a number where it is taken: in containers a Legroom that was killed had the same process ID."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(one for one in names if not os.path.exists(f"{base}/{one}") and not os.path.exists(_aside(base, one)))


def _aside(base: str, name: str) -> str:
    """v2: the child group that we move into."""
    return f"{base}/{name}-supervisor"


def _make(host: Host, base: str, version: Version, name: str, stepped_into: str | None = None) -> JobCgroup:
    path = f"{base}/{name}"
    made = JobCgroup(path, version, True, stepped_into=stepped_into)
    try:
        os.mkdir(path)
    except OSError as problem:
        return JobCgroup(base, version, False, say("{path}: {why}", path=path, why=problem.strerror))
    if made.counters(host)[0] is None or not os.access(f"{path}/cgroup.procs", os.W_OK):
        made.close()
        return JobCgroup(base, version, False, say("{path} has no OOM counter", path=path))
    return made


def _make_v2(host: Host, base: str, name: str, *, is_root: bool) -> JobCgroup:
    control = Path(base, "cgroup.subtree_control")
    try:
        if "memory" in control.read_text().split():
            return _make(host, base, "v2", name)
        if is_root:
            control.write_text("+memory")
            return _make(host, base, "v2", name)
        inside = Path(base, "cgroup.procs").read_text().split()
        if inside != [str(os.getpid())]:
            template = phrase(
                "{count} processes share {path}; a cgroup can be split only by a process that is alone in it"
            )
            return JobCgroup(base, "v2", False, say(template, count=len(inside), path=base))
        aside = _aside(base, name)
        os.mkdir(aside)
    except OSError as problem:
        return JobCgroup(base, "v2", False, say("{path}: {why}", path=base, why=problem.strerror))
    try:
        Path(aside, "cgroup.procs").write_text(str(os.getpid()))
        control.write_text("+memory")
    except OSError as problem:
        with contextlib.suppress(OSError):
            Path(base, "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            os.rmdir(aside)
        return JobCgroup(base, "v2", False, say("{path}: {why}", path=base, why=problem.strerror))
    made = _make(host, base, "v2", name, stepped_into=aside)
    if not made.own:  # undo our move as well
        JobCgroup(f"{base}/{name}", "v2", True, stepped_into=aside).close()
    return made


_DYING = 0.5  # seconds within which a killed process disappears after the counter rose
_SIGKILL = 1 << 8  # in a mask of pending signals
_MOST = 1000  # processes of a shared cgroup; in a larger one only the job's own are tracked
_MOST_KEPT = 100_000  # process IDs kept
_ANSWER = 0.3  # seconds after a kill in which output reports the kill
_FINAL_OUTPUT = 1.0  # seconds before the end in which output reports the end
_LONGEST = 160
_MOST_BESIDE = 4
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # of torchrun, Slurm, MPI
_TORCH_WORKER = "pt_data_worker"  # the process name of torch's DataLoader workers
_FORKSERVER = "multiprocessing.forkserver"


@dataclass(slots=True)
class _SeenProcess:
    """A process in the cgroup."""

    pid: int
    parent: int
    ours: bool
    name: str
    command: str = ""
    rss: int | None = None
    role: Role | None = None
    rank: int | None = None

    def as_victim(self) -> Victim:
        return Victim(self.pid, (self.command or self.name)[:_LONGEST], self.rss, self.role, self.rank)


@dataclass(slots=True)
class _CounterRise:
    """One rise of the OOM counter."""

    when: float
    count: int
    ours: list[_SeenProcess] = field(default_factory=list)
    others: list[_SeenProcess] = field(default_factory=list)
    there: list[Victim] = field(default_factory=list)  # the job's largest processes when it rose

    def open(self, now: float) -> bool:
        """Whether a process that exits now may be the killed one."""
        return len(self.ours) + len(self.others) < self.count and now - self.when <= _DYING


@dataclass
class OomVictims:
    """The OOM kills of one attempt and their victims."""

    host: Host
    cgroup: JobCgroup
    root: int | None = None  # the job's first process, which leads its process group
    job_pids: set[int] = field(default_factory=set)  # every process of the job so far
    other_pids: set[int] = field(default_factory=set)  # and of the rest of the cgroup
    client: str | None = None  # a program of the job that starts processes elsewhere, as last sampled
    torch_workers: bool = False  # a worker of a DataLoader was seen, by torch's name for it
    children: bool = False  # a child of a Python process was seen
    _known: dict[int, _SeenProcess] = field(default_factory=dict)
    _rises: list[_CounterRise] = field(default_factory=list)
    _first: int | None = None
    _last: int | None = None
    _listed: bool = True  # the whole cgroup can be listed
    _written: int = 0
    _wrote: deque[float] = field(default_factory=lambda: deque(maxlen=1000))  # since the last rise

    def begin(self) -> None:
        """Read the counter and the processes in the cgroup before the job starts."""
        self._first = self._last = self.cgroup.counters(self.host)[0]
        self._list(0.0)

    @property
    def kills(self) -> int | None:
        """OOM kills since the start, in the whole cgroup."""
        return None if self._last is None or self._first is None else max(0, self._last - self._first)

    def update(self, now: float, written: int) -> None:
        """Take one sample; ``written`` is the job's output so far in bytes."""
        # List processes before reading the counter: a missing process was counted before it disappeared.
        gone = self._list(now)
        count = self.cgroup.counters(self.host)[0]
        if count is not None and self._last is not None and count > self._last:
            ours = [seen.as_victim() for seen in (*self._known.values(), *gone) if seen.ours and seen.rss]
            largest = sorted(ours, key=lambda one: -(one.rss or 0))[:_MOST_BESIDE]
            self._rises.append(_CounterRise(now, count - self._last, there=largest))
            self._wrote.clear()
        if count is not None:
            self._last = count
        if written != self._written:
            self._written = written
            self._wrote.append(now)
        rise = next((rise for rise in self._rises if rise.open(now)), None)
        if rise is None:
            return
        # If several processes exit at once, which one was the victim is unknown.
        going = [seen for seen in self._known.values() if self._is_exiting(seen.pid)]
        for seen in (*gone, *going):
            (rise.ours if seen.ours else rise.others).append(seen)

    def measure(self, pids: list[int]) -> None:
        """The slower sample: RSS, command and role of the job's processes."""
        clients: list[str] = []
        for pid in pids:
            seen = self._known.get(pid) or self._add(pid, ours=True)
            if seen is None:
                continue
            seen.ours = True
            self._keep(seen)
            words = (self.host.text(f"/proc/{pid}/statm") or "").split()
            if len(words) > 1 and words[1] != "0":  # a process that exits has none left: keep the last sample
                seen.rss = int(words[1]) * mmap.PAGESIZE
            seen.name = (self.host.text(f"/proc/{pid}/comm") or seen.name).strip()
            words = arguments(self.host, pid)
            clients += filter(None, [client_name(words)])
            command = command_text(words) or seen.command
            if command != seen.command:  # new, or after exec
                seen.command, seen.rank = command, _rank(self.host.text(f"/proc/{pid}/environ") or "")
        if pids:
            self.client = clients[0] if clients else None
        self._find_roles()

    @property
    def loader(self) -> bool:
        """Whether the job has a DataLoader with workers."""
        return any(seen.role == "worker" for seen in self._known.values() if seen.ours)

    def taken(self) -> tuple[int, int]:
        """The number of kills of the job's processes, and of other processes."""
        ours = others = 0
        for rise in self._rises:
            if self.cgroup.own or (rise.ours and not rise.others and self._listed):
                ours += rise.count
            elif rise.others and not rise.ours:
                others += rise.count
        return ours, others

    def victims(self) -> tuple[Victim, ...]:
        """The job's processes that exited when the counter rose, the largest first."""
        found = {seen.pid: seen for rise in self._rises for seen in rise.ours}
        ordered = sorted(found.values(), key=lambda seen: -(seen.rss or 0))
        return tuple(seen.as_victim() for seen in ordered)

    def beside(self) -> tuple[Victim, ...]:
        """The job's largest other processes when the counter last rose."""
        gone = {seen.pid for rise in self._rises for seen in rise.ours}
        return tuple(one for one in self._rises[-1].there if one.pid not in gone) if self._rises else ()

    def before_end(self, end: float) -> float | None:
        """Seconds from the last kill that may be the job's to the end."""
        mine = [rise.when for rise in self._rises if self.cgroup.own or rise.ours or not rise.others]
        return end - mine[-1] if mine else None

    def went_on(self, end: float) -> bool:
        """Whether the job kept printing after the last kill, apart from output about the kill and the end."""
        if not self._rises:
            return False
        since, until = self._rises[-1].when + _ANSWER, end - _FINAL_OUTPUT
        return sum(since < when < until for when in self._wrote) >= 3

    def _is_exiting(self, pid: int) -> bool:
        """Whether SIGKILL is pending for a process or it is exiting: freeing gigabytes takes seconds."""
        for line in (self.host.text(f"/proc/{pid}/status") or "").splitlines():
            if line.startswith(("SigPnd:", "ShdPnd:")) and int(line.split()[1], 16) & _SIGKILL:
                return True
        return is_ending(self.host, pid)

    def _list(self, now: float) -> list[_SeenProcess]:
        """Update the list of processes in the cgroup; return those that are gone."""
        members = self.cgroup.members()
        if members is None:
            self._listed = False
            return []
        if len(members) > _MOST and not self.cgroup.own:
            self._listed = False
            members = {pid for pid in members if pid in self.job_pids}
        if members == self._known.keys():
            return []
        gone = [seen for pid, seen in self._known.items() if pid not in members]
        for seen in gone:
            del self._known[seen.pid]
        for pid in members - self._known.keys():
            self._add(pid)
        return gone

    def _add(self, pid: int, *, ours: bool = False) -> _SeenProcess | None:
        fields = stat_fields(self.host, pid)
        if len(fields) < 3:
            return None
        parent, group = int(fields[1]), int(fields[2])
        above = self._known.get(parent)
        mine = ours or self.cgroup.own or pid == self.root or (above is not None and above.ours)
        mine = mine or (self.root is not None and group == self.root)
        name = (self.host.text(f"/proc/{pid}/comm") or "").strip()
        seen = self._known[pid] = _SeenProcess(pid, parent, mine, name)
        self._keep(seen)
        return seen

    def _keep(self, seen: _SeenProcess) -> None:
        """Process IDs are reused: an ID belongs to its latest process."""
        here, there = (self.job_pids, self.other_pids) if seen.ours else (self.other_pids, self.job_pids)
        there.discard(seen.pid)
        if len(here) < _MOST_KEPT:
            here.add(seen.pid)

    def _find_roles(self) -> None:
        """A worker has torch's process name or is a fork of its parent; a process with workers trains.

        So does the first Python process of a job, which is not a worker: it may fill memory before it has any.
        """
        ours = {pid: seen for pid, seen in self._known.items() if seen.ours}
        trainers = set()
        for seen in ours.values():
            above = ours.get(seen.parent)
            self.children = self.children or (above is not None and "python" in f"{above.name} {above.command}")
            forked = above is not None and above.command == seen.command and "python" in seen.command
            if seen.name != _TORCH_WORKER and not forked:
                continue
            seen.role = "worker"
            self.torch_workers = self.torch_workers or seen.name == _TORCH_WORKER
            if above is not None and _FORKSERVER in above.command:
                above = ours.get(above.parent)
            if above is not None:
                trainers.add(above.pid)
        for pid, seen in ours.items():
            first = seen.pid == self.root or (seen.parent in ours and "python" not in ours[seen.parent].name)
            if seen.role is None and (pid in trainers or (first and "python" in seen.name)):
                seen.role = "main"


def _rank(environment: str) -> int | None:
    """The rank in a process's environment, as set by its launcher."""
    found = dict(entry.split("=", 1) for entry in environment.split("\0") if "=" in entry)
    text = next((found[name] for name in _RANKS if name in found), "")
    return int(text) if text.isdecimal() else None


_KMSG = "/dev/kmsg"
_LOGS = ("/var/log/syslog", "/var/log/messages", "/var/log/kern.log")
_DAEMON = re.compile(
    r"(?:systemd-oomd|earlyoom|kubelet)\S*:?.*(?:[Kk]ill|SIGTERM|SIGKILL|[Ee]vict)|low on resource: memory"
)
_DAEMONS = ("systemd-oomd", "earlyoom", "kubelet")
_NUMBER = re.compile(r"\b(\d+)\b")
_PID = re.compile(r"\b(?:process|pid)\b[\s:=(\[]*(\d+)", re.I)  # a line also has sizes and scores
_MOST_APPENDED = 1 << 20  # bytes appended to a log file that are read
_JOURNAL_WITHIN = 3.0
_KILL_REPORTS = frozenset({"killed", "child-killed", "worker-killed", "worker-gone"})


@dataclass
class KernelLog:
    """Positions in the system's logs, taken before the job starts."""

    kmsg: int | None = None
    reason: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)  # every process of the machine that was OOM-killed since then

    @classmethod
    def mark(cls, kmsg: str = _KMSG, logs: tuple[str, ...] = _LOGS) -> KernelLog:
        """Remember where every log ends now."""
        log = cls()
        if in_initial_namespace(Host(), "pid") is False:
            log.reason = say("kernel log: its process IDs belong to another PID namespace")
            return log
        try:
            log.kmsg = os.open(kmsg, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            os.lseek(log.kmsg, 0, os.SEEK_END)
        except OSError as problem:
            log.reason = say("kernel log: {path}: {why}", path=kmsg, why=problem.strerror)
            log.close()
        for path in logs:
            with contextlib.suppress(OSError):
                log.sizes[path] = os.stat(path).st_size
        return log

    def close(self) -> None:
        """Close the kernel log."""
        if self.kmsg is not None:
            os.close(self.kmsg)
            self.kmsg = None

    def kills(self, pids: set[int], group: str | None) -> tuple[str, ...] | None:
        """Lines since `mark` about OOM kills of these processes or in that cgroup; None if unreadable."""
        if self.kmsg is None:
            return None
        found = []
        for line in self._records():
            match = OOM_KILL.search(line)
            if match is None:
                continue
            pid = int(match[1] or match[3])
            self.killed.add(pid)
            below = match[2] is not None and group is not None and f"{group}/" in f"{match[2]}/"
            if pid in pids or below:
                found.append(line)
        return tuple(found)

    def _records(self) -> list[str]:
        lines: list[str] = []
        while self.kmsg is not None:
            try:
                record = os.read(self.kmsg, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten before it was read: the next read continues with the oldest line left
                continue
            except OSError:
                break
            if not record:
                break
            head, _, text = record.decode("utf-8", "replace").partition(";")
            if head:
                lines.append(text.split("\n")[0])
        return lines

    def killers(self, pids: set[int], since: float) -> tuple[str, ...]:
        """Lines of OOM daemons about these processes."""
        lines = [line for path, size in self.sizes.items() for line in _appended(path, size)]
        lines += _journal(since)
        found = []
        for line in lines:
            if _DAEMON.search(line) is None:
                continue
            named = {int(number) for number in _PID.findall(line)}
            if named & pids:
                found.append(line.strip()[:200])
        return tuple(dict.fromkeys(found))


def _appended(path: str, size: int) -> list[str]:
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        if end > size:
            file.seek(max(size, end - _MOST_APPENDED))
            return file.read(_MOST_APPENDED).decode("utf-8", "replace").splitlines()
    return []


def _journal(since: float) -> list[str]:
    if not Path("/run/systemd/journal/socket").exists() or shutil.which("journalctl") is None:
        return []
    command = ["journalctl", "--no-pager", "-q", "-o", "short", f"--since=@{int(since)}"]
    command += [word for name in _DAEMONS for word in ("-t", name)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_JOURNAL_WITHIN, check=False)
        return shown.stdout.splitlines()
    return []


def reported_killed(log: LogFacts) -> set[int]:
    """Numbers in the lines in which the job reports a killed process: its ID is among them.

    A process that moved into a cgroup elsewhere, and lived for less than a sample, is known from there alone.
    """
    lines = (sign.line for sign in log.signs if sign.code in _KILL_REPORTS)
    return {int(number) for line in lines for number in _NUMBER.findall(line)}
