"""``legroom.DataLoader``: torch's, with batches that travel in memory of their own.

Covers: the arguments, what torch is given, starting a pass over the data. Does not cover: the transport (collate.py and
arena/), a pass (epoch.py), states (resume.py), what is left of a pass (rest.py, rejoin.py).

It is a subclass of torch's class, made when it is first asked for. Everything but the way of a batch from a worker to
this process is torch's: samplers, seeds, worker processes, exceptions, order.
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

from legroom.advice.memory_need import Each
from legroom.errors import Unpicklable
from legroom.loader import deaths, resume
from legroom.loader.arena.door import Door, careful
from legroom.loader.arena.inbox import Pinner, unopened
from legroom.loader.arena.pin import cuda_pinner
from legroom.loader.arena.processes import Guarded
from legroom.loader.arena.queues import direct
from legroom.loader.arguments import explained
from legroom.loader.collate import Carried, read_budget, why_not, wrapped
from legroom.loader.epoch import Epoch
from legroom.loader.measure.private import start_method
from legroom.loader.progress import STOP, Note, Progress, Scattered
from legroom.loader.rejoin import Rejoined, TurnKept, bring
from legroom.loader.rest import Rest
from legroom.loader.socket_room import make_room
from legroom.loader.torch_internals import batches_ordered, workers
from legroom.loader.unpicklable import unpicklable
from legroom.system.imports import require
from legroom.words import say

if TYPE_CHECKING:
    from torch.utils.data import DataLoader as DataLoader

_log = logging.getLogger("legroom")
_told: set[str] = set()
_Batch = TypeVar("_Batch", covariant=True)
_DECIDING = {"collate_fn", "num_workers", "memory_budget"}  # attributes that the transport depends on


class Loader:
    """torch's DataLoader, with batches that travel past ``/dev/shm``; a subclass of it, made when it is first used.

    Every argument means what it means there; ``options`` are torch's others. With it come ``state_dict`` and
    ``load_state_dict``, which go on in the middle of an epoch.

    Args:
        memory_budget: Bounds the batches on their way from the workers of one pass: bytes, ``"256MB"``, or ``"auto"``
            for what the machine and its cgroups leave free beside the workers and the samples they hold. The default
            is ``"auto"``: a cgroup kills without a word, so not to look would be no default to recommend.

    Attributes:
        transport: The way batches take: ``arena``, ``torch``, or ``none`` without workers.
        why: Why they take it.
    """

    transport: str
    why: str
    memory_budget: int | str
    _torch: type[Any]  # torch's class
    _starting = False  # torch is making an iterator, for us

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
        **options: Any,
    ) -> None:
        read_budget(memory_budget)
        try:
            super().__init__(  # type: ignore[call-arg]
                dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
                timeout, worker_init_fn, multiprocessing_context, generator, **options,
            )  # fmt: skip
        except ValueError as problem:
            given = {"batch_size": batch_size, "num_workers": num_workers, "sampler": sampler, **options}
            if (clearer := explained(problem, given)) is not None:
                raise clearer from None
            raise
        self._start_lock = _Alone()
        self._progress: Progress | None = None
        self._stood: dict[str, Any] | None = None  # where the next pass begins, if not at the start
        self._seeded = (
            False  # whether lasting workers have their seeds: no later pass takes a number for them
        )
        self._heir: Any = None  # the loader of torch's that has the lasting workers, after going on with them
        self._crew: deaths.Crew | None = None
        self._each: Each | None = None  # what a worker was seen to take
        self._last_door: Door | None = None
        vars(self)["memory_budget"] = memory_budget
        self._decide()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "memory_budget":
            read_budget(value)
        super().__setattr__(name, value)
        if name in _DECIDING and "memory_budget" in vars(self):
            self._decide(anew=name == "memory_budget")

    def _decide(self, anew: bool = False) -> None:
        """Which way batches take, and the collate function for it; ``anew``: also where it has its own budget."""
        loader: Any = self
        if loader.num_workers == 0:
            self.transport, self.why = "none", say("num_workers=0: batches are made in this process")
        elif (reason := why_not()) is not None:
            self._by_torch(reason)
        else:
            self.transport, self.why = "arena", say("workers hand over batches in memory of their own")
            if anew or not (isinstance(loader.collate_fn, Carried) and self.memory_budget == "auto"):
                super().__setattr__("collate_fn", wrapped(loader.collate_fn, self.memory_budget))

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the position, and starts workers of its own."""
        self._learn()
        here = {"_last_door": None, "_crew": None, "_heir": None, "_iterator": None}
        return {**vars(self), **here}

    def __iter__(self) -> Epoch:
        with self._start_lock:
            stood, self._stood = self._stood, None
            if stood is not None:
                return self._go_on(stood)
            living = self._lasting and self._crew is not None
            notes = resume.later(self._progress) if living else {}
            start = super().__iter__ if self._heir is None else self._heir.__iter__  # type: ignore[misc]
            with self._seeds_apart(self._seeded and not living):
                progress = self._begun(resume.remember(self), self._seeded, workers=notes)
                return self._pass(progress, start, self._lasting)

    def _get_iterator(self) -> Any:
        """What torch calls for an iterator, and loaders of others that keep one for themselves."""
        with self._start_lock:
            start = super()._get_iterator  # type: ignore[misc]
            if self._starting:
                return start()
            progress = self._begun(resume.remember(self), self._seeded)
            return self._pass(progress, start, lasting=False)

    def state_dict(self) -> dict[str, Any]:
        """Where the current pass stands; what comes next follows the last batch given out."""
        if self._stood is not None:
            return dict(self._stood)
        return resume.state_of(self, self._progress, self._iterable, self._seeded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass where that state was taken."""
        loader: Any = self
        stood = resume.fitting(self, resume.checked(state), self._iterable)
        self._end_workers()
        self._progress, self._seeded = None, bool(stood["lasting"])
        if not stood["begun"]:
            resume.restore(self, stood["generators"])
            if loader.num_workers == 0 and stood["workers"]:
                bring(loader.dataset, stood["workers"][0])
        self._stood = stood if stood["begun"] or (stood["workers"] and self._lasting) else None

    @property
    def _iterable(self) -> bool:
        from torch.utils.data import IterableDataset

        loader: Any = self
        return isinstance(loader.dataset, IterableDataset)

    @property
    def _lasting(self) -> bool:
        loader: Any = self
        return bool(loader.persistent_workers)

    def _begun(self, generators: dict[str, Any], seeded: bool, yielded: int = 0, **known: Any) -> Progress:
        """The progress of a pass that begins."""
        loader: Any = self
        return Progress(
            generators,
            yielded,
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            seeded=seeded,
            **known,
        )

    @contextlib.contextmanager
    def _seeds_apart(self, apart: bool) -> Iterator[None]:
        """Whether new workers' seeds are drawn from a generator of their own."""
        loader: Any = self
        kept = loader.generator
        if apart:
            loader.generator = resume.apart(self)
        try:
            yield
        finally:
            loader.generator = kept

    def _end_workers(self) -> None:
        """End lasting workers: they are not where the next pass begins."""
        loader: Any = self
        self._heir = self._crew = loader._iterator = None

    def _pass(self, progress: Progress, start: Any, lasting: bool) -> Epoch:
        """A pass over what ``start`` gives; ``lasting``: by workers that this loader keeps."""
        loader: Any = self
        self._progress = progress
        if loader.num_workers == 0:
            with _lent(loader, {"_starting": True}):
                inner = start()
            return Epoch(inner, None, progress, None, self._by_torch, lasting=False)
        by_server = start_method(loader.multiprocessing_context) == "forkserver"
        make_room(needed=by_server or self.transport == "torch")
        pinner = self._pinner()
        door = self._door(lasting)
        before = multiprocessing.active_children()
        others: dict[str, Any] = {"_starting": True}
        if pinner is not None:
            others["pin_memory"] = False  # torch would start a thread for what is pinned already
        others["worker_init_fn"] = Guarded(loader.worker_init_fn) if door is None else door
        if self.transport == "arena":
            others["multiprocessing_context"] = direct(
                loader.multiprocessing_context or multiprocessing.get_context(start_method())
            )
        try:
            with unopened(), _lent(loader, others):
                inner = start()
        except BaseException as problem:
            if door is not None:
                door.close()  # torch ends those that have started, and they must not wait
            if (clearer := self._unpicklable(problem)) is None:
                raise
            raise clearer from problem
        if door is not None and batches_ordered(inner) == 0:
            door.open()  # no batch will be made that others could wait for
        every = workers(inner)
        if every is None:
            every = [process for process in multiprocessing.active_children() if process not in before]
        started = [process for process in every if self._crew is None or process.pid not in self._crew.pids]
        crew = self._crew if lasting and self._crew is not None and not started else deaths.Crew(started)
        if lasting:
            self._crew = crew
        self._seeded = self._seeded or lasting
        deaths.listen()
        scattered = None
        if not (self._iterable or resume.ordered(self)):
            progress.unnumbered = not Scattered.possible(inner)
            scattered = None if progress.unnumbered else Scattered(inner, progress)
        return Epoch(
            inner, crew, progress, pinner, self._by_torch, lasting=lasting, door=door, scattered=scattered
        )

    def _unpicklable(self, problem: BaseException) -> Unpicklable | None:
        """What could not be sent to a worker, where that is why none was started."""
        loader: Any = self
        if not isinstance(problem, (TypeError, AttributeError, pickle.PicklingError, UserWarning)):
            return None
        if start_method(loader.multiprocessing_context) == "fork":  # nothing is sent
            return None
        return unpicklable(loader.dataset, loader.collate_fn, loader.worker_init_fn)

    def _door(self, lasting: bool) -> Door | None:
        """How carefully the workers of a pass must start; an error where they are known not to fit."""
        loader: Any = self
        if self.transport != "arena" or (lasting and self._crew is not None):
            return None
        self._learn()
        self._last_door = careful(
            loader.num_workers, start_method(loader.multiprocessing_context), loader.worker_init_fn, self._each,
            loader.batch_size, iterable=self._iterable, drop_last=loader.drop_last,
            in_order=resume.ordered(self),
        )  # fmt: skip
        return self._last_door

    def _learn(self) -> None:
        """Keep what the last careful start has measured."""
        if self._last_door is not None:
            self._each = self._last_door.seen or self._each

    def _go_on(self, stood: dict[str, Any]) -> Epoch:
        """The rest of an interrupted pass, by a loader of torch's over what is left."""
        loader: Any = self
        resume.fitting(self, stood, self._iterable)  # the workers may be others since it was loaded
        notes = {int(worker): note for worker, note in stood["workers"].items()}
        yielded, beyond = int(stood["yielded"]), list(stood["beyond"])
        drawn = dict(stood["generators"]) if stood["begun"] else resume.remember(self)
        progress = self._begun(
            drawn, stood["seeded"], yielded, beyond=beyond, turn=stood["turn"],
            workers={worker: Note(pickle.dumps(note["state"]), tuple(note["then"])) for worker, note in notes.items()},
        )  # fmt: skip
        given: dict[str, Any] = {
            "num_workers": loader.num_workers, "collate_fn": loader.collate_fn, "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor, "persistent_workers": self._lasting,
        }  # fmt: skip
        if hasattr(loader, "in_order"):
            given["in_order"] = loader.in_order
        rest: Rest | None = None
        keep_turn: list[int] = []
        if self._iterable:
            given |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            keep_turn = [worker for worker in range(stood["turn"]) if not _over(notes.get(worker))]
            if keep_turn:
                given["collate_fn"] = TurnKept(loader.collate_fn)
        elif loader.batch_sampler is not None:
            rest = given["batch_sampler"] = Rest(loader.batch_sampler, progress.first_left, beyond)
        else:
            rest = given["sampler"] = Rest(loader.sampler, progress.first_left, beyond)
            given["batch_size"] = None

        def start() -> Iterator[Any]:
            init = loader.worker_init_fn
            if loader.num_workers and (notes or keep_turn):
                init = Rejoined(init, notes, keep_turn, loader.batch_size)
            elif notes and not bring(loader.dataset, notes[0]):
                return iter(())
            heir = self._torch(
                loader.dataset,
                pin_memory=loader.pin_memory,
                generator=loader.generator,
                worker_init_fn=init,
                multiprocessing_context=loader.multiprocessing_context,
                **given,
            )
            inner: Iterator[Any] = iter(heir)
            if rest is not None:
                rest.begin()
            self._heir = heir if self._lasting else None
            return inner

        with resume.replayed(self, stood["generators"]), self._seeds_apart(stood["seeded"]):
            going = self._pass(progress, start, self._lasting)
            if self._iterable and not notes:
                going.skip(yielded)
        return going

    def _pinner(self) -> Pinner | None:
        """Who pins this loader's slots; None where torch does, or nobody."""
        loader: Any = self
        return cuda_pinner() if loader.pin_memory and self.transport == "arena" else None

    def _by_torch(self, reason: str) -> None:
        """Batches travel torch's way, for a reason that is said once."""
        self.transport, self.why = "torch", reason
        if reason not in _told:
            _told.add(reason)
            _log.warning(say("batches travel torch's way, through /dev/shm: {reason}", reason=reason))


class _Alone:
    """A lock for the threads of one process: a forked child, and a copy, has its own."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Alone, ()


@contextlib.contextmanager
def _lent(loader: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """The loader with other arguments for the moment."""
    kept = {name: getattr(loader, name) for name in values}
    try:
        for name, value in values.items():
            setattr(loader, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(loader, name, value)


def _over(note: Mapping[str, Any] | None) -> bool:
    """Whether a worker has nothing left to give."""
    return note is not None and STOP in note["then"]


@cache
def _loader_class() -> type[Any]:
    """Ours and torch's in one class, made when torch is needed and not before."""
    Torch = require("torch.utils.data", "torch", "legroom.DataLoader").DataLoader  # noqa: N806
    names = {"__module__": __name__, "__qualname__": "DataLoader", "__doc__": _DOC, "_torch": Torch}
    return types.new_class("DataLoader", (Loader, Torch[_Batch]), exec_body=lambda body: body.update(names))


_DOC = """torch's DataLoader, with batches carried from the workers past /dev/shm.

Every argument means what it means there. ``memory_budget`` (bytes, ``"256MB"`` or ``"auto"``) bounds the batches on
their way from the workers of one pass. ``transport`` says how they travel (``arena``, ``torch`` or ``none``), ``why``
says the reason. ``state_dict`` and ``load_state_dict`` resume in the middle of an epoch.
"""


def __getattr__(name: str) -> Any:
    if name == "DataLoader":
        return _loader_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
