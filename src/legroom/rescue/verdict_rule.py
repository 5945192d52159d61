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

from legroom.records.failure import Cause, Evidence, Level, LogFacts, Sign, Verdict
from legroom.rescue.log_patterns import CONSEQUENCE, SHORTAGES
from legroom.system.child_processes import ExitStatus
from legroom.units import format_size
from legroom.words import say

UNKNOWN = 0.1  # the confidence of `unknown`
_SHOWN = 200  # characters shown of a log line
_COMMAND = 60  # and of a command line
WINDOW = 400  # lines from the end in which a message without an exception counts
_WENT_ON = 10  # steps reported after a message: the program survived it
_BEFORE_A_DEATH = 3  # the same, if a later line reports another kind of exit
_DEATHS = frozenset(
    {"killed", "child-killed", "crash", "bus", "worker-bus", "ended-by", "oom-kill", "oom-daemon"}
)
_CONTEXT = 40  # lines between an error and a frame or device name that belongs to it
_RIGHT_ABOVE = 30  # lines between a handled shortage and an exception that it may have caused
_SIGNALS_WITHOUT_MESSAGES = frozenset(
    {2, 4, 8, 9, 11, 15}
)  # INT, ILL, FPE, KILL, SEGV, TERM: no failed allocation ends with these
_TIMEOUT = re.compile(r"[Tt]ime(?:d )?-?out|TimeoutE|Pin memory thread exited|KeyboardInterrupt")


class RuleResult(NamedTuple):
    """A cause, how sure, and the lines it is based on."""

    cause: Cause
    confidence: float
    lines: tuple[str, ...]
    summary: str = ""  # if the cause's usual summary does not apply
    likely: tuple[Cause, ...] = ()  # candidates, most likely first; always given for `unknown`


def unknown(lines: tuple[str, ...], *likely: Cause, summary: str = "") -> RuleResult:
    """The result without a proven cause, with the candidates, most likely first."""
    return RuleResult("unknown", UNKNOWN, lines, summary, likely)


def headline(verdict: Verdict) -> str:
    """The verdict's code and confidence."""
    if verdict.cause == "unknown":
        return verdict.cause
    return say("{cause}, {sure:.0%} sure", cause=verdict.cause, sure=verdict.confidence)


def quoted_line(sign: Sign) -> str:
    """A log line as evidence: its beginning, or the part around the match."""
    line = sign.line
    if sign.at > _SHOWN // 2 and len(line) > _SHOWN:
        line = "…" + line[sign.at - _SHOWN // 4 :]
    return say("log, line {number} from the end: {line}", number=sign.number, line=line[:_SHOWN])


def shortened_command(command: str) -> str:
    """The beginning of a command line."""
    return command if len(command) <= _COMMAND else command[: _COMMAND - 1].rstrip() + "…"


def exit_line(ending: ExitStatus | None) -> str:
    """The exit status as evidence."""
    if ending is None:
        return say("exit status: unknown (from a log only)")
    return say("exit status: {how}", how=str(ending))


def ctrl_c_summary(evidence: Evidence) -> str:
    """The summary for Ctrl-C; empty if it was not Ctrl-C."""
    return say("stopped with Ctrl-C in this terminal.") if evidence.keyboard else ""


def level_line(what: str, level: Level) -> str:
    """How full something was."""
    return say(
        "{what}: {used} of {size} ({share:.0%})",
        what=what, used=format_size(level.used), size=format_size(level.size), share=level.share,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signs:
    """The log messages that count."""

    counting: tuple[Sign, ...]
    decisive: Sign | None  # the exception that ended the program, if it is not a consequence
    ignores_messages: bool  # ended by a signal that no failed allocation causes
    origin: Sign | None = None  # the exception before the consequence, if a consequence ended it
    handled: Sign | None = None  # a shortage right above the decisive exception, a possible cause of it

    @classmethod
    def of(cls, evidence: Evidence) -> Signs:
        """The messages that count in that evidence."""
        log, ending = evidence.log, evidence.ending
        near = tuple(sign for sign in log.signs if sign.number <= WINDOW)
        if ending is not None and ending.signal in _SIGNALS_WITHOUT_MESSAGES:
            return cls(near, None, ignores_messages=True)
        last = log.last_error
        if last is None or _is_consequence(last) or (ending is not None and ending.signal is not None):
            return cls._of_consequence(log)
        if _died_later(log, last) or (
            not evidence.live and last.code not in SHORTAGES and _survived(log, last)
        ):
            return cls._of_consequence(log)  # it was printed and the program continued
        reach = log.chain_from or last.number
        counting = tuple(sign for sign in log.signs if sign.number <= reach)
        return cls(counting, last, ignores_messages=False, handled=_right_above(log, reach))

    @classmethod
    def _of_consequence(cls, log: LogFacts) -> Signs:
        own = [error for error in log.errors if not _is_consequence(error) and not _survived(log, error)]
        reach = max([WINDOW, *(error.number + WINDOW for error in own)])
        counting = tuple(sign for sign in log.signs if sign.number <= reach and not _survived(log, sign))
        return cls(counting, None, ignores_messages=False, origin=own[-1] if own else None)

    def first(self, *codes: str) -> Sign | None:
        """The first line that counts with one of these codes: the earliest is nearest to the cause."""
        return next((sign for sign in self.counting if sign.code in codes), None)

    def text(self, *codes: str) -> Sign | None:
        """The same; None if messages are ignored for this signal."""
        return None if self.ignores_messages else self.first(*codes)


def context(evidence: Evidence, sign: Sign, *codes: str) -> Sign | None:
    """A line near that message with one of these codes, which shows where it comes from."""
    near = (one for one in evidence.log.signs if one.code in codes)
    return next((one for one in near if abs(one.number - sign.number) <= _CONTEXT), None)


def _is_consequence(error: Sign) -> bool:
    return bool(CONSEQUENCE.search(error.line) or _TIMEOUT.search(error.line))


def _steps_after(log: LogFacts, sign: Sign) -> int:
    return sum(number < sign.number for number in log.progress)


def _survived(log: LogFacts, sign: Sign) -> bool:
    """Whether the program continued after that line."""
    return _died_later(log, sign) or _steps_after(log, sign) >= _WENT_ON


def _died_later(log: LogFacts, sign: Sign) -> bool:
    """Whether the program continued and a later line reports another kind of exit; a few steps suffice."""
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
