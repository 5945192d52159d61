"""Decide which memory pool ran out, from the evidence, and list the fixes. Pure.

A signal or an exit status shows how a process ended, not why: 137 is an OOM kill, a `kill -9`, or `exit 137`. So kernel
counters come first, then the program's messages checked against the samples, then bare signals. The first rule that
applies gives the verdict and the lines it is based on. From a log alone, confidence is at most LOG_ALONE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from legroom.advice import fix_commands
from legroom.advice.fit_on_machine import power_of_two
from legroom.messages import phrase, say
from legroom.probe.process_and_limits import SOCKET_TAIL, TMPDIR_VARIABLES, longest_socket
from legroom.records.failure import Cause, Evidence, Likely, Role, RuleResult, Sign, Verdict, exit_line, unknown
from legroom.records.machine import Machine, RuntimeEnvironment
from legroom.rescue import verdict_from_exit, verdict_from_log
from legroom.rescue.find_failures_in_log import Signs, quoted_line
from legroom.units import format_size

LOG_ALONE = 0.85
_DOUBTED = 0.7  # something follows the error that a dead program does not print
_SAID = 0.6  # a line only contains the words: it is not the message of what ended the job, watched or not
_OTHER_ENDS: frozenset[Cause] = frozenset({"unknown", "not-memory", "killed", "worker-killed", "ram-oom-kill"})
_LEAST_SHM = 512 << 20
_RULES: tuple[Callable[[Evidence, Signs], RuleResult | None], ...] = (
    verdict_from_exit.oom_behind_success,
    verdict_from_exit.stop_requested,
    verdict_from_exit.stalled_on_shm,
    verdict_from_exit.oom_killed,
    verdict_from_exit.oom_daemon,
    verdict_from_exit.oom_shared,
    verdict_from_exit.oom_in_log,
    verdict_from_log.faults,
    verdict_from_log.pinned,
    verdict_from_log.gpu,
    verdict_from_log.descriptors,
    verdict_from_log.processes,
    verdict_from_log.sockets,
    verdict_from_log.maps,
    verdict_from_log.shm,
    verdict_from_log.disk,
    verdict_from_log.ram,
    verdict_from_log.device,
    verdict_from_log.gpu_library,
    verdict_from_log.gpu_refused,
    verdict_from_log.bus,
    verdict_from_log.output,
    verdict_from_log.closed_output,
    verdict_from_exit.swapping,
    verdict_from_exit.ended_by,
    verdict_from_exit.worker_killed,
    verdict_from_exit.interrupted,
    verdict_from_exit.killed_by_signal,
    verdict_from_exit.crashed,
    verdict_from_exit.crashed_worker,
    verdict_from_exit.child_killed,
    verdict_from_exit.other_exception,
    verdict_from_exit.unexplained,
)

_SUMMARIES: dict[Cause, str] = {
    "shm-full": phrase(
        "/dev/shm was full: processes could not pass data through shared memory. RAM and GPU memory did not run out."
    ),
    "ram-oom-kill": phrase("RAM ran out and the OOM killer killed a process."),
    "ram-allocation": phrase("a RAM allocation failed and the program exited by itself."),
    "swap-thrash": phrase("the working set was larger than the memory limit: the job spent its time waiting for swap."),
    "gpu-oom": phrase("GPU memory ran out."),
    "pinned-exhausted": phrase("page-locked (pinned) host memory ran out. It is taken from RAM, not from GPU memory."),
    "fds-exhausted": phrase("file descriptors ran out: a process had as many open files as its limit allows."),
    "disk-full": phrase("a disk was full when the program wrote to it."),
    "tmpdir-too-long": phrase(
        "the temporary directory path (TMPDIR) is too long for a Unix socket: workers do not start, or their "
        "batches are lost."
    ),
    "worker-killed": phrase("a DataLoader worker was killed; no sign of an out-of-memory kill."),
    "killed": phrase("killed by a signal from another process; no sign of an out-of-memory kill."),
    "processes-exhausted": phrase(
        "a new process or thread could not be started: the limit on their number was reached."
    ),
    "map-count": phrase(
        "a process reached the kernel's limit on memory mappings (vm.max_map_count): each shared tensor "
        "needs one or two."
    ),
    "not-memory": phrase("the job failed with an error that does not name a resource that ran out."),
    "unknown": phrase(
        "the evidence does not show the cause. Likely causes follow, most likely first. OOM-killed processes "
        "leave no log."
    ),
}

# How to confirm each cause.
_CONFIRM: dict[Cause, str] = {
    "shm-full": phrase("check `df -h /dev/shm` while it runs: it fills up"),
    "ram-oom-kill": phrase(
        'usually RAM: `dmesg -T` shows "Killed process", or the scheduler\'s accounting reports memory'
    ),
    "ram-allocation": phrase("compare the requested size with `free -h`, `ulimit -v` and vm.overcommit_memory"),
    "swap-thrash": phrase("check `vmstat 1` while it runs: column si stays above 0"),
    "gpu-oom": phrase("check `nvidia-smi` while it runs: memory is full just before the error"),
    "pinned-exhausted": phrase("with pin_memory=False the error changes or disappears"),
    "fds-exhausted": phrase("compare `ls /proc/PID/fd | wc -l` with `ulimit -n`"),
    "processes-exhausted": phrase("compare `ps -eLf | wc -l` with `ulimit -u` and the cgroup's pids.max"),
    "map-count": phrase("compare `wc -l /proc/PID/maps` with `sysctl vm.max_map_count`"),
    "disk-full": phrase("check `df -h`, `df -i` and the quota of every directory it writes to"),
    "tmpdir-too-long": phrase("check the length of $TMPDIR"),
    "worker-killed": phrase("another process sent SIGKILL to the worker: the system log may name it"),
    "killed": phrase(
        "a time limit, a scheduler or a person: see the accounting (sacct, bhist, qstat, kubectl describe)"
    ),
    "not-memory": phrase("look for an error further up in the log, from this process or another rank"),
    "unknown": phrase("run it under `legroom run`"),
}


def classify(evidence: Evidence) -> Verdict:
    """The verdict on that evidence; `with_fixes` adds the fixes for this machine."""
    signs = Signs.of(evidence)
    result = _first(evidence, signs)
    if evidence.log.not_a_log is not None:
        summary = say("the file is not the log of a job, so its text is not evidence of a failure.")
        result = unknown((evidence.log.not_a_log,), "ram-oom-kill", "killed", "not-memory", summary=summary)
    if signs.later_death is not None and result.cause not in _OTHER_ENDS:
        result = _either(result, signs.later_death)
    if signs.doubted and result.cause not in _OTHER_ENDS:
        result = _doubted(result, evidence)
    said = result.lines[0] in {quoted_line(sign) for sign in evidence.log.signs if sign.said}
    if said and not _measured(result.cause, evidence):
        messages = tuple(sign for sign in signs.counting if not sign.said)
        plain = _first(evidence, replace(signs, counting=messages))
        proven = plain.confidence > _DOUBTED and plain.cause != "not-memory"
        result = plain if proven else _at_most(_SAID, result)
    confidence = result.confidence if evidence.live else min(LOG_ALONE, result.confidence)
    lines, victim = (*result.lines, exit_line(evidence.ending)), None  # a rule may have put it first
    if result.cause != "ram-oom-kill":
        lines = (*lines, *verdict_from_exit.oom_lines(evidence))  # always report an OOM kill
    if result.cause == "unknown":
        lines = (*lines, *evidence.unknown)
    elif evidence.oom is not None and evidence.oom.victims and result.cause == "ram-oom-kill":
        victim = evidence.oom.victims[0]
    likeliest = result.likely[0] if result.cause == "unknown" and result.likely else result.cause
    return Verdict(
        cause=result.cause,
        confidence=round(confidence, 2),
        summary=result.summary or say(_SUMMARIES[result.cause]),
        evidence=tuple(dict.fromkeys(lines)),
        likely=tuple(Likely(cause, say(_CONFIRM[cause])) for cause in result.likely),
        victim=victim,
        refused=_refused(evidence) if result.cause == "ram-allocation" else None,
        too_large=_too_large(evidence, _ram_seen(evidence)) if result.cause == "ram-allocation" else None,
        without_effect=(without := _without_effect(likeliest, evidence)),
        of_threads=_of_threads(likeliest, evidence) - without,
    )


def _measured(cause: Cause, evidence: Evidence) -> bool:
    """Whether a level that was read shows what ran out. GPU memory and RAM are often nearly full without a failure."""
    if cause == "disk-full":
        return bool(verdict_from_log.full_disks(evidence))
    level = {"shm-full": verdict_from_log.fullest_shm(evidence), "fds-exhausted": evidence.peaks.get("fds")}.get(cause)
    return level is not None and level.share >= verdict_from_log.FULL


def _first(evidence: Evidence, signs: Signs) -> RuleResult:
    return next(found for rule in _RULES if (found := rule(evidence, signs)) is not None)


_OF_WORKERS = frozenset({"prefetch_factor", "num_workers"})
_OF_RAM = ("ram-oom-kill", "ram-allocation", "swap-thrash")


def _without_effect(cause: Cause, evidence: Evidence) -> frozenset[str]:
    """Settings whose lowering cannot help against that failure."""
    if cause in _OF_RAM:
        too_large = cause == "ram-allocation" and _too_large(evidence, _ram_seen(evidence)) is not None
        leak = _no_workers(evidence) and grew_to_the_end(evidence)
        return _OF_WORKERS if leak or too_large else frozenset()
    if cause == "fds-exhausted" and verdict_from_log.held_as(evidence) == "files":
        return _OF_WORKERS  # each process has its own limit
    return frozenset()


def _of_threads(cause: Cause, evidence: Evidence) -> frozenset[str]:
    """Settings that used RAM only if they are those of threads: there were no worker processes."""
    return _OF_WORKERS if cause in _OF_RAM and _no_workers(evidence) else frozenset()


def _no_workers(evidence: Evidence) -> bool:
    """Whether the job had no worker processes, and did not fail before it could start them."""
    log = evidence.log
    named = log.raised_in == "worker" or any(sign.code.startswith("worker-") for sign in log.signs)
    return evidence.workers is False and not named


def _ram_seen(evidence: Evidence) -> int | None:
    level = evidence.peaks.get("ram")
    return None if level is None else level.size


def _too_large(evidence: Evidence, ram: int | None) -> int | None:
    asked = verdict_from_log.requested(evidence)
    return asked if asked is not None and ram is not None and asked > ram else None


def _doubted(result: RuleResult, evidence: Evidence) -> RuleResult:
    """A shortage left the script, and a step or a report of success follows: it may have gone on."""
    done, last = evidence.log.done, evidence.log.last_error
    line = (quoted_line(done),) if done and last and done.number < last.number else ()
    return _at_most(_DOUBTED, result._replace(lines=(*result.lines, *line)))


def _at_most(confidence: float, result: RuleResult) -> RuleResult:
    """The result with at most that confidence, and the causes that are possible too."""
    if result.cause == "unknown":
        return result
    likely: tuple[Cause, ...] = tuple(dict.fromkeys((result.cause, *result.likely, "not-memory")))
    return result._replace(confidence=min(result.confidence, confidence), likely=likely)


def _either(result: RuleResult, death: Sign) -> RuleResult:
    """A pool ran out, a step or two followed, then another kind of exit: the log does not show which ended it."""
    other: Cause = "not-memory" if death.code in ("crash", "bus", "worker-bus") else "ram-oom-kill"
    summary = say("a resource ran out and the program may have handled it; then it exited for another reason.")
    return unknown((*result.lines, quoted_line(death)), result.cause, other, "killed", summary=summary)


def _refused(evidence: Evidence) -> Role | None:
    """The process that an allocation failed in, if the last exception shows it."""
    last = evidence.log.last_error
    return evidence.log.raised_in if last is not None and last.code in ("ram", "ram-likely") else None


def with_fixes(verdict: Verdict, evidence: Evidence, machine: Machine) -> Verdict:
    """The verdict with the fixes for that machine."""
    if verdict.cause == "ram-allocation" and evidence.live and verdict.too_large is None:  # it ended before a sample
        pool = machine.pool("ram")
        size = _too_large(evidence, (None if pool is None else pool.size) or machine.memory.total)
        none = verdict.without_effect if size is None else verdict.without_effect | _OF_WORKERS
        verdict = replace(verdict, too_large=size, without_effect=none)
    return replace(verdict, fix=_fixes(verdict, evidence, machine))


def _fixes(verdict: Verdict, evidence: Evidence, machine: Machine) -> tuple[str, ...]:
    cause, runtime, pool = verdict.cause, machine.runtime, machine.pool("ram")
    ram = None if pool is None else pool.size
    if cause == "shm-full":
        wanted = fix_commands.advised_shm(ram)
        if (peak := evidence.peaks.get("shm")) is not None:
            bigger = max(_LEAST_SHM, 2 * power_of_two(peak.size))
            wanted = max(wanted, bigger if ram is None else min(bigger, ram // 2))
        # A log may come from elsewhere, and a large /dev/shm may be full: never advise a smaller one.
        here = machine.shm.size if machine.shm.mounted else None
        larger = (_large_already(here),) if here and here >= wanted else fix_commands.enlarge_shm(runtime, wanted)
        replaced = say(
            "legroom.DataLoader keeps batches out of /dev/shm. For an unmodified script:\n"
            "legroom run --loader legroom -- …"
        )
        return (
            say("num_workers=0 uses no shared memory; fewer workers, prefetch_factor=1 and smaller batches use less"),
            *((replaced,) if evidence.loader_replaceable else ()),
            *larger,
        )
    if cause in ("ram-oom-kill", "ram-allocation"):
        return _more_ram(machine, ram, _less_ram(cause, evidence, machine, ram))
    if cause == "swap-thrash":
        return fix_commands.settle_swap(runtime, moving=True)
    if cause == "gpu-oom":
        return fix_commands.use_less_gpu(runtime)
    if cause == "pinned-exhausted":
        less = say("pin_memory=False, or fewer batches in flight: prefetch_factor=1, fewer workers")
        return (less, *_more_ram(machine, ram))
    if cause == "fds-exhausted":
        held = verdict_from_log.held_as(evidence)
        close = say("close each file after reading it:\nwith open(path) as file: …")
        soft = machine.limits.nofile_soft or 1024
        more = fix_commands.raise_nofile(runtime, soft, None, tensors=held == "tensors")
        return (close, *more) if held == "files" else more
    if cause == "processes-exhausted":
        return _more_processes(runtime)
    if cause == "map-count":
        return _more_maps(runtime)
    if cause == "disk-full":
        return fix_commands.free_disk(*(verdict_from_log.full_disks(evidence) or evidence.full_before))
    if cause == "tmpdir-too-long":
        return fix_commands.shorten_temporary(TMPDIR_VARIABLES[0], longest_socket(runtime.platform) - SOCKET_TAIL)
    if cause == "worker-killed":
        who = say("find out what killed it: a time limit, another user, an OOM daemon (journalctl, dmesg)")
        return (who, say("check:\nlegroom doctor"))
    if cause == "killed" and evidence.keyboard:
        return ()
    if cause == "killed" and verdict_from_exit.by_sigint(evidence):
        return (
            say(
                "SIGINT is what Ctrl-C sends, also through a notebook or a launcher. If that was not you, find out "
                "what sent the signal: a script or a scheduler"
            ),
        )
    if cause == "killed":
        return (
            say("find out what sent the signal: a scheduler's time limit, another user, a daemon such as earlyoom"),
        )
    if cause == "unknown":
        if evidence.live:  # it ran under Legroom; the likely causes say how to confirm each
            return ()
        return (say("run it under Legroom next time, to record the kernel's counters:\nlegroom run -- COMMAND …"),)
    if cause == "not-memory" and verdict_from_log.closed_output(evidence, Signs.of(evidence)) is not None:
        return (say("write the output to a file, and read that:\nlegroom run -- COMMAND … > output.log"),)
    if verdict_from_exit.crashed_untraced(evidence, verdict):
        return (
            say("print the Python lines at which it crashes:\npython -X faulthandler SCRIPT …"),
            say("behind a launcher, in the shell that starts the job:\nexport PYTHONFAULTHANDLER=1"),
        )
    return (
        say(
            "read the lines above and the end of the program's output: the error does not name a resource that ran out"
        ),
    )


def _less_ram(cause: Cause, evidence: Evidence, machine: Machine, ram: int | None) -> tuple[str, ...]:
    """How to use less RAM, as far as the evidence shows what used it; empty if it does not."""
    here = ram or machine.memory.total
    if cause == "ram-allocation" and (size := _too_large(evidence, here)) is not None:
        one = say(
            "one allocation of {size} is larger than all RAM here ({ram}): work in parts, with a smaller "
            "type, or in a file (numpy.memmap)",
            size=format_size(size), ram=format_size(here or 0),
        )  # fmt: skip
        return (one,)
    if not _no_workers(evidence):
        return ()
    less = say(
        "the job had no worker processes: use smaller batches, fewer threads that load data, or keep less data in "
        "memory"
    )
    if not grew_to_the_end(evidence):
        return (less,)
    return (say("RAM grew until the end. Find the lines that keep memory:\nlegroom leak -- COMMAND …"), less)


_PARTS = 4


def grew_to_the_end(evidence: Evidence) -> bool:
    """Whether RAM rose in each part of the run, and not mainly in one of them."""
    used = [(one.when, one.levels["ram"].used) for one in evidence.readings if "ram" in one.levels]
    if len(used) <= _PARTS:
        return False
    (begin, first), (end, last) = used[0], used[-1]
    limits = [begin + (end - begin) * part / _PARTS for part in range(1, _PARTS)]
    marks = [first, *(next(size for when, size in used if when >= limit) for limit in limits), last]
    rises = [after - before for before, after in pairwise(marks)]
    return last > first and min(rises) >= (last - first) / (4 * _PARTS)


def _more_ram(machine: Machine, ram: int | None, less: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Only a limit below the machine's RAM can be raised. The process is gone, so no `ps`."""
    total = machine.memory.total
    limited = ram is not None and (total is None or ram < total)
    return fix_commands.raise_ram_limit(machine.runtime, ram if limited else None, total, running=False, use_less=less)


