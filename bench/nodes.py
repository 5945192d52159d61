"""Load one object on four Ray nodes: how often the source is read, the time against one node alone, a node that dies.

    python bench/nodes.py [--rounds 3] [--links 800mbit:400 200mbit:200]      after: make test-nodes, or pip install ray

As root: four nodes in network and mount namespaces on this machine, a link of 100 MB/s each in both directions (tc).
All nodes share this machine's cores, so the figures are worse than those of four machines: on two cores, four nodes
need more of them than 100 MB/s leave time for, and starting four processes takes longer than starting one. So all is
measured a second time with slower links, and beside it what Ray alone needs: an empty actor on each node, and its own
transfer of the same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
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

from legroom.integrations.ray_divide_download import _ON_THE_WAY  # noqa: E402
from nodes_links import ray_alone, watched  # noqa: E402
from object_server import Objects, object_server  # noqa: E402

RAY_EACH = 48 << 20  # bytes that each node has when Ray is measured alone: four times that fit into the object store

PROGRAM = """
import json, sys, time
from legroom.integrations.ray_cluster_commands import connect, doctor, drop, warm
address, url, nodes, runs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
times = {"one": [], "four": [], "doctor": []}
spans = {"one": [], "four": []}
read = []
with connect(address):
    for number in range(runs + 1):  # the first is not counted: workers start
        for how, some in (("one", nodes[:1]), ("four", nodes)):
            drop(None, force=True)
            begun = time.time()
            found = warm(url, some)
            seconds = time.time() - begun
            assert all(one.error is None for one in found), found
            if number:
                times[how].append(seconds)
                spans[how].append((begun, begun + seconds))
                if how == "four":
                    read.append(sum(one.read for one in found))
        begun = time.time()
        doctor()
        if number:
            times["doctor"].append(time.time() - begun)
    drop(None, force=True)
print(json.dumps([times, spans, read]))
"""

WARM = """
import dataclasses, json, sys
from legroom.integrations.ray_cluster_commands import connect, drop, warm
with connect(sys.argv[1]):
    if sys.argv[3] == "empty":
        drop(None, force=True)
    found = warm(sys.argv[2])
print(json.dumps([dataclasses.asdict(one) for one in found]))
"""

OPEN = """
import sys, legroom
legroom.open(sys.argv[1])
"""


def compare(nodes: ray_rig.Cluster, url: str, rate: str, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of one node and of four, by turns, with links of one rate; and the most that was read of the source."""
    nodes.limit(rate)
    addresses = json.dumps([node.address for node in nodes.nodes])
    with watched(nodes) as links:
        done = nodes.driver(PROGRAM, nodes.address, url, addresses, str(rounds), timeout=1500)
    if done.returncode:
        raise SystemExit(done.stderr)
    times, spans, read = json.loads(done.stdout.splitlines()[-1])
    times |= {f"{how}, bytes": [links.flow(*span) for span in spans[how]] for how in ("one", "four")}
    times["open"] = [_open_alone(nodes, url)]
    fastest = min(spans["four"], key=lambda span: span[1] - span[0])
    times["four, CPU"] = [links.cpu(*fastest)]
    return times, max(read)


def _open_alone(nodes: ray_rig.Cluster, url: str) -> float:
    """The seconds of a new process on one node that opens it without Ray. Nothing of it stays there."""
    begun = time.perf_counter()
    done = nodes.driver(OPEN, url)
    seconds = time.perf_counter() - begun
    nodes.on_head([sys.executable, "-m", "legroom", "cache", "drop", "--all", "--force"])
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds


def rows_of(rate: str, size: int, seconds: dict[str, float], read: int) -> list[Row]:
    """The figures for links of one rate."""
    four, one, cores = seconds["four"], seconds["one"], os.cpu_count() or 1
    return [
        Row(f"links of {rate}, {size / 1e6:.0f} MB: source read by four nodes", read / size, "× its size", 1.0,
            note="the worst round"),
        Row("  four nodes loaded, against one node alone", four / one, "× the time", 1.25,
            note=f"{four:.2f} against {one:.2f} s"),
        Row("  from the first byte to the last, four against one", seconds["four, bytes"] / seconds["one, bytes"],
            "× the time", note=f"{seconds['four, bytes']:.2f} against {seconds['one, bytes']:.2f} s"),
        Row("  four nodes loaded, against legroom.open in a new process", four / seconds["open"], "× the time",
            note=f"{seconds['open']:.2f} s on one node, without Ray"),
        Row("  each of the four receives, from the source and the others", size / 1e6 / seconds["four, bytes"], "MB/s"),
        Row("  CPU time of the four nodes, of what the cores have", seconds["four, CPU"] / four / cores, "×", note=(
            f"{seconds['four, CPU']:.1f} s, without the kernel's network and the server")),
        Row("  Ray alone: each of four receives the objects of the others", 3 * RAY_EACH / 1e6 / seconds["exchange"],
            "MB/s"),
        Row("  Ray alone: an empty actor starts on one node", seconds["actor on one"], "s"),
        Row("  Ray alone: empty actors start on four nodes", seconds["actor on four"], "s"),
    ]  # fmt: skip


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


def _npy(size: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8))
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", nargs="+", default=["800mbit:400", "200mbit:200"], metavar="RATE:MB",
                        help="rate of each node's link, in tc's notation, and size of the object")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="nodes", help="of the JSON file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    where = machine("ray", "numpy", "legroom")
    print(in_words(where), flush=True)
    if reason := ray_rig.why_not():
        raise SystemExit(reason)
    links = [(rate, int(mb) << 20) for rate, _, mb in (one.partition(":") for one in options.links)]
    times: dict[str, dict[str, list[float]]] = {}
    read: dict[str, int] = {}
    loaded: dict[str, float] = {}
    rows: list[Row] = []
    with ray_rig.cluster(4, links[0][0]) as nodes, object_server(host=nodes.host) as server:
        server.etag = lambda name: f'"{len(server.data[name])}"'  # hashing takes a core
        for rate, size in links:
            server.data[f"{rate}.npy"] = _npy(size)
            times[rate], read[rate] = compare(nodes, server.url(f"{rate}.npy"), rate, options.rounds)
            loaded[rate] = os.getloadavg()[0]
        peak = max(node.object_store_peak() for node in nodes.nodes)
        for rate, _ in links[::-1]:
            nodes.limit(rate)
            times[rate] |= ray_alone(nodes, RAY_EACH, options.rounds)
        commands = [doctor_command(nodes) for _ in range(options.rounds)]
        server.data["x.npy"] = _npy(links[0][1])
        more, details = kill_one(nodes, server)
    for rate, size in links:
        rows += rows_of(rate, len(_npy(0)) + size, best(times[rate]), read[rate])
    rows += [
        Row("Ray's object store, the most on any node", peak / 2**20, "MiB", _ON_THE_WAY / 2**20),
        Row("nodes doctor on four nodes: the answers", min(times[links[0][0]]["doctor"]), "s", 5.0),
        Row("nodes doctor on four nodes: the command", min(commands), "s", 5.0),
        *more,
    ]
    print(show(rows))
    details |= {"seconds": {rate: spreads(times[rate]) for rate, _ in links}, "load afterwards": loaded}
    save(options.name, {"machine": where, "rows": as_json(rows), "details": details}, options.results)


if __name__ == "__main__":
    main()
