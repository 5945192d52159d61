"""Trainers of a group that Ctrl-C or an error strikes: each still gets every batch once, and its state counts no other."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import share_data
from share_data import Counting, Failing, Noise, Trainers, reference

from interrupted_loops import Interrupted, InterruptedAt

torch = pytest.importorskip("torch")
from legroom.loader.dataloader import epoch_iterator, receive  # noqa: E402
from legroom.loader.dataloader.sharing import (  # noqa: E402
    make_batches_in_trainer,
    map_slots_in_trainer,
    producer_client,
    producer_messages,
    shared_epoch_iterator,
)
from legroom.loader.dataloader.sharing.batch_window_and_late_joiners import Answer, Window  # noqa: E402
from legroom.loader.dataloader.sharing.map_slots_in_trainer import PrivateSlots, _Lease  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings(
        "ignore:.*multi-threaded, use of fork", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]
traced = pytest.mark.skipif(sys.implementation.name != "cpython", reason="raises from a trace function")
MODULES = [shared_epoch_iterator, producer_client, make_batches_in_trainer, map_slots_in_trainer, producer_messages]
FILES = [str(module.__file__) for module in [*MODULES, epoch_iterator, receive]]
OWN_FILES = [str(module.__file__) for module in (shared_epoch_iterator, make_batches_in_trainer)]
os.register_at_fork(after_in_child=lambda: sys.settrace(None))  # only the trainer is interrupted


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loaders in a store of their own; afterwards no producer is left."""
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path))
    yield lambda data, **given: Trainers(tmp_path, dataset=data, num_workers=1, **given).loader()
    gc.collect()
    trainers, until = Trainers(tmp_path), time.monotonic() + 60
    while trainers.producers() and time.monotonic() < until:
        time.sleep(0.02)
    assert not trainers.producers()


def interrupted(loader: Any, files: list[str], step: int, other: Any = None) -> tuple[list[str], int]:
    """The lines of an epoch in which an interruption strikes before each batch, each time some lines later.

    After it, the loop is used again, or another begins with the state. ``other`` takes as many batches.
    """
    loop, found, first, number, strikes = iter(loader), list[str](), 1, 1, 0
    epoch = loader.state_dict()["epoch"]
    while True:
        if other is not None:
            next(other, None)
        ends = InterruptedAt(number, *files)
        try:
            with ends:
                batch = next(loop)
        except StopIteration:
            return found, strikes
        except Interrupted:
            strikes, number = strikes + 1, number + step
            state = loader.state_dict()
            over = state["epoch"] > epoch
            assert over or state["yielded"] == len(found)
            if strikes % 2 and not over:
                loader.load_state_dict({**state, "begun": True})
                loop = iter(loader)
            batch = next(loop, None)
            if batch is None:
                return found, strikes
            assert not over
        else:
            number = first = first + 1
        found.append(share_data.line(epoch, len(found), batch))


@traced
def test_a_trainer_alone_that_is_interrupted_at_any_line_gets_every_batch_once(make: Any) -> None:
    loader = make(Noise(300))
    found, strikes = interrupted(loader, OWN_FILES, 1)
    assert found == reference(loader, 1) and strikes > 50


@traced
def test_a_stream_that_is_interrupted_at_any_line_gets_every_batch_once(make: Any) -> None:
    expected = [share_data.line(0, number, batch) for number, batch in enumerate(make(Counting(200), shuffle=None))]
    found, strikes = interrupted(make(Counting(200), shuffle=None), OWN_FILES, 1)
    assert found == expected and strikes > 30


@traced
def test_a_trainer_of_a_group_that_is_interrupted_at_any_line_gets_every_batch_once(make: Any) -> None:
    with share_data.another_trainer("tests"):
        other, loader = make(Noise(1600)), make(Noise(1600))
        while not (other._sharing._group and other._sharing._group.welcome and not other._sharing._group.missed):
            for _batch in other:
                time.sleep(0.02)
                if other._sharing._group.welcome:
                    break
        for one in other, loader:
            one.load_state_dict({**one.state_dict(), "begun": True, "epoch": 5, "yielded": 0})
        found, strikes = interrupted(loader, FILES, 3, iter(other))
        assert found == reference(loader, 6)[-400:] and strikes > 100
        slots = loader._sharing._group.slots
        assert slots is None or len(slots._lent) <= 2
        del _batch, other, loader, one, slots


