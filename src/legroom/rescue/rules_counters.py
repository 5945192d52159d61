"""Rules on what the kernel and its helpers counted and wrote. Pure.

Covers: OOM kills by counter, by kernel log, by systemd-oomd, earlyoom or a scheduler; swap that never rests.
Does not cover: what programs write about themselves (rules_texts.py), bare signals (rules_endings.py).
"""

from __future__ import annotations

from legroom.model.death import Evidence
from legroom.rescue.because import Because, by_keyboard, ended, level_line, quoted, signal_name
from legroom.rescue.log_signs import Signs
from legroom.rescue.signatures import CONSEQUENCE
from legroom.units import format_duration, format_size
from legroom.words import say

_KILL, _TERM = 9, 15
_RECENT = 30.0  # seconds: an OOM kill longer before the end was survived
_THRASH = 1 << 20  # bytes a second fetched back from swap, when everything stalls as well
_THRASH_ALONE = 8 << 20  # when nobody can say whether it stalls
_STALLED = 10.0  # percent of the time in which nothing ran for want of memory
_FULL = 0.97
_ENDS_A_STALL = frozenset({1, 2, 6, 9, 14, 15})  # what watchdogs, schedulers and people send


def asked(evidence: Evidence, signs: Signs) -> Because | None:
    """Somebody told the supervisor to stop."""
    if evidence.asked_to_stop is None:
        return None
    name = signal_name(evidence.asked_to_stop)
    line = say("legroom run itself was sent {name} and passed it on", name=name)
    return Because("killed", 1.0, (line, ended(evidence.ending)), summary=by_keyboard(evidence))


def stalled(evidence: Evidence, signs: Signs) -> Because | None:
    """It stood still on a full pool until the supervisor ended it."""
    if evidence.stalled_on != "shm":
        return None
    peak = evidence.peaks.get("shm")
    lines = [say("no CPU time was used and nothing was written while /dev/shm was full: the loader hung")]
    if peak is not None:
        lines.append(level_line(say("/dev/shm at its fullest"), peak))
    return Because("shm-full", 0.95, tuple(lines))


def oom_killed(evidence: Evidence, signs: Signs) -> Because | None:
    """The kernel's OOM killer, by its counter or its log."""
    count, kernel = evidence.oom, evidence.kernel or ()
    lines: list[str] = []
    if count is not None and count.kills and (count.own or kernel):
        lines.append(
            say("oom_kill rose by {kills} during the run ({source})", kills=count.kills, source=count.source)
        )
    lines += [say("kernel log: {line}", line=line) for line in kernel[:3]]
    if not lines:
        return None
    if count is not None and count.before_end is not None and count.before_end > _RECENT:
        return None
    if _killed(evidence):
        sure = 0.99
    elif sign := signs.first("worker-killed", "worker-gone", "child-killed", "killed"):
        sure = 0.97
        lines.append(quoted(sign))
    elif _echo(evidence):
        sure = 0.95
    elif signs.text("gpu-oom", "shm", "fds", "disk", "pinned"):
        return None  # it died of what it says; the kill was another process's, and survived
    else:
        sure = 0.85
    return Because("ram-oom-kill", sure, (*lines, *_fullest(evidence), ended(evidence.ending)))


def _fullest(evidence: Evidence) -> list[str]:
    """How full RAM was: by the kernel's own peak where there is one, else as it was last seen, and when."""
    if evidence.ram_peak is not None:
        return [
            level_line(say("RAM of its cgroup at its fullest, by the kernel's own peak"), evidence.ram_peak)
        ]
    seen = evidence.peaks.get("ram")
    if seen is None:
        return []
    line = level_line(say("RAM of its cgroup at its fullest"), seen)
    if evidence.ram_unseen is None or seen.share >= _FULL:
        return [line]
    ago = format_duration(evidence.ram_unseen)
    return [say("{line}, as far as it was seen: the last look was {ago} before the end", line=line, ago=ago)]


def oom_daemon(evidence: Evidence, signs: Signs) -> Because | None:
    """systemd-oomd, earlyoom or a kubelet killed it for memory: to the kernel that is a plain signal."""
    if not evidence.killers:
        return None
    if not (_killed(evidence) or (evidence.ending and evidence.ending.signal == _TERM) or _echo(evidence)):
        return None
    return Because("ram-oom-kill", 0.93, (*evidence.killers[:3], ended(evidence.ending)))


def oom_shared(evidence: Evidence, signs: Signs) -> Because | None:
    """A counter that others share rose, or the limit was nearly reached, when SIGKILL came."""
    if not (_killed(evidence) or signs.first("worker-killed")):
        return None
    count = evidence.oom
    if count is not None and not count.own and count.kills and evidence.kernel is None:
        if count.before_end is not None and count.before_end > _RECENT:
            return None
        rose = say(
            "oom_kill rose by {kills} ({source}), a counter that others share",
            kills=count.kills,
            source=count.source,
        )
        return Because("ram-oom-kill", 0.75, (rose, ended(evidence.ending)))
    peak = evidence.peaks.get("ram")
    if count is None and peak is not None and peak.share >= _FULL:
        lines = (level_line(say("RAM just before the end"), peak), ended(evidence.ending))
        return Because("ram-oom-kill", 0.7, lines)
    return None


def oom_in_log(evidence: Evidence, signs: Signs) -> Because | None:
    """A kernel, a scheduler or a daemon says so in the log itself."""
    if sign := signs.first("oom-kill"):
        return Because("ram-oom-kill", 0.95, (quoted(sign), ended(evidence.ending)))
    if sign := signs.first("oom-daemon"):
        return Because("ram-oom-kill", 0.9, (quoted(sign), ended(evidence.ending)))
    return None


def swapping(evidence: Evidence, signs: Signs) -> Because | None:
    """It did nothing but fetch pages back from swap until something lost patience."""
    patience = signs.first("timeout")
    signal = evidence.ending.signal if evidence.ending else None
    if not (patience or _echo(evidence) or signal in _ENDS_A_STALL or _killed(evidence)):
        return None
    lines: list[str] = []
    if evidence.swapped_back is not None:
        rate = format_size(int(evidence.swapped_back))
        lines.append(say("{rate} a second came back from swap in its last seconds", rate=rate))
    if evidence.stalled is not None:
        lines.append(
            say("everything stood still for memory {share:.0f} % of the time", share=evidence.stalled)
        )
    if patience:
        lines.append(quoted(patience))
    moved = evidence.swapped_back or 0
    hint = signs.first("swap-hint")
    if moved >= _THRASH and (evidence.stalled or 0) >= _STALLED:
        return Because("swap-thrash", 0.9, (*lines, ended(evidence.ending)))
    if moved >= _THRASH_ALONE:
        return Because("swap-thrash", 0.8, (*lines, ended(evidence.ending)))
    if not evidence.live and patience and hint:
        return Because("swap-thrash", 0.6, (quoted(hint), *lines))
    return None


def _killed(evidence: Evidence) -> bool:
    """Whether SIGKILL ended it, as its parent or a shell between sees it."""
    ending = evidence.ending
    return ending is not None and (ending.signal == _KILL or ending.status == 128 + _KILL)


def _echo(evidence: Evidence) -> bool:
    """Whether its last exception is about another process's death."""
    last = evidence.log.last_error
    return last is not None and CONSEQUENCE.search(last.line) is not None
