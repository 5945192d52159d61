"""The demo from start to end: DataLoaders in a small /dev/shm, runs with a copy each, runs on one copy and a kill -9.

`run_demo` returns what was measured as the object that `--json` prints; docs/demo.md describes it.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from legroom.charts.demo_chart import machine_line
from legroom.demo import demo_setup
from legroom.demo.demo_scripts import BATCH, CHECKPOINTS, MAY_END, MESSAGES, ROW_BYTES, WORKERS
from legroom.demo.demo_setup import WorkDirectory
from legroom.errors import DemoFailed
from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import cpu, parse_status
from legroom.probe.ram_swap_and_pressure import memory, ram_pool
from legroom.probe.shm import shm_space
from legroom.probe.shm_segments import SHM
from legroom.records.machine import Pool
from legroom.rescue.newest_checkpoint import newest_complete
from legroom.system.lazy_and_optional_imports import package_version
from legroom.system.processes_and_threads import handling_signals
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
_GRACE = 2.0  # seconds from SIGTERM to SIGKILL, for `legroom run` and for the demo
_SCRIPT = (sys.executable, "-P", "-m", "legroom.demo.demo_scripts")
_RUN = (*_SCRIPT, "run", "--json", "--grace", f"{_GRACE:g}s")
_WITHIN = 180.0  # seconds to wait for anything
_TURN = 0.1  # seconds
_MEASURE = 0.5  # seconds between two measurements: for each the kernel walks every page table


def run_demo(screen: Callable[[], Screen], *, quick: bool = False, torch: bool = True, keep: bool = False) -> Result:
    """Run it; what was measured."""
    if why := why_not_here(Host()):
        raise DemoFailed(say("the demo cannot run here"), why=why, fix=(say("run it on Linux"),))
    shm_why = demo_setup.small_shm()  # before anything else: it restarts the program
    missing = None if package_version("torch") else say("torch is not installed")
    no_torch = missing if torch else "--no-torch"
    demo = Demo(screen())
    with handling_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), demo.note_signal), closing(demo.screen):
        directory = demo_setup.make_directory(demo.host)
        try:
            demo.prepare(directory, shm_why, no_torch, quick)
            loaders = demo.loaders()
            demo.separate()
            result = demo.measured(loaders, demo.shared())
        finally:
            end_all([child for children in demo.runs.values() for child in children])
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
class Child:
    """One child through all its starts; ``note`` is shown in place of its progress."""

    name: str
    command: Sequence[str]
    folder: Path  # for logs
    environment: Mapping[str, str]
    starts: int = 0
    ended: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None  # of `legroom run`
    pss: int | None = None
    rss: int | None = None
    note: str | None = None
    _offset: int = 0

    def start(self, cwd: Path, *more: str) -> None:
        """Start it in that directory; ``more`` goes to the end of its command line."""
        self.starts, self.ended = self.starts + 1, False
        with self._file("json").open("wb") as report, self._file("log").open("wb") as log:
            # A process group of its own: Ctrl-C reaches the demo alone, which then ends its children in order.
            self.process = subprocess.Popen(
                [*self.command, *more], cwd=cwd, env=self.environment, stdin=subprocess.DEVNULL, stdout=report,
                stderr=log, process_group=0,
            )  # fmt: skip

    def update(self) -> None:
        """Read the new messages. One that counts as ended can write no more, so all of its messages are read."""
        self.ended = self.process is not None and self.process.poll() is not None
        with suppress(FileNotFoundError), (self.folder / MESSAGES).open("rb") as file:
            file.seek(self._offset)
            whole = [line for line in file if line.endswith(b"\n")]  # an unfinished line is left for the next time
            self._offset += sum(map(len, whole))
            self.messages += [json.loads(line) for line in whole]

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Its messages of that kind, oldest first."""
        return [message for message in self.messages if message["kind"] == kind]

    def last(self, kind: str) -> dict[str, Any] | None:
        """The newest message of that kind."""
        return next(reversed(self.all(kind)), None)

    @property
    def pid(self) -> int | None:
        """The process below `legroom run`; None before its first message and after its end."""
        started = self.all("started")
        return started[-1]["pid"] if len(started) == self.starts and not self.ended else None

    @property
    def done(self) -> bool:
        """Whether it finished its work."""
        return bool(self.all("done"))

    def report(self) -> dict[str, Any]:
        """The report of `legroom run` on the last start; empty if that was ended before it could write one."""
        with suppress(OSError, ValueError):
            return dict(json.loads(self._file("json").read_text(encoding="utf-8")))
        return {}

    def failed(self) -> DemoFailed:
        """An error that shows the end of its log."""
        lines = [line.strip() for line in self._file("log").read_text(errors="replace").splitlines()]
        verdict = self.report().get("summary") or say("it ended by itself")
        return DemoFailed(
            say("the child process {name} failed: {verdict}", name=self.name, verdict=verdict),
            why=" / ".join([line for line in lines if line][-3:]) or say("it printed nothing"),
            fix=(say("see what is running out:\nlegroom doctor"), say("keep the logs:\nlegroom demo --keep")),
        )

    def _file(self, kind: str) -> Path:
        return self.folder / f"start-{self.starts}.{kind}"


