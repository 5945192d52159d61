"""One attempt of a supervised job: start it, sample it, stop it if it hangs, collect the evidence and the verdict.

Killing a process does not free tmpfs. Shared-memory files that the job left in /dev/shm are removed before the next
attempt; files of others and files that were there before stay.

A job that hangs waits for a batch that did not fit. A torch >= 2.10 worker whose queue thread cannot get shared memory
prints a traceback, drops the batch and continues. The trainer waits for that batch forever. No process exits, so no
exit status shows it. Healthy jobs also wait for minutes, for a peer or a disk. A job counts as hanging only if all of
these hold: its DataLoader workers are alive; its own processes hold about half of /dev/shm or more (63 to 99 % measured
with batches of 9 to 40 MB in 64 MB), or have a segment open without pages that is larger than what is free; and the
allocation error is near the end of its output. job_sampling.py measures for how long a job has been idle.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from legroom.messages import say
from legroom.probe.filesystems_and_cgroups import DiskLevels
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import client_name
from legroom.probe.shm_segments import SHM, Segments
from legroom.records.failure import Attempt, Evidence, LogFacts, OomCount, Reading, Verdict
from legroom.records.loader_settings_and_flags import LoaderSettings
from legroom.records.machine import Level, Machine
from legroom.rescue.cgroup_and_oom_victims import JobCgroup, KernelLog, reported_killed
from legroom.rescue.find_failures_in_log import WINDOW, facts_of, killed_in, named_paths
from legroom.rescue.job_process import JobOutput, JobProcess, in_foreground, loader_replaceable
from legroom.rescue.job_sampling import GpuReader, JobAlarms, JobSampler, JobShmFiles, StallDetector, cpu_seconds
from legroom.rescue.retry_settings import SETTINGS, NamedFlag, command_settings
from legroom.rescue.verdict import classify, with_fixes
from legroom.rescue.verdict_from_exit import oom_lines
from legroom.system.processes_and_threads import ExitStatus, handling_signals, signal_name
from legroom.units import format_size

_DRAIN = 2.0  # seconds for the last output after the end
_WATCHED = 2.0  # seconds after which a job of which no child process was seen is known to have none
_STALL_EVERY = 2.0  # seconds between stall checks
_STALL_GRACE = 5.0  # seconds from SIGTERM to SIGKILL for a stalled job
_HELD_SHARE = 0.45  # of /dev/shm, by the job's own processes
_PASSED_ON = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
    if hasattr(signal, name)  # Windows has two of them
)
_ENDS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})


@dataclass(frozen=True)
class RunOptions:
    """The options of `legroom run`."""

    command: tuple[str, ...]
    retries: int = 0
    named: tuple[NamedFlag, ...] = ()
    checkpoint: str | None = None  # a glob pattern
    resume_flag: str | None = None
    resume_existing: bool = False  # also from checkpoints older than this run
    grace: float = 30.0  # seconds from a forwarded SIGTERM to SIGKILL
    stall: float = 60.0  # seconds without progress on a full /dev/shm before the job is stopped; 0: never
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    stdout: int = 1  # file descriptor for the job's output
    replaces_loader: bool = True  # may replace torch's DataLoader after shm-full with the lowest settings
    fresh: bool = False  # ignore remembered settings
    quiet: bool = False  # print nothing on stderr

    @property
    def folders(self) -> list[str]:
        """Directories the job is known to write to: that of its checkpoints."""
        pattern = os.path.expanduser(self.checkpoint or "")
        if not pattern or (working_directory() is None and not os.path.isabs(pattern)):
            return []
        folder = os.path.dirname(os.path.abspath(pattern))
        while "*" in folder or not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return [folder]


def working_directory() -> str | None:
    """The working directory; None if it was removed. A job may not need it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


