"""legroom.DataLoader: resuming, memory budget, transport, errors, compatibility with torch's class."""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_admissions import record_admissions

import legroom
from legroom.cache.store_free_space import Bound
from legroom.errors import BadArgument, BadSize, BudgetTooSmall, RaggedBatch, Unpicklable, UsageError
from legroom.loader.dataloader import admit_workers_by_memory, dataloader, memory_slots, receive
from legroom.loader.dataloader.collate import SlotCollate
from legroom.loader.measure_process_memory import FreeMemory
from open_descriptors import open_descriptors

torch = pytest.importorskip("torch")
import loader_samples as samples  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork"),
]


@pytest.fixture
def earlier() -> set[int | None]:
    """The child processes that other tests have left."""
    return children()


@pytest.fixture
def _long_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits a minute, not 5 s, for each worker that does not answer: no busy machine is as slow.

    It sends SIGTERM to those that have not ended by then, and does not wait for them.
    """
    gc.collect()  # iterators that other tests left in cycles are not waited for with this interval
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60.0)


def children() -> set[int | None]:
    return {one.pid for one in multiprocessing.active_children()}


def numbers(batches: Any) -> list[list[int]]:
    return [[int(value) for value in batch.reshape(-1)] for batch in batches]


def shuffled(dataset: Any = None, **options: Any) -> Any:
    given = {"batch_size": 3, "shuffle": True, "num_workers": 2, **options}
    return legroom.DataLoader(dataset or samples.Rows("int"), **given)


# Resuming.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own", [True, False], ids=["own generator", "torch's generator"])
@pytest.mark.parametrize("stop", [0, 1, 5, 8])
def test_a_resumed_epoch_has_the_same_batches(workers: int, own: bool, stop: int) -> None:
    def make(seed: int) -> Any:
        return shuffled(num_workers=workers, generator=torch.Generator().manual_seed(seed) if own else None)

    torch.manual_seed(11)
    whole = make(5)
    epochs = [numbers(whole), numbers(whole)]
    torch.manual_seed(11)
    broken = make(5)
    iterator = iter(broken)
    first = numbers(itertools.islice(iterator, stop))
    state, rng = broken.state_dict(), torch.get_rng_state()
    del iterator
    torch.manual_seed(99)
    torch.set_rng_state(rng)  # as a checkpoint of the whole program does
    resumed = make(77)
    resumed.load_state_dict(state)
    assert first + numbers(resumed) == epochs[0]
    if own:  # torch's own generator is the program's: where it stands then is not ours to say
        assert numbers(resumed) == epochs[1]


def test_no_used_sample_is_loaded_again() -> None:
    class Counting(samples.Rows):
        drawn: list[int] = []  # noqa: RUF012

        def __getitem__(self, i: int) -> Any:
            self.drawn.append(i)
            return super().__getitem__(i)

    dataset = Counting("int")
    loader = legroom.DataLoader(dataset, 3, shuffle=True)
    before = numbers(itertools.islice(loader, 4))
    state = loader.state_dict()
    dataset.drawn.clear()
    loader.load_state_dict(state)
    after = numbers(loader)
    assert list(itertools.chain(*after)) == dataset.drawn
    assert sorted(itertools.chain(*before, *after)) == list(range(23))


def test_a_state_survives_torch_save_and_a_second_stop(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    expected = numbers(shuffled(generator=torch.Generator().manual_seed(4)))
    loader, got = shuffled(generator=generator), []
    for _ in range(3):
        iterator = iter(loader)
        got += numbers(itertools.islice(iterator, 2))
        torch.save(loader.state_dict(), tmp_path / "state")
        loader = shuffled(generator=torch.Generator())
        loader.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        assert loader.state_dict()["yielded"] == len(got)
    assert got + numbers(loader) == expected


def test_resuming_with_smaller_batches_repeats_no_sample() -> None:
    loader = legroom.DataLoader(samples.Rows("scalar tensor"), 4, shuffle=True)
    before = numbers(itertools.islice(loader, 2))
    smaller = legroom.DataLoader(samples.Rows("scalar tensor"), 2, shuffle=True)
    smaller.load_state_dict(loader.state_dict())
    assert smaller.state_dict()["yielded"] == 4
    after = numbers(smaller)
    assert {len(batch) for batch in after[:-1]} == {2}
    assert sorted(itertools.chain(*before, *after)) == sorted(itertools.chain(*numbers(loader)))
    with pytest.raises(UsageError, match="cannot resume with batch_size=3"):
        legroom.DataLoader(samples.Rows("scalar tensor"), 3).load_state_dict({**loader.state_dict(), "yielded": 2})


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_sampler": [[1, 2], [3], [4, 5]]}], ids=str)
def test_resuming_other_samplers(options: dict[str, Any]) -> None:
    make = lambda: legroom.DataLoader(samples.Rows("scalar tensor"), num_workers=2, **options)  # noqa: E731
    loader = make()
    before = numbers(itertools.islice(loader, 2))
    again = make()
    again.load_state_dict(loader.state_dict())
    assert before + numbers(again) == numbers(make())


@pytest.mark.parametrize("dataset", [samples.Stream, samples.Remembering], ids=["skipping", "by its own state"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [2, 4])
def test_resuming_an_iterable_dataset(dataset: Any, workers: int, stop: int) -> None:
    make = lambda: legroom.DataLoader(dataset(), 2, num_workers=workers, persistent_workers=False)  # noqa: E731
    loader = make()
    iterator = iter(loader)
    before = numbers(itertools.islice(iterator, stop))
    state = loader.state_dict()
    del iterator
    assert bool(state["workers"]) == (dataset is samples.Remembering)
    again = make()
    again.load_state_dict(state)
    assert before + numbers(again) == numbers(make())
    assert numbers(again) == numbers(make())  # the next epoch is a whole one


def test_a_state_between_epochs() -> None:
    loader = shuffled(generator=torch.Generator().manual_seed(1))
    first = numbers(loader)
    state = loader.state_dict()
    second = numbers(loader)
    other = shuffled(generator=torch.Generator())
    other.load_state_dict(state)
    assert state["yielded"] == 0 and numbers(other) == second != first


@pytest.mark.parametrize("state", [{}, {"version": 99, "yielded": 1, "generators": {}}, {"version": 1}])
def test_another_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not the state of"):
        shuffled().load_state_dict(state)


# Budgets and transport.


def test_memory_budget_is_parsed_and_pickled() -> None:
    loader = legroom.DataLoader(samples.Rows(), 4, num_workers=2, memory_budget="64KB")
    assert sum(batch.sum() for batch in loader) == sum(samples.Rows()[i].sum() for i in range(23))
    assert pickle.loads(pickle.dumps(loader)).memory_budget == "64KB"  # also after it was used
    with pytest.raises(BadSize):
        legroom.DataLoader(samples.Rows(), memory_budget="much")


def test_a_budget_below_one_batch_is_an_error_in_the_consumer() -> None:
    with pytest.raises(BudgetTooSmall, match="2 workers × 4 KB per batch"):
        list(legroom.DataLoader(samples.Rows(), 4, num_workers=2, memory_budget=100))


@pytest.mark.usefixtures("_long_join")
def test_an_error_of_a_worker_leaves_no_process_behind(earlier: set[int | None]) -> None:
    gc.disable()  # nobody need collect anything
    try:
        with contextlib.suppress(BudgetTooSmall):
            list(legroom.DataLoader(samples.Rows(), 4, num_workers=2, memory_budget=100))
        assert not children() - earlier
    finally:
        gc.enable()


@pytest.mark.usefixtures("_long_join")
def test_a_tight_budget_does_not_slow_down_leaving_early() -> None:
    started = time.monotonic()
    for _ in range(3):
        loader = legroom.DataLoader(samples.Rows(), 2, num_workers=1, prefetch_factor=6, memory_budget=4096)
        iterator = iter(loader)
        kept = next(iterator)
        time.sleep(0.2)  # the worker has filled its one slot and waits
        del iterator
    assert kept.sum() == 12
    assert time.monotonic() - started < 55


def test_transport_and_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert legroom.DataLoader(samples.Rows(), 4).transport == "none"
    loader = legroom.DataLoader(samples.Rows(), 4, num_workers=1)
    assert loader.transport == "arena" and isinstance(loader.collate_fn, SlotCollate)
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    monkeypatch.setattr(dataloader, "_reported", set())
    with caplog.at_level(logging.WARNING, "legroom"):
        for _ in range(2):
            off = legroom.DataLoader(samples.Rows(), 4, num_workers=1)
    assert off.transport == "torch" and "LEGROOM_DISABLE" in off.why and len(caplog.records) == 1
    assert off.collate_fn is torch.utils.data.default_collate
    assert len(list(off)) == 6
    assert legroom.collate(samples.custom) is samples.custom


def test_without_memfd_torch_sends_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    loader = legroom.DataLoader(samples.Rows(), 4, num_workers=1)
    assert loader.transport == "torch" and "memfd" in loader.why and len(list(loader)) == 6


def test_a_batch_without_memory_for_a_slot_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_slots, "memory_bounds", lambda: [Bound(10, lambda: "10 B are left", memory=True)])
    monkeypatch.setattr(memory_slots, "_SLOT_WAIT_S", 0.05)  # for every batch
    loader = legroom.DataLoader(samples.Remembering(), 4, num_workers=1, multiprocessing_context="fork")
    total, states = 0, []
    for batch in loader:
        total += int(batch.sum())
        states.append(loader.state_dict()["workers"])
    assert total == 3 * sum(range(23))
    assert (loader.transport, loader.why) == ("torch", "10 B are left")
    assert all(states[:-1])  # its dataset's state came along


def test_ragged_samples() -> None:
    with pytest.raises(RaggedBatch, match=r"(?s)4 shapes.*pad_sequence") as caught:
        list(legroom.DataLoader(samples.Ragged(), 4, num_workers=1))
    assert isinstance(caught.value, RuntimeError) and str(caught.value).count("[ragged-batch]") == 1


class Files:
    """Bytes of files, as a dataset of a tar archive returns them without decode=."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.zeros(row + 1, dtype=torch.uint8)


