"""A batch tried on the CPU, in a forked child: a trial that is too large is an OOM kill, and must not be ours.

Covers: forking, measuring, telling a kill for memory from other endings, bringing the step's own error back.
Does not cover: systems without fork (finder.py asks for isolate= there).

What counts is how much the child grew over what it inherited: that is what the same step would add to this process.
While it runs, the child also copies the inherited pages that it changes (weights), so a batch near the border may be
refused here that would just fit in this process: the answer errs on the side of fitting.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from typing import Any

from legroom.errors import TrialFailed
from legroom.gpu import host_memory
from legroom.gpu.meter import STEPS, Reading, Step, call
from legroom.gpu.oom import is_oom
from legroom.model.gpu import Trial
from legroom.words import say


class ForkMeter:
    """Tries batches in children that are copies of this process."""

    rough = True

    def __init__(self, step: Step, margin: float, bound: int, where: str, *, worst_case: Any = None) -> None:
        self.measure = say(
            "resident bytes that a step adds to this process, in a forked child ({where})", where=where
        )
        self._step, self._worst_case = step, worst_case
        self.bound, self._cap = bound, int(bound * (1 - margin))

    def try_batch(self, batch: int) -> Reading:
        """One trial in one child."""
        started, kills = time.monotonic(), host_memory.oom_kills()
        answer, status = self._in_child(batch)
        seconds = time.monotonic() - started
        if answer is not None and answer.get("problem") is not None:
            raise answer["problem"]
        if answer is None:
            if status != -signal.SIGKILL:
                raise TrialFailed(
                    say("the trial of a batch of {batch} died", batch=batch),
                    why=say("its process ended with status {status} and said nothing", status=status),
                    fix=(say("run one step of that size by itself to see what it says"),),
                )
            return Reading(Trial(batch, False, None, seconds=seconds, why=_killed(kills)), self.bound)
        if answer["ran_out"]:
            why = say("the step itself ran out of memory")
            return Reading(Trial(batch, False, None, seconds=seconds, why=why), self.bound)
        peak = answer["peak"]
        fits = peak <= self._cap
        near = None if fits else say("it came too near to the limit")
        trial = Trial(batch, fits, peak, seconds=seconds, why=near)
        return Reading(trial, self.bound)

    def close(self) -> None:
        """Nothing was changed here."""

    def _in_child(self, batch: int) -> tuple[dict[str, Any] | None, int]:
        read, write = os.pipe()
        with warnings.catch_warnings():
            # Python warns of forks beside threads: the child uses none of them (one thread for torch, no locks held).
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(read)
            self._child(batch, write)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        return (pickle.loads(said) if said else None), os.waitstatus_to_exitcode(status)

    def _child(self, batch: int, pipe: int) -> None:
        """All that the child does; it never comes back."""
        try:
            host_memory.first_to_go()
            told = self._measured(batch)
            with os.fdopen(pipe, "wb") as file:
                file.write(told)
        finally:
            os._exit(0)

    def _measured(self, batch: int) -> bytes:
        import torch

        torch.set_num_threads(1)  # the others were not forked: OpenMP would wait for them
        before = host_memory.resident()
        host_memory.reset_peak()
        try:
            for _ in range(STEPS):
                call(self._step, batch, self._worst_case)
        except BaseException as problem:
            if is_oom(problem) is not None:
                return pickle.dumps({"ran_out": True})
            return _packed(problem)
        return pickle.dumps({"ran_out": False, "peak": max(0, host_memory.peak_resident() - before)})


def _packed(problem: BaseException) -> bytes:
    try:
        packed = pickle.dumps({"problem": problem})
        pickle.loads(packed)
    except Exception:  # an exception that pickle cannot carry
        stands_for = TrialFailed(
            say("the step failed"), why=say("{kind}: {text}", kind=type(problem).__name__, text=problem)
        )
        packed = pickle.dumps({"problem": stands_for})
    return packed


def _killed(before: int | None) -> str:
    now = host_memory.oom_kills()
    if before is not None and now is not None and now > before:
        return say("the kernel killed it for memory: its count rose from {old} to {new}", old=before, new=now)
    return say("it was killed, and no counter says by whom: taken for want of memory")
