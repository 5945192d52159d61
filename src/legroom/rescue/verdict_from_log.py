"""Verdict rules on what the program printed before it ended, checked against the samples, and on a bus error. Pure.

GPU memory, pinned memory, file descriptors, sockets, /dev/shm, disk, failed host allocations. A bus error is a full
/dev/shm, a full disk or a truncated memory-mapped file.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Literal

from legroom.messages import listed, phrase, say
from legroom.records.failure import Cause, Evidence, RuleResult, Sign, exit_line, level_line, unknown
from legroom.records.machine import Level
from legroom.rescue.failure_message_patterns import SHORTAGES
from legroom.rescue.find_failures_in_log import WINDOW, Signs, context, quoted_line
from legroom.units import format_duration, format_size

FULL = 0.9  # a pool this full has no space for the next batch
GREW = 0.5  # half full at a sample, and a bus error right after
DISK_FULL = 0.98
_VAGUE = frozenset({"cuda-oom-bare", "gpu-likely", "device-oom", "oom-handled", "fds-likely", "shm-likely"})
_ON_CPU = re.compile(r"device:CPU|allocator (?:mkl_?)?cpu|cpu_allocator|DefaultCPU")
_OF_GPU = re.compile(r"Allocator \(GPU_\d+_bfc\) ran out of memory(?!.*not a failure)")
_BYTES = re.compile(r"allocat\w* (\d+) bytes")
_LARGE = 1 << 20  # bytes: a failed request above this is a large one
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMGT]i?B)")
_FREE = re.compile(r"of which ([\d.]+) ([KMGT]i?B) is free|([\d.]+) ([KMGT]i?B) free")
_UNITS = {unit: 1 << (10 * power) for power, letter in enumerate("KMGT", 1) for unit in (f"{letter}iB", f"{letter}B")}
_EAGAIN = re.compile(r"temporarily unavailable|EAGAIN|Errno 11|pids controller|资源暂时不可用")
_SLACK = 256 << 20
_SEGMENT = re.compile(r"\bsize:? (\d+)\b|\b(\d+) bytes\b")
_PLAIN_BATCH, _HUGE_BATCH = 1 << 30, 8 << 30  # batches that occur, and that hardly do
_MAPPED = re.compile(r"</?torch_\d+_\d+_(\d+)>")
_MANY_MAPS = 30_000  # shared objects of one process: each may need two mappings
_PATH = re.compile(
    r"WinError 112|on the disk|磁盘|on device: b?['\"]|[:'\" ](?:/(?!dev/shm|torch_|psm_|mp-|sem\.)[\w.@+-]+/|[A-Z]:\\)"
)
_CHAIN = 30  # lines above an error with the frames that led to it
_FRAME_LINES = 5  # lines of one frame (file, code, marker) and one more call
_ALONE = re.compile(r"^\W*(?:OS|IO)?(?:Error)?:?\s?\[?(?:Errno 28\]?)?:?\s?[Nn]o\s+space\s+left\s+on\s+device\W*$")


def faults(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """A fault of a GPU kernel, a driver or a library, or a garbage size after one."""
    sign = signs.text("fault", "absurd-size", "shm-other", "assertion") or _library(signs)
    if sign is None:
        return None
    before = signs.text(*SHORTAGES)
    if before is not None and before.number > sign.number and before.code not in _VAGUE:
        return None  # a pool had run out before
    if sign.code == "absurd-size":
        summary = say("the size in the message is garbage from an earlier failure: see the lines before it.")
        return RuleResult("not-memory", 0.7, (quoted_line(sign),), summary=summary)
    if sign.code == "shm-other":
        summary = say("a shared-memory file could not be opened; the error is not about free space.")
        return RuleResult("not-memory", 0.78, (quoted_line(sign),), summary=summary)
    sure = 0.9 if sign.code == "fault" else 0.75
    return RuleResult("not-memory", sure, (quoted_line(sign),))


def _library(signs: Signs) -> Sign | None:
    """A library or a kernel limit, unless another error was reported later."""
    sign = signs.text("library")
    if sign is None or signs.decisive is not None:
        return sign
    later = (one for one in signs.counting if one.number < sign.number and not one.code.startswith("frame-"))
    return None if any(one.code not in ("library", "cleanup", "advice") for one in later) else sign


def pinned(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """Page-locked host memory. CUDA's message is the same as for GPU memory, so its origin decides."""
    if sign := signs.text("pinned"):
        return RuleResult("pinned-exhausted", 0.92, (quoted_line(sign),))
    bare = signs.text("cuda-oom-bare")
    if bare and (thread := context(evidence, bare, "pin-thread")) and not signs.text("gpu-oom"):
        return RuleResult("pinned-exhausted", 0.88, (quoted_line(thread), quoted_line(bare)))
    return None


