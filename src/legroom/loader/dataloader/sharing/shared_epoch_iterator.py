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

from legroom.errors import ShareUnsupported, UsageError, WorkerDied
from legroom.loader.dataloader import resume
from legroom.loader.dataloader.pin_memory import pin_batch
from legroom.loader.dataloader.sharing import copy_batches_to_gpu
from legroom.loader.dataloader.sharing.copy_batches_to_gpu import GpuBatches, OnHost
from legroom.loader.dataloader.sharing.group_folder import group_folder
from legroom.loader.dataloader.sharing.group_settings import index_sampler, own_collate, settings_of
from legroom.loader.dataloader.sharing.make_batches_in_trainer import OwnBatches, OwnStream, StreamState, stream_state
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
        self._state: StreamState | None = None  # of a stream, at the position that was loaded
        self._group: Group | None = None
        self._gpu: GpuBatches | None = None  # with ``device``
        self._current: weakref.ref[SharedEpoch] | None = None
        self._latest: weakref.ref[SharedEpoch] | None = None  # also when it takes no batches from the group any more

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the position, and connects itself."""
        state = self._stream_state() if isinstance(self._own, OwnStream) and self.position[1] else self._state
        return {
            **vars(self),
            "_state": state,
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
        loaded, self._loaded = self._loaded, False
        told, before = _epoch_of(loader), self._told
        self._told = told
        if not loaded:
            epoch, yielded = self.position
            if told is not None and told != before:
                epoch = told  # the program has called set_epoch
            elif yielded:
                epoch += 1  # the last one was left early
            self.position = epoch, 0
            self._draw_as_torch(loader)
        if self._group is None or self._group.pid != os.getpid():
            self._join(loader)
        assert self._group is not None and self._own is not None
        if self._orders is not None:
            self._orders.forget()  # a sampler may have changed
        if self._latest is not None and (latest := self._latest()) is not None and not latest.done:
            self._own = self._own.another()  # an iterator that still runs keeps its workers
        if isinstance(self._own, OwnStream):
            self._own.progress = self._own.new_progress(self.position, self._state if loaded else None)
            self._state = None
        epoch_iterator = SharedEpoch(self, self._group, self._own, self._orders, loader)
        self._current = self._latest = weakref.ref(epoch_iterator)
        return epoch_iterator

    def _join(self, loader: Any) -> None:
        """Find the group, at the first epoch in this process."""
        if self._stream:
            self._own = OwnStream(
                loader.dataset, loader.batch_size, loader.drop_last, loader.num_workers, self.seed,
                _ordinary_loader(loader),
            )  # fmt: skip
        else:
            self._orders = Orders(index_sampler(loader), loader.batch_sampler is not None, self.seed, loader.generator)
            if self._settings is None:
                _check_order(loader, self._orders)
        self._gpu = None
        if loader.device is not None:
            self._gpu = GpuBatches(copy_batches_to_gpu.gpu_of(loader.device), group_folder().parent)
            loader.why = self._gpu.why
        self._group = group = Group(
            _recipe(self, loader), lambda fresh: self._find_settings(loader, fresh), patience=self.patience,
            continuous=self.continuous, state=weakref.WeakMethod(self._stream_state) if self._stream else None,
            gpu=self._gpu,
        )  # fmt: skip
        if self._orders is not None:
            held = weakref.ref(group)
            self._own = OwnBatches(
                loader.dataset, loader.batch_sampler is not None, own_collate(loader), self._orders,
                _ordinary_loader(loader), lambda: None if (one := held()) is None else one.fresh_dataset(),
                persistent=bool(loader.persistent_workers),
            )  # fmt: skip

    def _stream_state(self) -> StreamState:
        assert isinstance(self._own, OwnStream)
        return stream_state(self._own.progress)

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
            turn, workers = self._state or (self._stream_state() if begun and self._own is not None else (0, {}))
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
        if self._stream:
            resume.fit_state(loader, dict(state), iterable=True)
            self._state = int(state["turn"]), resume.read_workers(state["workers"])
        resume.restore_generators(loader, state["generators"])
        if state["seed"] != self.seed:
            self.seed, self._settings = int(state["seed"]), None
            self.close()
        elif self._own is not None:
            self._own.stop()  # its workers are at another position
        self.position = int(state["epoch"]), int(state["yielded"])
        self._loaded, self._seeded, self._current = bool(state["begun"]), bool(state["seeded"]), None

    def _find_settings(self, loader: Any, fresh: Any) -> dict[str, str]:
        """What must be equal in a group; computed once."""
        if self._settings is None:
            self._settings = settings_of(loader, self._orders, self.seed, fresh)
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
        self, sharing: Sharing, group: Group, own: OwnBatches | OwnStream, orders: Orders | None, loader: Any
    ) -> None:
        self._sharing, self._group, self._own = sharing, group, own
        self._position = sharing.position
        self._count: int | None = None  # unknown for an IterableDataset
        if orders is not None:
            sampler = index_sampler(loader)
            self._count = len(sampler) if _of_torch(sampler) else len(orders.of(self._position[0]))
        self._gpu = sharing._gpu
        self._pin = bool(loader.pin_memory) and _pins() and self._gpu is None
        self._where: OnHost | None = None  # the batch that was received
        self._loader = weakref.ref(loader)
        self.done = False
        self._pid = os.getpid()
        if group.alone and not self._complete:
            own.start(self._position)  # now, as without share: what the program does before the first batch takes time

    def __iter__(self) -> SharedEpoch:
        return self

    def __len__(self) -> int:
        return len(self._loader()) if self._count is None else self._count  # type: ignore[arg-type]

    @property
    def _complete(self) -> bool:
        return self.done or (self._count is not None and self._position[1] >= self._count)

    def __next__(self) -> Any:
        position = self._position
        if self._complete:
            if self._count == 0 and not self.done:
                self._move(epoch_over=True)  # no batch of it does that
            self._end()
            raise StopIteration
        self._where = None
        answer = self._group.take(position) if self._sharing.is_current(self) else None
        try:
            # Without slots, an iterator of before was deleted meanwhile, and found that the producer has ended.
            if answer is None or self._group.slots is None:
                batch, pinned = self._made_here(position), self._own.workers is not None
            else:
                batch, pinned = self._received(answer), False
        except StopIteration:  # of an IterableDataset
            self._end()
            self._move(epoch_over=True)
            raise
        except WorkerDied:
            raise
        except Exception:
            if answer is None or len(answer) > 4:  # of this batch alone: the next ones can be made
                self._advance(position)
            raise
        self._advance(position)
        if self._gpu is not None:
            return self._on_gpu(self._gpu, batch)
        return pin_batch(batch) if self._pin and not pinned else batch

    def _on_gpu(self, gpu: GpuBatches, batch: Any) -> Any:
        why_own = gpu.why_own
        moved = gpu.moved(batch, self._where, self._group.claim)
        if gpu.why_own != why_own and (loader := self._loader()) is not None:
            loader.why = gpu.why
        return moved

    def _made_here(self, position: Position) -> Any:
        current = self._sharing.is_current(self)
        alone = self._group.alone or not current
        if self._own.workers is not None and self._group.coming:
            self._own.stop()  # a group will make the batches
        return self._own.make(position, alone=alone, expected=self._group.expected and current)

    def _received(self, answer: tuple[Any, ...]) -> Any:
        slots = self._group.slots
        assert slots is not None
        self._own.rejoined()
        if answer[0] == "batch":
            _, _, serial, slot, body = answer
            opened = slots.open(serial, slot, body, copy=self._pin)
            if isinstance(self._own, OwnStream):
                self._own.progress.add_state(opened.state)
            self._where = OnHost(serial, opened.address, opened.nbytes) if opened.nbytes else None
            return opened.batch
        if answer[0] == "end":
            slots.give_back(answer[2])
            raise StopIteration
        if len(answer) > 4:
            slots.give_back(answer[4])
        raise pickle.loads(answer[2])

    def _advance(self, position: Position) -> None:
        epoch, number = position
        self._position = epoch, number + 1
        self._move(epoch_over=self._complete)

    def _move(self, *, epoch_over: bool) -> None:
        if not self._sharing.is_current(self):
            return
        if epoch_over:
            self._sharing.position = self._position[0] + 1, 0
            self._group.rest(self._sharing.position)
        else:
            self._sharing.position = self._position
            self._group.ask(self._position)

    def _end(self) -> None:
        if not self.done:
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
