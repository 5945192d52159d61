"""Run a command, restart it with lower settings after an out-of-memory failure, and remember what worked.

The supervisor creates the job's cgroup before the first attempt and removes it after the last. Each attempt has its own
process, output and evidence (job_attempt.py), closed before the next one starts. After `supervise` returns, only
processes that a successful job left running remain.

What a successful run had to lower is remembered per command and working directory (remembered_settings.py). It limits
the settings of later runs (`within_limits` in retry_settings.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from legroom.errors import UsageError
from legroom.loader.tune.remembered_settings import forget, pool_sizes, recall_on, remember
from legroom.messages import counted, listed, phrase, say, step_label
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.failure import Attempt, SupervisedRun, Verdict, headline
from legroom.records.loader_settings_and_flags import VARIABLE, LoaderSettings, from_environment, to_environment
from legroom.records.machine import Machine
from legroom.rescue.cgroup_and_oom_victims import JobCgroup, make_job_cgroup
from legroom.rescue.find_command import find_command
from legroom.rescue.job_attempt import RunningAttempt, RunOptions, working_directory
from legroom.rescue.job_process import loader_replaceable, with_loader
from legroom.rescue.newest_checkpoint import Stamp, newest_complete, stamps
from legroom.rescue.retry_settings import (
    SETTINGS,
    SHORT_NAMES,
    CommandSettings,
    NamedFlag,
    RetryStep,
    command_settings,
    describe_changes,
    find_flags,
    lowered_in_environment,
    next_step,
    settings_without,
    step_without,
    with_resume,
    with_settings,
    within_limits,
)
from legroom.rescue.verdict_from_exit import process_name
from legroom.system.processes_and_threads import adopting_orphans
from legroom.units import format_duration, format_size

_BELOW = " " * 8
_IN_ENVIRONMENT = frozenset({"num_workers", "prefetch_factor", "low_memory", "pin_memory"})
_PRINTED = {"loader_kind": "loader"}  # as the option --loader


def supervise(
    options: RunOptions, machine: Machine, print_line: Callable[[str], None], host: Host | None = None
) -> SupervisedRun:
    """Run a command under supervision until it succeeds or no retry is left."""
    return Supervisor(options, machine, print_line, host or Host()).run()


@dataclass
class Supervisor:
    """One supervised run."""

    options: RunOptions
    machine: Machine
    print_line: Callable[[str], None]
    host: Host
    lowered: LoaderSettings = field(default_factory=LoaderSettings)  # changes to the command as given
    resumed: str | None = None
    raise_descriptors: bool = False
    last_change: RetryStep | None = None  # the settings change before the latest attempt
    before_change: LoaderSettings = field(default_factory=LoaderSettings)  # ``lowered`` without it
    refused: tuple[LoaderSettings, ...] = ()  # changes after which the job failed with another error
    existing: frozenset[Stamp] = frozenset()  # checkpoints older than this run

    def run(self) -> SupervisedRun:
        """Run the command until it succeeds or no retry is left."""
        find_command(self.options.command[0])
        if self.options.retries:
            from_environment(self.options.environment)  # an error in it is reported now, not after a failure
        if hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # Inherited: the kernel would drop the job's exit status. The main thread alone may change it.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        began, cpu = time.time(), time.process_time()
        if self.options.checkpoint is not None and not self.options.resume_existing:
            self.existing = stamps(self.options.checkpoint)
        cgroup = make_job_cgroup(self.host, f"legroom-run-{os.getpid()}")
        isolation = _isolation(cgroup)
        try:
            with adopting_orphans():  # so that processes of a failed attempt in other sessions are found, and killed
                attempts, stopped = self._attempts(cgroup)
        finally:
            cgroup.close()
        return SupervisedRun(
            self.options.command, tuple(attempts), began, isolation, stopped, time.process_time() - cpu
        )

    def _attempts(self, cgroup: JobCgroup) -> tuple[list[Attempt], str | None]:
        options = self.options
        key = command_key(options.command, options.named, working_directory() or "")
        limited = self._limited(key)
        changed = self._start_within(limited)
        attempts: list[Attempt] = []
        notes: list[str] = []
        while True:
            running = RunningAttempt(options, self.machine, cgroup, self.host, self.print_line)
            attempt = running.run(
                len(attempts) + 1, self._command(), self._environment(), raise_descriptors=self.raise_descriptors
            )
            attempt = replace(
                attempt,
                changed=tuple(changed),
                settings=replace(attempt.settings, loader_kind=self.lowered.loader_kind),
                verdict=_after_change(attempt.verdict, None if self.last_change is None else self.last_change.why),
                resumed_from=self.resumed,
                notes=(*notes, *attempt.notes),
            )
            attempts.append(attempt)
            if attempt.verdict is not None or len(attempts) > 1:
                running.begin_line()
            if attempt.verdict is not None:
                self._print_verdict(attempts)
            if attempt.finished:
                self._print_success(attempts)
                if attempt.verdict is not None:
                    return attempts, None  # do not remember settings with which a process was OOM-killed
                if self.lowered.given() and self.lowered != limited:
                    asked, sizes = self._as_given().values(), pool_sizes(self.machine)
                    request = LoaderSettings(**{name: asked[name] for name in SETTINGS})
                    remember("run", key, self.lowered, sizes, options.environment, asked=request)
                elif limited.given() and not self.lowered.given():
                    forget("run", key, options.environment)  # it succeeded above the limits
                return attempts, None
            step = self._step(attempts, asked=running.stop_signal is not None)
            freed = running.shm_files.remove()
            removed = (
                [] if not freed else [say("removed {size} that the job left in /dev/shm", size=format_size(freed))]
            )
            if step.stop:
                for note in removed:
                    self.print_line(note)
                attempts[-1] = replace(attempts[-1], notes=(*attempts[-1].notes, *removed))
                if options.retries:
                    self.print_line(say("not retrying: {why}", why=step.why))
                    self._print_failure(attempts)
                return attempts, step.why
            changed = [step.why]
            notes = [*self._unread(step.changes), *self._take(step), *removed]
            self._print_retry(len(attempts), step.why, notes)

    def _command(self) -> list[str]:
        command = with_settings(self.options.command, self.lowered, self.options.named)
        if self.resumed is not None and self.options.resume_flag is not None:
            return with_resume(command, self.options.resume_flag, self.resumed)
        return command

    def _environment(self) -> dict[str, str]:
        environment = dict(self.options.environment)
        if self.lowered.given():
            environment[VARIABLE] = to_environment(lowered_in_environment(from_environment(environment), self.lowered))
        if self.lowered.loader_kind is not None:
            environment = with_loader(environment)
        return environment

    def _step(self, attempts: Sequence[Attempt], *, asked: bool) -> RetryStep:
        verdict = attempts[-1].verdict
        assert verdict is not None
        if asked:
            return RetryStep(say("legroom received a signal to stop"), stop=True)
        if len(attempts) > self.options.retries:
            used = say("all {count} attempts are used", count=len(attempts))
            return RetryStep(used if self.options.retries else say("no retries requested (--retries)"), stop=True)
        change, failure = self.last_change, attempts[-2].verdict if len(attempts) > 1 else None
        size = verdict.too_large
        if size is not None and failure is not None and failure.too_large == size:
            same = say("the last change did not make the allocation of {size} smaller", size=format_size(size))
            return RetryStep(same, stop=True)
        if verdict.cause == "not-memory" and change is not None and failure is not None and change.undo is None:
            before = replace(self, lowered=self.before_change)
            return step_without(change.changes, change.why, failure, before._changeable_settings())
        killed = sum(1 for one in attempts if one.verdict and one.verdict.cause == "worker-killed")
        return next_step(
            verdict,
            self._changeable_settings(),
            descriptors_raised=self.raise_descriptors,
            repeated=killed > 1,
            last_change=None if change is None else change.why,
        )

    def _changeable_settings(self) -> CommandSettings:
        """Settings that can be changed and that the job has not refused."""
        return reduce(settings_without, self.refused, self._known_settings())

    def _known_settings(self) -> CommandSettings:
        """Settings on the command line, or in the environment if none is recognized there."""
        found = command_settings(self._command(), self.options.named)
        if found.num_workers != 0 and self.options.replaces_loader:
            found = replace(found, replaces_loader=loader_replaceable(self._environment()))
        if found.changeable:
            return found
        asked = from_environment(self._environment())
        return replace(
            found,
            **{name: getattr(asked, name) for name in _IN_ENVIRONMENT},
            changeable=_IN_ENVIRONMENT,
            only_environment=True,
        )

    def _unread(self, changes: LoaderSettings) -> list[str]:
        """A note where the script may not see these changes, and what to type so that it does."""
        names = [SHORT_NAMES.get(name, name) for name in changes.given() if name in _IN_ENVIRONMENT]
        if not names or not self._known_settings().only_environment:
            return []
        return [
            say(
                "only in {variable}, which the script may not read. If it has a flag, name it: {options}",
                variable=VARIABLE,
                options=" ".join(f"--flag {name}=--ITS-FLAG" for name in names),
            )
        ]

    def _as_given(self) -> CommandSettings:
        """Settings that the user asked for."""
        return replace(self, lowered=LoaderSettings(), resumed=None)._known_settings()

    def _take(self, step: RetryStep) -> list[str]:
        """Apply the step to the next attempt; return notes to print."""
        if step.undo is not None:
            self.lowered, self.refused = self.before_change, (*self.refused, step.undo)
        self.before_change = self.lowered
        self.lowered = self.lowered.changed(step.changes)
        self.last_change = step if step.changes.given() else None
        self.raise_descriptors = self.raise_descriptors or step.raise_descriptors
        return self._find_checkpoint()

    def _find_checkpoint(self) -> list[str]:
        if self.options.checkpoint is None:
            return []
        found = newest_complete(self.options.checkpoint, self.existing)
        self.resumed = found.path if self.options.resume_flag is not None else None
        notes = [say("skipped checkpoint {why}", why=why) for why in found.skipped]
        if found.path is not None:
            if self.resumed is None:
                notes.append(
                    say(
                        "newest complete checkpoint: {path}; without --resume-flag the script must find it",
                        path=found.path,
                    )
                )
            return notes
        if found.older is not None:
            allowed = (
                "--resume-existing" if self.options.resume_flag is not None else "--resume-flag, --resume-existing"
            )
            notes.append(
                say("{path} is older than this run and is not used; to use it: {options}",
                    path=found.older, options=allowed)
            )  # fmt: skip
        else:
            notes.append(say("no complete checkpoint matches {pattern}", pattern=self.options.checkpoint))
        return notes

    def _limited(self, key: str) -> LoaderSettings:
        """What the limits of an earlier run change in the command as given."""
        found = recall_on(self.machine, "run", key, self.options.environment)
        if found is not None:
            with contextlib.suppress(UsageError):  # LEGROOM_SETTINGS: without retries it is not Legroom that reads it
                return within_limits(self._as_given(), found.settings, found.asked)
        return LoaderSettings()

    def _start_within(self, limited: LoaderSettings) -> list[str]:
        if self.options.fresh or not self.options.retries or not limited.given():
            return []
        self.lowered = limited
        shown = describe_changes(self._as_given(), limited)
        line = say("starting with the settings that an earlier run needed: {shown} (--fresh ignores them)", shown=shown)
        self.print_line(line)
        return [line]

    def _print_verdict(self, attempts: Sequence[Attempt]) -> None:
        """Print the whole verdict; only one line if the cause is the same as in the attempt before."""
        verdict = attempts[-1].verdict
        assert verdict is not None
        before = attempts[-2].verdict if len(attempts) > 1 else None
        if before is not None and before.cause == verdict.cause:
            victim = verdict.victim
            held = None if victim is None or victim.rss is None else format_size(victim.rss)
            if victim is None or held is None:
                self.print_line(say("{name} again", name=headline(verdict)))
            else:
                who = process_name(victim)
                self.print_line(say("{name} again: {who} used {held}", name=headline(verdict), who=who, held=held))
            return
        self.print_line(say("{name}: {why}", name=headline(verdict), why=verdict.summary))
        for line in verdict.evidence:
            self.print_line(say("  why: ") + line)
        for one in verdict.likely:
            if one.cause != verdict.cause:
                self.print_line(say("  or:  ") + f"{one.cause}: {one.why}")
        for step in verdict.fix:
            # A command is alone on its line, without the `legroom:` prefix, so that it can be pasted.
            self.print_line(step_label(step) + step.replace("\n", "\n" + _BELOW))

    def _print_success(self, attempts: Sequence[Attempt]) -> None:
        """After retries: which settings succeeded, and how long the failed attempts took."""
        failed = len(attempts) - 1
        if not failed:
            return
        lost = format_duration(sum(attempt.seconds for attempt in attempts[:-1]))
        self.print_line(
            say(
                "finished on attempt {number} with {settings}; {failures} took {lost}",
                number=len(attempts),
                settings=_settings(self.lowered, self._as_given(), attempts),
                failures=counted(failed, phrase("{count} failed attempt"), phrase("{count} failed attempts")),
                lost=lost,
            )
        )

    def _print_failure(self, attempts: Sequence[Attempt]) -> None:
        """After the last failed attempt: how many there were, the last settings, the total time."""
        if len(attempts) < 2:
            return
        spent = format_duration(sum(attempt.seconds for attempt in attempts))
        self.print_line(
            say(
                "failed {count} times in {spent}, last with {settings}",
                count=len(attempts),
                spent=spent,
                settings=_settings(self.lowered, self._as_given(), attempts),
            )
        )

    def _print_retry(self, done: int, why: str, notes: Sequence[str]) -> None:
        everything = self.options.retries + 1
        self.print_line(say("attempt {next} of {all}: {why}", next=done + 1, all=everything, why=why))
        if self.resumed is not None:
            self.print_line(say("  resuming from {path}", path=self.resumed))
        for note in notes:
            self.print_line(f"  {note}")


def _after_change(verdict: Verdict | None, change: str | None) -> Verdict | None:
    """The verdict; for another error right after a settings change, the change is named as a possible cause."""
    if verdict is None or verdict.cause != "not-memory" or change is None:
        return verdict
    why = say(
        "the job failed with an error that does not name a resource that ran out, right after a change of settings: "
        "{change}. The change may have caused it.",
        change=change,
    )  # fmt: skip
    return replace(verdict, summary=why)


def _settings(lowered: LoaderSettings, asked: LoaderSettings, attempts: Sequence[Attempt]) -> str:
    """The changed settings, each with its old value: ``num_workers 1 (was 4)``.

    What the script did not take over, or may not have, is marked: a flag can be ignored, and so can the environment.
    """
    last = attempts[-1].settings
    shown = []
    for name, value in lowered.given().items():
        before = getattr(asked, name)
        text = f"{_PRINTED.get(name, name)} {_shown(value)}"
        if name == "num_workers" and value == 0 and attempts[-1].had_workers:
            text = say("{setting} (ignored by the job: it had DataLoader workers)", setting=text)
        elif name in _IN_ENVIRONMENT and getattr(last, name) is None and not (before is True and value is False):
            # A switch is turned off by taking its flag off the command line.
            text = say("{setting} (only in {variable}, which the script may not read)", setting=text, variable=VARIABLE)
        elif before is not None:
            text = say("{setting} (was {before})", setting=text, before=_shown(before))
        shown.append(text)
    return listed(shown) or say("the settings as given")


def _shown(value: object) -> object:
    return (say("on") if value else say("off")) if isinstance(value, bool) else value


def _isolation(cgroup: JobCgroup) -> str:
    if cgroup.own:
        return say("its own memory cgroup ({version}): {path}", version=cgroup.version, path=cgroup.path)
    return say("a process group without its own cgroup: {why}", why=cgroup.reason)


def command_key(command: Sequence[str], named: Sequence[NamedFlag], folder: str) -> str:
    """The command and directory without the values of its settings. Two flags for one setting are two commands."""
    words: list[str | None] = list(command)
    for name, flag in find_flags(command, named).items():
        if name in SETTINGS and flag.at >= 0:
            words[flag.at] = f"<{name}> {flag.spelling}"
            if words[flag.at + 1 : flag.at + 2] == [flag.value] and command[flag.at] == flag.spelling:
                words[flag.at + 1] = None
    return json.dumps([folder, *(word for word in words if word is not None)])
