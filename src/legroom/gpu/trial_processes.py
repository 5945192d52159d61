"""A batch tried on the CPU, in a forked child: a trial that is too large is an OOM kill, and must not be ours.

Covers: forking, measuring, telling a kill for memory from other endings, bringing the step's own error back.
Does not cover: systems without fork (finder.py asks for isolate= there).

What counts is how much the child grew over what it inherited: that is what the same step would add to this process.
While it runs, the child also copies the inherited pages that it changes (weights), so a batch near the border may be
refused here that would just fit in this process: the answer errs on the side of fitting.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from legroom.errors import TrialFailed
from legroom.gpu.batch_trials import STEPS_PER_TRIAL, GpuTrialRunner, StepFunction, TrialResult, run_step
from legroom.gpu.cuda_device import open_device
from legroom.gpu.oom import is_oom
from legroom.model.gpu import Trial
from legroom.probe.host import Host
from legroom.probe.memory import memory
from legroom.system.child_processes import ExitStatus, prefer_oom_kill
from legroom.words import say


class ForkTrialRunner:
    """Tries batches in children that are copies of this process."""

    rough = True

    def __init__(
        self, step: StepFunction, margin: float, bound: int, where: str, *, worst_case: Any = None
    ) -> None:
        self.measure = say(
            "resident bytes that a step adds to this process, in a forked child ({where})", where=where
        )
        self._step, self._worst_case = step, worst_case
        self.bound, self._cap = bound, int(bound * (1 - margin))

    def try_batch(self, batch: int) -> TrialResult:
        """One trial in one child."""
        started, kills = time.monotonic(), oom_kills()
        answer, status = self._in_child(batch)
        seconds = time.monotonic() - started
        if answer is not None and answer.get("problem") is not None:
            raise answer["problem"]
        if answer is None:
            if status != -signal.SIGKILL:
                raise TrialFailed(
                    say("the trial of a batch of {batch} died", batch=batch),
                    why=say("its process ended without an answer: {how}", how=str(ExitStatus.of(status))),
                    fix=(say("run one step of that size by itself to see what it says"),),
                )
            return TrialResult(Trial(batch, False, None, seconds=seconds, why=_killed(kills)), self.bound)
        if answer["ran_out"]:
            why = say("the step itself ran out of memory")
            return TrialResult(Trial(batch, False, None, seconds=seconds, why=why), self.bound)
        peak = answer["peak"]
        fits = peak <= self._cap
        near = None if fits else say("it came too near to the limit")
        trial = Trial(batch, fits, peak, seconds=seconds, why=near)
        return TrialResult(trial, self.bound)

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
            prefer_oom_kill()
            told = self._measured(batch)
            with os.fdopen(pipe, "wb") as file:
                file.write(told)
        finally:
            os._exit(0)

    def _measured(self, batch: int) -> bytes:
        import torch

        torch.set_num_threads(1)  # the others were not forked: OpenMP would wait for them
        before = resident()
        reset_peak()
        try:
            for _ in range(STEPS_PER_TRIAL):
                run_step(self._step, batch, self._worst_case)
        except BaseException as problem:
            if is_oom(problem) is not None:
                return pickle.dumps({"ran_out": True})
            return _packed(problem)
        return pickle.dumps({"ran_out": False, "peak": max(0, peak_resident() - before)})


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
    now = oom_kills()
    if before is not None and now is not None and now > before:
        return say("the kernel killed it for memory: its count rose from {old} to {new}", old=before, new=now)
    return say("it was killed, and no counter says by whom: taken for want of memory")


_LAST_LINES = 8


class SubprocessTrialRunner:
    """Tries each batch in a process of its own; ``spec`` names what makes the step there."""

    def __init__(
        self,
        spec: str,
        margin: float,
        device: str,
        *,
        allowed: int | None,
        worst_case: Any,
        bound: int | None,
    ) -> None:
        self.measure = say(
            "the peak of a process that runs {spec} alone on {device}", spec=spec, device=device
        )
        self._request = {
            "spec": spec, "margin": margin, "device": device, "allowed": allowed, "bound": bound,
            "worst_case": worst_case,
        }  # fmt: skip
        self._bound = bound
        self.rough = device == "cpu"
        try:
            json.dumps(worst_case)
        except TypeError as problem:
            raise TrialFailed(
                say("worst_case cannot be handed to another process"),
                why=say("it is sent as JSON: {problem}", problem=problem),
                fix=(say("give a length, or let the factory know the worst case itself"),),
            ) from problem

    def try_batch(self, batch: int) -> TrialResult:
        """One child."""
        kills = oom_kills()
        told, status, words = self._ask({**self._request, "batch": batch})
        if told is not None and "error" in told:
            raise TrialFailed(
                say("the step failed in its own process"),
                why=told["error"],
                fix=(say("see its last lines:\n{lines}", lines=words),) if words else (),
            )
        if told is None:
            killed = status == -getattr(signal, "SIGKILL", 9)
            now = oom_kills()
            if not killed or self._bound is None:
                raise TrialFailed(
                    say("the trial of a batch of {batch} died", batch=batch),
                    why=say("{how}; its last lines:\n{lines}", how=str(ExitStatus.of(status)), lines=words),
                )
            why = say("killed; the kernel counted {old} OOM kills before and {new} after", old=kills, new=now)
            return TrialResult(Trial(batch, False, None, why=why), self._bound)
        bound = int(told.pop("bound"))
        notes = tuple(told.pop("notes"))
        return TrialResult(Trial(**told), bound, notes)

    def close(self) -> None:
        """Every child is gone."""

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any] | None, int, str]:
        with tempfile.TemporaryDirectory(prefix="legroom-") as folder:
            asked, answer, output = (Path(folder) / name for name in ("request", "answer", "output"))
            asked.write_text(json.dumps(request), encoding="utf-8")
            with output.open("wb") as sink:
                status = subprocess.run(
                    [sys.executable, "-m", "legroom.gpu.trial_processes", str(asked), str(answer)],
                    stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=_environment(), check=False,
                ).returncode  # fmt: skip
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            told = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None
        return told, status, "\n".join(lines)


def _environment() -> dict[str, str]:
    """Ours, with this very Legroom importable, and whatever the parent itself can import."""
    parts = [os.getcwd(), *(part for part in sys.path if part), str(Path(__file__).resolve().parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(parts))}


def main(request: str, answer: str) -> None:
    """Do what the request asks, and write the answer."""
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    prefer_oom_kill()
    try:
        reading = _on_cpu(asked) if asked["device"] == "cpu" else _on_card(asked)
        told: dict[str, Any] = {
            **dataclasses.asdict(reading.trial), "bound": reading.bound, "notes": reading.notes
        }  # fmt: skip
    except Exception as problem:  # whatever the user's own code raises
        traceback.print_exc()
        told = {"error": f"{type(problem).__name__}: {problem}"}
    scratch = Path(answer + ".part")
    scratch.write_text(json.dumps(told), encoding="utf-8")
    scratch.replace(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the step's threads and hooks are of no use any more


def factory(spec: str) -> StepFunction:
    """The step that ``module:factory`` makes."""
    home, _, name = spec.partition(":")
    found: Any = importlib.import_module(home)
    for part in name.split("."):
        found = getattr(found, part)
    made: StepFunction = found()
    return made


def _on_card(asked: dict[str, Any]) -> TrialResult:
    card = open_device(asked["device"], say("a batch would be tried"))
    if asked["allowed"] is not None:
        card.set_allowed(asked["allowed"])
    # The bound is taken before the factory puts the model there: the model is part of the trial.
    meter = GpuTrialRunner(card, lambda *_: None, asked["margin"], worst_case=asked["worst_case"])
    try:
        meter.use(factory(asked["spec"]))
    except Exception as problem:
        if is_oom(problem) is None:
            raise
        return TrialResult(
            Trial(asked["batch"], False, None, why=say("the model itself does not fit")), meter.bound
        )
    return meter.try_batch(asked["batch"])


def _on_cpu(asked: dict[str, Any]) -> TrialResult:
    batch, bound = asked["batch"], asked["bound"]
    started = time.monotonic()
    try:
        step = factory(asked["spec"])
        for _ in range(STEPS_PER_TRIAL):
            run_step(step, batch, asked["worst_case"])
    except Exception as problem:
        if is_oom(problem) is None:
            raise
        return TrialResult(Trial(batch, False, None, why=say("the step itself ran out of memory")), bound)
    peak = peak_resident()
    fits = peak <= bound * (1 - asked["margin"])
    why = None if fits else say("it came too near to the limit")
    seconds = time.monotonic() - started
    return TrialResult(Trial(batch, fits, peak, seconds=seconds, why=why), bound)


_STATUS = "/proc/self/status"


def oom_kills() -> int | None:
    """The kernel's count for our own group."""
    return memory(Host()).events.oom_kills


def reset_peak() -> None:
    """The peak counts from now, where the kernel lets us say so."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # then it is the peak since the start: never too low


def resident() -> int:
    """Bytes of this process in RAM, without the pages of files, which the kernel can drop."""
    table = Host().table(_STATUS)
    if "RssAnon" in table:
        return table["RssAnon"] + table.get("RssShmem", 0)
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident() -> int:
    """The same at its highest."""
    table = Host().table(_STATUS)
    if "VmHWM" in table:
        return max(table["VmHWM"] - table.get("RssFile", 0), 0)
    import psutil

    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
