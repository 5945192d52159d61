"""From S3 to a usable entry: against the rate of a limited link, and against ``s3fs.get`` with a local load after it.

    python bench/remote.py [--mb 256] [--rounds 5] [--results FOLDER]

The server is a process of its own that answers S3's HEAD and GET. The limited link is a veth pair between two network
namespaces with ``tc tbf`` (root). The latency is the server's: each answer begins 30 ms late, the first of a connection
60 ms, and sending takes no longer than it takes. A proxy that delays would need as much of the cores as a load. What
the server can deliver is measured beside it, by curl. The contenders take turns, and the best round counts. A load of
each kind before the first round compiles the modules, as an installer does; importing them counts.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from measure import RESULTS, Row, alternate, as_json, best, in_words, machine, save, show, spreads

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
HOST, CLIENT = "10.78.0.254", "10.78.0.1"
COMPILED = tempfile.TemporaryDirectory(prefix="legroom-bench-compiled-")


def serve(megabytes: int, host: str, ready: Any, latency: float = 0.0) -> None:
    """A server of one object, as S3 answers: the ETag is the MD5. Answers begin late by ``latency``."""
    import hashlib

    import object_server

    os.nice(10)  # a real server would use none of these cores

    file = io.BytesIO()
    np.save(file, np.random.default_rng(0).integers(0, 255, megabytes << 20, dtype=np.uint8))
    content = file.getvalue()
    etag = '"' + hashlib.md5(content).hexdigest() + '"'
    object_server.Objects.etag = lambda self, name: etag
    with object_server.object_server(host=host) as server:
        server.data["data/x.npy"] = content
        server.modified = "Wed, 21 Oct 2015 07:28:00 GMT"
        if latency:
            seen = threading.local()  # the server has a thread for each connection

            def late(_: str, __: int) -> None:
                time.sleep(latency if hasattr(seen, "before") else 2 * latency)  # the handshake takes as long
                seen.before = True

            server.before = late
        ready.send((server.port, len(content)))
        ready.recv()


RUN = """
import json, os, sys, time
how, url, folder = sys.argv[1:4]
import legroom, s3fs, numpy, fsspec
fsspec.filesystem("s3").ls  # imported, not connected
begun = time.perf_counter()
if how == "legroom":
    data = legroom.open(url)
elif how == "s3fs":
    s3fs.S3FileSystem().get(url, folder + "/x.npy")
    data = legroom.open(folder + "/x.npy")
elif how == "s3fs alone":
    s3fs.S3FileSystem().get(url, folder + "/x.npy")
    data = {"array": numpy.load(folder + "/x.npy", mmap_mode="r")}
