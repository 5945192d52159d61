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

from legroom.model.death import Cause, Evidence, Verdict
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
    rules_texts.pinned,
    rules_texts.gpu,
    rules_texts.descriptors,
    rules_texts.sockets,
    rules_texts.shm,
    rules_texts.disk,
    rules_texts.ram,
    rules_texts.bus,
    rules_counters.swapping,
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
    "not-memory": phrase("it ended by itself, and not for want of memory."),
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
        told=because.told,
        victim=victim,
    )
