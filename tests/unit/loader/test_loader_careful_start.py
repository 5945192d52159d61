"""A careful start with real workers, however they are started: the door, a refusal, an empty share, a stopped draw."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from legroom.errors import BudgetTooSmall
from legroom.loader.arena import door as arena_door
from legroom.loader.arena.ending import watch_end
from legroom.loader.arena.refusal import Left
from legroom.loader.measure.bare import Bare

torch = pytest.importorskip("torch")
import legroom  # noqa: E402  its DataLoader needs torch

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
MB = 1 << 20


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little that this process starts its workers with care, and has not measured what one takes."""
    monkeypatch.setattr(arena_door, "left", lambda: Left(900 * MB, "here"))
    monkeypatch.setattr(arena_door, "bare", lambda: Bare(process=150 * MB, forked=10 * MB))


def in_worker(free: int, worker: int) -> None:
    """As ``worker_init_fn``: what is left in the eyes of a worker, which is a process of its own."""
    arena_door.left = lambda: Left(free, "there")


class Share(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
    """The first worker gets ``first`` rows, each other one eight, with whether it came in by waiting in vain."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        worker, came = torch.utils.data.get_worker_info().id, arena_door.here()
        vain = came is None or came.waited_for
        yield from (torch.tensor([worker, row, vain]) for row in range(8 if worker else self.first))


class Growing:
    """Every sample is 8 MB, and takes its time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return torch.full((2 * MB,), float(index))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_all_go_through_the_door_however_they_start(method: str) -> None:
    loader = legroom.DataLoader(torch.arange(64.0), 4, num_workers=2, multiprocessing_context=method)
    assert torch.equal(torch.cat(list(loader)), torch.arange(64.0))
    assert loader._last_door is not None and not loader._last_door.waited_for
    seen = loader._last_door.seen
    assert seen is not None and seen.batch == 64
    assert (seen.own > 60 * MB) == (
        method != "fork"
    )  # those that are not forked have imported torch themselves
    assert loader.transport == "arena"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_refusal_comes_from_the_worker_however_it_starts(method: str) -> None:
    loader = legroom.DataLoader(
        torch.arange(64.0), 4, num_workers=2, multiprocessing_context=method,
        worker_init_fn=partial(in_worker, 17 * MB),
    )  # fmt: skip
    with pytest.raises(BudgetTooSmall, match="one batch for each of 2 workers") as caught:
        next(iter(loader))
    assert "while it makes a batch" in caught.value.why and caught.value.fix
    del caught
    gc.collect()
    assert not [one for one in multiprocessing.active_children() if "DataLoader" in one.name]


@pytest.mark.parametrize(
    ("method", "first", "drop_last", "lasting"),
    [
        ("fork", 0, False, False),
        ("fork", 0, False, True),
        ("fork", 1, True, False),
        ("spawn", 0, False, False),
    ],
)
def test_an_empty_share_holds_nobody_up(method: str, first: int, drop_last: bool, lasting: bool) -> None:
    loader = legroom.DataLoader(
        Share(first), 4, num_workers=2, drop_last=drop_last, multiprocessing_context=method,
        persistent_workers=lasting, worker_init_fn=partial(in_worker, 900 * MB),
    )  # fmt: skip
    loader_patience = arena_door._PATIENCE_S
    patient = {True: 120.0, False: 120.0}
    arena_door._PATIENCE_S = (
        patient  # forked workers inherit it: a share that ends unnoticed would be noticed here
    )
    try:
        batches = list(loader)
    finally:
        arena_door._PATIENCE_S = loader_patience
    assert [batch.tolist() for batch in batches] == [
        [[1, row, False] for row in range(start, start + 4)] for start in (0, 4)
    ]


def test_a_share_that_ends_within_the_first_batch_is_shown_before_others_come_in() -> None:
    loader = legroom.DataLoader(
        Share(2),
        4,
        num_workers=2,
        multiprocessing_context="fork",
        worker_init_fn=partial(in_worker, 17 * MB),
    )
    with pytest.raises(BudgetTooSmall, match="one batch for each of 2 workers"):
        list(loader)


def test_a_draw_that_cannot_end_well_is_stopped() -> None:
    loader = legroom.DataLoader(
        Growing(), 64, num_workers=1, multiprocessing_context="fork",
        worker_init_fn=partial(in_worker, 24 * MB),
    )  # fmt: skip
    with pytest.raises(BudgetTooSmall, match="the samples of one batch for each of 1 workers") as caught:
        next(iter(loader))
    assert "when it was stopped" in caught.value.why and "24" not in caught.value.what
    assert caught.value.fix[0] == "fewer workers, or a smaller batch"


def test_a_class_is_itself_again_when_its_iterator_was_taken() -> None:
    class Rows(list[int]):
        pass

    ends: list[bool] = []
    rows, others = Rows([1, 2]), Rows([3])
    watch_end(rows, ends.append)
    assert list(others) == [3] and not ends
    assert list(rows) == [1, 2] and ends == [True] and "__iter__" not in vars(Rows)
    assert list(rows) == [1, 2] and ends == [True]
    watch_end(Rows(), ends.append)
    watch_end([1], ends.append)  # a class that cannot be changed
    assert ends == [True]
