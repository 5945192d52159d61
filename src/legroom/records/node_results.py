"""Nodes of a cluster: a source loaded on one, the answer of one to a command, why one failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NodeState = Literal["loaded", "attached", "failed", "ok"]


@dataclass(frozen=True, slots=True)
class NodeError:
    """Why a node failed."""

    code: str
    message: str
    why: str = ""
    fix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """One source on one node."""

    node: str  # Ray's id of the node
    address: str
    source: str  # without credentials
    state: NodeState  # attached: it was there already
    seconds: float = 0.0
    bytes: int = 0  # of the object
    read: int = 0  # bytes that this node read from the storage service
    received: int = 0  # bytes that came from other nodes
    kept: int = 0  # bytes of an earlier attempt
    key: str | None = None
    digest: str | None = None
    error: NodeError | None = None


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What one node answered: the object that the same command prints on one machine."""

    node: str
    address: str
    state: NodeState
    answer: Mapping[str, Any] = field(default_factory=dict)
    error: NodeError | None = None
