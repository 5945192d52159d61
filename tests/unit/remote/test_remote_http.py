"""Requests over plain sockets: what they do themselves, what is left to fsspec, and what each failure says."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import legroom
from legroom import errors
from legroom.cache import source_digest_records
from legroom.remote import http_connections, object_store, remote_errors_and_retries
from legroom.remote.remote_object import ObjectStamp, object_url
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


def test_a_head_with_much_of_the_body_behind_it_is_not_too_long() -> None:
    here, there = socket.socketpair()
    with here, there:
        connection = object.__new__(http_connections._Connection)
        connection._socket, connection._whole = here, 0
        parts = urlsplit("http://127.0.0.1/x")
        thread = threading.Thread(
            target=lambda: (
                there.recv(1 << 16),
                there.sendall(b"HTTP/1.1 206 OK\r\n"),
                time.sleep(0.2),
                there.sendall(b"Content-Length: 90000\r\n\r\n" + bytes(90_000)),
            )
        )
        thread.start()
        answer = connection.ask(parts, {})
        got = len(connection._rest)
        while got < 90_000:
            got += len(here.recv(1 << 16))
        thread.join()
        assert answer._status == 206 and got == 90_000


@pytest.mark.parametrize(
    "problem",
    [socket.gaierror(-2, "Name or service not known"), OSError(errno.EHOSTUNREACH, "No route to host"),
     OSError(errno.ENETUNREACH, "Network is unreachable"), ConnectionRefusedError(errno.ECONNREFUSED, "refused")],
)  # fmt: skip
def test_a_server_that_cannot_be_reached(problem: OSError) -> None:
    found = remote_errors_and_retries.remote_error(object_url("http://host/x"), problem)
    assert type(found) is errors.RemoteUnreachable and "network" in found.fix[0]


@pytest.mark.parametrize(("text", "seconds"), [("inf", 1e6), ("nan", 60), ("-1", 60), ("x", 60), ("", 60), ("5", 5)])
def test_every_timeout_can_be_waited_for(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("LEGROOM_REMOTE_TIMEOUT", text)
    assert remote_errors_and_retries.timeout() == seconds
    with socket.socket() as one:
        one.settimeout(remote_errors_and_retries.timeout())


@pytest.mark.parametrize("ranges", [True, False])
def test_a_small_object_that_is_large_is_not_read(shm: Path, npy: Encode, ranges: bool) -> None:
    with object_server(x__npy=bytes(1 << 20)) as server:
        server.ranges = ranges
        with pytest.raises(errors.UnsupportedData) as caught:
            object_store.read_small(object_url(server.url("x.npy")), 1000)
        assert caught.value.why == f"it has {1 << 20} bytes" and server.sent == 0
        server.data["x.npy"] = b"abc"
        assert object_store.read_small(object_url(server.url("x.npy")), 1000) == b"abc"


def test_noting_a_version_fails_no_open(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Iterator[Any]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        yield

    monkeypatch.setattr(source_digest_records, "existing_stores", fails)
    url = object_url("http://127.0.0.1:9/x")
    monkeypatch.setitem(source_digest_records._here, url.identity, (time.time(), ObjectStamp(5, "etag", "a")))
    source_digest_records.remember(url)


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
