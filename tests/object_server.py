"""Servers of objects for tests, on loopback: HTTP with ranges and ETags, and a proxy that cuts, delays and damages."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Objects:
    """What a server serves, how, and what was asked of it."""

    data: dict[str, bytes] = field(default_factory=dict)
    etags: bool = True
    ranges: bool = True
    lengths: bool = True
    modified: str | None = None
    need: str | None = None  # a text that the request line or its headers must contain
    most: int | None = None  # bytes that it sends of a range, whatever was asked for
    moved: dict[str, str] = field(default_factory=dict)  # names that it redirects
    busy: int = 0  # requests that it still refuses with 503
    failing: int | None = None  # the status with which it answers every request
    before: Callable[[str, int], None] | None = None  # called with method and offset before an answer
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, range
    sent: int = 0  # bytes of bodies, counted before a client can have them
    port: int = 0
    host: str = "127.0.0.1"
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def url(self, name: str, at: str = "") -> str:
        return f"http://{at}{self.host}:{self.port}/{name}"

    def count(self, sent: int) -> None:
        with self._counting:  # each client has a thread
            self.sent += sent

    def etag(self, name: str) -> str:
        return '"' + hashlib.sha1(self.data[name]).hexdigest()[:20] + '"'


def _handler(objects: Objects) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            name = self.path.partition("?")[0].lstrip("/")
            span = self.headers.get("Range")
            objects.requests.append((self.command, span or ""))
            if objects.need is not None and objects.need not in self.path + str(self.headers):
                self._status(403)
                return
            if objects.failing is not None:
                self._status(objects.failing)
                return
            if name in objects.moved:
                self._status(302, objects.moved[name])
                return
            if name not in objects.data:
                self._status(404)
                return
            if objects.busy and self.command == "GET":
                objects.busy -= 1
                self._status(503)
                return
            start, status = 0, 200
            if span and objects.ranges:
                first, _, last = span.removeprefix("bytes=").partition("-")
                start, status = int(first), 206
            if objects.before is not None:
                objects.before(self.command, start)
            data = memoryview(objects.data[name])
            match = self.headers.get("If-Match")
            if objects.etags and match and match != objects.etag(name):
                self._status(412)
                return
            whole = len(data)
            body = data[start : int(last) + 1][: objects.most] if status == 206 else data
            self.send_response(status)
            if objects.lengths:
                self.send_header("Content-Length", str(len(body)))
            else:
                self.send_header("Connection", "close")
                self.close_connection = True
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{whole}")
            if not objects.ranges:
                self.send_header("Accept-Ranges", "none")
            if objects.etags:
                self.send_header("ETag", objects.etag(name))
            if objects.modified:
                self.send_header("Last-Modified", objects.modified)
            self.end_headers()
            if with_body:
                objects.count(len(body))
                try:
                    self.wfile.write(body)
                except OSError:
                    objects.count(-len(body))

        def _status(self, status: int, location: str = "") -> None:
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # of five, the kernel drops what many nodes ask at once, and they ask again a second later


@contextmanager
def object_server(host: str = "127.0.0.1", **data: bytes) -> Iterator[Objects]:
    """Serve these objects; a name with "__" is one with a dot: ``x__npy`` is ``x.npy``."""
    objects = Objects({name.replace("__", "."): content for name, content in data.items()}, host=host)
    server = _Server((host, 0), _handler(objects))
    server.daemon_threads = True
    objects.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield objects
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Faults:
    """What the proxy does to answers: by the number of the connection, from 0."""

    port: int = 0
    cut_after: Callable[[int], int | None] = lambda _: None  # bytes of the answer after which it closes
    delay: Callable[[int], float] = lambda _: 0.0  # seconds before the answer
    damage: Callable[[int, bytes], bytes] = lambda _, data: data
    connections: int = 0


@contextmanager
def faulty_proxy(target: int) -> Iterator[Faults]:
    """Forward connections to a port, with faults."""
    faults = Faults()
    listener = socket.create_server(("127.0.0.1", 0))
    faults.port = listener.getsockname()[1]
    closing = threading.Event()

    def serve(client: socket.socket, number: int) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", target)) as server:
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            sent, most = 0, faults.cut_after(number)
            time.sleep(faults.delay(number))
            while data := server.recv(1 << 16):
                data = faults.damage(number, data)
                if most is not None and sent + len(data) > most:
                    client.sendall(data[: most - sent])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)
                sent += len(data)
            client.shutdown(socket.SHUT_RDWR)  # closing alone would wait for the thread that reads from it

    def accept() -> None:
        while not closing.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            number, faults.connections = faults.connections, faults.connections + 1
            threading.Thread(target=serve, args=(client, number), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield faults
    finally:
        closing.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
