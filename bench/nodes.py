"""Load one object on four Ray nodes: how often the source is read, the time against one node alone, a node that dies.

    python bench/nodes.py [--mb 400] [--rounds 3] [--rate 800mbit]      after: make test-nodes, or pip install ray

As root: four nodes in network and mount namespaces on this machine, a link of 100 MB/s each in both directions (tc).
All nodes share this machine's cores, so the figures are worse than those of four machines: on two cores, four nodes
need more of them than 100 MB/s leave time for. With a slower link it shows what the exchange itself costs.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from measure import RESULTS, Row, as_json, best, in_words, machine, save, show, spreads

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "nodes"), str(ROOT / "src")]

import ray_rig  # noqa: E402

from object_server import Objects, object_server  # noqa: E402

PROGRAM = """
import json, sys, time
from legroom.integrations.ray_cluster import connect, doctor, drop, warm
address, url, nodes, runs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
times = {"one": [], "four": [], "doctor": []}
read = []
with connect(address):
    for number in range(runs + 1):  # the first is not counted: workers start
        for how, some in (("one", nodes[:1]), ("four", nodes)):
            drop(None, force=True)
            begun = time.perf_counter()
            found = warm(url, some)
            seconds = time.perf_counter() - begun
            assert all(one.error is None for one in found), found
            if number:
                times[how].append(seconds)
                if how == "four":
                    read.append(sum(one.read for one in found))
        begun = time.perf_counter()
        doctor()
        if number:
            times["doctor"].append(time.perf_counter() - begun)
print(json.dumps([times, read]))
"""


WARM = """
import dataclasses, json, sys
from legroom.integrations.ray_cluster import connect, drop, warm
with connect(sys.argv[1]):
    if sys.argv[3] == "empty":
        drop(None, force=True)
    found = warm(sys.argv[2])
print(json.dumps([dataclasses.asdict(one) for one in found]))
"""


def loads(nodes: ray_rig.Cluster, url: str, how: str) -> dict[str, Any]:
    """What each node did, by its address."""
    done = nodes.driver(WARM, nodes.address, url, how, timeout=600)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {one["address"]: one for one in json.loads(done.stdout.splitlines()[-1])}


def doctor_command(nodes: ray_rig.Cluster) -> float:
    """The seconds of the command, with its start and its connection."""
    command = [sys.executable, "-m", "legroom", "nodes", "doctor", "--ray", nodes.address, "--json"]
    begun = time.perf_counter()
    done = nodes.on_head(command)
    seconds = time.perf_counter() - begun
    if len(json.loads(done.stdout)["nodes"]) != len(nodes.nodes):
        raise SystemExit(done.stderr)
    return seconds


def kill_one(nodes: ray_rig.Cluster, server: Objects) -> tuple[list[Row], dict[str, Any]]:
    """Kill the last node after 40 % was read, and start it again afterwards."""
    size, url, victim = len(server.data["x.npy"]), server.url("x.npy"), nodes.nodes[-1]
    before = server.sent
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(loads, nodes, url, "empty")
        while server.sent - before < size * 0.4 and not loading.done():
            time.sleep(0.01)
        victim.kill()
        first = loading.result()
    finished = sum(one["state"] == "loaded" for one in first.values())
    sent = server.sent - before
    nodes.wait(len(nodes.nodes) - 1)
    nodes.start(victim)
    nodes.wait(len(nodes.nodes))
    before = server.sent
    back = loads(nodes, url, "as it is")[victim.address]
    rows = [
        Row("a node killed in the middle: others that finished", finished, "of 3 nodes", 3, at_least=True),
        Row("  source read by all", sent / size, "× its size", 1.25, note="at most its quarter again"),
        Row("  when it is back: what it still had", back["kept"] / size, "of the object"),
        Row("  when it is back: source read", (server.sent - before) / size, "× its size", 0.0,
            note="the others pass on what is missing"),
    ]  # fmt: skip
    return rows, {"killed": first, "back": back}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", default="800mbit", help="of each node's link, in tc's notation")
    parser.add_argument("--name", default="nodes", help="of the JSON file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    where = machine("ray", "numpy", "legroom")
    print(in_words(where), flush=True)
    if reason := ray_rig.why_not():
        raise SystemExit(reason)
    file = io.BytesIO()
    np.save(file, np.random.default_rng(0).integers(0, 255, options.mb << 20, dtype=np.uint8))
    with ray_rig.cluster(4, options.rate) as nodes, object_server(host=nodes.host, x__npy=file.getvalue()) as server:
        server.etag = lambda _: '"a"'  # type: ignore[method-assign]  # hashing it for each answer would take a core
        addresses = json.dumps([node.address for node in nodes.nodes])
        done = nodes.driver(PROGRAM, nodes.address, server.url("x.npy"), addresses, str(options.rounds), timeout=1500)
        if done.returncode:
            raise SystemExit(done.stderr)
        times, read = json.loads(done.stdout.splitlines()[-1])
        times["doctor command"] = [doctor_command(nodes) for _ in range(options.rounds)]
        more, details = kill_one(nodes, server)
    seconds = best(times)
    note = f"{seconds['four']:.2f} against {seconds['one']:.2f} s for {options.mb} MB, {options.rate}"
    rows = [
        Row("four nodes: source read", max(read) / len(file.getvalue()), "× its size", 1.0, note="the worst round"),
        Row(
            "four nodes loaded, against one node alone", seconds["four"] / seconds["one"], "× the time", 1.25, note=note
        ),
        Row("nodes doctor on four nodes: the answers", seconds["doctor"], "s", 5.0),
        Row("nodes doctor on four nodes: the command", seconds["doctor command"], "s", 5.0),
        *more,
    ]
    print(show(rows))
    details["seconds"] = spreads(times)
    save(options.name, {"machine": where, "rows": as_json(rows), "details": details}, options.results)


if __name__ == "__main__":
    main()
