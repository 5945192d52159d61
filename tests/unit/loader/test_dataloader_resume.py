"""A run that is interrupted and goes on gives, element by element, what one that is not gives."""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import legroom
from legroom.errors import UsageError

torch = pytest.importorskip("torch")
import loader_samples as samples  # noqa: E402
from stream_data import write  # noqa: E402
from torch.utils.data import IterableDataset, RandomSampler, Sampler, get_worker_info  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork"),
]

EPOCHS = 3
Make = Callable[[], Any]


def numbers(batches: Any) -> list[list[int]]:
    return [[int(value) for value in batch.reshape(-1)] for batch in batches]


def whole(make: Make, epochs: int = EPOCHS) -> list[list[list[int]]]:
    """A run that nothing interrupts; the program draws numbers itself after every epoch."""
    torch.manual_seed(11)
    loader, found = make(), []
    for _ in range(epochs):
        found.append(numbers(loader))
        torch.rand(3)
    return found


def interrupted(
    make: Make, epoch: int, stop: int | None, epochs: int = EPOCHS, again: Make | None = None
) -> list[list[list[int]]]:
    """The same, ended after ``stop`` batches of an epoch (None: between it and the next) and begun again from a file."""
    torch.manual_seed(11)
    loader, found = make(), []
    for _ in range(epoch):
        found.append(numbers(loader))
        torch.rand(3)
    if stop is not None:
        iterator = iter(loader)
        found.append(numbers(itertools.islice(iterator, stop)))
        assert len(found[-1]) == stop
    kept = io.BytesIO()
    torch.save((loader.state_dict(), torch.get_rng_state()), kept)
    iterator = loader = None
    torch.manual_seed(99)  # another process
    kept.seek(0)
    state, rng = torch.load(kept)
    loader = (again or make)()
    loader.load_state_dict(state)
    torch.set_rng_state(rng)
    if stop is not None:
        found[-1] += numbers(loader)
        torch.rand(3)
    while len(found) < epochs:
        found.append(numbers(loader))
        torch.rand(3)
    return found


# Workers that last take their seeds once.


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "torch's generator"])
@pytest.mark.parametrize(("epoch", "stop"), [(0, 5), (1, 3), (1, None), (2, 1)])
def test_persistent_workers(own: bool, epoch: int, stop: int | None) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(5) if own else None
        return legroom.DataLoader(
            samples.Rows("int", 24), 3, shuffle=True, num_workers=2, persistent_workers=True, generator=generator
        )

    assert interrupted(make, epoch, stop) == whole(make)


def test_persistent_workers_stopped_twice_and_in_the_same_loader() -> None:
    def make() -> Any:
        return legroom.DataLoader(
            samples.Rows("int", 24), 3, shuffle=True, num_workers=2, persistent_workers=True,
            generator=torch.Generator().manual_seed(5),
        )  # fmt: skip

    expected = whole(make)
    loader, found = make(), []
    found.append(numbers(loader))
    for stops in ([2, 3], [1]):
        given: list[list[int]] = []
        for stop in stops:
            given += numbers(itertools.islice(iter(loader), stop))
            loader.load_state_dict(loader.state_dict())
        found.append(given + numbers(loader))
    assert found == expected


def test_a_run_with_persistent_workers_resumes_without() -> None:
    def make(workers: int = 2) -> Any:
        return legroom.DataLoader(
            samples.Rows("int", 24), 3, shuffle=True, num_workers=workers, persistent_workers=workers > 0,
            generator=torch.Generator().manual_seed(5),
        )  # fmt: skip

    assert interrupted(make, 1, 3, again=lambda: make(0)) == whole(make)


# Orders that are drawn elsewhere than in RandomSampler's way.


