"""What is said about a box and a training on it.

Covers: findings, settings, a job with what binds it. Does not cover: the facts they rest on (box.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from legroom.records.machine import Process
from legroom.words import phrase, say

Severity = Literal["critical", "warning", "info"]
_HEADINGS: dict[Severity, str] = {
    "critical": phrase("CRITICAL"),
    "warning": phrase("WARNING"),
    "info": phrase("INFO"),
}


def heading(severity: Severity) -> str:
    """The severity as a word for people; programs read the severity itself."""
    return say(_HEADINGS[severity])


def scope_name(scope: str) -> str:
    """Whose pressure it is, as a word for people; programs read the scope itself."""
    return say("cgroup") if scope == "cgroup" else say("machine")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth saying about a box: a stable code, why with numbers, and the fix for this place."""

    code: str
    severity: Severity
    message: str
    why: str
    fix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """DataLoader settings that fit the box as it stands."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    max_batch_bytes: int | None  # the largest batch for which they hold; None: nothing bounds it
    bound_by: str
    why: str
    pin_why: str


@dataclass(frozen=True, slots=True)
class Job:
    """A running training: its processes, the flags found on its command line, what binds it."""

    pid: int
    command: str
    processes: tuple[Process, ...]
    flags: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, int | None] = field(default_factory=dict)  # by pool
    binds: str | None = None
    binds_why: str = ""
    spellings: Mapping[str, str] = field(default_factory=dict)  # each flag as the command line has it
    notes: tuple[str, ...] = ()  # what the figures in ``held`` leave out or count twice
