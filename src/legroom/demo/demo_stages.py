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
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from legroom.demo import demo_setup
from legroom.demo.demo_children import SHM, Child, EventLoop, Message, Screen, end_all
from legroom.demo.demo_scripts import BATCH, CHECKPOINTS, MAY_END, ROW_BYTES, WORKERS
from legroom.demo.demo_setup import WorkDirectory, demo_size, h5py_seconds, make_dataset, rows_that_overflow
from legroom.errors import DemoFailed
from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.memory import memory, ram_pool
from legroom.probe.process_and_limits import cpu
from legroom.probe.shm import shm_space
from legroom.rescue.newest_checkpoint import newest_complete
from legroom.rescue.supervisor import remove_leftover_shm, shm_names
from legroom.system.lazy_and_optional_imports import package_version
from legroom.units import format_duration, format_size, size_or_unknown

Result = dict[str, Any]
SEPARATE, SHARED = "separate", "shared"
NAMES = ("one", "two", "three", "four")
_RATES = (0.05, 0.03, 0.02, 0.01)  # learning rates of the four runs
_KILLED, _KILL_AT = 2, 0.4  # the run that is killed, and at which share of its steps
_FEW_STEPS = 40  # of a run whose memory is measured and nothing else
_LASTS, _LASTS_QUICK, _ALL_OF_IT = 12.0, 4.0, 70.0  # seconds of the shared runs; of the demo until their end
_NO_BATCH = 15.0  # seconds after which a loader counts as stalled: torch's can hang on a full /dev/shm
_SETTLED = 2.1  # seconds after which a file counts as finished: until then every opening hashes it


def run_demo(screen: Callable[[], Screen], *, quick: bool = False, torch: bool = True, keep: bool = False) -> Result:
    """Run it; what was measured."""
    if why := why_not_here(Host()):
        raise DemoFailed(say("the demo cannot run here"), why=why, fix=(say("run it on Linux"),))
    shm_why = demo_setup.small_shm()  # before anything else: it restarts the program
    no_torch = None if torch else "--no-torch"
    if torch and importlib.util.find_spec("torch") is None:
        no_torch = say("torch is not installed")
    demo = Demo(screen())
    with demo.running():
        directory = demo_setup.make_directory(demo.host)
        try:
            demo.prepare(directory, shm_why, no_torch, quick)
            loaders = demo.loaders()
            demo.separate()
            result = demo.measured(loaders, demo.shared())
        finally:
            end_all(demo.started)
            kept = directory.remove(keep=keep)
    return result | {"shm_own": shm_why is None, "shm_why": shm_why, "kept": None if kept is None else str(kept)}


def why_not_here(host: Host) -> str | None:
    """Why the demo cannot run on this system, or None."""
    if host.platform != "linux":
        return say("it measures memory by /proc, which {platform} does not have", platform=host.platform)
    if not host.table("/proc/self/smaps_rollup").get("Pss"):
        return say("/proc/self/smaps_rollup cannot be read: shared memory could not be counted once")
    return None


