"""`legroom watch --web`: serves a page and a stream of server-sent events. The page itself is in web_page/.

Only the page's own files can be fetched, only by GET, and the page loads nothing else. Each client takes one thread,
and their number is limited. A client that does not read is disconnected once its buffer has been full for ten seconds;
the watch never waits for a client.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from importlib import resources
from typing import Any

from legroom.messages import say
from legroom.monitor.history_and_trend import keep_largest_processes
from legroom.monitor.http_server import Handler, parse_address, serve
from legroom.monitor.timeline import Timeline, taken, thin_points
from legroom.monitor.watch_log import fields_of, moment_object
from legroom.records.watch_sample import Moment, PoolPoint

PORT = 9465
MOST_STREAMS = 256  # clients that receive events
MOST_PROCESSES = 200  # sent to the page, the largest
_MOST_POINTS = 700  # of a pool, in the first event
_MOST_FRAMES = 600  # moments of processes, in the first event
_MOST_LISTED = 50  # marks and alarms in every event
_KEEPALIVE = 15.0  # seconds without a sample after which a comment is sent, to notice clients that are gone
_BUFFER = 1 << 16  # bytes in the kernel for one client
_LAST_WAIT = 5.0  # seconds for clients to be sent the end; on a busy machine their threads wait for a core
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/cards_and_tables.js": ("cards_and_tables.js", "text/javascript; charset=utf-8"),
    "/process_charts.js": ("process_charts.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_KEEPALIVE_EVENT = b": still here\n\n"
_END_EVENT = b"event: end\ndata: {}\n\n"


class WebView:
    """Shows the watch in browsers."""

    def __init__(self, where: str = str(PORT)) -> None:
        self.events = EventFeed()
        folder = resources.files("legroom.monitor") / "web_page"
        self.files = {path: (kind, (folder / name).read_bytes()) for path, (name, kind) in _FILES.items()}
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._server = serve(parse_address(where, PORT), type("_BoundHandler", (_PageHandler,), {"view": self}))

    @property
    def url(self) -> str:
        """The address of the page."""
        return self._server.url

    def show(self, moment: Moment) -> None:
        self.events.add(moment)

    def finish(self) -> None:
        """Send the end of the watch to every client, and continue to serve what there was."""
        self.events.end()

    def close(self) -> None:
        """Send the end of the watch to every client, wait a moment for delivery, and free the port."""
        self.events.end()
        deadline = time.monotonic() + _LAST_WAIT
        while self.events.subscribers and time.monotonic() < deadline:
            time.sleep(0.01)
        self._server.stop()


class EventFeed:
    """The events of a watch, encoded once for all clients and in the clients' threads.

    There is no queue per client: each one remembers the number of its last moment and gets the newest. A slow client
    misses moments; one that never reads costs nothing.
    """

    def __init__(self) -> None:
        self.subscribers = 0
        self._timeline = Timeline()
        self._changed = threading.Condition()
        self._number = 0
        self._ended = False
        self._encoding = threading.Lock()
        self._encoded: dict[str, tuple[int, bytes]] = {}  # kind of event: number and bytes of the newest

    def add(self, moment: Moment) -> None:
        """Add the next moment."""
        with self._changed:
            self._timeline.add(moment)
            self._number += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Mark the watch as ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def follow(self) -> Generator[bytes]:
        """The events for one client: the history, each moment, comments while there is none, the end."""
        with self._changed:
            self.subscribers += 1
        try:
            seen, event = self.event("story")
            yield event
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._number != seen or self._ended, _KEEPALIVE)  # noqa: B023
                    number, ended = self._number, self._ended
                if number != seen:
                    seen, event = self.event("moment")
                    yield event
                elif ended:
                    yield _END_EVENT
                    return
                else:
                    yield _KEEPALIVE_EVENT
        finally:
            with self._changed:
                self.subscribers -= 1

    def event(self, kind: str) -> tuple[int, bytes]:
        """Number and bytes of the newest ``moment`` event, or of the ``story`` event with the whole timeline."""
        with self._encoding:
            known = self._encoded.get(kind)
            with self._changed:
                number = self._number
                if known is not None and known[0] == number:
                    return known
                body = _event_body(self._timeline)
                points = self._timeline.points() if kind == "story" else {}
                frames = self._timeline.processes.frames() if kind == "story" else []
            if kind == "story":
                body["courses"] = {name: _fewer(series) for name, series in points.items()}
                body["process_courses"] = [
                    [frame.when, frame.used, frame.points, frame.others] for frame in frames[-_MOST_FRAMES:]
                ]
            # ASCII, so that a lone surrogate in a name is harmless
            text = json.dumps(body, separators=(",", ":"), default=fields_of)
            self._encoded[kind] = number, f"event: {kind}\ndata: {text}\n\n".encode()
            return self._encoded[kind]


class _PageHandler(Handler):
    view: WebView

    def refuse(self) -> None:
        # The body was not read, so the connection has to end.
        self.close_connection = True
        self.respond_text(405, say("only GET is allowed"))

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = refuse  # noqa: N815

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def page(self, path: str) -> None:
        if path == "/events":
            self._events()
        elif path in self.view.files:
            self.respond(200, *self.view.files[path])
        else:
            self.respond_text(404, say("not found"))

    def _events(self) -> None:
        if self.command == "HEAD":
            self.respond(200, "text/event-stream", b"")
            return
        if not self.view.streams.acquire(blocking=False):
            self.respond_text(503, say("too many clients: the limit is {count}", count=MOST_STREAMS))
            return
        try:
            self._stream()
        finally:
            self.view.streams.release()

    def _stream(self) -> None:
        """Send the timeline so far, then each moment."""
        self.close_connection = True
        # Small, so that a client that never reads is noticed soon and holds little memory.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Connection", "close")
        self.end_headers()
        with closing(self.view.events.follow()) as events:
            for event in events:
                self.wfile.write(event)


def _event_body(timeline: Timeline) -> dict[str, Any]:
    """The newest moment as in the log, with the largest processes only, and the last marks and alarms."""
    moment = timeline.moment
    if moment is None:
        return {}
    smaller = replace(moment, sample=keep_largest_processes(moment.sample, MOST_PROCESSES))
    kept, rows = smaller.sample.processes, moment.sample.processes
    return {
        **moment_object(smaller),
        "began": timeline.began,
        "processes_in_all": len(rows),
        "others": sum(map(taken, rows)) - sum(map(taken, kept)),
        "marked": list(timeline.marks)[-_MOST_LISTED:],
        "spells": timeline.alarm_spans()[-_MOST_LISTED:],
    }


def _fewer(points: list[PoolPoint]) -> list[PoolPoint]:
    while len(points) > _MOST_POINTS:
        points = thin_points(points)
    return points
