"""Which memory killed it: a pure function of the evidence.

Covers: every verdict, from a death that was seen or from a log alone. Does not cover: reading anything (evidence.py,
log_reader.py), what to do next (policy.py, fixes.py).

A signal or a status says how a process ended, never why: 137 is an OOM kill, a colleague, or `exit 137`. So counters of
the kernel come first, then what the program wrote, checked against what was measured, and bare signals last. The
rules are tried in order; the first that applies is the verdict, and names the lines it rests on. From a log alone
nothing is surer than LOG_ALONE.
"""

from __future__ import annotations

from collections.abc import Callable

from legroom.model.death import Cause, Evidence, Likely, Role, Verdict
from legroom.rescue import rules_counters, rules_endings, rules_texts
from legroom.rescue.because import Because
from legroom.rescue.log_signs import Signs
from legroom.words import phrase, say

LOG_ALONE = 0.85

_RULES: tuple[Callable[[Evidence, Signs], Because | None], ...] = (
    rules_counters.oom_behind_success,
    rules_counters.asked,
    rules_counters.stalled,
    rules_counters.oom_killed,
    rules_counters.oom_daemon,
    rules_counters.oom_shared,
    rules_counters.oom_in_log,
    rules_texts.faults,
    rules_texts.pinned,
    rules_texts.gpu,
    rules_texts.descriptors,
    rules_texts.processes,
    rules_texts.sockets,
    rules_texts.maps,
    rules_texts.shm,
    rules_texts.disk,
    rules_texts.ram,
    rules_texts.device,
    rules_texts.gpu_library,
    rules_texts.gpu_refused,
    rules_texts.bus,
    rules_counters.swapping,
    rules_endings.ended_by,
    rules_endings.worker,
    rules_endings.interrupted,
    rules_endings.outside,
    rules_endings.crashed,
    rules_endings.crashed_worker,
    rules_endings.child,
    rules_endings.exception,
    rules_endings.unexplained,
)

_SUMMARIES: dict[Cause, str] = {
    "shm-full": phrase(
        "/dev/shm was full: what passes between processes found no page there. It is not RAM, nor the GPU."
    ),
    "ram-oom-kill": phrase("RAM ran out and a process was killed for it by the OOM killer."),
    "ram-allocation": phrase("RAM was refused: an allocation failed, and the program ended by itself."),
    "swap-thrash": phrase(
        "the working set was larger than the memory it may use: it did little but wait for swap."
    ),
    "gpu-oom": phrase("the GPU's memory ran out."),
    "pinned-exhausted": phrase(
        "page-locked (pinned) host memory ran out. It comes out of RAM, not out of the GPU's memory."
    ),
    "fds-exhausted": phrase("file descriptors ran out: every tensor that a worker sends needs one."),
    "disk-full": phrase("a disk was full when the program wrote to it."),
    "tmpdir-too-long": phrase(
        "the path for temporary files (TMPDIR) was too long for a socket: what workers send is lost, or they do not "
        "start."
    ),
    "worker-killed": phrase("a data loader's worker was killed, and nothing shows that it was for memory."),
    "killed": phrase("somebody ended it with a signal; nothing shows that memory was at fault."),
    "processes-exhausted": phrase(
        "no further process or thread could be started: a limit on their number was reached."
    ),
    "map-count": phrase(
        "a process has as many mappings as the kernel allows (vm.max_map_count): shared tensors take one or two each."
    ),
    "not-memory": phrase("an error of another kind ended it: it names no pool that ran out."),
    "unknown": phrase(
        "what is known does not show what ended it. The likely causes follow in order. A process that is killed for "
        "memory writes nothing itself."
    ),
}

# What would tell that it was this cause.
_TELLS: dict[Cause, str] = {
    "shm-full": phrase("`df -h /dev/shm` while it runs: it fills up"),
    "ram-oom-kill": phrase(
        'most often RAM: `dmesg -T` has a line "Killed process", or the scheduler\'s accounting names memory'
    ),
    "ram-allocation": phrase(
        "the size that was asked for against `free -h`, `ulimit -v` and vm.overcommit_memory"
    ),
    "swap-thrash": phrase("`vmstat 1` while it runs: the column si does not rest"),
    "gpu-oom": phrase("`nvidia-smi` while it runs: the memory is full just before the error"),
    "pinned-exhausted": phrase("the same run with pin_memory=False ends in another way or not at all"),
    "fds-exhausted": phrase("`ls /proc/PID/fd | wc -l` against `ulimit -n`"),
    "processes-exhausted": phrase("`ps -eLf | wc -l` against `ulimit -u` and pids.max of the cgroup"),
    "map-count": phrase("`wc -l /proc/PID/maps` against `sysctl vm.max_map_count`"),
    "disk-full": phrase("`df -h` and `df -i` of every directory that it writes to, and the quota there"),
    "tmpdir-too-long": phrase("the length of $TMPDIR"),
    "worker-killed": phrase("another process sent the worker SIGKILL: the system's log may name it"),
    "killed": phrase(
        "a time limit, a scheduler or a person: its accounting (sacct, bhist, qstat, kubectl describe)"
    ),
    "not-memory": phrase("an error further up in the log, of this process or of another rank"),
    "unknown": phrase("a run under `legroom run`"),
}


def classify(evidence: Evidence) -> Verdict:
    """The verdict on that evidence; ``fix`` is left to the one who knows the place."""
    signs = Signs.of(evidence)
    because = next(found for rule in _RULES if (found := rule(evidence, signs)) is not None)
    confidence = because.confidence if evidence.live else min(LOG_ALONE, because.confidence)
    lines, victim = because.lines, None
    if because.cause != "ram-oom-kill":
        lines = (*lines, *rules_counters.oom_lines(evidence))  # an OOM kill is always told
    elif evidence.oom is not None and evidence.oom.victims:
        victim = evidence.oom.victims[0]
    return Verdict(
        cause=because.cause,
        confidence=round(confidence, 2),
        summary=because.summary or say(_SUMMARIES[because.cause]),
        evidence=tuple(dict.fromkeys(lines)),
        likely=tuple(Likely(cause, say(_TELLS[cause])) for cause in because.likely),
        victim=victim,
        refused=_refused(evidence) if because.cause == "ram-allocation" else None,
    )


def _refused(evidence: Evidence) -> Role | None:
    """The process that an allocation failed in: known where the exception that ended the job reports it."""
    last = evidence.log.last_error
    return evidence.log.raised_in if last is not None and last.code in ("ram", "ram-likely") else None