def test_files_that_are_not_decoded_are_advised_to_be() -> None:
    with pytest.raises(RaggedBatch, match=r"decode=\{'jpg': read_image\}"):
        list(legroom.DataLoader(Files(), 4, num_workers=1))


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_an_unpicklable_part_is_named() -> None:
    for part in ({"collate_fn": lambda x: x}, {"worker_init_fn": lambda x: x}):
        with pytest.raises(Unpicklable, match=next(iter(part))):
            iter(legroom.DataLoader(samples.Rows(), 4, num_workers=1, multiprocessing_context="spawn", **part))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size must be an integer ≥ 1 or None .got 0"),
        ({"batch_size": -4}, "batch_size must be an integer ≥ 1 or None .got -4"),
        ({"num_workers": -1}, "num_workers option should be non-negative.*got -1"),
        ({"prefetch_factor": 2}, "prefetch_factor option could only.*prefetch_factor=2 with num_workers=0"),
        ({"persistent_workers": True}, "persistent_workers option needs.*with num_workers=0"),
        (
            {"sampler": [1, 2], "shuffle": True},
            "sampler option is mutually exclusive with shuffle.*the sampler is a list",
        ),
    ],
)
def test_arguments_that_torch_rejects_have_a_reason_and_a_fix(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as torchs:
        torch.utils.data.DataLoader(samples.Rows(), **options)
    with pytest.raises(BadArgument, match=f"(?s){said}") as caught:
        legroom.DataLoader(samples.Rows(), **options)
    assert caught.value.what == str(torchs.value) and caught.value.why and caught.value.fix


# Nothing is left.


@pytest.fixture
def _counted() -> Iterator[None]:
    def held() -> tuple[set[tuple[str, str]], int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("legroom-batch")
        mine = [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]  # as torch names them
        return open_descriptors(), maps, len(mine)

    list(legroom.DataLoader(samples.Rows(), 4, num_workers=2))  # what torch makes once a process
    before = held()
    yield
    receive.forget_ended_workers()
    after = held()
    assert after[1] == 0 and len(after[0] - before[0]) <= 1 and after[2] <= before[2]


@pytest.mark.usefixtures("_counted")
def test_leaving_early_twenty_times() -> None:
    loader = legroom.DataLoader(samples.Rows("nested"), 4, num_workers=1)
    for _ in range(20):
        for batch in loader:
            assert batch["image"].shape == (4, 3, 5)
            break
        del batch


@pytest.mark.usefixtures("_counted")
def test_ten_thousand_batches_leak_nothing() -> None:
    count, threads = 10_000, threading.active_count()
    loader = legroom.DataLoader(samples.Rows("tuple", count), 1, num_workers=2)
    rss = []
    for number, (_, index) in enumerate(loader):
        assert int(index) == number
        if number % (count // 4) == count // 4 - 1:
            rss.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
            assert len(receive._slots) <= 8
    # A leak grows in every part; what other tests have freed is used again, or moved into huge pages, in some.
    assert number == count - 1 and min(after - before for before, after in itertools.pairwise(rss)) < 3 << 20
    deadline = time.monotonic() + 60  # the threads of torch's queues end when they notice
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads


@pytest.mark.usefixtures("_counted")
def test_a_consumer_that_keeps_all_batches() -> None:
    kept = list(legroom.DataLoader(samples.Rows("tensor", 200), 2, num_workers=3, prefetch_factor=3))
    assert [float(batch[0, 0, 0]) for batch in kept] == list(range(0, 200, 2))
    assert len(receive._slots) <= 3 * 2
    del kept


@pytest.mark.usefixtures("_counted")
def test_several_iterators_and_loaders_at_once() -> None:
    one, two = (legroom.DataLoader(samples.Rows("int"), 1, num_workers=1, persistent_workers=p) for p in (True, False))
    for a, b, c in zip(one, two, two, strict=True):
        assert int(a) == int(b) == int(c)
    del one, two


# To other code it is torch's loader, and its iterator torch's.


class Failing:
    """The user's own code: a dataset, a sampler and functions that raise."""

    def __init__(self, count: int = 8) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return self.of_the_user(i)

    def __iter__(self) -> Iterator[Any]:
        yield self.of_the_user(0)

    def of_the_user(self, i: int) -> Any:
        raise LookupError(f"nothing at {i}")


@pytest.mark.parametrize(
    "options",
    [{}, {"sampler": Failing(), "num_workers": 0}, {"sampler": Failing(), "num_workers": 2}, {"batch_size": None}],
    ids=["batches", "sampler", "sampler, workers", "samples"],
)
def test_an_exception_keeps_the_users_frames(options: dict[str, Any]) -> None:
    with pytest.raises(LookupError, match="nothing at 0") as caught:
        list(legroom.DataLoader(Failing(), **options))
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "of_the_user"


@pytest.mark.usefixtures("_long_join")
def test_an_exception_of_the_sampler_in_the_middle_keeps_its_frames(earlier: set[int | None]) -> None:
    def sampler() -> Iterator[int]:
        yield from range(6)
        raise LookupError("the sampler's own")

    loader = legroom.DataLoader(samples.Rows(), 1, sampler=sampler(), num_workers=1, prefetch_factor=2)
    with pytest.raises(LookupError) as caught:
        list(loader)
    assert "sampler" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    # As with torch, the frames keep the iterator, and with it workers and slots, until the exception is dropped.
    del caught, loader
    gc.collect()
    assert not children() - earlier
    assert "legroom-batch" not in Path("/proc/self/maps").read_text()


@pytest.mark.usefixtures("_long_join")
def test_an_exception_from_a_worker_leaves_no_process_behind(earlier: set[int | None]) -> None:
    gc.disable()  # nobody need collect anything
    try:
        with contextlib.suppress(KeyError):
            list(legroom.DataLoader(samples.Raises(), 2, num_workers=2))
        assert not children() - earlier
    finally:
        gc.enable()


class Unsized(samples.Stream):
    """An IterableDataset that does not want to be asked for its length, or answers wrongly."""

    def __init__(self, length: int | None) -> None:
        super().__init__(8)
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise RuntimeError("the length is not known before the end")
        return self.length


@pytest.mark.parametrize("length", [None, 1])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_length_is_not_asked_for(length: int | None, workers: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Length of IterableDataset")
        got = numbers(legroom.DataLoader(Unsized(length), 2, num_workers=workers))
    assert list(itertools.chain(*got)) == [int(row[0]) for row in samples.Stream(8) for _ in range(3)]


def test_the_length_of_a_sampler_is_not_asked_for() -> None:
    class Endless:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2]])

        def __len__(self) -> int:
            raise NotImplementedError("how long it is is not known")

    loader = legroom.DataLoader(samples.Rows("int"), batch_sampler=Endless(), num_workers=1)
    assert numbers(loader) == [[0, 1], [2]]


def test_the_class_takes_the_type_of_its_batches() -> None:
    assert legroom.DataLoader[int].__origin__ is legroom.DataLoader
    assert numbers(legroom.DataLoader[Any](samples.Rows("int", 3), 3)) == [[0, 1, 2]]

    class Own(legroom.DataLoader[int]):  # type: ignore[misc]
        pass

    assert isinstance(Own(samples.Rows("int")), torch.utils.data.DataLoader)


@pytest.mark.usefixtures("_long_join")
@pytest.mark.parametrize("persistent", [True, False])
def test_an_iterator_is_one_of_torchs(persistent: bool) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

    iterator = iter(legroom.DataLoader(samples.Rows("int"), 2, num_workers=2, persistent_workers=persistent))
    assert isinstance(iterator, _BaseDataLoaderIter) and isinstance(iterator, _MultiProcessingDataLoaderIter)
    processes = iterator._workers
    assert len(processes) == 2 and all(one.is_alive() for one in processes)
    assert int(next(iterator)[1]) == 1 and iterator._num_yielded == 1
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iterator)
    iterator._shutdown_workers()
    assert not any(one.is_alive() for one in processes)
    with pytest.raises(AttributeError, match="no_such_name"):
        iterator.no_such_name  # noqa: B018
    plain = iter(legroom.DataLoader(samples.Rows("int"), 2))
    assert isinstance(plain, _BaseDataLoaderIter) and not hasattr(plain, "_workers")
    assert not hasattr(plain, "_shutdown_workers")


