"""Slots, a worker's pool of them, and how long the other side holds one; both sides played by one process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legroom.cache.capacity import Bound
from legroom.errors import BatchLost, BudgetTooSmall, LoaderClosed
from legroom.loader.arena import inbox as arena_inbox
from legroom.loader.arena import pool as arena_pool
from legroom.loader.arena import slot as arena_slot
from legroom.loader.arena.inbox import Parcel, unopened
from legroom.loader.arena.pack import Writer, pickled, regions, write
from legroom.loader.arena.pool import Pool
from legroom.loader.arena.slot import FREE, HELD, RETIRED, SENT, NoSlot, Slot
from legroom.loader.collate import _packed

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]
MB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    arena_inbox._slots.clear()
    arena_inbox._workers.clear()
    gc.collect()
    assert "legroom-batch" not in Path("/proc/self/maps").read_text()
    assert not [one for one in _descriptors() if "legroom-batch" in one]


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def sent(batch: Any, pool: Pool) -> bytes:
    """A batch as a worker's queue sends it."""
    writer = Writer(pool.take(pool.want) if pool.want else None)
    return bytes(ForkingPickler.dumps(_packed(batch, writer, pool, None)))


def received(message: bytes) -> Any:
    return pickle.loads(message)


def test_a_batch_comes_back_equal_on_the_slots_memory() -> None:
    pool = Pool(None, 1)
    batch = {"x": torch.arange(5000.0), "y": [np.arange(1000), "text", None], "z": torch.tensor(3)}
    message = sent(batch, pool)
    assert len(message) < 1000
    got = received(message)
    assert got["x"].equal(batch["x"]) and got["z"].item() == 3 and got["y"][1:] == ["text", None]
    np.testing.assert_array_equal(got["y"][0], batch["y"][0])
    (slot,) = pool.slots
    assert slot.state == HELD
    # Each tensor has a storage of exactly its own bytes, and may be written to.
    assert got["x"].untyped_storage().nbytes() == 20000 and got["z"].untyped_storage().nbytes() == 8
    got["x"].add_(1)
    assert got["x"][0] == 1


@pytest.mark.parametrize("keep", ["tensor", "view", "numpy", "view of numpy", "array"])
def test_whatever_lives_of_a_batch_keeps_its_slot(keep: str) -> None:
    pool = Pool(None, 1)
    got = received(sent({"t": torch.arange(4000.0), "a": np.arange(4000)}, pool))
    kept = {
        "tensor": lambda: got["t"],
        "view": lambda: got["t"].view(2, 2000)[1, 3:5],
        "numpy": lambda: got["t"].numpy(),
        "view of numpy": lambda: torch.from_numpy(got["t"].numpy()[7:9]),
        "array": lambda: got["a"][::5],
    }[keep]()
    before = kept.tolist()
    got = None
    gc.collect()
    (slot,) = pool.slots
    assert slot.state == HELD
    received(sent({"t": torch.zeros(4000), "a": np.zeros(4000, int)}, pool))  # goes into another slot
    assert len(pool.slots) == 2 and kept.tolist() == before
    del kept
    gc.collect()
    assert slot.state == FREE


def test_a_quick_consumer_costs_one_slot() -> None:
    pool = Pool(None, 2)
    for i in range(50):
        got = received(sent(torch.full((1000,), i), pool))
        assert got[0] == i
        del got
    assert len(pool.slots) == 1 and arena_inbox.mapped() == 1


def test_beyond_two_slots_the_consumer_gets_ordinary_copies() -> None:
    pool = Pool(None, 1)
    kept = [received(sent({"t": torch.full((1000,), i), "a": np.full(1000, i)}, pool)) for i in range(20)]
    for i, batch in enumerate(kept):
        assert (batch["t"] == i).all() and (batch["a"] == i).all()
        assert batch["t"].untyped_storage().nbytes() == 8000 and batch["a"].flags.writeable
        batch["t"][0] = -1
    assert sum(slot.state == HELD for slot in pool.slots) == 2
    assert len(pool.slots) == 3


def test_larger_batches_get_larger_slots_and_outliers_do_not_stay() -> None:
    pool = Pool(None, 1)
    for size in (10, 5000, 20_000, 30_000, 3 * MB, *[30_000] * 40):
        got = received(sent(torch.ones(size), pool))
        assert got.sum() == size
        del got
    assert max(slot.capacity for slot in pool.slots) < 3 * MB


def test_a_batch_dropped_unopened_gives_its_slot_back() -> None:
    pool = Pool(None, 1)
    with unopened():
        parcel = received(sent(torch.ones(1000), pool))
    assert isinstance(parcel, Parcel)
    (slot,) = pool.slots
    assert slot.state == SENT
    del parcel
    assert slot.state == FREE


def test_a_batch_without_bytes_needs_no_slot() -> None:
    pool = Pool(None, 1)
    assert received(sent({"a": 1, "b": ["x"]}, pool)) == {"a": 1, "b": ["x"]} and not pool.slots


def test_what_cannot_be_pickled_fails_in_the_worker() -> None:
    with pytest.raises(Exception, match="pickle"):
        sent(threading.Lock(), Pool(None, 1))


def test_a_collate_that_keeps_its_batch_does_not_see_it_overwritten() -> None:
    pool = Pool(None, 1)
    received(sent(torch.ones(1000), pool))
    writer = Writer(pool.take(pool.want))
    kept = writer.empty((1000,), torch.float32).fill_(7)
    first = writer.slot
    received(bytes(ForkingPickler.dumps(_packed(kept, writer, pool, None))))
    del writer
    for _ in range(3):
        received(sent(torch.zeros(1000), pool))
    assert (kept == 7).all() and first not in pool.slots