@dataclass
class EvidenceCollector:
    """Takes counters and log positions before a job starts; collects the evidence after it ends."""

    host: Host
    cgroup: JobCgroup
    sampler: JobSampler
    folders: Sequence[str] = ()  # of its checkpoints
    disks: DiskLevels = field(init=False)
    gpus: GpuReader = field(init=False)
    log: KernelLog = field(default_factory=KernelLog)
    since: float = 0.0

    def __post_init__(self) -> None:
        temporary = self.host.env.get("TMPDIR", "/tmp")
        here = filter(None, (working_directory(),))
        self.gpus = GpuReader(self.host)
        self.sampler.read_gpus = self.gpus.now
        self.disks = DiskLevels(self.host, (*self.folders, *here, temporary), lambda: self.sampler.present)

    def begin(self) -> None:
        """Read counters and log positions before the start."""
        self.disks.start()
        self.gpus.start()
        self.since = time.time()
        self.log = KernelLog.mark() if self.host.platform == "linux" else KernelLog(reason=self.host.platform)
        self.sampler.begin()

    def close(self) -> None:
        """Close what is open."""
        self.disks.finish(0.0)
        self.gpus.close()
        self.log.close()

    def evidence(
        self, ending: ExitStatus, log: LogFacts, shm_at_end: Level | None, *, unwritable: OSError | None = None
    ) -> Evidence:
        """Collect everything after the end; ``unwritable`` is why output of the job could not be written."""
        seen = self.sampler
        pids = seen.victims.job_pids | (reported_killed(log) - seen.victims.other_pids)
        reasons = (self.cgroup.reason, self.log.reason, self.disks.reason, self.gpus.reason)
        unknown = [reason for reason in reasons if reason]
        kernel = self.log.kills(pids, self._group())
        written_to = () if unwritable is None or unwritable.filename is None else (unwritable.filename,)
        killers = list(self.log.killers(pids, self.since))
        if (oomd := self.cgroup.killed_by_oomd()) is not None and self.cgroup.own:
            killers.append(oomd)
        return Evidence(
            ending=ending,
            log=log,
            unwritable=None if unwritable is None else unwritable.errno,
            elsewhere=seen.victims.client,
            oom=self._count(kernel),
            kernel=kernel,
            killers=tuple(killers),
            readings=tuple(seen.history),
            peaks=dict(seen.peaks),
            ram_peak=seen.ram_peak(),
            ram_unseen=seconds_unread(seen.history, "ram"),
            shm_at_end=shm_at_end,
            shm_unread=seen.shm_unread(),
            disks=self.disks.finish(named=(*named_paths(log), *written_to)),
            full_before=dict(self.disks.full_before),
            workers=seen.victims.children or (None if seen.victims.client or seen.age < _WATCHED else False),
            swapped_back=recent_rate(seen.history),
            stalled=worst_stall(seen.history),
            unknown=tuple(unknown),
        )

    def _group(self) -> str | None:
        """The last part of the job's own cgroup path, as the kernel log shows it."""
        if not self.cgroup.own or self.cgroup.path is None:
            return None
        return "/" + self.cgroup.path.rpartition("/")[2]

    def _count(self, kernel: tuple[str, ...] | None) -> OomCount | None:
        seen = self.sampler.victims
        if seen.kills is None:
            return None
        ours, others = seen.taken()
        victims = seen.victims()
        if kernel:  # it names the process and its RSS
            named = killed_in(kernel)
            victims = tuple(replace(one, rss=named.get(one.pid) or one.rss) for one in victims)
            victims = tuple(one for one in victims if one.pid in named) or victims
            ours = len(named)
        elif self.log.killed & seen.other_pids:
            ours, others = 0, len(self.log.killed & seen.other_pids)
        end = self.sampler.age
        return OomCount(
            kills=seen.kills,
            own=self.cgroup.own,
            source=self.cgroup.counters(self.host)[1],
            before_end=seen.before_end(end),
            ours=ours,
            others=others,
            victims=victims,
            beside=seen.beside(),
            went_on=seen.went_on(end),
        )


def recent_rate(history: list[Reading]) -> float | None:
    """Bytes per second swapped in over the last ten seconds."""
    known = [reading for reading in history if reading.swapped_back is not None]
    if len(known) < 2:
        return None
    end = known[-1]
    start = next((one for one in known if one.when >= end.when - 10.0), known[0])
    if end.when - start.when < 0.5:
        return None
    return ((end.swapped_back or 0) - (start.swapped_back or 0)) / (end.when - start.when)


def worst_stall(history: list[Reading]) -> float | None:
    """The worst PSI average of the last 15 seconds."""
    recent = (one.stalled for one in history if one.when >= history[-1].when - 15.0)
    return max((stalled for stalled in recent if stalled is not None), default=None)


def seconds_unread(history: list[Reading], pool: str) -> float | None:
    """Seconds from a pool's last sample to the end; None if it was never sampled."""
    samples = [one.when for one in history if pool in one.levels]
    return history[-1].when - samples[-1] if samples else None


