"""Four Ray nodes in namespaces of their own: each byte is read once, a node that dies fails alone, and resumes."""

from __future__ import annotations

import io
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_rig
import rig_cleanup

from object_server import Objects, object_server

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ray_rig.why_not() is not None, reason=str(ray_rig.why_not())),
]

ROWS = np.random.default_rng(0).integers(0, 1 << 30, 24_000_000, dtype=np.int32)  # 96 MB


@pytest.fixture(scope="module")
def nodes() -> Iterator[ray_rig.Cluster]:
    with ray_rig.cluster(4, rate="800mbit") as found:
        yield found


@pytest.fixture
def server(nodes: ray_rig.Cluster) -> Iterator[Objects]:
    file = io.BytesIO()
    np.save(file, ROWS)
    with object_server(host=nodes.host, x__npy=file.getvalue()) as found:
        yield found
    _nodes(nodes, "drop", "--all", "--force")


def _nodes(cluster: ray_rig.Cluster, *arguments: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "legroom",
        "nodes",
        arguments[0],
        "--ray",
        cluster.address,
        "--json",
        *arguments[1:],
    ]
    done = cluster.on_head(command, timeout=400)
    assert done.stdout.startswith("{"), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _content(cluster: ray_rig.Cluster, node: ray_rig.Node, url: str) -> str:
    """The hash of the array that a program on the node gets, and whether it asked the server."""
    program = "import legroom, sys, hashlib; d = legroom.open(sys.argv[1]); print(hashlib.sha256(d['array'].tobytes()).hexdigest())"
    done = subprocess.run(node.run([sys.executable, "-c", program, url]), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_each_byte_is_read_once_and_all_nodes_have_it(nodes: ray_rig.Cluster, server: Objects) -> None:
    import hashlib

    found = _nodes(nodes, "warm", server.url("x.npy"))["nodes"]
    assert [one["state"] for one in found] == ["loaded"] * 4, found
    size = len(server.data["x.npy"])
    assert server.sent == size and sum(one["read"] for one in found) == size
    assert all(one["read"] + one["received"] == size for one in found) and len({one["digest"] for one in found}) == 1
    right = hashlib.sha256(ROWS.tobytes()).hexdigest()
    assert {_content(nodes, node, server.url("x.npy")) for node in nodes.nodes} == {right}
    assert server.sent == size  # programs attach
    again = _nodes(nodes, "warm", server.url("x.npy"))["nodes"]
    assert [one["state"] for one in again] == ["attached"] * 4 and server.sent == size
    listed = _nodes(nodes, "list")["nodes"]
    assert all(len(one["answer"]["entries"]) == 1 for one in listed)
    answers = _nodes(nodes, "doctor")["nodes"]
    assert len(answers) == 4 and all(one["error"] is None for one in answers)


def test_a_node_that_dies_fails_alone_and_resumes(nodes: ray_rig.Cluster, server: Objects) -> None:
    size = len(server.data["x.npy"])
    victim = nodes.nodes[3]
    server.before = lambda method, _: time.sleep(0.4) if method == "GET" else None
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_nodes, nodes, "warm", server.url("x.npy"))
        while server.sent < size * 0.4 and not loading.done():
            time.sleep(0.02)
        victim.kill()
        by_address = {one["address"]: one for one in loading.result()["nodes"]}
    assert by_address[victim.address]["state"] == "failed"
    assert by_address[victim.address]["error"]["code"] in ("node-died", "node-failed")
    others = [one for address, one in by_address.items() if address != victim.address]
    assert [one["state"] for one in others] == ["loaded"] * 3, others
    assert server.sent <= size * 1.45  # at worst the dead node's share and what was on its way
    nodes.wait(3)  # Ray takes a while to notice
    nodes.start(victim)
    nodes.wait(4)
    before, server.before = server.sent, None
    back = {one["address"]: one for one in _nodes(nodes, "warm", server.url("x.npy"))["nodes"]}
    mended = back[victim.address]
    assert mended["state"] == "loaded" and mended["kept"] > 0, back
    assert server.sent == before and mended["read"] == 0  # the others have the entry: they pass on what is missing
    assert mended["received"] <= size - mended["kept"] + 8 * 2**20  # groups of eight pieces
    assert all(back[one["address"]]["state"] == "attached" for one in others)


def test_a_late_node_is_warmed_by_the_others(nodes: ray_rig.Cluster, server: Objects) -> None:
    early, late = nodes.nodes[:2], nodes.nodes[2:]
    chosen = [word for node in early for word in ("--node", node.address)]
    _nodes(nodes, "warm", server.url("x.npy"), *chosen)
    sent = server.sent
    found = {one["address"]: one for one in _nodes(nodes, "warm", server.url("x.npy"))["nodes"]}
    assert [found[node.address]["state"] for node in early] == ["attached"] * 2
    assert all(found[node.address]["received"] == len(server.data["x.npy"]) for node in late), found
    assert server.sent == sent


