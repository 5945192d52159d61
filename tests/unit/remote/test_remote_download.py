"""Which pieces a download asks for, how many at once, and what happens to a connection that stands still."""

from __future__ import annotations

import errno
import os
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
from legroom.cache import store_directories
from legroom.cache.download import PIECE, Download
from legroom.errors import NoRoom
from legroom.remote.remote_object import ObjectStamp, object_url
from object_server import object_server
from open_descriptors import open_descriptors, opened_since

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


def test_a_piece_that_two_threads_compare_is_counted_once(tmp_path: Path) -> None:
    """Where the disk is slow and the network fast, a piece of an earlier attempt seems to stand still."""
    with _download(tmp_path / "x", 2, supplied=True) as first:
        for number in range(2):
            first.put(number, memoryview(b"a" * PIECE))
    with Download(first.url, first.stamp, tmp_path / "x") as download:
        taken = download._run_of(0, 2)
        assert taken == (0, 1)
        download._awaited.append(taken)
        download._came = 1000
        assert download._overtaken() == (0, 1)
        for _ in range(2):
            download._compare(0, 1)
        assert download.present == PIECE and not download.is_complete


def test_closing_twice_leaves_the_files_to_a_thread_that_is_still_busy(tmp_path: Path) -> None:
    with _download(tmp_path / "x", 2) as download:
        download._users += 1  # as a thread that waits for a silent server
        download.close()
        download.close()
        os.fstat(download._file)
        download._leave()
        assert download._file < 0


@pytest.mark.parametrize("what", ["journal", "size"])
def test_a_download_that_cannot_begin_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    if what == "size":
        monkeypatch.setattr(os, "ftruncate", fails)
    else:
        (tmp_path / "x" / "pieces").mkdir(parents=True)
    before = open_descriptors()
    stamp = ObjectStamp(2 * PIECE, "etag", "a", etag='"a"')
    (tmp_path / "x").mkdir(exist_ok=True)
    with pytest.raises(OSError):
        Download(object_url("http://127.0.0.1:9/x.npy"), stamp, tmp_path / "x")
    assert not opened_since(before)


def test_a_slow_progress_callback_stops_no_connection(tmp_path: Path) -> None:
    """It is called without the lock that every connection needs."""
    free: list[bool] = []
    with _download(tmp_path / "x", 2, supplied=True) as download:

        def take() -> None:
            free.append(download._changed.acquire(timeout=10))
            if free[-1]:
                download._changed.release()

        def report() -> None:
            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
            raise KeyboardInterrupt

        download.waiting = report
        with pytest.raises(KeyboardInterrupt):
            download.wait(0, PIECE)
        assert free == [True] and download._awaited == []


def test_an_interrupt_waits_for_no_silent_server(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_REMOTE_TIMEOUT", "600")
    rows = np.random.default_rng(0).integers(0, 255, 8 << 20, dtype=np.uint8)
    let_go, silent = threading.Event(), threading.Event()
    steps: list[str] = []
    monkeypatch.setattr(store_directories, "step_hook", steps.append)

    def before(method: str, start: int) -> None:
        if method == "GET" and start >= 4 * PIECE:
            silent.set()
            let_go.wait(120)

    def interrupt(done: int, total: int) -> None:
        if silent.is_set() and "write" in steps:
            raise KeyboardInterrupt

    with object_server(x__npy=npy(rows)) as server:
        server.before = before
        begun = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                legroom.open(server.url("x.npy"), progress=interrupt)
            assert time.monotonic() - begun < 60
        finally:
            let_go.set()
    assert all(name.startswith("download-") for name in os.listdir(shm / "work"))  # kept for the next attempt


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
