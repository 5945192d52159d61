"""What makes two trainers members of one group: the name, the dataset, and the arguments that decide what a batch is.

A dataset is compared by its type, its length and three samples, made with fixed seeds. Equal datasets of different
processes do not have equal pickles.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from legroom.errors import ShareMismatch
from legroom.loader.dataloader.collate import SlotCollate
from legroom.loader.dataloader.sharing.digest_equal_in_any_process import describe, digest
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import (
    Orders,
    generators_restored,
    like_a_worker,
    samplers,
    seed_generators,
)
from legroom.loader.measure_process_memory import start_method
from legroom.loader.rank_sampler import process_group, rank_and_world
from legroom.messages import say
from legroom.version import VERSION

_SAMPLE_SEED, _SAMPLES = 7, 3
_CHILD_S = 60.0  # for three samples


def group_key(name: str, sampler: Any, *, stream: bool = False) -> str:
    """The name of the group's files: a group for each rank of a distributed run.

    The ranks of a sampler are those of the attributes that DistributedSampler and accelerate's BatchSamplerShard have.
    Without a sampler that knows them, the ranks of a stream are those of torch.distributed or the launcher.
    """
    for one in samplers(sampler):
        for names in (("rank", "num_replicas"), ("process_index", "num_processes")):
            rank, world = (getattr(one, attribute, None) for attribute in names)
            if isinstance(rank, int) and isinstance(world, int):
                return _hash((name, rank, world))
    if stream:
        rank, world = rank_and_world(None, None, os.environ, process_group())
        if world > 1:
            return _hash((name, rank, world))
    return _hash((name,))


def _hash(key: tuple[object, ...]) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:24]


def settings_of(loader: Any, orders: Orders | None, seed: int, fresh: Any = None) -> dict[str, str]:
    """What must be equal, by the name of the argument.

    ``orders``: None for an IterableDataset. ``fresh``: a copy of the dataset that may be used in its place.
    """
    import torch

    collate = loader.collate_fn.fn if isinstance(loader.collate_fn, SlotCollate) else loader.collate_fn
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    inner = getattr(sampler, "sampler", sampler)
    dataset = loader.dataset
    forks = fresh is None and start_method(loader.multiprocessing_context) == "fork"
    stream = {"num_workers": str(loader.num_workers)} if orders is None else {}  # each loads a share of a stream
    return {
        "dataset": f"{_type(dataset)} of {_length(dataset)}",
        "batch_size": str(loader.batch_size),
        "drop_last": str(loader.drop_last),
        "sampler": _type(inner),
        "batch_sampler": _type(sampler),
        "generator": f"seed {seed}",
        "collate_fn": describe(collate),
        "worker_init_fn": describe(loader.worker_init_fn),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "samples": _in_child(partial(samples_digest, dataset)) if forks else samples_digest(fresh or dataset),
        "order": "" if orders is None else orders.of(0).digest[:16],
        "legroom": VERSION,
        "torch": torch.__version__,
        **stream,
    }


def samples_digest(dataset: Any) -> str:
    """A digest of the first sample, the one in the middle and the last; of the first three of an IterableDataset."""
    from torch.utils.data import IterableDataset

    length, found = _length(dataset), []
    with generators_restored(), like_a_worker():
        if isinstance(dataset, IterableDataset):
            seed_generators(_SAMPLE_SEED)
            found = [digest(one) for one in islice(dataset, _SAMPLES)]
        else:
            for index in sorted({0, length // 2, max(0, length - 1)} if length else set()):
                seed_generators(_SAMPLE_SEED)
                try:
                    found.append(digest(dataset[index]))
                except Exception as problem:  # a dataset whose keys are not numbers, or that fails for this one
                    found.append(type(problem).__qualname__)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _in_child(function: Callable[[], str]) -> str:
    """The result of a function in a forked child, as a worker is: files that the dataset opens are not open here."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in programs with threads: workers are forked too
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, function().encode())
        finally:
            os._exit(0)
    os.close(writer)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    try:
        found = os.read(reader, 1 << 10).decode() if poll.poll(_CHILD_S * 1000) else ""
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)  # it has ended, or hangs
        os.waitpid(pid, 0)
    return found or function()


def check_same(name: str, group: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Raise ShareMismatch if a setting of this trainer differs from the group's."""
    names = [one for one in {**group, **mine} if group.get(one) != mine.get(one)]
    if not names:
        return
    first = names[0]
    raise ShareMismatch(
        say("share={name!r}: {argument} differs from the group's", name=name, argument=first),
        why="\n".join(
            say("{argument}: the group has {group}, this trainer {mine}", argument=one, group=group.get(one),
                mine=mine.get(one))
            for one in names
        ),
        fix=(
            say("give all trainers of the group the same dataset and arguments"),
            say("or another name for this one: share={name!r}", name=f"{name}-2"),
        ),
    )  # fmt: skip


def _type(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".replace("__mp_main__", "__main__")


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