@dataclass
class Demo(EventLoop):
    """The stages. What they measure is in ``result``, which `--json` prints."""

    result: Result = field(default_factory=dict)
    runs: dict[str, list[Child]] = field(default_factory=dict)  # by stage

    def prepare(self, directory: WorkDirectory, shm_why: str | None, no_torch: str | None, quick: bool) -> None:
        """Stage 0: the machine, and a file of as much data as fits."""
        ram, where = ram_pool(memory(self.host)).free, machine(self.host)
        disk, in_memory = directory.disk.free or 0, directory.disk.filesystem in ("tmpfs", "ramfs")
        size = demo_size(ram, disk, no_torch=no_torch, quick=quick, in_memory=in_memory)
        self.size, self.shm = size, shm_space(self.host, SHM)
        self.folder, self.environment = directory.path, demo_setup.environment(directory.path)
        self.begin("machine", say("0  This machine"))
        self.tell(machine_line(where))
        words = {"size": size_or_unknown(self.shm.size), "why": shm_why}
        self.tell(
            say("/dev/shm stays at {size}: a small one could not be mounted ({why})", **words)
            if shm_why
            else say("/dev/shm is {size} for this demo, as in a container; other processes keep theirs", **words)
        )
        notes = [*size.notes]
        if where["load"] >= 0.5:
            notes.append(say("the machine is busy (load {load:.1f}): figures vary", load=where["load"]))
        for note in notes:
            self.tell(note)
        data_bytes = make_dataset(self.folder / "train.h5", size.rows, self.obey_signals)
        self.made, plain = self.clock, h5py_seconds(self.folder / "train.h5")
        self.tell(say("wrote {rows} images as {size} of HDF5, which h5py reads in {time}",
                      rows=size.rows, size=format_size(data_bytes), time=format_duration(plain)))  # fmt: skip
        self.result = {
            "schema": "legroom.demo/1", "machine": where, "shm_size": self.shm.size, "data_bytes": data_bytes,
            "rows": size.rows, "engine": size.engine, "notes": notes, "opening": {"plain": plain},
        }  # fmt: skip

    def loaders(self) -> Result:
        """Stage 1: torch's DataLoader and Legroom's in the same /dev/shm, then their speed."""
        self.begin("loaders", say("1  DataLoaders with {count} workers", count=WORKERS))
        why, quick, trials = self.size.no_loaders, self.size.quick, []
        if why is None and self.shm.size is None:  # queues need semaphores, which are files there
            why = say("no worker processes without /dev/shm: {reason}", reason=self.shm.reason or say("unknown"))
        if why is not None:
            self.tell(say("skipped: {why}", why=why))
            return {"trials": [], "rates": None, "batch_bytes": None, "why": why}
        rows = rows_that_overflow(self.shm.size)
        if rows is None:
            size = size_or_unknown(self.shm.size)
            why = say("/dev/shm is {size}, too large to be filled for a demo", size=size)
            self.tell(say("no crash was tried: {why}", why=why))
        else:
            trials = [self._trial(name, rows, 8 if quick else 12) for name in ("torch", "legroom")]
        rounds, seconds = (1, 0.5) if quick else (3, 0.8)
        child = self.start("speed", "speed", {"batch": BATCH, "rounds": rounds, "seconds": seconds})
        self.until(lambda: child.ended and child.done, say("the speed of the DataLoaders"))
        rates = best_rates(child.all("rate"))
        self.tell(say("batches per second: torch {torch:.0f}, Legroom {legroom:.0f}, data.batches {batches:.0f}",
                      **rates))  # fmt: skip
        return {"trials": trials, "rates": rates, "batch_bytes": BATCH * ROW_BYTES, "why": why}

    def _trial(self, loader: str, rows: int, batches: int) -> Result:
        """One DataLoader in this /dev/shm, to its end or until it stalls."""

        def stalled() -> bool:
            return bool(child.all("opened")) and time.monotonic() - child.messages[-1]["when"] > _NO_BATCH

        before, stood_still = shm_names(self.host), False
        child = self.start(loader, "trial", {"batch": rows, "batches": batches}, "--loader", loader)
        try:
            self.until(lambda: child.ended or stalled(), say("a DataLoader"), may_end=child)
            stood_still = not child.ended
        finally:
            end_all([child])
            remove_leftover_shm(self.host, before)  # others may use this /dev/shm
        self.children.remove(child)
        opened, report, last = child.last("opened"), child.report(), child.last("step")
        if opened is None or opened["loader"] != loader:  # it must be the loader that its name says
            raise child.failed()
        peaks = (report.get("attempts") or [{}])[0].get("peaks", {})
        trial = {
            "loader": loader, "batch_bytes": rows * ROW_BYTES * 4, "delivered": 0 if last is None else last["step"],
            "of": batches, "died": not child.done, "stood_still": stood_still, "verdict": report.get("verdict"),
            "confidence": report.get("confidence"), "shm_peak": peaks.get("shm", {}).get("used"),
        }  # fmt: skip
        name = say("torch's DataLoader") if loader == "torch" else say("Legroom's DataLoader")
        words = {**trial, "name": name, "all": batches, "sure": trial["confidence"] or 0.0,
                 "batch": format_size(trial["batch_bytes"]), "peak": size_or_unknown(trial["shm_peak"])}  # fmt: skip
        if stood_still:
            self.tell(say("{name} stalled after {delivered} of {all} batches of {batch} and was ended", **words))
        elif trial["died"]:
            text = say("{name} crashed after {delivered} of {all} batches of {batch}: {verdict} ({sure:.0%} sure), "
                       "/dev/shm at {peak}", **words)  # fmt: skip
            self.tell(text, mark=say("{name} crashed", name=name))
        else:
            self.tell(say("{name} finished: {all} batches of {batch}, /dev/shm at {peak}", **words))
        return trial

    def separate(self) -> None:
        """Stage 2: runs with a copy each, until the memory of all has been measured together."""
        title = say("2  {count} training runs with a copy each", count=self.size.runs)
        children = self._train(SEPARATE, title, _FEW_STEPS, LEGROOM_DISABLE="1")
        self.until(lambda: all(child.all("ready") for child in children), say("the training runs"))
        samples = len(self.samples) + 2
        self.until(lambda: len(self.samples) >= samples, say("their memory"))
        self._finish()
        self.tell(say("together they used {size}", size=size_or_unknown(self._peak(SEPARATE))))

    def shared(self) -> Result:
        """Stage 3: the same script on one copy, to the end; one run is killed and restarted. What the kill led to."""
        self.until(lambda: self.clock - self.made > _SETTLED, say("the file to settle"))
        # On a busy machine the stages before took longer, and less time is left.
        lasts = _LASTS_QUICK if self.size.quick else min(_LASTS, max(_LASTS_QUICK, _ALL_OF_IT - self.clock))
        steps = steps_for(median(child.all("ready")[0]["rate"] for child in self.runs[SEPARATE]), lasts)
        title = say("3  {count} training runs on one copy", count=self.size.runs)
        children = self._train(SHARED, title, steps)
        times = {key: format_duration(self.opening()[key]) for key in ("at_once", "plain_at_once")}
        self.tell(say("one run loaded the data into the page cache; all had it after {at_once} "
                      "(with a copy each: {plain_at_once})", **times))  # fmt: skip
        child, samples = children[min(_KILLED, len(children) - 1)], len(self.samples) + 2

        def far_enough() -> bool:
            saved = max((message["step"] for message in child.all("saved")), default=0)
            return bool(saved >= steps * _KILL_AT and len(self.samples) >= samples)

        self.until(far_enough, say("a checkpoint"))
        rescue = self._kill_and_resume(child)
        self._finish()
        words = {"count": self.size.runs, "size": size_or_unknown(self._peak(SHARED))}
        self.tell(say("all {count} finished; together they used {size}", **words))
        return rescue

    def _train(self, stage: str, title: str, steps: int, **variables: str) -> list[Child]:
        """Start the same runs until all train; none takes its last step before `_finish`."""
        self.begin(stage, title)
        for number, name in enumerate(NAMES[: self.size.runs]):
            given = {"engine": self.size.engine, "steps": steps, "seed": number, "rate": _RATES[number]}
            self.start(name, "train", given, **variables)
        children = self.runs[stage] = self.children
        self.until(lambda: all(child.all("step") for child in children), say("the training runs"))
        return children

    def _finish(self) -> None:
        """Let the runs of this stage end: all have been measured, and the one to be killed has been killed."""
        (self.folder / self.stage / MAY_END).touch()
        self.until(lambda: all(child.ended and child.done for child in self.children), say("their end"))

    def _peak(self, stage: str) -> int | None:
        return peak(self.samples, stage, self.size.runs)

    def opening(self) -> Result:
        """Seconds until the runs had their data: all at once, and one that came later."""
        first = [child.all("opened")[0] for child in self.runs[SHARED]]
        later = [message for child in self.runs[SHARED] for message in child.all("opened")[1:]] or [{}]
        return {
            "at_once": max(message["seconds"] for message in first),
            "later": later[0].get("seconds"), "later_ready": later[0].get("ready"),
            "plain_at_once": max(child.all("opened")[0]["seconds"] for child in self.runs[SEPARATE]),
            "backing": first[0]["backing"],
        }  # fmt: skip

    def _kill_and_resume(self, child: Child) -> Result:
        """Kill a run with SIGKILL, report the diagnosis of `legroom run`, resume from the newest whole checkpoint.

        `legroom run` restarts by itself what ran out of memory. A kill from outside may be meant, so it restarts
        nothing; the demo does.
        """
        pid, last, when = child.pid, child.last("step"), time.monotonic()
        if pid is None or last is None:
            raise DemoFailed(say("training run {name} ended before it could be killed", name=child.name))
        os.kill(pid, signal.SIGKILL)
        child.note = say("killed")
        text = say("training run {name} killed on purpose at step {step}: kill -9 {pid}",
                   name=child.name, step=last["step"], pid=pid)  # fmt: skip
        self.tell(text, mark=child.note)
        self.until(lambda: child.ended, "legroom run", may_end=child)
        report = child.report()
        evidence = list(report.get("evidence") or ())
        self.tell(say("legroom run: {verdict} ({sure:.0%} sure): {summary}", verdict=report.get("verdict"),
                      sure=report.get("confidence") or 0.0, summary=report.get("summary")))  # fmt: skip
        for line in evidence:
            self.tell(say("evidence: {line}", line=line))
        found = newest_complete(str(child.folder / CHECKPOINTS))
        if found.path is None:
            raise DemoFailed(say("training run {name} has no whole checkpoint", name=child.name))
        child.start(self.folder, "--resume", found.path)
        child.note = say("restarted")

        before = len(child.all("step"))
        self.until(lambda: child.all("step")[before:], say("the restart"))
        resumed, back, child.note = child.all("resumed")[0]["step"], child.all("step")[before]["when"] - when, None
        text = say("resumed from its newest whole checkpoint, step {step}, {seconds:.1f} s after the kill",
                   step=resumed, seconds=back)  # fmt: skip
        self.tell(text, mark=say("resumed"))
        return {
            "name": child.name, "signal": int(signal.SIGKILL), "at_step": last["step"], "evidence": evidence,
            **{key: report.get(key) for key in ("verdict", "confidence", "summary")},
            "resumed_from": resumed, "back_after": back,
        }  # fmt: skip

    def measured(self, loaders: Result, rescue: Result) -> Result:
        """What was measured, once all stages are over."""
        ends = [(child, child.all("step")[-1]) for child in self.runs[SHARED]]
        return self.result | {
            "trainings": [{"name": child.name, "steps": end["step"], "finished": child.done, "loss": end["loss"],
                           "starts": child.starts} for child, end in ends],
            "memory": {stage: self._peak(stage) for stage in (SEPARATE, SHARED)},
            "opening": {**self.opening(), **self.result["opening"]}, "rescue": rescue, "loaders": loaders,
            "weights": self.samples, "marks": self.marks, "seconds": self.clock,
        }  # fmt: skip


