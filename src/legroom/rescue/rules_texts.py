"""Rules on what a program wrote before it died, checked against what was measured. Pure.

Covers: GPU, pinned memory, descriptors, sockets, /dev/shm, disk, refused host memory, bus errors. Does not cover: which
lines count at all (log_signs.py).
"""

from __future__ import annotations

import re

from legroom.model.death import Evidence, Level
from legroom.rescue.because import Because, ended, level_line, quoted
from legroom.rescue.log_signs import WINDOW, Signs
from legroom.words import say

_BUS = 7
FULL = 0.9  # a pool as full as this has no room for the next batch
GREW = 0.5  # seen half full between two looks, and a bus error right after
DISK_FULL = 0.98
_NEAR = 10.0  # seconds before the end in which a level has to do with it
_GUESS = re.compile(r"\bbus error\b", re.I)  # torch names shared memory below every bus error of a worker
_PIN_NEAR = 40  # lines between the pin thread's name and the error that ended it


def pinned(evidence: Evidence, signs: Signs) -> Because | None:
    """Page-locked host memory: CUDA's words for it are those for GPU memory, so it counts who said them."""
    if sign := signs.text("pinned"):
        return Because("pinned-exhausted", 0.92, (quoted(sign), ended(evidence.ending)))
    thread, bare = signs.text("pin-thread"), signs.text("cuda-oom-bare")
    if thread and bare and abs(thread.number - bare.number) <= _PIN_NEAR and not signs.text("gpu-oom"):
        return Because("pinned-exhausted", 0.88, (quoted(thread), quoted(bare), ended(evidence.ending)))
    return None


def gpu(evidence: Evidence, signs: Signs) -> Because | None:
    """The GPU's memory."""
    sign = signs.text("gpu-oom", "cuda-oom-bare")
    if sign is None:
        return None
    lines = [quoted(sign)]
    lines += [level_line(name, level) for name, level in _cards(evidence) if level.share >= FULL]
    sure = 0.95 if sign.code == "gpu-oom" else 0.85
    return Because("gpu-oom", sure, (*lines, ended(evidence.ending)))


def descriptors(evidence: Evidence, signs: Signs) -> Because | None:
    """File descriptors."""
    sign = signs.text("fds")
    if sign is None:
        return None
    lines = [quoted(sign)]
    peak = evidence.peaks.get("fds")
    if peak is not None and peak.share >= GREW:
        lines.append(
            say(
                "descriptors open in one process: {used} of {size}", used=peak.used, size=peak.size
            )
        )  # fmt: skip
    return Because("fds-exhausted", 0.95, (*lines, ended(evidence.ending)))


def sockets(evidence: Evidence, signs: Signs) -> Because | None:
    """No socket could be made below the folder for temporary files.

    torch loses every batch and waits for ever, until somebody loses patience: what ended it, a signal or an exception
    far below, does not speak against it.
    """
    last = evidence.log.last_error
    waited = last is not None and (last.code == "timeout" or "KeyboardInterrupt" in last.line)
    near = [sign for sign in evidence.log.signs if sign.number <= WINDOW] if waited else signs.counting
    sign = next((sign for sign in near if sign.code == "socket-path"), None)
    if sign is None:
        return None
    return Because("tmpdir-too-long", 0.93, (quoted(sign), ended(evidence.ending)))


def shm(evidence: Evidence, signs: Signs) -> Because | None:
    """/dev/shm was refused; what torch only supposes below a bus error is judged as a bus error."""
    sign = next((one for one in signs.counting if one.code == "shm" and not _GUESS.search(one.line)), None)
    if sign is None or signs.mute:
        return None
    level = fullest_shm(evidence)
    lines = [quoted(sign)]
    if level is not None:
        lines.append(level_line(say("/dev/shm at its fullest"), level))
    sure = 0.97 if level is not None and level.share >= GREW else 0.93
    return Because("shm-full", sure, (*lines, ended(evidence.ending)))


