"""Slots, the pool of a worker, and how long the training process holds one; one process plays both sides."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legroom.cache.store_free_space import Bound
from legroom.errors import BatchLost, BudgetTooSmall, LoaderClosed
from legroom.loader.dataloader import memory_slots, receive
from legroom.loader.dataloader.collate import to_send
from legroom.loader.dataloader.memory_slots import FREE, HELD, RETIRED, SENT, NoSlot, Slot, SlotPool
from legroom.loader.dataloader.receive import ReceivedBatch, unopened
from legroom.loader.dataloader.send import SlotWriter, find_regions, pickle_batch, write_regions

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]
MB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    _end_loader()
    gc.collect()
    assert "legroom-batch" not in Path("/proc/self/maps").read_text()
    assert not [one for one in _descriptors() if "legroom-batch" in one]


class Owner:
    """In place of torch's iterator, with which the slots of its workers are dropped."""


def _end_loader() -> None:
    owner = Owner()
    receive.forget_with(owner, list(receive._workers))


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def sent(batch: Any, pool: SlotPool) -> bytes:
    """A batch as a worker's queue sends it."""
    writer = SlotWriter(pool.take(pool.expected) if pool.expected else None)
    return bytes(ForkingPickler.dumps(to_send(batch, writer, pool, None)))


def received(message: bytes) -> Any:
    return pickle.loads(message)


def test_a_batch_arrives_equal_in_the_slots_memory() -> None:
    pool = SlotPool(None, 1)
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
def test_any_live_part_of_a_batch_keeps_its_slot(keep: str) -> None:
    pool = SlotPool(None, 1)
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


def test_a_fast_consumer_needs_one_slot() -> None:
    pool = SlotPool(None, 2)
    for i in range(50):
        got = received(sent(torch.full((1000,), i), pool))
        assert got[0] == i
        del got
    assert len(pool.slots) == 1 and len(receive._slots) == 1


def test_beyond_two_slots_the_consumer_gets_copies() -> None:
    pool = SlotPool(None, 1)
    kept = [received(sent({"t": torch.full((1000,), i), "a": np.full(1000, i)}, pool)) for i in range(20)]
    for i, batch in enumerate(kept):
        assert (batch["t"] == i).all() and (batch["a"] == i).all()
        assert batch["t"].untyped_storage().nbytes() == 8000 and batch["a"].flags.writeable
        batch["t"][0] = -1
    assert sum(slot.state == HELD for slot in pool.slots) == 2
    assert len(pool.slots) == 3


def test_the_slot_of_an_outlier_is_not_kept() -> None:
    pool = SlotPool(None, 1)
    for size in (10, 5000, 20_000, 30_000, 3 * MB, *[30_000] * 40):
        got = received(sent(torch.ones(size), pool))
        assert got.sum() == size
        del got
    assert max(slot.capacity for slot in pool.slots) < 3 * MB


def test_a_batch_dropped_unopened_returns_its_slot() -> None:
    pool = SlotPool(None, 1)
    with unopened():
        received_batch = received(sent(torch.ones(1000), pool))
    assert isinstance(received_batch, ReceivedBatch)
    (slot,) = pool.slots
    assert slot.state == SENT
    del received_batch
    assert slot.state == FREE


def test_a_batch_without_bytes_needs_no_slot() -> None:
    pool = SlotPool(None, 1)
    assert received(sent({"a": 1, "b": ["x"]}, pool)) == {"a": 1, "b": ["x"]} and not pool.slots


def test_an_unpicklable_batch_fails_in_the_worker() -> None:
    with pytest.raises(Exception, match="pickle"):
        sent(threading.Lock(), SlotPool(None, 1))


def test_a_batch_kept_by_collate_is_not_overwritten() -> None:
    pool = SlotPool(None, 1)
    received(sent(torch.ones(1000), pool))
    writer = SlotWriter(pool.take(pool.expected))
    kept = writer.empty((1000,), torch.float32).fill_(7)
    first = writer.slot
    received(bytes(ForkingPickler.dumps(to_send(kept, writer, pool, None))))
    del writer
    for _ in range(3):
        received(sent(torch.zeros(1000), pool))
    assert (kept == 7).all() and first not in pool.slots


def test_a_forked_child_keeps_its_data() -> None:
    pool = SlotPool(None, 1)
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


def test_a_forked_child_returns_no_slot() -> None:
    pool = SlotPool(None, 1)
    got = received(sent(torch.ones(1000), pool))
    (slot,) = pool.slots
    child = os.fork()
    if child == 0:
        del got
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert slot.state == HELD and got.sum() == 1000


def _send_one(pipe: Any) -> None:
    pool = SlotPool(None, 1)
    pipe.send_bytes(sent(torch.ones(1000), pool))
    pipe.recv_bytes()  # until it was received


def test_slots_of_an_ended_worker_are_dropped() -> None:
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_send_one, args=(there,))
    worker.start()
    got = received(here.recv_bytes())
    receive.forget_ended_workers()
    assert len(receive._slots) == 1 and list(receive._workers) == [worker.pid]
    here.send_bytes(b"received")
    worker.join()
    receive.forget_ended_workers()
    assert len(receive._slots) == 0 and got.sum() == 1000  # still mapped under the tensor
    worker.close()


