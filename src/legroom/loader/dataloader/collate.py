"""``legroom.collate``: wraps a collate function so that its batches are sent in shared memory outside /dev/shm.

All of it happens in the collate function and in how its result is pickled. So it works for any loader that calls a
collate function in worker processes and sends the result through a multiprocessing queue: torch's, and those built on
it. In the main process it is the plain function, and so it is if other code in the worker takes the result.

torch has a table of how ``default_collate`` combines each type of sample. In a worker, its entry for tensors allocates
in /dev/shm. In workers alone, that entry is replaced by one that stacks directly into a slot, which also serves collate
functions that call ``default_collate``.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from legroom.errors import LoaderError, RaggedBatch
from legroom.loader.dataloader.admit_workers_by_memory import Admission, current_admission
from legroom.loader.dataloader.memory_slots import SENT, Slot, SlotPool, unsupported_reason
from legroom.loader.dataloader.receive import SentBatch
from legroom.loader.dataloader.resume import PlaceholderCollate, dataset_state_dict
from legroom.loader.dataloader.send import (  # fmt: skip
    SlotWriter,
    Span,
    bytes_needed,
    find_regions,
    is_plain,
    pickle_batch,
    stacked_bytes,
    write_regions,
)
from legroom.loader.dataloader.torch_internals import collate_call, current_fetcher, replace_tensor_collate
from legroom.messages import say
from legroom.system.argument_checks import check_arguments
from legroom.system.lazy_and_optional_imports import require
from legroom.system.processes_and_threads import legroom_disabled
from legroom.units import format_size, parse_size

if TYPE_CHECKING:
    import torch

Collate = Callable[[Any], Any]

_log = logging.getLogger("legroom")
_writer: SlotWriter | None = None  # of the batch that is being made; a worker makes one at a time


def collate(fn: Collate | None = None, *, memory_budget: int | str = "auto") -> Collate:
    """Wrap ``fn`` so that its batches do not use ``/dev/shm``, for any DataLoader.

    Where this system does not support it, or LEGROOM_DISABLE is set, the function is returned as it is.

    Args:
        fn: The collate function to wrap; None is torch's ``default_collate``.
        memory_budget: Limit for the batches on their way, of all workers of one iterator together: bytes, a string
            such as ``"256MB"``, or ``"auto"`` for what the machine and its cgroups leave free.
    """
    check_arguments(collate, locals(), ("memory_budget",))
    return wrap_collate(fn if fn is not None else default_collate(), memory_budget)


def default_collate() -> Collate:
    """torch's ``default_collate``."""
    found: Collate = require("torch.utils.data", "torch", "legroom.collate").default_collate
    return found


def wrap_collate(fn: Collate, memory_budget: int | str) -> Collate:
    """The function with the transport, once; the function itself where the transport is unavailable."""
    budget = parse_budget(memory_budget)
    if isinstance(fn, SlotCollate):
        fn = fn.fn
    return fn if arena_unavailable() is not None else SlotCollate(fn, budget)


def arena_unavailable() -> str | None:
    """Why torch sends the batches here, or None."""
    return say("LEGROOM_DISABLE is set") if legroom_disabled(os.environ) else unsupported_reason()


def parse_budget(memory_budget: int | str) -> int | None:
    """Bytes; None for ``"auto"``."""
    return None if memory_budget == "auto" else parse_size(memory_budget)


