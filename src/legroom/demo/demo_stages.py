"""The demo from start to end: DataLoaders in a small /dev/shm, runs with a copy each, runs on one copy and a kill -9.

`run_demo` returns what was measured as the object that `--json` prints; docs/demo.md describes it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from legroom.demo.demo_child import Child, Message, end_all
from legroom.demo.demo_data import (
    DISK_COPIES,
    ROW_BYTES,
    SMALLEST,
    Size,
    demo_size,
    h5py_seconds,
    make_dataset,
    rows_that_overflow,
)
from legroom.demo.event_loop import EventLoop, Screen, peak, shm_pool
from legroom.demo.loader_script import WORKERS
from legroom.demo.sandbox import SHM, Sandbox, free_bytes, make_sandbox, small_shm
from legroom.demo.training_script import BATCH
from legroom.errors import DemoFailed
from legroom.probe.host import Host
from legroom.probe.limits import cpu
from legroom.probe.memory import memory, ram_pool
from legroom.rescue.checkpoints import newest_complete
from legroom.rescue.command_line import with_resume
from legroom.rescue.job_attempt import remove_leftover_shm, shm_names
from legroom.units import format_duration, format_size
from legroom.words import say

Result = dict[str, Any]
SCHEMA = "legroom.demo/1"
SEPARATE, SHARED = "separate", "shared"
NAMES = ("one", "two", "three", "four")
_RATES = (0.05, 0.03, 0.02, 0.01)  # learning rates of the four runs
_KILLED = 2  # the run that is killed, at that share of its steps:
_KILL_AT = 0.4
_FEW_STEPS = 40  # of a run whose memory is measured and nothing else
_LASTS, _LASTS_QUICK, _ALL_OF_IT = 12.0, 4.0, 70.0  # seconds of the shared runs; of the demo until their end
_NO_BATCH = 15.0  # seconds after which a loader counts as stalled: torch's can hang on a full /dev/shm
_SETTLED = 2.1  # seconds after which a file counts as finished: until then every opening hashes it


def run_demo(
    screen: Callable[[], Screen], *, quick: bool = False, torch: bool = True, keep: bool = False
) -> Result:
    """Run it; what was measured."""
    if why := why_not_here(Host()):
        raise DemoFailed(say("the demo cannot run here"), why=why, fix=(say("run it on Linux"),))
    shm_why = small_shm()  # before anything else: it restarts the program
    loop = EventLoop(screen())
    with loop.running():
        sandbox = make_sandbox(loop.host, DISK_COPIES * SMALLEST, SHM if shm_why else None)
        kept = None
        try:
            with loop.ending_children():
                result = _stages(loop, sandbox, shm_why, quick, torch)
        finally:
            kept = sandbox.remove(keep=keep)
    return result | {"kept": None if kept is None else str(kept)}


def why_not_here(host: Host) -> str | None:
    """Why the demo cannot run on this system, or None."""
    if host.platform != "linux":
        return say("it measures memory by /proc, which {platform} does not have", platform=host.platform)
    if not host.table("/proc/self/smaps_rollup").get("Pss"):
        return say("/proc/self/smaps_rollup cannot be read: shared memory could not be counted once")
    return None


def _stages(loop: EventLoop, sandbox: Sandbox, shm_why: str | None, quick: bool, torch: bool) -> Result:
    host, where = loop.host, machine(loop.host)
    no_torch = None if torch else "--no-torch"
    if torch and importlib.util.find_spec("torch") is None:
        no_torch = say("torch is not installed")
    size = demo_size(ram_pool(memory(host)).free, free_bytes(sandbox.folder),
                     no_torch=no_torch, quick=quick, in_memory=sandbox.in_memory)  # fmt: skip
    loop.begin("machine", say("0  This machine"))
    loop.tell(machine_line(where))
    shm = shm_pool(host)
    words = {"size": size_text(shm.size), "why": shm_why}
    loop.tell(
        say("/dev/shm stays at {size}: a small one could not be mounted ({why})", **words)
        if shm_why
        else say("/dev/shm is {size} for this demo, as in a container; other processes keep theirs", **words)
    )
    notes = [*size.notes]
    if where["load"] >= 0.5:
        notes.append(say("the machine is busy (load {load:.1f}): figures vary", load=where["load"]))
    for note in notes:
        loop.tell(note)
    data = sandbox.folder / "train.h5"
    data_bytes = make_dataset(data, size.rows, loop.obey_signals)
    made, plain = loop.clock, h5py_seconds(data)
    loop.tell(say("wrote {rows} images as {size} of HDF5, which h5py reads in {time}",
                  rows=size.rows, size=format_size(data_bytes), time=format_duration(plain)))  # fmt: skip
    environment = sandbox.environment(os.environ)
    loaders = _loaders(loop, size, data, sandbox.folder / "loaders", environment)
    runs = TrainingStages(loop, size, data, sandbox.folder / "trainings", environment)
    runs.separate()
    loop.until(lambda: loop.clock - made > _SETTLED, say("the file to settle"))
    rescue = runs.shared()
    return {
        "schema": SCHEMA, "machine": where, "shm_size": shm.size, "shm_own": shm_why is None, "shm_why": shm_why,
        "data_bytes": data_bytes, "rows": size.rows, "engine": size.engine, "notes": notes,
        "trainings": runs.trainings(), "memory": {act: runs.peak(act) for act in (SEPARATE, SHARED)},
        "opening": {**runs.opening(), "plain": plain}, "rescue": rescue, "loaders": loaders,
        "weights": [{**asdict(one), "when": round(one.when, 3), "held": dict(one.held)} for one in loop.samples],
        "marks": [{"when": round(when, 3), "text": text} for when, text in loop.marks], "seconds": loop.clock,
    }  # fmt: skip


def _loaders(loop: EventLoop, size: Size, data: Path, folder: Path, environment: Mapping[str, str]) -> Result:
    """Stage 1: torch's DataLoader and Legroom's in the same /dev/shm, then their speed."""
    loop.begin("loaders", say("1  DataLoaders with {count} workers", count=WORKERS))
    pool, why, trials = shm_pool(loop.host), size.no_loaders, []
    if why is None and pool.size is None:  # queues between processes need semaphores, which are files there
        why = say("no worker processes without /dev/shm: {reason}", reason=pool.reason or say("unknown"))
    if why is not None:
        loop.tell(say("skipped: {why}", why=why))
        return {"trials": [], "rates": None, "batch_bytes": None, "why": why}
    rows = rows_that_overflow(pool.size)
    if rows is None:
        why = say("/dev/shm is {size}, too large to be filled for a demo", size=size_text(pool.size))
        loop.tell(say("no crash was tried: {why}", why=why))
    else:
        arguments = {"what": "trial", "data": str(data), "batch": rows, "batches": 8 if size.quick else 12}
        for name in ("torch", "legroom"):
            child = Child(
                name, "legroom.demo.loader_script", arguments, folder / name, environment, ("--loader", name)
            )
            trials.append(_loader_trial(loop, child))
    rounds, seconds = (1, 0.5) if size.quick else (3, 0.8)
    arguments = {"what": "speed", "data": str(data), "batch": BATCH, "rounds": rounds, "seconds": seconds}
    child = Child("speed", "legroom.demo.loader_script", arguments, folder / "speed", environment)
    loop.start(child)
    loop.until(lambda: child.ended, say("the speed of the DataLoaders"))
    child.read_messages()
    if not child.done:
        raise _loader_failed(child)
    rates = best_rates([message for message in child.messages if message["kind"] == "rate"])
    loop.tell(
        say(
            "batches per second: torch {torch:.0f}, Legroom {legroom:.0f}, data.batches {batches:.0f}",
            **rates,
        )
    )
    return {"trials": trials, "rates": rates, "batch_bytes": BATCH * ROW_BYTES, "why": why}


def _loader_trial(loop: EventLoop, child: Child) -> Result:
    heard, since = 0, loop.clock

    def stalled() -> bool:
        nonlocal heard, since
        if len(child.messages) != heard:
            heard, since = len(child.messages), loop.clock
        return child.first("opened") is not None and loop.clock - since > _NO_BATCH

    before, stood_still = shm_names(loop.host), False
    loop.start(child)
    try:
        loop.until(lambda: child.ended or stalled(), say("a DataLoader"))
        stood_still = not child.ended
    finally:
        end_all([child])
        remove_leftover_shm(loop.host, before)  # what torch's workers left in a /dev/shm that others may use
    child.read_messages()
    opened = child.first("opened")
    if opened is None or opened["loader"] != child.name:  # it must be the loader that its name says
        raise _loader_failed(child)
    report, last = child.report(), child.last("step")
    peaks = (report.get("attempts") or [{}])[0].get("peaks", {})
    trial = {
        "loader": child.name, "batch_bytes": child.arguments["batch"] * ROW_BYTES * 4,
        "delivered": 0 if last is None else int(last["step"]), "of": child.arguments["batches"],
        "died": not child.done, "stood_still": stood_still, "verdict": report.get("verdict"),
        "confidence": report.get("confidence"), "shm_peak": peaks.get("shm", {}).get("used"),
    }  # fmt: skip
    loop.children.remove(child)
    name = say("torch's DataLoader") if child.name == "torch" else say("Legroom's DataLoader")
    words = {**trial, "name": name, "all": trial["of"], "sure": trial["confidence"] or 0.0,
             "batch": size_text(trial["batch_bytes"]), "peak": size_text(trial["shm_peak"])}  # fmt: skip
    if stood_still:
        loop.tell(say("{name} stalled after {delivered} of {all} batches of {batch} and was ended", **words))
    elif trial["died"]:
        text = say("{name} crashed after {delivered} of {all} batches of {batch}: {verdict} ({sure:.0%} sure), "
                   "/dev/shm at {peak}", **words)  # fmt: skip
        loop.tell(text, mark=say("{name} crashed", name=name))
    else:
        loop.tell(say("{name} finished: {all} batches of {batch}, /dev/shm at {peak}", **words))
    return trial


def best_rates(messages: Sequence[Message]) -> dict[str, float]:
    """The best round of each loader: other work on the machine only makes one slower."""
    rates: dict[str, float] = {}
    for message in messages:
        rates[message["loader"]] = max(message["rate"], rates.get(message["loader"], 0.0))
    return rates


def _loader_failed(child: Child) -> DemoFailed:
    fix = (say("skip the DataLoaders:\nlegroom demo --no-torch"), say("keep the logs:\nlegroom demo --keep"))
    return DemoFailed(say("the DataLoaders could not be tried"), why=child.last_lines(), fix=fix)


class TrainingStages:
    """Stages 2 and 3: the same script, which differs by LEGROOM_DISABLE alone."""

    def __init__(
        self, loop: EventLoop, size: Size, data: Path, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self._loop, self._size, self._data, self._folder, self._environment = (
            loop,
            size,
            data,
            folder,
            environment,
        )
        self._separate: list[Child] = []
        self._shared: list[Child] = []

    def separate(self) -> None:
        """Runs with a copy each, until the memory of all has been measured together."""
        loop, count = self._loop, self._size.runs
        loop.begin(SEPARATE, say("2  {count} training runs with a copy each", count=count))
        hold = self._folder / "measured"
        self._separate = children = self._children(SEPARATE, _FEW_STEPS, {"LEGROOM_DISABLE": "1"}, str(hold))
        loop.start(*children)
        self._wait(children, lambda: all(child.done for child in children), say("the training runs"))
        samples = len(loop.samples) + 2
        self._wait(children, lambda: len(loop.samples) >= samples, say("their memory"))
        hold.touch()
        loop.until(lambda: all(child.ended for child in children), say("their end"))
        loop.tell(say("together they held {size}", size=size_text(self.peak(SEPARATE))))

    def shared(self) -> Result:
        """Runs on one copy, to the end; one of them is killed and restarted. What the kill led to."""
        loop, size = self._loop, self._size
        loop.begin(SHARED, say("3  {count} training runs on one copy", count=size.runs))
        # On a busy machine the stages before took longer, and less time is left.
        lasts = _LASTS_QUICK if size.quick else min(_LASTS, max(_LASTS_QUICK, _ALL_OF_IT - loop.clock))
        rate = median(message["rate"] for child in self._separate if (message := child.last("done")))
        steps = steps_for(rate, lasts)
        self._shared = children = self._children(SHARED, steps, {}, "")
        loop.start(*children)
        self._wait(children, lambda: all(child.first("step") for child in children), say("the training runs"))
        opening = self.opening()
        where = say("in /dev/shm") if opening["backing"] == "shm" else say("on disk, in the page cache")
        times = {
            name: format_duration(opening[key])
            for name, key in (("shared", "at_once"), ("plain", "plain_at_once"))
        }
        text = say(
            "one run loaded the data {where}; all had it after {shared} (with a copy each: {plain})",
            where=where,
            **times,
        )
        loop.tell(text)
        child, samples = children[min(_KILLED, len(children) - 1)], len(loop.samples) + 2

        def far_enough() -> bool:
            saved = child.last("saved")
            return saved is not None and saved["step"] >= steps * _KILL_AT and len(loop.samples) >= samples

        self._wait(children, far_enough, say("a checkpoint"))
        rescue = kill_and_resume(loop, child)
        self._wait(children, lambda: all(child.done and child.ended for child in children), say("their end"))
        loop.tell(
            say(
                "all {count} finished; together they held {size}",
                count=size.runs,
                size=size_text(self.peak(SHARED)),
            )
        )
        return rescue

    def trainings(self) -> list[Result]:
        """How each of the shared runs ended."""
        ends = [(child, child.last("done") or {}) for child in self._shared]
        return [{"name": child.name, "steps": int(end.get("step", 0)), "finished": child.done, "loss": end.get("loss"),
                 "starts": child.starts} for child, end in ends]  # fmt: skip

    def peak(self, act: str) -> int | None:
        """The memory that the runs of a stage held together."""
        return peak(self._loop.samples, act, self._size.runs)

    def opening(self) -> Result:
        """Seconds until the runs had their data: all at once, and one that came later."""
        first = [message for child in self._shared if (message := child.first("opened"))]
        plain = [message["seconds"] for child in self._separate if (message := child.first("opened"))]
        later = [message for child in self._shared if child.starts > 1 and (message := child.last("opened"))]
        return {
            "at_once": max(message["seconds"] for message in first),
            "later": later[0]["seconds"] if later else None, "later_ready": later[0]["ready"] if later else None,
            "plain_at_once": max(plain), "backing": first[0]["backing"],
        }  # fmt: skip

    def _children(self, act: str, steps: int, environment: Mapping[str, str], hold: str) -> list[Child]:
        children = []
        for number, name in enumerate(NAMES[: self._size.runs]):
            folder = self._folder / act / name
            checkpoints = folder / "checkpoints"
            checkpoints.mkdir(parents=True)
            arguments = {
                "data": str(self._data), "checkpoints": str(checkpoints), "engine": self._size.engine, "steps": steps,
                "every": max(1, steps // 10), "seed": number, "rate": _RATES[number], "hold": hold,
            }  # fmt: skip
            variables = {**self._environment, **environment}
            children.append(Child(name, "legroom.demo.training_script", arguments, folder, variables))
        return children

    def _wait(self, children: list[Child], reached: Callable[[], object], what: str) -> None:
        """Until that is true; an error where a run ended before it was done."""

        def failed() -> Child | None:
            return next((child for child in children if child.ended and not child.done), None)

        self._loop.until(lambda: reached() or failed(), what)
        for one in children:
            one.read_messages()
        if (child := failed()) is not None:
            verdict = child.report().get("summary") or say("it ended by itself")
            raise DemoFailed(
                say("training run {name} failed: {verdict}", name=child.name, verdict=verdict),
                why=child.last_lines(),
                fix=(
                    say("see what is running out:\nlegroom doctor"),
                    say("keep the logs:\nlegroom demo --keep"),
                ),
            )


def kill_and_resume(loop: EventLoop, child: Child) -> Result:
    """Kill a run with SIGKILL, report the diagnosis of `legroom run`, and resume from the newest whole checkpoint.

    `legroom run` restarts by itself what ran out of memory. A kill from outside may be meant, so it restarts nothing;
    the demo does, with the two functions that `legroom run` uses.
    """
    pid, last = child.pid, child.last("step")
    if pid is None or last is None:
        raise DemoFailed(say("training run {name} ended before it could be killed", name=child.name))
    when = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    words = {"name": child.name, "step": last["step"], "pid": pid}
    loop.tell(
        say("training run {name} killed on purpose at step {step}: kill -9 {pid}", **words),
        mark=say("killed"),
    )
    child.note = say("killed")
    loop.until(lambda: child.ended, "legroom run")
    report = child.report()
    loop.tell(say("legroom run: {verdict} ({sure:.0%} sure): {summary}", verdict=report.get("verdict"),
                  sure=report.get("confidence") or 0.0, summary=report.get("summary")))  # fmt: skip
    for line in report.get("evidence") or ():
        loop.tell(say("evidence: {line}", line=line))
    found = newest_complete(str(child.folder / "checkpoints" / "step-*.npz"))
    if found.path is None:
        raise DemoFailed(say("training run {name} has no whole checkpoint", name=child.name))
    child.start(with_resume(child.command, "--resume", found.path))
    child.note = say("restarted")

    def next_step() -> Message | None:
        resumed = child.last("resumed")
        later = [
            one
            for one in child.messages
            if resumed and one["kind"] in ("step", "done") and one["when"] > resumed["when"]
        ]
        return later[0] if resumed and resumed["when"] > when and later else None

    loop.until(lambda: next_step() or child.ended, say("the restart"))
    child.note = None
    resumed, step, back = child.last("resumed"), next_step(), None
    if resumed is not None and step is not None:
        back = step["when"] - when
        text = say("resumed from its newest whole checkpoint, step {step}, {seconds:.1f} s after the kill",
                   step=resumed["step"], seconds=back)  # fmt: skip
        loop.tell(text, mark=say("resumed"))
    return {
        "name": child.name, "signal": int(signal.SIGKILL), "at_step": last["step"],
        **{key: report.get(key) for key in ("verdict", "confidence", "summary")},
        "evidence": list(report.get("evidence") or ()),
        "resumed_from": None if resumed is None else int(resumed["step"]), "back_after": back,
    }  # fmt: skip


def steps_for(rate: float, seconds: float) -> int:
    """Steps that take about so long, at least 40."""
    return round(min(20_000, max(40, rate * seconds)))


def machine(host: Host) -> Result:
    """What the figures depend on: the machine, its packages, and its load now."""
    lines = (host.text("/proc/cpuinfo") or "").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    packages = {}
    for name in ("torch", "numpy", "h5py"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": next(models, platform.processor()), "cpus": cpu(host).affinity, "memory": memory(host).total,
        "system": f"{platform.system()} {platform.release()}", "python": platform.python_version(),
        "packages": packages, "load": os.getloadavg()[0],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def machine_line(where: Mapping[str, Any]) -> str:
    """The machine in one line."""
    packages = ", ".join(f"{name} {number}" for name, number in where["packages"].items())
    return say("{cpus} x {cpu}, {ram} of RAM, Python {python}, {packages}", cpus=where["cpus"], cpu=where["cpu"],
               ram=size_text(where["memory"]), python=where["python"], packages=packages)  # fmt: skip


def size_text(count: int | None) -> str:
    """A size, or that it is unknown."""
    return say("unknown") if count is None else format_size(count)
