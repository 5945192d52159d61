"""``legroom.DataLoader``: torch's DataLoader, with another transport of batches from workers.

It is a subclass of torch's class, made when it is first used. Everything except the transport is torch's: samplers,
seeds, worker processes, exceptions, order.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import threading
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.random  # noqa: F401 - torch seeds it in every worker: a fork has it, and need not read it again

from legroom.advice.memory_need import Each
from legroom.errors import Unpicklable, UsageError
from legroom.loader.dataloader import resume
from legroom.loader.dataloader.admit_workers_by_memory import Admission, admission_for
from legroom.loader.dataloader.collate import SlotCollate, arena_unavailable, parse_budget, wrap_collate
from legroom.loader.dataloader.epoch_iterator import STOP, Epoch, Progress
from legroom.loader.dataloader.explain_start_failure import (
    explain_argument,
    explain_pickling,
    note_full_shm,
    refuse_data,
    refuse_no_length,
    refuse_no_length_of,
    refuse_types,
    use_short_tmpdir,
)
from legroom.loader.dataloader.explain_worker_crash import (
    WorkerGroup,
    explain_sigchld,
    explain_start,
    importing_main_message,
)
from legroom.loader.dataloader.pin_memory import cuda_pinner
from legroom.loader.dataloader.queues import direct_context
from legroom.loader.dataloader.receive import unopened
from legroom.loader.dataloader.sharing.shared_epoch_iterator import ON_SLOW, SharedEpoch, Sharing, is_stream
from legroom.loader.dataloader.torch_internals import batches_ordered, drop_iterator, workers, workers_of_failed_start
from legroom.loader.dataloader.worker_shutdown import EndWithProgram, exit_if_importing_main
from legroom.loader.measure_process_memory import start_method
from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.ram_swap_and_pressure import memory
from legroom.system.argument_checks import check_choice
from legroom.system.lazy_and_optional_imports import require

if TYPE_CHECKING:
    from torch.utils.data import DataLoader as TorchDataLoader
    from typing_extensions import TypeVar as TypeVarWithDefault

_log = logging.getLogger("legroom")
_reported: set[str] = set()
_Batch = TypeVar("_Batch", covariant=True)
_TRANSPORT_ATTRIBUTES = {"collate_fn", "num_workers", "memory_budget"}  # a change selects the transport again


class Loader:
    """torch's DataLoader, with batches that do not use ``/dev/shm``; a subclass of it, made when it is first used.

    Every argument has torch's meaning; ``options`` are torch's others. ``state_dict`` and ``load_state_dict`` resume in
    the middle of an epoch.

    Args:
        memory_budget: Limit for the batches on their way from the workers of one epoch: bytes, ``"256MB"``, or
            ``"auto"`` for what the machine and its cgroups leave free beside the workers and their samples. The default
            is ``"auto"``, because a cgroup kills without an error.
        share: The name of a group. Trainers on this machine that give the same name and equal arguments share one set
            of workers; each gets every batch. Random numbers are the same for all trainers of a group.
        on_slow: What happens to a trainer of the group that holds the others up: ``"own"`` (it makes the batches it
            missed itself) or ``"wait"`` (the others wait for it, at most ``timeout`` seconds).

        device: With ``share``, a CUDA device on which batches are returned. They are copied from the host once for all
            trainers of the group on that GPU, where its memory can be shared.

    Attributes:
        transport: How batches are sent: ``arena``, ``torch``, ``shared`` by the workers of a group, or ``none`` without
            workers.
        why: The reason for that transport.
    """

    transport: str
    why: str
    memory_budget: int | str
    share: str | None
    on_slow: str
    device: Any
    _torch: type[Any]  # torch's class
    _starting = False  # torch is making an iterator for this class
    _sharing: Sharing | None = None

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        memory_budget: int | str = "auto",
        share: str | None = None,
        on_slow: str = "own",
        device: Any = None,
        **options: Any,
    ) -> None:
        parse_budget(memory_budget)
        check_choice("on_slow", on_slow, ON_SLOW)
        if sampler is None and batch_sampler is None:  # a sampler may give names
            refuse_data(dataset)
            if shuffle:
                refuse_no_length(dataset)
        given = {
            "dataset": dataset, "batch_size": batch_size, "shuffle": shuffle, "sampler": sampler,
            "batch_sampler": batch_sampler, "num_workers": num_workers, "collate_fn": collate_fn,
            "drop_last": drop_last, "timeout": timeout, "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context, "generator": generator, **options,
        }  # fmt: skip
        refuse_types(given)
        try:
            super().__init__(  # type: ignore[call-arg]
                dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
                timeout, worker_init_fn, multiprocessing_context, generator, **options,
            )  # fmt: skip
        except (ValueError, TypeError) as problem:
            if (explained := explain_argument(problem, given)) is not None:
                raise explained from None
            raise
        self._start_lock = _ProcessLock()
        self._progress: Progress | None = None
        self._loaded_state: dict[str, Any] | None = None  # where the next epoch begins, if not at the start
        self._seeded = False  # persistent workers have their seeds: no later epoch draws a number for them
        self._resumed: Any = None  # torch's loader that has the persistent workers, after load_state_dict
        self._group: WorkerGroup | None = None  # persistent workers
        self._measured: Each | None = None  # memory of one worker
        self._admission: Admission | None = None  # of the last epoch
        vars(self)["memory_budget"] = memory_budget
        self._select_transport()
        # Under their names: libraries that rebuild a loader, as Lightning does for its ranks, take the arguments there.
        self.share, self.on_slow, self.device = share, on_slow, device
        if device is not None and share is None:
            raise UsageError(
                say("device={device!r} needs share", device=str(device)),
                why=say("one trainer alone copies a batch to the GPU with batch.to(device)"),
                fix=(say("pass share='name', or move the batches yourself: pin_memory=True and non_blocking=True"),),
            )
        self._sharing = None if share is None else Sharing(self, share, on_slow)
        if self._sharing is not None:
            self.transport, self.why = "shared", say("the trainers of the group {name!r} share workers", name=share)
            self._select_transport()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "memory_budget":
            parse_budget(value)
        super().__setattr__(name, value)
        if name in _TRANSPORT_ATTRIBUTES and "memory_budget" in vars(self):
            self._select_transport(new_budget=name == "memory_budget")

    def _select_transport(self, new_budget: bool = False) -> None:
        """Set the transport and its collate function. A wrapped function keeps its budget unless ``new_budget``."""
        loader: Any = self
        if self._sharing is not None:
            collate = wrap_collate(loader.collate_fn, self.memory_budget)
            if isinstance(collate, SlotCollate):
                names = "share", "on_slow", "device", "memory_budget"
                collate.share = {name: getattr(self, name) for name in names}
            super().__setattr__("collate_fn", collate)
        elif loader.num_workers == 0:
            self.transport, self.why = "none", say("num_workers=0: this process makes the batches")
        elif (reason := arena_unavailable()) is not None:
            self._use_torch_transport(reason)
        else:
            self.transport, self.why = "arena", say("workers send batches in shared memory outside /dev/shm")
            if new_budget or not (isinstance(loader.collate_fn, SlotCollate) and self.memory_budget == "auto"):
                super().__setattr__("collate_fn", wrap_collate(loader.collate_fn, self.memory_budget))

    def _use_torch_transport(self, reason: str) -> None:
        """torch sends the batches, for a reason that is logged once."""
        self.transport, self.why = "torch", reason
        if reason not in _reported:
            _reported.add(reason)
            _log.warning(say("torch sends batches through /dev/shm: {reason}", reason=reason))

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the position, and starts its own workers."""
        self._keep_measured()
        return {**vars(self), "_admission": None, "_group": None, "_resumed": None, "_iterator": None}

    def __iter__(self) -> Epoch | SharedEpoch:
        with self._start_lock:
            if self._sharing is not None:
                return self._sharing.begin(self)
            refuse_no_length_of(self)
            if self._loaded_state is not None:
                epoch = self._resume_epoch(self._loaded_state)
                self._loaded_state = None  # not before: starting workers may fail, or be interrupted
                return epoch
            running = self._persistent and self._group is not None
            states = resume.states_after(self._progress) if running else {}
            start = super().__iter__ if self._resumed is None else self._resumed.__iter__  # type: ignore[misc]
            with self._separate_seeds(self._seeded and not running):
                progress = self._new_progress(resume.generator_states(self), self._seeded, workers=states)
                return self._start_epoch(progress, start, self._persistent)

    def _get_iterator(self) -> Any:
        """Called by torch for an iterator, and by loaders of other libraries that keep one."""
        with self._start_lock:
            start = super()._get_iterator  # type: ignore[misc]
            if self._starting:
                return start()
            if self._sharing is not None:
                return self._sharing.begin(self)
            progress = self._new_progress(resume.generator_states(self), self._seeded)
            return self._start_epoch(progress, start, persistent=False)

    def state_dict(self) -> dict[str, Any]:
        """The position in the current epoch, after the last batch that was returned."""
        if self._sharing is not None:
            return self._sharing.state_dict(self)
        if self._loaded_state is not None:
            return dict(self._loaded_state)
        return resume.state_of(self, self._progress, self._iterable, self._seeded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next epoch at the position where that state was taken."""
        loader: Any = self
        if self._sharing is not None:
            self._sharing.load_state_dict(self, state)
            return
        fitted = resume.fit_state(self, resume.check_state(state), self._iterable)
        self._resumed = self._group = None  # ends persistent workers: they are at another position
        drop_iterator(self)
        self._progress, self._seeded = None, bool(fitted["lasting"])
        if not fitted["begun"]:
            resume.restore_generators(self, fitted["generators"])
            if loader.num_workers == 0 and fitted["workers"]:
                resume.restore_dataset(loader.dataset, fitted["workers"][0])
        self._loaded_state = fitted if fitted["begun"] or (fitted["workers"] and self._persistent) else None

    @property
    def _iterable(self) -> bool:
        return is_stream(self)

    @property
    def _persistent(self) -> bool:
        loader: Any = self
        return bool(loader.persistent_workers)

    def _new_progress(self, generators: dict[str, Any], seeded: bool, yielded: int = 0, **known: Any) -> Progress:
        loader: Any = self
        return Progress(
            generators, yielded, batch_size=loader.batch_size, num_workers=loader.num_workers, seeded=seeded, **known
        )  # fmt: skip

    @contextlib.contextmanager
    def _separate_seeds(self, separate: bool) -> Iterator[None]:
        """Whether the seeds of new workers are drawn from a generator of their own."""
        loader: Any = self
        kept = loader.generator
        if separate:
            loader.generator = resume.separate_generator(self)
        try:
            yield
        finally:
            loader.generator = kept

    def _start_epoch(self, progress: Progress, start: Any, persistent: bool) -> Epoch:
        """An epoch over torch's iterator, which ``start`` makes; ``persistent``: this loader keeps the workers."""
        loader: Any = self
        self._progress = progress
        if loader.num_workers == 0:
            with _temporarily(loader, {"_starting": True}):
                inner = start()
            return Epoch(
                inner, None, progress, None, self._use_torch_transport, persistent=False, iterable=self._iterable,
                save_dataset=resume.dataset_state_dict(loader.dataset) if self._iterable else None,
            )  # fmt: skip
        method = start_method(loader.multiprocessing_context)
        exit_if_importing_main(lambda: importing_main_message(method))
        use_short_tmpdir(required=method == "forkserver" or self.transport == "torch")
        # None: torch pins the batches, or they are not pinned.
        pinner = cuda_pinner() if loader.pin_memory and self.transport == "arena" else None
        admission = self._new_admission(method, persistent)
        running = multiprocessing.active_children()
        memory_before = None if persistent and self._group is not None else memory(Host())
        settings: dict[str, Any] = {"_starting": True}
        if pinner is not None:
            settings["pin_memory"] = False  # torch would start a thread for batches that are pinned already
        settings["worker_init_fn"] = EndWithProgram(loader.worker_init_fn) if admission is None else admission
        if self.transport == "arena":
            context = loader.multiprocessing_context or multiprocessing.get_context(start_method())
            settings["multiprocessing_context"] = direct_context(context)
        inner = None
        group = None
        try:
            with unopened(), _temporarily(loader, settings):
                inner = start()
            every = workers(inner)
            if every is None:
                every = [process for process in multiprocessing.active_children() if process not in running]
            started = [process for process in every if self._group is None or process.pid not in self._group.pids]
            kept = self._group if persistent and not started else None
            group = kept or WorkerGroup(started, method, memory_before)
            explain_sigchld()
        except BaseException as problem:
            if admission is not None:
                admission.close()  # torch ends those that have started, and they must not wait
            # A worker may be killed at once: torch's signal handler raises while its iterator, or this, is being made.
            group = group or WorkerGroup(workers(inner) or workers_of_failed_start(problem), method, memory_before)
            explained = self._explain_pickling(problem) or explain_start(problem, method) or group.explain(problem)
            if explained is None:
                note_full_shm(problem)
                raise
            try:
                raise explained from problem
            finally:
                del explained  # else the error, and with it the iterator and its workers, lives until collected
        if admission is not None and batches_ordered(inner) == 0:
            admission.admit()  # no batch will be made for which the others could wait
        if persistent:
            self._group = group
        self._seeded = self._seeded or persistent
        return Epoch(
            inner, group, progress, pinner, self._use_torch_transport, persistent=persistent, admission=admission,
            iterable=self._iterable, in_order=resume.in_order(self),
        )  # fmt: skip

    def _explain_pickling(self, problem: BaseException) -> Unpicklable | None:
        """The part that could not be pickled, if that is why no worker was started."""
        loader: Any = self
        if not isinstance(problem, (TypeError, AttributeError, pickle.PicklingError, UserWarning)):
            return None
        if start_method(loader.multiprocessing_context) == "fork":  # nothing is pickled
            return None
        return explain_pickling(loader.dataset, loader.collate_fn, loader.worker_init_fn)

    def _new_admission(self, method: str, persistent: bool) -> Admission | None:
        """Admission of the workers of an epoch, if memory is low; raises if they are known not to fit."""
        loader: Any = self
        if self.transport != "arena" or (persistent and self._group is not None):
            return None
        self._keep_measured()
        self._admission = admission_for(
            loader.num_workers, method, loader.worker_init_fn, self._measured, loader.batch_size,
            iterable=self._iterable, in_order=resume.in_order(self),
        )  # fmt: skip
        return self._admission

    def _keep_measured(self) -> None:
        if self._admission is not None:
            self._measured = self._admission.measured or self._measured

    def _resume_epoch(self, state: dict[str, Any]) -> Epoch:
        """The rest of an interrupted epoch, by a loader of torch's over what is left."""
        loader: Any = self
        resume.fit_state(self, state, self._iterable)  # num_workers may have changed since it was loaded
        saved = {int(worker): one for worker, one in state["workers"].items()}
        yielded, beyond = int(state["yielded"]), list(state["beyond"])
        generators = dict(state["generators"]) if state["begun"] else resume.generator_states(self)
        progress = self._new_progress(
            generators, state["seeded"], yielded, beyond=dict.fromkeys(beyond), turn=state["turn"],
            workers=resume.read_workers(saved),
        )  # fmt: skip
        arguments: dict[str, Any] = {
            "dataset": loader.dataset, "num_workers": loader.num_workers, "collate_fn": loader.collate_fn,
            "timeout": loader.timeout, "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": self._persistent,
        }  # fmt: skip
        if hasattr(loader, "in_order"):
            arguments["in_order"] = loader.in_order
        remaining: resume.RemainingSampler | None = None
        if self._iterable:
            arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            keep_turn = [
                worker for worker in range(state["turn"])
                if worker not in saved or STOP not in saved[worker]["then"]
            ]  # fmt: skip
            if keep_turn:
                arguments["collate_fn"] = resume.PlaceholderCollate(loader.collate_fn)
            if loader.num_workers and (saved or keep_turn):
                arguments["dataset"] = resume.ResumedDataset(loader.dataset, saved, keep_turn, loader.batch_size)
        elif loader.batch_sampler is not None:
            remaining = resume.RemainingSampler(loader.batch_sampler, progress.first_left, beyond)
            arguments["batch_sampler"] = remaining
        else:
            remaining = resume.RemainingSampler(loader.sampler, progress.first_left, beyond)
            arguments |= {"sampler": remaining, "batch_size": None}

        def start() -> Iterator[Any]:
            if saved and not loader.num_workers and not resume.restore_dataset(loader.dataset, saved[0]):
                return iter(())
            resumed = self._torch(
                pin_memory=loader.pin_memory,
                generator=loader.generator,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                **arguments,
            )
            inner: Iterator[Any] = iter(resumed)
            if remaining is not None:
                remaining.begin()
            self._resumed = resumed if self._persistent else None
            return inner

        with resume.replay_generators(self, state["generators"]), self._separate_seeds(state["seeded"]):
            epoch = self._start_epoch(progress, start, self._persistent)
            if self._iterable and not saved:
                epoch.skip(yielded)
        return epoch


class _ProcessLock:
    """A lock for the threads of one process: a forked child, or a copy, has its own."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ProcessLock, ()


@contextlib.contextmanager
def _temporarily(loader: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Within it, the loader has other arguments."""
    kept = {name: getattr(loader, name) for name in values}
    try:
        for name, value in values.items():
            setattr(loader, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(loader, name, value)


@cache
def _loader_class() -> type[Any]:
    """This class and torch's in one, made when torch is needed and not before."""
    Torch = require("torch.utils.data", "torch", "legroom.DataLoader").DataLoader  # noqa: N806
    names = {"__module__": __name__, "__qualname__": "DataLoader", "__doc__": Loader.__doc__, "_torch": Torch}
    return types.new_class("DataLoader", (Loader, Torch[_Batch]), exec_body=lambda body: body.update(names))


if TYPE_CHECKING:
    # The same for type checkers, which would not know our arguments from torch's class. A default, because no type of
    # batches follows from the arguments.
    _AnyBatch = TypeVarWithDefault("_AnyBatch", covariant=True, default=Any)

    class DataLoader(Loader, TorchDataLoader[_AnyBatch]):  # type: ignore[misc] # its iterator is our own
        ...


def __getattr__(name: str) -> Any:
    if name == "DataLoader":
        return _loader_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
