"""Rules on how it ended, when nothing says why. Pure.

Covers: workers and children that somebody killed, signals from outside, crashes, statuses, exceptions.
Does not cover: anything that points to memory; those rules came before.
"""

from __future__ import annotations

import re

from legroom.model.death import Cause, Evidence, Sign
from legroom.rescue.because import Because, by_keyboard, ended, quoted, unknown
from legroom.rescue.log_signs import Signs, context
from legroom.system.child_processes import signal_name
from legroom.words import say

_KILL = 9
_FROM_OUTSIDE = frozenset({1, 2, 3, 9, 15, 24, 25})  # HUP, INT, QUIT, KILL, TERM, XCPU, XFSZ
_SHELL = 128
# Exceptions that only the program's own code leads to.
_OF_THE_PROGRAM = re.compile(
    r"\b(?:Key|Index|Name|UnboundLocal|Import|ModuleNotFound|Syntax|Indentation|ZeroDivision|NotImplemented|Recursion)Error\b"
)
# A socket whose process has gone away, when the line names no file.
_PEER_GONE = re.compile(r"FileNotFoundError: \[Errno 2\] [^:]*$|Connection\w*Error|OSError: handle is closed")
_OF_MEMORY = re.compile(r"(?i:\bmemory|\ballocat|\boom\b|\bshm\b|no space|resources?\b)")
_SHORT_OF: dict[str, Cause] = {
    "gpu-oom": "gpu-oom", "gpu-likely": "gpu-oom", "cuda-oom-bare": "gpu-oom", "device-oom": "gpu-oom",
    "oom-handled": "gpu-oom", "pinned": "pinned-exhausted", "fds": "fds-exhausted", "fds-likely": "fds-exhausted",
    "shm": "shm-full",
    "shm-likely": "shm-full", "worker-bus": "shm-full", "disk": "disk-full", "disk-quota": "disk-full",
    "disk-write": "disk-full", "map-count": "map-count", "mmap-refused": "map-count",
    "processes": "processes-exhausted",
    "oom-kill": "ram-oom-kill", "oom-daemon": "ram-oom-kill",
}  # fmt: skip


def worker(evidence: Evidence, signs: Signs) -> Because | None:
    """A loader's worker was killed, and no counter says that it was for memory."""
    sign = signs.text("worker-killed")
    if sign is None:
        return None
    lines = (quoted(sign), _counter_line(evidence), ended(evidence.ending))
    if not _counted_none(evidence):
        if "Terminated" in sign.line:  # the OOM killer sends SIGKILL
            return unknown(lines, "worker-killed", "killed", "ram-oom-kill")
        return unknown(lines, "ram-oom-kill", "worker-killed", "killed")
    return Because("worker-killed", 0.93, lines)


def crashed_worker(evidence: Evidence, signs: Signs) -> Because | None:
    """A process crashed by itself, as another or a shell saw it."""
    sign = signs.text("worker-crash", "crash", "abort")
    if sign is None or _before(signs.text("child-killed"), sign):
        return None
    lines = (quoted(sign), ended(evidence.ending))
    summary = say("a process crashed in native code; nothing shows that a pool ran out.")
    # A watchdog's abort may have been right about something that a log does not show, such as swap.
    if not evidence.live and signs.first("timeout"):
        return unknown(lines, "not-memory", "ram-oom-kill", "swap-thrash")
    if sign.code == "abort":
        if not evidence.live and not signs.origin and not signs.decisive:
            return unknown(lines, "not-memory", "ram-allocation")
        return Because("not-memory", 0.7, lines, summary)
    return Because("not-memory", 0.85 if evidence.live else 0.75, lines, summary)


def ended_by(evidence: Evidence, signs: Signs) -> Because | None:
    """A scheduler, a closed terminal or another user ended it, and the log says so."""
    sign = signs.text("ended-by")
    if sign is None:
        return None
    return Because("killed", 0.85, (quoted(sign), ended(evidence.ending)))