def best_rates(messages: Sequence[Message]) -> dict[str, float]:
    """The best round of each loader: other work on the machine only makes one slower."""
    slowest_first = sorted(messages, key=lambda message: float(message["rate"]))
    return {message["loader"]: message["rate"] for message in slowest_first}


def peak(samples: Sequence[Mapping[str, Any]], stage: str, count: int) -> int | None:
    """The most memory that the children of a stage held together, while all of them ran."""
    held = (sample["held"].values() for sample in samples if sample["act"] == stage)
    return max((sum(sizes) for sizes in held if len(sizes) == count), default=None)


def steps_for(rate: float, seconds: float) -> int:
    """Steps that take about so long, at least 40."""
    return round(min(20_000, max(40, rate * seconds)))


def machine(host: Host) -> Result:
    """What the figures depend on: the machine, its packages, and its load now."""
    lines = (host.text("/proc/cpuinfo") or "").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    packages = {name: package_version(name) for name in ("torch", "numpy", "h5py")}
    return {
        "cpu": next(models, platform.processor()), "cpus": cpu(host).affinity, "memory": memory(host).total,
        "system": f"{platform.system()} {platform.release()}", "python": platform.python_version(),
        "packages": {name: number for name, number in packages.items() if number}, "load": os.getloadavg()[0],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def machine_line(where: Mapping[str, Any]) -> str:
    """The machine in one line."""
    packages = ", ".join(f"{name} {number}" for name, number in where["packages"].items())
    return say("{cpus} x {cpu}, {ram} of RAM, Python {python}, {packages}", cpus=where["cpus"], cpu=where["cpu"],
               ram=size_or_unknown(where["memory"]), python=where["python"], packages=packages)  # fmt: skip