def test_a_forked_child_keeps_what_it_saw_and_frees_nothing() -> None:
    pool = Pool(None, 1)
    got = received(sent(torch.full((1000,), 5), pool))
    (slot,) = pool.slots
    go_r, go_w = os.pipe()
    child = os.fork()
    if child == 0:  # reads after the parent's slot would have been used again, then lets go of it
        os.read(go_r, 1)
        good = bool((got == 5).all())
        del got
        gc.collect()
        os._exit(0 if good and slot.state == RETIRED else 1)
    del got
    assert slot.state == RETIRED
    for i in range(4):
        received(sent(torch.full((1000,), i), pool))
    assert slot not in pool.slots
    os.write(go_w, b"x")
    os.close(go_r)
    os.close(go_w)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_of_the_consumer_gives_nothing_back() -> None:
    pool = Pool(None, 1)
    got = received(sent(torch.ones(1000), pool))
    (slot,) = pool.slots
    child = os.fork()
    if child == 0:
        del got
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert slot.state == HELD and got.sum() == 1000


def test_slots_of_a_worker_that_is_gone_are_forgotten() -> None:
    pool = Pool(None, 1)
    got = received(sent(torch.ones(1000), pool))
    (worker,) = arena_inbox._workers.values()
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    worker.pid = ended.pid
    arena_inbox._workers.clear()
    arena_inbox._workers[worker.pid] = worker
    arena_inbox.sweep()
    assert arena_inbox.mapped() == 0 and got.sum() == 1000  # still mapped under the tensor
    ended.close()


def test_a_slot_that_is_not_the_one_sent_is_refused() -> None:
    slot = Slot.make(4096, 1)
    with pytest.raises(BatchLost, match="not the one that was sent"):
        arena_inbox._arrival(os.getpid(), slot.fd, slot.id + 1)
    with pytest.raises(BatchLost, match="No such file"):
        arena_inbox._arrival(os.getpid(), 999_999, 1)


def test_a_slot_cannot_be_truncated_under_its_map() -> None:
    slot = Slot.make(4096, 1)
    with pytest.raises(PermissionError):
        os.ftruncate(slot.fd, 0)


def test_a_budget_is_kept_by_waiting() -> None:
    pool = Pool(2 * 40_960, 1)
    messages = [sent(torch.ones(10_000), pool) for _ in range(2)]
    threading.Timer(0.3, lambda: messages and received(messages.pop(0))).start()
    started = time.monotonic()
    assert pool.take(40_000) is not None
    assert time.monotonic() - started > 0.2
    assert sum(slot.capacity for slot in pool.slots) <= 2 * 40_960


def test_what_the_consumer_holds_is_not_the_workers_to_wait_for() -> None:
    pool = Pool(40_960, 1)  # one slot
    kept = [received(sent(torch.full((10_000,), float(i)), pool)) for i in range(10)]
    assert [int(batch[0]) for batch in kept] == list(range(10))


def test_a_budget_below_one_batch_says_so() -> None:
    with pytest.raises(BudgetTooSmall, match=r"each of 4 workers needs room for one: 160 KB") as caught:
        sent(torch.ones(10_000), Pool(100_000, 4))
    assert "memory_budget='160K'" in str(caught.value)


def test_waiting_ends_when_the_loader_ends_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(40_960, 1)
    with unopened():
        parcel = received(sent(torch.ones(10_000), pool))
    monkeypatch.setattr(arena_pool, "must_end", lambda: True)
    with pytest.raises(LoaderClosed):
        pool.take(40_000)
    del parcel


def test_no_room_means_torchs_way_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_slot, "memory_bounds", lambda: [Bound(1000, "1000 B are left", memory=True)])
    pool = Pool(None, 1)
    with pytest.raises(NoSlot, match="1000 B"):
        Slot.make(40_960, 1)
    with unopened():
        batch = received(sent(torch.ones(10_000), pool))
    assert batch.note == pool.why == "1000 B are left" and not pool.slots
    assert batch.open().sum() == 10_000


def test_a_second_slot_leaves_room_for_the_first_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_pool, "memory_bounds", lambda: [Bound(100_000, "", memory=True)])
    monkeypatch.setattr(arena_pool, "_SHORT_PATIENCE_S", 0.2)
    pool = Pool(None, 4)
    kept = [received(sent(torch.full((10_000,), float(i)), pool)) for i in range(2)]
    assert len(pool.slots) == 2  # what is held does not count
    with unopened():
        parcel = received(sent(torch.ones(10_000), pool))
    assert not pool._may_add(40_960)
    del kept, parcel


def test_pieces_that_do_not_fit_are_not_half_written() -> None:
    slot = Slot.make(4096, 1)
    _, pieces = pickled([torch.ones(100), torch.ones(10_000)])
    assert write(pieces.all, regions(pieces.all), Writer(slot)) is None


def test_a_slot_collected_before_its_batch_is_written_to_no_more() -> None:
    slot = arena_slot.Slot.make(4096, 1)
    slot.__del__()  # as the collector calls it, in a cycle with objects that are finalized after it
    slot.state = arena_slot.FREE
    assert slot.state == arena_slot.FREE
    slot._unmap = slot.fd = None