def child(evidence: Evidence, signs: Signs) -> Because | None:
    """A shell, a launcher or the program itself reports that a process was killed."""
    sign = signs.text("child-killed", "killed", "worker-gone", "terminated") or signs.text("oom-guess")
    if sign is None or (signs.decisive and not _leads_to(sign, signs.decisive)):
        return None
    lines = (quoted(sign), _counter_line(evidence), ended(evidence.ending))
    named = "SIGKILL" in sign.line and _counted_none(
        evidence
    )  # the signal is named, and no OOM kill was counted
    if sign.code in ("worker-gone", "oom-guess") and not named:
        if signs.origin is not None:
            return None  # what that process said itself
        return unknown(
            lines, "ram-oom-kill", "worker-killed" if "oader" in sign.line else "killed", "not-memory"
        )
    if _counted_none(evidence):
        return Because("killed", 0.9, lines)
    if sign.code == "terminated":
        return Because("killed", 0.6, lines, likely=("killed", "ram-oom-kill"))
    return unknown(lines, "ram-oom-kill", "killed")


def outside(evidence: Evidence, signs: Signs) -> Because | None:
    """A signal that somebody sent."""
    ending = evidence.ending
    if ending is None or ending.signal not in _FROM_OUTSIDE:
        return None
    lines = [ended(ending)]
    sure = 0.9
    if ending.signal == _KILL:
        lines.append(_counter_line(evidence))
        if not _counted_none(evidence):
            return unknown(tuple(lines), "ram-oom-kill", "killed")
        sure = 0.93
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
    """An exception of another kind."""
    last = signs.decisive or signs.origin
    if last is None:
        return None
    lines = (quoted(last), ended(evidence.ending))
    if signs.handled is not None:
        cause = _SHORT_OF.get(signs.handled.code, "ram-allocation")
        summary = say("memory ran out, the program handled it, and another error came right after.")
        return unknown((quoted(signs.handled), *lines), cause, "not-memory", summary=summary)
    if last.code in ("oom-words", "oom-guess", "oom-handled", "gone") or _OF_MEMORY.search(last.line):
        return unknown(lines, "gpu-oom", "ram-allocation", "not-memory")
    if _PEER_GONE.search(last.line) and context(evidence, last, "frame-peer"):
        summary = say(
            "the process at the other end of a connection was gone: why it ended does not show here."
        )
        return unknown(lines, "ram-oom-kill", "worker-killed", "not-memory", summary=summary)
    if signs.decisive is None:
        return Because("not-memory", 0.7, lines)
    if evidence.live:
        return Because("not-memory", 0.93, lines)
    return Because("not-memory", 0.85 if _OF_THE_PROGRAM.search(last.line) else 0.75, lines)


def unexplained(evidence: Evidence, signs: Signs) -> Because:
    """Nothing names a cause."""
    lines = [ended(evidence.ending)]
    status = evidence.ending.status if evidence.ending else None
    if status is not None and status > _SHELL:
        lines.append(
            say("nothing shows that a signal came: a program may end with {status} by itself", status=status)
        )
    if evidence.live:
        lines.append(_counter_line(evidence))
    if evidence.log.lines:
        lines.append(say("no line of the last {count} of the log names a cause", count=evidence.log.lines))
    if evidence.live and _counted_none(evidence):
        summary = say(
            "it ended with a status of its own; no counter rose and no line names a pool that ran out."
        )
        return Because("not-memory", 0.75, tuple(lines), summary)
    if evidence.log.last_error is not None:
        lines.insert(0, quoted(evidence.log.last_error))
    if "timeout" in {sign.code for sign in signs.counting} or _waited(evidence):
        return unknown(tuple(lines), "not-memory", "ram-oom-kill", "swap-thrash")
    if pin := signs.first("pin-thread", "gone"):
        if "in memory" in pin.line or pin.code == "pin-thread":
            return unknown((quoted(pin), *lines), "not-memory", "pinned-exhausted")
        return unknown((quoted(pin), *lines), "ram-oom-kill", "not-memory", "killed")
    if words := signs.first("oom-words", "oom-handled"):
        return unknown((quoted(words), *lines), "gpu-oom", "ram-allocation", "ram-oom-kill")
    if not evidence.log.lines and not evidence.live:
        lines.insert(0, say("the log is empty"))
    return unknown(tuple(lines), "ram-oom-kill", "killed", "not-memory")


def _leads_to(sign: Sign, error: Sign) -> bool:
    """Whether the exception itself, or what stands above it in its tracebacks, reports the child's death."""
    return sign.number == error.number or (sign.code == "child-killed" and sign.number > error.number)


def _waited(evidence: Evidence) -> bool:
    last = evidence.log.last_error
    return last is not None and "imed out" in last.line


def _before(first: Sign | None, second: Sign) -> bool:
    return first is not None and first.number > second.number


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
