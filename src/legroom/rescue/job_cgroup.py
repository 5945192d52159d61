"""A memory cgroup for the job, so that the kernel counts its OOM kills separately.

No limit is set: the job stays under the limits of our own cgroup, because the new one is created *below* ours.
cgroup v2 allows processes or child controllers in a group, not both. There we first move into a child group, which
requires that no other process is in ours. `close` undoes everything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from legroom.messages import phrase, say
from legroom.probe.filesystems_and_cgroups import Version, cgroup
from legroom.probe.host import Host

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

    def kill(self) -> None:
        """Kill every process in the job's own group."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

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
    if group.version == "v1":
        return _make(host, base, "v1", name)
    return _make_v2(host, base, name, is_root=group.is_root)


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
        aside = f"{base}/{name}-supervisor"
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