def test_a_file_that_is_not_the_slot_is_refused() -> None:
    slot = Slot.make(4096, 1)
    with pytest.raises(BatchLost, match="not the one that was sent"):
        receive.receive(os.getpid(), slot.fd, slot.id + 1, [(0, 8)], b"", False, None, None)
    with pytest.raises(BatchLost, match="No such file"):
        receive.receive(os.getpid(), 999_999, 1, [(0, 8)], b"", False, None, None)


def test_the_descriptor_of_a_refused_slot_is_closed_once() -> None:
    made = Slot.make(4096, 1)
    fd = os.dup(made.fd)
    with pytest.raises(OSError, match="not the one that was sent"):
        Slot.at(fd, made.id + 1, keep=True)
    other = os.dup(made.fd)
    gc.collect()  # the half-made slot is gone
    assert other == fd and os.fstat(other).st_size > 4096
    os.close(other)


def test_a_slot_cannot_be_truncated_under_its_map() -> None:
    slot = Slot.make(4096, 1)
    with pytest.raises(PermissionError):
        os.ftruncate(slot.fd, 0)


def test_a_worker_waits_for_its_budget() -> None:
    pool = SlotPool(2 * 40_960, 1)
    messages = [sent(torch.ones(10_000), pool) for _ in range(2)]
    started = time.monotonic()
    threading.Timer(0.3, lambda: messages and received(messages.pop(0))).start()
    assert pool.take(40_000) is not None
    assert time.monotonic() - started >= 0.3
    assert sum(slot.capacity for slot in pool.slots) <= 2 * 40_960


def test_held_slots_do_not_count_in_the_budget() -> None:
    pool = SlotPool(40_960, 1)  # one slot
    kept = [received(sent(torch.full((10_000,), float(i)), pool)) for i in range(10)]
    assert [int(batch[0]) for batch in kept] == list(range(10))


def test_a_budget_below_one_batch_is_an_error() -> None:
    with pytest.raises(BudgetTooSmall, match=r"4 workers × 40 KB per batch = 160 KB") as caught:
        sent(torch.ones(10_000), SlotPool(100_000, 4))
    assert "memory_budget='160K'" in str(caught.value)


def test_waiting_ends_with_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlotPool(40_960, 1)
    with unopened():
        received_batch = received(sent(torch.ones(10_000), pool))
    monkeypatch.setattr(memory_slots, "must_end", lambda: True)
    with pytest.raises(LoaderClosed):
        pool.take(40_000)
    del received_batch


def test_without_memory_torch_sends_the_batch_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_slots, "memory_bounds", lambda: [Bound(1000, lambda: "1000 B are left", memory=True)])
    pool = SlotPool(None, 1)
    with pytest.raises(NoSlot, match="1000 B"):
        Slot.make(40_960, 1)
    with unopened():
        batch = received(sent(torch.ones(10_000), pool))
    assert batch.note == pool.why == "1000 B are left" and not pool.slots
    assert batch.open().sum() == 10_000


def test_a_second_slot_leaves_memory_for_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_slots, "memory_bounds", lambda: [Bound(100_000, lambda: "", memory=True)])
    monkeypatch.setattr(memory_slots, "_LOW_MEMORY_WAIT_S", 0.2)
    pool = SlotPool(None, 4)
    kept = [received(sent(torch.full((10_000,), float(i)), pool)) for i in range(2)]
    assert len(pool.slots) == 2  # what is held does not count
    began = time.monotonic()
    with unopened():
        received_batch = received(sent(torch.ones(10_000), pool))
    assert time.monotonic() - began >= 0.2  # for one of the others to come back
    del kept, received_batch


def test_a_batch_that_does_not_fit_is_not_written() -> None:
    slot = Slot.make(4096, 1)
    _, pieces = pickle_batch([torch.ones(100), torch.ones(10_000)])
    assert write_regions(pieces.all, find_regions(pieces.all), SlotWriter(slot)) is None


def test_a_collected_slot_is_not_written_to() -> None:
    slot = memory_slots.Slot.make(4096, 1)
    slot.__del__()  # as the collector calls it, in a cycle with objects that are finalized after it
    slot.state = memory_slots.FREE
    assert slot.state == memory_slots.FREE
    slot._unmap = slot.fd = None


def test_a_released_slot_frees_its_pages_although_others_map_it() -> None:
    slot = Slot.make(8 * MB, 1)
    assert slot.fd is not None
    other = Slot.find(os.getpid(), slot.fd, slot.id)
    slot.release()
    assert other.released and os.fstat(slot.fd).st_blocks * 512 < MB


def test_a_released_slot_that_is_held_keeps_its_pages() -> None:
    slot = Slot.make(MB, 1)
    assert slot.fd is not None
    slot.state = HELD
    slot.release()
    assert os.fstat(slot.fd).st_blocks * 512 >= MB


def test_with_low_memory_one_batch_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, noticed = SlotPool(None, 2), threading.Event()
    first = pool.take(MB)
    assert first is not None
    first.state = SENT
    second = pool.take(MB)
    assert second is not None and second is not first

    def little() -> list[Bound]:
        noticed.set()
        return [Bound(3 * MB, lambda: "little", memory=True)]

    monkeypatch.setattr(memory_slots, "memory_bounds", little)
    assert pool.take(MB) is second  # low memory was not noticed yet
    second.state = SENT
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(pool.take, MB)
        assert noticed.wait(60)
        second.state = FREE  # not taken: the first is still in flight
        deadline = time.monotonic() + 60
        while pool.slots != [first] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert pool.slots == [first] and not taken.done()
        first.state = FREE
        assert taken.result(60) is first
