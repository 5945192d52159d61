"""A fake watch, whose alarms a test sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from legroom.records.finding_and_alarm import Alarm


def filling(left: float = 60.0, level: Any = "warning", code: str = "ram-filling") -> Alarm:
    message = f"{code} in about {left:.0f} s"
    return Alarm(code, code.partition("-")[0], level, message, 0.0, {"full_in_seconds": left})


class FakeWatch:
    """Records its calls, and has the alarms that a test raises."""

    def __init__(self, log: Any, on_alarm: Callable[[Alarm], object]) -> None:
        self.log, self._on_alarm = log, on_alarm
        self.alarms: tuple[Alarm, ...] = ()
        self.marks: list[str] = []
        self.steps = 0
        self.entered = self.left = 0

    def raise_alarm(self, alarm: Alarm) -> None:
        self.alarms = (alarm,)
        self._on_alarm(alarm)

    def mark(self, text: str) -> None:
        self.marks.append(text)

    def step(self) -> None:
        self.steps += 1

    def __enter__(self) -> FakeWatch:
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.left += 1
