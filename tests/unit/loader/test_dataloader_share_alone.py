"""A trainer that is alone has no producer; streams in a group; a group that waits for its slow trainer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import share_data
from share_data import Counting, Noise, Trainers, reference

from legroom.errors import ShareMismatch, WorkerDied
from legroom.loader.dataloader.sharing.group_folder import groups

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork", "ignore:This DataLoader will create"),
]
joins_late = pytest.mark.load_sensitive(
    reason="a trainer joins its group when it gets a core, and makes its batches itself until then"
)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trainers in a store of their own; afterwards no process and no file of a group is left."""
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path))
    made: list[Trainers] = []

    def trainers(dataset: Any, **given: Any) -> Trainers:
        made.append(Trainers(tmp_path, dataset=dataset, **given))
        return made[-1]

    yield trainers
    for one in made:
        one.end()
        until = time.monotonic() + 60
        while one.producers() and time.monotonic() < until:
            time.sleep(0.05)
        assert not one.producers()
    groups()  # removes what killed trainers have left
    assert not [path.name for path in (tmp_path / f"legroom-{os.geteuid()}" / "share").glob("*")]


def lines(loader: Any, epoch: int) -> list[str]:
    return [share_data.line(epoch, number, batch) for number, batch in enumerate(loader)]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_trainer_alone_has_workers_of_its_own_and_no_producer(make: Any, persistent: bool) -> None:
    group = make(Noise(40), persistent_workers=persistent)
    loader = group.loader()
    expected = reference(loader, 2)
    iterator = iter(loader)
    first = share_data.workers_of(os.getpid())
    assert len(first) >= 2  # as without share, workers start with the epoch
    assert [share_data.line(0, number, batch) for number, batch in enumerate(iterator)] == expected[:10]
    assert lines(loader, 1) == expected[10:]
    assert not group.producers()
    (status,) = groups()
    assert status["producer"] is None and status["trainers"][0]["state"] == "alone"
    assert (loader._sharing._own._loader is not None) is persistent
    del iterator, loader
    assert groups() == []


def test_workers_of_a_trainer_alone_end_with_the_loop(make: Any) -> None:
    loader = make(Noise(400)).loader()
    for _batch in loader:
        pids = loader._sharing._own._inner._workers
        break
    until = time.monotonic() + 60
    while any(one.is_alive() for one in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(one.is_alive() for one in pids) and loader.state_dict()["yielded"] == 1
    assert len(lines(loader, 1)) == 100  # the next epoch


def test_a_worker_of_a_trainer_alone_that_is_killed_is_replaced(make: Any, tmp_path: Path) -> None:
    once = str(tmp_path / "died")
    loader = make(share_data.Deadly(80, once=once), num_workers=1).loader()
    expected = reference(loader, 1)
    assert lines(loader, 0) == expected and os.path.exists(once)
    with pytest.raises(WorkerDied):  # not an accident
        lines(make(share_data.Deadly(80), num_workers=1, share="other").loader(), 0)


def test_two_iterators_of_one_loader_have_their_own_workers(make: Any) -> None:
    loader = make(Noise(24)).loader()
    expected = reference(loader, 1)
    both = [
        share_data.line(0, number, one) for number, pair in enumerate(zip(loader, loader, strict=True)) for one in pair
    ]
    assert both[::2] == both[1::2] == expected  # both are the iterators of the first epoch


@joins_late
def test_a_trainer_alone_joins_the_group_of_the_next_and_goes_alone_again(make: Any, tmp_path: Path) -> None:
    group = make(Noise(400, seconds=0.002))
    loader = group.loader()
    expected = reference(loader, 1)
    found, iterator = [], iter(loader)
    found.append(share_data.line(0, 0, next(iterator)))
    group.start(1, pause=0.05)
    (tmp_path / "producer runs").touch()
    until, shared, status = time.monotonic() + 90, False, []
    for number, batch in enumerate(iterator, 1):
        found.append(share_data.line(0, number, batch))
        shared = shared or (loader._sharing._group.welcome and not loader._sharing._group.missed)
        if number == 10:
            while not status and time.monotonic() < until:
                time.sleep(0.05)
                status = [one for one in groups() if one["producer"]]
    group.join()
    assert found == expected and group.lines(0) == [*expected, "end"] and shared and status
    while not loader._sharing._group.alone:  # told by the producer after a while: it ends then
        assert time.monotonic() < until
        for _batch in loader:
            time.sleep(0.1)
            if loader._sharing._group.alone:
                break
    loader._sharing.position = (0, 0)
    loader._sharing._current = None
    assert lines(loader, 0) == expected


@joins_late
def test_one_that_comes_with_other_arguments_is_refused_and_the_first_continues(make: Any) -> None:
    group = make(Noise(40))
    loader = group.loader()
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ShareMismatch, match="batch_size"):
        iter(group.loader(batch_size=5))
    assert len(list(iterator)) == 9


