"""Which pieces a download asks for, how many at once, and what happens to a connection that stands still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.cache.download import PIECE, Download
from legroom.errors import NoRoom
from legroom.remote.remote_object import ObjectStamp, object_url
from object_server import object_server

Encode = Callable[[Any], bytes]


@contextmanager
def _download(folder: Path, pieces: int, **options: Any) -> Iterator[Download]:
    """One whose server is never asked."""
    folder.mkdir()
    stamp = ObjectStamp(pieces * PIECE, "etag", "a", etag='"a"')
    with Download(object_url("http://127.0.0.1:9/x.npy"), stamp, folder, **options) as found:
        yield found


def test_a_connection_that_stands_still_holds_nobody_up(
    shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the load nor its end waits for the answer that never comes."""
    monkeypatch.setenv("LEGROOM_REMOTE_TIMEOUT", "600")
    rows = np.random.default_rng(0).integers(0, 255, 60 << 20, dtype=np.uint8)
    let_go, asked, late = threading.Event(), [], []

    def before(method: str, start: int) -> None:
        if method == "GET" and start == PIECE and not asked:
            asked.append(start)
            let_go.wait(90)
            late.append(start)

    with object_server(x__npy=npy(rows)) as server:
        server.before = before
        server.etag = lambda _: '"a"'  # type: ignore[method-assign]
        try:
            with legroom.open(server.url("x.npy")) as data:
                assert np.array_equal(data["array"], rows)
            assert asked and not late
            deadline = time.monotonic() + 60  # before the answer comes
            while [one for one in threading.enumerate() if one.name.startswith("legroom-download")]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            let_go.set()


def test_a_piece_that_comes_twice_is_written_once(tmp_path: Path) -> None:
    """The second may be damaged, and the first has been hashed."""
    with _download(tmp_path / "x", 2) as download:
        assert download._run_of(0, 2) == (0, 1)
        download._keep(0, memoryview(b"a" * PIECE))
        download._keep(0, memoryview(b"b" * PIECE))
        assert download.present == PIECE and download.path.read_bytes()[:PIECE] == b"a" * PIECE


@pytest.mark.parametrize(
    ("seconds", "answers", "together"),
    [
        (0.4, 0.001, 8),  # of 256 pieces: 16 connections get one each 0.025 s
        (1.6, 0.001, 2),
        (16.0, 0.001, 1),
        (3.0, 0.2, 8),  # because the server takes long to answer
    ],
)
def test_a_request_takes_no_longer_than_readers_can_wait(
    tmp_path: Path, seconds: float, answers: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("legroom.cache.download.time", SimpleNamespace(monotonic=lambda: now))
    with _download(tmp_path / "x", 1000) as download:
        download._requests, download._came = 1000, 256
        download._begun, download._answers = now - seconds, answers
        assert download._together == together


def test_only_a_file_in_memory_is_read_in_place(tmp_path: Path) -> None:
    """A disk that fails would end the process."""
    with _download(tmp_path / "memory", 2, in_memory=True, supplied=True) as download:
        view = download.mapped()
        assert view is not None and len(view) == 2 * PIECE
        download.put(1, memoryview(b"a" * PIECE))
        assert view[PIECE:] == b"a" * PIECE
    with _download(tmp_path / "disk", 2) as download:
        assert download.mapped() is None


def test_a_piece_without_room_may_be_put_again(tmp_path: Path) -> None:
    """And the room of several is asked for at once."""
    asked: list[int] = []

    def ask(count: int) -> None:
        asked.append(count)
        if len(asked) == 1:
            raise NoRoom("full")

    with _download(tmp_path / "x", 20, supplied=True, ask=ask) as download:
        piece = memoryview(b"a" * PIECE)
        with pytest.raises(NoRoom):
            download.put(0, piece)
        assert download.missing() == list(range(20)) and download.present == 0
        for number in range(20):
            download.put(number, piece)
        assert download.is_complete and asked == [8 * PIECE, 8 * PIECE, 8 * PIECE, 4 * PIECE]
