"""How a job failed: the evidence, the verdict, and the attempts of a supervised run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from legroom.messages import say
from legroom.records.finding_and_alarm import Alarm
from legroom.records.loader_settings_and_flags import LoaderSettings
from legroom.records.machine import Level
from legroom.system.processes_and_threads import ExitStatus
from legroom.units import format_size

# Causes that mean a memory pool, file descriptors or disk ran out; the others do not.
MemoryCause = Literal[
    "shm-full", "ram-oom-kill", "ram-allocation", "swap-thrash", "gpu-oom", "pinned-exhausted", "fds-exhausted",
    "processes-exhausted", "map-count", "disk-full",
]  # fmt: skip
Cause = MemoryCause | Literal["tmpdir-too-long", "worker-killed", "killed", "not-memory", "unknown"]
MEMORY_CAUSES: frozenset[Cause] = frozenset(get_args(MemoryCause))

Role = Literal["main", "worker"]  # the training process; a DataLoader worker


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory pools at one moment of a run; unreadable ones are left out."""

    when: float  # seconds since the start
    levels: Mapping[str, Level]
    swapped_back: int | None = None  # bytes swapped in by the job since the start
    oom_kills: int | None = None  # of the job's cgroup, since the start
    stalled: float | None = None  # PSI: percent of the last ten seconds in which all tasks stalled


@dataclass(frozen=True, slots=True)
class Sign:
    """A line of a log that is evidence for a cause."""

    code: str
    line: str
    number: int  # counted from the end of the log: 1 is the last line
    at: int = 0  # offset in the line where the matching text begins
    said: bool = False  # the line only contains the words: it is not a message that begins with them


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What was found at the end of a log."""

    signs: tuple[Sign, ...] = ()
    last_error: Sign | None = None  # the last exception that ended a program
    chain_from: int | None = None  # lines from the end at which its tracebacks begin
    own_from: int | None = None  # the same without the exceptions that led to it
    errors: tuple[Sign, ...] = ()  # all exceptions, including the last
    raised_in: Role | None = None  # which process raised the last one; None: not shown by the traceback
    progress: tuple[int, ...] = ()  # lines in which the program reports a training step; only the last ones
    done: Sign | None = None  # the last line that reports the end of a successful run
    lines: int = 0  # lines that were read
    skipped: int = 0  # bytes that were not read
    not_a_log: str | None = None  # why the file cannot be the output of a job


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the job that had ended when an OOM counter rose."""

    pid: int
    command: str  # or its name, if the command line could not be read in time
    rss: int | None = None  # in the last sample before that
    role: Role | None = None  # None: neither, or unknown
    rank: int | None = None  # from the environment of a distributed job


