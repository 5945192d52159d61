"""Load, list, remove and diagnose on every node of a Ray cluster.

Each byte of a remote object is read from the storage service by one node. Nodes read disjoint groups of pieces, and
Ray's object store passes them on. A node that receives a group verifies it and writes it into the same download that it
would otherwise fetch by itself, so the entry is built, hashed and published by the same code. How many groups are on
their way at once is bounded.

A node that dies fails alone: its groups that were not delivered are read by another. The next call loads only what is
missing, from nodes that have the entry where that contains the object's bytes. Legroom must be installed on every node,
in the same version.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from legroom.cache.find_or_build_entry import source_paths
from legroom.errors import ClusterUnreachable, UsageError
from legroom.formats.base_reader import Selection
from legroom.integrations.ray_divide_download import Exchange, LoadingNode
from legroom.integrations.ray_node import NodeLoader, answer_here, error_of, load_here
from legroom.messages import say
from legroom.records.node_results import NodeAnswer, NodeError, NodeLoad
from legroom.remote.remote_object import ObjectUrl, redacted, without_credentials
from legroom.system.argument_checks import check_arguments
from legroom.system.lazy_and_optional_imports import require

_CALLS = 24  # methods of a node that may run at the same time
Told = Callable[[str, str, int, int], None]  # (address, source, done, total)
Where = str | os.PathLike[str]


def warm(
    sources: Where | Iterable[Where],
    nodes: Iterable[str] | None = None,
    *,
    keys: str | Iterable[str] | None = None,
    backing: str = "auto",
    revalidate: bool = False,
    told: Told | None = None,
) -> tuple[NodeLoad, ...]:
    """Load sources into the cache of every node of the Ray cluster, or of some.

    Objects in remote storage are read once by all nodes together. A path, which each node may see differently, is
    loaded by each node by itself. A node that fails is in the result with its error, and the others go on.

    Args:
        sources: URLs or paths.
        nodes: Ray's ids of nodes, or their IP addresses; None: every node that is alive.
        keys: Load only these arrays or groups. Each node then reads by itself the little that it needs.
        backing: ``"shm"``, ``"disk"`` or ``"auto"``, as in ``legroom.open``.
        revalidate: Ask the storage service whether an object has changed, however recently that was done.
        told: Called with (address, source, done, total) while bytes arrive.
    """
    check_arguments(warm, locals())
    ray = _connected()
    given = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    selected = Selection(keys).keys
    found: list[NodeLoad] = []
    for source in given:
        for one in source_paths(source):
            members = _members(ray, nodes)
            if isinstance(one, ObjectUrl) and selected is None:
                found += _warm_together(ray, members, one, backing, revalidate, told)
            else:
                name = one.url if isinstance(one, ObjectUrl) else os.fspath(one)
                found += _warm_alone(ray, members, name, selected, backing, revalidate)
    return tuple(found)


def doctor(nodes: Iterable[str] | None = None) -> tuple[NodeAnswer, ...]:
    """Diagnose every node, worst finding first: pools, settings and findings as in ``legroom doctor --json``."""
    check_arguments(doctor, locals())
    answers = ask("doctor", nodes)
    return tuple(sorted(answers, key=lambda one: (-worst(one), one.address)))


def entries(what: str | Sequence[str] | None = None, nodes: Iterable[str] | None = None) -> tuple[NodeAnswer, ...]:
    """The cache entries on every node, with stores and findings as in ``legroom cache list --json``."""
    check_arguments(entries, locals())
    return ask("entries", nodes, {"what": what})


def drop(
    what: str | Sequence[str] | None = None, nodes: Iterable[str] | None = None, *, force: bool = False
) -> tuple[NodeAnswer, ...]:
    """Remove the entries of sources or keys, or all (None), on every node."""
    check_arguments(drop, locals())
    return ask("drop", nodes, {"what": what, "force": force})


def worst(answer: NodeAnswer) -> int:
    """How bad a node's worst finding is: 3 a node that failed, 2 critical, 1 warning, 0 none."""
    if answer.error is not None:
        return 3
    grades = {"critical": 2, "warning": 1}
    return max((grades.get(one["severity"], 0) for one in answer.answer.get("findings", ())), default=0)


def ask(
    command: str, nodes: Iterable[str] | None = None, arguments: Mapping[str, Any] | None = None
) -> tuple[NodeAnswer, ...]:
    """Run one of the commands on every node, at the same time."""
    ray = _connected()
    members = _members(ray, nodes)
    task = ray.remote(answer_here)
    refs = {_on(ray, task, node).remote(command, arguments or {}): node for node in members}
    found = []
    for node, answer, _ in _answers(ray, refs):
        error = answer.pop("error", None)
        state = "ok" if error is None else "failed"
        found.append(NodeAnswer(node.ident, node.address, state, answer, _node_error(error)))  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda one: one.address))