def bus(evidence: Evidence, signs: Signs) -> Because | None:
    """SIGBUS: a page that a full tmpfs or a full disk could not give, or a mapped file that was truncated."""
    ending = evidence.ending
    hit = ending is not None and (ending.signal == _BUS or ending.status == 128 + _BUS)
    sign = signs.text("worker-bus", "bus") or signs.text("shm")
    if not hit and sign is None:
        return None
    lines = [quoted(sign)] if sign else []
    level = fullest_shm(evidence)
    if not evidence.live or level is None:
        lines.append(
            say("how full /dev/shm was is not known; a truncated file behind a map ends the same way")
        )
        # Of a loader's worker it mostly is /dev/shm.
        sure = 0.7 if sign is not None and sign.code != "bus" else 0.65
        return Because("shm-full", sure, (*lines, ended(evidence.ending)))
    lines.append(level_line(say("/dev/shm at its fullest"), level))
    disks = _full_disks(evidence)
    lines += [level_line(path, one) for path, one in disks.items()]
    near = _shm_near_end(evidence)
    if near is not None and near.share >= FULL:
        return Because("shm-full", 0.65 if disks else 0.97, (*lines, ended(evidence.ending)))
    if disks:
        summary = say("a bus error: a mapped file lies on a full disk, which had no block for a page of it.")
        return Because("disk-full", 0.9, (*lines, ended(evidence.ending)), summary=summary)
    if level.share >= GREW:
        return Because("shm-full", 0.8 if level.share < FULL else 0.75, (*lines, ended(evidence.ending)))
    lines.append(
        say("no disk that it writes to was full; a mapped file that is truncated ends in a bus error")
    )
    summary = say("a bus error while /dev/shm had room: most often a mapped file was truncated while in use.")
    return Because("not-memory", 0.7, (*lines, ended(evidence.ending)), summary=summary)


def disk(evidence: Evidence, signs: Signs) -> Because | None:
    """No space left, and not in /dev/shm."""
    sign = signs.text("disk", "disk-write")
    if sign is None:
        return None
    full = _full_disks(evidence)
    level = fullest_shm(evidence)
    lines = [quoted(sign), *(level_line(path, one) for path, one in full.items())]
    if not full and level is not None and level.share >= FULL:
        lines.append(level_line(say("/dev/shm at its fullest"), level))
        return Because("shm-full", 0.85, (*lines, ended(evidence.ending)))
    if sign.code == "disk-write" and not full and evidence.live:
        return None  # torch says the same of a file system that went away
    return Because("disk-full", 0.97 if full else 0.85, (*lines, ended(evidence.ending)))


def ram(evidence: Evidence, signs: Signs) -> Because | None:
    """Host memory that was refused: an exception, not a kill."""
    sign = signs.text("ram")
    if sign is None:
        return None
    return Because("ram-allocation", 0.95, (quoted(sign), ended(evidence.ending)))


def fullest_shm(evidence: Evidence) -> Level | None:
    """/dev/shm as full as it was seen, the moment of death included."""
    seen = [level for level in (evidence.peaks.get("shm"), evidence.shm_at_end) if level is not None]
    return max(seen, key=lambda level: level.share, default=None)


def _shm_near_end(evidence: Evidence) -> Level | None:
    """/dev/shm as full as it was in the last seconds; what was full and freed before that ended nothing."""
    if not evidence.readings:
        return fullest_shm(evidence)
    since = evidence.readings[-1].when - _NEAR
    seen = [one.levels["shm"] for one in evidence.readings if one.when >= since and "shm" in one.levels]
    if evidence.shm_at_end is not None:
        seen.append(evidence.shm_at_end)
    return max(seen, key=lambda level: level.share, default=None)


def _full_disks(evidence: Evidence) -> dict[str, Level]:
    return {path: level for path, level in evidence.disks.items() if level.share >= DISK_FULL}


def _cards(evidence: Evidence) -> list[tuple[str, Level]]:
    return [(name, level) for name, level in evidence.peaks.items() if name.startswith("gpu")]
