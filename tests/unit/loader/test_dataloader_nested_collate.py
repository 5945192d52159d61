"""legroom.collate() within other functions and loaders, and programs that change their user: batches arrive as plain ones."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_runner import Runner

import legroom
from legroom.loader.dataloader import receive
from legroom.loader.dataloader.queues import Descriptors
from legroom.loader.dataloader.receive import SentBatch
from open_descriptors import open_descriptors

torch = pytest.importorskip("torch")
data = torch.utils.data
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork"),
]


class Rows(data.Dataset):  # type: ignore[misc, name-defined]
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((300,), float(index)), "y": index}


class Changes:
    """A collate function of another library that changes a batch."""

    def __init__(self) -> None:
        self.inner = legroom.collate()

    def __call__(self, samples: Any) -> Any:
        batch = self.inner(samples)
        assert type(batch) is dict
        return {**batch, "count": len(batch["x"])}


class Prepares(Changes):
    """A collate function that prepares the samples and calls the next one."""

    def __call__(self, samples: Any) -> Any:
        samples = [{"x": sample["x"]} for sample in samples]
        return self.inner(samples)


class Keeps(Changes):
    """A collate function that keeps the result in a variable before it returns it."""

    def __call__(self, samples: Any) -> Any:
        batch = self.inner(samples)
        return batch  # noqa: RET504 - that is what is tested


class Inner(data.Dataset):  # type: ignore[misc, name-defined]
    """A loader within a worker."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        for number, batch in enumerate(data.DataLoader(Rows(), 4, collate_fn=legroom.collate())):
            if number == index:
                return batch["x"] + 0 * batch["y"][0]
        raise IndexError(index)


class ByHand(Rows):
    """A dataset that collates by itself."""

    collate = legroom.collate()

    def __getitems__(self, indices: list[int]) -> Any:
        batch = self.collate([self[index] for index in indices])
        return [{"x": row, "y": 0} for row in batch["x"]]


@pytest.mark.parametrize("kind", [legroom.DataLoader, data.DataLoader], ids=["ours", "torch's"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_around_it_gets_a_batch(kind: Any, workers: int) -> None:
    loader = kind(Rows(), 4, num_workers=workers, collate_fn=Changes())
    got = list(loader)
    assert [batch["count"] for batch in got] == [4] * 6
    assert torch.equal(torch.cat([batch["x"] for batch in got])[:, 0], torch.arange(24.0))


@pytest.mark.parametrize("dataset", [Inner, ByHand])
def test_a_loader_or_dataset_in_a_worker_gets_a_batch(dataset: Any) -> None:
    batch_size = None if dataset is Inner else 4
    got = [batch["x"] if isinstance(batch, dict) else batch
           for batch in data.DataLoader(dataset(), batch_size, num_workers=1)]  # fmt: skip
    assert torch.equal(torch.cat(got)[:, 0], torch.arange(24.0))


@pytest.mark.parametrize("wrap", [Prepares, Keeps, Changes, lambda: functools.partial(Prepares())])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_function_around_it_returns_is_carried_from_the_second_batch_on(
    wrap: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    iterator = iter(data.DataLoader(Rows(), 4, num_workers=1, collate_fn=wrap(), multiprocessing_context=method))
    first, second = next(iterator), next(iterator)
    assert len(receive._slots) and first["x"][3, 0] == 3 and second["x"][3, 0] == 7
    assert set(second) == set(first) and not caplog.records
    del second, iterator
    receive.forget_ended_workers()


class Mapped(data.IterableDataset):  # type: ignore[misc, name-defined]
    """Its samples are made by the very function that collates them."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __iter__(self) -> Any:
        return map(self.collate, ([torch.full((300,), float(number))] * 2 for number in range(4)))


def test_a_dataset_that_calls_the_loaders_own_collate_function_gets_batches() -> None:
    collate = legroom.collate()
    loader = data.DataLoader(Mapped(collate), 2, num_workers=1, collate_fn=collate, multiprocessing_context="fork")
    got = list(loader)
    assert [tuple(batch.shape) for batch in got] == [(2, 2, 300)] * 2 and len(receive._slots)
    assert torch.equal(torch.cat(got)[:, 0, 0], torch.arange(4.0))
    del got, loader
    receive.forget_ended_workers()


def test_the_warning_is_given_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    info = type("Info", (), {"id": 0, "num_workers": 1, "dataset": Rows()})
    monkeypatch.setattr(data, "get_worker_info", info)
    collate = legroom.collate()
    with caplog.at_level(logging.WARNING, "legroom"):
        for _ in range(3):
            assert collate([torch.ones(3)] * 2).shape == (2, 3)
    assert [record.message.count("outermost") for record in caplog.records] == [1]


PROGRAM = """
import ctypes, os, sys, warnings
import torch, legroom
warnings.filterwarnings("ignore")
# torch waits so long for a worker to end and then kills it, which another user may not.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 200.0

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index): return torch.full((300 * (1 + index // 4),), float(index))

def other_user(worker): os.setuid(23456)

def main(when, method):
    # Imports what that user may not be allowed to read.
    list(legroom.DataLoader(Rows(), 4, num_workers=1, multiprocessing_context="fork"))
    if when == "before":
        os.setuid(12345)
        assert ctypes.CDLL(None).prctl(3) != 1  # such a process cannot be looked into by its own user
    init = other_user if when == "in the workers" else None
    workers = 1 if method == "spawn" else 2  # each that is spawned imports torch
    loader = legroom.DataLoader(Rows(), 4, num_workers=workers, multiprocessing_context=method, worker_init_fn=init)
    iterator = iter(loader)
    if when != "before":
        os.setuid(12345)
    got = [int(batch[3, 0]) for batch in iterator]
    assert got == list(range(3, 40, 4)) and loader.transport == "arena", got
    print("all came")

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Runner]:
    """Runs programs in forks of a process that has imported torch."""
    process = Runner("torch", "legroom")
    yield process
    process.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("when", ["before", "after", "in the workers"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_change_of_user_loses_no_batch(when: str, method: str, forks: Runner, tmp_path: Path) -> None:
    if (when, method) == ("before", "spawn"):
        pytest.skip("that user may not be allowed to start this Python")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    _, said = forks.run(script, tmp_path, dict(os.environ), when, method)
    assert "all came" in said, said[-2000:]


def test_descriptors_come_once_and_none_is_left() -> None:
    before = open_descriptors()
    channel = Descriptors()
    read, write = os.pipe()
    for number in (5, 5, 6, 2**63):
        channel.send(number, read)
    assert channel.take(7) is None
    came = [channel.take(number) for number in (6, 2**63)]
    assert all(fd is not None and os.fstat(fd).st_ino == os.fstat(read).st_ino for fd in came)
    assert channel.take(6) is None
    for fd in (*came, read, write):
        os.close(fd)  # type: ignore[arg-type]
    del channel  # with the one of slot 5 that nobody took
    assert not open_descriptors() - before


def test_a_full_socket_delays_no_process() -> None:
    channel = Descriptors()
    read, write = os.pipe()
    for number in range(5000):
        channel.send(number, read)
    first = channel.take(0)
    assert first is not None and channel.take(4999) is None
    for fd in (first, read, write):
        os.close(fd)


def test_what_is_sent_by_torchs_way_has_no_descriptor() -> None:
    class Never:
        def send(self, number: int, fd: int) -> None:
            raise AssertionError

    SentBatch(1, -1, 0, [], b"", True, None, None).send_descriptor(Never())  # type: ignore[arg-type]
