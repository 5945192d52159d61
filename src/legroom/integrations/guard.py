"""What every adapter does for a training run: watch memory, tune at each epoch, log, ask for a checkpoint in time.

No framework is known here; lightning.py, huggingface.py, accelerate.py and ray.py call it from their hooks. Nothing
here ends a training run: what cannot be done is logged. Steps are optimizer steps. Ranks save together, so they agree
on a checkpoint: every ``agree_every`` steps they exchange one number.

A DataLoader that exists is tuned between two epochs: its workers, prefetch and pinning. Batch size and accumulation
stay, because the trainer has counted its steps with them. The log message of an epoch has the active settings, and
memory at the start, after the model and at step 0, against the cgroup limit and not against the machine's RAM.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from legroom.errors import LegroomError
from legroom.gpu.rank_consensus import RankConsensus
from legroom.loader.rank_sampler import process_group, rank_and_world
from legroom.loader.tune.legroom_tune import tune
from legroom.messages import say
from legroom.monitor.watch_in_script import Watch, watch
from legroom.probe.gpu_devices import gpu_pools, gpus
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory, ram_pool, read_swap_counters, swap, swap_pool
from legroom.records.finding_and_alarm import Alarm
from legroom.records.loader_settings_and_flags import LoaderKind
from legroom.records.machine import Pool
from legroom.records.settings_and_overrides import Settings
from legroom.system.argument_checks import check_arguments
from legroom.system.lazy_and_optional_imports import lazy_import
from legroom.units import format_size

HORIZON = 180.0  # seconds: several times what a large checkpoint takes to write
_AGAIN = 2  # horizons after a save, if the alarm is still active
_NEARLY_FULL = {"ram-near-limit", "limit-hit", "shm-nearly-full", "gpu-nearly-full"}
_FILLING = {"ram-filling", "shm-filling", "gpu-filling", "swap-filling"}
_DISK_FULL = "disk-low"


def threatens(alarm: Alarm, horizon: float) -> bool:
    """Whether the run may fail because of this alarm within the horizon."""
    if alarm.code in _FILLING:
        left = alarm.evidence.get("full_in_seconds")
        return alarm.level == "critical" or (isinstance(left, (int, float)) and left <= horizon)
    return alarm.code in _NEARLY_FULL and alarm.level == "critical"


def disk_full(alarms: Iterable[Alarm]) -> Alarm | None:
    """The alarm of a full disk, where a checkpoint would be incomplete, or None."""
    return next((alarm for alarm in alarms if alarm.code == _DISK_FULL and alarm.level == "critical"), None)


@dataclass
class CheckpointSchedule:
    """Decides when a checkpoint is due, so that one alarm does not request it again and again.

    Saving costs time, and work after an early save is lost. So an alarm counts once its time left is within the
    horizon. An alarm that is still active two horizons after a save requests another.
    """

    horizon: float = HORIZON
    _saved: float | None = None
    _for: frozenset[tuple[str, str | None]] = frozenset()

    def ask(self, alarms: Iterable[Alarm], now: float) -> Alarm | None:
        """The alarm that makes a checkpoint due now, or None."""
        threats = [alarm for alarm in alarms if threatens(alarm, self.horizon)]
        fresh = self._saved is None or now - self._saved >= _AGAIN * self.horizon
        return next((alarm for alarm in threats if fresh or alarm.key not in self._for), None)

    def saved(self, alarms: Iterable[Alarm], now: float) -> None:
        """Record that a checkpoint was requested; it covers all alarms that are active now."""
        threats = frozenset(alarm.key for alarm in alarms if threatens(alarm, self.horizon))
        within = self._saved is not None and now - self._saved < _AGAIN * self.horizon
        self._for = self._for | threats if within else threats
        self._saved = now


def unwrap_loader(loader: Any) -> Any:
    """The DataLoader inside accelerate's wrapper."""
    return getattr(loader, "base_dataloader", loader)


