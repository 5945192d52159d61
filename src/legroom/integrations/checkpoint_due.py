"""Whether a checkpoint should be saved now, because the training may soon be dead. Pure.

Covers: which alarms foretell a death, how close it must be, and not saving again and again.
Does not cover: raising alarms (monitor), saving.

A save costs time and work that is saved too early is lost anyway, so a forecast counts once its time left is within
the horizon. A forecast that is still standing long after a save asks for another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from legroom.model import Alarm

HORIZON = 180.0  # seconds: several times what a large checkpoint takes to write
_AGAIN = 2  # horizons after a save, where the forecast still stands
_LEVELS = {"ram-near-limit", "limit-hit", "shm-nearly-full", "gpu-nearly-full"}
_FILLING = {"ram-filling", "shm-filling", "gpu-filling", "swap-filling"}
_NO_ROOM = "disk-low"


def threatens(alarm: Alarm, horizon: float) -> bool:
    """Whether the training may die of this within the horizon."""
    if alarm.code in _FILLING:
        left = alarm.evidence.get("full_in_seconds")
        return alarm.level == "critical" or (isinstance(left, (int, float)) and left <= horizon)
    return alarm.code in _LEVELS and alarm.level == "critical"


def no_room(alarms: Iterable[Alarm]) -> Alarm | None:
    """What speaks against saving: half a checkpoint on a full disk helps nobody."""
    return next((alarm for alarm in alarms if alarm.code == _NO_ROOM and alarm.level == "critical"), None)


@dataclass
class Due:
    """Remembers what was saved for, and when."""

    horizon: float = HORIZON
    _saved: float | None = None
    _for: frozenset[tuple[str, str | None]] = frozenset()

    def ask(self, alarms: Iterable[Alarm], now: float) -> Alarm | None:
        """The alarm to save for at this moment, or None."""
        deadly = [alarm for alarm in alarms if threatens(alarm, self.horizon)]
        fresh = self._saved is None or now - self._saved >= _AGAIN * self.horizon
        return next((alarm for alarm in deadly if fresh or alarm.key not in self._for), None)

    def saved(self, alarms: Iterable[Alarm], now: float) -> None:
        """A checkpoint was asked for, and covers everything that threatens now."""
        deadly = frozenset(alarm.key for alarm in alarms if threatens(alarm, self.horizon))
        within = self._saved is not None and now - self._saved < _AGAIN * self.horizon
        self._for = self._for | deadly if within else deadly
        self._saved = now
