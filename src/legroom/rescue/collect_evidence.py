"""Collect the evidence about an ended job: counters, samples, the kernel log, logs of OOM daemons.

Reads only; verdict.py decides. The kernel log and the journal are often unreadable in a container. Then the answer is
None with a reason, not an empty list. In a PID namespace they may be readable, but show the machine's process ids.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.failure import Evidence, Level, LogFacts, OomCount
from legroom.rescue.cgroup_and_oom_victims import JobCgroup
from legroom.rescue.job_sampling import DiskLevels, JobSampler, recent_rate, seconds_unread, thinned, worst_stall
from legroom.rescue.log_reader import OOM_KILL, killed_in
from legroom.system.process_control import ExitStatus

_KMSG = "/dev/kmsg"
_LOGS = ("/var/log/syslog", "/var/log/messages", "/var/log/kern.log")
_INITIAL = 0xEFFFFFFC  # the inode of the initial PID namespace, on every Linux since 3.8
_DAEMON = re.compile(
    r"(?:systemd-oomd|earlyoom|kubelet)\S*:?.*(?:[Kk]ill|SIGTERM|SIGKILL|[Ee]vict)|low on resource: memory"
)
_DAEMONS = ("systemd-oomd", "earlyoom", "kubelet")
_PID = re.compile(r"\b(\d+)\b")
_MOST = 1 << 20  # bytes appended to a log file that are read
_JOURNAL_WITHIN = 3.0


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
        if not same_pids():
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


def same_pids() -> bool:
    """Whether process IDs in the machine's logs are those of our PID namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL
    except OSError:  # not Linux, or no /proc: then there is no such log
        return True


def _appended(path: str, size: int) -> list[str]:
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        if end > size:
            file.seek(max(size, end - _MOST))
            return file.read(_MOST).decode("utf-8", "replace").splitlines()
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


_KILL_REPORTS = frozenset({"killed", "child-killed", "worker-killed", "worker-gone"})


def _reported_killed(log: LogFacts) -> set[int]:
    """Numbers in the lines in which the job reports a killed process: its ID is among them.

    A process that moved into a cgroup elsewhere, and lived for less than a sample, is known from there alone.
    """
    lines = (sign.line for sign in log.signs if sign.code in _KILL_REPORTS)
    return {int(number) for line in lines for number in _PID.findall(line)}


@dataclass
class EvidenceCollector:
    """Takes counters and log positions before a job starts; collects the evidence after it ends."""

    host: Host
    cgroup: JobCgroup
    sampler: JobSampler
    folders: Sequence[str] = ()  # of its checkpoints
    disks: DiskLevels = field(init=False)
    log: KernelLog = field(default_factory=KernelLog)
    since: float = 0.0

    def __post_init__(self) -> None:
        temporary = self.host.env.get("TMPDIR", "/tmp")
        self.disks = DiskLevels(self.host, (*self.folders, os.getcwd(), temporary), lambda: self.sampler.present)

    def begin(self) -> None:
        """Read counters and log positions before the start."""
        self.disks.start()
        self.since = time.time()
        self.log = KernelLog.mark() if self.host.platform == "linux" else KernelLog(reason=self.host.platform)
        self.sampler.begin()

    def close(self) -> None:
        """Close what is open."""
        self.disks.finish(0.0)
        self.log.close()

    def evidence(
        self,
        ending: ExitStatus,
        log: LogFacts,
        shm_at_end: Level | None,
        *,
        asked_to_stop: int | None = None,
        stalled_on: str | None = None,
        held_shm: int | None = None,
        keyboard: bool = False,
    ) -> Evidence:
        """Collect everything after the end."""
        seen = self.sampler
        pids = seen.victims.job_pids | (_reported_killed(log) - seen.victims.other_pids)
        unknown = [reason for reason in (self.cgroup.reason, self.log.reason, self.disks.reason) if reason]
        kernel = self.log.kills(pids, self._group())
        killers = list(self.log.killers(pids, self.since))
        if (oomd := self.cgroup.killed_by_oomd()) is not None and self.cgroup.own:
            killers.append(oomd)
        return Evidence(
            ending=ending,
            asked_to_stop=asked_to_stop,
            stalled_on=stalled_on,
            held_shm=held_shm,
            log=log,
            oom=self._count(kernel),
            kernel=kernel,
            killers=tuple(killers),
            readings=thinned(seen.history),
            peaks=dict(seen.peaks),
            ram_peak=seen.ram_peak(),
            ram_unseen=seconds_unread(seen.history, "ram"),
            shm_at_end=shm_at_end,
            keyboard=keyboard,
            disks=self.disks.finish(),
            swapped_back=recent_rate(seen.history),
            stalled=worst_stall(seen.history),
            unknown=tuple(unknown),
        )

    def _group(self) -> str | None:
        """The last part of the job's own cgroup path, as the kernel log shows it."""
        if not self.cgroup.own or self.cgroup.path is None:
            return None
        return "/" + self.cgroup.path.rpartition("/")[2]

    def _count(self, kernel: tuple[str, ...] | None) -> OomCount | None:
        seen = self.sampler.victims
        if seen.kills is None:
            return None
        ours, others = seen.taken()
        victims = seen.victims()
        if kernel:  # it names the process and its RSS
            named = killed_in(kernel)
            victims = tuple(replace(one, rss=named.get(one.pid) or one.rss) for one in victims)
            victims = tuple(one for one in victims if one.pid in named) or victims
            ours = len(named)
        elif self.log.killed & seen.other_pids:
            ours, others = 0, len(self.log.killed & seen.other_pids)
        end = self.sampler.age
        return OomCount(
            kills=seen.kills,
            own=self.cgroup.own,
            source=self.cgroup.counters(self.host)[1],
            before_end=seen.before_end(end),
            ours=ours,
            others=others,
            victims=victims,
            beside=seen.beside(),
            went_on=seen.went_on(end),
        )
