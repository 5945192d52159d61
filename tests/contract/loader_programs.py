"""Small programs that use a DataLoader as torch's documentation describes; each is run with either class.

A program takes the class and returns what it saw. Datasets and functions are at the top level, so that spawn can send
them. What a program gives is compared by ``test_contract_dataloader.py``: values, exceptions, warnings, random state.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import random
import re
import threading
import traceback
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import data

PROGRAMS: dict[str, Callable[[Any], Any]] = {}
Pair = namedtuple("Pair", ["x", "y"])


def program(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    PROGRAMS[run.__name__] = run
    return run


def outcome(run: Callable[[Any], Any], kind: Any) -> dict[str, Any]:
    """What came of a program: its result or its exception, its warnings, and the state of each random generator."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    came: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            came["result"] = run(kind)
        except Exception as problem:
            came["raised"] = told(problem)
    gc.collect(1)  # torch's own iterator is in a cycle with its exception, and its workers would last until then
    came["warnings"] = sorted(
        {(one.category.__name__, str(one.message)) for one in said if "multi-threaded" not in str(one.message)}
    )
    came["torch"], came["random"] = torch.get_rng_state(), random.getstate()
    came["numpy"] = np.random.get_state()[1:]
    return came


def told(problem: BaseException) -> dict[str, Any]:
    """An exception as a user sees it: type, first and last line, and which functions of this file are in the traceback."""
    lines = str(problem).splitlines() or [""]
    text = "".join(traceback.format_exception(problem))
    here = [line.split(" in ")[-1] for line in text.splitlines() if line.startswith("  File") and __file__ in line]
    first = re.sub(r" \[[a-z-]+\]$", "", lines[0])  # the code of an error of Legroom's
    return {"types": [one.__name__ for one in type(problem).__mro__ if one.__module__ == "builtins"],
            "first": first, "last": lines[-1] if "Traceback" in str(problem) else "", "frames": here}  # fmt: skip


def caught(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as problem:
        return told(problem)


class Numbers(data.Dataset[Any]):
    def __init__(self, count: int = 11) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: Any) -> Any:
        return torch.tensor([float(i), i * i])


class Given(data.Dataset[Any]):
    """The samples of a list."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        return self.rows[i]


class Calls(Numbers):
    """Row i is what ``fn(i)`` returns."""

    def __init__(self, fn: Callable[[Any], Any], count: int = 6) -> None:
        super().__init__(count)
        self.fn = fn

    def __getitem__(self, i: Any) -> Any:
        return self.fn(i)


class Shards(data.IterableDataset[Any]):
    """The documentation's example: each worker iterates over a range of its own."""

    def __init__(self, start: int = 0, end: int = 13) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        if info is None:
            return iter(range(self.start, self.end))
        each = -(-(self.end - self.start) // info.num_workers)
        first = self.start + info.id * each
        return iter(range(first, min(first + each, self.end)))


class Copies(data.IterableDataset[Any]):
    """Every worker gives everything."""

    def __init__(self, count: int = 5, length: int | None = None) -> None:
        self.count, self.length = count, length

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.count)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length


class IterRaises(data.IterableDataset[Any]):
    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[Any]:
        for i in range(6):
            if i == self.at:
                raise ValueError(f"no row {i}")
            yield i


class NoIter(data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise OSError(2, "no such shard", "shard-0")


class Halves(data.Sampler[Any]):
    """A sampler without a length, with its own order."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from range(0, self.count, 2)
        yield from range(1, self.count, 2)


class Raising(data.Sampler[Any]):
    def __init__(self, at: int, length: Any = None) -> None:
        self.at, self.length = at, length

    def __iter__(self) -> Iterator[int]:
        for i in range(6):
            if i == self.at:
                raise LookupError(f"the sampler stops at {i}")
            yield i

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the sampler's length is not known")
        return int(self.length)


class Batches:
    """A batch sampler: batches of 1, 2, 3 rows."""

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(range(9))
        for size in (1, 2, 3, 1):
            yield list(itertools.islice(rows, size))

    def __len__(self) -> int:
        return 4


@dataclass
class Record:
    x: torch.Tensor
    name: str


class PinnedBatch:
    """The documentation's batch type with a pin_memory method."""

    def __init__(self, samples: Any) -> None:
        self.inp, self.pins = torch.stack(list(samples)), 0

    def pin_memory(self) -> PinnedBatch:
        self.pins += 1
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PinnedBatch) and self.inp.equal(other.inp) and self.pins == other.pins


