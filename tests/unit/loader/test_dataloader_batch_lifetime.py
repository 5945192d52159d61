"""What remains after a loader has ended: live tensors and nothing else. What each batch costs its worker."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import legroom
from legroom.loader.dataloader import admit_workers_by_memory, receive
from legroom.loader.measure_process_memory import FreeMemory

torch = pytest.importorskip("torch")
data = torch.utils.data
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork"),
]
MB = 1 << 20


class Rows(data.Dataset):  # type: ignore[misc, name-defined]
    """Each a megabyte."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((MB // 4,), float(index))


class HalfSecond(Rows):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.5)
        return super().__getitem__(index)


class Slow(Rows):
    """At work on its first samples."""

    def __getitem__(self, index: int) -> Any:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            pass
        return super().__getitem__(index)


def slots() -> tuple[int, int]:
    """How many slots this process has mapped, and the bytes of them that are in memory."""
    text, resident = Path("/proc/self/smaps").read_text(), 0
    parts = re.findall(r"legroom-batch.*?\nRss: +(\d+) kB", text, re.S)
    for part in parts:
        resident += int(part) * 1024
    return len(parts), resident


@pytest.fixture(autouse=True)
def _none_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    until = time.monotonic() + 60
    while slots() != (0, 0) and time.monotonic() < until:
        multiprocessing.active_children()  # waits for workers of earlier tests that have ended by now
        receive.forget_ended_workers()
    assert slots() == (0, 0)
    # torch waits so long for each worker that does not end by itself, and not for its end after SIGTERM.
    monkeypatch.setattr(data._utils, "MP_STATUS_CHECK_INTERVAL", 60)
    yield


@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("waiting", ["for memory, legroom", "for memory, torch", "to start"])
def test_workers_that_wait_end_with_their_loader(lasting: bool, waiting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"num_workers": 3, "prefetch_factor": 8, "batch_size": 1}
    options |= {"multiprocessing_context": "fork", "persistent_workers": lasting}
    if waiting == "for memory, legroom":
        loader = legroom.DataLoader(Rows(), memory_budget=7 * MB, **options)
    elif waiting == "for memory, torch":
        loader = data.DataLoader(Rows(), collate_fn=legroom.collate(memory_budget=7 * MB), **options)
    else:
        monkeypatch.setattr(admit_workers_by_memory, "free_memory_now", lambda: FreeMemory(900 * MB, "here"))
        loader = legroom.DataLoader(Slow(), **options)
    iterator = iter(loader)
    if waiting != "to start":
        next(iterator)
    time.sleep(1.5)
    began = time.monotonic()
    del loader, iterator
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("noticed", ["in a batch", "in the program"])
def test_an_iterator_whose_worker_was_killed_ends_the_others(noticed: str) -> None:
    gc.disable()
    try:
        # A batch takes half a second, so the program waits for one.
        iterator = iter(legroom.DataLoader(HalfSecond(), 1, num_workers=2, multiprocessing_context="fork"))
        next(iterator)
        processes = list(iterator._workers)
        with contextlib.suppress(RuntimeError):
            threading.Timer(0.2, os.kill, (processes[0].pid, signal.SIGKILL)).start()
            for _ in iterator if noticed == "in a batch" else iter(range(60)):
                time.sleep(0 if noticed == "in a batch" else 1)
        del iterator
        assert [process.is_alive() for process in processes] == [False, False]
    finally:
        gc.enable()


@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("left", ["at the end", "in the middle", "after two epochs"])
def test_an_ended_loader_has_no_slots(lasting: bool, left: str) -> None:
    loader = legroom.DataLoader(Rows(), 4, num_workers=2, persistent_workers=lasting)
    for _ in range(2 if left == "after two epochs" else 1):
        for number, _ in enumerate(loader):
            if left == "in the middle" and number == 5:
                break
    del _
    del loader
    assert slots() == (0, 0)  # without collecting garbage


@pytest.mark.parametrize("lasting", [True, False])
def test_live_tensors_keep_their_data(lasting: bool) -> None:
    loader = legroom.DataLoader(Rows(), 4, num_workers=1, persistent_workers=lasting)
    kept = [batch for number, batch in zip(range(4), loader, strict=False)]
    del loader
    count, resident = slots()
    assert count == receive.MAX_HELD and resident < (count + 1) * 4 * MB
    assert [int(batch[0, 0]) for batch in kept] == [0, 4, 8, 12]
    del kept[0]
    assert slots()[0] == count - 1
    kept.clear()
    assert slots() == (0, 0)


def test_a_loader_in_a_cycle_is_collected_with_its_slots() -> None:
    loader = legroom.DataLoader(Rows(), 4, num_workers=1, persistent_workers=True)
    loader.itself = loader
    next(iter(loader))
    del loader
    gc.collect()
    assert slots() == (0, 0)


def test_workers_that_were_replaced_have_no_slots() -> None:
    loader = legroom.DataLoader(Rows(), 4, num_workers=1, persistent_workers=True)
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)  # ends the workers
    assert slots() == (0, 0)


def test_torchs_loader_with_legroom_collate_keeps_no_pages() -> None:
    iterator = iter(data.DataLoader(Rows(), 4, num_workers=2, collate_fn=legroom.collate()))
    assert [int(next(iterator)[0, 0]) for _ in range(6)] == list(range(0, 24, 4))
    assert slots()[1] >= 4 * MB
    assert [int(batch[0, 0]) for batch in iterator] == list(range(24, 64, 4))
    del iterator
    assert slots()[1] < MB  # mapped at most
    receive.forget_ended_workers()
    assert slots() == (0, 0)


class Weights(torch.nn.Module, data.IterableDataset):  # type: ignore[misc, name-defined]
    """A dataset with a model in it: its state_dict is the model's, and says nothing about the place in the data."""

    asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1000, 1000)

    def __iter__(self) -> Iterator[Any]:
        for index in range(12):
            yield torch.tensor([index, Weights.asked])

    def state_dict(self, *given: Any, **options: Any) -> Any:
        Weights.asked += 1
        return super().state_dict(*given, **options)


class OnlyWeights(Weights):
    state_dict = torch.nn.Module.state_dict


class NoWayBack(data.IterableDataset):  # type: ignore[misc, name-defined]
    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(12)

    def state_dict(self) -> Any:
        raise AssertionError("without load_state_dict it is of no use")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [OnlyWeights, NoWayBack])
def test_a_state_dict_without_a_position_is_not_called(kind: Any, workers: int) -> None:
    loader = legroom.DataLoader(kind(), 2, num_workers=workers)
    iterator = iter(loader)
    first = [next(iterator).reshape(2, -1)[:, 0].tolist() for _ in range(2)]
    state = loader.state_dict()
    assert not state["workers"]
    del iterator
    again = legroom.DataLoader(kind(), 2, num_workers=workers)
    again.load_state_dict(state)
    rest = [batch.reshape(2, -1)[:, 0].tolist() for batch in again]
    assert first + rest == [[at, at + 1] for at in range(0, 12, 2)]


def test_a_modules_own_state_dict_is_called() -> None:
    loader = legroom.DataLoader(Weights(), 2, num_workers=1)
    iterator = iter(loader)
    assert next(iterator) is not None and loader.state_dict()["workers"]
    assert Weights.asked == 0
