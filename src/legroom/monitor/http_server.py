"""The HTTP server that the Prometheus metrics and the web view share.

It parses HOST:PORT, listens on loopback unless another address is given, and checks the Host header. Each client takes
one thread, and their number is limited. A request must be complete, and an answer taken, within ten seconds: a client
that sends a byte now and then keeps its thread no longer than one that sends nothing.
"""

from __future__ import annotations

import errno
import io
import ipaddress
import socket
import threading
import time
from contextlib import suppress
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from legroom.errors import CannotListen
from legroom.messages import say
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread

TEXT = "text/plain; charset=utf-8"
LOOPBACK = "127.0.0.1"
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_CLIENT_TIMEOUT = 10.0  # seconds for a client to send a whole request, and to take what is written to it
_MOST_CLIENTS = 512
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """Host and port of ``9464``, ``0.0.0.0:9464``, ``[::1]:9464`` or ``localhost``."""
    host, port = LOOPBACK, text.strip()
    if ":" in port and not port.isdecimal():
        host, _, port = port.rpartition(":")
    elif port and not port.isdecimal():
        host, port = port, str(default_port)
    host = host.strip().removeprefix("[").removesuffix("]") or LOOPBACK
    if not port.isdecimal() or int(port) > 65535:
        raise CannotListen(
            say("invalid address {text!r}", text=text),
            why=say("a port must be an integer from 0 to 65535"),
            fix=(say("write it like {port} or 127.0.0.1:{port}", port=default_port),),
        )
    return host, int(port)


def serve(where: tuple[str, int], handler: type[BaseHTTPRequestHandler], *, any_host: bool = False) -> Server:
    """Start a server in its own threads; CannotListen where the address is not available.

    With ``any_host`` an address that others can reach is served under any name.
    """
    host, port = where
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server: Server = type("_Server", (Server,), {"address_family": family})(where, handler)
    except OSError as problem:
        if isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL:
            fix = say("use an address of this machine, such as {address}", address=LOOPBACK)
        elif isinstance(problem, PermissionError):
            fix = say("choose a port from 1024 on: lower ones need root")
        else:
            fix = say("choose another port, or 0 for any free port")
        raise _cannot_listen(where, problem.strerror or str(problem), fix) from problem
    server.hosts = AllowedHosts(host, str(server.server_address[0]), any_host=any_host)
    if start_daemon_thread(server.serve_forever, "legroom-serve") is None:
        why = why_no_thread()
        server.server_close()
        raise _cannot_listen(where, why, say("raise the limit, or run without a server"))
    return server


def _cannot_listen(where: tuple[str, int], why: str, fix: str) -> CannotListen:
    return CannotListen(say("cannot listen on {host}:{port}", host=where[0], port=where[1]), why=why, fix=(fix,))


class Server(ThreadingHTTPServer):
    """Answers each client in a daemon thread."""

    hosts: AllowedHosts
    request_queue_size = 128  # with the default of 5, the sixth simultaneous client waits for a second

    def server_activate(self) -> None:
        self.clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        super().server_activate()

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self) -> None:
        """Stop answering and free the port."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; where none can be started, before the next client; 503 to one too many."""
        clients = self.clients
        if not clients.acquire(blocking=False):
            request.settimeout(0)  # between accepting two clients: it never waits for one
            with suppress(OSError):
                request.sendall(_TOO_MANY)
            self.shutdown_request(request)
            return

        def answer() -> None:
            try:
                self.process_request_thread(request, client_address)
            finally:
                clients.release()

        if start_daemon_thread(answer, "legroom-answer") is None:
            answer()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET with a time limit; writes nothing to stderr."""

    server: Server
    timeout = _CLIENT_TIMEOUT
    server_version = "legroom"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection, self.timeout)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        """Answer one request, if it is complete in time; else the connection ends."""
        self._incoming.until = time.monotonic() + self.timeout
        super().handle_one_request()

    def do_GET(self) -> None:
        if not self.server.hosts.allow(self.headers.get("Host")):
            self.respond_text(421, say("wrong address: the request names another host"))
            return
        self.page(self.path.split("?", 1)[0])

    do_HEAD = do_GET  # noqa: N815

    def page(self, path: str) -> None:
        """Answer a request for that path."""
        raise NotImplementedError

    def respond(self, status: int, content_type: str, body: bytes) -> None:
        """Send a complete response."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def respond_text(self, status: int, text: str) -> None:
        """Send a line of text."""
        self.respond(status, TEXT, text.encode() + b"\n")

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


class _Incoming(io.RawIOBase):
    """What a client sends, until a point in time. The limit of a socket is for each part of a request."""

    def __init__(self, connection: socket.socket, each: float) -> None:
        self._connection, self._each, self.until = connection, each, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(into)
        finally:
            self._connection.settimeout(self._each)


class AllowedHosts:
    """The Host headers that are answered: protection against DNS rebinding.

    A web page elsewhere can point its own name at this address and read, in the user's browser, what is served here.
    Such a request carries that page's name. On loopback only local names are allowed. On other addresses IP addresses
    are allowed too, since they cannot be pointed elsewhere, and the names of this machine.
    """

    def __init__(self, bound: str, address: str, *, any_host: bool = False) -> None:
        self._any_host = any_host
        self._loopback = _is_loopback(address)
        self._names = _LOCAL_NAMES | {bound.lower()}
        if not self._loopback:
            self._names |= {socket.gethostname().lower()}

    def allow(self, header: str | None) -> bool:
        """Whether to answer a request with that Host header."""
        name = host_name(header)
        if name in self._names:
            return True
        return not self._loopback and (self._any_host or _is_address(name) or name == self._fqdn)

    @cached_property
    def _fqdn(self) -> str:
        return socket.getfqdn().lower()  # may ask a name server for seconds, so only when needed


def host_name(header: str | None) -> str:
    """The host of a Host header, without its port."""
    name = (header or "").strip().lower()
    if not name.endswith("]"):
        head, colon, port = name.rpartition(":")
        name = head if colon and port.isdecimal() else name
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    return name.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
