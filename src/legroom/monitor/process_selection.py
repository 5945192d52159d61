"""Selects the processes to watch: a process tree, a command-line match, one user's processes, or this process.

A process found below a watched one stays watched until it ends. An orphaned worker then belongs to init and still
holds its memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from legroom.errors import UsageError
from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import descendants, find_matching, matching, our_pid, tree
from legroom.records.machine import Process

_Processes = Mapping[int, Process]


@dataclass
class ProcessSelection:
    """Chooses processes at every sample, with their descendants."""

    description: str
    find_roots: Callable[[_Processes], Sequence[int]]
    ends: bool = False  # whether the watch ends with the last process
    follow: bool = True  # read the cgroup and /dev/shm of the watched processes instead of our own
    ours: int | None = field(default_factory=os.getpid)  # this process, which is left out; None: it is not
    scope: str = "self"  # the process whose cgroup, /dev/shm and pressure are read
    watched: set[int] = field(default_factory=set)

    def choose(self, processes: _Processes) -> list[int]:
        """The pids to watch now, sorted."""
        roots = [pid for pid in self.find_roots(processes) if pid in processes]
        found = set(descendants(processes.values(), (*roots, *self.watched.intersection(processes))))
        found -= {self.ours}
        self.watched = found
        if self.follow:
            # An orphan is usually in the cgroup of its job. With no process left, our own cgroup is read.
            self.scope = str(roots[0] if roots else min(found)) if found else "self"
        return sorted(found)


def process_tree(pid: int, processes: _Processes, host: Host | None = None) -> ProcessSelection:
    """That process and its descendants; NoSuchProcess where it does not exist."""
    root = tree(list(processes.values()), pid)[0]
    description = say("process {pid} ({command}) and its children", pid=pid, command=root.command[:60])
    ours = our_pid(host or Host())
    return ProcessSelection(description, lambda _: (pid,), ends=True, ours=ours, scope=str(pid))


def matching_processes(host: Host, pattern: str, processes: _Processes, *, wait: bool = True) -> ProcessSelection:
    """Processes whose command line matches, now or later, and their descendants.

    NothingMatches where none does now and ``wait`` is false.
    """
    us = our_pid(host)

    def find(now: _Processes) -> list[int]:
        return [process.pid for process in find_matching(list(now.values()), pattern, us=us or 0)]

    if wait:
        find(processes)  # raises now on an invalid pattern
    else:
        matching(list(processes.values()), pattern, us=us or 0)
    return ProcessSelection(say("processes matching {pattern!r}", pattern=pattern), find, ours=us)


def user_processes(host: Host) -> ProcessSelection:
    """All processes of this user."""
    uid = host.uid
    if uid is None:
        raise UsageError(
            say("cannot find your processes on {platform}", platform=host.platform),
            why=say("this platform has no user ids"),
            fix=(say("select a process with --pid"),),
        )
    return ProcessSelection(
        say("all processes of user {uid}", uid=uid),
        lambda now: [process.pid for process in now.values() if process.uid == uid],
        follow=False,
        ours=our_pid(host),
    )


def this_process(host: Host) -> ProcessSelection:
    """This process and its descendants: what ``legroom.watch`` watches."""
    pid = our_pid(host) or os.getpid()
    return ProcessSelection(say("process {pid} and its children", pid=pid), lambda _: (pid,), follow=False, ours=None)
