"""Which node of a Ray cluster reads which part of an object, and who gets it from whom.

A group of pieces is read by one node and received by every other that lacks it. When a node dies, what it had read and
not passed on is read again by another. Ray may let a call wait for ever for an argument that died with its node, so
such calls are given up as soon as the node is known to be dead. What a late one still brings is written once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from legroom.cache.download import PIECE
from legroom.integrations.ray_node_actor import GROUP, error_of
from legroom.messages import say

_ON_THE_WAY = 128 << 20  # bytes in the object store for each node that reads
_READS = 4  # groups that a node reads at the same time: the first are passed on while it reads the next
_LOOK = 1.0  # seconds without an answer after which nodes are looked at
Arrived = Callable[["Member"], None]


@dataclass(slots=True)
class Member:
    """A node of the cluster, and its part in loading one object."""

    ident: str
    address: str
    actor: Any = None
    missing: set[int] = field(default_factory=set)  # first pieces of groups
    size: int = 0
    stamp: str = ""
    done: int = 0
    alive: bool = True
    result: dict[str, Any] = field(default_factory=dict)
    reading: int = 0  # groups
    busy: int = 0  # groups that it reads, or that it has read and that are on their way

    def died(self) -> None:
        """Take it out of the load."""
        self.alive = False
        self.result = {"error": {"code": "node-died", "message": say("the node died while it was loading"),
                                 "why": "", "fix": [say("run it again: it loads only what is missing")]}}  # fmt: skip


@dataclass(slots=True, eq=False)
class _Group:
    """A group of pieces on its way from the node that reads it."""

    first: int
    reader: Member
    data: Any  # ref of its bytes
    receivers: int = 0  # that still lack it


class Exchange:
    """Lets nodes read the groups that some of them lack, and pass them on."""

    def __init__(self, ray: Any, nodes: Sequence[Member], arrived: Arrived) -> None:
        self._ray, self._nodes, self._arrived = ray, nodes, arrived
        self._todo = deque(sorted({first for node in nodes for first in node.missing}))
        self._reads: dict[Any, _Group] = {}  # by the ref of the signature
        self._receives: dict[Any, tuple[Member, _Group]] = {}
        self._failures: dict[int, int] = {}
        self._most = max(1, _ON_THE_WAY // (GROUP * PIECE))
        self._turn = 0

    def run(self) -> None:
        """Return when no node that is alive lacks a group, or the rest cannot be had."""
        while any(node.missing for node in self._nodes if node.alive):
            self._start_reads()
            done, _ = self._ray.wait([*self._reads, *self._receives], num_returns=1, timeout=_LOOK)
            try:
                for ref in done:
                    if ref in self._reads:
                        self._read(ref)
                    elif ref in self._receives:
                        self._received(ref)
            except _GivenUp as end:
                error = error_of(getattr(end.problem, "cause", None) or end.problem)
                for node in self._nodes:
                    if node.alive:
                        node.actor.abandon.remote(error["code"], error["message"])
                return
            if not done:
                self._look()

    def _start_reads(self) -> None:
        alive = [node for node in self._nodes if node.alive]
        while self._todo and (free := [one for one in alive if one.busy < self._most and one.reading < _READS]):
            first = self._todo.popleft()
            lacking = [node for node in alive if first in node.missing]
            if not lacking:
                continue
            # One that has it already passes it on, if need be later. Else the nodes that lack it read in turn.
            having = [node for node in alive if first not in node.missing]
            choice = [node for node in free if node in (having or lacking)]
            if not choice:
                self._todo.appendleft(first)
                return
            reader = choice[self._turn % len(choice)]
            self._turn += 1
            last = min(first + GROUP, -(-reader.size // PIECE))
            data, signed = reader.actor.read.options(num_returns=2).remote(first, last)
            reader.busy, reader.reading = reader.busy + 1, reader.reading + 1
            self._reads[signed] = _Group(first, reader, data)

    def _read(self, ref: Any) -> None:
        group = self._reads.pop(ref)
        reader, first = group.reader, group.first
        reader.reading -= 1
        try:
            signed = self._ray.get(ref)
        except Exception as problem:
            reader.busy -= 1
            self._failed(reader, first, problem)
            self._again(first)
            return
        self._has(reader, first)
        lacking = [node for node in self._nodes if node.alive and first in node.missing]
        group.receivers = len(lacking)
        for node in lacking:
            self._receives[node.actor.receive.remote(first, group.data, signed)] = node, group
        if not lacking:
            reader.busy -= 1

    def _received(self, ref: Any) -> None:
        node, group = self._receives.pop(ref)
        self._left(group)
        try:
            self._ray.get(ref)
        except Exception as problem:
            self._failed(node, group.first, problem)
            if node.alive:  # the reader died with its copy, or the group was damaged on the way
                self._again(group.first)
            return
        self._has(node, group.first)

    def _left(self, group: _Group) -> None:
        """One receiver less."""
        group.receivers -= 1
        if group.receivers == 0:
            group.reader.busy -= 1

    def _has(self, node: Member, first: int) -> None:
        if first in node.missing:
            node.missing.discard(first)
            node.done += min(GROUP * PIECE, node.size - first * PIECE)
            self._arrived(node)

    def _again(self, first: int) -> None:
        if first not in self._todo:
            self._todo.appendleft(first)

    def _failed(self, node: Member, first: int, problem: Exception) -> None:
        """Take a node that is gone out of the load. Any other failure is of one group, and has its limit."""
        if isinstance(problem, self._ray.exceptions.RayActorError):
            self._lost(node)
            return
        self._failures[first] = self._failures.get(first, 0) + 1
        if self._failures[first] > len(self._nodes):
            raise _GivenUp(problem)

    def _look(self) -> None:
        """Find nodes that died without a call that would say so: all they had to do was to pass on."""
        alive = {one["NodeID"] for one in self._ray.nodes() if one["Alive"]}
        for node in self._nodes:
            if node.alive and node.ident not in alive:
                self._lost(node)

    def _lost(self, node: Member) -> None:
        """Nothing comes from that node any more: other nodes read again what it had not passed on."""
        node.died()
        for ref, group in list(self._reads.items()):
            if group.reader is node:
                del self._reads[ref]
                self._again(group.first)
        for ref, (receiver, group) in list(self._receives.items()):
            if receiver is node or group.reader is node:
                del self._receives[ref]
                self._left(group)
                if receiver.alive and group.first in receiver.missing:
                    self._again(group.first)


class _GivenUp(Exception):
    """A group failed on every node."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(str(problem))
        self.problem = problem
