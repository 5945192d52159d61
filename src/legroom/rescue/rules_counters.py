"""Rules on what the kernel and its helpers counted and wrote. Pure.

Covers: OOM kills by counter, by kernel log, by systemd-oomd, earlyoom or a scheduler; swap that never rests.
Does not cover: what programs write about themselves (rules_texts.py), bare signals (rules_endings.py).
"""

from __future__ import annotations

from legroom.model.death import Evidence, OomCount, Victim
from legroom.rescue.because import Because, by_keyboard, ended, level_line, quoted, shortened
from legroom.rescue.kernel_log import killed_in
from legroom.rescue.log_signs import Signs
from legroom.rescue.signatures import CONSEQUENCE
from legroom.system.child_processes import signal_name
from legroom.units import format_duration, format_size
from legroom.words import listed, say

_KILL, _TERM = 9, 15
_AT_THE_END = 5.0  # seconds: an OOM kill and a SIGKILL as near as this are one
_THRASH = 1 << 20  # bytes a second fetched back from swap, when everything stalls as well
_THRASH_ALONE = 8 << 20  # when nobody can say whether it stalls
_STALLED = 10.0  # percent of the time in which nothing ran for want of memory
_FULL = 0.97
_MOST_VICTIMS, _MOST_BESIDE = 3, 3  # named in the evidence
_ENDS_A_STALL = frozenset({1, 2, 6, 9, 14, 15})  # what watchdogs, schedulers and people send


def asked(evidence: Evidence, signs: Signs) -> Because | None:
    """Somebody told the supervisor to stop."""
    if evidence.asked_to_stop is None:
        return None
    name = signal_name(evidence.asked_to_stop)
    line = say("legroom run itself was sent {name} and passed it on", name=name)
    return Because("killed", 1.0, (line, ended(evidence.ending)), summary=by_keyboard(evidence))


def stalled(evidence: Evidence, signs: Signs) -> Because | None:
    """It hung on a full pool until the supervisor ended it."""
    if evidence.stalled_on != "shm":
        return None
    lines = [say("no CPU time was used and nothing was written after /dev/shm was refused: the loader hung")]
    if sign := signs.first("shm"):
        lines.append(quoted(sign))
    if evidence.held_shm is not None:
        lines.append(say("the job itself held {size} of /dev/shm", size=format_size(evidence.held_shm)))
    peak = evidence.peaks.get("shm")
    if peak is not None:
        lines.append(level_line(say("/dev/shm at its fullest"), peak))
    return Because("shm-full", 0.95, tuple(lines))


def oom_behind_success(evidence: Evidence, signs: Signs) -> Because | None:
    """It ended with 0, and one of its processes was OOM-killed: a pipe, a `wait` or a handler hid it."""
    if evidence.ending is None or not evidence.ending.success or evidence.stalled_on is not None:
        return None
    if not (kills := _of_job(evidence)):
        return None
    summary = say(
        "the command exited with 0, but the OOM killer killed a process of it. A pipe (`| tee`) or `wait` hides "
        "that: with `set -o pipefail` the exit status tells."
    )
    return Because(
        "ram-oom-kill", 0.9, (*kills, *_fullest(evidence), ended(evidence.ending)), summary=summary
    )


def oom_killed(evidence: Evidence, signs: Signs) -> Because | None:
    """The kernel's OOM killer took a process of the job, and that ended the job.

    How long before does not matter: a rank waits for a dead one until its timeout, which is 10 to 30 minutes. What
    matters is whether the job went on.
    """
    lines = _of_job(evidence)
    if not lines:
        return None
    count = evidence.oom
    gap = (count.before_end if count is not None else None) or 0.0
    ending = evidence.ending
    if _killed(evidence):
        sure = 0.99 if gap <= _AT_THE_END else 0.6  # later, SIGKILL came from elsewhere
    elif sign := signs.first("worker-killed", "worker-gone", "child-killed", "killed"):
        sure = 0.97
        lines.append(quoted(sign))
    elif _echo(evidence) or _waited(evidence):
        sure = 0.95
    elif signs.text("gpu-oom", "gpu-likely", "cuda-oom-bare", "shm", "fds", "disk", "disk-quota", "pinned"):
        return None  # it died of what it says; the kill was another process's, and survived
    elif count is not None and count.went_on:
        return None
    elif ending is not None and ending.signal in _ENDS_A_STALL and gap > _AT_THE_END:
        sure = 0.6  # a time limit ends a job that waits for the dead process, and any other job
    else:
        sure = 0.85
    if count is not None and not count.own and not evidence.kernel:
        sure = min(sure, 0.9)
    return Because("ram-oom-kill", sure, (*lines, *_fullest(evidence), ended(ending)))


