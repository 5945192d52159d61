"""Which alarms stand: the rules asked at every sample, and held so that nothing flickers.

Covers: how often a rule must speak before it is believed, and be silent before its alarm ends.
Does not cover: the rules (rules_now.py, rules_trend.py), telling anybody (the outputs).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from legroom.model import Alarm, Moment
from legroom.monitor import rules_now, rules_trend
from legroom.monitor.history import History
from legroom.monitor.rules_now import Standing
from legroom.words import say

_TREND_AFTER = 3  # samples in a row; how things stand needs one
_ENDS_AFTER = 8  # samples without a word from the rule
_WORSE = ("warning", "critical")


def speak(history: History, standing: Standing = frozenset()) -> tuple[Alarm, ...]:
    """What every rule says of the history as it is: a pure function of its arguments."""
    rules = (*rules_now.RULES, *rules_trend.RULES)
    return tuple(alarm for rule in rules for alarm in rule(history, standing))


@dataclass(frozen=True, slots=True)
class _Held:
    alarm: Alarm
    heard: int = 1  # samples in a row, until it is believed
    silent: int = 0

    @property
    def believed(self) -> bool:
        needed = _TREND_AFTER if self.alarm.code.endswith("-filling") else 1
        return self.heard >= needed


@dataclass
class Watchman:
    """The history and the alarms that stand; fed one sample at a time."""

    history: History = field(default_factory=History)
    _held: dict[tuple[str, str | None], _Held] = field(default_factory=dict)

    def judge(self) -> Moment:
        """The moment that the newest sample of the history makes."""
        sample = self.history.latest
        if sample is None:
            raise ValueError(say("there is no sample to judge"))
        before = {key: held.alarm for key, held in self._held.items() if held.believed}
        said = {alarm.key: alarm for alarm in speak(self.history, frozenset(before))}
        held: dict[tuple[str, str | None], _Held] = {}
        for key, old in self._held.items():
            now = said.pop(key, None)
            if now is not None:
                # The message and the numbers are today's; the beginning stays, and a level does not fall back
                # before the alarm ends, or it would be told again at every wobble.
                worst = max(now.level, old.alarm.level, key=_WORSE.index) if old.believed else now.level
                held[key] = _Held(replace(now, since=old.alarm.since, level=worst), old.heard + 1)
            elif old.believed and old.silent + 1 < _ENDS_AFTER:
                held[key] = replace(old, silent=old.silent + 1)
        held |= {key: _Held(alarm) for key, alarm in said.items()}
        self._held = held
        after = {key: one.alarm for key, one in held.items() if one.believed}
        begun = [
            alarm
            for key, alarm in after.items()
            if key not in before or _WORSE.index(alarm.level) > _WORSE.index(before[key].level)
        ]
        return Moment(
            sample,
            tuple(sorted(after.values(), key=lambda alarm: (-_WORSE.index(alarm.level), alarm.since))),
            tuple(begun),
            tuple(alarm for key, alarm in before.items() if key not in after),
        )
