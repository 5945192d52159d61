"""How a process died, and which memory killed it.

Covers: what is known about a death, the verdict on it, one attempt of a supervised run.
Does not cover: gathering it, judging it, acting on it (rescue).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from legroom.records.watch_sample import Alarm
from legroom.system.child_processes import ExitStatus

Cause = Literal[
    "shm-full",
    "ram-oom-kill",
    "ram-allocation",
    "swap-thrash",
    "gpu-oom",
    "pinned-exhausted",
    "fds-exhausted",
    "processes-exhausted",
    "map-count",
    "disk-full",
    "tmpdir-too-long",
    "worker-killed",
    "killed",
    "not-memory",
    "unknown",
]

Role = Literal["main", "worker"]  # a process that trains and has loader workers; such a worker

# Causes that say memory (or what a loader needs like memory) ran out; the other five do not.
MEMORY_CAUSES: frozenset[Cause] = frozenset(
    {
        "shm-full",
        "ram-oom-kill",
        "ram-allocation",
        "swap-thrash",
        "gpu-oom",
        "pinned-exhausted",
        "fds-exhausted",
        "processes-exhausted",
        "map-count",
        "disk-full",
    }
)


@dataclass(frozen=True, slots=True)
class Level:
    """How full one pool was."""

    used: int
    size: int

    @property
    def share(self) -> float:
        """Used as a share of the size; 0 of a pool that has none."""
        return self.used / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The pools at one moment of a run; a pool that could not be read is left out."""

    when: float  # seconds since the start
    levels: Mapping[str, Level]
    swapped_back: int | None = None  # bytes the job had to fetch back from swap, since the start
    oom_kills: int | None = None  # of the job's cgroup, since the start
    stalled: float | None = None  # PSI: percent of the last ten seconds in which everything stood still


@dataclass(frozen=True, slots=True)
class Sign:
    """A line of a log that says something about a death."""

    code: str
    line: str
    number: int  # counted from the end of the log: 1 is the last line
    at: int = 0  # where in the line the words begin that make it a sign


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What the end of a log says."""

    signs: tuple[Sign, ...] = ()
    last_error: Sign | None = None  # the last exception that ended a program
    chain_from: int | None = None  # how far back the tracebacks that belong to it begin
    errors: tuple[Sign, ...] = ()  # every exception, the last one included
    raised_in: Role | None = (
        None  # the process that raised the last one; None: the traceback does not show it
    )
    progress: tuple[int, ...] = ()  # lines in which the program reports a step; the last ones only
    lines: int = 0  # that were looked at
    skipped: int = 0  # bytes that were not


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the job that was gone once an OOM counter had risen."""

    pid: int
    command: str  # or its name, where the command line was not read in time
    rss: int | None = None  # at the last reading before
    role: Role | None = None  # None: neither, or not known
    rank: int | None = None  # of a distributed job, where its environment says


@dataclass(frozen=True, slots=True)
class OomCount:
    """OOM kills counted during the run."""

    kills: int
    own: bool  # the counter is of the job's own cgroup: no other process's deaths are in it
    source: str
    before_end: float | None = None  # seconds from the last one that may be the job's to the end of the job
    ours: int = 0  # of a shared counter: kills that took a process of the job
    others: int = 0  # and those that took another process
    victims: tuple[Victim, ...] = ()  # of the job, the largest first
    beside: tuple[Victim, ...] = ()  # the job's largest other processes then
    went_on: bool = False  # the job kept on writing after the last one

    @property
    def of_job(self) -> int:
        """Kills that took a process of the job."""
        return self.kills if self.own else self.ours

    @property
    def unattributed(self) -> int:
        """Kills of which it is not known whose process they took."""
        return 0 if self.own else max(0, self.kills - self.ours - self.others)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known about a death. None: not known, and ``unknown`` says why."""

    ending: ExitStatus | None = None  # None: there is only a log
    asked_to_stop: int | None = None  # the signal that told the supervisor to end it
    keyboard: bool = False  # Ctrl-C at the terminal that it was started from
    stalled_on: str | None = None  # the pool that it hung on when the supervisor ended it
    held_shm: int | None = None  # bytes of /dev/shm that the job itself held then
    log: LogFacts = LogFacts()
    oom: OomCount | None = None
    kernel: tuple[str, ...] | None = (
        None  # lines of the kernel's log that name a process of the job; None: unread
    )
    killers: tuple[str, ...] = ()  # what systemd-oomd, earlyoom and the like left about it
    readings: tuple[Reading, ...] = ()
    peaks: Mapping[str, Level] = field(default_factory=dict)  # the fullest each pool was seen
    ram_peak: Level | None = (
        None  # the kernel's own peak of the job's group; None: it keeps none, or it says no more
    )
    ram_unseen: float | None = None  # seconds from the last look at RAM to the end
    shm_at_end: Level | None = None  # read at the moment of death
    disks: Mapping[str, Level] = field(default_factory=dict)  # by path, read after it
    swapped_back: float | None = None  # bytes a second over the last seconds
    stalled: float | None = None  # PSI, the worst of the last seconds
    unknown: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """Whether the death was seen, and not only read about."""
        return self.ending is not None


@dataclass(frozen=True, slots=True)
class Likely:
    """A cause that could be it, and what would tell."""

    cause: Cause
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ended it, how sure that is, and the lines it rests on."""

    cause: Cause
    confidence: float  # 0 to 1
    summary: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    likely: tuple[Likely, ...] = ()  # where the cause is unknown, or a guess: what it could be, in order
    victim: Victim | None = None  # the process that the OOM killer took
    refused: Role | None = None  # the process that an allocation failed in; None: the log does not show it

    @property
    def memory(self) -> bool:
        """Whether something ran out."""
        return self.cause in MEMORY_CAUSES


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a supervised command, and how it ended."""

    number: int  # 1 is the first
    command: tuple[str, ...]
    settings: Mapping[str, int | bool | str | None]
    ending: ExitStatus
    seconds: float
    changed: tuple[str, ...] = ()  # why it differs from the one before, line by line
    resumed_from: str | None = None
    verdict: Verdict | None = None  # None: it ended well, and no process of it was OOM-killed on the way
    readings: tuple[Reading, ...] = ()
    peaks: Mapping[str, Level] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    alarms: tuple[
        Alarm, ...
    ] = ()  # as they were raised; ``since`` counts from the start, as a reading's ``when``

    @property
    def finished(self) -> bool:
        """Whether it ended with status 0 by itself, also where a process of it was OOM-killed on the way."""
        return self.verdict is None or (self.ending.success and self.verdict.cause == "ram-oom-kill")


@dataclass(frozen=True, slots=True)
class SupervisedRun:
    """A supervised run: its command and all attempts."""

    command: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    began: float  # seconds of the day's clock
    isolation: str  # in what the job ran: a cgroup of its own, or a process group and why
    stopped: str | None = None  # why there was no further attempt after a death
    own_cpu: float | None = None  # seconds of CPU that supervising took

    @property
    def ending(self) -> ExitStatus:
        """How the last attempt ended."""
        return self.attempts[-1].ending

    @property
    def verdict(self) -> Verdict | None:
        """The last attempt's; None where it ended well and lost no process to the OOM killer."""
        return self.attempts[-1].verdict