@joins_late
def test_two_distributed_jobs_share_rank_by_rank(make: Any) -> None:
    data = Noise(480)
    group = make(data, shuffle=None)

    def sampler(rank: int) -> Any:
        return torch.utils.data.DistributedSampler(data, num_replicas=2, rank=rank, seed=3)

    for rank in (0, 1, 0, 1):
        group.start(10_000, pause=0.03, sampler=sampler(rank))
    group.wait_for(lambda: sum(status["batches"] > 0 for status in groups()) == 2)
    group.wait_for(
        lambda: all(path.exists() and path.stat().st_size for path in group.names)
    )  # each has its first batch
    (group.folder / "producer runs").touch()

    def members() -> list[tuple[int, bool]]:
        found = [status["trainers"] for status in groups() if status["producer"]]
        return [(len(trainers), any(one["shared"] > 3 for one in trainers)) for trainers in found]

    # A group of two for each rank. One that falls behind the window at its start makes its batches itself.
    group.wait_for(lambda: members() == [(2, True), (2, True)] and all(len(group.lines(n)) > 4 for n in range(4)))
    (group.folder / "stop").touch()
    group.join()
    found = [group.lines(number)[:-1] for number in range(4)]
    epochs = 1 + max(int(lines[-1].split()[0]) for lines in found)
    expected = [reference(group.loader(sampler=sampler(rank)), epochs) for rank in (0, 1)]
    assert not set(expected[0]) & set(expected[1])
    for number, lines in enumerate(found):
        assert len(lines) > 3 and lines == expected[number % 2][: len(lines)]


def stream_reference(loader: Any, epochs: int) -> list[str]:
    return [one for epoch in range(epochs) for one in lines(loader, epoch)]


def test_a_stream_with_a_state_is_shared_through_kills(make: Any) -> None:
    group = make(Counting(203), shuffle=None)
    alone = group.loader(share="reference", generator=torch.Generator().manual_seed(group.loader()._sharing.seed))
    expected = stream_reference(alone, 3)
    del alone
    assert expected[0] != expected[51].replace("1 ", "0 ", 1)  # another epoch, other random numbers
    group.slow_after(10)
    group.start(3, pause=0.01)
    group.start(2, pause=0.02)
    group.await_producer()
    group.wait_for(lambda: any(one["shared"] > 3 for status in groups() for one in status["trainers"]))
    group.kill_worker()
    here = len(group.lines(0))
    group.slow_after(here + 15)
    group.wait_for(lambda: len(group.lines(0)) > here + 10)
    group.kill_producers()
    group.slow_after(1000)
    group.join()
    assert group.lines(0) == [*expected, "end"]
    assert group.lines(1) == [*(one for one in expected if not one.startswith("2 ")), "end"]


def test_the_state_of_a_stream_resumes_in_the_middle_of_an_epoch(make: Any) -> None:
    group = make(Counting(90), shuffle=None)
    loader = group.loader()
    expected = stream_reference(loader, 2)
    per_epoch = len([one for one in expected if one.startswith("0 ")])
    assert loader.state_dict()["epoch"] == 2 and not loader.state_dict()["begun"]
    resumed = group.loader()
    for number, _batch in enumerate(resumed):
        if number == 6:
            break
    state = resumed.state_dict()
    del resumed, loader
    again = group.loader()
    again.load_state_dict(state)
    assert again.state_dict()["workers"] == state["workers"]
    found = [share_data.line(0, number, batch) for number, batch in enumerate(again, 7)]
    assert found == expected[7:per_epoch] and lines(again, 1) == expected[per_epoch:]


@joins_late
def test_on_slow_wait_holds_the_fast_trainer_back(make: Any, tmp_path: Path) -> None:
    group = make(Noise(800), on_slow="wait", timeout=100)
    expected = reference(group.loader(), 1)
    group.start(1, stop_at=30)
    group.start(1)
    group.await_producer()
    group.wait_for(lambda: len(group.lines(0)) == 30 and any(
        {one["state"] for one in status["trainers"]} == {"slow", "waiting"} for status in groups()))  # fmt: skip
    here = len(group.lines(1))
    time.sleep(1.5)  # longer than on_slow="own" would wait
    assert len(group.lines(1)) == here < 200
    (tmp_path / "continue").touch()
    group.join()
    assert group.lines(0) == group.lines(1) == [*expected, "end"]


@joins_late
def test_on_slow_wait_ends_after_its_timeout(make: Any, tmp_path: Path) -> None:
    group = make(Noise(800), on_slow="wait", timeout=2)
    expected = reference(group.loader(), 1)
    group.start(1, stop_at=30)
    group.start(1)
    group.await_producer()
    group.wait_for(lambda: group.lines(1)[-1:] == ["end"])
    assert len(group.lines(0)) == 30
    (tmp_path / "continue").touch()
    group.join()
    assert group.lines(0) == group.lines(1) == [*expected, "end"]