@pytest.mark.usefixtures("_long_join")
def test_shutting_down_does_not_wait_for_a_worker_without_room() -> None:
    started = time.monotonic()
    for _ in range(3):
        loader = legroom.DataLoader(samples.Rows(), 2, num_workers=1, prefetch_factor=6, memory_budget=4096)
        iterator = iter(loader)
        kept = next(iterator)
        time.sleep(0.2)  # the worker has filled its one slot and waits
        iterator._shutdown_workers()
    assert kept.sum() == 12
    assert time.monotonic() - started < 55


def test_a_loader_that_keeps_its_iterator_as_others_do() -> None:
    class Kept(legroom.DataLoader):  # type: ignore[misc]
        """As in loaders for detection: one iterator, made again when asked."""

        def again(self) -> None:
            self.iterator = self._get_iterator()

    loader = Kept(samples.Rows("int", 4), 2, num_workers=1)
    for _ in range(2):
        loader.again()
        assert numbers(loader.iterator) == [[0, 1], [2, 3]]
    assert loader.state_dict()["yielded"] == 0


def test_in_place_of_torchs_class_it_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "DataLoader", legroom.DataLoader)
    loader = shuffled(generator=torch.Generator().manual_seed(4))
    first = numbers(itertools.islice(loader, 2))
    again = shuffled(generator=torch.Generator())
    again.load_state_dict(loader.state_dict())
    assert first + numbers(again) == numbers(shuffled(generator=torch.Generator().manual_seed(4)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_copy_after_admission(monkeypatch: pytest.MonkeyPatch, copied: Any, persistent: bool) -> None:
    monkeypatch.setattr(admit_workers_by_memory, "free_memory_now", lambda: FreeMemory(900 << 20, "here"))
    loader = legroom.DataLoader(samples.Rows("int"), 8, num_workers=2, persistent_workers=persistent)
    asked = record_admissions(monkeypatch)
    expected = numbers(loader)
    other = copied(loader)
    assert numbers(other) == expected == numbers(loader)
    assert asked[0].admission is not None
    assert asked[1].known == asked[0].admission.measured is not None  # the copy does not measure again
    assert numbers(copied(other)) == expected


@pytest.mark.usefixtures("_long_join")
def test_a_sampler_that_raises_does_not_delay_workers_under_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit_workers_by_memory, "free_memory_now", lambda: FreeMemory(900 << 20, "here"))
    loader = legroom.DataLoader(samples.Rows(), sampler=Failing(), num_workers=2)
    started = time.monotonic()
    with pytest.raises(LookupError):
        iter(loader)
    assert time.monotonic() - started < 55


@pytest.mark.usefixtures("_long_join")
def test_an_empty_dataset_does_not_delay_workers_under_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit_workers_by_memory, "free_memory_now", lambda: FreeMemory(900 << 20, "here"))
    started = time.monotonic()
    assert list(legroom.DataLoader(samples.Rows("int", 0), 4, num_workers=2)) == []
    assert time.monotonic() - started < 55


