"""The one that acts: starts a command, says what killed it, starts it again with less.

Covers: attempts one after the other, restarting by the policy from the newest whole checkpoint, telling people on
standard error. Does not cover: one attempt's life (watched.py), deciding (classify.py, policy.py).

Who owns what: the supervisor makes the cgroup before the first attempt and removes it after the last; every attempt has
a child, an output and a witness of its own, closed before the next one begins. Nothing outlives ``supervise`` but
processes that a job which ended well left behind itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from legroom.model import Box
from legroom.model.death import Attempt, Story
from legroom.model.settings_env import VARIABLE, from_environment, to_environment
from legroom.probe.host import Host
from legroom.rescue import last_good
from legroom.rescue.because import headline
from legroom.rescue.cgroup_home import Home, make_home
from legroom.rescue.checkpoints import Stamp, newest_whole, stamps
from legroom.rescue.child import find_command
from legroom.rescue.flags import Knobs, knobs, rewrite, with_resume
from legroom.rescue.order import Order
from legroom.rescue.policy import Step, next_step
from legroom.rescue.rules_counters import process_name
from legroom.rescue.sweep import names_there, sweep
from legroom.rescue.watched import Watched
from legroom.units import format_duration, format_size
from legroom.words import counted, listed, phrase, say

_BELOW = " " * 8
_BY_ENVIRONMENT = frozenset({"workers", "prefetch", "low_memory", "pin_memory"})


@dataclass
class Supervisor:
    """One supervised run."""

    order: Order
    box: Box
    tell: Callable[[str], None]
    host: Host
    lowered: dict[str, int | bool] = field(default_factory=dict)  # against the command as it was written
    resumed: str | None = None
    raise_descriptors: bool = False
    existing: frozenset[Stamp] = frozenset()  # checkpoints that were there before the start

    def run(self) -> Story:
        """Run the command until it ends well or nothing more can be done."""
        find_command(self.order.command[0])
        began, cpu = time.time(), time.process_time()
        if self.order.checkpoint is not None and not self.order.resume_existing:
            self.existing = stamps(self.order.checkpoint)
        home = make_home(self.host, f"legroom-run-{os.getpid()}")
        isolation = _isolation(home)
        try:
            attempts, stopped = self._attempts(home)
        finally:
            home.close()
        return Story(
            self.order.command, tuple(attempts), began, isolation, stopped, time.process_time() - cpu
        )

    def _attempts(self, home: Home) -> tuple[list[Attempt], str | None]:
        order = self.order
        state = last_good.state_folder(order.environment)
        key = last_good.key_of(order.command, order.named, os.getcwd())
        changed = self._recall(last_good.recall(state, key, self.box))
        attempts: list[Attempt] = []
        notes: list[str] = []
        while True:
            before = names_there(self.host)
            watched = Watched(order, self.box, home, self.host, self.tell)
            attempt = watched.run(
                len(attempts) + 1,
                self._command(),
                self._environment(),
                raise_descriptors=self.raise_descriptors,
            )
            attempt = replace(
                attempt,
                changed=tuple(changed),
                resumed_from=self.resumed,
                notes=(*notes, *attempt.notes),
            )
            attempts.append(attempt)
            if attempt.verdict is not None or len(attempts) > 1:
                watched.begin_line()
            if attempt.verdict is not None:
                self._tell_death(attempts)
            if attempt.finished:
                self._tell_rescue(attempts)
                if attempt.verdict is not None:
                    return attempts, None  # no settings to keep: a process of it was OOM-killed with these
                if self.lowered:
                    last_good.keep(state, key, self.lowered, self.box)
                else:
                    last_good.forget(state, key)
                return attempts, None
            step = self._step(attempts, asked=watched.asked is not None)
            if step.stop:
                if order.retries:
                    self.tell(say("not started again: {why}", why=step.why))
                    self._tell_failure(attempts)
                return attempts, step.why
            changed = [step.why]
            notes = self._take(step, before)
            self._tell_retry(len(attempts), step.why, notes)

    def _command(self) -> list[str]:
        command = rewrite(self.order.command, self.lowered, self.order.named)
        if self.resumed is not None and self.order.resume_flag is not None:
            return with_resume(command, self.order.resume_flag, self.resumed)
        return command

    def _environment(self) -> dict[str, str]:
        environment = dict(self.order.environment)
        if self.lowered:
            environment[VARIABLE] = to_environment({**from_environment(environment), **self.lowered})
        return environment

    def _step(self, attempts: Sequence[Attempt], *, asked: bool) -> Step:
        now = self._knobs()
        verdict = attempts[-1].verdict
        assert verdict is not None
        if asked:
            return Step(now, {}, say("it was asked to stop"), stop=True)
        if len(attempts) > self.order.retries:
            used = say("all {count} attempts are used up", count=len(attempts))
            return Step(now, {}, used if self.order.retries else say("no retry was asked for"), stop=True)
        killed = sum(1 for one in attempts if one.verdict and one.verdict.cause == "worker-killed")
        return next_step(verdict, now, descriptors_raised=self.raise_descriptors, repeated=killed > 1)

    def _knobs(self) -> Knobs:
        """What can be changed: on the command line, or, where nothing is recognised there, in the environment."""
        found = knobs(self._command(), self.order.named)
        if found.can:
            return found
        asked = from_environment(self._environment())
        return replace(
            found,
            workers=asked.get("num_workers"),
            prefetch=asked.get("prefetch_factor"),
            low_memory=asked.get("low_memory"),
            pin_memory=asked.get("pin_memory"),
            can=_BY_ENVIRONMENT,
        )

    def _take(self, step: Step, before: frozenset[str]) -> list[str]:
        """Make the step the next attempt's settings; what there is to say about it."""
        self.lowered.update(step.values)
        self.raise_descriptors = self.raise_descriptors or step.raise_descriptors
        notes = self._find_checkpoint()
        if freed := sweep(self.host, before):
            notes.append(say("{size} that it left in /dev/shm were removed", size=format_size(freed)))
        return notes

    def _find_checkpoint(self) -> list[str]:
        if self.order.checkpoint is None:
            return []
        found = newest_whole(self.order.checkpoint, self.existing)
        self.resumed = found.path
        notes = [say("passed over: {why}", why=why) for why in found.passed_over]
        if found.path is not None:
            return notes
        if found.older is not None:
            notes.append(
                say(
                    "{path} was there before this run started and is not resumed from; --resume-existing allows it",
                    path=found.older,
                )
            )
        else:
            notes.append(say("no whole checkpoint matches {pattern}", pattern=self.order.checkpoint))
        return notes

    def _recall(self, values: Mapping[str, int | bool]) -> list[str]:
        if self.order.fresh or not self.order.retries or not values:
            return []
        self.lowered.update(values)
        shown = listed(f"{name} {value}" for name, value in values.items())
        line = say("begins with what worked last: {shown} (--fresh begins as written)", shown=shown)
        self.tell(line)
        return [line]

    def _tell_death(self, attempts: Sequence[Attempt]) -> None:
        """The whole of it the first time; a death for the same cause as the one before is one line."""
        verdict = attempts[-1].verdict
        assert verdict is not None
        before = attempts[-2].verdict if len(attempts) > 1 else None
        if before is not None and before.cause == verdict.cause:
            victim = verdict.victim
            held = None if victim is None or victim.rss is None else format_size(victim.rss)
            if victim is None or held is None:
                self.tell(say("{name} again", name=headline(verdict)))
            else:
                who = process_name(victim)
                self.tell(say("{name} again: {who} held {held}", name=headline(verdict), who=who, held=held))
            return
        self.tell(say("{name}: {why}", name=headline(verdict), why=verdict.summary))
        for line in verdict.evidence:
            self.tell(say("  by: {line}", line=line))
        for step in verdict.fix:
            # A command stands alone on its line, without our name before it: it is there to be pasted.
            self.tell(say("  do: {line}", line=step.replace("\n", "\n" + _BELOW)))

    def _tell_rescue(self, attempts: Sequence[Attempt]) -> None:
        """After a rescue: which settings finished, and what the failed attempts cost."""
        failed = len(attempts) - 1
        if not failed:
            return
        lost = format_duration(sum(attempt.seconds for attempt in attempts[:-1]))
        self.tell(
            say(
                "finished on attempt {number} with {settings}; {failures} took {lost}",
                number=len(attempts),
                settings=_settings(self.lowered, attempts[0]),
                failures=counted(failed, phrase("{count} failed attempt"), phrase("{count} failed attempts")),
                lost=lost,
            )
        )

    def _tell_failure(self, attempts: Sequence[Attempt]) -> None:
        """After the last failed attempt: how many there were, what was tried, what they cost."""
        if len(attempts) < 2:
            return
        spent = format_duration(sum(attempt.seconds for attempt in attempts))
        self.tell(
            say(
                "failed {count} times in {spent}, last with {settings}",
                count=len(attempts),
                spent=spent,
                settings=_settings(self.lowered, attempts[0]),
            )
        )

    def _tell_retry(self, done: int, why: str, notes: Sequence[str]) -> None:
        everything = self.order.retries + 1
        self.tell(say("attempt {next} of {all}: {why}", next=done + 1, all=everything, why=why))
        if self.resumed is not None:
            self.tell(say("  resumes from {path}", path=self.resumed))
        for note in notes:
            self.tell(f"  {note}")


def supervise(order: Order, box: Box, tell: Callable[[str], None], host: Host | None = None) -> Story:
    """Run an order to its end."""
    return Supervisor(order, box, tell, host or Host()).run()


def _settings(lowered: Mapping[str, int | bool], first: Attempt) -> str:
    """The settings that were changed, each with what it was: ``workers 1 (was 4)``."""
    shown = []
    for name, value in lowered.items():
        before = first.settings.get(name)
        text = f"{name} {_shown(value)}"
        shown.append(
            text if before is None else say("{setting} (was {before})", setting=text, before=_shown(before))
        )
    return listed(shown) or say("the settings as written")


def _shown(value: object) -> object:
    return (say("on") if value else say("off")) if isinstance(value, bool) else value


def _isolation(home: Home) -> str:
    if home.own:
        return say("a memory cgroup of its own ({version}): {path}", version=home.version, path=home.path)
    return say("a process group; no cgroup of its own: {why}", why=home.reason)