def keep_share(prepared: Any) -> None:
    """Give a loader that accelerate has rebuilt with torch's class its ``share=`` again."""
    base = getattr(prepared, "base_dataloader", None)
    share = getattr(getattr(base, "collate_fn", None), "share", None)
    if base is None or share is None or getattr(base, "share", None) is not None:
        return
    what: dict[str, Any] = {"batch_sampler": base.batch_sampler}
    if base.batch_sampler is None:
        what = {"batch_size": None, "sampler": base.sampler}
    elif isinstance(base.dataset, lazy_import("torch.utils.data").IterableDataset):
        what = {"batch_size": base.batch_size, "drop_last": base.drop_last}
    prepared.base_dataloader = lazy_import("legroom").DataLoader(
        base.dataset, **what, num_workers=base.num_workers, collate_fn=base.collate_fn, pin_memory=base.pin_memory,
        timeout=base.timeout, worker_init_fn=base.worker_init_fn, generator=base.generator,
        multiprocessing_context=base.multiprocessing_context, prefetch_factor=base.prefetch_factor,
        persistent_workers=base.persistent_workers, **share,
    )  # fmt: skip


def retune(loader: Any, *, accumulation: int, previous: Settings | None) -> tuple[Settings | None, str | None]:
    """Settings for that loader on this machine now, and a note. Failures become a note: training continues."""
    from torch.utils.data import DataLoader

    loader = unwrap_loader(loader)
    if not isinstance(loader, DataLoader):
        return None, say("not tuned: {kind} is not a DataLoader", kind=type(loader).__name__)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return None, say("not tuned: the loader has no batch_size")
    kind: LoaderKind = "legroom" if hasattr(loader, "memory_budget") else "torch"
    _, world = rank_and_world(None, None, os.environ, process_group())
    try:
        found = tune(
            loader,
            batch_size=size,
            effective_batch=size * accumulation * world,
            ranks=world,
            loader=kind,
            previous=previous,
        )
    except (LegroomError, RuntimeError, OSError) as problem:
        return None, say("not tuned: {problem}", problem=str(problem).partition("\n")[0])
    if found.batch_size == size:
        return found, None
    note = say(
        "batch {batch} × accumulation {steps} would fit better; this run keeps {size} × {now}",
        batch=found.batch_size, steps=found.accumulation, size=size, now=accumulation,
    )  # fmt: skip
    return found.override(batch_size=size, accumulation=accumulation), note


def apply_settings(loader: Any, settings: Settings) -> list[str]:
    """Change the loader for its next epoch; returns sentences about what was or could not be changed."""
    loader = unwrap_loader(loader)
    wanted = {"num_workers": settings.num_workers, "pin_memory": settings.pin_memory}
    if settings.num_workers:
        wanted["prefetch_factor"] = settings.prefetch_factor or 2
    changes = {name: value for name, value in wanted.items() if getattr(loader, name) != value}
    if not changes:
        return []
    if loader.persistent_workers:
        return [say("loader not changed: persistent workers live through all epochs")]
    if settings.num_workers and getattr(loader, "transport", None) == "none":
        # Created without workers, it has no transport of its own: batches of workers would go through /dev/shm.
        return [say("loader not changed: a legroom.DataLoader created without workers cannot get any later")]
    if getattr(loader, "share", None) is not None:
        return [say("loader not changed: the trainers of its group share one set of workers")]
    changed = [
        say("{name}: {old} → {new}", name=name, old=getattr(loader, name), new=value) for name, value in changes.items()
    ]
    for name, value in changes.items():
        setattr(loader, name, value)
    return changed


_SETTINGS_SHOWN = (
    "low_memory",
    "batch_size",
    "accumulation",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "threads",
)


def memory_snapshot(moment: str, host: Host | None = None, torch: Any = None) -> list[str]:
    """Memory now, under that name, as lines of the log. Does not initialize CUDA."""
    host = host or Host()
    counters = read_swap_counters(host)
    ram = memory(host)
    held = held_by_torch(torch or sys.modules.get("torch"))
    return memory_lines(moment, ram_pool(ram), swap_pool(swap(host, ram, counters)), gpu_pools(gpus(host)), held)