def _more_processes(runtime: RuntimeEnvironment) -> tuple[str, ...]:
    lines = [say("use fewer threads per process and fewer workers:\nexport OMP_NUM_THREADS=1")]
    if runtime.kind in ("docker", "podman"):
        lines.append(say("restart the container with:\n{tool} run --pids-limit -1 …", tool=runtime.kind))
    lines.append(say("in the shell that starts the job:\nulimit -u $(ulimit -Hu)"))
    return (*lines, say("check:\nulimit -u\nps -eLf | wc -l"))


def _more_maps(runtime: RuntimeEnvironment) -> tuple[str, ...]:
    fewer = say("use fewer tensors per sample and batch, and fewer batches in flight: each shared tensor is a mapping")
    more = say("as root on the host (also applies to its containers):\nsysctl -w vm.max_map_count=1048576")
    return (fewer, more, say("check:\nsysctl vm.max_map_count"))


def _large_already(size: int) -> str:
    return say(
        "/dev/shm already has {size} on this machine, and more is not advised. Check what uses it, or its "
        "size where the job failed:\nlegroom doctor",
        size=format_size(size),
    )


def verdict_object(verdict: Verdict | None) -> dict[str, Any]:
    """A verdict's JSON fields, shared by `explain` and `run`."""
    if verdict is None:
        return {"verdict": None, "confidence": None, "summary": None, "likely": [], "evidence": [], "fix": []}
    return {
        "verdict": verdict.cause,
        "confidence": verdict.confidence,
        "summary": verdict.summary,
        "likely": [{"verdict": one.cause, "why": one.why} for one in verdict.likely],
        "evidence": list(verdict.evidence),
        "fix": list(verdict.fix),
    }