def test_late_nodes_read_together_what_no_entry_contains(nodes: ray_rig.Cluster, server: Objects) -> None:
    """The entry of an .npz object is not the object's bytes."""
    file = io.BytesIO()
    np.savez(file, a=ROWS[:2_000_000], b=ROWS[:1000])
    server.data["x.npz"] = file.getvalue()
    size = len(file.getvalue())
    early, late = nodes.nodes[:2], nodes.nodes[2:]
    chosen = [word for node in early for word in ("--node", node.address)]
    _nodes(nodes, "warm", server.url("x.npz"), *chosen)
    assert server.sent == size
    found = {one["address"]: one for one in _nodes(nodes, "warm", server.url("x.npz"))["nodes"]}
    assert [found[node.address]["state"] for node in (*early, *late)] == ["attached"] * 2 + ["loaded"] * 2, found
    assert sum(found[node.address]["read"] for node in late) == size and server.sent == 2 * size


def test_the_progress_of_each_node_is_drawn(nodes: ray_rig.Cluster, server: Objects) -> None:
    command = [sys.executable, "-m", "legroom", "nodes", "warm", server.url("x.npy"), "--ray", nodes.address]
    done, screen = nodes.on_terminal(command)
    assert done == 0, screen
    for node in nodes.nodes:
        assert node.address in screen
    size = f"{len(server.data['x.npy']) / 2**20:.1f}"
    assert screen.count(f"{size}/{size} MiB") >= 4, screen[-3000:]


def test_doctor_shows_the_worst_node_first(nodes: ray_rig.Cluster) -> None:
    """A node whose /dev/shm is full, which is not the first by its address."""
    sick = nodes.nodes[2]
    assert [one["address"] for one in _nodes(nodes, "doctor")["nodes"]] == [node.address for node in nodes.nodes]
    free = "$(df --output=avail -B1 /dev/shm | tail -1)"
    subprocess.run(sick.run(["sh", "-ec", f"fallocate -l {free} /dev/shm/full"]), check=True)
    try:
        found = _nodes(nodes, "doctor")["nodes"]
    finally:
        subprocess.run(sick.run(["rm", "/dev/shm/full"]), check=True)
    assert found[0]["address"] == sick.address and len(found) == 4
    first = found[0]["answer"]["findings"][0]
    assert (first["severity"], first["code"]) == ("critical", "shm-nearly-full"), found[0]["answer"]["findings"]
    assert "shm-nearly-full" not in json.dumps(found[1:])


def test_a_missing_object_is_reported_by_every_node(nodes: ray_rig.Cluster, server: Objects) -> None:
    found = _nodes(nodes, "warm", server.url("gone.npy", "me:sesame@"))
    assert {one["error"]["code"] for one in found["nodes"]} == {"no-such-object"}
    assert "sesame" not in json.dumps(found)


def test_a_program_of_another_cluster_is_refused(nodes: ray_rig.Cluster) -> None:
    """One with another token reaches neither the nodes nor the actors that take pieces."""
    command = [sys.executable, "-m", "legroom", "nodes", "list", "--ray", nodes.address, "--json"]
    done = nodes.on_head(command, token="0" * 64)
    assert done.returncode == 1 and "no Ray cluster at" in done.stderr, done
    assert nodes.token not in done.stdout + done.stderr and "0" * 64 not in done.stdout + done.stderr


PASSWORD = secrets.token_hex(8)  # in no file: below /tmp a node sees the clone with this test, too
SECRET = """
import dataclasses, json, os
from legroom.integrations.ray_cluster_commands import connect, drop, entries, warm
url = os.environ["PLANTED"]
with connect(os.environ["RAY_ADDRESS"]):
    found = [*warm(url), *entries(), *warm(url.replace("x.npy", "gone.npy"))]
print(json.dumps([dataclasses.asdict(one) for one in found]))
"""


def test_a_password_in_a_url_is_nowhere_on_the_nodes(
    nodes: ray_rig.Cluster, server: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in process titles while they load, in stores, in Ray's logs, in results, in errors or in a report."""
    monkeypatch.setenv("PLANTED", server.url("x.npy", f"me:{PASSWORD}@"))
    titles: set[str] = set()

    def look(method: str, _: int) -> None:
        for node in nodes.nodes:
            for pid in rig_cleanup.inside(node.net):
                for name in ("cmdline", "comm"):
                    with suppress(OSError):
                        titles.add(Path(f"/proc/{pid}/{name}").read_text(errors="replace"))

    server.before = look
    done = nodes.driver(SECRET, timeout=400)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert [one["state"] for one in answers] == ["loaded"] * 4 + ["ok"] * 4 + ["failed"] * 4, answers
    assert any("NodeLoader" in title for title in titles) and PASSWORD not in "".join(titles)
    assert PASSWORD not in done.stdout + done.stderr
    for node in nodes.nodes:
        places = ["/dev/shm", "/tmp", "/var/tmp"]  # each node's own: the stores and Ray's logs
        found = subprocess.run(node.run(["grep", "-rlaF", PASSWORD, *places]), capture_output=True, text=True)
        assert found.returncode == 1 and not found.stdout, found
        same = subprocess.run(node.run(["grep", "-rlaF", "x.npy", "/dev/shm"]), capture_output=True, text=True)
        assert same.returncode == 0, same  # the URL without its password is there: its entry's manifest
    report = nodes.on_head([sys.executable, "-m", "legroom", "report", "--show"])
    assert report.returncode == 0 and report.stdout and PASSWORD not in report.stdout + report.stderr
