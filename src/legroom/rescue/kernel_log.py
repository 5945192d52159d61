"""What the kernel and the daemons that kill for it wrote since a job began.

Covers: /dev/kmsg from a mark on, lines that name a process or a cgroup of the job; systemd-oomd's, earlyoom's and the
kubelet's lines in the system's log files and the journal. Does not cover: what follows from them (rules_counters.py).

All of it may be closed to us, and mostly is in a container: then the answer is None with a reason, not an empty list.
In a PID namespace it may be open, but the ids in it are the machine's, and ours are not.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from legroom.words import say

_KMSG = "/dev/kmsg"
_LOGS = ("/var/log/syslog", "/var/log/messages", "/var/log/kern.log")
_INITIAL = 0xEFFFFFFC  # the inode of the machine's first PID namespace, on every Linux since 3.8
_RSS = re.compile(r"Kill(?:ed)? process (\d+)(?:.*?anon-rss:(\d+)kB)?")
_KILLED = re.compile(r"Kill(?:ed)? process (\d+)|oom-kill:.*task_memcg=([^,]*),.*pid=(\d+)")
_DAEMON = re.compile(
    r"(?:systemd-oomd|earlyoom|kubelet)\S*:?.*(?:[Kk]ill|SIGTERM|SIGKILL|[Ee]vict)|low on resource: memory"
)
_DAEMONS = ("systemd-oomd", "earlyoom", "kubelet")
_PID = re.compile(r"\b(\d+)\b")
_MOST = 1 << 20  # bytes of what was appended to a log file
_JOURNAL_WITHIN = 3.0


@dataclass
class KernelLog:
    """Marks in the logs, set before the job starts."""

    kmsg: int | None = None
    reason: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    killed: set[int] = field(
        default_factory=set
    )  # every process of the machine that was OOM-killed since the mark

    @classmethod
    def mark(cls, kmsg: str = _KMSG, logs: tuple[str, ...] = _LOGS) -> KernelLog:
        """Remember where every log ends now."""
        log = cls()
        if not same_pids():
            log.reason = say("the kernel's log: its process ids are those of another PID namespace")
            return log
        try:
            log.kmsg = os.open(kmsg, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            os.lseek(log.kmsg, 0, os.SEEK_END)
        except OSError as problem:
            log.reason = say("the kernel's log: {path}: {why}", path=kmsg, why=problem.strerror)
            log.close()
        for path in logs:
            with contextlib.suppress(OSError):
                log.sizes[path] = os.stat(path).st_size
        return log

    def close(self) -> None:
        """Let go of the kernel's log."""
        if self.kmsg is not None:
            os.close(self.kmsg)
            self.kmsg = None

    def kills(self, pids: set[int], group: str | None) -> tuple[str, ...] | None:
        """Lines since the mark about OOM kills of these processes or in that cgroup; None: it may not be read."""
        if self.kmsg is None:
            return None
        found = []
        for line in self._records():
            match = _KILLED.search(line)
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
            except BrokenPipeError:  # overwritten before it was read: the next read goes on with what is left
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
        """Lines of the daemons that kill for memory, about these processes."""
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
    """Whether the process ids in the machine's logs are those that we see."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL
    except OSError:  # no Linux, or no /proc: there is no such log either
        return True


def killed_in(lines: Iterable[str]) -> dict[int, int | None]:
    """The processes that these lines say were killed, each with the memory it held, where a line has that."""
    found: dict[int, int | None] = {}
    for line in lines:
        if match := _RSS.search(line):
            found[int(match[1])] = int(match[2]) * 1024 if match[2] else found.get(int(match[1]))
        elif match := _KILLED.search(line):
            found.setdefault(int(match[3]), None)
    return found


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