seconds = time.perf_counter() - begun
print(json.dumps([seconds, int(data["array"][::4097].sum())]))
"""


def run(how: str, endpoint: str, prefix: list[str]) -> float:
    """The seconds of one load in a process and in stores of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="legroom-bench-") as folder:
        for name in ("shm", "disk"):
            os.mkdir(f"{folder}/{name}", 0o700)
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT / "src"),
            "AWS_ENDPOINT_URL": endpoint, "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
            "LEGROOM_SHM": f"{folder}/shm", "LEGROOM_DIR": f"{folder}/disk",
            "PYTHONPYCACHEPREFIX": COMPILED.name,
        }  # fmt: skip
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [*prefix, sys.executable, "-c", RUN, how, "s3://data/x.npy", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(done.stderr)
        seconds: float = json.loads(done.stdout)[0]
        return seconds


def raw(url: str, prefix: list[str]) -> float:
    """The seconds of one plain GET over the same link, thrown away."""
    program = (
        "import sys, time, urllib.request as u; b = time.perf_counter(); r = u.urlopen(sys.argv[1])\n"
        "while r.read(1 << 20): pass\nprint(time.perf_counter() - b)"
    )
    done = subprocess.run([*prefix, sys.executable, "-c", program, url], capture_output=True, text=True, check=True)
    return float(done.stdout)


def curl(url: str, size: int, together: int) -> float:
    """The seconds that the server takes to send the object to several curls at once, which throw it away."""
    begun = time.perf_counter()
    bounds = [size * number // together for number in range(together + 1)]
    ranges = [f"{first}-{end - 1}" for first, end in itertools.pairwise(bounds)]
    command = ["curl", "--silent", "--output", "/dev/null", "--range"]
    for one in [subprocess.Popen([*command, span, url]) for span in ranges]:
        one.wait()
    return time.perf_counter() - begun


def limited_link(megabytes: int, rounds: int, rate: str) -> tuple[list[Row], dict[str, Any]]:
    """The rate of a load over a link of 100 MB/s, as a share of what one GET reaches over it."""
    net, bridge = f"lgb{os.getpid() % 10000}", f"lgb{os.getpid() % 10000}h"
    spawn = multiprocessing.get_context("spawn")
    try:
        for command in (
            f"ip netns add {net}", f"ip link add {bridge} type veth peer name eth0 netns {net}",
            f"ip addr add {HOST}/24 dev {bridge}", f"ip link set {bridge} up",
            f"ip -n {net} addr add {CLIENT}/24 dev eth0", f"ip -n {net} link set eth0 up",
            f"ip -n {net} link set lo up",
            f"tc qdisc add dev {bridge} root tbf rate {rate} burst 1mb latency 100ms",
        ):  # fmt: skip
            subprocess.run(command.split(), check=True, capture_output=True)
        here, there = spawn.Pipe()
        server = spawn.Process(target=serve, args=(megabytes, HOST, there))
        server.start()
        port, size = here.recv()
        prefix = ["ip", "netns", "exec", net]
        url = f"http://{HOST}:{port}"
        run("legroom", url, prefix)
        figures = alternate(
            {"raw": lambda: raw(f"{url}/data/x.npy", prefix), "legroom": lambda: run("legroom", url, prefix)}, rounds
        )
        here.send("end")
        server.join()
    finally:
        subprocess.run(["ip", "netns", "del", net], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
    seconds = best(figures)
    share = seconds["raw"] / seconds["legroom"]
    note = f"{size / 1e6 / seconds['legroom']:.0f} of {size / 1e6 / seconds['raw']:.0f} MB/s, {megabytes} MB"
    row = Row(f"S3 over a link of {rate}, as a share of one GET", share, "×", 0.9, at_least=True, note=note)
    return [row], {"bytes": size, "rate": rate, "seconds": spreads(figures)}


def with_latency(megabytes: int, rounds: int, seconds: float) -> tuple[list[Row], dict[str, Any]]:
    """A load over a link with 30 ms of latency, against s3fs.get with a local load after it."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    server = spawn.Process(target=serve, args=(megabytes, "127.0.0.1", there, seconds))
    server.start()
    port, size = here.recv()
    url = f"http://127.0.0.1:{port}"
    contenders = {how: partial(run, how, url, []) for how in ("legroom", "s3fs", "s3fs alone")}
    try:
        for how in contenders:
            run(how, url, [])
        figures = alternate({**contenders, "server": lambda: curl(f"{url}/data/x.npy", size, 16)}, rounds)
    finally:
        here.send("end")
        server.join(10)
        server.kill()
    found = best(figures)
    row = Row(
        f"S3 with {seconds * 1000:.0f} ms of latency: speed over s3fs.get and a local load",
        found["s3fs"] / found["legroom"], "×", 1.5, at_least=True,
        note=f"{found['legroom']:.2f} against {found['s3fs']:.2f} s for {megabytes} MB",
    )  # fmt: skip
    alone = Row(
        "  s3fs.get alone, without a load: its speed over legroom's", found["legroom"] / found["s3fs alone"], "×"
    )
    served = Row("  what the server sends to 16 curls at once", size / 1e6 / found["server"], "MB/s")
    return [row, alone, served], {"bytes": size, "latency": seconds, "seconds": spreads(figures)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    where = machine("s3fs", "aiobotocore", "numpy", "legroom")
    print(in_words(where), flush=True)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    if os.geteuid() == 0 and shutil.which("tc"):
        rows, details["limited link"] = limited_link(options.mb, options.rounds, options.rate)
    else:
        print("the limited link needs root, ip and tc: not measured")
    more, details["latency"] = with_latency(options.mb, options.rounds, 0.03)
    rows += more
    print(show(rows))
    save("remote", {"machine": where, "rows": as_json(rows), "details": details}, options.results)


if __name__ == "__main__":
    main()
