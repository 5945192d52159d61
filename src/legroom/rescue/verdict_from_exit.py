"""Verdict rules on how the process ended: OOM kills, swap thrashing, signals, crashes, exit statuses. Pure.

The first half uses kernel counters and logs of OOM daemons and schedulers, and runs before the rules on messages
(verdict_from_log.py). The second half runs after them, when no memory pool is named.
"""

from __future__ import annotations

import re
from dataclasses import replace

from legroom.messages import listed, say
from legroom.records.failure import (
    Cause,
    Evidence,
    OomCount,
    RuleResult,
    Sign,
    Verdict,
    Victim,
    exit_line,
    level_line,
    unknown,
)
from legroom.rescue.failure_message_patterns import CONSEQUENCE
from legroom.rescue.find_failures_in_log import BEFORE_A_DEATH, OWN, Signs, context, killed_in, quoted_line, steps_after
from legroom.rescue.log_lines_without_failure import without_quotations
from legroom.system.processes_and_threads import signal_name
from legroom.units import format_duration, format_size

_SIGINT, _SIGABRT, _SIGKILL, _SIGPIPE, _SIGTERM = 2, 6, 9, 13, 15
_CRASHES = (4, 6, 8, 11)  # ILL, ABRT, FPE, SEGV
_OWN_FAULTS = (*_CRASHES, 5, 7, 31)  # TRAP, BUS, SYS
_AT_THE_END = 5.0  # seconds: an OOM kill and a SIGKILL this close are the same event
_THRASH = 1 << 20  # bytes per second swapped in, if PSI also shows stalls
_THRASH_ALONE = 8 << 20  # if PSI is not available
_SOME_SWAP = 64 << 10  # below, swap is idle
_STALLED = 10.0  # percent of the time with all tasks stalled on memory
_FULL = 0.97
_MOST_VICTIMS, _MOST_BESIDE = 3, 3  # named in the evidence
_ENDS_A_STALL = frozenset({1, 2, 6, 9, 14, 15})  # sent by watchdogs, schedulers and people
_FROM_OUTSIDE = frozenset({1, 2, 3, 9, 15, 24, 25})  # HUP, INT, QUIT, KILL, TERM, XCPU, XFSZ
_SHELL = 128
# Exceptions that come only from the program's own code.
_OF_THE_PROGRAM = re.compile(
    r"\b(?:Key|Index|Name|UnboundLocal|Import|ModuleNotFound|Syntax|Indentation|ZeroDivision|NotImplemented|Recursion)Error\b"
)
# A socket whose process has exited, if the line names no file.
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


