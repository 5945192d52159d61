"""How much of Ray's object store a load on four nodes takes."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import ray_rig

from object_server import object_server

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ray_rig.why_not() is not None, reason=str(ray_rig.why_not())),
]

# Without the other limits, so that nothing but the bound on the bytes can hold.
PROGRAM = """
import dataclasses, json, sys
from legroom.integrations import ray_divide_download
from legroom.integrations.ray_cluster_commands import connect, warm
ray_divide_download._ON_THE_WAY = int(sys.argv[3])
ray_divide_download._AHEAD = ray_divide_download._READS = 1 << 20
with connect(sys.argv[1]):
    found = warm(sys.argv[2])
print(json.dumps([dataclasses.asdict(one) for one in found]))
"""


def test_the_object_store_holds_no_more_than_the_bound() -> None:
    """And what arrives until Ray removes what no node wants any more, which it does once a second."""
    bound, rate, late = 16 << 20, 25_000_000, 3
    file = io.BytesIO()
    np.save(file, np.random.default_rng(0).integers(0, 255, 256 << 20, dtype=np.uint8))
    size = len(file.getvalue())
    assert bound + late * rate < size / 2  # without a bound all of it is on its way at once
    with ray_rig.cluster(4, rate=f"{8 * rate}bit") as nodes, object_server(host=nodes.host) as server:
        server.data["x.npy"] = file.getvalue()
        server.etag = lambda _: '"a"'  # type: ignore[method-assign]
        done = nodes.driver(PROGRAM, nodes.address, server.url("x.npy"), str(bound), timeout=600)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert [one["state"] for one in found] == ["loaded"] * 4, found
        assert server.sent == size
        peaks = [node.object_store_peak() for node in nodes.nodes]
        assert all(0 < peak <= bound + late * rate for peak in peaks), peaks
