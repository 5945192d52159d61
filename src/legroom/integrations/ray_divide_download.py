"""Which node of a Ray cluster reads which part of an object, and who gets it from whom.

A group of pieces is read by one node and received by every other that lacks it. Every node receives the whole object,
so its incoming link is what limits the load, and the time is shortest if that link is never idle:

- Nodes read little ahead. Reading and receiving then go on side by side until the end. If a node read its whole share
  first, it would have less time to send it to all others than its outgoing link takes.
- A node that has passed on less reads next, so no node still has to send when the others are done.
- Groups are small at the beginning and at the end, and on slow links: they are passed on as soon as they are read.

What is being read or is on its way is bounded, over all nodes together: each of them may have a copy of all of it.

When a node dies, what it had read and not passed on is read again by another. Ray may let a call wait for ever for an
argument that died with its node, so such calls are given up as soon as the node is known to be dead. What a late one
still brings is written once. A node that cannot take what it is sent, because its store is full for example, leaves the
load alone. All fail only if a piece cannot be read by any of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from legroom.cache.download import PIECE
from legroom.integrations.ray_node import GROUP, error_of
from legroom.messages import say

_ON_THE_WAY = 256 << 20  # bytes in the object store of any node
_READS = 3  # groups that a node reads at the same time
_AHEAD = 8  # groups that a node reads, or has read and not passed on to all others
_SECONDS = 0.2  # that a group should take on a link: calls cost a few milliseconds each
_TRIES = 3  # of one node to receive a group
_LOOK = 1.0  # seconds without an answer after which nodes are looked at
Arrived = Callable[["LoadingNode"], None]


@dataclass(slots=True)
class LoadingNode:
    """A node of the cluster, and its part in loading one object."""

    ident: str
    address: str
    actor: Any = None
    missing: set[int] = field(default_factory=set)  # numbers of pieces
    coming: set[int] = field(default_factory=set)  # of those that another node passes on to it now
    size: int = 0
    stamp: str = ""
    done: int = 0
    alive: bool = True
    result: dict[str, Any] = field(default_factory=dict)
    reading: int = 0  # groups
    busy: int = 0  # groups that it reads, or that it has read and that are on their way
    taken: int = 0  # pieces that it was told to read

    def lacks(self, number: int) -> bool:
        """Whether a piece is neither here nor on its way."""
        return number in self.missing and number not in self.coming

    def failed(self, error: dict[str, Any] | None = None) -> None:
        """Take it out of the load. Without an error it has died."""
        self.alive = False
        self.result = {"error": error or {
            "code": "node-died", "message": say("the node died while it was loading"),
            "why": "", "fix": [say("run it again: it loads only what is missing")]}}  # fmt: skip


@dataclass(slots=True, eq=False)
class _Group:
    """A group of pieces on its way from the node that reads it."""

    first: int
    last: int
    reader: LoadingNode
    data: Any  # ref of its bytes
    receivers: int = 0  # that still lack it

    @property
    def pieces(self) -> range:
        return range(self.first, self.last)


class Exchange:
    """Lets nodes read the pieces that some of them lack, and pass them on."""

    def __init__(self, ray: Any, nodes: Sequence[LoadingNode], arrived: Arrived) -> None:
        self._ray, self._nodes, self._arrived = ray, nodes, arrived
        self._todo = deque(sorted({number for node in nodes for number in node.missing}))
        self._reads: dict[Any, _Group] = {}  # by the ref of the signature
        self._receives: dict[Any, tuple[LoadingNode, _Group]] = {}
        self._unread: dict[int, dict[str, Exception]] = {}  # by piece: the nodes that failed to read it, and why
        self._untaken: dict[tuple[str, int], int] = {}  # by node and piece: how often it failed to receive it
        self._on_the_way = 0  # pieces
        self._begun = time.monotonic()
        self._passed_on = 0  # pieces

    def run(self) -> None:
        """Return when no node that is alive lacks a piece, or the rest cannot be had."""
        while any(node.missing for node in self._nodes if node.alive):
            try:
                self._start_reads()
                done, _ = self._ray.wait([*self._reads, *self._receives], num_returns=1, timeout=_LOOK)
                for ref in done:
                    if ref in self._reads:
                        self._read(ref)
                    elif ref in self._receives:
                        self._received(ref)
            except _GivenUp as end:
                error = error_of(end.problem)
                for node in self._nodes:
                    if node.alive:
                        node.actor.abandon.remote(error["code"], error["message"])
                return
            if not done:
                self._look()

    def _start_reads(self) -> None:
        alive = [node for node in self._nodes if node.alive]
        while self._todo and (free := [one for one in alive if one.busy < _AHEAD and one.reading < _READS]):
            first = self._todo[0]
            lacking = [node for node in alive if node.lacks(first)]
            if not lacking:
                self._todo.popleft()
                continue
            # One that has it already passes it on, if need be later. Else one of the nodes that lack it reads it.
            unread = self._unread.get(first, {})
            able = [node for node in alive if node.ident not in unread]
            if not able:
                raise _GivenUp([*unread.values()][-1])
            having = [node for node in able if first not in node.missing]
            choice = [node for node in free if node in (having or able)]
            most = self._most()
            if not choice or most < 1:
                return
            reader = min(choice, key=lambda node: (node.busy, node.taken))
            last = self._take(first, most, lacking)
            others = len(lacking) - (reader in lacking)
            data, signed = reader.actor.read.options(num_returns=2).remote(first, last, others > 0)
            reader.busy, reader.reading, reader.taken = reader.busy + 1, reader.reading + 1, reader.taken + last - first
            self._on_the_way += last - first
            self._reads[signed] = _Group(first, last, reader, data)

    def _most(self) -> int:
        """Pieces in the next group."""
        alive = sum(node.alive for node in self._nodes)
        each = (time.monotonic() - self._begun) / max(1, self._passed_on)  # seconds of a piece on a link
        quick = int(_SECONDS / max(each, 1e-6)) if self._passed_on else 1
        left = len(self._todo) // (_READS * alive)
        return min(GROUP, max(1, min(quick, left)), _ON_THE_WAY // PIECE - self._on_the_way)

    def _take(self, first: int, most: int, lacking: list[LoadingNode]) -> int:
        """Take a group that begins there: pieces, one after the other, that the same nodes lack. Returns its end."""
        last = first
        while last - first < most and self._todo and self._todo[0] == last:
            if [node for node in self._nodes if node.alive and node.lacks(last)] != lacking:
                break
            self._todo.popleft()
            last += 1
        return last

    def _read(self, ref: Any) -> None:
        group = self._reads.pop(ref)
        group.reader.reading -= 1
        try:
            signed = self._ray.get(ref)
        except Exception as problem:
            self._leaves(group)
            self._again(group)
            if not self._is_lost(group.reader, problem):
                for number in group.pieces:  # it is left to the other nodes
                    self._unread.setdefault(number, {})[group.reader.ident] = problem
            return
        self._has(group.reader, group)
        lacking = [node for node in self._nodes if node.alive and any(map(node.lacks, group.pieces))]
        group.receivers = len(lacking)
        for node in lacking:
            node.coming.update(group.pieces)
            self._receives[node.actor.receive.remote(group.first, group.data, signed)] = node, group
        if not lacking:
            self._leaves(group)

    def _received(self, ref: Any) -> None:
        node, group = self._receives.pop(ref)
        self._received_or_lost(node, group)
        try:
            self._ray.get(ref)
        except Exception as problem:
            if self._is_lost(node, problem):
                return
            times = self._untaken[node.ident, group.first] = self._untaken.get((node.ident, group.first), 0) + 1
            if times < _TRIES:  # the reader died with its copy, or the group was damaged on the way
                self._again(group)
                return
            error = error_of(problem)
            node.actor.abandon.remote(error["code"], error["message"])
            self._lost(node, error)
            return
        self._has(node, group)

    def _received_or_lost(self, node: LoadingNode, group: _Group) -> None:
        """One receiver less."""
        node.coming.difference_update(group.pieces)
        group.receivers -= 1
        if group.receivers == 0:
            self._leaves(group)

    def _leaves(self, group: _Group) -> None:
        """The object store need not keep it any longer."""
        group.reader.busy -= 1
        self._on_the_way -= len(group.pieces)
        self._passed_on += len(group.pieces)

    def _has(self, node: LoadingNode, group: _Group) -> None:
        news = node.missing.intersection(group.pieces)
        if news:
            node.missing -= news
            node.done += sum(min(PIECE, node.size - number * PIECE) for number in news)
            self._arrived(node)

    def _again(self, group: _Group) -> None:
        """Let another node read it. Pieces that nobody lacks are passed over."""
        for number in reversed(group.pieces):
            if number not in self._todo:
                self._todo.appendleft(number)

    def _is_lost(self, node: LoadingNode, problem: Exception) -> bool:
        """Take a node that is gone out of the load."""
        gone = isinstance(problem, self._ray.exceptions.RayActorError)
        if gone:
            self._lost(node)
        return gone

    def _look(self) -> None:
        """Find nodes that died without a call that would say so: all they had to do was to pass on."""
        alive = {one["NodeID"] for one in self._ray.nodes() if one["Alive"]}
        for node in self._nodes:
            if node.alive and node.ident not in alive:
                self._lost(node)

    def _lost(self, node: LoadingNode, error: dict[str, Any] | None = None) -> None:
        """Nothing comes from that node any more: other nodes read again what it had not passed on."""
        node.failed(error)
        for ref, group in list(self._reads.items()):
            if group.reader is node:
                del self._reads[ref]
                self._leaves(group)
                self._again(group)
        for ref, (receiver, group) in list(self._receives.items()):
            if receiver is node or group.reader is node:
                del self._receives[ref]
                self._received_or_lost(receiver, group)
                if receiver.alive:
                    self._again(group)


class _GivenUp(Exception):
    """No node can read a group."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(str(problem))
        self.problem = problem
