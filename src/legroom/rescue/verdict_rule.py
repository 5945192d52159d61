"""What a verdict rule gets and returns: the log lines that count, a rule's result, the wording of evidence.

A job that skips a batch after "CUDA out of memory" and fails with a ValueError an hour later did not run out of memory.
So if an exception ended the program, only lines in the tracebacks that led to it count. An exception that only reports
another process's exit or a timeout is a consequence: its cause is further up. There, messages that the program survived
(it reported many steps afterwards) do not count. After most signals no message counts: only signals that a failed
allocation can cause let messages decide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from legroom.model.death import Cause, Evidence, Level, LogFacts, Sign, Verdict
from legroom.rescue.log_patterns import CONSEQUENCE, SHORTAGES
from legroom.system.child_processes import ExitStatus
from legroom.units import format_size
from legroom.words import say

UNKNOWN = 0.1  # the confidence of `unknown`: no cause is established

_SHOWN = 200  # characters of a log's line

_COMMAND = 60  # and of a command line


WINDOW = 400  # lines from the end in which a sign counts that no exception leads to

_WENT_ON = 10  # steps reported after a sign: it was survived

_BEFORE_A_DEATH = 3  # the same, where a later line reports a death of another kind

_DEATHS = frozenset(
    {"killed", "child-killed", "crash", "bus", "worker-bus", "ended-by", "oom-kill", "oom-daemon"}
)

_CONTEXT = 40  # lines between a frame, or a line that names a device, and the error that it belongs to

_RIGHT_ABOVE = 30  # lines between a shortage that was handled and the exception that it may have led to

_MUTE = frozenset(
    {2, 4, 8, 9, 11, 15}
)  # INT, ILL, FPE, KILL, SEGV, TERM: no failed allocation ends like that

_PATIENCE = re.compile(r"[Tt]ime(?:d )?-?out|TimeoutE|Pin memory thread exited|KeyboardInterrupt")


class RuleResult(NamedTuple):
    """A rule's answer."""

    cause: Cause
    confidence: float
    lines: tuple[str, ...]
    summary: str = ""  # where what is usually said of the cause would not be right
    likely: tuple[Cause, ...] = ()  # what it could be, in order; always given for `unknown`


def unknown(lines: tuple[str, ...], *likely: Cause, summary: str = "") -> RuleResult:
    """No cause is established; it could be one of these, the most likely first."""
    return RuleResult("unknown", UNKNOWN, lines, summary, likely)


def headline(verdict: Verdict) -> str:
    """The verdict's code and how sure it is."""
    if verdict.cause == "unknown":
        return verdict.cause
    return say("{cause}, {sure:.0%} sure", cause=verdict.cause, sure=verdict.confidence)


def quoted_line(sign: Sign) -> str:
    """A line of the log as evidence: its beginning, or the part with the words that count."""
    line = sign.line
    if sign.at > _SHOWN // 2 and len(line) > _SHOWN:
        line = "…" + line[sign.at - _SHOWN // 4 :]
    return say("log, line {number} from the end: {line}", number=sign.number, line=line[:_SHOWN])


def shortened_command(command: str) -> str:
    """The beginning of a command line, which says what it is."""
    return command if len(command) <= _COMMAND else command[: _COMMAND - 1].rstrip() + "…"


def exit_line(ending: ExitStatus | None) -> str:
    """The wait status in words."""
    if ending is None:
        return say("exit status: unknown (from a log only)")
    return say("exit status: {how}", how=str(ending))


def ctrl_c_summary(evidence: Evidence) -> str:
    """What to say in short of Ctrl-C at the terminal; empty where it was not that."""
    return say("stopped with Ctrl-C in this terminal.") if evidence.keyboard else ""


def level_line(what: str, level: Level) -> str:
    """How full something was."""
    return say(
        "{what}: {used} of {size} ({share:.0%})",
        what=what, used=format_size(level.used), size=format_size(level.size), share=level.share,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs that count."""

    counting: tuple[Sign, ...]
    decisive: Sign | None  # the exception that ended it, when that is no echo
    mute: bool  # ended by a signal that says nothing about texts
    origin: Sign | None = None  # the exception before the echo, where an echo ended it
    handled: Sign | None = None  # a shortage right above the decisive exception, which may have led to it

    @classmethod
    def of(cls, evidence: Evidence) -> Signs:
        """Those of that evidence."""
        log, ending = evidence.log, evidence.ending
        near = tuple(sign for sign in log.signs if sign.number <= WINDOW)
        if ending is not None and ending.signal in _MUTE:
            return cls(near, None, mute=True)
        last = log.last_error
        if last is None or _echo(last) or (ending is not None and ending.signal is not None):
            return cls._of_echo(log)
        if _died_later(log, last) or (
            not evidence.live and last.code not in SHORTAGES and _survived(log, last)
        ):
            return cls._of_echo(log)  # it was printed, and the program went on
        reach = log.chain_from or last.number
        counting = tuple(sign for sign in log.signs if sign.number <= reach)
        return cls(counting, last, mute=False, handled=_right_above(log, reach))

    @classmethod
    def _of_echo(cls, log: LogFacts) -> Signs:
        own = [error for error in log.errors if not _echo(error) and not _survived(log, error)]
        reach = max([WINDOW, *(error.number + WINDOW for error in own)])
        counting = tuple(sign for sign in log.signs if sign.number <= reach and not _survived(log, sign))
        return cls(counting, None, mute=False, origin=own[-1] if own else None)

    def first(self, *codes: str) -> Sign | None:
        """The first counting line with one of these codes; what a program wrote first is nearest to the cause."""
        return next((sign for sign in self.counting if sign.code in codes), None)

    def text(self, *codes: str) -> Sign | None:
        """The same, where texts say anything about this ending."""
        return None if self.mute else self.first(*codes)


def context(evidence: Evidence, sign: Sign, *codes: str) -> Sign | None:
    """A line near that sign with one of these codes: it is no cause, but tells whose words they are."""
    near = (one for one in evidence.log.signs if one.code in codes)
    return next((one for one in near if abs(one.number - sign.number) <= _CONTEXT), None)


def _echo(error: Sign) -> bool:
    return bool(CONSEQUENCE.search(error.line) or _PATIENCE.search(error.line))


def _steps_after(log: LogFacts, sign: Sign) -> int:
    return sum(number < sign.number for number in log.progress)


def _survived(log: LogFacts, sign: Sign) -> bool:
    """Whether the program went on after that line."""
    return _died_later(log, sign) or _steps_after(log, sign) >= _WENT_ON


def _died_later(log: LogFacts, sign: Sign) -> bool:
    """Whether the program went on and a later line reports a death of another kind; then few steps show it."""
    if sign.code in _DEATHS:
        return False
    death = next((one.number for one in reversed(log.signs) if one.code in _DEATHS), None)
    return (
        death is not None and sum(death < number < sign.number for number in log.progress) >= _BEFORE_A_DEATH
    )


def _right_above(log: LogFacts, reach: int) -> Sign | None:
    above = [
        sign
        for sign in log.signs
        if reach < sign.number <= reach + _RIGHT_ABOVE and sign.code in SHORTAGES
        if not any(reach <= number < sign.number for number in log.progress)
    ]
    return above[-1] if above else None
