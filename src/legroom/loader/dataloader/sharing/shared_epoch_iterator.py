"""A trainer of a group: the iterator, which takes batches from the group or makes them itself, and its state.

``Sharing`` belongs to a loader. It holds the connection, which is the trainer's lease, from the first epoch until the
loader is deleted, and counts epochs. ``SharedEpoch`` is the iterator of one epoch.
"""

from __future__ import annotations

import os
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from legroom.errors import BudgetTooSmall, ShareUnsupported, UsageError, WorkerDied
from legroom.loader.dataloader import resume
from legroom.loader.dataloader.pin_memory import pin_batch
from legroom.loader.dataloader.sharing import copy_batches_to_gpu
from legroom.loader.dataloader.sharing.copy_batches_to_gpu import GpuBatches, OnHost
from legroom.loader.dataloader.sharing.group_folder import group_folder
from legroom.loader.dataloader.sharing.group_settings import index_sampler, own_collate, settings_of
from legroom.loader.dataloader.sharing.make_batches_in_trainer import OwnBatches, OwnStream, StreamState
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import (
    Orders,
    Position,
    counts_epochs,
    name_seed,
    samplers,
)
from legroom.loader.dataloader.sharing.producer_client import Group
from legroom.loader.dataloader.sharing.start_producer_process import PRODUCER_VARIABLE, Recipe, loader_class
from legroom.loader.measure_process_memory import start_method
from legroom.messages import say

STATE_VERSION = "share-1"
ON_SLOW = ("own", "wait")
_PATIENCE_S = 1.0  # that a trainer with on_slow="own" may hold the others up
_FIELDS = {"begun", "epoch", "yielded", "seed", "batch_size", "generators", "seeded"}  # of a state
_STREAM_FIELDS = {"num_workers", "turn", "workers"}  # of an IterableDataset's


