"""Requests over plain sockets: what they do themselves, what is left to fsspec, and what each failure says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom import errors
from legroom.remote import object_store, remote_errors_and_retries
from object_server import faulty_proxy, object_server

Encode = Callable[[Any], bytes]
ROWS = np.arange(1_000_000, dtype=np.float32)  # 4 MB


def _is_right(url: str) -> None:
    with legroom.open(url) as data:
        assert np.array_equal(data["array"], ROWS)


def test_connections_are_used_again(shm: Path, npy: Encode) -> None:
    rows = np.arange(20 << 20, dtype=np.uint8)  # more pieces than connections
    with object_server(x__npy=npy(rows)) as server, faulty_proxy(server.port) as faults:
        with legroom.open(f"http://127.0.0.1:{faults.port}/x.npy") as data:
            assert np.array_equal(data["array"], rows)
        ranges = [span for method, span in server.requests if method == "GET"]
        assert faults.connections <= object_store.CONNECTIONS + 1 < len(ranges)  # and one to ask for the version
        assert server.sent == len(server.data["x.npy"])


def test_a_server_that_sends_less_than_was_asked_for(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server:
        server.most = 300_000
        _is_right(server.url("x.npy"))


def test_a_redirect_is_followed(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server:
        server.moved["old.npy"] = server.url("x.npy")
        _is_right(server.url("old.npy"))


def test_a_busy_server_is_asked_again(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server:
        server.busy = 5
        _is_right(server.url("x.npy"))
        assert server.busy == 0


def test_a_proxy_in_the_environment_is_left_to_fsspec(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec decides whether it uses it. A plain socket would go past it."""
    from legroom.remote import http_connections

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(http_connections.socket, "create_connection", lambda *_: pytest.fail("went past the proxy"))
    with object_server(x__npy=npy(ROWS)) as server:
        _is_right(server.url("x.npy"))


def test_delayed_answers(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server, faulty_proxy(server.port) as faults:
        faults.delay = lambda number: 0.2
        _is_right(f"http://127.0.0.1:{faults.port}/x.npy")


def test_what_failures_say(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, with numbers, and with what to do. What has arrived is kept where it helps."""
    monkeypatch.setattr(remote_errors_and_retries, "ATTEMPTS", 2)
    monkeypatch.setattr(remote_errors_and_retries, "_MOST_TIMEOUTS", 1)
    with object_server(x__npy=npy(ROWS)) as server, faulty_proxy(server.port) as faults:
        url = f"http://127.0.0.1:{faults.port}/x.npy"

        def raised(error: type[errors.LegroomError], where: str = url) -> errors.LegroomError:
            with pytest.raises(error) as caught:
                legroom.open(where, revalidate=True)
            return caught.value

        gone = raised(errors.NoSuchObject, f"http://127.0.0.1:{faults.port}/gone.npy")
        assert gone.why == "the server has no such object or bucket" and gone.fix == ("check the URL",)
        server.most = 0
        short = raised(errors.ShortRead)
        assert short.why.startswith("the server sent 0 B of ")  # of any of the pieces
        assert short.fix == ("try again; what has arrived is kept",)
        server.most = None
        monkeypatch.setenv("LEGROOM_REMOTE_TIMEOUT", "0.3")
        let_go = threading.Event()
        server.before = lambda method, _: let_go.wait(60) and None if method == "GET" else None
        slow = raised(errors.RemoteTimeout)
        let_go.set()
        assert slow.why == "the server sent nothing for 0.3 s" and "LEGROOM_REMOTE_TIMEOUT=300" in slow.fix
        monkeypatch.delenv("LEGROOM_REMOTE_TIMEOUT")
        count = 0

        def replace(method: str, _: int) -> None:
            nonlocal count
            if method == "GET":
                count += 1
                server.data["x.npy"] = npy(ROWS + count)

        server.before = replace
        changed = raised(errors.SourceChanged)
        assert changed.what == f"{url} changed while it was being read"
        assert changed.why == "the server has another version of it now"
