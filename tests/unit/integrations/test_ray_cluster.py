"""A node's part in loading an object with others, without a cluster, and the texts of its commands."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from legroom.cache import source_digest_records
from legroom.cache.download import PIECE
from legroom.cache.list_and_verify import entries
from legroom.cli.nodes import doctor_text, drop_text, list_text, warm_text
from legroom.errors import NoRoom, UsageError
from legroom.integrations import ray_cluster_commands
from legroom.integrations.ray_node import error_of, signature
from legroom.records.node_results import NodeAnswer, NodeError, NodeLoad
from object_server import object_server

ROWS = np.arange(3_000_000, dtype=np.float32)
KEY = b"of this load"


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    for variable, name in (("LEGROOM_SHM", "shm"), ("LEGROOM_DIR", "disk")):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr(source_digest_records, "_here", {})
    file = io.BytesIO()
    np.save(file, ROWS)
    return file.getvalue()


def test_a_node_builds_the_entry_from_what_it_read_and_what_it_received(content: bytes) -> None:
    import hashlib

    with object_server(x__npy=content) as server:
        node = ray_cluster_commands.NodeLoader(server.url("x.npy"), "auto", False, KEY)
        begun = node.begin()
        assert begun["state"] == "waits" and begun["size"] == len(content)
        assert begun["missing"] == list(range(-(-len(content) // PIECE)))
        own, signed = node.read(0, 8)
        assert own.tobytes() == content[: 8 * PIECE] and signed == signature(KEY, 0, own.data)
        rest = content[8 * PIECE :]
        right = signature(KEY, 8, rest)
        wrong = {
            "damaged": (8, rest[:-1] + b"?", right),
            "of another load or cluster": (8, rest, signature(b"of another one", 8, rest)),
            "in another place": (0, own.tobytes(), signature(KEY, 8, own.data)),
        }
        for first, data, signed in wrong.values():
            with pytest.raises(ValueError, match="damaged, or of another load"):
                node.receive(first, np.frombuffer(data, np.uint8), signed)
        assert node._download is not None and node._download.missing() == begun["missing"][8:]  # nothing of it was kept
        assert entries() == ()  # nor is there an entry before all of it has arrived
        node.receive(8, np.frombuffer(rest, np.uint8), right)
        ended = node.end()
        assert [entry.key for entry in entries()] == [ended["key"]]
        assert server.sent == 8 * PIECE == ended["read"] and ended["received"] == len(rest)
        assert ended["digest"] == "md5 " + hashlib.md5(content).hexdigest()
        again = ray_cluster_commands.NodeLoader(server.url("x.npy"), "auto", False, KEY).begin()
        assert again["state"] == "ended" and again["key"] == ended["key"]


def test_an_error_that_a_node_raised_is_named_by_its_own_code() -> None:
    class RayTaskError(Exception):  # as Ray's, whose text is a traceback
        cause = NoRoom("not enough space")

    assert error_of(RayTaskError("ray::NodeLoader.begin() Traceback …"))["code"] == NoRoom.code
    assert error_of(RuntimeError("lost"))["code"] == "node-failed"


@pytest.mark.parametrize(
    "call",
    [
        lambda: ray_cluster_commands.warm(3),
        lambda: ray_cluster_commands.warm("x.npy", revalidate="no"),
        lambda: ray_cluster_commands.doctor(3),
        lambda: ray_cluster_commands.entries(3),
        lambda: ray_cluster_commands.drop("x.npy", force="no"),
    ],
)
def test_arguments_of_wrong_types_are_refused_before_a_cluster_is_asked(call: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="must be"):
        call()


def test_a_node_that_has_the_entry_passes_on_the_objects_bytes(content: bytes) -> None:
    with object_server(x__npy=content) as server:
        first = ray_cluster_commands.NodeLoader(server.url("x.npy"), "auto", False, KEY)
        first.begin()
        first.read(0, 8), first.read(8, 12)
        assert first.end()["read"] == len(content)
        holder = ray_cluster_commands.NodeLoader(server.url("x.npy"), "auto", False, KEY)
        assert holder.begin()["state"] == "ended"
        sent = server.sent
        offer = holder.offer()
        assert offer is not None and offer["size"] == len(content) and offer["stamp"].startswith("etag ")
        parts = [holder.read(0, 8)[0].tobytes(), holder.read(8, 12)[0].tobytes()]
        assert b"".join(parts) == content and server.sent == sent


def test_an_entry_that_is_not_the_objects_bytes_is_not_passed_on(content: bytes) -> None:
    """The object has a longer header than the entry's file, as old writers made them."""
    old = (
        content[:8] + (len(content[:128]) - 10 + 64).to_bytes(2, "little") + content[10:127] + b" " * 64 + content[127:]
    )
    with object_server(x__npy=old) as server:
        node = ray_cluster_commands.NodeLoader(server.url("x.npy"), "auto", False, KEY)
        node.begin()
        node.read(0, 8), node.read(8, 12)
        assert "error" not in node.end()
        assert node.offer() is None


def test_a_load_that_is_abandoned_keeps_what_it_has(content: bytes) -> None:
    with object_server(x__npy=content) as server:
        node = ray_cluster_commands.NodeLoader(server.url("x.npy"), "auto", False, KEY)
        node.begin()
        node.read(0, 8)
        node.abandon("source-changed", "the reason")
        assert node.end()["error"]["message"] == "the reason"
        again = ray_cluster_commands.NodeLoader(server.url("x.npy"), "auto", False, KEY)
        assert again.begin()["missing"] == list(range(8, -(-len(content) // PIECE)))
        again.read(8, -(-len(content) // PIECE))
        assert again.end()["kept"] == 8 * PIECE


def test_texts() -> None:
    error = NodeError("node-died", "the node died while it was loading", "", ("run it again",))
    loads = [
        NodeLoad("a", "10.0.0.1", "s3://b/k", "loaded", 2.0, 100, 50, 50),
        NodeLoad("b", "10.0.0.2", "s3://b/k", "failed", 2.0, 100, 0, 0, error=error),
        NodeLoad("c", "10.0.0.3", "s3://b/k", "attached", 2.0, 100),
    ]
    text = warm_text(loads)
    assert text.index("failed") < text.index("loaded in") and "node-died" in text and "0.50 times" in text
    pools = [{"name": "shm", "free": 1 << 30, "size": 2 << 30}]
    finding = {"severity": "critical", "message": "/dev/shm is full", "code": "shm-full"}
    sick = NodeAnswer("a", "10.0.0.9", "ok", {"pools": pools, "findings": [finding]})
    well = NodeAnswer(
        "b", "10.0.0.1", "ok", {"pools": pools, "findings": [], "entries": [], "removed": [], "kept": [], "freed": 0}
    )
    lost = NodeAnswer("c", "10.0.0.2", "failed", {}, error)
    assert sorted([well, sick, lost], key=lambda one: -ray_cluster_commands.worst(one)) == [lost, sick, well]
    assert "CRITICAL: /dev/shm is full [shm-full]" in doctor_text([sick, well, lost])
    entry = {"sources": ["s3://b/k"], "key": "a" * 32, "bytes": 5}
    some = NodeAnswer("a", "10.0.0.9", "ok", {"entries": [entry]})
    assert "on 1 of 3 nodes: 10.0.0.9" in list_text([some, well, lost]) and "on the only node" in list_text([some])
    assert "removed 0" in drop_text([well, lost])