def test_an_iterator_that_does_not_start_leaves_the_position(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make(Noise(40))
    expected = reference(loader, 1)
    loader.load_state_dict({**loader.state_dict(), "begun": True, "yielded": 6})

    def strike(*_: Any, **__: Any) -> None:
        raise Interrupted

    for where, name in (make_batches_in_trainer.OwnBatches, "__init__"), (make_batches_in_trainer.OwnBatches, "start"):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, strike)
            with pytest.raises(Interrupted):
                iter(loader)
        assert loader.state_dict()["yielded"] == 6
    assert [share_data.line(0, number, batch) for number, batch in enumerate(loader, 6)] == expected[6:]


def test_a_state_begins_with_the_batch_that_failed_until_another_is_returned(make: Any) -> None:
    loader = make(Failing(40), shuffle=False)
    expected, loop = reference(make(Noise(40), shuffle=False), 1), iter(loader)
    for number in range(3):
        assert share_data.line(0, number, next(loop)) == expected[number]
    with pytest.raises(KeyError):
        next(loop)
    assert loader.state_dict()["yielded"] == 3
    assert share_data.line(0, 4, next(loop)) == expected[4] and loader.state_dict()["yielded"] == 5


def test_an_error_that_is_not_of_the_batch_leaves_none_out(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make(Noise(40))
    expected, loop = reference(loader, 1), iter(loader)
    assert share_data.line(0, 0, next(loop)) == expected[0]
    plain, left = receive.ReceivedBatch.open, [1]

    def without_memory(*given: Any) -> Any:
        if left:
            raise MemoryError(left.pop())
        return plain(*given)

    monkeypatch.setattr(receive.ReceivedBatch, "open", without_memory)
    with pytest.raises(MemoryError):
        next(loop)
    assert loader.state_dict()["yielded"] == 1
    assert [share_data.line(0, number, batch) for number, batch in enumerate(loop, 1)] == expected[1:]


def test_a_batch_that_a_trainer_got_twice_is_kept_until_both_are_gone() -> None:
    dropped: list[Any] = []
    window = Window((0, 0), lambda _: 9, dropped.append)
    window.join(1, 1.0)
    window.join(2, 1.0)
    window.add(1, None)
    window.want(2, (0, 0))
    leases = []
    for _ in range(2):
        assert window.want(1, (0, 0)) is Answer.GRANT
        leases.append((window.entries[0, 0].serial, window.members[1].granted))
        window.granted(1)
    window.leave(2)
    window.want(1, (0, 1))
    for _ in range(2):
        window.release(1, *leases[0])  # a message that an interruption has repeated
    window.trim()
    assert not dropped
    window.release(1, *leases[1])
    assert len(dropped) == 1


@pytest.mark.parametrize("where", ["send", "give_back"])
def test_a_release_that_is_interrupted_is_sent_with_the_next_batch(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    strike = [True]

    def interruptible(*message: Any) -> bool:
        if strike:
            strike.clear()
            raise Interrupted
        sent.append(message)
        return True

    slots = PrivateSlots(SimpleNamespace(send=interruptible))  # type: ignore[arg-type]
    lease = _Lease(slots, (3, 1))
    slots._leases.add(lease)
    slots._lent.add(lease.id)
    slots.reclaim()
    assert not sent
    with monkeypatch.context() as patched:
        patched.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps the lease
        if where == "give_back":
            patched.setattr(PrivateSlots, "give_back", interruptible)
        del lease  # an error in __del__ is not raised
    assert not sent
    slots.reclaim()
    assert ("release", (3, 1)) in sent and not slots._lent
