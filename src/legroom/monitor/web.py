"""A watch as a page: ``--web [HOST:PORT]``.

Covers: the page and its parts, the stream of events behind it, who is answered. Does not cover: what the stream
holds (web_feed.py), how the page draws it (web_page/).

Served to this machine alone unless another address is named. Only the page's own few files can be fetched, by GET;
the page may load nothing from anywhere else. A client costs one thread; there is a bound on them, and one that does
not read is let go when its buffer has been full for ten seconds. The watch itself never waits for a client.
"""

from __future__ import annotations

import socket
import threading
import time
from importlib import resources

from legroom.model import Moment
from legroom.monitor.listen import Handler, Server, address, serve
from legroom.monitor.web_feed import Feed
from legroom.monitor.web_names import Names
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


class Web:
    """An output that people look at in a browser."""

    def __init__(self, where: str = str(PORT)) -> None:
        self.feed = Feed()
        place = address(where, PORT)
        folder = resources.files("legroom.monitor") / "web_page"
        self.files = {path: (kind, (folder / name).read_bytes()) for path, (name, kind) in _FILES.items()}
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self.clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        self.names = Names(place[0])
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
    web: Web

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
