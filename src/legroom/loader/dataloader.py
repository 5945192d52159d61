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
import pickle
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from legroom.budget.crew import Each
from legroom.loader import deaths, resume
from legroom.loader.arena import inbox as arena_inbox
from legroom.loader.arena.door import Door, careful
from legroom.loader.arena.inbox import Pinner, unopened
from legroom.loader.arena.pin import cuda_pinner
from legroom.loader.arena.queues import direct
from legroom.loader.arguments import check_arguments
from legroom.loader.collate import Carried, read_budget, why_not, wrapped
from legroom.loader.epoch import Epoch
from legroom.loader.measure.private import start_method
from legroom.loader.progress import STOP, Note, Progress, Scattered
from legroom.loader.rejoin import Rejoined, TurnKept, bring
from legroom.loader.rest import Rest
from legroom.loader.socket_room import make_room
from legroom.loader.unpicklable import unpicklable
from legroom.packages import require
from legroom.words import say

if TYPE_CHECKING:
    from torch.utils.data import DataLoader as DataLoader

_log = logging.getLogger("legroom")
_told: set[str] = set()


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
        check_arguments(batch_size, num_workers, shuffle, sampler, options)
        super().__init__(  # type: ignore[call-arg]
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, **options,
        )  # fmt: skip
        loader: Any = self
        self.memory_budget = memory_budget
        self._progress: Progress | None = None
        self._stood: dict[str, Any] | None = None  # where the next pass begins, if not at the start
        self._seeded = (
            False  # whether lasting workers have their seeds: no later pass takes a number for them
        )
        self._heir: Any = None  # the loader of torch's that has the lasting workers, after going on with them
        self._crew: deaths.Crew | None = None
        self._each: Each | None = None  # what a worker was seen to take
        self._last_door: Door | None = None
        self.transport, self.why = "arena", say("workers hand over batches in memory of their own")
        if num_workers == 0:
            self.transport, self.why = "none", say("num_workers=0: batches are made in this process")
        elif (reason := why_not()) is not None:
            self._by_torch(reason)
        elif not (isinstance(loader.collate_fn, Carried) and memory_budget == "auto"):
            loader.collate_fn = wrapped(loader.collate_fn, memory_budget)

    def __iter__(self) -> Epoch:
        stood, self._stood = self._stood, None
        if stood is not None:
            return self._go_on(stood)
        living = self._lasting and self._crew is not None
        notes = resume.later(self._progress) if living else {}
        start = super().__iter__ if self._heir is None else self._heir.__iter__  # type: ignore[misc]
        with self._seeds_apart(self._seeded and not living):
            return self._pass(self._begun(resume.remember(self), self._seeded, workers=notes), start)

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
        crew, self._crew = self._crew, None
        if crew is not None:
            arena_inbox.close(crew.pids)  # one that waits for room must not wait for us
        self._heir = loader._iterator = None

    def _pass(self, progress: Progress, start: Any) -> Epoch:
        """A pass over what ``start`` gives."""
        loader: Any = self
        lasting = self._lasting
        self._progress = progress
        if loader.num_workers == 0:
            return Epoch(start(), None, progress, None, self._by_torch, lasting=False)
        by_server = start_method(loader.multiprocessing_context) == "forkserver"
        make_room(needed=by_server or self.transport == "torch")
        pinner = self._pinner()
        door = self._door(lasting)
        before = set(multiprocessing.active_children())
        others: dict[str, Any] = {}
        if pinner is not None:
            others["pin_memory"] = False  # torch would start a thread for what is pinned already
        if door is not None:
            others["worker_init_fn"] = door
        if self.transport == "arena":
            others["multiprocessing_context"] = direct(
                loader.multiprocessing_context or multiprocessing.get_context(start_method())
            )
        try:
            with unopened(), _lent(loader, others):
                inner = start()
        except (TypeError, AttributeError, pickle.PicklingError, UserWarning) as problem:
            clearer = unpicklable(loader.dataset, loader.collate_fn, loader.worker_init_fn)
            if clearer is None:
                raise
            raise clearer from problem
        started = [process for process in multiprocessing.active_children() if process not in before]
        crew = self._crew if lasting and self._crew is not None and not started else deaths.Crew(started)
        self._crew = crew if lasting else None
        self._seeded = self._seeded or lasting
        deaths.listen()
        scattered = None
        if not (self._iterable or resume.ordered(self)):
            progress.unnumbered = not Scattered.possible(inner)
            scattered = None if progress.unnumbered else Scattered(inner, progress)
        return Epoch(
            inner, crew, progress, pinner, self._by_torch, lasting=lasting, door=door, scattered=scattered
        )

    def _door(self, lasting: bool) -> Door | None:
        """How carefully the workers of a pass must start; an error where they are known not to fit."""
        loader: Any = self
        if self.transport != "arena" or (lasting and self._crew is not None):
            return None
        if self._last_door is not None:
            self._each = self._last_door.seen or self._each
        with contextlib.suppress(TypeError):  # how long it is may not be known
            if len(loader) == 0:
                return None
        self._last_door = careful(
            loader.num_workers, start_method(loader.multiprocessing_context), loader.worker_init_fn, self._each,
            loader.batch_size, iterable=self._iterable, drop_last=loader.drop_last,
        )  # fmt: skip
        return self._last_door

    def _go_on(self, stood: dict[str, Any]) -> Epoch:
        """The rest of an interrupted pass, by a loader of torch's over what is left."""
        from torch.utils.data import DataLoader

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
            heir = DataLoader(
                loader.dataset,
                pin_memory=loader.pin_memory,
                generator=loader.generator,
                worker_init_fn=init,
                multiprocessing_context=loader.multiprocessing_context,
                **given,
            )
            inner = iter(heir)
            if rest is not None:
                rest.begin()
            self._heir = heir if self._lasting else None
            return inner

        with resume.replayed(self, stood["generators"]), self._seeds_apart(stood["seeded"]):
            going = self._pass(progress, start)
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
    names = {"__module__": __name__, "__qualname__": "DataLoader", "__doc__": _DOC}
    return type("DataLoader", (Loader, Torch), names)


_DOC = """torch's DataLoader, with batches carried from the workers past /dev/shm.

Every argument means what it means there. ``memory_budget`` (bytes, ``"256MB"`` or ``"auto"``) bounds the batches on
their way from the workers of one pass. ``transport`` says how they travel (``arena``, ``torch`` or ``none``), ``why``
says the reason. ``state_dict`` and ``load_state_dict`` resume in the middle of an epoch.
"""


def __getattr__(name: str) -> Any:
    if name == "DataLoader":
        return _loader_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
