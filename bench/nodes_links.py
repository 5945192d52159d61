"""What passes over the links of the nodes, and what Ray alone needs there: the limits beside the figures of nodes.py.

Covers: bytes per link, CPU time, an empty actor, objects passed among all nodes by Ray. Does not cover: Legroom.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray_rig

_EVERY = 0.05  # seconds
_CPU_EVERY = 10  # times that
_FLOWS = 1e6  # bytes per second: more than calls and heartbeats take

RAY_ALONE = """
import json, sys, time
import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

class Bare:
    def ready(self):
        return True

    def make(self, number, count, size):
        data = np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)
        return [[ray.put(data) for _ in range(count)]]

    def get(self, refs):
        return sum(len(one) for one in ray.get(refs))


def started(some):
    begun = time.perf_counter()
    actors = [ray.remote(Bare).options(num_cpus=0, scheduling_strategy=On(one, soft=False)).remote() for one in some]
    ray.get([one.ready.remote() for one in actors])
    return actors, time.perf_counter() - begun


count, size, rounds = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"]]
times = {"actor on one": [], "actor on four": [], "exchange": []}
for number in range(rounds + 1):  # the first is not counted: files are read from the disk
    actors, seconds = started(nodes[:1])
    ray.kill(actors[0])
    times["actor on one"].append(seconds)
    actors, seconds = started(nodes)
    times["actor on four"].append(seconds)
    own = [ray.get(one.make.remote(at, count, size))[0] for at, one in enumerate(actors)]
    begun = time.perf_counter()
    # Each begins with its neighbour's, so that not all ask the same node first.
    wanted = [[ref for step in range(1, len(own)) for ref in own[(at + step) % len(own)]] for at in range(len(own))]
    got = ray.get([one.get.remote(refs) for one, refs in zip(actors, wanted)])
    times["exchange"].append(time.perf_counter() - begun)
    assert got == [(len(own) - 1) * count * size] * len(own), got
    del own, wanted
    for one in actors:
        ray.kill(one)
print(json.dumps({name: found[1:] for name, found in times.items()}))
"""


@dataclass
class Links:
    """Bytes that each node has received, and CPU seconds of all their processes, at many times."""

    nodes: ray_rig.Cluster
    samples: list[tuple[float, list[int]]] = field(default_factory=list)
    processes: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def sample(self) -> None:
        now = time.time()
        self.samples.append((now, [self._received(node.number) for node in self.nodes.nodes]))
        if len(self.samples) % _CPU_EVERY == 0:
            for pid, seconds in self._cpu_seconds():
                self.processes.setdefault(pid, []).append((now, seconds))

    def _cpu_seconds(self) -> Iterator[tuple[int, float]]:
        ours = {os.stat(f"/run/netns/{node.net}").st_ino for node in self.nodes.nodes}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{name}/ns/net").st_ino in ours:
                    words = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                    yield int(name), (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def cpu(self, begin: float, end: float) -> float:
        """CPU seconds of the nodes' processes between two times, without the last half second of those that ended."""
        found = 0.0
        for samples in self.processes.values():
            before = [seconds for at, seconds in samples if at <= begin]
            inside = [seconds for at, seconds in samples if begin < at <= end]
            found += max(inside, default=0.0) - max(before, default=0.0) if inside else 0.0
        return found

    def _received(self, number: int) -> int:  # what the bridge sends to it
        return int(Path(f"/sys/class/net/{self.nodes.name}v{number}/statistics/tx_bytes").read_text())

    def flow(self, begin: float, end: float) -> float:
        """Seconds from the first byte to the last that any node received between two times."""
        some = [one for one in self.samples if begin <= one[0] <= end]
        moving = [
            (a[0], b[0])
            for a, b in itertools.pairwise(some)
            if max(y - x for x, y in zip(a[1], b[1], strict=True)) > _FLOWS * (b[0] - a[0])
        ]
        return moving[-1][1] - moving[0][0]


@contextmanager
def watched(nodes: ray_rig.Cluster) -> Iterator[Links]:
    """Count what the nodes receive while the block runs."""
    links, ended = Links(nodes), threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY):
            links.sample()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield links
    finally:
        ended.set()
        thread.join()


def ray_alone(nodes: ray_rig.Cluster, each: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of an empty actor on one node and on all, and until each has the bytes of all others: ``each`` from each.

    One call of ``ray.get`` asks for all of them, so Ray is free in how it transfers them.
    """
    size = 4 << 20
    done = nodes.driver(RAY_ALONE, nodes.address, str(each // size), str(size), str(rounds), timeout=600)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found
