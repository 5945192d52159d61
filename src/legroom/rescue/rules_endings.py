"""Rules on how it ended, when nothing says why. Pure.

Covers: workers and children that somebody killed, signals from outside, crashes, statuses, exceptions.
Does not cover: anything that points to memory; those rules came before.
"""

from __future__ import annotations

from legroom.model.death import Evidence
from legroom.rescue.because import Because, by_keyboard, ended, quoted, signal_name
from legroom.rescue.log_signs import Signs
from legroom.words import say

_KILL = 9
_FROM_OUTSIDE = frozenset({1, 2, 3, 9, 15, 24, 25})  # HUP, INT, QUIT, KILL, TERM, XCPU, XFSZ
_SHELL = 128


def worker(evidence: Evidence, signs: Signs) -> Because | None:
    """A loader's worker was killed, and no counter says that it was for memory."""
    sign = signs.text("worker-killed")
    if sign is None:
        return None
    lines = [quoted(sign), _counter_line(evidence)]
    sure = 0.93 if _counted_none(evidence) else 0.6
    return Because("worker-killed", sure, (*lines, ended(evidence.ending)))


def crashed_worker(evidence: Evidence, signs: Signs) -> Because | None:
    """A worker crashed by itself."""
    sign = signs.text("worker-crash", "crash")
    if sign is None:
        return None
    # A watchdog's abort may have been right about something that a log does not show, such as swap.
    sure = 0.5 if not evidence.live and signs.first("timeout") else 0.85
    return Because("not-memory", sure, (quoted(sign), ended(evidence.ending)))


def child(evidence: Evidence, signs: Signs) -> Because | None:
    """A shell, a launcher or the program itself says that a child was killed."""
    codes = ("child-killed",) if signs.decisive else ("child-killed", "killed", "terminated")
    sign = signs.text(*codes)
    if sign is None:
        return None
    sure = 0.9 if _counted_none(evidence) else 0.5
    return Because("killed", sure, (quoted(sign), _counter_line(evidence), ended(evidence.ending)))


def outside(evidence: Evidence, signs: Signs) -> Because | None:
    """A signal that somebody sent."""
    ending = evidence.ending
    if ending is None or ending.signal not in _FROM_OUTSIDE:
        return None
    lines = [ended(ending)]
    sure = 0.9
    if ending.signal == _KILL:
        lines.append(_counter_line(evidence))
        sure = 0.93 if _counted_none(evidence) else 0.5
    return Because("killed", sure, tuple(lines), summary=by_keyboard(evidence))


def interrupted(evidence: Evidence, signs: Signs) -> Because | None:
    """Ctrl-C, as Python tells it."""
    last = evidence.log.last_error
    if last is None or "KeyboardInterrupt" not in last.line:
        return None
    return Because("killed", 0.9, (quoted(last), ended(evidence.ending)), summary=by_keyboard(evidence))


def crashed(evidence: Evidence, signs: Signs) -> Because | None:
    """A signal that the program brought upon itself."""
    ending = evidence.ending
    if ending is None or ending.signal is None:
        return None
    name = signal_name(ending.signal)
    return Because("not-memory", 0.9, (ended(ending), say("{name} is a fault of the program", name=name)))


def exception(evidence: Evidence, signs: Signs) -> Because | None:
    """An exception that says nothing of memory."""
    last = signs.decisive or evidence.log.last_error
    if last is None:
        return None
    return Because("not-memory", 0.93, (quoted(last), ended(evidence.ending)))


def unexplained(evidence: Evidence, signs: Signs) -> Because:
    """Nothing points to memory."""
    lines = [ended(evidence.ending)]
    status = evidence.ending.status if evidence.ending else None
    if status is not None and status > _SHELL:
        lines.append(
            say("nothing shows that a signal came: a program may end with {status} by itself", status=status)
        )
    if evidence.live:
        lines.append(_counter_line(evidence))
    if evidence.log.lines:
        lines.append(say("no line of the last {count} of the log speaks of memory", count=evidence.log.lines))
    if evidence.live:
        return Because("not-memory", 0.75, tuple(lines))
    # Who is killed for memory writes nothing: a log without a word about it is no sign of anything.
    if not evidence.log.lines:
        return Because("not-memory", 0.1, (say("the log is empty"), *lines), summary=_silence(), told=False)
    return Because("not-memory", 0.4, tuple(lines), summary=_silence(), told=False)


def _silence() -> str:
    return say(
        "nothing in the log tells what ended it. Who is killed for memory writes nothing: it is not ruled out."
    )


def _counted_none(evidence: Evidence) -> bool:
    """Whether it is known that no OOM kill took a process of the job."""
    count = evidence.oom
    return count is not None and not count.of_job and not count.unattributed


def _counter_line(evidence: Evidence) -> str:
    count = evidence.oom
    if count is None:
        return say("no OOM counter could be read: SIGKILL alone proves nothing")
    if count.kills == 0:
        return say("oom_kill did not rise ({source}): not the OOM killer", source=count.source)
    if _counted_none(evidence):
        return say(
            "oom_kill rose by {kills} ({source}), for processes that are not of this job",
            kills=count.others, source=count.source,
        )  # fmt: skip
    return say("oom_kill rose by {kills} ({source})", kills=count.kills, source=count.source)