def oom_lines(evidence: Evidence) -> list[str]:
    """What is known about OOM kills during the run, for any verdict."""
    count = evidence.oom
    lines = _of_job(evidence)
    if lines and count is not None and count.before_end is not None:
        lines.append(say("that was {ago} before the end", ago=format_duration(count.before_end)))
    if count is not None and count.unattributed:
        lines.append(_unattributed(count))
    return lines


def _of_job(evidence: Evidence) -> list[str]:
    """The lines on OOM kills of the job's own processes; empty where there was none, or none that is known to be."""
    count, kernel = evidence.oom, evidence.kernel or ()
    lines: list[str] = []
    if count is not None and count.of_job:
        if count.own or kernel:
            rose = say(
                "oom_kill rose by {kills} during the run ({source})", kills=count.kills, source=count.source
            )
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
            lines.append(say("the job's other processes then: {others}", others=others))
    named = {victim.pid for victim in count.victims} if count is not None and count.of_job else set()
    # The kernel's own lines are long; who was killed and what it held is what they add.
    told = {pid: rss for pid, rss in killed_in(kernel).items() if pid not in named}
    for pid, rss in list(told.items())[:_MOST_VICTIMS]:
        held = "" if rss is None else say(", which held {size}", size=format_size(rss))
        lines.append(say("kernel log: killed process {pid}{held}", pid=pid, held=held))
    if kernel and not told:
        lines.append(say("the kernel's log names it too"))
    return lines


def process_name(victim: Victim) -> str:
    """``rank 1, pid 7770 (python train.py)``."""
    words = {
        "pid": victim.pid,
        "command": shortened(victim.command),
        "rank": victim.rank,
    }
    if victim.rank is not None:
        return say("rank {rank}, pid {pid} ({command})", **words)
    return say("pid {pid} ({command})", **words)


def _victim(victim: Victim, size: int | None) -> str:
    who = process_name(victim)
    if victim.rss is None:
        return say("killed: {who}", who=who)
    held = format_size(victim.rss)
    if size is None:
        return say("killed: {who}, which held {held}", who=who, held=held)
    return say("killed: {who}, which held {held} of {size}", who=who, held=held, size=format_size(size))


def _ram_size(evidence: Evidence) -> int | None:
    level = evidence.ram_peak or evidence.peaks.get("ram")
    return None if level is None else level.size


def _unattributed(count: OomCount) -> str:
    return say(
        "oom_kill rose by {kills} ({source}), a counter that other processes share: it is not known whose process "
        "was killed",
        kills=count.unattributed, source=count.source,
    )  # fmt: skip


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
    """A counter that others share rose for a process that is not known, or RAM was nearly full, when SIGKILL came."""
    lost = signs.first("worker-killed", "worker-gone", "child-killed", "killed")
    if not (_killed(evidence) or lost):
        return None
    count = evidence.oom
    lines = (quoted(lost),) if lost else ()
    if count is not None and count.unattributed:
        if (count.before_end or 0.0) > _AT_THE_END and _killed(evidence):
            return None
        return Because("ram-oom-kill", 0.65, (_unattributed(count), *lines, ended(evidence.ending)))
    peak = evidence.peaks.get("ram")
    if count is None and peak is not None and peak.share >= _FULL:
        full = level_line(say("RAM just before the end"), peak)
        return Because("ram-oom-kill", 0.65, (full, *lines, ended(evidence.ending)))
    return None


def oom_in_log(evidence: Evidence, signs: Signs) -> Because | None:
    """A kernel, a scheduler or a daemon says so in the log itself."""
    sign = signs.first("oom-kill", "oom-daemon")
    if sign is None:
        return None
    lines, sure = [quoted(sign)], 0.95 if sign.code == "oom-kill" else 0.9
    count = evidence.oom
    if sign.code == "oom-kill" and count is not None and not count.of_job and not count.unattributed:
        # Of another job or an earlier one; unless the job ran elsewhere, below a scheduler's launcher.
        lines.append(say("oom_kill counts no kill of a process of this job ({source})", source=count.source))
        sure = 0.6
    return Because("ram-oom-kill", sure, (*lines, ended(evidence.ending)))


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


def _waited(evidence: Evidence) -> bool:
    """Whether its last exception is that it waited for too long."""
    last = evidence.log.last_error
    return last is not None and last.code == "timeout"


def _echo(evidence: Evidence) -> bool:
    """Whether its last exception is about another process's death."""
    last = evidence.log.last_error
    return last is not None and CONSEQUENCE.search(last.line) is not None