def _answers(ray: Any, refs: Mapping[Any, LoadingNode]) -> Iterator[tuple[LoadingNode, dict[str, Any], bool]]:
    """What the call of each node returned, or its error, and whether it returned."""
    for ref, node in refs.items():
        try:
            yield node, ray.get(ref), True
        except Exception as problem:
            yield node, {"error": error_of(problem)}, False


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect this process to a cluster, and disconnect at the end.

    Ray prints a line to stdout when a node dies, whatever its settings. It goes to stderr: stdout is the command's.
    """
    ray = _ray()
    with redirect_stdout(sys.stderr):
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, configure_logging=False)
        except Exception as problem:
            raise _unreachable(address, problem) from None
        try:
            yield
        finally:
            ray.shutdown()


def _ray() -> Any:
    return require("ray", "", say("many nodes"), package="ray")


def _connected() -> Any:
    ray = _ray()
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
        except Exception as problem:
            raise _unreachable("auto", problem) from None
    return ray


def _unreachable(address: str, problem: Exception) -> ClusterUnreachable:
    return ClusterUnreachable(
        say("no Ray cluster at {address}", address=address),
        why=redacted(str(problem).strip().partition("\n")[0]),
        fix=(say("start Ray on this machine, or give its address:\nray start --head"),),
    )


def _members(ray: Any, wanted: Iterable[str] | None) -> list[LoadingNode]:
    alive = [LoadingNode(one["NodeID"], one["NodeManagerAddress"]) for one in ray.nodes() if one["Alive"]]
    if wanted is None:
        return sorted(alive, key=lambda node: (node.address, node.ident))
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    found = [node for node in alive if node.ident in names or node.address in names]
    known = {name for node in found for name in (node.ident, node.address)}
    if lost := [name for name in names if name not in known]:
        raise UsageError(
            say("the cluster has no node {name}", name=lost[0]),
            why=say("nodes that are alive: {names}", names=", ".join(node.address for node in alive)),
            fix=(say("list the nodes:\nray list nodes"),),
        )
    return found


def _on(ray: Any, thing: Any, node: LoadingNode, **options: Any) -> Any:
    strategies = require("ray.util.scheduling_strategies", "", say("many nodes"), package="ray")
    strategy = strategies.NodeAffinitySchedulingStrategy(node_id=node.ident, soft=False)
    return thing.options(num_cpus=0, scheduling_strategy=strategy, **options)


def _warm_alone(
    ray: Any, members: Sequence[LoadingNode], path: str, keys: tuple[str, ...] | None, backing: str, revalidate: bool
) -> list[NodeLoad]:
    begun = time.monotonic()
    task = ray.remote(load_here)
    refs = {_on(ray, task, node, max_retries=0).remote(path, keys, backing, revalidate): node for node in members}
    found = []
    for node, answer, _ in _answers(ray, refs):
        node.result = answer
        found.append(_load_record(node, without_credentials(path), time.monotonic() - begun))
    return found


def _warm_together(
    ray: Any, members: list[LoadingNode], url: ObjectUrl, backing: str, revalidate: bool, told: Told | None
) -> list[NodeLoad]:
    """Load one object on all nodes, each byte of it read by one of them."""

    def arrived(node: LoadingNode) -> None:
        if told is not None:
            told(node.address, str(url), node.done, node.size)

    begun = time.monotonic()
    actor, key = ray.remote(NodeLoader), secrets.token_bytes(32)
    for node in members:
        made = _on(ray, actor, node, max_concurrency=_CALLS, max_restarts=0)
        node.actor = made.remote(url.url, backing, revalidate, key)
    starts = {node.actor.begin.remote(): node for node in members}
    for node, answer, node.alive in _answers(ray, starts):
        if node.alive and answer["state"] == "waits":
            node.size, node.stamp = answer["size"], answer["stamp"]
            node.missing = set(answer["missing"])
        else:
            node.result = answer
    waiting = [node for node in members if node.alive and not node.result]
    stamps = {node.stamp for node in waiting}
    holders = _holders(ray, members, waiting) if len(stamps) == 1 else []
    if len(stamps) > 1:  # the object was replaced between two nodes' questions
        message = say("{path} changed while it was being read", path=url)
        for node in waiting:
            node.actor.abandon.remote("source-changed", message)
    else:
        Exchange(ray, [*waiting, *holders], arrived).run()
    ends = {node.actor.end.remote(): node for node in waiting if node.alive}
    for node, answer, node.alive in _answers(ray, ends):
        node.result = answer
    seconds = time.monotonic() - begun
    found = [_load_record(node, str(url), seconds) for node in members]
    for node in members:
        if node.actor is not None:
            ray.kill(node.actor)
    return found


def _holders(ray: Any, members: Sequence[LoadingNode], waiting: Sequence[LoadingNode]) -> list[LoadingNode]:
    """The nodes that have the entry already and can pass on the object's bytes. They read nothing from its source."""
    refs = {node.actor.offer.remote(): node for node in members if node.alive and "key" in node.result}
    found = []
    for node, offer, answered in _answers(ray, refs):  # it has the entry: whether it can help is another matter
        if answered and offer is not None and (offer["stamp"], offer["size"]) == (waiting[0].stamp, waiting[0].size):
            node.size, node.stamp = offer["size"], offer["stamp"]
            found.append(node)
    return found


def _load_record(node: LoadingNode, source: str, seconds: float) -> NodeLoad:
    result = node.result
    error = _node_error(result.get("error"))
    fresh = result.get("fresh", "read" in result)
    state = "failed" if error is not None else "loaded" if fresh else "attached"
    return NodeLoad(
        node=node.ident,
        address=node.address,
        source=source,
        state=state,  # type: ignore[arg-type]
        seconds=seconds,
        bytes=result.get("bytes", node.size),
        read=result.get("read", 0),
        received=result.get("received", 0),
        kept=result.get("kept", 0),
        key=result.get("key"),
        digest=result.get("digest"),
        error=error,
    )


def _node_error(error: Mapping[str, Any] | None) -> NodeError | None:
    if error is None:
        return None
    return NodeError(error["code"], error["message"], error.get("why", ""), tuple(error.get("fix", ())))
