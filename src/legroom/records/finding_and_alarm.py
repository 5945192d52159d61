"""A finding about the machine or a job, an alarm of `legroom watch`, and how severe they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from legroom.messages import phrase, say

Severity = Literal["critical", "warning", "info"]
_HEADINGS: dict[Severity, str] = {"critical": phrase("CRITICAL"), "warning": phrase("WARNING"), "info": phrase("INFO")}


def heading(severity: Severity) -> str:
    """The severity as a translated word; programs read the severity itself."""
    return say(_HEADINGS[severity])


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or a fact about the machine: a stable code, why with numbers, and the fix for this environment."""

    code: str
    severity: Severity
    message: str
    why: str
    fix: tuple[str, ...] = ()


AlarmLevel = Literal["warning", "critical"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm: which pool, severity, since when, which processes, and the figures."""

    code: str
    pool: str | None  # None: the whole machine or cgroup
    level: AlarmLevel
    message: str
    since: float  # ``when`` of the sample that raised it
    evidence: Mapping[str, int | float | str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()  # growing processes, fastest first

    @property
    def key(self) -> tuple[str, str | None]:
        """Identifies the same alarm over time."""
        return self.code, self.pool
