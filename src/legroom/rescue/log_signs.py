"""Which lines of a log count at a death: a pure view of LogFacts.

Covers: telling the trouble that ended a program from one it survived. Does not cover: finding the lines
(log_reader.py), what they mean (the rules).

A training that skips a batch after "CUDA out of memory" and dies of a ValueError an hour later did not die of memory.
So when an exception ended it, only what stands in the tracebacks that lead to that exception counts; unless the
exception is the echo of another process's death, whose own words stand further up. A program that a signal
ended has no last word: texts count for those signals only that a failed allocation leads to.
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.model.death import Evidence, Sign
from legroom.rescue.signatures import CONSEQUENCE

WINDOW = 400  # lines from the end in which anything can count
_LAST_WORDS = 60  # an exception further from the end was not the end
_MUTE = frozenset(
    {2, 4, 8, 9, 11, 15}
)  # INT, ILL, FPE, KILL, SEGV, TERM: no failed allocation ends like that
_SHELL = 128


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs that count."""

    counting: tuple[Sign, ...]
    decisive: Sign | None  # the exception that ended it, when that is no echo
    mute: bool  # ended by a signal that says nothing about texts

    @classmethod
    def of(cls, evidence: Evidence) -> Signs:
        """Those of that evidence."""
        log, ending = evidence.log, evidence.ending
        near = [sign for sign in log.signs if sign.number <= WINDOW]
        if ending is not None and ending.signal in _MUTE:
            return cls(tuple(near), None, mute=True)
        last = log.last_error
        if last is None or (ending is None and last.number > _LAST_WORDS) or CONSEQUENCE.search(last.line):
            return cls(tuple(near), None, mute=False)
        if ending is not None and ending.signal is not None:
            return cls(tuple(near), None, mute=False)
        reach = log.chain_from or last.number
        return cls(tuple(sign for sign in near if sign.number <= reach), last, mute=False)

    def first(self, *codes: str) -> Sign | None:
        """The first counting line with one of these codes; what a program wrote first is nearest to the cause."""
        return next((sign for sign in self.counting if sign.code in codes), None)

    def text(self, *codes: str) -> Sign | None:
        """The same, where texts say anything about this ending."""
        return None if self.mute else self.first(*codes)