class Sharing:
    """What a loader with ``share=`` knows of its group. It does not hold the loader: with that, the lease ends."""

    def __init__(self, loader: Any, name: str, on_slow: str) -> None:
        _check_supported(loader, name, on_slow)
        self.name = name
        self.patience = _PATIENCE_S if on_slow == "own" else float(loader.timeout)
        self.continuous = on_slow == "wait"
        self.seed = name_seed(name) if loader.generator is None else int(loader.generator.initial_seed())
        self.position: Position = (0, 0)  # after the last batch that was returned
        self._loaded = False  # load_state_dict has set the position
        self._seeded = False  # persistent workers: no later epoch draws a number for their seeds
        self._told = _epoch_of(loader)
        self._stream = is_stream(loader)
        self._settings: dict[str, str] | None = None
        self._orders: Orders | None = None
        self._own: OwnBatches | OwnStream | None = None
        self._state: StreamState | None = None  # of a stream, at this position
        self._group: Group | None = None
        self._gpu: GpuBatches | None = None  # with ``device``
        self._current: weakref.ref[SharedEpoch] | None = None
        self._latest: weakref.ref[SharedEpoch] | None = None  # also when it takes no batches from the group any more

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the position, and connects itself."""
        return {
            **vars(self),
            "_group": None,
            "_gpu": None,
            "_current": None,
            "_latest": None,
            "_orders": None,
            "_own": None,
        }

    def begin(self, loader: Any) -> SharedEpoch:
        """The iterator of the next epoch."""
        if os.environ.get(PRODUCER_VARIABLE):
            raise ShareUnsupported(
                say("the program starts its training when it is imported"),
                why=say("the process that makes the batches imports the program's main module for its dataset"),
                fix=(say("put the program's start below: if __name__ == '__main__':"),),
            )
        position, state, told = self.position, self._state, _epoch_of(loader)
        if not self._loaded:
            epoch, yielded = position
            if told is not None and told != self._told:
                epoch = told  # the program has called set_epoch
            elif yielded:
                epoch += 1  # the last one was left early
            position, state = (epoch, 0), None
            self._draw_as_torch(loader)
        if self._group is None or self._group.pid != os.getpid():
            self._join(loader)
        assert self._group is not None and self._own is not None
        if self._orders is not None:
            self._orders.forget()  # a sampler may have changed
        own = self._own
        if self._latest is not None and (latest := self._latest()) is not None and not latest.done:
            own = own.another()  # an iterator that still runs keeps its workers
        epoch_iterator = SharedEpoch(self, self._group, own, self._orders, loader, position, state)
        latest_now = weakref.ref(epoch_iterator)
        # Not before: starting workers may fail, or be interrupted, and the next iterator begins where this one would.
        noted = position, state, told, False, own, latest_now, latest_now
        self.position, self._state, self._told, self._loaded, self._own, self._current, self._latest = noted
        return epoch_iterator

    def _join(self, loader: Any) -> None:
        """Find the group, at the first epoch in this process."""
        orders, gpu = None, None
        if not self._stream:
            orders = Orders(index_sampler(loader), loader.batch_sampler is not None, self.seed, loader.generator)
            if self._settings is None:
                _check_order(loader, orders)
        if loader.device is not None:
            gpu = GpuBatches(copy_batches_to_gpu.gpu_of(loader.device), group_folder().parent)
            loader.why = gpu.why
        group = Group(
            _recipe(self, loader), lambda fresh: self._find_settings(loader, orders, fresh), patience=self.patience,
            continuous=self.continuous, gpu=gpu,
        )  # fmt: skip
        own: OwnBatches | OwnStream
        if orders is not None:
            held = weakref.ref(group)
            own = OwnBatches(
                loader.dataset, loader.batch_sampler is not None, own_collate(loader), orders,
                _ordinary_loader(loader), lambda: None if (one := held()) is None else one.fresh_dataset(),
                persistent=bool(loader.persistent_workers),
            )  # fmt: skip
        else:
            own = OwnStream(
                loader.dataset, loader.batch_size, loader.drop_last, loader.num_workers, self.seed,
                _ordinary_loader(loader),
            )  # fmt: skip
        noted = orders, gpu, own, group
        self._orders, self._gpu, self._own, self._group = noted

    def is_current(self, epoch: SharedEpoch) -> bool:
        """Whether it is the iterator that was made last: only that one takes batches from the group."""
        return self._current is not None and self._current() is epoch

    def is_latest(self, epoch: SharedEpoch, own: OwnBatches | OwnStream) -> bool:
        """Whether no later iterator uses the workers of this one."""
        latest = None if self._latest is None else self._latest()
        return own is self._own and (latest is None or latest is epoch)

    def _draw_as_torch(self, loader: Any) -> None:
        """Advance the program's generators as an epoch of torch with workers does."""
        import torch

        sampler = index_sampler(loader)
        if not self._seeded:
            iter(sampler)
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        next(iter(sampler), None)
        self._seeded = self._seeded or bool(loader.persistent_workers)

    def state_dict(self, loader: Any) -> dict[str, Any]:
        """The position after the last batch that was returned, and the group's seed."""
        epoch, yielded = self.position
        states = {name: one for name, one in resume.generator_states(loader).items() if name != "default"}
        begun = self._loaded or yielded > 0
        stream: dict[str, Any] = {}
        if self._stream:
            turn, workers = self._state or (0, {})
            stream = {"num_workers": loader.num_workers, "turn": turn, "workers": resume.saved_workers(workers)}
        return {
            "version": STATE_VERSION, "begun": begun, "epoch": epoch, "yielded": yielded,
            "seed": self.seed, "batch_size": loader.batch_size, "generators": states, "seeded": self._seeded, **stream,
        }  # fmt: skip

    def load_state_dict(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Begin the next epoch where the state was taken, in the order of its group."""
        fields = _FIELDS | (_STREAM_FIELDS if self._stream else set())
        what = say("this is not the state of a legroom.DataLoader with share=")
        state = resume.check_state(state, STATE_VERSION, fields, what)
        if state["begun"] and state["batch_size"] != loader.batch_size:
            raise UsageError(
                say("cannot resume with batch_size={now}", now=loader.batch_size),
                why=say("the state was saved with batch_size={then}", then=state["batch_size"]),
                fix=(say("use batch_size={then} until the epoch is complete", then=state["batch_size"]),),
            )
        stream = None
        if self._stream:
            resume.fit_state(loader, dict(state), iterable=True)
            stream = int(state["turn"]), resume.read_workers(state["workers"])
        resume.restore_generators(loader, state["generators"])
        settings = self._settings if state["seed"] == self.seed else None
        if state["seed"] != self.seed:
            self.close()
        elif self._own is not None:
            self._own.stop()  # its workers are at another position
        position = int(state["epoch"]), int(state["yielded"])
        noted = int(state["seed"]), settings, position, stream, bool(state["begun"]), bool(state["seeded"]), None
        self.seed, self._settings, self.position, self._state, self._loaded, self._seeded, self._current = noted

    def _find_settings(self, loader: Any, orders: Orders | None, fresh: Any) -> dict[str, str]:
        """What must be equal in a group; computed once."""
        if self._settings is None:
            self._settings = settings_of(loader, orders, self.seed, fresh)
        return self._settings

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        own, self._own = self._own, None
        if own is not None:
            own.stop()
        if group is not None:
            group.close()
        if self._gpu is not None:
            self._gpu.close()


class SharedEpoch:
    """An iterator over the batches of one epoch."""

    def __init__(
        self, sharing: Sharing, group: Group, own: OwnBatches | OwnStream, orders: Orders | None, loader: Any,
        position: Position, state: StreamState | None,
    ) -> None:  # fmt: skip
        self.done = False
        self._sharing, self._group, self._own = sharing, group, own
        self._position, self._state = position, state  # after the last batch that was returned
        self._count: int | None = None  # unknown for an IterableDataset
        if orders is not None:
            sampler = index_sampler(loader)
            self._count = len(sampler) if _of_torch(sampler) else len(orders.of(self._position[0]))
        self._gpu = sharing._gpu
        self._pin = bool(loader.pin_memory) and _pins() and self._gpu is None
        self._where: OnHost | None = None  # the batch that was received
        self._loader = weakref.ref(loader)
        self._pid = os.getpid()
        if group.alone and not self._complete:
            own.start(position, state)  # now, as without share: what the program does before the first batch takes time

    def __iter__(self) -> SharedEpoch:
        return self

    def __len__(self) -> int:
        return len(self._loader()) if self._count is None else self._count  # type: ignore[arg-type]

    @property
    def _complete(self) -> bool:
        return self.done or (self._count is not None and self._position[1] >= self._count)

    def __next__(self) -> Any:
        position, sharing = self._position, self._sharing
        current = sharing.is_current(self)
        if self._complete:
            self._end()
            raise StopIteration
        self._where = None
        answer = self._group.take(position, self._state) if current else None
        try:
            # Without slots, an iterator of before was deleted meanwhile, and found that the producer has ended.
            if answer is None or self._group.slots is None:
                (batch, state), pinned = self._made_here(position), self._own.workers is not None
            else:
                (batch, state), pinned = self._received(answer), False
        except StopIteration:  # of an IterableDataset
            self._end()
            raise
        except Exception as problem:
            lasting = (
                isinstance(problem, (WorkerDied, BudgetTooSmall, MemoryError))
                if answer is None
                else answer[0] != "error" or len(answer) < 5
            )
            if not lasting:  # of this batch alone: the next ones can be made. Until then, a state begins with this one
                self._position = self._ask(position, self._state, current)[0]
            raise
        after, place = self._ask(position, state, current)
        if self._gpu is not None:
            batch = self._on_gpu(self._gpu, batch)
        elif self._pin and not pinned:
            batch = pin_batch(batch)
        # That it is returned is noted by the last instruction: a state taken after an error or an interruption,
        # wherever it strikes, begins with this batch, and so does this loop if it is used again.
        noted, group = (after, state, *place, False), self._group
        if not current:
            self._position, self._state, _, _, _ = noted
        else:
            self._position, self._state, sharing.position, sharing._state, group.unsettled = noted
        return batch

    def _ask(
        self, position: Position, state: StreamState | None, current: bool
    ) -> tuple[Position, tuple[Position, StreamState | None]]:
        """Ask for the batch after this one. Where this iterator is then, and where the loader is."""
        epoch, number = position
        after = epoch, number + 1
        over = self._count is not None and after[1] >= self._count
        place = ((epoch + 1, 0), None) if over else (after, state)
        if current and over:
            self._group.rest(place[0])
        elif current:
            self._group.ask(after, state)
        return after, place

    def _on_gpu(self, gpu: GpuBatches, batch: Any) -> Any:
        why_own = gpu.why_own
        moved = gpu.moved(batch, self._where, self._group.claim)
        if gpu.why_own != why_own and (loader := self._loader()) is not None:
            loader.why = gpu.why
        return moved

    def _made_here(self, position: Position) -> tuple[Any, StreamState | None]:
        """The batch, and the state of a stream after it."""
        current = self._sharing.is_current(self)
        alone = self._group.alone or not current
        if self._own.workers is not None and self._group.coming:
            self._own.stop()  # a group will make the batches
        return self._own.make(position, self._state, alone=alone, expected=self._group.expected and current)

    def _received(self, answer: tuple[Any, ...]) -> tuple[Any, StreamState | None]:
        slots = self._group.slots
        assert slots is not None
        self._own.rejoined()
        if answer[0] == "batch":
            _, _, lease, slot, body = answer
            opened = slots.open(lease, slot, body, copy=self._pin)
            self._where = OnHost(lease[0], opened.address, opened.nbytes) if opened.nbytes else None
            return opened.batch, self._own.state_after(self._state, opened.state)
        if answer[0] == "end":
            slots.give_back(answer[2])
            self._group.unsettled = False
            raise StopIteration
        if len(answer) > 4:
            slots.give_back(answer[4])
        self._group.unsettled = False
        raise pickle.loads(answer[2])

    def _end(self) -> None:
        """The epoch is over. The last batch has noted that, if it did not fail, and their number is known."""
        if self.done:
            return
        sharing, then = self._sharing, (self._position[0] + 1, 0)
        if sharing.is_current(self) and sharing.position < then:
            self._group.rest(then)
            noted = then, None
            sharing.position, sharing._state = noted
        self._own.end_epoch()
        self.done = True

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit() or getattr(self, "_pid", 0) != os.getpid() or self.done:
            return
        if self._sharing.is_latest(self, self._own):
            self._own.end_epoch()
        current = self._sharing._current
        if not self._complete and (current is None or current() is None or current() is self):  # no later one has begun
            self._group.rest((self._position[0] + 1, 0))


def is_stream(loader: Any) -> bool:
    """Whether it loads an IterableDataset."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _of_torch(sampler: Any) -> bool:
    """Whether it and those within it are torch's samplers: their length is the same in every epoch."""
    return all(type(one).__module__.startswith("torch.utils.data") for one in samplers(sampler))


def _epoch_of(loader: Any) -> int | None:
    """The epoch that the program has given its sampler, if it counts epochs."""
    return next((int(one.epoch) for one in samplers(index_sampler(loader)) if counts_epochs(one)), None)


def _recipe(sharing: Sharing, loader: Any) -> Recipe:
    import torch

    return Recipe(
        name=sharing.name, settings={}, seed=sharing.seed, dataset=loader.dataset, sampler=index_sampler(loader),
        batched=loader.batch_sampler is not None, generator=loader.generator, collate_fn=own_collate(loader),
        worker_init_fn=loader.worker_init_fn, num_workers=loader.num_workers, prefetch_factor=loader.prefetch_factor,
        timeout=loader.timeout, method=start_method(loader.multiprocessing_context), memory_budget=loader.memory_budget,
        persistent_workers=bool(loader.persistent_workers), dtype=str(torch.get_default_dtype()),
        stream=is_stream(loader), batch_size=loader.batch_size, drop_last=loader.drop_last,
    )  # fmt: skip


def _ordinary_loader(loader: Any) -> Callable[..., Any]:
    """Makes an ordinary loader with this one's settings, for what is given."""
    import torch

    arguments = {
        "num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor, "collate_fn": own_collate(loader),
        "timeout": loader.timeout, "worker_init_fn": loader.worker_init_fn, "memory_budget": loader.memory_budget,
        "multiprocessing_context": loader.multiprocessing_context,
        "pin_memory": loader.pin_memory or loader.device is not None,
    }  # fmt: skip

    def start(dataset: Any, **given: Any) -> Any:
        return loader_class()(dataset, **{"generator": torch.Generator(), **arguments, **given})

    return start


def _check_supported(loader: Any, name: str, on_slow: str) -> None:
    """Raise ShareUnsupported for what cannot be shared."""
    if not isinstance(name, str) or not name:
        raise UsageError(say("share must be the name of a group (got {name!r})", name=name), fix=("share='train'",))
    what, fix = None, ()  # type: str | None, tuple[str, ...]
    if is_stream(loader) and resume.dataset_state_dict(loader.dataset) is None:
        what = say(
            "an IterableDataset without state_dict: no process can make one of its batches without all before it"
        )
        fix = (say("give the dataset state_dict and load_state_dict"), say("or use a map-style dataset"))
    elif loader.num_workers == 0:
        what, fix = say("num_workers=0: the group has no workers"), (say("pass num_workers of 1 or more"),)
    elif not getattr(loader, "in_order", True):
        what, fix = say("in_order=False: all trainers get one order"), (say("use in_order=True"),)
    elif not is_stream(loader) and not hasattr(index_sampler(loader), "__len__"):
        what, fix = say("a sampler without a length: its order may never end"), (say("give the sampler __len__"),)
    elif on_slow == "wait" and not loader.timeout:
        what = say("on_slow='wait' without a timeout: a trainer that is stopped would stop the others")
        fix = (say("pass timeout=60, the seconds that others wait for a slow trainer"),)
    if what is not None:
        raise ShareUnsupported(say("share={name!r}: batches cannot be shared", name=name), why=what, fix=fix)


def _check_order(loader: Any, orders: Orders) -> None:
    """Raise if the order of an epoch is another each time it is drawn: then no two processes have the same."""
    if _of_torch(index_sampler(loader)):
        return
    if orders.draw(0).digest != orders.draw(0).digest:
        raise ShareUnsupported(
            say("the sampler gives another order each time"),
            why=say("its random numbers are neither torch's, random's or NumPy's global ones nor its `generator`'s"),
            fix=(say("draw from a torch.Generator in the attribute `generator`"),
                 say("or give the sampler set_epoch() and the attribute `epoch`")),
        )  # fmt: skip


def _pins() -> bool:
    import torch

    return torch.cuda.is_available()
