"""Datasets and trainers for the tests of shared loaders; imported by producers too."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

import legroom
from legroom.loader.dataloader.sharing.group_folder import GroupFiles, group_folder, groups
from legroom.loader.dataloader.sharing.group_settings import digest, group_key
from legroom.loader.dataloader.sharing.make_batches_in_trainer import DEATHS, OwnBatches
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import Orders

SLOW, SLOW_S = "slow after", 0.3


class Noise(Dataset[Any]):
    """Samples with random numbers of three generators."""

    def __init__(self, count: int, scale: float = 1.0, seconds: float = 0.0, floats: int = 64) -> None:
        self.count, self.scale, self.seconds, self.floats = count, scale, seconds, floats

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        until = time.process_time() + self.seconds
        while time.process_time() < until:
            pass
        return {
            "image": torch.rand(self.floats) * self.scale + index,
            "crop": random.random(),
            "noise": np.random.rand(40),
            "name": f"sample {index}",
        }


class Failing(Noise):
    """Raises for one sample."""

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise KeyError(f"no label for {index}")
        return super().__getitem__(index)


class Deadly(Noise):
    """One sample kills the worker, each time or once."""

    def __init__(self, count: int, once: str | None = None) -> None:
        super().__init__(count)
        self.once = once

    def __getitem__(self, index: int) -> Any:
        in_worker = torch.utils.data.get_worker_info() is not None
        if index == 13 and in_worker and not (self.once and os.path.exists(self.once)):
            if self.once:
                Path(self.once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Counting(IterableDataset[Any]):
    """A stream of random numbers that knows its position; each worker has every so many-th sample."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.epoch = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first + self.at * step, self.count, step):
            self.at += 1
            yield {"value": torch.rand(8) + index, "epoch": self.epoch, "crop": random.random()}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OwnRandom(Sampler[int]):
    """A sampler whose random numbers no one else can draw."""

    def __init__(self, count: int) -> None:
        self.count, self.random = count, random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(self.count), self.count))

    def __len__(self) -> int:
        return self.count