@pytest.mark.usefixtures("_long_join")
@pytest.mark.parametrize(
    "options",
    [{}, {"sampler": np.arange(60)}, {"persistent_workers": True}],
    ids=["plain", "numpy indices", "persistent"],
)
def test_a_loader_that_is_collected_in_a_cycle_ends_its_workers_at_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, earlier: set[int | None]
) -> None:
    """The collector may finalize the pipes before the iterator, and its message to end would be lost."""
    loader = legroom.DataLoader(samples.Rows("int", 60), 2, num_workers=2, **options)
    if options.get("persistent_workers"):
        list(loader)
    iterator = iter(loader)
    next(iterator)
    inner: Any = iterator._inner
    # In the order in which the collector may come to them: those in the first cycle are finalized first.
    queues = list(inner._index_queues)
    cycle: list[Any] = [queues, loader, iterator]
    cycle.append(cycle)
    started = time.monotonic()
    del loader, iterator, inner, queues, cycle
    gc.collect()
    assert time.monotonic() - started < 55
    assert children() <= earlier


class Together:
    """A sampler that begins when two threads have come so far."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def __iter__(self) -> Iterator[int]:
        self.barrier.wait(60)
        return iter(range(8))


def test_loaders_that_start_in_two_threads_have_their_own_workers() -> None:
    barrier, made, got = threading.Barrier(2), {}, {}

    def one(name: str) -> None:
        loader = legroom.DataLoader(samples.Rows("int"), 2, sampler=Together(barrier), num_workers=1)
        made[name] = iter(loader)
        got[name] = numbers(made[name])

    threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got["a"] == got["b"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    pids = {name: {process.pid for process in iterator._workers} for name, iterator in made.items()}
    assert len(pids["a"]) == len(pids["b"]) == 1 and not pids["a"] & pids["b"]
    assert {name: set(iterator._group.pids) for name, iterator in made.items()} == pids  # whose end is explained


def test_one_loader_started_in_two_threads() -> None:
    loader, got = shuffled(samples.Rows("int"), shuffle=False), []
    threads = [threading.Thread(target=lambda: got.append(numbers(loader))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == 4 * [numbers(legroom.DataLoader(samples.Rows("int"), 3))]
    assert loader.worker_init_fn is None and loader.multiprocessing_context is None


def test_attributes_set_later_select_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = legroom.DataLoader(samples.Rows(), 4, num_workers=1)
    loader.collate_fn = samples.custom
    assert loader.transport == "arena" and isinstance(loader.collate_fn, SlotCollate)
    assert loader.collate_fn.fn is samples.custom
    loader.memory_budget = "2MB"
    assert loader.collate_fn.budget == 2 << 20 and loader.collate_fn.fn is samples.custom
    with pytest.raises(BadSize):
        loader.memory_budget = "much"
    assert loader.memory_budget == "2MB"
    loader.num_workers = 0
    assert loader.transport == "none" and len(list(loader)) == 6
    late = legroom.DataLoader(samples.Rows(), 4)
    assert late.transport == "none" and late.collate_fn is torch.utils.data.default_collate
    late.num_workers, late.prefetch_factor = 1, 2
    assert late.transport == "arena" and isinstance(late.collate_fn, SlotCollate) and len(list(late)) == 6
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    late.collate_fn = samples.custom
    assert late.transport == "torch" and late.collate_fn is samples.custom


def test_a_child_forked_while_the_loader_starts_can_use_it() -> None:
    entered, done, main = threading.Event(), threading.Event(), threading.get_ident()

    class Slow(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[int]:
            if threading.get_ident() != main:  # while the loader starts there
                entered.set()
                done.wait(60)
            return iter(range(4))

    loader = legroom.DataLoader(Slow(), 2)
    thread = threading.Thread(target=iter, args=(loader,))
    thread.start()
    assert entered.wait(60)
    child = multiprocessing.get_context("fork").Process(target=numbers, args=(loader,))
    child.start()
    child.join(60)
    done.set()
    thread.join()
    assert child.exitcode == 0


# The end of the program.

# Something keeps __main__, as dill does, so it is cleared after the modules that it imported.
_KEEPING = """
import ctypes, sys
ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules["__main__"]))
"""
_KEPT = """
import legroom, loader_samples as samples
if __name__ == "__main__":
    loader = legroom.DataLoader(samples.Rows("tensor"), 4, num_workers=2)
    for batch in loader:
        pass
    iterator = iter(loader)
    first = next(iterator)
"""


@pytest.mark.usefixtures("ordinary_exit")
@pytest.mark.parametrize("before", [_KEEPING, "import dill"], ids=["kept", "dill"])
def test_batches_alive_at_exit_print_nothing(before: str) -> None:
    folder, program = Path(samples.__file__).parent, before + _KEPT
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_finalizers_ask_no_module_whether_the_program_ends() -> None:
    """At exit a module's names are None: what a finalizer needs first must be in its defaults."""
    wrong = []
    for path in Path(legroom.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                known = {one.arg for one in node.args.args}
                first = {one.id for one in ast.walk(node.body[0]) if isinstance(one, ast.Name)}
                asks = [ast.unparse(one) for one in node.args.defaults]
                if first != {"self"} and not ("at_exit" in known & first and asks == ["sys.is_finalizing"]):
                    wrong.append(f"{path.name}:{node.lineno}")
    assert not wrong
