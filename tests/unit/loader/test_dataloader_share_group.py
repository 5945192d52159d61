"""Groups of real trainers: every trainer gets every batch once, in order, whatever happens to the others."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import share_data
from share_data import Noise, Trainers, reference

from legroom.errors import BudgetTooSmall, ShareMismatch, ShareUnsupported
from legroom.loader.dataloader.memory_slots import Slot
from legroom.loader.dataloader.sharing import group_settings, producer_client, start_producer_process
from legroom.loader.dataloader.sharing.batch_window_and_late_joiners import MadeBatch, Window
from legroom.loader.dataloader.sharing.group_folder import SOCKET, GroupFiles, groups
from legroom.loader.dataloader.sharing.map_slots_in_trainer import PrivateSlots
from legroom.loader.dataloader.sharing.produce_and_serve_batches import Made, Producer, Trainer
from legroom.loader.dataloader.sharing.producer_client import Group, LongWaits
from legroom.loader.dataloader.sharing.producer_messages import Closed, Connection
from legroom.system.unix_sockets import HIDDEN, listen

torch = pytest.importorskip("torch")
import legroom  # noqa: E402  its DataLoader needs torch

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork", "ignore:This DataLoader will create"),
]
joins_late = pytest.mark.load_sensitive(
    reason="a trainer joins its group when it gets a core, and makes its batches itself until then"
)


SEED = int(os.environ["LEGROOM_SOAK_SEED"]) if "LEGROOM_SOAK_SEED" in os.environ else None  # tests do not see it


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of its own; afterwards no producer, worker or file of a group is left."""
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path))
    with share_data.another_trainer("tests"):
        yield tmp_path
    trainers, shared = Trainers(tmp_path), tmp_path / f"legroom-{os.geteuid()}" / "share"

    def left() -> list[Any]:  # a producer that was forked has the command line of its trainer, but it has files
        return [*trainers.producers(), *(path for path in shared.glob("*") if path.suffix != ".log")]

    until = time.monotonic() + 120
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    assert not left()


@pytest.fixture
def make(folder: Path) -> Iterator[Any]:
    made: list[Trainers] = []

    def trainers(dataset: Any, **given: Any) -> Trainers:
        made.append(Trainers(folder, dataset=dataset, **given))
        return made[-1]

    yield trainers
    for one in made:
        one.end()


@joins_late
def test_trainers_share_one_producer_and_leave_as_they_like(make: Any) -> None:
    group = make(Noise(80, seconds=0.002))
    expected = reference(group.loader(), 3)
    group.start(3, pause=0.005)
    group.start(2)
    group.start(3, leave_at=7)
    group.await_producer()
    group.wait_for(lambda: len(group.lines(0)) > 25)
    group.start(1)  # it joins late, at its own epoch 0
    (status,) = groups()
    assert status["name"] == "tests" and [status["producer"]] == group.producers()
    assert max(one["shared"] for one in status["trainers"]) > 5
    group.join()
    assert group.lines(0) == [*expected, "end"]
    assert group.lines(1) == [*expected[:40], "end"]
    left_early = [one for one in expected if int(one.split()[1]) < 7]
    assert group.lines(2) == [*left_early, "end"]
    assert group.lines(3) == [*expected[:20], "end"]


@pytest.mark.parametrize("shared", [False, True])
def test_an_epoch_without_batches_is_followed_by_the_next(make: Any, shared: bool) -> None:
    group = make(Noise(40), shuffle=None, sampler=share_data.EveryOtherEpoch(40))
    loader = group.loader()
    expected = reference(loader, 20)
    if shared:
        group.start(20, pause=0.02)
        group.await_producer()
    found = [share_data.line(epoch, number, batch) for epoch in range(20) for number, batch in enumerate(loader)]
    group.join()
    assert found == expected and {line.split()[0] for line in found} == {str(epoch) for epoch in range(1, 20, 2)}
    assert not shared or group.lines(0) == [*expected, "end"]