class EveryOtherEpoch(Sampler[int]):
    """A sampler with an empty epoch before each full one."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count if self.epoch % 2 else 0))

    def __len__(self) -> int:
        return self.count if self.epoch % 2 else 0


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def collate(samples: list[Any], scale: int = 1) -> Any:
    return torch.stack([sample["image"] for sample in samples]) * scale


def reference(loader: Any, epochs: int) -> list[str]:
    """A line for each batch, as a trainer writes it, made here."""
    sampler = loader.batch_sampler
    orders = Orders(sampler, True, loader._sharing.seed, loader.generator)
    collate_fn = getattr(loader.collate_fn, "fn", loader.collate_fn)
    own = OwnBatches(loader.dataset, True, collate_fn, orders, lambda *_, **__: None)
    lines = []
    for epoch in range(epochs):
        for number in range(len(orders.of(epoch))):
            lines.append(line(epoch, number, own.make_here((epoch, number))))
    return lines


def line(epoch: int, number: int, batch: Any) -> str:
    return f"{epoch} {number} {digest(batch)}"


def train(
    loader: Any, epochs: int, path: str, pause: float = 0.0, leave_at: int | None = None, stop_at: int | None = None
) -> None:
    """A trainer: writes a line for each batch, in one write, so that a kill leaves whole lines.

    After its first batch it waits for a producer: that takes seconds to start, in which all could be made here. After
    ``stop_at`` batches it waits until it may continue. See also ``Trainers.slow_after``.
    """
    written = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    go, stop = (os.path.join(os.path.dirname(path), name) for name in ("producer runs", "stop"))
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            os.write(fd, (line(epoch, number, batch) + "\n").encode())
            written += 1
            while not os.path.exists(go):
                time.sleep(0.01)
            time.sleep(pause if written < _slow_after(os.path.dirname(path)) else SLOW_S)
            while number + 1 == stop_at and not os.path.exists(os.path.join(os.path.dirname(path), "continue")):
                time.sleep(0.01)
            if leave_at is not None and number + 1 == leave_at:
                break
            if os.path.exists(stop):
                maps = Path("/proc/self/maps").read_text().count("legroom-batch")
                os.write(fd, f"stopped {maps}\n".encode())
                return
    os.write(fd, b"end\n")
    os.close(fd)


def _slow_after(folder: str) -> float:
    try:
        return float(Path(folder, SLOW).read_text())
    except FileNotFoundError:
        return float("inf")


@contextmanager
def another_trainer(name: str) -> Iterator[None]:
    """Within it, trainers of the group are not alone: the first starts a producer."""
    files = GroupFiles(group_folder(), group_key(name, None))
    lock = files.stand_alone()
    assert lock is not None
    try:
        yield
    finally:
        files.release_alone(lock)
        files.close()


class Trainers:
    """Trainers of one group, forked from this process; each writes the batches it got into a file."""

    def __init__(self, folder: Path, **given: Any) -> None:
        self.folder, self.given = folder, given
        self.processes: list[Any] = []
        self.names: list[Path] = []

    def loader(self, **given: Any) -> Any:
        return legroom.DataLoader(
            **{"batch_size": 4, "shuffle": True, "num_workers": 2, "share": "tests", **self.given, **given}
        )

    def start(
        self, epochs: int, pause: float = 0.0, leave_at: int | None = None, stop_at: int | None = None, **given: Any
    ) -> Any:
        """Start a trainer."""
        path = self.folder / f"trainer-{len(self.names)}"
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=self._train, args=(given, epochs, str(path), pause, leave_at, stop_at))
        process.start()
        self.processes.append(process)
        self.names.append(path)
        return process

    def _train(self, given: dict[str, Any], epochs: int, path: str, *how: Any) -> None:
        before = usage()
        try:
            train(self.loader(**given), epochs, path, *how)
            gc.collect()
            after = usage()
            Path(path).with_suffix(".left").write_text(json.dumps({key: after[key] - before[key] for key in before}))
        except Exception as problem:
            with open(path, "a") as file:
                file.write(f"error {type(problem).__name__}: {problem}\n".replace("\n", " ").strip() + "\n")

    def lines(self, number: int) -> list[str]:
        """What a trainer got so far."""
        path = self.names[number]
        return path.read_text().splitlines() if path.exists() else []

    def await_producer(self) -> None:
        """Let the trainers continue after their first batch, when a producer has made some."""
        self.wait_for(lambda: any(status["batches"] for status in groups()))
        (self.folder / "producer runs").touch()

    def slow_after(self, batches: float) -> None:
        """From so many batches on, trainers pause after each: they are not done before a test that gets no core."""
        new = self.folder / f"{SLOW}.new"
        new.write_text(str(batches))
        new.rename(self.folder / SLOW)

    def members(self) -> int:
        """The trainers of the group, as far as its producer answers."""
        return max((len(status["trainers"]) for status in groups() if status["producer"]), default=0)

    def kill_producers(self) -> None:
        for pid in self.producers():
            kill(pid)

    def kill_worker(self) -> None:
        """Of the producer; none while it has ended its workers because no batch was asked for."""
        for pid in self.producers():
            for worker in workers_of(pid)[:1]:
                kill(worker)

    def wait_for(self, condition: Any, seconds: float = 240.0) -> None:
        """Wait until a condition holds."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, [len(self.lines(number)) for number in range(len(self.names))]
            time.sleep(0.02)

    def join(self, seconds: float = 240.0) -> None:
        """Wait until all trainers have ended."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, until - time.monotonic()))
            assert process.exitcode is not None, [len(self.lines(number)) for number in range(len(self.names))]

    def end(self) -> None:
        """End what a failed test has left."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()

    def producers(self) -> list[int]:
        """The producers of groups in this folder."""
        found = [pid for pid, command in commands() if str(self.folder) in command and "sharing.producer" in command]
        return [pid for pid in found if _leads_session(pid)]  # its workers have the same command


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def commands() -> list[tuple[int, str]]:
    """Every process with its command line."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found.append((int(name), Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")))
            except (OSError, UnicodeDecodeError):
                continue
    return found


def kill(pid: int) -> None:
    """Kill a process that may have ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def workers_of(pid: int) -> list[int]:
    """The child processes of a producer."""
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def usage() -> dict[str, int]:
    """What this process has open and mapped, and its own memory."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    status = Path("/proc/self/status").read_text().split()
    return {
        "descriptors": len(links),
        "sockets": sum(one.startswith("socket:") for one in links),
        "locks": sum(one.endswith((".lock", ".alone")) for one in links),
        "slots": Path("/proc/self/maps").read_text().count("legroom-batch"),
        "megabytes": int(status[status.index("RssAnon:") + 1]) >> 10,
    }


def left_behind(trainers: Trainers) -> list[dict[str, int]]:
    """How much more each trainer that ended by itself had then than before it had a loader."""
    return [json.loads(path.read_text()) for path in sorted(trainers.folder.glob("*.left"))]


def slots_of(pid: int, folder: str) -> list[str]:
    """The slots that a process has open, if it belongs to a test with this folder."""
    try:
        if folder not in Path(f"/proc/{pid}/environ").read_text(errors="replace"):
            return []
        names = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []
    return [f"{pid}: {name}" for name in names if "legroom-" in name and name.startswith("/memfd:")]


def random_kills(trainers: Trainers, kills: int, seed: int, between: float, members: int = 4) -> dict[str, int]:
    """Kill producers, workers and trainers at random, and stop trainers for a while; how many of each.

    The first trainer is never killed. Another takes the place of one that is. Every line that any of them wrote is
    compared with the reference.
    """
    chance, done = random.Random(seed), dict.fromkeys(("producer", "worker", "trainer", "stopped"), 0)
    for _ in range(members):
        trainers.start(10_000, pause=0.004)
    (trainers.folder / "producer runs").touch()
    stopped: list[Any] = []
    made, since = 0, 0  # batches by producers, as last written; workers killed since then
    until = time.monotonic() + 20 * kills * between
    while sum(done.values()) < kills or (min(done.values()) == 0 and time.monotonic() < until):
        time.sleep(chance.random() * 2 * between)
        alive = [one for one in trainers.processes[1:] if one.is_alive() and one not in stopped]
        producers, kind = trainers.producers(), chance.choice(list(done))
        workers = [worker for pid in producers for worker in workers_of(pid)]
        if (now := sum(status["batches"] for status in groups())) != made:
            made, since = now, 0
        try:
            # Most die at work: one that is starting has made nothing that could be lost.
            if kind == "producer" and producers and (workers or chance.random() < 0.05):
                os.kill(chance.choice(producers), signal.SIGKILL)
            elif kind == "worker" and workers and since < DEATHS - 1:  # on a busy machine they may die at one batch
                os.kill(chance.choice(workers), signal.SIGKILL)
                since += 1
            elif kind == "trainer" and len(alive) > 1:
                chance.choice(alive).kill()
                trainers.start(10_000, pause=0.004)
            elif kind == "stopped" and len(alive) > 1:
                stopped.append(chance.choice(alive))
                os.kill(stopped[-1].pid, signal.SIGSTOP)
            else:
                continue
        except ProcessLookupError:
            continue
        done[kind] += 1
        if len(stopped) > 1:
            _continue(stopped.pop(0))
    for one in stopped:
        _continue(one)
    (trainers.folder / "stop").touch()
    trainers.join()
    check_lines(trainers)
    return done


def _continue(trainer: Any) -> None:
    try:
        os.kill(trainer.pid, signal.SIGCONT)
    except ProcessLookupError:  # it has ended: its last line says why
        pass


def check_lines(trainers: Trainers) -> None:
    """Every trainer has every batch, once and in order, as far as it came; those that lived have ended normally."""
    found = [trainers.lines(number) for number in range(len(trainers.names))]
    epochs = max(int(lines[-2].split()[0]) for lines in found if len(lines) > 1) + 1
    expected = reference(trainers.loader(), epochs)
    for lines, process in zip(found, trainers.processes, strict=True):
        last = lines[-1].split() if lines else []
        if process.exitcode == 0:
            assert last[0] == "stopped", lines[-1]
            assert int(last[1]) <= 40, lines[-1]  # maps of slots
            lines = lines[:-1]
        assert lines == expected[: len(lines)]
