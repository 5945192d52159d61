"""Decide when a checkpoint is due: which alarms are urgent, and when one that persists asks for another. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from legroom.records.finding_and_alarm import Alarm

HORIZON = 180.0  # seconds: several times what a large checkpoint takes to write
_AGAIN = 2  # horizons after a save, if the alarm is still active
_NEARLY_FULL = {"ram-near-limit", "limit-hit", "shm-nearly-full", "gpu-nearly-full"}
_FILLING = {"ram-filling", "shm-filling", "gpu-filling", "swap-filling"}
_DISK_FULL = "disk-low"


def threatens(alarm: Alarm, horizon: float) -> bool:
    """Whether the run may fail because of this alarm within the horizon."""
    if alarm.code in _FILLING:
        left = alarm.evidence.get("full_in_seconds")
        return alarm.level == "critical" or (isinstance(left, (int, float)) and left <= horizon)
    return alarm.code in _NEARLY_FULL and alarm.level == "critical"


def disk_full(alarms: Iterable[Alarm]) -> Alarm | None:
    """The alarm of a full disk, where a checkpoint would be incomplete, or None."""
    return next((alarm for alarm in alarms if alarm.code == _DISK_FULL and alarm.level == "critical"), None)


@dataclass
class CheckpointSchedule:
    """Decides when a checkpoint is due, so that one alarm does not request it again and again.

    Saving costs time, and work after an early save is lost. So an alarm counts once its time left is within the
    horizon. An alarm that is still active two horizons after a save requests another.
    """

    horizon: float = HORIZON
    _saved: float | None = None
    _for: frozenset[tuple[str, str | None]] = frozenset()

    def ask(self, alarms: Iterable[Alarm], now: float) -> Alarm | None:
        """The alarm that makes a checkpoint due now, or None."""
        threats = [alarm for alarm in alarms if threatens(alarm, self.horizon)]
        fresh = self._saved is None or now - self._saved >= _AGAIN * self.horizon
        return next((alarm for alarm in threats if fresh or alarm.key not in self._for), None)

    def saved(self, alarms: Iterable[Alarm], now: float) -> None:
        """Record that a checkpoint was requested; it covers all alarms that are active now."""
        threats = frozenset(alarm.key for alarm in alarms if threatens(alarm, self.horizon))
        within = self._saved is not None and now - self._saved < _AGAIN * self.horizon
        self._for = self._for | threats if within else threats
        self._saved = now
