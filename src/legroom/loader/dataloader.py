"""``legroom.DataLoader``: torch's, with batches that travel in memory of their own.

Covers: the arguments, what torch is given, starting a pass over the data. Does not cover: the transport (collate.py and
arena/), a pass (epoch.py), states (resume.py).

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
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from legroom.budget.crew import Each
from legroom.errors import MissingPackage, Unpicklable
from legroom.loader import deaths, resume
from legroom.loader.arena.door import Door, careful
from legroom.loader.arena.inbox import Pinner, unopened
from legroom.loader.arena.pin import cuda_pinner
from legroom.loader.collate import Carried, read_budget, why_not, wrapped
from legroom.loader.epoch import Epoch
from legroom.loader.measure.private import start_method
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
        super().__init__(  # type: ignore[call-arg]
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, **options,
        )  # fmt: skip
        loader: Any = self
        self.memory_budget = memory_budget
        self._progress: resume.Progress | None = None
        self._stood: dict[str, Any] | None = None  # where the next pass begins, if not at the start
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
        if stood is None:
            return self._pass(resume.Progress(resume.remember(self)), super().__iter__, self._lasting)  # type: ignore[misc]
        return self._go_on(stood)

    def state_dict(self) -> dict[str, Any]:
        """Where the current pass stands; what comes next follows the last batch given out."""
        if self._stood is not None:
            return dict(self._stood)
        return resume.state_of(self, self._progress, self._iterable)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass where that state was taken."""
        stood = resume.checked(state)
        self._stood = stood if self._iterable else resume.in_batches_of(self, stood)
        self._progress = None
        if not self._stood["begun"]:
            resume.restore(self, self._stood["generators"])
            self._stood = None

    @property
    def _iterable(self) -> bool:
        from torch.utils.data import IterableDataset

        loader: Any = self
        return isinstance(loader.dataset, IterableDataset)

    @property
    def _lasting(self) -> bool:
        loader: Any = self
        return bool(loader.persistent_workers)

    def _pass(self, progress: resume.Progress, start: Any, lasting: bool) -> Epoch:
        """A pass over what ``start`` gives."""
        loader: Any = self
        self._progress = progress
        if loader.num_workers == 0:
            return Epoch(start(), None, progress, None, self._by_torch, lasting=False)
        pinner = self._pinner()
        door = self._door(lasting)
        asked, before = loader.pin_memory, set(multiprocessing.active_children())
        init = loader.worker_init_fn
        if pinner is not None:
            loader.pin_memory = False  # torch would start a thread for what is pinned already
        if door is not None:
            loader.worker_init_fn = door
        try:
            with unopened():
                inner = start()
        except (TypeError, AttributeError, pickle.PicklingError, UserWarning) as problem:
            clearer = self._unpicklable()
            if clearer is None:
                raise
            raise clearer from problem
        finally:
            loader.pin_memory, loader.worker_init_fn = asked, init
        started = [process for process in multiprocessing.active_children() if process not in before]
        crew = self._crew if lasting and self._crew is not None and not started else deaths.Crew(started)
        self._crew = crew if lasting else None
        deaths.listen()
        return Epoch(inner, crew, progress, pinner, self._by_torch, lasting=lasting, door=door)

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
            loader.batch_size, iterable=self._iterable,
        )  # fmt: skip
        return self._last_door

    def _go_on(self, stood: dict[str, Any]) -> Epoch:
        """The rest of an interrupted pass, by a loader of torch's over what is left."""
        from torch.utils.data import DataLoader

        loader: Any = self
        skip = int(stood["yielded"])
        rest: resume.Rest | None = None
        given: dict[str, Any] = {
            "num_workers": loader.num_workers, "collate_fn": loader.collate_fn, "timeout": loader.timeout,
            "generator": loader.generator,
            "multiprocessing_context": loader.multiprocessing_context, "prefetch_factor": loader.prefetch_factor,
        }  # fmt: skip
        if hasattr(loader, "in_order"):
            given["in_order"] = loader.in_order
        known = stood["dataset"] is not None or bool(stood["workers"])
        if self._iterable:
            given |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            if stood["dataset"] is not None:
                loader.dataset.load_state_dict(stood["dataset"])
        elif loader.batch_sampler is not None:
            rest = given["batch_sampler"] = resume.Rest(loader.batch_sampler, skip)
        else:
            rest = given["sampler"] = resume.Rest(loader.sampler, skip)
            given["batch_size"] = None

        def start() -> Iterator[Any]:
            init = loader.worker_init_fn
            if self._iterable and stood["dataset"] is None and known:
                init = resume.Restored(init, stood["workers"])
            given["worker_init_fn"] = init
            inner = iter(DataLoader(loader.dataset, pin_memory=loader.pin_memory, **given))
            if rest is not None and rest.latest is not None:
                rest.latest.prepare()
            return inner

        workers = {worker: pickle.dumps(state) for worker, state in stood["workers"].items()}
        progress = resume.Progress(dict(stood["generators"]), skip, workers)
        with resume.replayed(self, stood["generators"]):
            going = self._pass(progress, start, False)
            if self._iterable and not known:
                going.skip(skip)
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

    def _unpicklable(self) -> Unpicklable | None:
        """Which argument cannot reach the workers, if that is what is wrong."""
        loader: Any = self
        function = loader.collate_fn.fn if isinstance(loader.collate_fn, Carried) else loader.collate_fn
        parts = {"dataset": loader.dataset, "collate_fn": function, "worker_init_fn": loader.worker_init_fn}
        for name, part in parts.items():
            try:
                ForkingPickler.dumps(part)
            except Exception as inner:
                return Unpicklable(
                    say("the {name} cannot be sent to worker processes", name=name),
                    why=say(
                        "{kind} is pickled for every worker, and: {problem}", kind=type(part), problem=inner
                    ),
                    fix=(
                        say(
                            "define it at the top level of a module: no lambdas, no functions inside functions"
                        ),
                        say("open files and connections in worker_init_fn or at first use, not in __init__"),
                        say("multiprocessing_context='fork' sends nothing"),
                    ),
                )
        return None


@cache
def _loader_class() -> type[Any]:
    """Ours and torch's in one class, made when torch is needed and not before."""
    try:
        from torch.utils.data import DataLoader as Torch
    except ImportError as problem:
        raise MissingPackage(
            say("legroom.DataLoader needs torch"), why=str(problem), fix=("pip install 'legroom[torch]'",)
        ) from problem
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