@dataclass
class RunningAttempt:
    """One attempt of the job."""

    options: RunOptions
    machine: Machine
    cgroup: JobCgroup
    host: Host
    print_line: Callable[[str], None]
    stop_signal: int | None = None  # the signal that asked us to stop
    stalled_on: str | None = None
    held_shm: int | None = None  # bytes held by the job at the last stall check
    shm_files: JobShmFiles = field(init=False)  # since the job was started
    _child: JobProcess | None = None
    _early: list[int] = field(default_factory=list)  # signals that arrived before it was started
    _output: JobOutput = field(default_factory=JobOutput)
    _deadline: float | None = None
    _unread: bool = False  # reading the job's resources failed
    _loader_replaceable: bool = True  # by Legroom's
    _typed: bool = False  # we were the terminal's foreground group when that signal arrived
    _had_terminal: bool = False  # the job was the terminal's foreground group

    def run(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], *, raise_descriptors: bool
    ) -> Attempt:
        """Start the job, wait for its end, and return the attempt with its verdict."""
        self._output = JobOutput(stdout=self.options.stdout)
        self._loader_replaceable = loader_replaceable(environment)
        streams = self._output.open()
        sampler = JobSampler(self.host, self.cgroup, list)
        self.shm_files = sampler.shm_files
        alarms = JobAlarms(sampler)
        collector = EvidenceCollector(self.host, self.cgroup, sampler, self.options.folders)
        try:
            collector.begin()
            with handling_signals(_PASSED_ON, self._pass_on):
                child = self._child = JobProcess.start(
                    command, environment, streams, self.cgroup, raise_descriptors=raise_descriptors
                )
                for number in self._early:
                    child.signal(number)
                self._had_terminal = child.foreground is not None
                self._output.start()
                if self._output.reason is not None:
                    self._print(self._output.reason)
                sampler.pids = lambda: child.pids(self.host)
                sampler.victims.root = child.process.pid
                sampler.victims.client = client_name(command)
                sampler.written = lambda: self._output.count
                ending, shm_at_end = self._wait(child, sampler, alarms)
                fine = ending.success and self.stalled_on is None
                if not fine:
                    child.kill_all(
                        self.host
                    )  # leftovers would hold memory, ports and files that the next attempt needs
                child.close(self.host)  # a reader may be a pager that needs the terminal
                self._output.finish(_DRAIN)
            if (problem := self._output.error) is not None:
                where = say("the command's output") if problem.filename is None else problem.filename
                self._print(say("cannot write {path}: {why}", path=where, why=problem.strerror))
            verdict: Verdict | None = None
            notes: list[str] = []
            if not fine or sampler.kills():
                verdict, evidence = self._verdict(collector, ending, shm_at_end)
                if fine and verdict.cause != "ram-oom-kill":
                    verdict, notes = None, oom_lines(evidence)  # an OOM kill that may not have been the job's
                    for line in notes:
                        self._print(line)
        except BaseException:
            if self._child is None:
                self._output.abandon()
            elif self._child.process.returncode is None:  # nobody would read its output
                self._child.kill_all(self.host)
                self._child.close(self.host)
            raise
        finally:
            collector.close()
        found = command_settings(command, self.options.named)
        return Attempt(
            number=number,
            command=tuple(command),
            settings=LoaderSettings(**{name: getattr(found, name) for name in SETTINGS}),
            ending=ending,
            seconds=sampler.age,
            verdict=verdict,
            notes=tuple(notes),
            readings=tuple(sampler.history),
            peaks=dict(sampler.peaks),
            alarms=tuple(alarms.raised),
            had_workers=sampler.victims.torch_workers,
        )

    def begin_line(self) -> None:
        """Start a new line if the job's output ended in the middle of one."""
        if not self.options.quiet:
            self._output.begin_line()

    def _print(self, line: str) -> None:
        self.begin_line()
        self.print_line(line)

    def _wait(self, child: JobProcess, sampler: JobSampler, alarms: JobAlarms) -> tuple[ExitStatus, Level | None]:
        stall = StallDetector(self.options.stall)
        stall_at = 0.0
        while True:
            ending = child.wait(sampler.pause, self._output)
            if ending is not None:
                return ending, sampler.sample_at_end()
            try:
                self._sample(child, sampler, alarms)
            except OSError as problem:  # no descriptor is left, for example: the job goes on
                if not self._unread:
                    self._print(say("the job's resources are not read: {why}", why=problem.strerror or problem))
                self._unread = True
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                child.kill_all(self.host)
                self._deadline = None
            if now >= stall_at and self.stalled_on is None and self.stop_signal is None:
                stall_at = now + _STALL_EVERY
                cpu = cpu_seconds(self.host, child.pids(self.host))
                if stall.stalled(now, cpu, self._output.count) and self._hangs(child, sampler):
                    self._stop_stalled(child, stall)

    def _sample(self, child: JobProcess, sampler: JobSampler, alarms: JobAlarms) -> None:
        reading = sampler.sample()
        if reading is None:
            return
        child.reap(self.host)
        if self._output.resize():  # the terminal's own SIGWINCH came before the job could see its new size
            child.signal_group(signal.SIGWINCH)
        for alarm in alarms.update(reading):
            self._print(f"{alarm.level} {alarm.code}: {alarm.message}")

    def _hangs(self, child: JobProcess, sampler: JobSampler) -> bool:
        pids = child.pids(self.host)
        self.held_shm = held_shm(self.host, pids)
        log = facts_of(self._output.tail.bytes())
        refused = refused_shm(self.host, pids)
        return hangs_on_shm(sampler.shm(), self.held_shm, log, loader=sampler.victims.loader, refused=refused)

    def _stop_stalled(self, child: JobProcess, stall: StallDetector) -> None:
        held = format_size(self.held_shm or 0)
        if not self.options.retries:
            stall.limit = 0.0  # printed once
            self._print(
                say("the job hangs: /dev/shm is too full for its next batch (the job uses {held}). With "
                    "--retries it would be restarted", held=held)
            )  # fmt: skip
            return
        self._print(
            say("the job hangs: /dev/shm is too full for its next batch (the job uses {held}). Stopping it", held=held)
        )
        self.stalled_on = "shm"
        child.signal(signal.SIGTERM)
        self._deadline = time.monotonic() + min(self.options.grace, _STALL_GRACE)

    def _verdict(
        self, collector: EvidenceCollector, ending: ExitStatus, shm_at_end: Level | None
    ) -> tuple[Verdict, Evidence]:
        log = facts_of(self._output.tail.bytes(), self._output.tail.passed)
        evidence = replace(
            collector.evidence(ending, log, shm_at_end, unwritable=self._output.error),
            asked_to_stop=self.stop_signal,
            stalled_on=self.stalled_on,
            held_shm=self.held_shm,
            keyboard=self._by_keyboard(ending, log),
            reader_closed=self._output.reader_closed,
            loader_replaceable=self._loader_replaceable,
        )
        return with_fixes(classify(evidence), evidence, self.machine), evidence

    def _by_keyboard(self, ending: ExitStatus, log: LogFacts) -> bool:
        """Whether Ctrl-C ended it: sent to us, or to the job if it had the terminal."""
        if self.stop_signal is not None:
            return self.stop_signal == signal.SIGINT and self._typed
        last = log.last_error
        interrupted = last is not None and "KeyboardInterrupt" in last.line
        return self._had_terminal and (ending.by_signal(signal.SIGINT) or interrupted)

    def _pass_on(self, number: int, _frame: object) -> None:
        if number == getattr(signal, "SIGWINCH", None):
            self._output.resize()
        if signal_name(number) in _ENDS:
            if self.stop_signal is None:
                self.stop_signal, self._typed = number, in_foreground()
            if self._deadline is None:
                self._deadline = time.monotonic() + self.options.grace
            running = self._child is None or self._child.process.returncode is None
            until = time.monotonic() + (self.options.grace if running else 0.0)
            self._output.give_up_at = min(until, self._output.give_up_at)
        if self._child is None:
            self._early.append(number)
        elif signal_name(number) == "SIGCONT":
            self._child.resume()
        else:
            self._child.signal(number)


