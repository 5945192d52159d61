"""Trials of a batch size in child processes: forked on the CPU, or fresh ones for ``isolate="module:factory"``.

On the CPU a batch that is too large ends in an OOM kill, so it must not run in the user's process. A fresh child is
``python -m legroom.gpu.batch_trial_in_child REQUEST ANSWER``: both files are JSON. Host memory is measured here too.
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
from typing import IO, Any

from legroom.errors import TrialFailed
from legroom.gpu.batch_trial_on_gpu import STEPS_PER_TRIAL, GpuTrialRunner, StepFunction, TrialResult, run_step
from legroom.gpu.oom_retry import is_oom
from legroom.gpu.torch_cuda_device import open_device
from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory
from legroom.records.gpu_results import Trial
from legroom.system.atomic_file import replace_file
from legroom.system.processes_and_threads import ExitStatus, prefer_oom_kill

_LAST_LINES = 8  # of a child's output, for its error
_KILLED = -int(getattr(signal, "SIGKILL", 9))
_STATUS = "/proc/self/status"


class ForkTrialRunner:
    """Runs trials on the CPU in forked children.

    The measure is how much the child grows over what it inherited: the same step would add that much to this process.
    The child also copies the inherited pages that it writes to (weights), so a batch near the limit may fail here that
    would just fit in this process: the result errs towards fitting.
    """

    rough = True

    def __init__(self, step: StepFunction, margin: float, bound: int, source: str, *, worst_case: Any = None) -> None:
        self.measure = say(
            "resident bytes that a step adds to this process, in a forked child ({source})", source=source
        )
        self._step, self._worst_case = step, worst_case
        self._bound, self._cap = bound, int(bound * (1 - margin))

    def try_batch(self, batch: int) -> TrialResult:
        """One trial in one child."""
        started, kills = time.monotonic(), _oom_kills()
        answer, status = self._fork(batch)
        seconds = time.monotonic() - started
        if answer is not None and "error" in answer:
            raise answer["error"]
        if answer is None:
            if status != _KILLED:
                raise TrialFailed(
                    say("the trial with a batch of {batch} crashed", batch=batch),
                    why=say("its process ended without a report: {how}", how=str(ExitStatus.of(status))),
                    fix=(say("run one step of that size on its own to see the error"),),
                )
            trial = Trial(batch, False, None, seconds=seconds, why=_why_killed(kills))
        else:
            trial = _host_trial(batch, answer["peak"], self._cap, seconds)
        return TrialResult(trial, self._bound)

    def close(self) -> None:
        """Nothing to restore: trials change their children only."""

    def _fork(self, batch: int) -> tuple[dict[str, Any] | None, int]:
        """(what the child reported, its exit status)."""
        # Not a pipe: processes that the step leaves behind would keep it open.
        with tempfile.TemporaryFile() as file:
            with warnings.catch_warnings():
                # Python warns about forking with threads: the child uses none of them (one for torch, no locks held).
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                self._child(batch, file)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            file.seek(0)
            report = file.read()
        return (pickle.loads(report) if report and status == 0 else None), status

    def _child(self, batch: int, file: IO[bytes]) -> None:
        """Everything the child does; never returns."""
        try:
            prefer_oom_kill()
            file.write(self._measure(batch))
            file.flush()
        finally:
            os._exit(0)

    def _measure(self, batch: int) -> bytes:
        import torch

        torch.set_num_threads(1)  # fork copies one thread only: OpenMP would wait for the others
        before = _resident()
        _reset_peak()
        try:
            for _ in range(STEPS_PER_TRIAL):
                run_step(self._step, batch, self._worst_case)
        except BaseException as problem:
            return pickle.dumps({"peak": None}) if is_oom(problem) is not None else _pickled_error(problem)
        return pickle.dumps({"peak": max(0, _peak_resident() - before)})


def _pickled_error(problem: BaseException) -> bytes:
    try:
        pickled = pickle.dumps({"error": problem})
        pickle.loads(pickled)
    except Exception:  # an exception that cannot be pickled
        substitute = TrialFailed(
            say("the step failed"), why=say("{kind}: {text}", kind=type(problem).__name__, text=problem)
        )
        pickled = pickle.dumps({"error": substitute})
    return pickled


class SubprocessTrialRunner:
    """Runs each trial in a fresh process, which calls ``factory()`` of ``"module:factory"`` to get the step.

    Owns the process, and a temporary directory with its request, answer and output.
    """

    def __init__(
        self, factory: str, margin: float, device: str, *, allowed: int | None, worst_case: Any, bound: int | None
    ) -> None:
        self.measure = say("peak of a process that runs {factory} alone on {device}", factory=factory, device=device)
        self._request = {
            "factory": factory, "margin": margin, "device": device, "allowed": allowed, "bound": bound,
            "worst_case": worst_case,
        }  # fmt: skip
        self._bound = bound
        self.rough = device == "cpu"
        try:
            json.dumps(worst_case)
        except TypeError as problem:
            raise TrialFailed(
                say("worst_case cannot be passed to another process"),
                why=say("it is passed as JSON: {problem}", problem=problem),
                fix=(say("pass a length, or set the worst case in the factory"),),
            ) from problem

    def try_batch(self, batch: int) -> TrialResult:
        """One trial in one process."""
        kills = _oom_kills()
        answer, status, output = self._run({**self._request, "batch": batch})
        if answer is not None and "error" in answer:
            raise TrialFailed(
                say("the step failed in its own process"),
                why=answer["error"],
                fix=(say("its last lines of output:\n{lines}", lines=output),) if output else (),
            )
        if answer is None:
            if status != _KILLED or self._bound is None:
                raise TrialFailed(
                    say("the trial with a batch of {batch} crashed", batch=batch),
                    why=say("{how}; its last lines of output:\n{lines}", how=str(ExitStatus.of(status)), lines=output),
                )
            return TrialResult(Trial(batch, False, None, why=_why_killed(kills)), self._bound)
        bound = int(answer.pop("bound"))
        notes = tuple(answer.pop("notes"))
        return TrialResult(Trial(**answer), bound, notes)

    def close(self) -> None:
        """Nothing to restore: every process has ended."""

    def _run(self, request: dict[str, Any]) -> tuple[dict[str, Any] | None, int, str]:
        """(answer, exit status, last lines of output)."""
        with tempfile.TemporaryDirectory(prefix="legroom-") as folder:
            asked, answered, output = (Path(folder) / name for name in ("request", "answer", "output"))
            asked.write_text(json.dumps(request), encoding="utf-8")
            with output.open("wb") as sink:
                status = subprocess.run(
                    [sys.executable, "-P", "-m", "legroom.gpu.batch_trial_in_child", str(asked), str(answered)],
                    stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=_child_environment(), check=False,
                ).returncode  # fmt: skip
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            answer = json.loads(answered.read_text(encoding="utf-8")) if answered.exists() else None
        return answer, status, "\n".join(lines)


def _child_environment() -> dict[str, str]:
    """This process's environment, with everything importable that is importable here, this Legroom included."""
    # The working directory last, unless sys.path has it: its files must not hide modules that are not hidden here.
    parts = [part or os.getcwd() for part in sys.path] + [str(Path(__file__).resolve().parents[2]), os.getcwd()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(parts))}