def gpu(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """GPU memory."""
    sign = signs.text("gpu-oom", "gpu-likely", "cuda-oom-bare")
    if sign is None:
        return None
    full = [level_line(name, level) for name, level in _gpus(evidence) if level.share >= FULL]
    lines = (quoted_line(sign), *full)
    if sign.code == "gpu-oom":
        if _room_for_it(sign.line) and not full:
            note = say(
                "the message reports more free memory than was requested: check limits, the driver and other processes"
            )
            return RuleResult("gpu-oom", 0.6, (*lines, note), likely=("gpu-oom", "map-count", "not-memory"))
        return RuleResult("gpu-oom", 0.95, lines)
    if full:
        return RuleResult("gpu-oom", 0.9, lines)
    if sign.code == "gpu-likely":
        return RuleResult("gpu-oom", 0.75, lines)
    if _in_traceback(evidence, sign):
        return RuleResult("gpu-oom", 0.7, lines)
    return unknown(lines, "gpu-oom", "pinned-exhausted")


def gpu_refused(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """TensorFlow requested less and less GPU memory, and no other error follows."""
    sign = signs.text("gpu-refused")
    if sign is None or signs.decisive:
        return None
    return RuleResult("gpu-oom", 0.7, (quoted_line(sign),), likely=("gpu-oom", "not-memory"))


def device(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """Out of memory on an unnamed device."""
    sign = signs.text("device-oom")
    if sign is None:
        return None
    lines = (quoted_line(sign),)
    if _ON_CPU.search(sign.line):
        return RuleResult("ram-allocation", 0.85, lines)
    if hint := context(evidence, sign, "cpu-hint"):
        return RuleResult("ram-allocation", 0.78, (*lines, quoted_line(hint)), likely=("ram-allocation", "gpu-oom"))
    if hint := context(evidence, sign, "gpu-hint", "gpu-refused"):
        if _OF_GPU.search(hint.line):
            return RuleResult("gpu-oom", 0.9, (*lines, quoted_line(hint)))
        return RuleResult("gpu-oom", 0.78, (*lines, quoted_line(hint)), likely=("gpu-oom", "ram-allocation"))
    asked = _BYTES.search(sign.line)
    if asked and int(asked[1]) >= _LARGE:
        return RuleResult("gpu-oom", 0.7, lines, likely=("gpu-oom", "ram-allocation"))
    if asked:
        return unknown(lines, "gpu-oom", "ram-allocation", "not-memory")
    return unknown(lines, "gpu-oom", "ram-allocation")


def gpu_library(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """cuDNN, cuBLAS and the like failed: a full GPU, mismatched versions or an earlier fault."""
    sign = signs.text("gpu-library")
    if sign is None:
        return None
    lines = (quoted_line(sign),)
    if hint := context(evidence, sign, "gpu-hint", "gpu-refused"):
        return RuleResult("gpu-oom", 0.7, (*lines, quoted_line(hint)), likely=("gpu-oom", "not-memory"))
    full = [level_line(name, level) for name, level in _gpus(evidence) if level.share >= FULL]
    if full:
        return RuleResult("gpu-oom", 0.85, (*lines, *full))
    return unknown(lines, "gpu-oom", "not-memory")


_HELD_AS = {
    "tensors": phrase("file descriptors ran out: each tensor that a worker sends needs one."),
    "files": phrase("file descriptors ran out: the program opened more files than its limit."),
}


def descriptors(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """File descriptors."""
    sign = signs.text("fds", "fds-likely")
    if sign is None:
        return None
    lines = [quoted_line(sign)]
    peak = evidence.peaks.get("fds")
    if peak is not None and peak.share >= GREW:
        lines.append(
            say(
                "open file descriptors in one process: {used} of {size}", used=peak.used, size=peak.size
            )
        )  # fmt: skip
    sure = 0.95 if sign.code == "fds" else 0.7
    likely: tuple[Cause, ...] = () if sign.code == "fds" else ("fds-exhausted", "shm-full", "not-memory")
    held = held_as(evidence)
    summary = say(_HELD_AS[held]) if held is not None else ""
    return RuleResult("fds-exhausted", sure, tuple(lines), summary, likely)


_TENSORS = re.compile(r"ancdata|shared memory object|torch_\d|reductions\.py|rebuild_storage|resource_sharer")
_OPENED = re.compile(
    r"(?:\[Errno 2[34]\] |os error 2[34]\W+)?[Tt]oo many open files(?: in system)?\)?: ?b?['\"](?!/dev/shm|/torch_)"
)


def held_as(evidence: Evidence) -> Literal["tensors", "files"] | None:
    """What the file descriptors that ran out were used for, if the log shows it."""
    sign = Signs.of(evidence).text("fds", "fds-likely")
    if sign is None:
        return None
    frames = [
        one
        for one in evidence.log.signs
        if one.code == "frame-peer" or "_share_f" in one.line or one.code == "frame-shm"
    ]
    near = any(sign.number < one.number <= sign.number + _CHAIN for one in frames)
    if _TENSORS.search(sign.line) or sign.code == "fds-likely" or near:
        return "tensors"
    return "files" if _OPENED.search(sign.line) else None


def processes(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """The limit on processes and threads."""
    if sign := signs.text("processes"):
        # Without an error number, it may be memory for a thread's stack.
        sure = 0.85 if _EAGAIN.search(sign.line) else 0.78
        return RuleResult("processes-exhausted", sure, (quoted_line(sign),))
    sign = signs.text("try-again")
    if sign is None:
        return None
    lines = (quoted_line(sign),)
    if fork := context(evidence, sign, "frame-fork"):
        return RuleResult("processes-exhausted", 0.85, (*lines, quoted_line(fork)))
    return unknown(lines, "processes-exhausted", "not-memory")


def maps(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """The limit on mappings of a process (vm.max_map_count)."""
    if sign := signs.text("map-count"):
        return RuleResult("map-count", 0.78, (quoted_line(sign),))
    sign = signs.text("mmap-refused")
    if sign is None:
        return None
    lines = (quoted_line(sign),)
    count = _MAPPED.search(sign.line)
    if count and int(count[1]) >= _MANY_MAPS:
        note = say(
            "this is shared object {count} of the process; the kernel's default limit is 65530 mappings", count=count[1]
        )
        return RuleResult("map-count", 0.75, (*lines, note), likely=("map-count", "ram-allocation"))
    return unknown(lines, "map-count", "ram-allocation")


def sockets(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """No socket could be created in the temporary directory.

    torch loses every batch and waits forever. The signal or exception that finally ended it does not contradict this.
    """
    last = evidence.log.last_error
    waited = last is not None and (last.code == "timeout" or "KeyboardInterrupt" in last.line)
    near = [sign for sign in evidence.log.signs if sign.number <= WINDOW] if waited else signs.counting
    sign = next((sign for sign in near if sign.code == "socket-path"), None)
    if sign is None:
        return None
    return RuleResult("tmpdir-too-long", 0.93, (quoted_line(sign),))


def shm(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """An allocation in /dev/shm failed. torch's guess after a bus error is left to the bus-error rule."""
    sign, sure = signs.text("shm"), 0.93
    if sign is None:
        sign, sure = _space_in_shm(evidence, signs)
    if sign is None:
        sign, sure = signs.text("shm-likely"), 0.7
    if sign is None:
        vague = signs.text("shm-vague")
        return unknown((quoted_line(vague),), "shm-full", "not-memory") if vague else None
    level = fullest_shm(evidence)
    lines = [quoted_line(sign)]
    if level is not None:
        lines.append(level_line(say("/dev/shm peak"), level))
        most = _most_sure_of_shm(level, sign)
        if most < 0.9:
            room = format_size(level.size - level.used)
            lines.append(
                say("{room} of /dev/shm was free at its peak: only a larger request would be refused", room=room)
            )
            likely: tuple[Cause, ...] = ("shm-full", "not-memory")
            return RuleResult("shm-full", min(most, sure), tuple(lines), likely=likely)
        sure = most if most > sure else sure
    return RuleResult("shm-full", sure, tuple(lines))


def _most_sure_of_shm(level: Level, sign: Sign) -> float:
    """The confidence that the measured peak allows for a message about a full /dev/shm.

    torch reserves a batch before it writes it: a single batch larger than the free space is refused without the level
    rising. torch does not print its size; NCCL prints that of its segment.
    """
    room = level.size - level.used
    asked = _SEGMENT.search(sign.line)
    if level.share >= GREW or (asked and int(asked[1] or asked[2]) > room):
        return 0.97
    if room < _PLAIN_BATCH:
        return 0.93
    return 0.75 if room < _HUGE_BATCH and not asked else 0.6


def _space_in_shm(evidence: Evidence, signs: Signs) -> tuple[Sign | None, float]:
    """A "No space left on device" for a semaphore, a queue or a shared tensor: these are in /dev/shm."""
    sign = signs.text("disk")
    if sign is None or _PATH.search(sign.line) or full_disks(evidence):
        return None, 0.0
    if _innermost(evidence, sign) or signs.text("worker-bus"):
        return sign, 0.93
    return (sign, 0.7) if context(evidence, sign, "frame-joblib") else (None, 0.0)


def _innermost(evidence: Evidence, sign: Sign) -> bool:
    """Whether the frame right above the error only uses /dev/shm."""
    return any(
        one.code == "frame-shm" and sign.number < one.number <= sign.number + _FRAME_LINES for one in evidence.log.signs
    )


def disk(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """No space left, and not in /dev/shm."""
    sign = signs.text("disk-quota", "disk", "disk-write", "disk-io")
    if sign is None:
        return None
    full = full_disks(evidence)
    level = fullest_shm(evidence)
    lines = [quoted_line(sign), *(level_line(path, one) for path, one in full.items())]
    if not full and level is not None and level.share >= FULL and sign.code == "disk" and not _PATH.search(sign.line):
        lines.append(level_line(say("/dev/shm peak"), level))
        # The disks that were read had space; the file may be on another one.
        return RuleResult("shm-full", 0.75, tuple(lines), likely=("shm-full", "disk-full"))
    if not full and evidence.full_before:
        lines += [level_line(say("{path}, already before the start", path=path), one)
                  for path, one in evidence.full_before.items()]  # fmt: skip
    elif evidence.disks and not full:
        read = listed(evidence.disks)
        lines.append(say("the disks of {paths} had free space; the file may be on another disk", paths=read))
    if full or sign.code == "disk-quota":
        return RuleResult("disk-full", 0.97 if full else 0.93, tuple(lines))
    if sign.code == "disk-io":
        return unknown(tuple(lines), "disk-full", "not-memory")
    if sign.code == "disk-write":  # torch prints the same for a file system that disappeared
        sure = 0.6 if evidence.disks and not evidence.full_before else 0.7
        return RuleResult("disk-full", sure, tuple(lines), likely=("disk-full", "not-memory"))
    if evidence.live or _PATH.search(sign.line):
        return RuleResult("disk-full", 0.85, tuple(lines))
    # A command prints its name before the error; an exception without a traceback could be from anything.
    if _in_traceback(evidence, sign) or not _ALONE.search(sign.line):
        return RuleResult("disk-full", 0.75, tuple(lines), likely=("disk-full", "shm-full"))
    return unknown(tuple(lines), "disk-full", "shm-full")


_PIPE = re.compile(r"BrokenPipeError|Broken pipe")
_SIGPIPE = 13


def output(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """The job's output could not be written, which closed its stdout or stderr."""
    number = evidence.unwritable
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return None
    full = full_disks(evidence)
    written = say("cannot write {path}: {why}", path=say("the command's output"), why=os.strerror(number))
    lines = (written, *(level_line(path, one) for path, one in full.items()))
    return RuleResult("disk-full", 0.95, lines)


def closed_output(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """The program that read the job's output closed the pipe, and the job failed at its next line."""
    last = evidence.log.last_error
    if not evidence.reader_closed or evidence.ending is None or (last is not None and not _PIPE.search(last.line)):
        return None
    proven = last is not None or evidence.ending.by_signal(_SIGPIPE)
    lines = (exit_line(evidence.ending), *(() if last is None else (quoted_line(last),)))
    summary = say("the program that read the job's output closed the pipe, as `| head` does. No resource ran out.")
    return RuleResult("not-memory", 0.95 if proven else 0.75, lines, summary)


def ram(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """A host memory allocation failed: an exception, not a kill."""
    sign = signs.text("ram", "ram-likely", "ram-thread")
    if sign is None:
        return None
    lines = (quoted_line(sign),)
    if sign.code == "ram":
        return RuleResult("ram-allocation", 0.95, lines)
    if sign.code == "ram-thread":
        return unknown(lines, "ram-allocation", "map-count", "processes-exhausted")
    if "bad_alloc" in sign.line and context(evidence, sign, "frame-data"):
        return unknown(lines, "ram-allocation", "not-memory")
    return RuleResult("ram-allocation", 0.78, lines)


_REQUESTED = re.compile(r"(?:[Uu]nable|tried) to allocate (?:more than )?([\d.]+) ?([KMGTPE]i?B|bytes)")
_SIZES = {"bytes": 1, **{f"{letter}{i}B": 1 << (10 * power)
                         for power, letter in enumerate("KMGTPE", 1) for i in ("i", "")}}  # fmt: skip


def requested(evidence: Evidence) -> int | None:
    """The bytes of the refused allocation, if the last exception names them."""
    last = evidence.log.last_error
    found = None if last is None or last.code != "ram" else _REQUESTED.search(last.line)
    try:
        return None if found is None else int(float(found[1]) * _SIZES[found[2]])
    except ValueError:
        return None


def fullest_shm(evidence: Evidence) -> Level | None:
    """The peak of /dev/shm, including its level at the end; None for processes elsewhere, which may have their own."""
    if evidence.elsewhere is not None:
        return None
    seen = [level for level in (evidence.peaks.get("shm"), evidence.shm_at_end) if level is not None]
    return max(seen, key=lambda level: level.share, default=None)


def full_disks(evidence: Evidence) -> dict[str, Level]:
    """The disks that it writes to and that were full."""
    return {path: level for path, level in evidence.disks.items() if level.share >= DISK_FULL}


def _in_traceback(evidence: Evidence, sign: Sign) -> bool:
    """Whether a traceback ends at that line."""
    return any(error.number == sign.number for error in evidence.log.errors) and (
        evidence.log.chain_from is not None and evidence.log.chain_from > sign.number
    )


def _room_for_it(line: str) -> bool:
    """Whether the message reports far more free GPU memory than was requested."""
    asked, free = _ASKED.search(line), _FREE.search(line)
    if asked is None or free is None:
        return False
    wanted = float(asked[1]) * _UNITS[asked[2]]
    left = float(free[1] or free[3]) * _UNITS[free[2] or free[4]]
    return left > max(2 * wanted, wanted + _SLACK)


def _gpus(evidence: Evidence) -> list[tuple[str, Level]]:
    return [(name, level) for name, level in evidence.peaks.items() if name.startswith("gpu")]


_SIGBUS = 7
_NEAR = 10.0  # seconds before the end in which a level of /dev/shm counts
_UNREAD = 0.3  # seconds between two readings of /dev/shm, in which it may have been full; they are 0.1 s apart at most
_CAUSES: tuple[Cause, ...] = ("shm-full", "disk-full", "not-memory")


def bus(evidence: Evidence, signs: Signs) -> RuleResult | None:
    """SIGBUS: no page left on a full tmpfs or disk, or a truncated memory-mapped file."""
    hit = evidence.ending is not None and evidence.ending.by_signal(_SIGBUS)
    sign = signs.text("worker-bus", "bus")
    if not hit and sign is None:
        return None
    lines = [quoted_line(sign)] if sign else []
    level, disks = fullest_shm(evidence), full_disks(evidence)
    if not evidence.live or level is None:
        lines.append(say("/dev/shm usage is unknown; a truncated memory-mapped file causes the same error"))
        return _bus_of_unknown_cause(signs, lines)
    lines.append(level_line(say("/dev/shm peak"), level))
    if level.share < GREW and evidence.shm_unread > _UNREAD and not disks:
        unread = format_duration(evidence.shm_unread)
        lines.append(say("/dev/shm was not read for {seconds}, and may have been full then", seconds=unread))
        return _bus_of_unknown_cause(signs, lines)
    lines += [level_line(path, one) for path, one in disks.items()]
    near = _shm_near_end(evidence)
    if near is not None and near.share >= FULL:
        return RuleResult("shm-full", 0.65 if disks else 0.97, tuple(lines))
    if disks:
        summary = say("bus error: a memory-mapped file is on a full disk, which had no space for one of its pages.")
        return RuleResult("disk-full", 0.9, tuple(lines), summary=summary)
    if level.share >= GREW:
        return RuleResult("shm-full", 0.8 if level.share < FULL else 0.75, tuple(lines))
    if not evidence.disks:  # none could be read
        return unknown(tuple(lines), *_CAUSES)
    # Not proven: its file may be on a disk that was not read.
    read = listed(evidence.disks)
    lines.append(say("the disks of {paths} had free space; the file may be on another disk", paths=read))
    lines.append(say("a truncated memory-mapped file causes a bus error"))
    summary = say("bus error while /dev/shm had free space: usually a memory-mapped file was truncated while in use.")
    likely: tuple[Cause, ...] = ("not-memory", "disk-full")
    return RuleResult("not-memory", 0.65, tuple(lines), summary=summary, likely=likely)


def _bus_of_unknown_cause(signs: Signs, lines: list[str]) -> RuleResult:
    if signs.text("worker-bus"):  # in a DataLoader worker it usually is /dev/shm
        return RuleResult("shm-full", 0.7, tuple(lines), likely=_CAUSES)
    return unknown(tuple(lines), *_CAUSES)


def _shm_near_end(evidence: Evidence) -> Level | None:
    """The peak of /dev/shm in the last seconds: an earlier one did not end the job."""
    if not evidence.readings:
        return fullest_shm(evidence)
    since = evidence.readings[-1].when - _NEAR
    seen = [one.levels["shm"] for one in evidence.readings if one.when >= since and "shm" in one.levels]
    if evidence.shm_at_end is not None:
        seen.append(evidence.shm_at_end)
    return max(seen, key=lambda level: level.share, default=None)
