"""Serving HTTP from inside a watch, to this machine unless another address is named.

Covers: reading HOST:PORT, binding, whose Host header is answered, threads that a slow client cannot use up.
Does not cover: what is served (prometheus.py, and whatever else serves a watch).
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from legroom.errors import CannotListen
from legroom.words import say

LOOPBACK = "127.0.0.1"
_CLIENT_TIMEOUT = 10.0  # seconds that a client may take to ask or to read
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """``9464``, ``0.0.0.0:9464``, ``[::1]:9464``, ``localhost``: the host and port meant."""
    host, port = LOOPBACK, text.strip()
    if ":" in port and not port.isdecimal():
        host, _, port = port.rpartition(":")
    elif port and not port.isdecimal():
        host, port = port, str(default_port)
    host = host.strip().removeprefix("[").removesuffix("]") or LOOPBACK
    if not port.isdecimal() or int(port) > 65535:
        raise CannotListen(
            say("cannot read {text!r} as an address to serve from", text=text),
            why=say("a port is a number from 0 to 65535"),
            fix=(say("write it like {port} or 127.0.0.1:{port}", port=default_port),),
        )
    return host, int(port)


def serve(where: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> Server:
    """A server at work in threads of its own; CannotListen where the address cannot be had."""
    host, port = where
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        kind = type("_Server", (Server,), {"address_family": family})
        found: Server = kind(where, handler)
    except OSError as problem:
        raise CannotListen(
            say("cannot serve from {host}:{port}", host=host, port=port),
            why=problem.strerror or str(problem),
            fix=(say("name another port, or 0 for one that is free"),),
        ) from problem
    threading.Thread(target=found.serve_forever, name="legroom-serve", daemon=True).start()
    return found


class Server(ThreadingHTTPServer):
    """Answers each client in a thread that does not outlive the process."""

    daemon_threads = True
    request_queue_size = 128  # of 5, the sixth client at once waits for a second
    block_on_close = False

    @property
    def url(self) -> str:
        """Where it is served."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self) -> None:
        """No further answers; the port is free again."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""

    def answers(self, host_header: str | None) -> bool:
        """Whether a request that names this host is meant for us.

        A page elsewhere can point its own name at 127.0.0.1 and read what this server shows to the person's own
        browser; then the Host header is that page's name. Bound to an address that was asked for, any name will do.
        """
        if not _is_loopback(str(self.server_address[0])):
            return True
        name = (host_header or "").strip()
        if not name.endswith("]"):
            head, colon, port = name.rpartition(":")
            name = head if colon and port.isdecimal() else name
        return name.removeprefix("[").removesuffix("]").lower() in _LOCAL_NAMES


class Handler(BaseHTTPRequestHandler):
    """What every page of a watch shares: GET alone, a time limit, no lines on stderr."""

    server: Server
    timeout = _CLIENT_TIMEOUT
    server_version = "legroom"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self.server.answers(self.headers.get("Host")):
            self.give(421, "text/plain; charset=utf-8", b"this address is served to this machine only\n")
            return
        self.page(self.path.split("?", 1)[0])

    do_HEAD = do_GET  # noqa: N815

    def page(self, path: str) -> None:
        """Answer for that path."""
        self.give(404, "text/plain; charset=utf-8", b"nothing here\n")

    def give(self, status: int, kind: str, body: bytes) -> None:
        """One whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news either."""


def handler_for(page: Callable[[Handler, str], None]) -> type[Handler]:
    """A handler class that answers with that function."""
    return type("_Handler", (Handler,), {"page": lambda handler, path: page(handler, path)})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class AllowedHosts:
    """What is answered when bound to a host."""

    def __init__(self, bound: str, full_name: Callable[[], str] = socket.getfqdn) -> None:
        self._full_name = full_name
        self._local = _is_loopback_name(bound)
        self._names = _LOCAL if self._local else _LOCAL | {bound.lower(), socket.gethostname().lower()}

    def answer(self, header: str | None) -> bool:
        """Whether a request with that Host header may be answered."""
        name = host_name(header)
        if name in self._names:
            return True
        return not self._local and (_is_address(name) or name == self._full)

    @cached_property
    def _full(self) -> str:
        return (
            self._full_name().lower()
        )  # asks a name server, which can take seconds: so only when it matters


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


def _is_loopback_name(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
