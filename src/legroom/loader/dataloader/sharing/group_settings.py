"""What makes two trainers members of one group: the name, the dataset, and the arguments that decide what a batch is.

A dataset is compared by its type, its length and three samples, made with fixed seeds. Digests of samples, batches and
functions are equal in different processes. Pickles would not do: their bytes depend on which strings happen to be one
object.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import select
import signal
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from legroom.errors import ShareMismatch, ShareUnsupported
from legroom.loader.dataloader.collate import SlotCollate
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
_CHILD_S = 180.0  # for three samples, of which the first may open files of a slow disk


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


def index_sampler(loader: Any) -> Any:
    """What decides the order: the batch sampler, or without automatic batching the sampler."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def own_collate(loader: Any) -> Any:
    """The loader's collate function, without the transport."""
    return loader.collate_fn.fn if isinstance(loader.collate_fn, SlotCollate) else loader.collate_fn


def settings_of(loader: Any, orders: Orders | None, seed: int, fresh: Any = None) -> dict[str, str]:
    """What must be equal, by the name of the argument.

    ``orders``: None for an IterableDataset. ``fresh``: a copy of the dataset that may be used in its place.
    """
    import torch

    sampler = index_sampler(loader)
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
        "collate_fn": describe(own_collate(loader)),
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
    """The result of a function in a forked child, as a worker is: files that the dataset opens are not open here.

    Where there is no child, or it has crashed, the function runs here.
    """
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads: workers are forked too
            pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return function()
    if pid == 0:
        try:
            os.write(writer, function().encode())
        finally:
            os._exit(0)
    os.close(writer)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    try:
        if not poll.poll(_CHILD_S * 1000):  # it would not end here either
            raise ShareUnsupported(
                say("batches cannot be shared: the dataset has not returned a sample"),
                why=say("trainers of a group compare {count} samples. A forked process did not load them in "
                        "{seconds:.0f} s", count=_SAMPLES, seconds=_CHILD_S),
                fix=(say("without share=, timeout=60 shows where a worker waits"),),
            )  # fmt: skip
        found = os.read(reader, 1 << 10).decode()
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


_DEPTH = 12


def leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """(path, digest) of every part of a value: ``["image"]``, ``[1][0]``."""
    import torch

    if depth > _DEPTH:
        yield path, _of(repr(type(value)).encode())
    elif isinstance(value, torch.Tensor):
        yield path, _tensor(value)
    elif isinstance(value, np.ndarray):
        yield path, _array(value)
    elif isinstance(value, Mapping):
        yield path, _of(repr((type(value).__qualname__, list(map(repr, value)))).encode())
        for key, one in value.items():
            yield from leaves(one, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        yield path, _of(f"{type(value).__qualname__} {len(value)}".encode())
        for number, one in enumerate(value):
            yield from leaves(one, f"{path}[{number}]", depth + 1)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield path, _of(f"{type(value).__qualname__} {value!r}".encode())
    else:
        yield path, _other(value, depth)


def digest(value: Any) -> str:
    """One digest of a whole value."""
    return _of(repr(list(leaves(value))).encode())


def describe(function: Any) -> str:
    """A text that is equal for equal functions, in different processes too."""
    if function is None:
        return "None"
    if isinstance(function, functools.partial):
        given = _of(repr([*leaves(list(function.args)), *leaves(dict(function.keywords))]).encode())
        return f"partial({describe(function.func)}, {given[:12]})"
    if isinstance(function, types.FunctionType):
        return (
            f"{function.__module__.replace('__mp_main__', '__main__')}.{function.__qualname__} {_code(function)[:12]}"
        )
    if isinstance(function, types.MethodType):
        return f"{describe(function.__func__)} of {describe(function.__self__)}"
    if isinstance(function, (type, types.BuiltinFunctionType)):
        return f"{function.__module__}.{function.__qualname__}"
    return f"{_type(function)} {digest(getattr(function, '__dict__', None))[:12]}"


def _code(function: types.FunctionType) -> str:
    """Of what a function does; two lambdas of one module have one name."""
    code = function.__code__
    values = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return _of(code.co_code + repr([one for one in code.co_consts if not isinstance(one, types.CodeType)]).encode()
               + repr([describe(one) if callable(one) else digest(one) for one in values]).encode())  # fmt: skip


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _tensor(value: Any) -> str:
    import torch

    about = f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return _of(about + pickle.dumps(value.detach()))
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _of(about + (plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""))


def _array(value: Any) -> str:
    about = f"{value.dtype.str} {value.shape}".encode()
    if value.dtype.hasobject:
        return _of(about + repr(list(leaves(value.ravel().tolist()))).encode())
    return _of(about + np.ascontiguousarray(value).tobytes())


def _other(value: Any, depth: int) -> str:
    """An object: an image by its pixels, others by their attributes."""
    kind = _type(value)
    if callable(pixels := getattr(value, "tobytes", None)) and hasattr(value, "size"):
        return _of(f"{kind} {getattr(value, 'mode', '')} {value.size}".encode() + pixels())
    if callable(value):
        return _of(describe(value).encode())
    state = getattr(value, "__dict__", None)
    if state:
        return _of(f"{kind} {list(leaves(state, '', depth + 1))!r}".encode())
    try:
        return _of(kind.encode() + pickle.dumps(value))
    except Exception:
        return _of(kind.encode())
