"""A watch as a page: ``--web [HOST:PORT]``.

Covers: the page and its parts, the stream of events behind it, who is answered. Does not cover: what the stream
holds (web_feed.py), how the page draws it (web_page/).

Served to this machine alone unless another address is named. Only the page's own few files can be fetched, by GET;
the page may load nothing from anywhere else. A client costs one thread; there is a bound on them, and one that does
not read is let go when its buffer has been full for ten seconds. The watch itself never waits for a client.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import resources
from typing import Any

from legroom.model import Moment, PoolPoint, ProcessRow
from legroom.monitor.http_server import AllowedHosts, Handler, Server, parse_address, serve
from legroom.monitor.timeline import Timeline, thin_points
from legroom.monitor.watch_log import moment_object
from legroom.words import say

PORT = 9465
MOST_STREAMS = 256  # clients that are sent every sample
_MOST_CLIENTS = 512  # of any kind, at one time
_HEARTBEAT = 15.0  # seconds without a sample after which a client that is gone would go unnoticed
_BUFFER = 1 << 16  # bytes waiting for a client in the kernel
_LAST_WAIT = 1.0
_TEXT = "text/plain; charset=utf-8"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/parts.js": ("parts.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class WebView:
    """An output that people look at in a browser."""

    def __init__(self, where: str = str(PORT)) -> None:
        self.feed = EventFeed()
        place = parse_address(where, PORT)
        folder = resources.files("legroom.monitor") / "web_page"
        self.files = {path: (kind, (folder / name).read_bytes()) for path, (name, kind) in _FILES.items()}
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self.clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        self.names = AllowedHosts(place[0])
        self._server: Server = serve(place, type("_BoundPage", (_Page,), {"web": self}))

    @property
    def url(self) -> str:
        """What to open."""
        return self._server.url

    def show(self, moment: Moment) -> None:
        self.feed.put(moment)

    def finish(self) -> None:
        """Say that nothing more will come, and go on serving what there was."""
        self.feed.end()

    def close(self) -> None:
        """Tell every client that it is over, give them a moment to hear it, and free the port."""
        self.feed.end()
        deadline = time.monotonic() + _LAST_WAIT
        while self.feed.listening and time.monotonic() < deadline:
            time.sleep(0.01)
        self._server.stop()


class _Page(Handler):
    web: WebView

    def handle(self) -> None:
        """One client; more at once than there may be are told so and let go."""
        if not self.web.clients.acquire(blocking=False):
            self.wfile.write(
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            return
        try:
            super().handle()
        finally:
            self.web.clients.release()

    def do_GET(self) -> None:  # noqa: N802
        if not self.web.names.answer(self.headers.get("Host")):
            words = say("this is served under its own address only, and the request names another host")
            self.give(421, _TEXT, words.encode() + b"\n")
            return
        self.page(self.path.split("?", 1)[0])

    do_HEAD = do_GET  # noqa: N815

    def refuse(self) -> None:
        """Nothing can be changed from here. What came along was not read, so the connection ends."""
        self.close_connection = True
        self.give(405, _TEXT, say("only GET is answered").encode() + b"\n")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = refuse  # noqa: N815

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def page(self, path: str) -> None:
        if path == "/events":
            self._events()
        elif path in self.web.files:
            self.give(200, *self.web.files[path])
        else:
            self.give(404, _TEXT, say("nothing here").encode() + b"\n")

    def _events(self) -> None:
        if self.command == "HEAD":
            self.give(200, "text/event-stream", b"")
            return
        if not self.web.streams.acquire(blocking=False):
            words = say("{count} clients are being served, and there may be no more", count=MOST_STREAMS)
            self.give(503, _TEXT, words.encode() + b"\n")
            return
        try:
            self._stream()
        finally:
            self.web.streams.release()

    def _stream(self) -> None:
        """The story so far, then each moment; a client that is slow gets the newest and misses those between."""
        self.close_connection = True
        # Small, so that a client that never reads is noticed, and holds little until then.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Connection", "close")
        self.end_headers()
        with self.web.feed.seat() as events:
            while (event := events.next(_HEARTBEAT)) is not None:
                self.wfile.write(event)


MOST_PROCESSES = 200  # shown of a watch; those that hold most
_MOST_DOTS = 700  # of a pool, in the story so far
_MOST_TOLD = 50  # marks and alarms sent along with every moment
_BEAT = b": still here\n\n"
_END = b"event: end\ndata: {}\n\n"


class EventFeed:
    """Filled by the watch, read by many."""

    def __init__(self) -> None:
        self._story = Timeline()
        self._changed = threading.Condition()
        self._number = 0
        self._ended = False
        self.listening = 0
        self._encoding = threading.Lock()
        self._encoded: dict[str, tuple[int, bytes]] = {}  # kind of event: number and bytes of the newest

    def put(self, moment: Moment) -> None:
        """The next moment."""
        with self._changed:
            self._story.add(moment)
            self._number += 1
            self._changed.notify_all()

    def end(self) -> None:
        """There will be no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @contextmanager
    def seat(self) -> Iterator[Subscription]:
        """One client's place in the stream."""
        with self._changed:
            self.listening += 1
        try:
            yield Subscription(self)
        finally:
            with self._changed:
                self.listening -= 1

    def wait(self, seen: int, timeout: float) -> tuple[int, bool]:
        """The number of the newest moment, once it is another than ``seen``, and whether the watch has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != seen or self._ended, timeout)
            return self._number, self._ended

    def event(self, kind: str) -> tuple[int, bytes]:
        """The newest ``moment``, or the whole ``story``, as bytes to be sent; encoded by whoever asks first."""
        with self._encoding:
            known = self._encoded.get(kind)
            with self._changed:
                number = self._number
                if known is not None and known[0] == number:
                    return known
                body: dict[str, Any] = {} if self._story.moment is None else _now(self._story)
                dots = self._story.dots() if kind == "story" else {}
            if kind == "story":
                body["courses"] = {name: _few(course) for name, course in dots.items()}
            text = json.dumps(body, separators=(",", ":"))  # ASCII, so that no name can be half a character
            self._encoded[kind] = number, f"event: {kind}\ndata: {text}\n\n".encode()
            return self._encoded[kind]


class Subscription:
    """Where one client is."""

    def __init__(self, feed: EventFeed) -> None:
        self._feed = feed
        self._seen: int | None = None
        self._over = False

    def next(self, timeout: float) -> bytes | None:
        """What to send next; a word of life when nothing came for so long, None after the end."""
        if self._over:
            return None
        if self._seen is None:
            self._seen, event = self._feed.event("story")
            return event
        number, ended = self._feed.wait(self._seen, timeout)
        if number != self._seen:
            self._seen, event = self._feed.event("moment")
            return event
        self._over = ended
        return _END if ended else _BEAT


def _now(story: Timeline) -> dict[str, Any]:
    """The newest moment as the page reads it: the log's object, the lesser processes left out, marks and alarms."""
    moment = story.moment
    if moment is None:
        return {}
    rows = moment.sample.processes
    most = sorted(rows, key=_weight, reverse=True)[:MOST_PROCESSES]
    return {
        **moment_object(replace(moment, sample=replace(moment.sample, processes=tuple(most)))),
        "began": story.began,
        "processes_in_all": len(rows),
        "marked": [asdict(mark) for mark in list(story.marks)[-_MOST_TOLD:]],
        "spells": [asdict(spell) for spell in story.spells()[-_MOST_TOLD:]],
    }


def _few(dots: list[PoolPoint]) -> list[PoolPoint]:
    while len(dots) > _MOST_DOTS:
        dots = thin_points(dots)
    return dots


def _weight(row: ProcessRow) -> int:
    return max(row.host or 0, row.rss_shmem or 0, row.gpu or 0)
