"""Load one object on four Ray nodes: how often the source is read, and how long it takes against one node alone.

    python bench/nodes.py [--mb 400] [--rounds 3] [--results FOLDER]      after: make test-nodes, or pip install ray

As root: four nodes in network and mount namespaces on this machine, a link of 100 MB/s each in both directions (tc).
All nodes share this machine's cores, so the figures are worse than those of four machines.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import numpy as np

from measure import RESULTS, Row, as_json, best, in_words, machine, save, show, spreads

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "nodes"), str(ROOT / "src")]

import ray_rig  # noqa: E402

from object_server import object_server  # noqa: E402

PROGRAM = """
import json, sys, time
from legroom.integrations.ray_nodes import connect, doctor, drop, warm
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    where = machine("ray", "numpy", "legroom")
    print(in_words(where), flush=True)
    if reason := ray_rig.why_not():
        raise SystemExit(reason)
    file = io.BytesIO()
    np.save(file, np.random.default_rng(0).integers(0, 255, options.mb << 20, dtype=np.uint8))
    with ray_rig.cluster(4, rate="800mbit") as nodes, object_server(host=nodes.host, x__npy=file.getvalue()) as server:
        addresses = json.dumps([node.address for node in nodes.nodes])
        done = nodes.driver(PROGRAM, nodes.address, server.url("x.npy"), addresses, str(options.rounds), timeout=1500)
        if done.returncode:
            raise SystemExit(done.stderr)
        times, read = json.loads(done.stdout.splitlines()[-1])
    seconds = best(times)
    note = f"{seconds['four']:.2f} against {seconds['one']:.2f} s for {options.mb} MB"
    rows = [
        Row("four nodes: source read", max(read) / len(file.getvalue()), "× its size", 1.0, note="the worst round"),
        Row(
            "four nodes loaded, against one node alone", seconds["four"] / seconds["one"], "× the time", 1.25, note=note
        ),
        Row("nodes doctor on four nodes", seconds["doctor"], "s", 5.0),
    ]
    print(show(rows))
    save("nodes", {"machine": where, "rows": as_json(rows), "details": {"seconds": spreads(times)}}, options.results)


if __name__ == "__main__":
    main()