def end_all(children: Sequence[Child]) -> None:
    """End them: SIGTERM first, which `legroom run` passes on, then SIGKILL; their own children end with them."""
    running = [child.process for child in children if child.process is not None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + 2 * _GRACE
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()  # does nothing where it has ended
        process.wait()
    for child in children:
        child.update()


class Screen(Protocol):
    """Where the demo is shown: stages, events, and the state now. ``clock`` is in seconds since the start."""

    def headline(self, clock: float, title: str) -> None: ...
    def tell(self, clock: float, text: str) -> None: ...
    def draw(self, clock: float, pools: Sequence[Pool], children: Sequence[Child]) -> None: ...
    def close(self) -> None: ...


@dataclass
class Demo:
    """The stages, and what they share: how a child is started, measured and waited for. It has one thread."""

    screen: Screen
    host: Host = field(default_factory=Host)
    began: float = field(default_factory=time.monotonic)
    folder: Path = Path()  # of the demo
    environment: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    title: str = ""  # of the stage, in words
    children: list[Child] = field(default_factory=list)  # of this stage
    samples: list[dict[str, Any]] = field(default_factory=list)  # when, act (the stage), held: PSS by name
    marks: list[dict[str, Any]] = field(default_factory=list)  # when, text
    runs: dict[str, list[Child]] = field(default_factory=dict)  # by stage
    result: Result = field(default_factory=dict)  # what was measured before the first stage
    _pools: tuple[Pool, ...] = ()
    _signal: int = 0
    _measured: float = 0.0

    @property
    def clock(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def begin(self, stage: str, title: str) -> None:
        """Begin the next stage."""
        self.stage, self.title, self.children = stage, title, self.runs.setdefault(stage, [])
        self.screen.headline(self.clock, title)

    def tell(self, text: str, mark: str | None = None) -> None:
        """Report an event; ``mark`` is its label in the chart."""
        if mark is not None:
            self.marks.append({"when": round(self.clock, 3), "text": mark})
        self.screen.tell(self.clock, text)

    def start(self, name: str, script: str, given: Mapping[str, Any], *options: str, **variables: str) -> Child:
        """Start a child of this stage, with options of `legroom run` and environment variables of its own."""
        folder = self.folder / self.stage / name
        folder.mkdir(parents=True)
        arguments = json.dumps({"folder": str(folder), "data": str(self.folder / "train.h5"), **given})
        command = (*_RUN, *options, "--", *_SCRIPT, script, arguments)
        child = Child(name, command, folder, {**self.environment, **variables})
        self.children.append(child)
        child.start(self.folder)
        return child

    def until(self, reached: Callable[[], object], *, may_end: Child | None = None) -> None:
        """Run until that is true; an error where a child other than ``may_end`` ended before it was done."""
        deadline = time.monotonic() + _WITHIN
        while True:
            self._turn()
            if reached():
                return
            for child in self.children:
                if child.ended and not child.done and child is not may_end:
                    raise child.failed()
            if time.monotonic() >= deadline:
                raise DemoFailed(
                    say("the demo timed out in stage {name}", name=self.title),
                    why=say("{seconds:.0f} s passed", seconds=_WITHIN),
                    fix=(say("keep the logs:\nlegroom demo --keep"),),
                )
            time.sleep(_TURN)

    def note_signal(self, number: int, _frame: object) -> None:
        """Obey it between two turns: no child is started and then forgotten, nothing is left half made or removed."""
        self._signal = self._signal or number

    def obey_signals(self) -> None:
        """Raise where Ctrl-C or SIGTERM came."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal:
            raise SystemExit(128 + self._signal)

    def _turn(self) -> None:
        self.obey_signals()
        for child in self.children:
            child.update()
        if time.monotonic() - self._measured >= _MEASURE:
            self._measured = time.monotonic()
            for child in self.children:
                table = {} if child.pid is None else self.host.table(f"/proc/{child.pid}/smaps_rollup")
                child.pss, child.rss = table.get("Pss"), table.get("Rss")
            held = {child.name: child.pss for child in self.children if child.pss is not None}
            self.samples.append({"when": round(self.clock, 3), "act": self.stage, "held": held})
            self._pools = (shm_space(self.host, SHM), ram_pool(memory(self.host)))
        self.screen.draw(self.clock, self._pools, self.children)

    def prepare(self, directory: WorkDirectory, shm_why: str | None, no_torch: str | None, quick: bool) -> None:
        """Stage 0: the machine, and a file of as much data as fits."""
        ram, where = ram_pool(memory(self.host)).free, machine(self.host)
        disk, in_memory = directory.disk.free or 0, directory.disk.filesystem in ("tmpfs", "ramfs")
        size = demo_setup.demo_size(ram, disk, no_torch=no_torch, quick=quick, in_memory=in_memory)
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
        data_bytes = demo_setup.make_dataset(self.folder / "train.h5", size.rows, self.obey_signals)
        self.made, plain = self.clock, demo_setup.h5py_seconds(self.folder / "train.h5")
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
        rows = demo_setup.rows_that_overflow(self.shm.size)
        if rows is None:
            why = say("/dev/shm is {size}, too large to be filled for a demo", size=size_or_unknown(self.shm.size))
            self.tell(say("no crash was tried: {why}", why=why))
        else:
            trials = [self._trial(name, rows, 8 if quick else 12) for name in ("torch", "legroom")]
        rounds, seconds = (1, 0.5) if quick else (3, 0.8)
        child = self.start("speed", "speed", {"batch": BATCH, "rounds": rounds, "seconds": seconds})
        self.until(lambda: child.ended and child.done)
        rates = best_rates(child.all("rate"))
        self.tell(say("batches per second: torch {torch:.0f}, Legroom {legroom:.0f}, data.batches {batches:.0f}",
                      **rates))  # fmt: skip
        return {"trials": trials, "rates": rates, "batch_bytes": BATCH * ROW_BYTES, "why": why}

    def _trial(self, loader: str, rows: int, batches: int) -> Result:
        """One DataLoader in this /dev/shm, to its end or until it stalls."""

        def stalled() -> bool:
            return bool(child.all("opened")) and time.monotonic() - child.messages[-1]["when"] > _NO_BATCH

        stood_still = False
        child = self.start(loader, "trial", {"batch": rows, "batches": batches}, "--loader", loader)
        try:
            self.until(lambda: child.ended or stalled(), may_end=child)
            stood_still = not child.ended
        finally:
            end_all([child])
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
            self.tell(say("{name} crashed after {delivered} of {all} batches of {batch}: {verdict} ({sure:.0%} sure), "
                          "/dev/shm at {peak}", **words), mark=say("{name} crashed", name=name))  # fmt: skip
        else:
            self.tell(say("{name} finished: {all} batches of {batch}, /dev/shm at {peak}", **words))
        return trial

    def separate(self) -> None:
        """Stage 2: runs with a copy each, until the memory of all has been measured together."""
        title = say("2  {count} training runs with a copy each", count=self.size.runs)
        children = self._train(SEPARATE, title, _FEW_STEPS, LEGROOM_DISABLE="1")
        self.until(lambda: all(child.all("ready") for child in children))
        samples = len(self.samples) + 2
        self.until(lambda: len(self.samples) >= samples)
        self._finish()
        self.tell(say("together they used {size}", size=size_or_unknown(peak(self.samples, SEPARATE, self.size.runs))))

    def shared(self) -> Result:
        """Stage 3: the same script on one copy, to the end; one run is killed and restarted. What the kill led to."""
        self.until(lambda: self.clock - self.made > _SETTLED)
        # On a busy machine the stages before took longer, and less time is left.
        lasts = _LASTS_QUICK if self.size.quick else min(_LASTS, max(_LASTS_QUICK, _ALL_OF_IT - self.clock))
        steps = steps_for(median(child.all("ready")[0]["rate"] for child in self.runs[SEPARATE]), lasts)
        title = say("3  {count} training runs on one copy", count=self.size.runs)
        children = self._train(SHARED, title, steps)
        times = {key: format_duration(self.opening()[key]) for key in ("at_once", "plain_at_once")}
        self.tell(say("one run loaded the data into the page cache; all had it after {at_once} "
                      "(with a copy each: {plain_at_once})", **times))  # fmt: skip
        child, samples = children[min(_KILLED, len(children) - 1)], len(self.samples) + 2
        self.until(lambda: any(one["step"] >= steps * _KILL_AT for one in child.all("saved")))
        self.until(lambda: len(self.samples) >= samples)
        rescue = self._kill_and_resume(child)
        self._finish()
        size = size_or_unknown(peak(self.samples, SHARED, self.size.runs))
        self.tell(say("all {count} finished; together they used {size}", count=self.size.runs, size=size))
        return rescue

    def _train(self, stage: str, title: str, steps: int, **variables: str) -> list[Child]:
        """Start the same runs until all train; none takes its last step before `_finish`."""
        self.begin(stage, title)
        for number, name in enumerate(NAMES[: self.size.runs]):
            given = {"engine": self.size.engine, "steps": steps, "seed": number, "rate": _RATES[number]}
            self.start(name, "train", given, **variables)
        self.until(lambda: all(child.all("step") for child in self.children))
        return self.children

    def _finish(self) -> None:
        """Let the runs of this stage end: all have been measured, and the one to be killed has been killed."""
        (self.folder / self.stage / MAY_END).touch()
        self.until(lambda: all(child.ended and child.done for child in self.children))

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

        `legroom run` restarts what ran out of memory. A kill from outside may be meant: here the demo restarts it.
        """
        pid, when = child.pid, time.monotonic()
        if pid is None:
            raise DemoFailed(say("training run {name} ended before it could be killed", name=child.name))
        os.kill(pid, signal.SIGKILL)
        child.note = say("killed")
        self.until(lambda: parse_status(self.host.text(f"/proc/{pid}/status") or "", pid) is None, may_end=child)
        found = newest_complete(str(child.folder / CHECKPOINTS))
        step = last_step(child.messages, found.path)
        self.tell(say("training run {name} killed on purpose after step {step}: kill -9 {pid}",
                      name=child.name, step=step, pid=pid), mark=child.note)  # fmt: skip
        self.until(lambda: child.ended, may_end=child)
        report = child.report()
        evidence = list(report.get("evidence") or ())
        self.tell(say("legroom run: {verdict} ({sure:.0%} sure): {summary}", verdict=report.get("verdict"),
                      sure=report.get("confidence") or 0.0, summary=report.get("summary")))  # fmt: skip
        for line in evidence:
            self.tell(say("evidence: {line}", line=line))
        if found.path is None:
            raise DemoFailed(say("training run {name} has no whole checkpoint", name=child.name))
        child.start(self.folder, "--resume", found.path)
        child.note = say("restarted")
        before = len(child.all("step"))
        self.until(lambda: child.all("step")[before:])
        resumed, back, child.note = child.all("resumed")[0]["step"], child.all("step")[before]["when"] - when, None
        self.tell(say("resumed from its newest whole checkpoint, step {step}, {seconds:.1f} s after the kill",
                      step=resumed, seconds=back), mark=say("resumed"))  # fmt: skip
        return {
            "name": child.name, "signal": int(signal.SIGKILL), "at_step": step, "evidence": evidence,
            **{key: report.get(key) for key in ("verdict", "confidence", "summary")},
            "resumed_from": resumed, "back_after": back,
        }  # fmt: skip

    def measured(self, loaders: Result, rescue: Result) -> Result:
        """What was measured, once all stages are over."""
        ends = [(child, child.all("step")[-1]) for child in self.runs[SHARED]]
        return self.result | {
            "trainings": [{"name": child.name, "steps": end["step"], "finished": child.done, "loss": end["loss"],
                           "starts": child.starts} for child, end in ends],
            "memory": {stage: peak(self.samples, stage, self.size.runs) for stage in (SEPARATE, SHARED)},
            "opening": {**self.opening(), **self.result["opening"]}, "rescue": rescue, "loaders": loaders,
            "weights": self.samples, "marks": self.marks, "seconds": self.clock,
        }  # fmt: skip


def last_step(messages: Sequence[Mapping[str, Any]], checkpoint: str | None) -> int:
    """The last step that a run is known to have made: it reports ten a second, and may die before it reports one."""
    known = [int(message["step"]) for message in messages if message["kind"] in ("resumed", "saved", "step")]
    known += [] if checkpoint is None else [int(Path(checkpoint).stem.rpartition("-")[2])]
    return max(known, default=0)


def best_rates(messages: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The best round of each loader, the last in this order: other work on the machine only makes one slower."""
    return {one["loader"]: one["rate"] for one in sorted(messages, key=lambda one: float(one["rate"]))}


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