def held_by_torch(torch: Any) -> list[tuple[str, int, int]]:
    """Device, and bytes that are allocated and reserved for this process."""
    if torch is None or not torch.cuda.is_initialized():
        return []
    cuda = torch.cuda
    numbers = range(cuda.device_count())
    return [(f"cuda:{number}", cuda.memory_allocated(number), cuda.memory_reserved(number)) for number in numbers]


def epoch_lines(
    epoch: int, settings: Settings | None, snapshots: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    """The log message of one epoch: active settings and memory."""
    lines = [f"epoch {epoch}"]
    if settings is not None:
        mode = say("low-memory: map or stream the data") if settings.low_memory else say("normal")
        lines.append(say("  mode: {mode}", mode=mode))
        lines += [f"  {settings.why[name]}" for name in _SETTINGS_SHOWN if name in settings.why]
        lines.append(say("  effective batch: {count}", count=settings.effective_batch))
    lines += [f"  {note}" for note in notes]
    for one in snapshots:
        lines += one
    return "\n".join(lines)


def memory_lines(
    moment: str, ram: Pool, swap: Pool, gpus: Sequence[Pool] = (), held: Sequence[tuple[str, int, int]] = ()
) -> list[str]:
    """Memory at one moment of a training run; ``gpus``: of all processes, ``held``: by torch for this one."""
    return [
        say("  memory {moment}: {ram}; swap {swap}", moment=moment, ram=_pool_usage(ram), swap=_pool_usage(swap)),
        *(
            say(
                "    {device}: {allocated} allocated, {reserved} reserved by this process",
                device=device, allocated=format_size(allocated), reserved=format_size(reserved),
            )
            for device, allocated, reserved in held
        ),
        *(say("    {name}: {used}", name=gpu.name, used=_pool_usage(gpu)) for gpu in gpus),
    ]  # fmt: skip


def _pool_usage(pool: Pool) -> str:
    if pool.size == 0:
        return say("none")
    if pool.used is None or pool.size is None:
        return say("unknown ({reason})", reason=pool.reason or pool.source)
    return say(
        "{used} of {size} used ({share:.1%})",
        used=format_size(pool.used),
        size=format_size(pool.size),
        share=pool.used / pool.size,
    )


Tune = Literal["apply", "advise", "off"]
_LEVEL_NUMBERS = {"warning": 1.0, "critical": 2.0}


class Guard:
    """Guards a training run from ``start`` to ``end``; also a context manager."""

    def __init__(
        self,
        *,
        log: str | os.PathLike[str] | None = None,
        interval: float | str = 1.0,
        tune: Tune = "apply",
        horizon: float = HORIZON,
        agree_every: int = 16,
        on_alarm: Callable[[Alarm], object] | None = None,
    ) -> None:
        """Create a guard; it begins with ``start``.

        Args:
            log: A file for ``legroom watch --replay``. Ranks other than 0 write files of their own, named after it.
            interval: Time between two memory samples: seconds, or ``"5s"``.
            tune: ``"apply"`` changes the loader's workers, prefetch and pinning between epochs; ``"advise"`` only logs
                what it would choose; ``"off"`` does neither.
            horizon: How many seconds before memory is predicted to run out a checkpoint is requested.
            agree_every: Optimizer steps after which the ranks agree on whether to save.
            on_alarm: Called with each alarm, in the monitoring thread.
        """
        check_arguments(Guard.__init__, locals())
        self._log_file, self._interval, self._tune, self._on_alarm = log, interval, tune, on_alarm
        self._agree_every = max(1, agree_every)
        self._schedule = CheckpointSchedule(horizon)
        self._alarms: deque[Alarm] = deque(maxlen=256)
        self._snapshots: list[list[str]] = []
        self._pending: tuple[int, list[str]] | None = None  # the epoch that is not logged yet, and its notes
        self._steps = 0
        self._ranks = RankConsensus()
        self.watch: Watch | None = None
        self.settings: Settings | None = None
        self.logger = logging.getLogger("legroom")
        self.report: Callable[[Mapping[str, float]], object] | None = None
        self.main = True  # whether this rank logs for its machine

    # Called in the course of a training run.

    def start(self) -> None:
        """Training begins. Calling it again does nothing."""
        if self.watch is not None:
            return
        self._snapshots = [memory_snapshot(say("at start"))]
        self._ranks = RankConsensus()
        self.watch = watch(self._own_log(), interval=self._interval, on_alarm=self._on_watch_alarm).__enter__()

    def model_ready(self) -> None:
        """The model and its optimizer are on their device."""
        self._snapshots = [*self._snapshots[:1], memory_snapshot(say("after the model"))]

    def epoch(self, number: int, loader: Any = None, accumulation: int = 1) -> Settings | None:
        """An epoch begins: choose settings for it from the memory that is free now."""
        self._log_epoch()
        keep_share(loader)
        if self.watch is not None:
            self.watch.mark(f"epoch {number}")
        notes: list[str] = []
        if loader is not None and self._tune != "off":
            found, note = retune(loader, accumulation=accumulation, previous=self.settings)
            notes += [note] if note else []
            if found is not None:
                self.settings = found
                notes += apply_settings(loader, found) if self._tune == "apply" else []
        self._pending = (number, notes)
        return self.settings

    def step(self) -> str | None:
        """An optimizer step is done. Returns why a checkpoint should be saved now, or None."""
        self._steps += 1
        if self.watch is not None:
            self.watch.step()
        self._log_epoch(memory_snapshot(say("at step 0")) if self._pending is not None else None)
        self._report_alarms()
        return self._checkpoint()

    def end(self) -> None:
        """Training is over, or failed."""
        self._log_epoch()
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
            self.watch = None
        self._report_alarms()

    def __enter__(self) -> Guard:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # Alarms, checkpoints, log.

    def _on_watch_alarm(self, alarm: Alarm) -> None:
        """Log at once, in the monitoring thread: the current step may be the last."""
        self.logger.warning("%s", alarm.message)
        self._alarms.append(alarm)
        if self._on_alarm is not None:
            self._on_alarm(alarm)

    def _report_alarms(self) -> None:
        """Report the alarms since the last step as numbers, for the trainer's loggers."""
        while self._alarms:
            alarm = self._alarms.popleft()
            numbers = {f"legroom/{alarm.code}": _LEVEL_NUMBERS[alarm.level]}
            left = alarm.evidence.get("full_in_seconds")
            if isinstance(left, (int, float)):
                numbers[f"legroom/{alarm.code}/seconds_left"] = float(left)
            if self.report is not None:
                self.report(numbers)

    def _checkpoint(self) -> str | None:
        if self.watch is None or (self._ranks.world_size > 1 and self._steps % self._agree_every):
            return None
        alarms, now = self.watch.alarms, time.monotonic()
        cause = self._schedule.ask(alarms, now)
        full = disk_full(alarms)
        if cause is not None and full is not None:
            self.logger.warning(
                "%s",
                say(
                    "checkpoint skipped ({full}), although one is due: {cause}", cause=cause.message, full=full.message
                ),
            )
            self._schedule.saved(alarms, now)
            cause = None
        (asked,) = self._ranks.maximum([cause is not None])
        if not asked:
            return None
        self._schedule.saved(alarms, now)
        why = cause.message if cause is not None else say("another rank is about to run out of memory")
        self.logger.warning("%s", say("checkpoint requested: {why}", why=why))
        return why

    def _log_epoch(self, last: list[str] | None = None) -> None:
        """Log the epoch that has begun, unless that is done."""
        if self._pending is None:
            return
        (number, notes), self._pending = self._pending, None
        snapshots = [*self._snapshots, last] if last is not None else self._snapshots
        if self.main:
            self.logger.info("%s", epoch_lines(number, self.settings, snapshots, notes))

    def _own_log(self) -> Path | None:
        if self._log_file is None:
            return None
        path = Path(self._log_file)
        rank, _ = rank_and_world(None, None, os.environ, process_group())
        return path if rank == 0 else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
