"""Trainers that share one set of workers (share="name"), against separate loaders, one alone, and TensorSocket.

Covers: 5 ms of CPU work a sample, and none; samples a second of all trainers together; how long a trainer waits for a
batch when the producer is killed. Does not cover: GPUs (gpu_shared_batches.py).

Every trainer is a process. It takes batches until the first ones of its workers have arrived and all others are ready,
then counts for a few seconds. The contenders take turns; the best round of each counts. As root, the CPU time of all
processes of a contender is counted too: on two cores that are all busy it decides the rate, and other programs on the
machine change it little. The producer of a group takes
seconds to start, in which trainers make their own batches: that is before the clock starts.

TensorSocket 0.0.5 is measured where it can be imported (PYTHONPATH): its producer runs torch's DataLoader with as many
workers, as its documentation shows. Without a GPU it copies the bytes of each batch into a message, for each consumer,
so it is compared on small samples: the first message with large ones takes minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measure import RESULTS, SOURCES, Row, alternate, as_json, in_words, kept, machine, save, show

sys.path.insert(0, str(SOURCES))
import torch
from torch.utils.data import Dataset

import legroom
from legroom.loader.dataloader.sharing.group_folder import groups

TRAINERS, WORKERS, BATCH = 4, 2, 16
Costs = dict[str, list[float]]  # CPU seconds for a batch, by contender
WORK_S = 0.005
SMALL = "no work, small samples"
FLOATS = {"work": 3 * 64 * 64, "no work": 3 * 224 * 224, SMALL: 3 * 64 * 64}  # of a sample
TURNS = itertools.count()  # a group lives some seconds longer than its trainers: no name is used twice
TAKEOVER, KILLS = "takeover", 5
WARM_S, START_S = 60.0, 120.0  # for a group, and for all trainers, to be ready


class Samples(Dataset[Any]):
    """Samples that cost CPU time, or nothing but the copy."""

    def __init__(self, floats: int, seconds: float, count: int = 1 << 20) -> None:
        self.store, self.seconds, self.count = torch.rand(8, floats), seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        until = time.process_time() + self.seconds
        while self.seconds and time.process_time() < until:
            pass
        return self.store[index % 8], index


class CpuTime:
    """The CPU time of a contender: its processes, also those that are no child of it, are in a cgroup of their own.

    As root with cgroup v2. On cores that are all busy, the rates of two contenders are in the inverse ratio of it.
    """

    def __init__(self) -> None:
        roots = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
        self.path = next((root for root in roots if os.access(root / "cgroup.procs", os.W_OK)), None)
        if self.path is not None:
            self.path /= f"legroom-bench-{os.getpid()}"
            self.path.mkdir(exist_ok=True)

    def add(self, pid: int) -> None:
        """Count this process and those that it starts."""
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(str(pid))

    def used(self) -> float:
        """Seconds; not a number where there is no such cgroup."""
        if self.path is None:
            return float("nan")
        return int((self.path / "cpu.stat").read_text().split()[1]) / 1e6

    def close(self) -> None:
        """Remove the cgroup; what a group of trainers has left ends within seconds."""
        until = time.monotonic() + 20
        while self.path is not None and time.monotonic() < until:
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def train(
    make: Callable[[], Any], warm: int, shared: bool, ready: Any, until: Any, counts: Any, cpu: CpuTime, number: int,
    use: Callable[[Any], Any],
) -> None:  # fmt: skip
    """One trainer: its batches within the common seconds."""
    cpu.add(os.getpid())
    torch.set_num_threads(1)
    loader = make()
    iterator = iter(loader)
    began = time.monotonic()
    got = 0
    while got < warm and time.monotonic() < began + WARM_S:
        use(next(iterator))
        group = loader._sharing._group if shared else None
        got += group is None or group.alone or (group.welcome and not group.missed)
    ready.wait()
    while until.value == 0.0:
        time.sleep(0.001)
    start, count = time.monotonic(), 0
    while time.monotonic() < until.value:
        use(next(iterator))
        count += 1
    counts[2 * number : 2 * number + 2] = [count / (time.monotonic() - start), count]
    ready.wait()
    os._exit(0)  # nothing of the end is measured


def together(
    makers: list[Callable[[], Any]], seconds: float, cpu: CpuTime, costs: list[float], *, shared: bool = False,
    workers: int = WORKERS, use: Callable[[Any], Any] = lambda batch: batch,
) -> float:  # fmt: skip
    """Batches a second of all trainers; ``costs`` gets the CPU seconds for one. ``use``: what is done with a batch."""
    context = multiprocessing.get_context("fork")
    ready, until = context.Barrier(len(makers) + 1, timeout=START_S), context.Value("d", 0.0)
    counts = context.Array("d", 2 * len(makers))
    trainers = [
        context.Process(target=train, args=(make, 2 * workers + 4, shared, ready, until, counts, cpu, number, use))
        for number, make in enumerate(makers)
    ]
    for one in trainers:
        one.start()
    try:
        ready.wait()
        before = cpu.used()
        until.value = time.monotonic() + seconds
        ready.wait()
        costs.append((cpu.used() - before) / max(1.0, sum(counts[1::2])))
    except threading.BrokenBarrierError:
        return float("nan")  # a trainer got no batch: shown as not measured
    finally:
        for one in trainers:
            one.join(5)
            one.kill()
            one.join()
    return float(sum(counts[::2]))


def tensorsocket(
    dataset: Any, trainers: int, seconds: float, cpu: CpuTime, costs: list[float], *, workers: int = WORKERS,
    batch: int = BATCH, use: Callable[[Any], Any] = lambda batch: batch,
) -> float:  # fmt: skip
    """The same with TensorSocket's producer and consumers."""
    context = multiprocessing.get_context("fork")
    producer = context.Process(target=_tensor_producer, args=(dataset, workers, batch))
    producer.start()
    cpu.add(producer.pid or 0)

    def consumer() -> Any:
        from tensorsocket import TensorConsumer

        return TensorConsumer(batch_size=batch)

    try:
        return together([consumer] * trainers, seconds, cpu, costs, workers=workers, use=use)
    finally:
        for pid in Path(f"/proc/{producer.pid}/task/{producer.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)  # its workers
        producer.kill()
        producer.join()


def _tensor_producer(dataset: Any, workers: int, batch: int) -> None:
    from tensorsocket import TensorProducer

    producer = TensorProducer(torch.utils.data.DataLoader(dataset, batch, num_workers=workers))
    while True:  # an epoch after the other
        for _ in producer:
            pass


def contenders(dataset: Any, seconds: float, cpu: CpuTime, costs: Costs) -> dict[str, Callable[[], float]]:
    """Each returns seconds for a batch of all trainers together: less is better."""

    def loader(share: str | None = None) -> Callable[[], Any]:
        given = {} if share is None else {"share": share}
        return lambda: legroom.DataLoader(dataset, BATCH, num_workers=WORKERS, **given)  # type: ignore[arg-type]

    def run(who: str, trainers: int, *, shared: bool) -> float:
        make = loader(f"bench-{os.getpid()}-{next(TURNS)}" if shared else None)
        return 1 / together([make] * trainers, seconds, cpu, costs[who], shared=shared)

    return {
        "separate": lambda: run("separate", TRAINERS, shared=False),
        "alone": lambda: run("alone", 1, shared=False),
        "shared": lambda: run("shared", TRAINERS, shared=True),
        "shared by one": lambda: run("shared by one", 1, shared=True),
    }


def train_through_kills(make: Callable[[], Any], ready: Any, stop: Any, longest: Any, number: int) -> None:
    """One trainer: the longest time that it waits for a batch, from the moment when all have batches of the group."""
    torch.set_num_threads(1)
    loader = make()
    iterator = iter(loader)
    began, got = time.monotonic(), 0
    while got < 2 * WORKERS + 4 and time.monotonic() < began + WARM_S:
        next(iterator)
        group = loader._sharing._group
        got += group.welcome and not group.missed
    ready.wait()
    while not stop.value:
        start = time.monotonic()
        next(iterator)
        longest[number] = max(longest[number], time.monotonic() - start)
    os._exit(0)


def takeovers(kills: int) -> list[float]:
    """The longest wait of each trainer while producers are killed, one after the other."""
    context = multiprocessing.get_context("fork")
    name, dataset = f"bench-{os.getpid()}-takeover", Samples(FLOATS["work"], WORK_S)
    ready, stop = context.Barrier(TRAINERS + 1, timeout=START_S), context.Value("i", 0)
    longest = context.Array("d", TRAINERS)

    def make() -> Any:
        return legroom.DataLoader(dataset, BATCH, num_workers=WORKERS, share=name)

    trainers = [
        context.Process(target=train_through_kills, args=(make, ready, stop, longest, number))
        for number in range(TRAINERS)
    ]
    for one in trainers:
        one.start()
    try:
        ready.wait()
        before = 0
        for _ in range(kills):
            before = _next_producer(name, before)
            time.sleep(1.0)  # trainers use its batches
            os.kill(before, signal.SIGKILL)
        _next_producer(name, before)
        time.sleep(2.0)
        stop.value = 1
    finally:
        for one in trainers:
            one.join(20)
            one.kill()
            one.join()
    return [float(seconds) for seconds in longest[:]]


def _next_producer(name: str, before: int) -> int:
    """Wait for a producer of the group, not that one, until it has given batches to trainers."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        for one in groups():
            made = any(trainer["shared"] for trainer in one.get("trainers", ()))
            if one["name"] == name and made and one["producer"] not in (None, 0, before):
                return int(one["producer"])
        time.sleep(0.05)
    raise TimeoutError(f"no producer within {START_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="that are counted in each round")
    parser.add_argument("--only", choices=[*FLOATS, TAKEOVER], help="one of the datasets; the others' results are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    where = machine("torch", "numpy", "tensorsocket")
    print(in_words(where))
    parts: dict[str, Any] = {} if chosen.only is None else kept("share", chosen.results).get("parts", {})
    for name, floats in FLOATS.items():
        if chosen.only in (None, name):
            costs: Costs = defaultdict(list)
            figures = measured(name, floats, chosen.rounds, chosen.seconds, costs)
            rows = rows_of(name, floats, figures, costs)
            raw = {"seconds": figures, "cpu_seconds": costs}
            parts[name] = {"machine": where, "rounds": chosen.rounds, "rows": as_json(rows), "raw": raw}
            print(show(rows), flush=True)
    if chosen.only in (None, TAKEOVER):
        waits = takeovers(KILLS)
        words = f"{KILLS} producers killed, {TRAINERS} trainers: " + ", ".join(f"{one:.2f} s" for one in waits)
        rows = [Row("takeover: longest wait for a batch", max(waits), "s", 1.0, note=words)]
        parts[TAKEOVER] = {"machine": where, "rounds": 1, "rows": as_json(rows), "raw": {"seconds": waits}}
        print(show(rows), flush=True)
    ordered = {name: parts[name] for name in (*FLOATS, TAKEOVER) if name in parts}
    print(f"kept in {save('share', {'machine': where, 'parts': ordered}, chosen.results)}")


def measured(name: str, floats: int, rounds: int, seconds: float, costs: Costs) -> dict[str, list[float]]:
    """The seconds of every contender on one dataset."""
    cpu = CpuTime()
    # Longer than a round, but no more: a group lays out the order of a whole epoch when it begins.
    dataset = Samples(floats, WORK_S) if name == "work" else Samples(floats, 0.0, 1 << 22)
    found = contenders(dataset, seconds, cpu, costs)
    if name == SMALL:
        found = {"shared": found["shared"]}
        if importlib.util.find_spec("tensorsocket") is not None:
            short = Samples(floats, 0.0, BATCH * 2000)  # it keeps half a percent of the batches
            found["tensorsocket"] = lambda: 1 / tensorsocket(short, TRAINERS, seconds, cpu, costs["tensorsocket"])
    try:
        return alternate(found, rounds)
    finally:
        cpu.close()


def rows_of(name: str, floats: int, figures: dict[str, list[float]], costs: Costs) -> list[Row]:
    """The ratios of one dataset."""
    best = {who: 1 / min(seconds) for who, seconds in figures.items()}
    mega = BATCH * floats * 4 / 1e6
    speeds = ", ".join(f"{who} {rate * BATCH:.0f}/s, {rate * mega:.0f} MB/s" for who, rate in best.items())
    if name == SMALL:
        if "tensorsocket" not in best:
            return []
        ratio = best["shared"] / best["tensorsocket"]
        return [Row(f"{name}: {TRAINERS} trainers", ratio, "× TensorSocket", 10.0, at_least=True, note=speeds)]
    work = name == "work"
    cost = {who: min(found) for who, found in costs.items() if found}
    per_sample = ", ".join(f"{who} {seconds / BATCH * 1e6:.0f} µs" for who, seconds in cost.items())
    return [
        Row(f"{name}: {TRAINERS} trainers", best["shared"] / best["separate"], "× separate loaders",
            3.5 if work else None, at_least=True, note=speeds),
        Row(f"{name}: each of {TRAINERS} trainers", best["shared"] / TRAINERS / best["alone"], "× one alone",
            0.97 if work else None, at_least=True),
        Row(f"{name}: one trainer with share=", best["shared by one"] / best["alone"], "× without share", 0.98,
            at_least=True),
        Row(f"{name}: {TRAINERS} trainers, by CPU time", cost["separate"] / cost["shared"], "× separate loaders",
            3.5 if work else None, at_least=True, note=per_sample),
        Row(f"{name}: each of {TRAINERS} trainers, by CPU time", cost["alone"] / TRAINERS / cost["shared"],
            "× one alone", 0.97 if work else None, at_least=True),
        Row(f"{name}: one trainer with share=, by CPU time", cost["alone"] / cost["shared by one"], "× without share",
            0.98, at_least=True),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
