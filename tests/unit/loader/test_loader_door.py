"""A careful start: who waits for whom, what is measured, what is refused."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from legroom.advice.memory_need import Each
from legroom.cache.capacity import Bound
from legroom.errors import BudgetTooSmall, LoaderClosed
from legroom.loader.arena import door as arena_door
from legroom.loader.arena import pool as arena_pool
from legroom.loader.arena.door import Door, careful
from legroom.loader.arena.pack import Writer, stacked
from legroom.loader.arena.pool import Pool
from legroom.loader.arena.refusal import Left
from legroom.loader.arena.slot import FREE, HELD, SENT, Slot
from legroom.loader.collate import _packed
from legroom.loader.measure.bare import Bare

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
MB = 1 << 20
EACH = Each(10 * MB, 24 * MB, 24 * MB)


class Unwatched:
    def __init__(self, *_: object) -> None: ...

    def hold(self) -> None: ...

    def go_on(self) -> None: ...


@pytest.fixture(autouse=True)
def _not_a_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(arena_door, "_keep_nothing", lambda: None)  # not in the process of the tests
    monkeypatch.setattr(arena_door, "Watch", Unwatched)  # which would end it
    yield
    arena_door._here = None


def have(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(arena_door, "left", lambda: Left(free, "here"))


def test_with_plenty_there_is_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 4 << 30)
    assert careful(4, "fork", None, None, 4, iterable=False) is None
    monkeypatch.setattr(arena_door, "left", lambda: None)  # nobody knows
    assert careful(4, "fork", None, None, 4, iterable=False) is None


def test_what_is_known_not_to_fit_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 200 * MB)
    with pytest.raises(BudgetTooSmall, match="one batch for each of 4 workers") as caught:
        careful(4, "fork", None, EACH, 8, iterable=False)
    assert "256 MB" in caught.value.why and "200 MB are free (here)" in caught.value.why
    assert caught.value.fix[0] == "num_workers=2 fits" and caught.value.fix[1].startswith("batch_size=")


def test_what_is_known_to_fit_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 300 * MB)
    door = careful(4, "fork", None, EACH, 8, iterable=False)
    assert door is not None and not door.waited_for and door.seen == EACH
    door(3)


def test_interpreters_alone_may_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 500 * MB)
    monkeypatch.setattr(arena_door, "bare", lambda: Bare(process=150 * MB, forked=10 * MB))
    with pytest.raises(BudgetTooSmall, match="does not hold 4 workers") as caught:
        careful(4, "spawn", None, None, 8, iterable=False)
    assert "before it draws a sample" in caught.value.why and caught.value.fix[0].startswith(
        "num_workers=2 at the most"
    )


def test_others_wait_until_the_first_has_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 900 * MB)
    monkeypatch.setattr(arena_door, "_beyond_now", lambda: 0)  # how high the tests before this one went
    called: list[int] = []
    door = Door(2, called.append, None, iterable=False)
    other = threading.Thread(target=door, args=(1,))
    other.start()
    door(0)
    door.drawn()
    assert called == [0] and door.waited_for
    door.shown(24 * MB, 4)
    other.join(30)
    assert called == [0, 1] and not door.waited_for
    assert door.seen is not None and door.seen.batch == 24 * MB and door.seen.own > 0


def test_the_first_refuses_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, MB)
    door = Door(2, None, None, iterable=False)
    door._shared[arena_door._HERE + 1] = 1
    door(0)
    with pytest.raises(BudgetTooSmall):
        door.shown(24 * MB, 4)
    again = door.refusal()
    assert again is not None and "each of 2 workers" in again.what
    with pytest.raises(LoaderClosed):
        door(1)


def test_a_pass_that_is_over_lets_nobody_wait() -> None:
    door = Door(2, None, None, iterable=False)
    door.close()
    with pytest.raises(LoaderClosed):
        door(1)
    opened = Door(2, None, None, iterable=False)
    opened.open()
    opened(1)


def test_a_share_that_is_empty_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_door, "_PATIENCE_S", {True: 0.05, False: 60})
    started = time.monotonic()
    Door(2, None, None, iterable=True)(1)
    assert time.monotonic() - started >= 0.05


def test_a_loader_with_little_goes_through_the_door_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import legroom

    have(monkeypatch, 900 * MB)
    inits: list[Any] = []
    loader = legroom.DataLoader(
        torch.arange(64.0), 4, num_workers=2, worker_init_fn=inits.append, multiprocessing_context="fork"
    )
    for _ in range(2):
        assert torch.equal(torch.cat(list(loader)), torch.arange(64.0))
        assert loader.worker_init_fn == inits.append
        known = loader._each
    assert known is not None and known.batch == 64 and loader.transport == "arena"


def test_a_loader_with_too_little_says_so_in_place_of_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import legroom

    have(monkeypatch, MB)
    monkeypatch.setattr(arena_door, "_check_processes", lambda *_: None)
    loader = legroom.DataLoader(torch.arange(64.0), 4, num_workers=2, multiprocessing_context="fork")
    passed = iter(loader)
    with pytest.raises(BudgetTooSmall, match="each of 2 workers") as caught:
        next(passed)
    assert caught.value.why and caught.value.fix
    del passed, caught
    gc.collect()
    assert not multiprocessing.active_children()


def test_a_first_batch_is_expected_to_be_no_smaller_than_it_is() -> None:
    sample = {"a": torch.ones(3, 5), "b": [1, 2.0, torch.ones(7, dtype=torch.uint8)], "c": "text"}
    collated = torch.utils.data.default_collate([sample] * 6)
    assert sum(one.nbytes for one in [collated["a"], *collated["b"]]) <= 6 * stacked(sample)


def test_a_slot_given_up_gives_its_pages_back_though_others_map_it() -> None:
    slot = Slot.make(8 * MB, 1)
    assert slot.fd is not None
    other = Slot.find(os.getpid(), slot.fd, slot.id)
    slot.give_up()
    assert other.given_up and os.fstat(slot.fd).st_blocks * 512 < MB


def test_what_somebody_looks_at_keeps_its_pages() -> None:
    slot = Slot.make(MB, 1)
    assert slot.fd is not None
    slot.state = HELD
    slot.give_up()
    assert os.fstat(slot.fd).st_blocks * 512 >= MB


def test_short_of_memory_one_batch_on_its_way_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(None, 2)
    first, second = pool._made(MB), pool._made(MB)
    assert first is not None and second is not None
    first.state = SENT
    monkeypatch.setattr(arena_pool, "memory_bounds", lambda: [Bound(3 * MB, "little", memory=True)])
    assert pool._free(MB) is second  # nobody has noticed yet
    assert pool._made(MB) is None and pool._short
    assert pool._free(MB) is None and pool.slots == [first]
    first.state = FREE
    assert pool._free(MB) is first


def test_torchs_way_is_not_taken_where_it_would_be_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(None, 2)
    monkeypatch.setattr(pool, "take", lambda *_, **__: None)
    monkeypatch.setattr(arena_pool, "left", lambda: Left(MB, "here"))
    with pytest.raises(BudgetTooSmall):
        _packed(torch.ones(10 * MB), Writer(None), pool, None)


def test_forked_workers_alone_may_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    import legroom

    have(monkeypatch, MB)
    loader = legroom.DataLoader(torch.arange(8.0), 4, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(BudgetTooSmall, match="does not hold 2 workers") as caught:
        iter(loader)
    assert caught.value.fix[0] == "num_workers=0: batches are made in this process"
    assert not multiprocessing.active_children()