class SlotCollate:
    """A collate function whose result is sent to the training process in a slot."""

    def __init__(self, fn: Collate, budget: int | None = None) -> None:
        self.fn, self.budget = fn, budget
        # The loader's arguments that torch's class does not know: accelerate rebuilds loaders with that.
        self.share: dict[str, Any] | None = None
        self._pool: SlotPool | None = None
        self._pid = 0
        self._state_dict: Callable[[], Any] | None = None
        self._warned = False
        self._call: Any = None  # by torch's fetcher, known to have its result sent

    def __call__(self, samples: Any) -> Any:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is None or not self._is_sent(samples):
            return self.fn(samples)
        pool = self._pool
        if pool is None or self._pid != os.getpid():
            return self._first_batch(samples, info)
        return self._batch(samples, info, pool, pool.take(pool.expected) if pool.expected else None)

    def _is_sent(self, samples: Any) -> bool:
        """Whether torch's worker loop sends what this call returns.

        Other code that calls this function gets the plain batch. If that code is the loader's collate function, its own
        result is sent in a slot from the next batch on.
        """
        call = collate_call()
        if call is not None and call == self._call:
            return True
        found = current_fetcher(samples)
        if found is None:
            self._warn_once()
            return False
        fetcher, loaded = found
        outermost = fetcher.collate_fn
        if isinstance(outermost, PlaceholderCollate):
            outermost = outermost.fn
        if not isinstance(outermost, SlotCollate):
            fetcher.collate_fn = SlotCollate(outermost, self.budget)
        sent = loaded and outermost is self
        if sent and fetcher.collate_fn is self:
            self._call = call
        return sent

    def _warn_once(self) -> None:
        if self._warned:
            return
        self._warned = True
        _log.warning(
            say(
                "legroom.collate() was called by another function, which gets a plain batch: torch sends it through "
                "/dev/shm. To avoid that, put legroom.collate() around the outermost function"
            )
        )

    def _first_batch(self, samples: Any, info: Any) -> Any:
        """The first batch of this worker; where memory is low, other workers wait for what it shows."""
        pool, admission = self._start(info), current_admission()
        if admission is None:
            nbytes = self._expected(samples, pool)
            return self._batch(samples, info, pool, pool.take(nbytes) if nbytes else None)
        try:
            return self._measured_batch(samples, info, pool, admission)
        except LoaderError:
            pool.reset()
            self._pool = None  # the next batch is the first again, or is refused like this one
            raise

    def _measured_batch(self, samples: Any, info: Any, pool: SlotPool, admission: Admission) -> Any:
        admission.check()
        measured = info.id == 0 and admission.waiting
        if measured:
            admission.samples_loaded()
        else:
            admission.stop_monitor()
        nbytes = self._expected(samples, pool)
        count = len(samples) if isinstance(samples, (list, tuple)) else None
        slot = pool.take(nbytes) if nbytes else None
        if measured and nbytes and slot is None:  # to collate in private memory would take as much
            admission.decide(nbytes, count, sent=False)
        sent = self._batch(samples, info, pool, slot)
        if measured:
            admission.decide(pool.expected, count)
        pool.making = 0 if admission.measured is None else admission.measured.making
        return sent

    def _expected(self, samples: Any, pool: SlotPool) -> int:
        """The bytes of a first batch, if they are known: stacked into a slot, it is not in memory twice."""
        if self.fn is not default_collate() or not isinstance(samples, (list, tuple)) or not samples:
            return 0
        found = len(samples) * stacked_bytes(samples[0])
        return found if pool.allows(found) else 0

    def _batch(self, samples: Any, info: Any, pool: SlotPool, slot: Slot | None) -> Any:
        global _writer
        writer = _writer = SlotWriter(slot)
        try:
            batch = self.fn(samples)
        finally:
            _writer = None
        state = None if self._state_dict is None else self._dataset_state(info.id, samples)
        return to_send(batch, writer, pool, state)

    def _start(self, info: Any) -> SlotPool:
        """In a worker, before its first batch."""
        from torch.utils.data import IterableDataset

        replace_tensor_collate(_StackIntoSlot)
        self._pid = os.getpid()
        self._pool = SlotPool(self.budget, info.num_workers)
        # Only this process knows how far an IterableDataset has come.
        self._state_dict = dataset_state_dict(info.dataset) if isinstance(info.dataset, IterableDataset) else None
        Finalize(None, self._pool.close, exitpriority=0)  # runs when a process of multiprocessing ends
        return self._pool

    def _dataset_state(self, worker: int, samples: Any) -> tuple[int, bytes, int | None] | None:
        """The dataset's state, and the number of these samples.

        As bytes: the queue pickles in a thread, when the dataset may have moved on.
        """
        assert self._state_dict is not None
        try:
            count = len(samples) if isinstance(samples, list) else None
            return worker, pickle.dumps(self._state_dict()), count
        except Exception:  # its state cannot be saved: a resumed run skips batches instead
            self._state_dict = None
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return SlotCollate, (self.fn, self.budget)

    def __repr__(self) -> str:
        return f"legroom.collate({self.fn!r})"


def to_send(batch: Any, writer: SlotWriter, pool: SlotPool, state: Any) -> SentBatch:
    """The message for a batch, whose tensors and arrays are written to a slot; torch sends what fits in none."""
    skeleton, buffers = pickle_batch(batch)
    regions = find_regions(buffers.all)
    nbytes = bytes_needed(regions)
    pool.record(nbytes)
    spans: list[Span] | None = []
    if nbytes:
        spans = write_regions(buffers.all, regions, writer)
        if spans is None:  # the first batch, or one larger than those before it
            slot = pool.take(nbytes, outgrown=writer.slot is not None)
            writer = SlotWriter(slot)
            spans = write_regions(buffers.all, regions, writer) if slot is not None else None
    if spans is None:
        from multiprocessing.reduction import ForkingPickler

        pool.check_memory(nbytes)  # torch needs as much in /dev/shm
        note = pool.why or say("not enough memory for a slot of {size}", size=format_size(nbytes))
        return SentBatch(os.getpid(), -1, 0, [], bytes(ForkingPickler.dumps(batch)), True, note, state)
    if not spans or writer.slot is None:
        return SentBatch(os.getpid(), -1, 0, [], skeleton, buffers.by_torch, None, state)
    slot = writer.slot
    slot.state = SENT
    return SentBatch(os.getpid(), slot.fd, slot.id, spans, skeleton, buffers.by_torch, None, state)


class _StackIntoSlot:
    """Stacks tensors of one shape in the slot of the batch that is being made; anything else as torch does."""

    def __init__(self, otherwise: Callable[..., Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        import torch

        first = batch[0]
        if _writer is None or not is_plain(first) or first.requires_grad:
            return self._otherwise(batch, collate_fn_map=collate_fn_map)
        try:
            if type(first) is not torch.Tensor:  # a subclass may define its own stack
                return torch.stack(list(batch), 0)
            out = _writer.empty((len(batch), *first.shape), first.dtype)
            return torch.stack(list(batch), 0, out=out)
        except RuntimeError:
            shapes = sorted({tuple(sample.shape) for sample in batch})
            if len(shapes) < 2:
                raise
            files = first.dtype == torch.uint8 and first.ndim == 1  # rows of bytes, as of a tar archive
            decode = say(
                "if they are the bytes of files, decode each: {code}",
                code="data.dataset('jpg', decode={'jpg': read_image})",
            )
            raise RaggedBatch(
                say("the samples of a batch have different shapes and cannot be stacked"),
                why=say(
                    "{count} samples with {kinds} shapes: {shapes}",
                    count=len(batch), kinds=len(shapes), shapes=_some(shapes),
                ),
                fix=(
                    *((decode,) if files else ()),
                    say("pass a collate_fn that pads: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)"),
                    say("or give all samples one shape in the dataset"),
                ),
            ) from None  # fmt: skip


def _some(shapes: list[tuple[int, ...]]) -> str:
    shown = ", ".join(str(shape) for shape in shapes[:4])
    return shown + (", …" if len(shapes) > 4 else "")