class Eager(Sampler[int]):
    """Draws its order when it is asked for an iterator, not when the first index is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count).tolist())

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Eager, lambda count: RandomSampler(range(count))], ids=["eager", "random"])
def test_a_sampler_that_draws_from_torchs_generator_beside_the_loaders_own(workers: int, kind: Any) -> None:
    def make() -> Any:
        return legroom.DataLoader(
            samples.Rows("int", 24), 3, sampler=kind(24), num_workers=workers, generator=torch.Generator().manual_seed(5)
        )  # fmt: skip

    assert interrupted(make, 1, 4) == whole(make)


# Batches as they come.


class Uneven(samples.Rows):
    """The rows of every third batch take long, wherever they are drawn; the first one waits for the event."""

    first: Any = None

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.05 if (i // 2) % 3 == 0 else 0)
        assert i or self.first is None or self.first.wait(240)
        return torch.tensor(i)


def out_of_order(workers: int = 2, batch_size: int = 2) -> Any:
    return legroom.DataLoader(Uneven("int", 24), batch_size, num_workers=workers, in_order=False)


@pytest.mark.parametrize("stop", [1, 5])
def test_out_of_order_nothing_is_lost_or_repeated(stop: int) -> None:
    (found,) = interrupted(out_of_order, 0, stop, epochs=1)
    assert sorted(found) == sorted(whole(out_of_order, 1)[0])


def test_out_of_order_stopped_again_and_again() -> None:
    loader, found = out_of_order(3), []
    loader.dataset.first = first = torch.multiprocessing.get_context("fork").Event()
    for _ in range(4):
        iterator = iter(loader)
        found += numbers(itertools.islice(iterator, 2))
        state = loader.state_dict()
        assert state["beyond"] or first.is_set()  # else this has shown nothing
        assert state["yielded"] == len(found)
        first.set()
        del iterator
        loader = out_of_order(3)
        loader.load_state_dict(state)
    assert sorted(found + numbers(loader)) == sorted(numbers(out_of_order(0)))


def test_out_of_order_with_smaller_batches_or_in_order() -> None:
    loader = out_of_order(batch_size=4)
    iterator = iter(loader)
    found = numbers(itertools.islice(iterator, 2))
    state = {**loader.state_dict(), "yielded": 2, "beyond": [found[1][0] // 4] if found[0][0] == 0 else [1, 2]}
    given = [0, state["beyond"][0]] if len(state["beyond"]) == 1 else [1, 2]
    smaller = out_of_order(0, batch_size=2)
    smaller.load_state_dict(state)
    rest = list(itertools.chain(*numbers(smaller)))
    assert rest == [row for row in range(24) if row // 4 not in given]
    with pytest.raises(UsageError, match="cannot resume with batch_size=8"):
        out_of_order(0, batch_size=8).load_state_dict(state)


def test_out_of_order_without_a_state_is_refused() -> None:
    make = lambda **more: legroom.DataLoader(samples.Stream(), 2, num_workers=2, **more)  # noqa: E731
    loader = make(in_order=False)
    iterator = iter(loader)
    assert loader.state_dict()["yielded"] == 0
    next(iterator)
    with pytest.raises(UsageError, match=r"(?s)cannot save a state.*in_order=True"):
        loader.state_dict()
    loader = make()
    next(iter(loader))
    with pytest.raises(UsageError, match="cannot resume with in_order=False"):
        make(in_order=False).load_state_dict(loader.state_dict())


# Datasets that are iterated over.


class Shares(IterableDataset[Any]):
    """Worker ``w`` of ``n`` gives as many samples as ``sizes[w]`` says; an epoch is in the numbers."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.at, self.epoch = sizes, 0, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = [10_000 * self.epoch + 100 * share + i for share in range(worker, len(self.sizes), workers)
                for i in range(self.sizes[share])]  # fmt: skip
        while self.at < len(mine):
            self.at += 1
            yield torch.tensor(mine[self.at - 1])
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Silent(Shares):
    """The same, and it says nothing about itself."""

    state_dict = None  # type: ignore[assignment]


SIZES = (7, 2, 5)  # the second is over long before the others, and ends within a batch or at its end


def forked(kind: Any, workers: int, batch_size: int | None, **options: Any) -> Make:
    method = "fork" if workers else None
    return lambda: legroom.DataLoader(
        kind(SIZES), batch_size, num_workers=workers, multiprocessing_context=method, **options
    )


@pytest.mark.parametrize(
    ("workers", "batch_size"),
    [(0, 2), (1, 3), (2, 2), (3, 2), *(pytest.param(*case, marks=pytest.mark.soak)
     for case in [(0, 3), (0, None), (1, 2), (1, None), (2, 3), (2, None), (3, 3), (3, None)])],
)  # fmt: skip
def test_every_stop_of_an_iterable_dataset(workers: int, batch_size: int | None) -> None:
    make = forked(Shares, workers, batch_size)
    expected = whole(make, 1)
    for stop in range(len(expected[0]) + 1):
        assert interrupted(make, 0, stop, 1) == expected, stop


@pytest.mark.parametrize(
    "make",
    [forked(Shares, 3, None), forked(Shares, 3, 2, drop_last=True), forked(Silent, 3, 2)],
    ids=["samples as they are", "no short batches", "it says nothing"],
)
def test_odd_stops_of_an_iterable_dataset(make: Make) -> None:
    expected = whole(make, 2)
    assert interrupted(make, 0, 4, 2) == expected
    assert interrupted(make, 0, 5, 2) == expected


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(3, marks=pytest.mark.soak)]
)
def test_a_stop_within_a_batch_is_resumed_in_spawned_workers(workers: int) -> None:
    make = forked(Shares, workers, 2)
    again = lambda: legroom.DataLoader(  # noqa: E731
        Shares(SIZES), 2, num_workers=workers, multiprocessing_context="spawn"
    )
    assert interrupted(make, 0, 3, 1, again) == whole(make, 1)