@joins_late
def test_batches_can_be_written_and_kept_while_slots_are_reused(make: Any) -> None:
    group = make(Noise(1000, floats=2_000))
    expected = reference(group.loader(), 2)
    group.start(2, pause=0.02)
    group.await_producer()
    kept, loader, shared = [], group.loader(), 0
    for number, batch in enumerate(loader):
        assert share_data.line(0, number, batch) == expected[number]
        slots = loader._sharing._group.slots
        shared = max(shared, 0 if slots is None else len(slots._used))
        if number % 25 == 3:
            kept.append((number, batch))  # more than may stay in slots
        else:
            batch["image"].fill_(-1.0)  # must not reach another trainer, or the next batch in this slot
            batch["noise"][:] = -1.0
        if shared < 2:
            time.sleep(0.2)  # on a busy machine it makes batches faster than it joins
    assert number == 249 and shared >= 2
    kept.append((249, next(iter(loader))))
    last = share_data.line(0, 0, kept[-1][1])
    del batch, slots, loader  # what is kept stays as it is when the loader is gone
    group.join()
    assert group.lines(0) == [*expected, "end"] and share_data.line(0, 0, kept.pop()[1]) == last
    for number, batch in kept:
        assert share_data.line(0, number, batch) == expected[number]


@joins_late
def test_a_slot_is_reused_a_hundred_times_while_batches_are_written_and_kept(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[int] = Counter()
    plain = PrivateSlots.open

    def count(self: PrivateSlots, serial: int, slot: Slot | None, body: bytes, **given: Any) -> Any:
        opened[0 if slot is None else slot.id] += 1
        return plain(self, serial, slot, body, **given)

    monkeypatch.setattr(PrivateSlots, "open", count)
    group = make(Noise(6_000, floats=400), num_workers=1)
    expected = reference(group.loader(), 8)
    group.start(8)
    group.await_producer()
    loader, kept, epochs = group.loader(), [], 0
    while epochs < 8 and max(opened.values(), default=0) <= 100:  # on a busy machine it makes many batches itself
        for number, batch in enumerate(loader, 1500 * epochs):
            assert share_data.line(epochs, number % 1500, batch) == expected[number]
            if number % 40 == 0:
                kept = [*kept[-5:], (epochs, number, batch)]  # more than may stay in slots
            else:
                batch["image"].fill_(-1.0)  # must not reach another trainer, or the next batch in this slot
        epochs += 1
    assert max(opened.values()) > 100, opened
    for epoch, number, batch in kept:
        assert share_data.line(epoch, number % 1500, batch) == expected[number]
    del batch, loader
    group.join()
    assert group.lines(0) == [*expected, "end"]


def test_kills_of_producers_workers_and_trainers_and_a_stopped_trainer(make: Any) -> None:
    group = make(Noise(160, seconds=0.001))
    expected = reference(group.loader(), 4)
    group.slow_after(10)
    for _ in range(4):
        group.start(4, pause=0.01)
    group.await_producer()
    group.wait_for(lambda: group.members() == 4)
    os.kill(group.processes[0].pid, signal.SIGSTOP)
    stopped = len(group.lines(0))
    group.processes[1].kill()
    group.kill_worker()
    here = len(group.lines(2))
    group.slow_after(here + 30)
    group.wait_for(lambda: len(group.lines(2)) > here + 20)
    group.kill_producers()
    group.slow_after(1000)
    began, here = time.monotonic(), len(group.lines(2))
    group.wait_for(lambda: len(group.lines(2)) > here + 2)
    waited = time.monotonic() - began
    group.wait_for(lambda: len(group.lines(2)) > here + 40)
    assert len(group.lines(0)) <= stopped + 1
    os.kill(group.processes[0].pid, signal.SIGCONT)
    group.join()
    for number in (0, 2, 3):
        assert group.lines(number) == [*expected, "end"]
    assert group.lines(1) == expected[: len(group.lines(1))]
    assert waited < 50  # far more than it takes, and less than a producer may take to start: this is no measurement


def test_errors_of_the_dataset_reach_every_trainer_and_the_next_batch_follows(make: Any) -> None:
    group = make(share_data.Failing(40), shuffle=False)
    loader, failed, got = group.loader(), [], []
    other = group.start(1)
    group.await_producer()
    iterator = iter(loader)
    while True:
        try:
            got.append(next(iterator))
        except StopIteration:
            break
        except KeyError as problem:
            failed.append(str(problem))
    assert len(got) == 9 and len(failed) == 1 and "no label for 13" in failed[0]
    del iterator, loader, got
    other.join(60)
    assert group.lines(0)[3].startswith("error KeyError") and "no label for 13" in group.lines(0)[3]


def test_a_worker_that_dies_once_is_replaced(make: Any, folder: Path) -> None:
    group = make(share_data.Deadly(2000, once=str(folder / "died")), num_workers=1)
    expected = reference(group.loader(), 1)
    group.start(1)
    group.await_producer()
    group.join()
    assert group.lines(0) == [*expected, "end"] and (folder / "died").exists()


def test_a_worker_that_dies_again_and_again_is_an_error_for_every_trainer(make: Any) -> None:
    group = make(share_data.Deadly(2000), shuffle=False, num_workers=1)
    expected = reference(group.loader(), 1)
    group.start(100)
    group.start(100)
    group.await_producer()
    group.join()
    for number in (0, 1):
        *got, last = group.lines(number)
        # One that did not get the producer's answer in time has made that batch itself, where no worker dies.
        assert len(got) >= 3 and got[: len(expected)] == expected[: len(got)]
        assert last.startswith("error WorkerDied: DataLoader worker") and "SIGKILL" in last


def test_another_trainer_with_other_arguments_is_refused(make: Any) -> None:
    group = make(Noise(400, seconds=0.001))
    group.start(10_000, pause=0.01)  # there until it is killed
    group.await_producer()
    for given, argument in [({"batch_size": 5}, "batch_size"), ({"dataset": Noise(400, scale=3)}, "samples")]:
        loader, until = group.loader(**given), time.monotonic() + 120
        with pytest.raises(ShareMismatch, match=argument):
            while time.monotonic() < until:  # it makes batches itself until the producer answers
                for _batch in loader:
                    pass
    for process in group.processes:
        process.kill()


@joins_late
def test_a_state_resumes_in_the_middle_of_an_epoch_in_a_group_or_alone(make: Any) -> None:
    group = make(Noise(120))
    expected = reference(group.loader(), 2)
    group.start(2, pause=0.01)
    group.await_producer()
    loader = group.loader()
    for number, batch in enumerate(loader):
        assert share_data.line(0, number, batch) == expected[number]
        if number == 11:
            break
    state = loader.state_dict()
    del batch, loader

    def rest(share: str) -> None:
        resumed = group.loader(share=share)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["yielded"] == 12
        found = [share_data.line(0, number, batch) for number, batch in enumerate(resumed, 12)]
        found += [share_data.line(1, number, batch) for number, batch in enumerate(resumed)]
        assert found == expected[12:]
        assert not resumed.state_dict()["begun"] and resumed.state_dict()["epoch"] == 2

    rest("tests")
    rest("another")  # the state brings the group's seed
    group.join()
    assert group.lines(0) == [*expected, "end"]


def test_a_window_that_does_not_fit_is_refused_with_figures(make: Any) -> None:
    group = make(Noise(400, floats=100_000), memory_budget="4MB")
    loader = group.loader()
    with pytest.raises(BudgetTooSmall, match=r"window of 2 batches[\s\S]*memory_budget=4"):
        until = time.monotonic() + 200
        while time.monotonic() < until:  # it makes batches itself until a producer runs
            for _batch in loader:
                pass
    del loader


@joins_late
def test_a_producer_that_dies_between_two_epochs_is_no_error(make: Any) -> None:
    group = make(Noise(40))
    loader = group.loader()
    expected = reference(loader, 3)
    found: list[str] = []
    until = time.monotonic() + 60
    while not (loader._sharing._group and loader._sharing._group.welcome):
        assert time.monotonic() < until
        loader._sharing.position = (0, 0)
        found = [share_data.line(0, number, batch) for number, batch in enumerate(loader)]
    (producer,) = group.producers()
    os.kill(producer, signal.SIGKILL)
    ended = select.poll()
    ended.register(loader._sharing._group.connection.fileno(), 0)
    assert ended.poll(60_000)  # while nothing was asked for: the next epoch finds out
    for epoch in (1, 2):
        found += [share_data.line(epoch, number, batch) for number, batch in enumerate(loader)]
    assert found == expected


SCRIPT = """
import sys, time, torch, legroom
class Rows(torch.utils.data.Dataset):
    def __init__(self): self.scale = lambda x: x * 2
    def __len__(self): return 400
    def __getitem__(self, index): return torch.tensor(float(self.scale(index)))
loader = legroom.DataLoader(Rows(), 4, num_workers=1, share="tests")
shared, until = 0, time.monotonic() + 200
while not shared and time.monotonic() < until:  # it makes its batches itself until the producer gets a core
    seen = []
    for batch in loader:
        seen += batch.tolist()
        shared += loader._sharing._group.welcome
    assert seen == [2.0 * index for index in range(400)]
assert shared
print("ok")
"""


def test_a_dataset_that_cannot_be_pickled_is_handed_over_by_fork(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.stdout == "ok\n", done.stderr


def test_without_slots_every_trainer_makes_the_same_batches(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    group = make(Noise(24))
    loader = group.loader()
    expected = reference(loader, 2)
    found = [share_data.line(epoch, number, batch) for epoch in (0, 1) for number, batch in enumerate(loader)]
    assert found == expected and not group.producers() and legroom.DataLoader is type(loader)


@pytest.mark.parametrize(("kills", "between"), [(40, 0.2), pytest.param(300, 1.0, marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
def test_random_kills_change_no_batch_of_any_trainer(
    make: Any, kills: int, between: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longer one takes ten minutes."""
    seed = SEED if SEED is not None else time.time_ns() % 1_000_000
    with capsys.disabled():
        print(f" {kills} kills: LEGROOM_SOAK_SEED={seed}", flush=True)
    group = make(Noise(80))
    done = share_data.random_kills(group, kills, seed, between)
    with capsys.disabled():
        print("", done, sum(len(group.lines(number)) for number in range(len(group.names))), "batches")
    assert sum(done.values()) >= kills
    left = share_data.left_behind(group)
    with capsys.disabled():
        print(" left in trainers that ended by themselves:", left, flush=True)
    assert left and all(max(one["sockets"], one["slots"], one["locks"]) <= 0 for one in left), left
    assert all(one["descriptors"] <= 4 and one["megabytes"] < 48 for one in left), left
    group.wait_for(lambda: not group.producers())
    held = [name for pid, _ in share_data.commands() for name in share_data.slots_of(pid, str(group.folder))]
    assert not held, held
    groups()  # the last trainer may have left a producer that was being killed: the next look removes its files


@pytest.mark.parametrize("kind", [SOCKET, SOCKET + HIDDEN])
def test_files_of_a_producer_that_is_being_killed_are_removed_when_it_is_gone(tmp_path: Path, kind: str) -> None:
    """Its sockets may be closed some milliseconds before its lock, and it may not listen yet."""
    tmp_path.chmod(0o700)
    files = GroupFiles(tmp_path, "key")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        bound.bind(str(tmp_path / ("key" + kind)))
    lock = files.lock()
    assert lock is not None
    threading.Timer(0.1, lock.release).start()
    files.remove_leftovers()
    assert len(list(tmp_path.iterdir())) == 2
    files.remove_leftovers(20)
    assert not list(tmp_path.iterdir())


def test_a_producer_that_lives_is_not_waited_for(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    files = GroupFiles(tmp_path, "key")
    with files.lock() as _, listen(files.folder, "key" + SOCKET):  # type: ignore[union-attr]
        began = time.monotonic()
        files.remove_leftovers(20)
        assert time.monotonic() - began < 10 and len(list(tmp_path.iterdir())) == 2


def test_a_producer_killed_before_it_listened_does_not_stop_the_next(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    files = GroupFiles(tmp_path, "key")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        bound.bind(str(tmp_path / ("key" + SOCKET + HIDDEN)))
    with listen(files.folder, "key" + SOCKET):
        connection = files.connect()
        assert connection is not None
        connection.close()


class Sent:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []

    def send(self, *message: Any, fds: Any = ()) -> bool:
        self.messages.append((*message, [os.dup(fd) for fd in fds]))
        return True


def test_a_slot_that_its_worker_released_stays_mapped_until_the_producer_says_so() -> None:
    """A worker ends, and releases its slots, before the slower trainers have the last batch in them."""
    slot, other = (Slot.make(1 << 12, 1) for _ in range(2))
    slots = PrivateSlots(Sent())  # type: ignore[arg-type]
    slots.add(slot.id, os.dup(slot.fd or 0))
    body = pickle.dumps(([(0, 4)], pickle.dumps("batch"), None))
    assert slots.open(1, slots.find(slot.id), body, copy=True).batch == "batch"
    slot.release()
    slots.add(other.id, os.dup(other.fd or 0))
    received = slots.find(slot.id)
    slots.forget([slot.id])
    with pytest.raises(KeyError):
        slots.find(slot.id)
    assert slots.open(2, received, body, copy=True).batch == "batch"  # its message came before


def test_a_trainer_forgets_slots_that_no_batch_can_use() -> None:
    trainer = Trainer(Sent(), 1)  # type: ignore[arg-type]
    producer = Producer.__new__(Producer)
    producer.trainers = {1: trainer}

    def send(slot: Slot) -> None:
        made = Made(end=True)
        made.end, made.slot, made.body = False, SimpleNamespace(slot=slot), b"body"
        assert producer._send_batch(1, MadeBatch((0, 0), 0, made, 7), (7, 0))

    first, second = (Slot.make(1 << 12, 1) for _ in range(2))
    gone = first.id
    for slot in (first, second, first):
        send(slot)
    first.release()
    send(first)  # the batch in it was made before
    kinds = [message[0] for message in trainer.connection.messages]  # type: ignore[attr-defined]
    assert kinds == ["batch"] * 4 and set(trainer.slots) == {first.id, second.id}
    del first, slot
    send(Slot.make(1 << 12, 1))
    assert trainer.connection.messages[4][:2] == ("forget", [gone])  # type: ignore[attr-defined]
    assert gone not in trainer.slots and second.id in trainer.slots
    for message in trainer.connection.messages:  # type: ignore[attr-defined]
        for fd in message[-1]:
            os.close(fd)


class Unread(Sent):
    """A connection of a trainer that is stopped: its buffer is full."""

    def send(self, *message: Any, fds: Any = ()) -> bool:
        return False


def asked(*connections: Any) -> Producer:
    """A producer without workers whose trainers wait for the first batch."""
    producer = Producer.__new__(Producer)
    producer.changed, producer.fatal = threading.Condition(), None
    producer._workers = [SimpleNamespace(pid=pid) for pid in (11, 12)]  # type: ignore[misc]
    producer.trainers = {number: Trainer(one, number) for number, one in enumerate(connections, 1)}
    producer.window = Window((0, 0), lambda _: 10, lambda entry: entry.content.close())
    producer.window.most, producer.window.interval = 2, 0.1
    with producer.changed:
        for number, trainer in producer.trainers.items():
            trainer.member = True
            producer.window.join(number, 1.0)
            producer._handle(number, "want", (0, 0), None)
        producer._answer_all()
    return producer


def test_a_stopped_trainer_whose_socket_is_full_does_not_stop_the_others() -> None:
    producer = asked(Sent(), Unread())
    window = producer.window
    with producer.changed:
        for number in (1, 2):
            window.add(0, Made(error=KeyError("of the dataset")))
            producer._answer_all()
            producer._handle(1, "want", (0, number), None)
        producer._answer_all()
        assert not window.room()
        window.charge(1.1)
        producer._answer_all()
    assert window.room() and window.members[1].asking and not window.members[2].inside


def test_workers_that_have_ended_are_not_killed_by_their_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of another process by then."""
    producer, killed = asked(Sent()), list[int]()
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    producer._workers, producer._loader, producer.stream = [ended], None, None
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    producer._end_workers()
    assert not killed and producer._workers == []


def test_a_connection_that_asks_for_the_status_is_no_second_trainer() -> None:
    producer, one = asked(Sent()), Sent()
    producer.trainers[2] = Trainer(one, 2)  # type: ignore[arg-type]
    producer._alone_since, producer._ending, producer.rings = 0.0, False, SimpleNamespace(MESSAGES=())  # type: ignore[assignment]
    producer._tell_if_alone(1000.0)
    assert ("alone", []) in producer.trainers[1].connection.messages and not one.messages  # type: ignore[attr-defined]
    producer._handle(1, "alone")
    assert producer._ending


@pytest.mark.parametrize("body", [b"", None])
def test_a_batch_that_cannot_be_mapped_is_made_here(body: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(slot_id: int, fd: int) -> None:
        os.close(fd)
        raise OSError(12, "Cannot allocate memory")

    group = Group.__new__(Group)
    group.name, group.gpu, group._started_it, group.welcome = "train", None, False, True
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(1 if body is not None else 2)]
    message = ("batch", (0, 0), 1, 7, True, body)
    group.connection = SimpleNamespace(  # type: ignore[assignment]
        wait=lambda timeout: True, receive=lambda: (message, list(fds))
    )
    group.slots = SimpleNamespace(add=add)  # type: ignore[assignment]
    with pytest.raises(Closed):
        group._read(0.1)
    assert group.unavailable is not None and "Cannot allocate memory" in group.unavailable and group.connection is None
    for fd in fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_without_space_a_trainer_alone_does_not_describe_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    files = GroupFiles(tmp_path, "key")
    group = Group.__new__(Group)
    group.name, group.files, group._recipe = "train", files, SimpleNamespace(settings={})  # type: ignore[assignment]
    monkeypatch.setattr(os, "pwrite", pwrite)
    lock = files.stand_alone()
    assert lock is not None
    group._stand_alone(lock)
    assert files.alone() is None
    group._end_alone()
    assert not list(tmp_path.iterdir())


def test_samples_that_do_not_come_are_not_waited_for_in_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = os.getpid()

    def samples() -> str:
        if os.getpid() != trainer:
            time.sleep(60)
        return "made in the trainer"

    monkeypatch.setattr(group_settings, "_CHILD_S", 0.2)
    with pytest.raises(ShareUnsupported, match="has not returned a sample"):
        group_settings._in_child(samples)


def test_samples_are_loaded_here_if_there_can_be_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", fork)
    assert group_settings._in_child(lambda: "digest") == "digest"
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_forked_producer_keeps_no_file_of_its_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    lock, mine = (os.open(os.devnull, os.O_RDONLY) for _ in range(2))
    monkeypatch.setattr(os, "sysconf", lambda name: lock + 1)  # the limit was lowered
    pid = os.fork()
    if pid == 0:
        start_producer_process._keep_only(log, lock)
        os.fstat(lock)
        left = set(os.listdir("/proc/self/fd")) & {str(mine)}
        os._exit(len(left))
    assert os.waitpid(pid, 0)[1] == 0
    for fd in (log, mine, lock):
        os.close(fd)


@pytest.mark.parametrize("failing", ["_make_batches", "_serve"])
def test_an_error_in_either_thread_ends_the_producer_at_once(failing: str, tmp_path: Path) -> None:
    """Not after Python's exit functions, which join workers that ignore SIGTERM while the other thread serves."""
    pid = os.fork()
    if pid == 0:
        producer: Any = Producer.__new__(Producer)
        producer.fatal, producer.files = None, SimpleNamespace(remove=lambda *kinds: (tmp_path / kinds[0]).touch())
        producer._make_batches = producer._serve = lambda: time.sleep(300)
        setattr(producer, failing, lambda: 1 / 0)
        try:
            producer.run()
        except BaseException:
            time.sleep(300)  # such an exit function
        os._exit(2)
    ended = os.pidfd_open(pid)
    try:
        assert select.select([ended], [], [], 60)[0]
    finally:
        os.close(ended)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 1
    assert [path.name for path in tmp_path.iterdir()] == [".sock"]  # with the lock; the log stays


def test_a_batch_that_takes_much_longer_than_all_before_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    waits = LongWaits("tests")
    for seconds in (1.0, 59.0):
        waits.report(seconds, (2, 3), 10, [11, 12], [])
    assert not caplog.messages
    for seconds in (61.0, 100.0, 121.0, 130.0):
        waits.report(seconds, (2, 3), 10, [11, 12], [])
    assert len(caplog.messages) == 2  # not at every message of the producer
    assert "batch 3 of epoch 2" in caplog.text and "10, 11, 12" in caplog.text and "--pid 11" in caplog.text
    waits.over(130.0)
    waits.report(1299.0, (2, 4), 10, [11, 12], [])  # this dataset is slow
    assert len(caplog.messages) == 2
    waits.report(1301.0, (2, 4), 10, [11, 12], [99])
    assert len(caplog.messages) == 3 and "process 99" in caplog.messages[-1]


def test_the_last_words_of_one_that_ends_are_read() -> None:
    ours, theirs = (Connection(one) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    ours.send("hello")  # never read: the kernel then reports a reset first
    theirs.send("error", "why")
    theirs.close()
    assert ours.receive(1.0) == (("error", "why"), [])
    with pytest.raises(Closed):
        ours.receive(1.0)


def test_a_trainer_reports_what_the_producer_says_of_a_long_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(producer_client, "_LONG_WAIT_S", 0.0)
    ours, theirs = (Connection(one) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    producer = asked(theirs)
    group = Group.__new__(Group)
    group._silence, group._silent, group._early, group._waits = 60.0, False, [], LongWaits("tests")
    group.connection, group.slots = ours, PrivateSlots(ours)
    with producer.changed:
        producer.window.add(0, Made(error=KeyError("of the dataset")))
        producer._answer_all()
    assert group._await((0, 0))[0] == "error"  # type: ignore[index]
    assert len(caplog.messages) == 1 and f"{os.getpid()}, 11, 12" in caplog.text
