"""examples/ray_cluster on two nodes: one copy on each, trials that attach and share batches, workers that train."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_rig

from object_server import Objects, object_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_cluster"
ROWS = 2000


def _why_not() -> str | None:
    try:
        import ray.train.torch
        import ray.tune  # noqa: F401
    except ImportError as problem:
        return str(problem)
    return ray_rig.why_not()


pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_why_not() is not None, reason=str(_why_not())),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[ray_rig.Cluster]:
    with ray_rig.cluster(2, cpus=4) as found:
        yield found


@pytest.fixture(scope="module")
def server(nodes: ray_rig.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Objects]:
    file = tmp_path_factory.mktemp("rows") / "rows.npy"
    sys.path.insert(0, str(EXAMPLE))
    try:
        import rows
    finally:
        sys.path.remove(str(EXAMPLE))
    rows.write(file, ROWS)
    with object_server(host=nodes.host, rows__npy=file.read_bytes()) as found:
        yield found


def _run(nodes: ray_rig.Cluster, program: str, url: str, *flags: str) -> dict:
    command = [sys.executable, str(EXAMPLE / program), "--address", nodes.address, "--data", url, *flags]
    done = nodes.on_head(command, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict = json.loads(done.stdout.splitlines()[-1])
    assert not list(EXAMPLE.glob("legroom-*"))  # the trials' files
    return found


def test_eight_trials_on_two_nodes_have_one_copy_each(nodes: ray_rig.Cluster, server: Objects) -> None:
    found = _run(nodes, "tune_trials.py", server.url("rows.npy"), "--trials", "8", "--epochs", "8", "--json")
    trials = found["trials"]
    assert len(trials) == 8 and all(one["samples"] == ROWS for one in trials)
    by_node = {
        address: [one for one in trials if one["node"] == address] for address in {one["node"] for one in trials}
    }
    assert {address: len(own) for address, own in by_node.items()} == {node.address: 4 for node in nodes.nodes}
    assert len({one["key"] for one in trials}) == 1
    assert server.sent == len(server.data["rows.npy"]) == sum(one["read"] for one in found["nodes"])
    for address, own in by_node.items():  # batches of one trial were taken by the others of its node
        assert sum(one["shared"] for one in own) > 0, (address, trials)


def test_workers_of_ray_train_attach_to_the_copy_of_their_node(nodes: ray_rig.Cluster, server: Objects) -> None:
    before = server.sent
    found = _run(nodes, "train_workers.py", server.url("rows.npy"), "--workers", "2", "--epochs", "2")
    assert found["samples"] == ROWS / 2 and 0.0 <= found["accuracy"] <= 1.0
    assert server.sent - before in (0, len(server.data["rows.npy"]))  # alone: this test loads it
