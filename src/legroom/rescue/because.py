"""What a rule says: a cause, how sure, and the lines it rests on. Covers: that and how lines are worded.

Does not cover: any rule (rules_*.py).
"""

from __future__ import annotations

from typing import NamedTuple

from legroom.model.death import Cause, Evidence, Level, Sign, Verdict
from legroom.system.child_processes import ExitStatus
from legroom.units import format_size
from legroom.words import say

UNKNOWN = 0.1  # the confidence of `unknown`: no cause is established
_SHOWN = 200  # characters of a log's line
_COMMAND = 60  # and of a command line


class Because(NamedTuple):
    """A rule's answer."""

    cause: Cause
    confidence: float
    lines: tuple[str, ...]
    summary: str = ""  # where what is usually said of the cause would not be right
    likely: tuple[Cause, ...] = ()  # what it could be, in order; always given for `unknown`


def unknown(lines: tuple[str, ...], *likely: Cause, summary: str = "") -> Because:
    """No cause is established; it could be one of these, the most likely first."""
    return Because("unknown", UNKNOWN, lines, summary, likely)


def headline(verdict: Verdict) -> str:
    """The verdict's code and how sure it is."""
    if verdict.cause == "unknown":
        return verdict.cause
    return say("{cause}, {sure:.0%} sure", cause=verdict.cause, sure=verdict.confidence)


def quoted(sign: Sign) -> str:
    """A line of the log as evidence: its beginning, or the part with the words that count."""
    line = sign.line
    if sign.at > _SHOWN // 2 and len(line) > _SHOWN:
        line = "…" + line[sign.at - _SHOWN // 4 :]
    return say("log, line {number} from the end: {line}", number=sign.number, line=line[:_SHOWN])


def shortened(command: str) -> str:
    """The beginning of a command line, which says what it is."""
    return command if len(command) <= _COMMAND else command[: _COMMAND - 1].rstrip() + "…"


def ended(ending: ExitStatus | None) -> str:
    """The wait status in words."""
    if ending is None:
        return say("wait status: not known from a log")
    return say("wait status: {how}", how=str(ending))


def by_keyboard(evidence: Evidence) -> str:
    """What to say in short of Ctrl-C at the terminal; empty where it was not that."""
    return say("it was stopped from the keyboard of this terminal (Ctrl-C).") if evidence.keyboard else ""


def level_line(what: str, level: Level) -> str:
    """How full something was."""
    return say(
        "{what}: {used} of {size} ({share:.0%})",
        what=what, used=format_size(level.used), size=format_size(level.size), share=level.share,
    )  # fmt: skip