@dataclass(frozen=True, slots=True)
class OomCount:
    """OOM kills counted during the run."""

    kills: int
    own: bool  # the counter belongs to the job's own cgroup and counts only its processes
    source: str
    before_end: float | None = None  # seconds from the last kill that may be the job's to the end of the job
    ours: int = 0  # of a shared counter: kills of the job's processes
    others: int = 0  # and kills of other processes
    victims: tuple[Victim, ...] = ()  # the job's killed processes, largest first
    beside: tuple[Victim, ...] = ()  # the job's largest other processes at that time
    went_on: bool = False  # the job printed output after the last kill

    @property
    def of_job(self) -> int:
        """Kills of processes of the job."""
        return self.kills if self.own else self.ours

    @property
    def unattributed(self) -> int:
        """Kills of unknown processes."""
        return 0 if self.own else max(0, self.kills - self.ours - self.others)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All evidence about a failure. None means unknown; ``unknown`` gives the reason."""

    ending: ExitStatus | None = None  # None: there is only a log
    asked_to_stop: int | None = None  # the signal with which the supervisor was asked to stop it
    keyboard: bool = False  # Ctrl-C in its terminal
    stalled_on: str | None = None  # the full pool it hung on when the supervisor stopped it
    held_shm: int | None = None  # bytes of /dev/shm that the job used then
    log: LogFacts = LogFacts()
    unwritable: int | None = None  # the errno with which the job's output could not be written
    reader_closed: bool = False  # the program that read the job's output closed its end of the pipe
    elsewhere: str | None = None  # a program of the job (docker, ssh) whose processes no counter or level here covers
    oom: OomCount | None = None
    kernel: tuple[str, ...] | None = None  # lines of the kernel log that name a process of the job; None: not readable
    killers: tuple[str, ...] = ()  # traces of systemd-oomd, earlyoom and other OOM daemons
    readings: tuple[Reading, ...] = ()
    peaks: Mapping[str, Level] = field(default_factory=dict)  # the highest sampled level of each pool
    ram_peak: Level | None = None  # the kernel's peak of the job's cgroup; None: not recorded, or no higher
    ram_unseen: float | None = None  # seconds from the last sample of RAM to the end
    shm_at_end: Level | None = None  # read when the job ended
    shm_unread: float = 0.0  # the longest time between two readings of /dev/shm in the last seconds
    loader_replaceable: bool = True  # False: it ran with Legroom's DataLoader already
    disks: Mapping[str, Level] = field(default_factory=dict)  # by path, read until after the end; empty: none was read
    workers: bool | None = (
        None  # whether a Python process of the job had child processes; None: not watched long enough
    )
    full_before: Mapping[str, Level] = field(default_factory=dict)  # other disks, full at the start and at the end
    swapped_back: float | None = None  # bytes per second over the last seconds
    stalled: float | None = None  # PSI, the maximum of the last seconds
    unknown: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """Whether the failure was observed live, not only read from a log."""
        return self.ending is not None


@dataclass(frozen=True, slots=True)
class Likely:
    """A possible cause, and how to confirm it."""

    cause: Cause
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause, its confidence, and the evidence."""

    cause: Cause
    confidence: float  # 0 to 1
    summary: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    likely: tuple[Likely, ...] = ()  # possible causes in order, if the cause is unknown or a guess
    victim: Victim | None = None  # the process that the OOM killer killed
    refused: Role | None = None  # the process in which an allocation failed; None: not shown by the log
    too_large: int | None = None  # bytes of one refused allocation, if it is larger than all RAM
    without_effect: frozenset[str] = frozenset()  # settings that have no influence on what ran out
    of_threads: frozenset[str] = frozenset()  # those that have it only if the job loads data in threads

    @property
    def memory(self) -> bool:
        """Whether a memory pool ran out."""
        return self.cause in MEMORY_CAUSES


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a supervised command, and how it ended."""

    number: int  # 1 is the first
    command: tuple[str, ...]
    settings: LoaderSettings  # as they stand on its command line, and the loader that replaced torch's
    ending: ExitStatus
    seconds: float
    changed: tuple[str, ...] = ()  # what was changed since the attempt before, and why
    resumed_from: str | None = None
    verdict: Verdict | None = None  # None: it succeeded, and none of its processes was OOM-killed
    readings: tuple[Reading, ...] = ()
    peaks: Mapping[str, Level] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    alarms: tuple[Alarm, ...] = ()  # ``since`` counts from the start, like ``Reading.when``
    had_workers: bool = False  # a DataLoader worker was seen; one that lived for less than a sample may be missed

    @property
    def finished(self) -> bool:
        """Whether it exited with status 0, even if one of its processes was OOM-killed."""
        return self.verdict is None or (self.ending.success and self.verdict.cause == "ram-oom-kill")


@dataclass(frozen=True, slots=True)
class SupervisedRun:
    """A supervised run: its command and all attempts."""

    command: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    began: float  # Unix time
    isolation: str  # how the job was isolated: its own cgroup, or a process group and why
    stopped: str | None = None  # why there was no further attempt after a failure
    own_cpu: float | None = None  # CPU seconds that the supervisor used

    @property
    def ending(self) -> ExitStatus:
        """How the last attempt ended."""
        return self.attempts[-1].ending

    @property
    def verdict(self) -> Verdict | None:
        """That of the last attempt; None if it succeeded without an OOM kill."""
        return self.attempts[-1].verdict


UNKNOWN = 0.1  # the confidence of `unknown`


class RuleResult(NamedTuple):
    """A cause, how sure, and the lines it is based on."""

    cause: Cause
    confidence: float
    lines: tuple[str, ...]
    summary: str = ""  # if the cause's usual summary does not apply
    likely: tuple[Cause, ...] = ()  # candidates, most likely first; always given for `unknown`


def unknown(lines: tuple[str, ...], *likely: Cause, summary: str = "") -> RuleResult:
    """The result without a proven cause, with the candidates, most likely first."""
    return RuleResult("unknown", UNKNOWN, lines, summary, likely)


def headline(verdict: Verdict) -> str:
    """The verdict's code and confidence."""
    if verdict.cause == "unknown":
        return verdict.cause
    return say("{cause}, {sure:.0%} sure", cause=verdict.cause, sure=verdict.confidence)


def exit_line(ending: ExitStatus | None) -> str:
    """The exit status as evidence."""
    if ending is None:
        return say("exit status: unknown (from a log only)")
    return say("exit status: {how}", how=str(ending))


def level_line(what: str, level: Level) -> str:
    """How full something was."""
    return say(
        "{what}: {used} of {size} ({share:.0%})",
        what=what, used=format_size(level.used), size=format_size(level.size), share=level.share,
    )  # fmt: skip
