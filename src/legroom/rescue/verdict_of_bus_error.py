"""Verdict rule on a bus error: a full /dev/shm, a full disk or a truncated memory-mapped file. Pure."""

from __future__ import annotations

from legroom.messages import listed, say
from legroom.records.failure import Cause, Evidence, Level, RuleResult, exit_line, level_line, unknown
from legroom.rescue.find_failures_in_log import Signs, quoted_line
from legroom.rescue.verdict_from_log import FULL, GREW, full_disks, fullest_shm

_SIGBUS = 7
_NEAR = 10.0  # seconds before the end in which a level of /dev/shm counts
_CAUSES: tuple[Cause, ...] = ("shm-full", "disk-full", "not-memory")


def bus(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """SIGBUS: no page left on a full tmpfs or disk, or a truncated memory-mapped file."""
    hit = evidence.ending is not None and evidence.ending.by_signal(_SIGBUS)
    sign = signs.text("worker-bus", "bus")
    if not hit and sign is None:
        return None
    lines = [quoted_line(sign)] if sign else []
    level = fullest_shm(evidence)
    if not evidence.live or level is None:
        lines.append(say("/dev/shm usage is unknown; a truncated memory-mapped file causes the same error"))
        # In a DataLoader worker it usually is /dev/shm.
        if signs.text("worker-bus"):
            return RuleResult("shm-full", 0.7, (*lines, exit_line(evidence.ending)), likely=_CAUSES)
        return unknown((*lines, exit_line(evidence.ending)), *_CAUSES)
    lines.append(level_line(say("/dev/shm peak"), level))
    disks = full_disks(evidence)
    lines += [level_line(path, one) for path, one in disks.items()]
    near = _shm_near_end(evidence)
    if near is not None and near.share >= FULL:
        return RuleResult("shm-full", 0.65 if disks else 0.97, (*lines, exit_line(evidence.ending)))
    if disks:
        summary = say("bus error: a memory-mapped file is on a full disk, which had no space for one of its pages.")
        return RuleResult("disk-full", 0.9, (*lines, exit_line(evidence.ending)), summary=summary)
    if level.share >= GREW:
        return RuleResult("shm-full", 0.8 if level.share < FULL else 0.75, (*lines, exit_line(evidence.ending)))
    if not evidence.disks:  # none could be read
        return unknown((*lines, exit_line(evidence.ending)), *_CAUSES)
    # Not proven: its file may be on a disk that was not read.
    read = listed(evidence.disks)
    lines.append(say("the disks of {paths} had free space; the file may be on another disk", paths=read))
    lines.append(say("a truncated memory-mapped file causes a bus error"))
    summary = say("bus error while /dev/shm had free space: usually a memory-mapped file was truncated while in use.")
    likely: tuple[Cause, ...] = ("not-memory", "disk-full")
    return RuleResult("not-memory", 0.65, (*lines, exit_line(evidence.ending)), summary=summary, likely=likely)


def _shm_near_end(evidence: Evidence) -> Level | None:
    """The peak of /dev/shm in the last seconds: an earlier one did not end the job."""
    if not evidence.readings:
        return fullest_shm(evidence)
    since = evidence.readings[-1].when - _NEAR
    seen = [one.levels["shm"] for one in evidence.readings if one.when >= since and "shm" in one.levels]
    if evidence.shm_at_end is not None:
        seen.append(evidence.shm_at_end)
    return max(seen, key=lambda level: level.share, default=None)