def held_shm(host: Host, pids: Sequence[int]) -> int | None:
    """Bytes of /dev/shm that these processes map or have open; None if unreadable."""
    if not pids:
        return 0
    segments = Segments.of(host, pids[0])
    inodes: set[int] = set()
    for pid in pids:
        held = segments.of_process(pid)
        if held is None:
            return None
        inodes |= held.inodes
    return segments.total(inodes)


def refused_shm(host: Host, pids: Sequence[int]) -> int:
    """Bytes without pages of the largest /dev/shm segment that these processes have open: a failed allocation.

    torch sets the file size before it allocates pages, and keeps a file whose allocation failed.
    """
    most = 0
    for pid in pids:
        folder = host.path(f"/proc/{pid}/fd")
        try:
            names = os.listdir(folder)
        except OSError:  # exited, or not readable
            continue
        for name in names:
            # Read the link before stat: stat on a dead network file system would hang.
            if (host.link(f"/proc/{pid}/fd/{name}") or "").startswith(SHM + "/"):
                try:
                    found = os.stat(folder / name)
                except OSError:
                    continue
                most = max(most, found.st_size - found.st_blocks * 512)
    return most


def hangs_on_shm(level: Level | None, held: int | None, log: LogFacts, *, loader: bool, refused: int = 0) -> bool:
    """Whether an idle job waits for a batch that did not fit into /dev/shm. Pure.

    ``refused``: bytes of the job's own segment that got no pages. A segment larger than what is free cannot fit,
    however little the job holds.
    """
    if not loader or level is None or held is None:
        return False
    if held < level.size * _HELD_SHARE and refused <= level.size - level.used:
        return False
    return any(sign.code == "shm" and sign.number <= WINDOW for sign in log.signs)
