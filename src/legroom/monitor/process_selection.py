"""Which processes are watched.

Covers: a process and its descendants, those whose command line matches, everything of one user, this very process.
Does not cover: listing processes (probe.process), reading what they hold (sampler.py).

Who was once found below a watched process stays watched until it ends: a worker whose parent died belongs to init
by then, and is the one that still holds the memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from legroom.errors import NothingMatches, UsageError
from legroom.model import Process
from legroom.probe.host import Host
from legroom.probe.process import matching, our_pid, tree
from legroom.words import say

_Processes = Mapping[int, Process]


@dataclass
class ProcessSelection:
    """A choice of processes, made again at every sample."""

    words: str
    find: Callable[[_Processes], Sequence[int]]  # the roots that are there now
    ends: bool = False  # whether there is nothing to wait for once all have ended
    follow: bool = True  # whether the cgroup and /dev/shm that count are those of the watched, not our own
    with_us: bool = False  # whether this process itself is one of them
    scope: str = "self"  # whose cgroup, /dev/shm and pressure count
    kept: set[int] = field(default_factory=set)

    def choose(self, everybody: _Processes) -> list[int]:
        """The watched processes that are there, by pid."""
        roots = [pid for pid in self.find(everybody) if pid in everybody]
        children: dict[int, list[int]] = {}
        for process in everybody.values():
            children.setdefault(process.parent, []).append(process.pid)
        waiting = [*roots, *self.kept.intersection(everybody)]
        found: set[int] = set()
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found.add(pid)
                waiting += children.get(pid, ())
        if not self.with_us:
            found.discard(os.getpid())
        self.kept = found
        if self.follow:
            # An orphan of the same job is as a rule in the same cgroup. With none left it is our own that counts.
            self.scope = str(roots[0] if roots else min(found)) if found else "self"
        return sorted(found)


def process_tree(pid: int, everybody: _Processes) -> ProcessSelection:
    """That process and its descendants; NoSuchProcess where it is not there."""
    root = tree(list(everybody.values()), pid)[0]
    words = say("process {pid} ({command}) and its children", pid=pid, command=root.command[:60])
    return ProcessSelection(words, lambda _: (pid,), ends=True, scope=str(pid))


def matching_processes(
    host: Host, pattern: str, everybody: _Processes, *, wait: bool = True
) -> ProcessSelection:
    """Those whose command line the pattern finds, now and later, and their descendants.

    NothingMatches where there is none now and ``wait`` is false.
    """
    us = our_pid(host)

    def find(now: _Processes) -> list[int]:
        try:
            return [process.pid for process in matching(list(now.values()), pattern, us=us or 0)]
        except NothingMatches:
            return []  # before the first run and between two of them there is none

    try:
        matching(list(everybody.values()), pattern, us=us or 0)  # a pattern that cannot be read is told now
    except NothingMatches:
        if not wait:
            raise
    return ProcessSelection(say("processes matching {pattern!r}", pattern=pattern), find)


def user_processes(host: Host) -> ProcessSelection:
    """Everything that runs under this user's id."""
    uid = host.uid
    if uid is None:
        raise UsageError(
            say("cannot tell which processes are yours on {platform}", platform=host.platform),
            why=say("there are no user ids here"),
            fix=(say("name one with --pid"),),
        )
    return ProcessSelection(
        say("every process of user {uid}", uid=uid),
        lambda now: [process.pid for process in now.values() if process.uid == uid],
        follow=False,
    )


def this_process(host: Host) -> ProcessSelection:
    """This process and its descendants: what a script watches from inside."""
    pid = our_pid(host) or os.getpid()
    return ProcessSelection(
        say("process {pid} and its children", pid=pid), lambda _: (pid,), follow=False, with_us=True
    )
