"""Record the memory of this process from step to step: runs inside the training process and writes one file.

At a step that is due it reads counters and walks the holders. Times between samples grow with the length of the run,
and both samples and windows of tracemalloc are limited to a share of the time. A process without steps is sampled by a
thread, which is stopped before a fork. Errors never reach the script: recording ends with a note.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from typing import Any

from legroom.leak.autograd_graphs import GraphReach
from legroom.leak.containers_held_by_variables import Holder, Holding, Key, Walk, newest_items, running_frames
from legroom.leak.creation_sites import Tracing, creations, creations_in_window, live_tensors
from legroom.leak.dataset_pages_copied_by_workers import CopiedDataset
from legroom.leak.object_size import size_per_item
from legroom.leak.process_counters import free_gpus, process_start, read_counters
from legroom.leak.record_files import SCHEMA, RecordWriter, counters_object
from legroom.leak.shm_files_by_line import ShmFiles
from legroom.leak.torch_step_hooks import TorchSteps, worker_dataset
from legroom.messages import say
from legroom.probe.process_and_limits import plain

# Not when the last sample is taken, at exit: after Ctrl-C, a dataclass that is defined then makes Python exit with 1
# instead of ending by SIGINT.
from legroom.probe.ram_swap_and_pressure import free_memory
from legroom.system import training_step_listeners
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread

_RANKS = {"script": 3, "optimizer": 2, "loader": 1, "worker": 1}  # which source counts where there are several
_FIRST_STEPS = 2  # not sampled: the first batch, the optimizer's state
_WIDER = 0.03  # of the time so far, between two samples
_SHORTEST, _LONGEST = 0.02, 60.0  # seconds between two samples
_SHARE = 0.015  # of the time, for samples, and as much for windows
_CREDIT = 0.6  # seconds of samples, and of windows, that a short run may take
_FREE_SAMPLES = 40  # taken whatever they cost: enough to judge a short run
_WINDOW_STEPS = (6, 8, 12, 20, 32, 64, 120)
_WINDOW_PART = 10  # a window is at most this part of the steps so far
_LONGEST_WINDOW = 4.0  # seconds
_SAMPLES_BETWEEN, _STEPS_BETWEEN = 4, 2  # samples, and times the steps of a window, between two windows
_SURE_WINDOWS = 3  # opened whether or not anything seems to grow
_TICK = 0.25  # seconds between checks of the thread
_NO_STEPS = 3.0  # seconds without a step after which the thread samples
_MOST_HOLDERS = 400  # recorded
_MOST_MEASURED = 24  # holders whose items are measured in one sample
_FEWEST_ITEMS = 4  # of a container that is recorded
_FEWEST_MEASURED, _MOST_ITEMS_MEASURED = 8, 1024  # newest items of a container whose size is measured
_FREE_EVERY = 5.0  # seconds between readings of free memory
_PUBLISH_EVERY = 10.0  # seconds between two reports to `legroom watch`, at least
_STEPS_EVERY = 1.0  # seconds between two counts of steps for it
_FEWEST_SAMPLES = 12  # before the first of them
_COPIED_EVERY = 0.5  # seconds between readings of copied pages, at least
_LARGEST_PARENT = 64 << 30  # bytes; reading the pages of a larger one would delay the fork by more than 0.3 s
_FREE_READINGS = 5  # of copied pages, whatever they cost: a worker may live for one short epoch


class Recorder:
    """Records this process, and every process that it forks."""

    def __init__(self, directory: str, share: float = _SHARE) -> None:
        self.directory = directory
        self.share = share  # of the time: for samples, and again for windows of tracemalloc
        self.steps = 0
        self.torch = TorchSteps(self._count)
        self._tracing = Tracing()
        self._shm = ShmFiles()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.running = False
        self._started = self._forks = False
        self._reset()

    def start(self) -> None:
        """Begin."""
        self.running = self._started = True
        self._tracing.install()
        self._shm.listen()
        training_step_listeners.listen(self._count)
        self.torch.install()
        atexit.register(self.stop)
        if not self._forks:
            self._forks = True
            _follow_forks(self)
        self._start_thread()

    def stop(self) -> None:
        """Take a last sample, and end; after an error, remove what remained in place."""
        if not self._started:
            return
        if self.running and (self._source is None or self.steps > self._sampled_step):
            self._sample_safely(last=True)
        self.running = self._started = False
        atexit.unregister(self.stop)  # which would keep this object, and all that it holds
        self._stop_thread()
        self._forget_window()
        self._tracing.remove()
        self._shm.stop()
        training_step_listeners.stop_listening(self._count)
        self.torch.remove()
        self._writer.close()

    def _reset(self) -> None:
        """The state of a new process."""
        self.steps, self._sampled_step = 0, 0
        self._source: str | None = None
        self._began = time.monotonic()
        self._first_step_at: float | None = None
        self._last_step_at = self._began
        self._due = 0.0
        self._sampled_at = self._began
        self._cost = self._window_cost = 0.0
        self._samples, self._free_until = 0, _FREE_SAMPLES
        self._cpu_at_first = time.process_time()
        self._numbers: dict[Key, int] = {}
        self._known: dict[Key, tuple[int | None, float, int]] = {}  # the first amount of each holder
        self._amounts: dict[int, int | None] = {}
        self._measured: dict[int, int] = {}  # amount at which the items of a holder were measured
        self._graphs = GraphReach()
        self._windows = 0
        self._window_from: tuple[int, float] | None = None
        self._window_steps = 0
        self._after_window = _SAMPLES_BETWEEN, 0  # samples and steps from which the next window may begin
        self._window_holders: dict[int, Any] = {}  # containers, kept while the window is open
        self._window_sizes: dict[int, int] = {}  # of those, when it began
        self._middle_done = False
        self._step_time: float | None = None
        self._counts: list[tuple[int, int]] = []  # blocks and bytes of malloc, at each sample
        self._free_at = -_FREE_EVERY
        self._free: dict[str, int] = {}
        self._copied: CopiedDataset | None = None
        self._copied_due = 0.0
        self._copied_readings = 0
        self._publish_at = self._began + _PUBLISH_EVERY
        self._steps_at, self._published_steps = self._began + _STEPS_EVERY, 0
        self._role_known = False
        self._forked = False
        self._writer = RecordWriter(self.directory, os.getpid(), process_start())
        self._headed = False
        self._no_thread: str | None = None  # why there is none

    @property
    def window_open(self) -> bool:
        """Whether tracemalloc is on for a window: a benchmark waits for its end."""
        return self._window_from is not None

    def skip(self, seconds: float, cpu: float = 0.0) -> None:
        """Do not count a pause, and its CPU time, as time that samples may take a share of."""
        self._began += seconds
        self._cpu_at_first += cpu
        self._due += seconds
        self._last_step_at += seconds
        if self._first_step_at is not None:
            self._first_step_at += seconds

    # Steps

    def _count(self, source: str, count: int = 1) -> None:
        if not self.running:
            return
        if source != self._source:
            if self._source is not None and _RANKS[source] <= _RANKS[self._source]:
                return
            if source == "worker" and not worker_dataset()[0]:
                return  # a loader without workers: its batches are counted when they are taken
            self._change_source(source)
        now = time.monotonic()
        self.steps += count
        if self.steps <= _FIRST_STEPS:
            self._last_step_at = now
            return
        if self._first_step_at is None:
            # What was spent before says nothing about steps: importing and loading a model can take minutes.
            self._first_step_at, self._due, self._cost = now, now, 0.0
            self._free_until, self._cpu_at_first = self._samples + _FREE_SAMPLES, time.process_time()
        if self._window_from is not None:
            self._advance_window()
        else:
            took = (now - self._last_step_at) / count
            self._step_time = took if self._step_time is None else self._step_time + 0.1 * (took - self._step_time)
        if now >= self._due and self._window_from is None:  # a walk under tracemalloc takes thirty times as long
            self._sample_safely()
            now = time.monotonic()
        self._last_step_at = now

    def _change_source(self, source: str) -> None:
        """Steps are counted anew: those of another kind, and samples by the clock, cannot be compared."""
        self._source, self.steps, self._first_step_at = source, 0, None
        if self._headed:
            self._writer.write("source", source=source)

    # Samples

    def _sample_safely(self, *, last: bool = False) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._sample(last=last)
        except Exception as problem:
            self._end_with(problem)
        finally:
            self._lock.release()

    def _end_with(self, problem: Exception) -> None:
        """Record no more. The hooks return at once; `stop` removes them, because this may run within one of torch's."""
        self.running = False
        self._tracing.remove()
        self._forget_window()
        self._writer.write("note", text=f"recording ended: {type(problem).__name__}: {problem}")

    def _sample(self, *, last: bool) -> None:
        began, now = time.thread_time(), time.monotonic()
        if not self._headed:
            self._head()
        counters = read_counters()
        step = None if self._source is None else self.steps
        amounts: list[tuple[int, int | None]] = []
        if not last:
            amounts = self._walk(step, now - self._began)
        self._writer.write(
            "sample",
            step=step,
            time=round(now - self._began, 3),
            counters=counters_object(counters),
            free=self._free_memory(now),
            amounts=amounts,
            walked=not last,
        )
        if self._forked:
            self._read_copied(now)
        self._samples += 1
        self._sampled_at, self._sampled_step = now, self.steps
        self._counts.append((counters.blocks, counters.malloc or counters.anonymous or 0))
        del self._counts[:-64]
        self._plan(now, time.thread_time() - began)
        if not last:
            self._maybe_open_window(now)

    def _plan(self, now: float, cost: float) -> None:
        """When the next sample is due: later in longer runs, and within the share of time.

        ``cost`` is CPU time, compared with the CPU time of the process: on a busy machine both wait for a CPU most of
        the time, and as many samples are taken over as many steps as on an idle one.
        """
        self._cost += cost
        lasted = now - (self._first_step_at or self._began)
        worked = min(lasted, time.process_time() - self._cpu_at_first)
        gap = min(_LONGEST, max(_SHORTEST, _WIDER * lasted))
        over = max(0.0, self._cost - _CREDIT)
        if self._samples > self._free_until and over > self.share * worked:
            gap = max(gap, cost / self.share * (lasted / worked if worked > 0 else 1.0))
        self._due = now + gap

    def _head(self) -> None:
        self._headed = True
        words = sys.orig_argv if sys.argv and sys.argv[0] != "-c" else sys.orig_argv[:3]
        self._writer.write(
            "process",
            schema=SCHEMA,
            pid=os.getpid(),
            parent=os.getppid(),
            command=plain(" ".join(words))[:200],
            role="forked" if self._forked else "main",
            rank=os.environ.get("RANK"),
            started=time.time() - (time.monotonic() - self._began),
            source=self._source,
        )
        if self._no_thread is not None:
            self._note_no_thread()

    def _free_memory(self, now: float) -> dict[str, int]:
        if now - self._free_at >= _FREE_EVERY:
            self._free_at = now
            free, _ = free_memory()
            self._free = {} if free is None else {"ram": free}
            try:
                space = os.statvfs("/dev/shm")
                self._free["shm"] = space.f_bavail * space.f_frsize
            except OSError:
                pass
            self._free.update(free_gpus())
            return self._free
        return {}

    def _walk(self, step: int | None, clock: float) -> list[tuple[int, int | None]]:
        """Read all holders; the amounts that have changed."""
        is_worker, dataset = worker_dataset()
        if is_worker and not self._role_known:
            self._role_known = True
            self._writer.write("role", role="worker")
        walk = Walk().run(running_frames(sys._getframe(2)), dataset)
        holdings = dict(walk.found)
        for key, (holder, tensor) in walk.graphs.items():
            reach = self._graphs.read(key, tensor)
            if reach is not None:
                name = (holder.file, holder.name + "\0graph")
                holdings[name] = Holding(holder, "nodes", reach, tensor)
        for line, (_, size, pattern) in self._shm.by_line().items():
            holder = Holder(pattern, pattern, line.file, "", line.number)
            holdings[(line.file, f"{line.number}\0shm")] = Holding(holder, "files", size, None)
        changed: list[tuple[int, int | None]] = []
        for key, holding in holdings.items():
            number = self._number(key, holding, step, clock)
            if number is not None and self._amounts.get(number) != holding.amount:
                self._amounts[number] = holding.amount
                changed.append((number, holding.amount))
        for key, number in self._numbers.items():
            if key not in holdings and self._amounts.get(number) is not None and walk.left > 0:
                self._amounts[number] = None
                changed.append((number, None))
        self._measure(holdings)
        return changed

    def _number(self, key: Key, holding: Holding, step: int | None, clock: float) -> int | None:
        """The number of a holder's record; None until it has grown."""
        number = self._numbers.get(key)
        if number is not None:
            return number
        first = self._known.setdefault(key, (step, round(clock, 3), holding.amount))
        if holding.amount <= first[2]:
            self._known[key] = (step, round(clock, 3), holding.amount)
            return None
        if len(self._numbers) >= _MOST_HOLDERS or (holding.unit == "items" and holding.amount < _FEWEST_ITEMS):
            return None
        number = self._numbers[key] = len(self._numbers)
        holder = holding.holder
        self._writer.write(
            "holder", number=number, name=holder.name, word=holder.word, file=holder.file, function=holder.function,
            line=holder.line, unit=holding.unit, limit=holding.limit, amounts=[first],
        )  # fmt: skip
        return number

    def _measure(self, holdings: dict[Key, Holding]) -> None:
        """Measure the newest items of containers that have grown, again whenever they have doubled."""
        count = 0
        for key, number in self._numbers.items():
            holding = holdings.get(key)
            if holding is None or holding.unit not in ("items", "nodes", "bytes"):
                continue
            if holding.amount < 2 * self._measured.get(number, 0) or count >= _MOST_MEASURED:
                continue
            self._measured[number] = max(1, holding.amount)
            count += 1
            wanted = self._items_of_steps(self._known[key], holding.amount)
            items = newest_items(holding.thing, wanted) if holding.unit == "items" else [holding.thing]
            if not items:
                continue
            size = size_per_item(items)
            if not size.complete and len(items) > _FEWEST_MEASURED:
                size = size_per_item(items[-_FEWEST_MEASURED:])
            newest = items[-1]
            if holding.unit == "items" and isinstance(holding.thing, dict):
                newest = newest[1]  # of a key and its value
            self._writer.write(
                "item", number=number, pools=size.pools, type=type(newest).__name__, graphs=size.graphs,
                tensors=size.tensors,
            )  # fmt: skip
            if self._tracing.scripts_own and holding.unit == "items":
                made = creations(items[-_FEWEST_MEASURED:], pairs=isinstance(holding.thing, dict))
                if made:
                    self._writer.write("created", number=number, sites=made)

    def _items_of_steps(self, first: tuple[int | None, float, int], amount: int) -> int:
        """The items of four steps: a script may add a large one and many small ones in each."""
        steps = self.steps - first[0] if first[0] is not None and self._source is not None else 0
        each = -(-(amount - first[2]) // steps) if steps > 0 else 0
        return min(_MOST_ITEMS_MEASURED, max(_FEWEST_MEASURED, 4 * each))

    # Pages that a forked process copies

    def _read_copied(self, now: float) -> None:
        if now < self._copied_due:
            return
        began = time.monotonic()
        if self._copied is None:
            return
        if self._copied_readings == 0:
            self._copied.look_at(worker_dataset()[1])
        found = self._copied.read(now - self._began)
        if found is not None:
            self._writer.write("copied", step=self.steps, **found)
        self._copied_readings += 1
        cost = time.monotonic() - began
        gap = _COPIED_EVERY if self._copied_readings < _FREE_READINGS else cost / self.share
        self._copied_due = now + max(_COPIED_EVERY, gap)

    # Windows of tracemalloc

    def _maybe_open_window(self, now: float) -> None:
        if self._source is None or self._step_time is None:
            return
        if self._samples < self._after_window[0] or self.steps < self._after_window[1]:
            return
        lasted = now - (self._first_step_at or now)
        if self._window_cost > _CREDIT + self.share * lasted:
            return
        if self._windows >= _SURE_WINDOWS and not self._grows():
            return
        if self._tracing.scripts_own:
            return
        walk = Walk().run(running_frames(sys._getframe(3)), worker_dataset()[1])
        holders = {
            number: holding.thing
            for key, number in self._numbers.items()
            if (holding := walk.found.get(key)) is not None
        }
        ordered = {number: one for number, one in holders.items() if isinstance(one, (list, dict))}
        sizes = {number: len(one) for number, one in ordered.items()}  # a set has no newest items
        if self._tracing.begin():
            self._window_holders, self._window_sizes = holders, sizes
            wanted = _WINDOW_STEPS[min(self._windows, len(_WINDOW_STEPS) - 1)]
            wanted = max(_WINDOW_STEPS[0], min(wanted, self.steps // _WINDOW_PART))
            self._window_steps = max(3, min(wanted, int(_LONGEST_WINDOW / max(self._step_time, 1e-4))))
            self._window_from, self._middle_done = (self.steps, time.monotonic()), False

    def _forget_window(self) -> None:
        """Keep no container of the script."""
        self._window_from, self._window_holders, self._window_sizes = None, {}, {}

    def _grows(self) -> bool:
        """Whether Python's objects or malloc's bytes have grown over the last samples."""
        if len(self._counts) < 8:
            return False
        (blocks, size), (now_blocks, now_size) = self._counts[len(self._counts) // 2], self._counts[-1]
        return now_blocks > blocks + 200 or now_size > size + (256 << 10)

    def _advance_window(self) -> None:
        assert self._window_from is not None
        first, began = self._window_from
        done = self.steps - first
        try:
            if not self._middle_done and done >= (self._window_steps + 1) // 2:
                self._middle_done = True
                self._tracing.middle()
            elif done >= self._window_steps:
                self._end_window(done, time.monotonic() - began)
        except Exception as problem:
            self._end_with(problem)

    def _end_window(self, steps: int, seconds: float) -> None:
        started = time.monotonic()
        aborted = self._tracing.aborted or not self._tracing.open
        sites = self._tracing.end()
        tensors = None
        if not aborted:
            for number, made in creations_in_window(self._window_holders, self._window_sizes):
                if made:
                    self._writer.write("created", number=number, sites=made)
                else:
                    self._writer.write("existing", number=number)  # added in the window, and made before it
            if not self._forked and self._windows >= 1 and self._grows():
                found = live_tensors().items()
                tensors = [(line.file, line.number, count, pools) for line, (count, pools) in found if count > 2]
        self._tracing.close()
        self._forget_window()
        self._windows += 1
        self._after_window = self._samples + _SAMPLES_BETWEEN, self.steps + _STEPS_BETWEEN * steps
        if not aborted:
            self._writer.write("window", steps=steps, seconds=round(seconds, 3), tensors=tensors, sites=sites)
        usual = (self._step_time or 0.0) * steps
        self._window_cost += max(0.0, seconds - usual) + time.monotonic() - started

    # The thread, and forks

    def _start_thread(self) -> None:
        if self.running:
            self._stop = threading.Event()
            self._thread = start_daemon_thread(self._watch_clock, "legroom-leak")
            if self._thread is None and self._no_thread is None:
                self._no_thread = why_no_thread()
                if self._headed:
                    self._note_no_thread()

    def _note_no_thread(self) -> None:
        self._writer.write("note", text=say("sampled at steps only: {why}", why=self._no_thread))

    def _stop_thread(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)
        self._thread = None

    def _watch_clock(self) -> None:
        """Install the hooks once torch is there, and sample a process that makes no steps."""
        stop = self._stop
        while not stop.wait(_TICK) and self.running:
            self.torch.install()
            now = time.monotonic()
            if self._source is None and now - self._began > _NO_STEPS and now >= self._due:
                self._sample_safely()
            if now >= self._steps_at and self.steps != self._published_steps:
                self._publish_steps(now)
            if now >= self._publish_at and self._samples >= _FEWEST_SAMPLES:
                self._publish(now)

    def _publish_steps(self, now: float) -> None:
        """Tell a `legroom watch` how many steps this process has made."""
        with import_lock:
            from legroom.leak.leak_report import publish_steps

        self._steps_at, self._published_steps = now + _STEPS_EVERY, self.steps
        try:
            publish_steps(self.steps)
        except Exception:  # the report at the end is what counts
            self._steps_at = float("inf")

    def _publish(self, now: float) -> None:
        """Tell a `legroom watch` what grows in this process."""
        with import_lock:
            from legroom.leak.leak_report import publish

        began = time.monotonic()
        try:
            publish(self._writer.path)
        except Exception:  # the report at the end is what counts
            self._publish_at = float("inf")
            return
        self._publish_at = now + max(_PUBLISH_EVERY, (time.monotonic() - began) / (self.share / 3))

    def before_fork(self) -> None:
        """Leave no thread and no tracing to the child."""
        self._stop_thread()
        if self._tracing.open:
            self._tracing.close()  # the child would trace on
            self._forget_window()

    def after_fork_in_parent(self) -> None:
        """Continue."""
        self._start_thread()

    def after_fork_in_child(self) -> None:
        """Record this process too, in a file of its own."""
        self._writer.close()  # the file belongs to the parent
        self._lock = threading.Lock()
        self._shm.forget()
        self._reset()
        self._forked = True
        if (read_counters().anonymous or 0) <= _LARGEST_PARENT:
            try:
                self._copied = CopiedDataset()
            except Exception:  # the pages of this process cannot be read: what it copies stays unknown
                self._copied = None
        self._start_thread()


def _follow_forks(recorder: Recorder) -> None:
    """Call the recorder around each fork for as long as it lives; such calls cannot be withdrawn."""
    known = weakref.ref(recorder)

    def call(name: str) -> None:
        found = known()
        if found is not None and found.running:
            getattr(found, name)()

    os.register_at_fork(
        before=lambda: call("before_fork"),
        after_in_parent=lambda: call("after_fork_in_parent"),
        after_in_child=lambda: call("after_fork_in_child"),
    )


_recorder: Recorder | None = None


def record_process(directory: str) -> Recorder:
    """The recorder of this process; its records go to that directory."""
    global _recorder
    if _recorder is None:
        _recorder = Recorder(directory)
    return _recorder


def running_recorder() -> Recorder | None:
    """The recorder that was started in this process, if there is one."""
    return _recorder if _recorder is not None and _recorder.running else None


def forget_recorder() -> None:
    """Let the next call of `record_process` begin anew."""
    global _recorder
    _recorder = None