@pytest.mark.parametrize(
    ("batch_size", "stop"),
    [(2, 0), (2, 1), (2, 4), (2, 7), (2, None), (None, 2),
     *(pytest.param(None, stop, marks=pytest.mark.soak) for stop in (0, 1, 4, 13, None))],
)  # fmt: skip
def test_persistent_workers_of_an_iterable_dataset(batch_size: int | None, stop: int | None) -> None:
    make = lambda: legroom.DataLoader(  # noqa: E731
        Shares(SIZES), batch_size, num_workers=3, persistent_workers=True
    )
    assert interrupted(make, 1, stop) == whole(make)


def test_persistent_workers_whose_last_epoch_was_left(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [60], 10)

    def make() -> Any:
        data = legroom.stream(paths, columns=["id"], batch_size=5, shuffle_buffer=20, format="torch")
        return legroom.DataLoader(data, None, num_workers=2, persistent_workers=True)

    def ids(batches: Any) -> list[list[int]]:
        return [batch["id"].tolist() for batch in batches]

    loader = make()
    expected = [ids(itertools.islice(loader, 3)), ids(loader), ids(loader)]
    loader = make()
    ids(itertools.islice(loader, 3))
    found = ids(itertools.islice(loader, 1))  # the second worker has given nothing of this pass
    state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    assert [found + ids(loader), ids(loader)] == expected[1:]


@pytest.mark.parametrize(
    ("workers", "lasting"),
    [(0, False), (3, True), *(pytest.param(workers, lasting, marks=pytest.mark.soak)
     for workers, lasting in [(1, False), (2, False), (3, False), (1, True), (2, True)])],
)  # fmt: skip
def test_stops_of_a_stream(tmp_path: Path, workers: int, lasting: bool) -> None:
    paths, _ = write(tmp_path, [50, 47], 20)

    def make() -> Any:
        data = legroom.stream(paths, columns=["id"], batch_size=10, shuffle_buffer=15, format="torch")
        return legroom.DataLoader(
            data, None, num_workers=workers, persistent_workers=lasting and workers > 0, collate_fn=only_ids
        )

    expected = whole(make, 2)
    for stop in (1, 5, 10, None):
        assert interrupted(make, 0, stop, 2) == expected, stop


def only_ids(batch: Any) -> Any:
    return batch["id"]


def test_resuming_in_another_number_of_workers_is_refused_before_anything_is_read() -> None:
    for kind in (Shares, Silent):
        loader = legroom.DataLoader(kind(SIZES), 2, num_workers=2)
        next(iter(loader))
        state = loader.state_dict()
        for workers in (0, 1, 3):
            with pytest.raises(
                UsageError, match=rf"(?s)num_workers={workers}: the state has num_workers=2.*use num_workers=2"
            ):
                legroom.DataLoader(kind(SIZES), 2, num_workers=workers).load_state_dict(state)


@pytest.mark.parametrize(("then", "now"), [(0, 1), (1, 0)])
def test_one_worker_reads_what_none_does(then: int, now: int) -> None:
    def make(workers: int) -> Any:
        return legroom.DataLoader(Shares(SIZES), 2, num_workers=workers)

    expected = whole(lambda: make(then), 1)
    for stop in (1, 6, 7):
        assert interrupted(lambda: make(then), 0, stop, 1, lambda: make(now)) == expected


def test_before_the_first_batch_and_between_epochs_any_number_will_do() -> None:
    loader = legroom.DataLoader(Shares(SIZES), 2, num_workers=2)
    other = legroom.DataLoader(Shares(SIZES), 2, num_workers=3)
    other.load_state_dict(loader.state_dict())
    numbers(loader)
    other.load_state_dict(loader.state_dict())
    assert len(numbers(other)) == 8
    loader = legroom.DataLoader(Shares(SIZES), 2, num_workers=2, persistent_workers=True)
    numbers(loader)
    with pytest.raises(
        UsageError, match="num_workers=3: the state has num_workers=2"
    ):  # theirs go on from where they are
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("then_now", [(2, 4), (4, None)])
def test_another_batch_size_is_refused_for_a_dataset_without_a_state(then_now: tuple[int, int | None]) -> None:
    then, now = then_now
    loader = legroom.DataLoader(Silent(SIZES), then)
    next(iter(loader))
    with pytest.raises(UsageError, match=f"use batch_size={then}"):
        legroom.DataLoader(Silent(SIZES), now).load_state_dict(loader.state_dict())