# Inside the fresh process.


def main(request: str, answer: str) -> None:
    """Run the trial that the file ``request`` describes, and write the result to the file ``answer``."""
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    prefer_oom_kill()
    try:
        result = _trial_on_cpu(asked) if asked["device"] == "cpu" else _trial_on_gpu(asked)
        report: dict[str, Any] = {
            **dataclasses.asdict(result.trial), "bound": result.bound, "notes": result.notes
        }  # fmt: skip
    except Exception as problem:  # anything the user's code may raise
        traceback.print_exc()
        report = {"error": f"{type(problem).__name__}: {problem}"}
    replace_file(answer, json.dumps(report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and exit hooks of the step could keep the process alive


def _make_step(factory: str) -> StepFunction:
    module, _, name = factory.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    step: StepFunction = found()
    return step


def _trial_on_gpu(asked: dict[str, Any]) -> TrialResult:
    device = open_device(asked["device"], say("try a batch size"))
    if asked["allowed"] is not None:
        device.limit_allocator(asked["allowed"])
    # The bound is measured before the factory creates the model: the model is part of the trial.
    runner = GpuTrialRunner(device, lambda *_: None, asked["margin"], worst_case=asked["worst_case"])
    try:
        runner.step = _make_step(asked["factory"])
    except Exception as problem:
        if is_oom(problem) is None:
            raise
        why = say("the model alone does not fit")
        return TrialResult(Trial(asked["batch"], False, None, why=why), runner.bound)
    return runner.try_batch(asked["batch"])


def _trial_on_cpu(asked: dict[str, Any]) -> TrialResult:
    batch, bound = asked["batch"], asked["bound"]
    started = time.monotonic()
    peak: int | None = None
    try:
        step = _make_step(asked["factory"])
        for _ in range(STEPS_PER_TRIAL):
            run_step(step, batch, asked["worst_case"])
        peak = _peak_resident()
    except Exception as problem:
        if is_oom(problem) is None:
            raise
    cap = int(bound * (1 - asked["margin"]))
    return TrialResult(_host_trial(batch, peak, cap, time.monotonic() - started), bound)


# Host memory.


def _host_trial(batch: int, peak: int | None, cap: int, seconds: float) -> Trial:
    """A trial that ended by itself; ``peak`` None: the step ran out of memory."""
    if peak is None:
        return Trial(batch, False, None, seconds=seconds, why=say("the step ran out of memory"))
    why = None if peak <= cap else say("its peak is above the limit less the margin")
    return Trial(batch, peak <= cap, peak, seconds=seconds, why=why)


def _why_killed(kills_before: int | None) -> str:
    now = _oom_kills()
    if kills_before is not None and now is not None and now > kills_before:
        return say("OOM-killed: the kernel's count rose from {old} to {new}", old=kills_before, new=now)
    return say("killed by SIGKILL; no OOM counter shows the cause, so it counts as out of memory")


def _oom_kills() -> int | None:
    """The kernel's count of OOM kills in this process's cgroup."""
    return memory(Host()).events.oom_kills


def _reset_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # then the peak counts from the start of the process: never too low


def _resident() -> int:
    """Bytes of this process in RAM, file pages excluded: the kernel can drop those."""
    table = Host().table(_STATUS)
    if "RssAnon" in table:
        return table["RssAnon"] + table.get("RssShmem", 0)
    import psutil

    return int(psutil.Process().memory_info().rss)


def _peak_resident() -> int:
    """``_resident`` at its highest."""
    table = Host().table(_STATUS)
    if "VmHWM" in table:
        return max(table["VmHWM"] - table.get("RssFile", 0), 0)
    import psutil

    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