class NeedsTwo(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class Unsendable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fail(i: Any) -> Any:
    if i == 3:
        raise ValueError("row 3 is broken\nand says so on two lines")
    return float(i)


def fail_key(i: Any) -> Any:
    return {"a": 1}["b"] if i == 3 else float(i)


def fail_two(i: Any) -> Any:
    if i == 3:
        raise NeedsTwo(7, "of the user's own type")
    return float(i)


def fail_lock(i: Any) -> Any:
    if i == 3:
        raise Unsendable("with a lock in it")
    return float(i)


def fail_chained(i: Any) -> Any:
    try:
        return fail_key(i)
    except KeyError as problem:
        raise RuntimeError("the row could not be read") from problem


def stop_early(i: Any) -> Any:
    if i == 3:
        raise StopIteration("no more")
    return float(i)


def seeds(i: Any) -> Any:
    info = data.get_worker_info()
    seed = -1 if info is None else info.seed
    return i, seed, torch.initial_seed(), random.random(), float(np.random.rand()), torch.rand(2)


def where(i: Any) -> Any:
    info = data.get_worker_info()
    return (i, -1, 0, 0) if info is None else (i, info.id, info.num_workers, torch.get_num_threads())


def environment(i: Any) -> Any:
    return i, os.environ.get("PROGRAM_STARTED", "no")


def keep(samples: Any) -> Any:
    return samples


def nothing(samples: Any) -> None:
    return None


def broken_collate(samples: Any) -> Any:
    raise IndexError("collate cannot")


def seed_worker(worker: int) -> None:
    """The documentation's, on reproducibility."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def mark(worker: int) -> None:
    os.environ["PROGRAM_STARTED"] = f"worker {worker}"


def broken_init(worker: int) -> None:
    raise OSError(f"worker {worker} has no disk")


def double(i: Any) -> Any:
    return Pair(i, [np.float32(i), f"{i}"])


def tensors(samples: Any) -> Any:
    base = torch.arange(40.0).view(5, 8) + len(samples)
    return {"view": base[1], "base": base, "t": base.t(), "half": base.half(), "none": None, "n": 3,
            "0d": torch.tensor(4), "bits": base > 3, "inf": torch.tensor([float("nan")]).isnan()}  # fmt: skip


def maps(i: Any) -> Any:
    return OrderedDict(z=i, a=defaultdict(int, k=i), s={"b": b"x" * i})


def odd_lists(i: Any) -> Any:
    return [1] * (1 + i % 2)


def odd_keys(i: Any) -> Any:
    return {"a": i} if i < 2 else {"b": i}


def inner_loader(i: Any) -> Any:
    return next(iter(data.DataLoader(Numbers(4), batch_size=2))) + i


def a_dataclass(i: Any) -> Any:
    return Record(torch.ones(2), "x")


def a_set(i: Any) -> Any:
    return {i}


def text_array(i: Any) -> Any:
    return np.array(["a", "b"])


def objects(i: Any) -> Any:
    return np.array([None, i], object)


def at_random(i: Any) -> Any:
    return i, torch.randint(0, 1000, (2,))


# Samplers


def over(name: str, dataset: Any, passes: int = 1, **options: Any) -> None:
    """A program that goes over a loader; the options may be made by a function of no arguments, for each class anew."""

    def run(kind: Any) -> Any:
        made = {key: value() if isinstance(value, partial) else value for key, value in options.items()}
        loader = kind(dataset() if isinstance(dataset, partial) else dataset, **made)
        return [list(loader) for _ in range(passes)]

    run.__name__ = name
    program(run)


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


W = {"num_workers": 2}
over("random_sampler_with_replacement", Numbers(), 2, sampler=partial(data.RandomSampler, range(11), True, 8), **W)
over("weighted_without_replacement", Numbers(), 2,
     sampler=partial(data.WeightedRandomSampler, [0.1, 0.9, 0.4, 0.7], 3, replacement=False), **W)  # fmt: skip
over("batch_sampler_as_sampler", Given(torch.arange(12).view(6, 2)), batch_size=None,
     sampler=data.BatchSampler(data.SequentialSampler(range(6)), 4, False), **W)  # fmt: skip
over("batch_sampler_of_any_sizes", Numbers(), 2, batch_sampler=Batches(), **W)
over("batch_sampler_gives_an_empty_batch", Numbers(), batch_sampler=[[0, 1], [], [2]], **W)
over("sampler_without_length", Numbers(), sampler=Halves(7), batch_size=2, **W)
over("sampler_of_text", Given({"a": 1.5, "b": 2.5}), sampler=["b", "a", "b"], batch_size=2, **W)
over("sampler_of_tensors", Numbers(), sampler=partial(torch.randperm, 5), batch_size=2, **W)
over("sampler_of_numpy_numbers", Numbers(), sampler=np.arange(5)[::-1], batch_size=2, **W)
over("sampler_of_tuples", Calls(keep), sampler=[(1, 224), (2, 192)], batch_size=1, collate_fn=keep, **W)
over("row_beyond_the_end", Given([1, 2, 3]), sampler=[0, 7], **W)
over("shuffle_by_a_generator_here", Numbers(), 3, shuffle=True, generator=partial(seeded, 5))
over("shuffle_by_the_global_generator", Numbers(), 2, shuffle=True, drop_last=True, batch_size=4, **W)
for workers in (0, 2):
    for at in (0, 3):
        over(f"sampler_raises_at_{at}_{workers}", Numbers(), sampler=Raising(at), batch_size=2, num_workers=workers)
    for fn in (fail, fail_key, fail_two, fail_lock, fail_chained, stop_early):
        over(f"dataset_{fn.__name__}_{workers}", Calls(fn), batch_size=2, num_workers=workers)
    for fn in (odd_lists, odd_keys, a_dataclass, a_set, text_array, objects):
        over(f"collate_of_{fn.__name__}_{workers}", Calls(fn), batch_size=3, num_workers=workers)
    over(f"collate_raises_{workers}", Numbers(), batch_size=2, collate_fn=broken_collate, num_workers=workers)
    over(f"iterable_raises_{workers}", IterRaises(3), batch_size=2, num_workers=workers)
    over(f"iterable_has_no_iterator_{workers}", NoIter(), batch_size=2, num_workers=workers)
    over(f"no_rows_{workers}", Numbers(0), batch_size=2, num_workers=workers)
    over(f"nothing_to_iterate_{workers}", Copies(0), batch_size=2, num_workers=workers)
    over(f"iterable_too_long_{workers}", Copies(5, length=3), batch_size=2, num_workers=workers)
    over(f"seeds_{workers}", Calls(seeds), 2, num_workers=workers)
    over(f"seeds_of_a_generator_{workers}", Calls(seeds), 2, num_workers=workers, generator=partial(seeded, 2),
         shuffle=True, worker_init_fn=seed_worker)  # fmt: skip
    over(f"tensors_that_share_memory_{workers}", Numbers(3), 1, collate_fn=tensors, num_workers=workers)
    over(f"pin_memory_of_a_users_type_{workers}", Numbers(4), batch_size=2, collate_fn=PinnedBatch, pin_memory=True,
         num_workers=workers)  # fmt: skip
over("init_raises", Numbers(), worker_init_fn=broken_init, **W)
over("timeout_that_does_not_come", Numbers(), 2, timeout=60, **W)

# Datasets

over("concat", data.ConcatDataset([Numbers(3), Numbers(4)]), 1, shuffle=True, **W)
over("random_split", partial(lambda: data.random_split(Numbers(), [0.5, 0.5])[1]), batch_size=2, **W)
over("chain", data.ChainDataset([Copies(3), Copies(2)]), batch_size=2, num_workers=2)
over("a_list", [1, 2.5, 3], batch_size=2, **W)
over("shards", Shards(), 2, batch_size=2, **W)
over("shards_of_one", Shards(0, 2), 2, batch_size=2, num_workers=3)
over("shards_dropped_last", Shards(), batch_size=4, drop_last=True, **W)
over("copies", Copies(), batch_size=2, **W)
over("copies_one_by_one", Copies(), batch_size=None, **W)
over("shards_in_lasting_workers", Shards(), 3, batch_size=2, persistent_workers=True, **W)
over("rows_in_lasting_workers", Calls(seeds), 3, batch_size=2, persistent_workers=True, shuffle=True, **W)
over("where_lasting_workers_make_rows", Calls(where), 3, persistent_workers=True, worker_init_fn=mark, **W)
over("a_loader_in_a_worker", Calls(inner_loader), batch_size=2, **W)
over("where_rows_are_made", Calls(where), batch_size=2, num_workers=3, prefetch_factor=1)
over("environment_of_a_worker", Calls(environment), worker_init_fn=mark, num_workers=1)

# Batches

over("collate_to_nothing", Numbers(), batch_size=3, collate_fn=nothing, **W)
over("collate_keeps", Calls(double), batch_size=3, collate_fn=keep, **W)
over("namedtuples", Calls(double), batch_size=3, **W)
over("mappings", Calls(maps), batch_size=3, **W)
over("pin_memory", Calls(maps), batch_size=3, pin_memory=True, **W)

# Settings

over("by_a_context", Calls(where, 3), num_workers=1,
     multiprocessing_context=partial(torch.multiprocessing.get_context, "fork"))  # fmt: skip
for name, wrong in {
    "context": {"multiprocessing_context": "fork"}, "shuffled_stream": {"shuffle": True}, "sampled_stream": {"sampler": [1]},
    "batches_of_stream": {"batch_sampler": [[1]]}, "in_order_text": {"num_workers": 1, "multiprocessing_context": 5},
    "drop_last_of_batches": {"batch_sampler": [[1]], "drop_last": True}, "timeout": {"timeout": -2.5},
    "unknown": {"colour": "red"}, "batch_text": {"batch_size": "4"},
}.items():  # fmt: skip
    over(f"refused_{name}", Shards() if "stream" in name else Numbers(), **wrong)


@program
def in_any_order(kind: Any) -> Any:
    return sorted(int(one[0]) for one in kind(Calls(where), num_workers=2, in_order=False))


@program
def lengths(kind: Any) -> Any:
    made = [kind(Numbers(), 4), kind(Numbers(), 4, drop_last=True), kind(Numbers(), batch_size=None),
            kind(Numbers(), batch_sampler=Batches()), kind(Copies(5, length=9), 4), kind(Numbers(), 2, sampler=Raising(0, 4))]  # fmt: skip
    return (
        [len(one) for one in made]
        + [caught(lambda: len(kind(Shards(), 2)))]
        + [caught(lambda: len(kind(Numbers(), 2, sampler=Raising(0))))]
    )


@program
def attributes(kind: Any) -> Any:
    made = kind(Numbers(), 4, num_workers=2, prefetch_factor=3, timeout=7, pin_memory=False)
    plain = [made.batch_size, made.num_workers, made.prefetch_factor, made.timeout, made.pin_memory, made.drop_last,
             made.persistent_workers, type(made.sampler), type(made.batch_sampler), made.generator, made.worker_init_fn,
             made.multiprocessing_context, type(made.dataset), isinstance(made, data.DataLoader)]  # fmt: skip
    refused = [
        caught(partial(setattr, made, name, 1))
        for name in ("batch_size", "sampler", "drop_last", "dataset", "persistent_workers")
    ]
    return (
        plain,
        refused,
        [caught(partial(setattr, made, "multiprocessing_context", wrong)) for wrong in ("no such", 5)],
    )


@program
def left_early(kind: Any) -> Any:
    loader = kind(Numbers(), 2, shuffle=True, num_workers=2)
    got = []
    for _ in range(3):
        for batch in loader:
            got.append(batch)
            break
    return got, list(loader)


@program
def left_early_with_lasting_workers(kind: Any) -> Any:
    loader = kind(Calls(seeds), 2, shuffle=True, num_workers=2, persistent_workers=True)
    return [list(itertools.islice(loader, count)) for count in (1, 2, 3, 0, 3)]


@program
def only_begun(kind: Any) -> Any:
    iter(kind(Numbers(), 2, shuffle=True, num_workers=2))
    return torch.rand(2)


@program
def loop_in_a_loop(kind: Any) -> Any:
    loader = kind(Numbers(4), 2, shuffle=True, num_workers=1)
    return [(outer, inner) for outer in loader for inner in loader]


@program
def two_iterators_by_turns(kind: Any) -> Any:
    loader = kind(Numbers(), 3, shuffle=True, num_workers=2, generator=seeded(4))
    one, other = iter(loader), iter(loader)
    return [next(one), next(other), next(other), next(one), list(one), list(other)]


@program
def two_iterators_of_lasting_workers(kind: Any) -> Any:
    loader = kind(Numbers(), 3, num_workers=2, persistent_workers=True)
    one = iter(loader)
    first = next(one)
    other = iter(loader)
    return first, next(other), list(one), list(other)


@program
def beyond_the_end(kind: Any) -> Any:
    got = []
    for workers in (0, 2):
        iterator = iter(kind(Numbers(2), 2, num_workers=workers))
        got.append([next(iterator), next(iterator, "end"), next(iterator, "still")])
    return got


@program
def failures_do_not_end_the_pass(kind: Any) -> Any:
    got = []
    for workers in (0, 2):
        iterator = iter(kind(Calls(fail), 1, num_workers=workers))
        got += [caught(partial(next, iterator, "end")) for _ in range(8)]
    return got


@program
def passes_after_a_failure(kind: Any) -> Any:
    dataset = Calls(fail)
    loader = kind(dataset, 2, num_workers=2, persistent_workers=True)
    return [caught(lambda: list(loader)) for _ in range(2)] + [list(itertools.islice(loader, 1))]


@program
def copies_of_a_loader(kind: Any) -> Any:
    loader = kind(Numbers(), 4, shuffle=True, num_workers=1, generator=seeded(1), worker_init_fn=mark)
    others = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    return [list(one) for one in others], list(loader)


@program
def iterators_cannot_be_copied(kind: Any) -> Any:
    found = []
    for workers in (0, 1):
        iterator = iter(kind(Numbers(), num_workers=workers))
        found += [caught(partial(how, iterator)) for how in (copy.copy, copy.deepcopy, pickle.dumps)]
    return found


@program
def settings_changed_between_passes(kind: Any) -> Any:
    loader = kind(Calls(environment), 2, num_workers=2)
    got = [list(loader)]
    loader.worker_init_fn = mark
    loader.collate_fn = keep
    got.append(sorted(len(batch) for batch in loader))
    loader.num_workers, loader.timeout = 0, 0
    return [*got, list(loader)]


@program
def a_users_subclass(kind: Any) -> Any:
    class Mine(kind):  # type: ignore[misc]
        def __init__(self, *given: Any, factor: int, **named: Any) -> None:
            self.factor = factor
            super().__init__(*given, **named)

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch * self.factor

        def __len__(self) -> int:
            return 7

    loader = Mine(Numbers(), 4, factor=3, num_workers=2)
    return len(loader), list(loader), list(loader)


@program
def all_arguments_by_place(kind: Any) -> Any:
    return list(kind(Numbers(), 2, False, None, None, 1, keep, False, True, 0, mark, None, seeded(3)))


@program
def in_a_thread(kind: Any) -> Any:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(caught(lambda: list(kind(Calls(fail), 2, num_workers=1)))))
    thread.start()
    thread.join()
    return got


@program
def a_batch_changed_by_its_owner(kind: Any) -> Any:
    got = []
    for batch in kind(Numbers(), 2, num_workers=1):
        batch += 1
        batch.requires_grad_()
        got.append((batch * 2).sum().item())
    return got


@program
def batches_kept_for_later(kind: Any) -> Any:
    kept = list(kind(Numbers(), 1, num_workers=2, prefetch_factor=4))
    return torch.cat(kept).sum(), [one.clone() for one in kept]


@program
def another_sharing_strategy(kind: Any) -> Any:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return list(kind(Calls(double), 2, num_workers=1))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@program
def a_default_type(kind: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return list(kind(Calls(fail, 2), 2, num_workers=1)), list(kind(Numbers(3), 2, num_workers=1))
    finally:
        torch.set_default_dtype(torch.float32)


@program
def a_collate_function_of_a_users_type(kind: Any) -> Any:
    from torch.utils.data._utils.collate import collate, default_collate_fn_map

    def whole(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return ["mine", len(batch)]

    table = {Record: whole, **default_collate_fn_map}
    return list(kind(Calls(a_dataclass), 3, num_workers=1, collate_fn=partial(collate, collate_fn_map=table)))


@program
def many_workers(kind: Any) -> Any:
    return type(kind(Numbers(), num_workers=500)).__name__


@program
def a_loop_over_an_endless_sampler(kind: Any) -> Any:
    return list(itertools.islice(kind(Numbers(), 2, sampler=itertools.cycle([1, 2, 3]), num_workers=2), 5))


@program
def text_of_a_loader(kind: Any) -> Any:
    text = repr(kind(Numbers(), 2))
    return text.split(".")[-1].split(" ")[0]