def stop_requested(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """legroom run was asked to stop."""
    if evidence.asked_to_stop is None:
        return None
    name = signal_name(evidence.asked_to_stop)
    line = say("legroom received {name} and passed it on", name=name)
    summary = ctrl_c_summary(evidence)
    if not summary and evidence.asked_to_stop == _SIGINT:
        summary = say("the job was stopped by SIGINT (Ctrl-C).")
    return RuleResult("killed", 1.0, (line,), summary=summary or say("the job was stopped by {name}.", name=name))


def stalled_on_shm(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """The job hung on a full /dev/shm until the supervisor stopped it."""
    if evidence.stalled_on != "shm":
        return None
    lines = [say("the job used no CPU and printed nothing after an allocation in /dev/shm failed: the DataLoader hung")]
    if sign := signs.first("shm"):
        lines.append(quoted_line(sign))
    if evidence.held_shm is not None:
        lines.append(say("the job used {size} of /dev/shm", size=format_size(evidence.held_shm)))
    peak = evidence.peaks.get("shm")
    if peak is not None:
        lines.append(level_line(say("/dev/shm peak"), peak))
    return RuleResult("shm-full", 0.95, tuple(lines))


def oom_behind_success(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """Exit code 0, but one of its processes was OOM-killed: a pipe, `wait` or a handler hid it."""
    if evidence.ending is None or not evidence.ending.success or evidence.stalled_on is not None:
        return None
    if not (kills := _job_kill_lines(evidence)):
        return None
    summary = say(
        "the command exited with 0, but the OOM killer killed one of its processes. A pipe (`| tee`) or "
        "`wait` hides the status; `set -o pipefail` shows it."
    )
    return RuleResult("ram-oom-kill", 0.9, (*kills, *_ram_peak_lines(evidence)), summary=summary)


def oom_killed(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """The kernel's OOM killer killed a process of the job, and that ended the job.

    How long before the end does not matter: a rank waits for a dead one until its timeout, 10 to 30 minutes. What
    matters is whether the job continued.
    """
    lines = _job_kill_lines(evidence)
    if not lines:
        return None
    count = evidence.oom
    gap = (count.before_end if count is not None else None) or 0.0
    ending = evidence.ending
    if _killed(evidence):
        sure = 0.99 if gap <= _AT_THE_END else 0.6  # much later: SIGKILL may have come from elsewhere
    elif sign := signs.first("worker-killed", "worker-gone", "child-killed", "killed"):
        sure = 0.97
        lines.append(quoted_line(sign))
    elif _is_consequence(evidence) or _ended_in_timeout(evidence):
        sure = 0.95
    elif signs.text("gpu-oom", "gpu-likely", "cuda-oom-bare", "shm", "fds", "disk", "disk-quota", "pinned"):
        return None  # the program reports another cause and survived the kill
    elif count is not None and count.went_on:
        return None
    elif ending is not None and ending.signal in _ENDS_A_STALL and gap > _AT_THE_END:
        sure = 0.6  # a time limit ends a job that waits for the dead process, and also any other job
    else:
        sure = 0.85
    if count is not None and not count.own and not evidence.kernel:
        sure = min(sure, 0.9)
    return RuleResult("ram-oom-kill", sure, (*lines, *_ram_peak_lines(evidence)))


def oom_lines(evidence: Evidence) -> list[str]:
    """Evidence of OOM kills during the run, for any verdict."""
    count = evidence.oom
    lines = _job_kill_lines(evidence)
    if lines and count is not None and count.before_end is not None:
        lines.append(say("that was {ago} before the end", ago=format_duration(count.before_end)))
    if count is not None and count.unattributed:
        lines.append(_unattributed(count))
    return lines


def _job_kill_lines(evidence: Evidence) -> list[str]:
    """Evidence of OOM kills of the job's own processes; empty if there is none."""
    count, kernel = evidence.oom, evidence.kernel or ()
    lines: list[str] = []
    if count is not None and count.of_job:
        if count.own or kernel:
            rose = say("oom_kill rose by {kills} during the run ({source})", kills=count.kills, source=count.source)
        else:
            rose = say(
                "oom_kill of the whole container rose by {kills} while the job lost a process ({source})",
                kills=count.of_job, source=count.source,
            )  # fmt: skip
        lines.append(rose)
        size = _ram_size(evidence)
        lines += [_victim(victim, size) for victim in count.victims[:_MOST_VICTIMS]]
        if count.beside and count.victims:
            others = listed(say("{name}: {size}", name=process_name(one), size=format_size(one.rss or 0))
                            for one in count.beside[:_MOST_BESIDE])  # fmt: skip
            lines.append(say("other processes of the job at that time: {others}", others=others))
    named = {victim.pid for victim in count.victims} if count is not None and count.of_job else set()
    # The kernel's lines are long: show only the killed process and its RSS.
    unnamed = {pid: rss for pid, rss in killed_in(kernel).items() if pid not in named}
    for pid, rss in list(unnamed.items())[:_MOST_VICTIMS]:
        if rss is None:
            lines.append(say("kernel log: killed process {pid}", pid=pid))
        else:
            used = format_size(rss)
            lines.append(say("kernel log: killed process {pid}, which used {size}", pid=pid, size=used))
    if kernel and not unnamed:
        lines.append(say("the kernel log names it too"))
    return lines


def process_name(victim: Victim) -> str:
    """``rank 1, pid 7770 (python train.py)``."""
    words = {"pid": victim.pid, "command": shortened_command(victim.command), "rank": victim.rank}
    if victim.rank is not None:
        return say("rank {rank}, pid {pid} ({command})", **words)
    return say("pid {pid} ({command})", **words)


def _victim(victim: Victim, size: int | None) -> str:
    who = process_name(victim)
    if victim.rss is None:
        return say("killed: {who}", who=who)
    held = format_size(victim.rss)
    if size is None:
        return say("killed: {who}, which used {held}", who=who, held=held)
    return say("killed: {who}, which used {held} of {size}", who=who, held=held, size=format_size(size))


def _ram_size(evidence: Evidence) -> int | None:
    level = evidence.ram_peak or evidence.peaks.get("ram")
    return None if level is None else level.size


def _unattributed(count: OomCount) -> str:
    return say(
        "oom_kill rose by {kills} ({source}), but other processes share this counter: which process was "
"killed is unknown",
        kills=count.unattributed, source=count.source,
    )  # fmt: skip


def _ram_peak_lines(evidence: Evidence) -> list[str]:
    """The RAM peak: the kernel's own if there is one, otherwise from the samples, with the age of the last."""
    if evidence.ram_peak is not None:
        return [level_line(say("RAM peak of its cgroup, recorded by the kernel"), evidence.ram_peak)]
    seen = evidence.peaks.get("ram")
    if seen is None:
        return []
    line = level_line(say("RAM peak of its cgroup"), seen)
    if evidence.ram_unseen is None or seen.share >= _FULL:
        return [line]
    ago = format_duration(evidence.ram_unseen)
    return [say("{line}; last read {ago} before the end", line=line, ago=ago)]


def oom_daemon(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """systemd-oomd, earlyoom or a kubelet killed it: to the kernel that is a plain signal."""
    if not evidence.killers:
        return None
    if not (_killed(evidence) or (evidence.ending and evidence.ending.signal == _SIGTERM) or _is_consequence(evidence)):
        return None
    return RuleResult("ram-oom-kill", 0.93, evidence.killers[:3])


def oom_shared(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """SIGKILL came while a shared OOM counter rose for an unknown process, or while RAM was nearly full."""
    lost = signs.first("worker-killed", "worker-gone", "child-killed", "killed")
    if not (_killed(evidence) or lost):
        return None
    count = evidence.oom
    lines = (quoted_line(lost),) if lost else ()
    if count is not None and count.unattributed:
        if (count.before_end or 0.0) > _AT_THE_END and _killed(evidence):
            return None
        return RuleResult("ram-oom-kill", 0.65, (_unattributed(count), *lines))
    peak = evidence.peaks.get("ram")
    if count is None and peak is not None and peak.share >= _FULL:
        full = level_line(say("RAM just before the end"), peak)
        return RuleResult("ram-oom-kill", 0.65, (full, *lines))
    return None


def oom_in_log(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """The log contains an OOM kill report of a kernel, a scheduler or a daemon."""
    sign = signs.first("oom-kill", "oom-daemon")
    if sign is None:
        return None
    lines, sure = [quoted_line(sign)], 0.95 if sign.code == "oom-kill" else 0.9
    count = evidence.oom
    if sign.code == "oom-kill" and count is not None and _counted_none(evidence):
        # From another or an earlier job, unless the job ran elsewhere, under a scheduler's launcher.
        lines.append(say("oom_kill shows no kill in this job ({source})", source=count.source))
        if sign.said:
            return unknown(tuple(lines), "not-memory", "ram-oom-kill")
        sure = 0.6
    if not evidence.live and signs.decisive is not None and signs.decisive not in signs.counting:
        # The program ended with another error. One of its own code is no consequence of a kill.
        if OWN.match(signs.decisive.code):
            lines.insert(0, quoted_line(signs.decisive))
            return RuleResult("not-memory", 0.6, tuple(lines), likely=("not-memory", "ram-oom-kill"))
        return RuleResult("ram-oom-kill", 0.6, tuple(lines), likely=("ram-oom-kill", "not-memory"))
    if not evidence.live and steps_after(evidence.log, sign) >= BEFORE_A_DEATH:
        # The job ran on: the process may have been another one.
        return RuleResult("ram-oom-kill", 0.6, tuple(lines), likely=("ram-oom-kill", "killed", "not-memory"))
    return RuleResult("ram-oom-kill", sure, tuple(lines))


def swapping(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """The job only swapped until a timeout or a signal ended it."""
    timeout = signs.first("timeout")
    signal = evidence.ending.signal if evidence.ending else None
    if not (timeout or _is_consequence(evidence) or signal in _ENDS_A_STALL or _killed(evidence)):
        return None
    lines: list[str] = []
    if evidence.swapped_back is not None:
        rate = format_size(int(evidence.swapped_back))
        lines.append(say("{rate}/s were swapped in during the last seconds", rate=rate))
    if evidence.stalled is not None:
        lines.append(say("all tasks were stalled on memory {share:.0f}% of the time (PSI)", share=evidence.stalled))
    if timeout:
        lines.append(quoted_line(timeout))
    moved = evidence.swapped_back or 0
    hint = signs.first("swap-hint")
    if moved >= _THRASH and (evidence.stalled or 0) >= _STALLED:
        return RuleResult("swap-thrash", 0.9, tuple(lines))
    if moved >= _THRASH_ALONE:
        return RuleResult("swap-thrash", 0.8, tuple(lines))
    if not evidence.live and timeout and hint:
        return RuleResult("swap-thrash", 0.6, (quoted_line(hint), *lines))
    if moved >= _SOME_SWAP and (timeout or (evidence.ending and evidence.ending.by_signal(_SIGABRT))):
        # A watchdog lost patience while the job swapped. On a slow or busy disk that is all that thrashing moves.
        return unknown(tuple(lines), "swap-thrash", "not-memory")
    return None


def _killed(evidence: Evidence) -> bool:
    """Whether SIGKILL ended it, as seen by its parent or by a shell in between."""
    return evidence.ending is not None and evidence.ending.by_signal(_SIGKILL)


def _ended_in_timeout(evidence: Evidence) -> bool:
    """Whether its last exception is a timeout."""
    last = evidence.log.last_error
    return last is not None and last.code == "timeout"


def _is_consequence(evidence: Evidence) -> bool:
    """Whether its last exception reports another process's exit."""
    last = evidence.log.last_error
    return last is not None and CONSEQUENCE.search(last.line) is not None


def worker_killed(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """A DataLoader worker was killed, and no counter shows an OOM kill."""
    sign = signs.text("worker-killed")
    if sign is None:
        return None
    lines = (quoted_line(sign), _counter_line(evidence))
    if not _counted_none(evidence):
        if "Terminated" in sign.line:  # the OOM killer sends SIGKILL
            return unknown(lines, "worker-killed", "killed", "ram-oom-kill")
        return unknown(lines, "ram-oom-kill", "worker-killed", "killed")
    return RuleResult("worker-killed", 0.93, lines)


def crashed_worker(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """A process crashed, as another process or a shell reports."""
    sign = signs.text("worker-crash", "crash", "abort")
    if sign is None or _before(signs.text("child-killed"), sign):
        return None
    if not evidence.live and _before(signs.decisive or signs.origin, sign):
        return None  # an exception was first
    lines = (quoted_line(sign),)
    summary = say("a process crashed in native code; no sign that a resource ran out.")
    # A watchdog may have aborted for a reason that a log does not show, such as swap.
    if not evidence.live and signs.first("timeout"):
        return unknown(lines, "not-memory", "ram-oom-kill", "swap-thrash")
    if sign.code == "abort":
        if not evidence.live and not signs.origin and not signs.decisive:
            return unknown(lines, "not-memory", "ram-allocation")
        return RuleResult("not-memory", 0.7, lines, summary)
    return RuleResult("not-memory", 0.85 if evidence.live else 0.75, lines, summary)


def ended_by(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """The log shows that a scheduler, a closed terminal or another user ended it."""
    sign = signs.text("ended-by")
    if sign is None:
        return None
    return RuleResult("killed", 0.85, (quoted_line(sign),))


def child_killed(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """A shell, a launcher or the program itself reports that a process was killed."""
    sign = signs.text("child-killed", "killed", "worker-gone", "terminated") or signs.text("oom-guess")
    if sign is None or (signs.decisive and not _leads_to(sign, signs.decisive)):
        return None
    lines = (quoted_line(sign), _counter_line(evidence))
    named = "SIGKILL" in sign.line and _counted_none(evidence)  # SIGKILL is named, and no OOM kill was counted
    if sign.code in ("worker-gone", "oom-guess") and not named:
        if signs.origin is not None:
            return None  # that process reported its own error
        return unknown(lines, "ram-oom-kill", "worker-killed" if "oader" in sign.line else "killed", "not-memory")
    if _counted_none(evidence):
        return RuleResult("killed", 0.9, lines)
    if sign.code == "terminated":
        return RuleResult("killed", 0.6, lines, likely=("killed", "ram-oom-kill"))
    return unknown(lines, "ram-oom-kill", "killed")


def killed_by_signal(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """A signal from another process."""
    ending = evidence.ending
    if ending is None or ending.signal not in _FROM_OUTSIDE:
        return None
    lines = [exit_line(ending)]
    sure = 0.9
    if ending.signal == _SIGKILL:
        here = replace(evidence, elsewhere=None)  # the command's own process
        lines.append(_counter_line(here))
        if not _counted_none(here):
            return unknown(tuple(lines), "ram-oom-kill", "killed")
        sure = 0.93
    return RuleResult("killed", sure, tuple(lines), summary=ctrl_c_summary(evidence))


def interrupted(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """Ctrl-C, reported by Python as KeyboardInterrupt, or by exit status 130 of a job that has the terminal."""
    last = evidence.log.last_error
    if evidence.keyboard and evidence.ending is not None and evidence.ending.by_signal(_SIGINT):
        return RuleResult("killed", 0.9, (exit_line(evidence.ending),), summary=ctrl_c_summary(evidence))
    if last is None or "KeyboardInterrupt" not in last.line:
        return None
    return RuleResult("killed", 0.9, (quoted_line(last),), summary=ctrl_c_summary(evidence))


def by_sigint(evidence: Evidence) -> bool:
    """Whether SIGINT ended it."""
    last = evidence.log.last_error
    if evidence.ending is not None and evidence.ending.by_signal(_SIGINT):
        return True
    return evidence.asked_to_stop == _SIGINT or (last is not None and "KeyboardInterrupt" in last.line)


def crashed_untraced(evidence: Evidence, verdict: Verdict) -> bool:
    """Whether the verdict is on a crash in native code of which Python's faulthandler printed no traceback."""
    signs = [sign for sign in evidence.log.signs if sign.code in ("crash", "worker-crash", "abort")]
    if any("Fatal Python error" in sign.line for sign in signs):
        return False
    ended = evidence.ending is not None and any(evidence.ending.by_signal(number) for number in _CRASHES)
    return ended or any(quoted_line(sign) in verdict.evidence for sign in signs)


def crashed(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """A signal caused by the program itself."""
    ending = evidence.ending
    if ending is None or ending.signal is None:
        return None
    name = signal_name(ending.signal)
    if ending.signal == _SIGPIPE:
        why = say("the program that read its output had ended")
    elif ending.signal in _OWN_FAULTS:
        why = say("{name} means that the program itself crashed", name=name)
    else:
        why = say("{name} says nothing of memory", name=name)
    return RuleResult("not-memory", 0.9, (exit_line(ending), why))


def other_exception(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """Any other exception."""
    last = signs.decisive or signs.origin
    if last is None:
        return None
    lines = (quoted_line(last),)
    if signs.handled is not None:
        cause = _SHORT_OF.get(signs.handled.code, "ram-allocation")
        summary = say("a resource ran out and the program handled it; another error followed right after.")
        return unknown((quoted_line(signs.handled), *lines), cause, "not-memory", summary=summary)
    if last.code in ("oom-words", "oom-guess", "oom-handled", "gone") or _OF_MEMORY.search(
        without_quotations(last.line)
    ):
        return unknown(lines, "gpu-oom", "ram-allocation", "not-memory")
    if _PEER_GONE.search(last.line) and context(evidence, last, "frame-peer"):
        summary = say("the process at the other end of a connection had exited; the log does not show why.")
        return unknown(lines, "ram-oom-kill", "worker-killed", "not-memory", summary=summary)
    if signs.decisive is None:
        return RuleResult("not-memory", 0.7, lines)
    if evidence.live:
        return RuleResult("not-memory", 0.93, lines)
    return RuleResult("not-memory", 0.85 if _OF_THE_PROGRAM.search(last.line) else 0.75, lines)


def unexplained(evidence: Evidence, signs: Signs) -> RuleResult:
    """No cause found."""
    lines = [exit_line(evidence.ending)]
    status = evidence.ending.status if evidence.ending else None
    if status is not None and status > _SHELL:
        lines.append(say("no sign of a signal: a program can exit with {status} by itself", status=status))
    if evidence.live:
        lines.append(_counter_line(evidence))
    if evidence.log.lines:
        lines.append(say("no cause found in the log (lines read: {count})", count=evidence.log.lines))
    if signs.went_on is not None and signs.origin is None:
        return _went_on(evidence, signs.went_on)
    if evidence.live and _counted_none(evidence):
        summary = say("it exited by itself; no OOM counter rose and no message names a resource that ran out.")
        return RuleResult("not-memory", 0.75, tuple(lines), summary)
    if evidence.log.last_error is not None:
        lines.insert(0, quoted_line(evidence.log.last_error))
    if "timeout" in {sign.code for sign in signs.counting} or _message_timed_out(evidence):
        return unknown(tuple(lines), "not-memory", "ram-oom-kill", "swap-thrash")
    if pin := signs.first("pin-thread", "gone"):
        if "in memory" in pin.line or pin.code == "pin-thread":
            return unknown((quoted_line(pin), *lines), "not-memory", "pinned-exhausted")
        return unknown((quoted_line(pin), *lines), "ram-oom-kill", "not-memory", "killed")
    if words := signs.first("oom-words", "oom-handled"):
        return unknown((quoted_line(words), *lines), "gpu-oom", "ram-allocation", "ram-oom-kill")
    if not evidence.log.lines and not evidence.live:
        lines.insert(0, say("the log is empty"))
    return unknown(tuple(lines), "ram-oom-kill", "killed", "not-memory")


def _went_on(evidence: Evidence, shortage: Sign) -> RuleResult:
    """The program reported a shortage and went on."""
    done = evidence.log.done
    if not evidence.live and done is not None and done.number < shortage.number:
        summary = say("the program went on after a shortage and reports the end of its run: this log shows no failure "
                      "that ended it.")  # fmt: skip
        return unknown((quoted_line(shortage), quoted_line(done)), "not-memory", "killed", summary=summary)
    cause = _SHORT_OF.get(shortage.code, "ram-allocation")
    summary = say("the program reported a shortage and went on or tried again; the log does not show what ended it.")
    lines = (quoted_line(shortage), exit_line(evidence.ending))
    if any(number < shortage.number for number in evidence.log.progress):
        return unknown(lines, "not-memory", "ram-oom-kill", "killed", cause, summary=summary)
    return unknown(lines, cause, "ram-oom-kill", "killed", "not-memory", summary=summary)


def _leads_to(sign: Sign, error: Sign) -> bool:
    """Whether the exception or its tracebacks report the child's exit."""
    return sign.number == error.number or (sign.code == "child-killed" and sign.number > error.number)


def _message_timed_out(evidence: Evidence) -> bool:
    last = evidence.log.last_error
    return last is not None and "imed out" in last.line


def _before(first: Sign | None, second: Sign) -> bool:
    return first is not None and first.number > second.number


def _counted_none(evidence: Evidence) -> bool:
    """Whether the counter proves that no process of the job was OOM-killed."""
    count = evidence.oom
    return evidence.elsewhere is None and count is not None and not count.of_job and not count.unattributed


def _counter_line(evidence: Evidence) -> str:
    count = evidence.oom
    if count is None:
        return say("no OOM counter is readable here: SIGKILL alone does not prove an OOM kill")
    if evidence.elsewhere is not None and not count.of_job:
        return say(
            "{program} starts processes elsewhere: no OOM counter here counts them", program=evidence.elsewhere
        )  # fmt: skip
    if count.kills == 0:
        return say("oom_kill did not rise ({source}): not the OOM killer", source=count.source)
    if _counted_none(evidence):
        return say(
            "oom_kill rose by {kills} ({source}), for processes outside this job",
            kills=count.others, source=count.source,
        )  # fmt: skip
    return say("oom_kill rose by {kills} ({source})", kills=count.kills, source=count.source)


_COMMAND = 60  # and of a command line


def shortened_command(command: str) -> str:
    """The beginning of a command line."""
    return command if len(command) <= _COMMAND else command[: _COMMAND - 1].rstrip() + "…"


def ctrl_c_summary(evidence: Evidence) -> str:
    """The summary for Ctrl-C; empty if it was not Ctrl-C."""
    return say("stopped with Ctrl-C in this terminal.") if evidence.keyboard else ""
