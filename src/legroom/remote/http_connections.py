"""Read a range of an object over HTTP, from the socket straight into the caller's buffer.

fsspec's requests run in one event loop and copy each block three times under the interpreter's lock. Here each thread
has a connection of its own and receives without the lock. fsspec still finds the server and signs the request. What a
plain request cannot do (a proxy, a redirect, an unusual answer) raises NotDirect, and fsspec makes the request.
"""

from __future__ import annotations

import base64
import errno
import http.client
import io
import os
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from legroom.remote.remote_errors_and_retries import object_changed, timeout
from legroom.remote.remote_object import HTTP, ObjectStamp, ObjectUrl
from legroom.system.lazy_and_optional_imports import import_lock

if TYPE_CHECKING:
    import ssl  # imported at the first request: this module is also imported where only local files are opened

_AGENT = "legroom"
_LONGEST_HEAD = 65536


class Sink(Protocol):
    """Where bytes go, in order."""

    def room(self) -> memoryview:
        """Where the next bytes belong. Empty when all have come."""
        ...

    def advance(self, count: int) -> None:
        """So many bytes were written there."""
        ...


class NotDirect(Exception):
    """The request must be made by fsspec."""


class ServerBusy(Exception):
    """The server answered with an error that may pass."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Connections:
    """Connections to the servers of one object, one for each thread that reads. Kept between requests."""

    def __init__(self, authorities: str | None = None) -> None:
        """``authorities``: the file with the certificates to trust, where it is not the system's."""
        self._authorities = authorities
        self._free: dict[tuple[str, str], list[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._interrupted = False
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None

    def read(
        self,
        address: str,
        headers: Mapping[str, str],
        url: ObjectUrl,
        stamp: ObjectStamp,
        start: int,
        end: int,
        to: Sink,
    ) -> None:
        """Read the bytes from ``start`` to ``end`` of the object behind a URL."""
        import ssl

        parts = urlsplit(address)
        if parts.scheme not in HTTP or not parts.hostname or _through_proxy(parts):
            raise NotDirect
        key = (parts.scheme, parts.netloc.rpartition("@")[2])
        while True:
            with self._lock:
                waiting = self._free.setdefault(key, [])
                used = bool(waiting)
                connection = waiting.pop() if waiting else None
            try:
                connection = connection or _Connection(parts, self._tls(parts))
            except (ssl.SSLError, FileNotFoundError):  # other certificates: the library knows them
                raise NotDirect from None
            self._use(connection)
            try:
                begun = connection.ask(parts, _headers(parts, headers, stamp, start, end))
            except (ConnectionError, http.client.HTTPException):
                self._end(connection)
                if used and not self._interrupted:  # the server closed it meanwhile: ask again over a new one
                    continue
                raise
            except BaseException:
                self._end(connection)
                raise
            break
        try:
            kept = begun.receive(url, stamp, start, end, to)
        except BaseException:
            self._end(connection)
            raise
        if not kept:
            self._end(connection)
            return
        with self._lock:
            self._busy.discard(connection)
            self._free[key].append(connection)

    def interrupt(self) -> None:
        """End the requests that are running: their threads wait for nothing any more."""
        with self._lock:
            self._interrupted = True
            for one in self._busy:
                one.interrupt()

    def _use(self, connection: _Connection) -> None:
        with self._lock:
            self._busy.add(connection)
            if self._interrupted:
                connection.interrupt()

    def _end(self, connection: _Connection) -> None:
        with self._lock:  # an interrupt must not meet a descriptor that is another file's by now
            self._busy.discard(connection)
            connection.close()

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            found = [one for some in self._free.values() for one in some]
            self._free.clear()
        for one in found:
            one.close()

    def _tls(self, parts: SplitResult) -> ssl.SSLContext | None:
        if parts.scheme != "https":
            return None
        import ssl

        with self._lock:
            if self._context is None:
                self._context = ssl.create_default_context(cafile=self._authorities)
            return self._context


class _Connection:
    """One connection, used by one thread at a time."""

    def __init__(self, parts: SplitResult, context: ssl.SSLContext | None) -> None:
        assert parts.hostname is not None
        port = parts.port or (443 if context is not None else 80)
        plain = socket.create_connection((parts.hostname, port), timeout())
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket: socket.socket = (
                context.wrap_socket(plain, server_hostname=parts.hostname) if context is not None else plain
            )
        except BaseException:
            plain.close()
            raise
        self._rest = b""  # of the body, received with the head
        # The kernel waits for all that was asked for: each return to Python waits for the interpreter's lock.
        self._whole = socket.MSG_WAITALL if context is None and sys.platform == "linux" else 0

    def ask(self, parts: SplitResult, headers: Mapping[str, str]) -> _Answer:
        """Send a request, and read the head of its answer."""
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        self._socket.settimeout(timeout())
        self._socket.sendall("\r\n".join(lines).encode("latin-1"))
        head = b""
        while b"\r\n\r\n" not in head:
            block = self._socket.recv(_LONGEST_HEAD)
            if not block:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            head += block
            if len(head) > _LONGEST_HEAD and b"\r\n\r\n" not in head:  # the rest may be of the body
                raise http.client.LineTooLong("head")
        line, _, rest = head.partition(b"\r\n")
        head, _, self._rest = rest.partition(b"\r\n\r\n")
        words = line.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise http.client.BadStatusLine("no HTTP")
        reason = words[2].decode("latin-1").strip() if len(words) > 2 else ""
        fields = http.client.parse_headers(io.BytesIO(head + b"\r\n\r\n"))
        return _Answer(self, int(words[1]), reason, words[0] == b"HTTP/1.1", fields)

    def receive(self, view: memoryview) -> int:
        """Receive into ``view``, all of it if the server sends it in time. 0: it closed the connection."""
        if self._rest:
            count = min(len(view), len(self._rest))
            view[:count], self._rest = self._rest[:count], self._rest[count:]
            return count
        if not self._whole:
            return self._socket.recv_into(view)
        if self._socket.gettimeout() is not None:
            seconds = timeout()
            self._socket.settimeout(None)
            limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            return self._socket.recv_into(view, len(view), self._whole)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def interrupt(self) -> None:
        with suppress(OSError):  # it may have ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class _Answer:
    """The answer to one request. Its body is still in the connection."""

    def __init__(
        self, body: _Connection, status: int, reason: str, lasting: bool, headers: http.client.HTTPMessage
    ) -> None:
        self._body, self._status, self._reason, self._headers = body, status, reason, headers
        self._lasting = lasting and headers.get("Connection", "").lower() != "close"

    def receive(self, url: ObjectUrl, stamp: ObjectStamp, start: int, end: int, to: Sink) -> bool:
        """Receive the body. Returns whether the connection can be used again."""
        if self._status == 412:
            raise object_changed(url)
        if self._status >= 500 or self._status == 429:
            raise ServerBusy(self._status, f"{self._status} {self._reason}")
        length, encoding = self._headers.get("Content-Length", ""), self._headers.get("Content-Encoding", "identity")
        if self._status != 206 or not length.isdecimal() or encoding != "identity":
            raise NotDirect
        unit, _, whole = self._headers.get("Content-Range", "").partition("/")
        if whole.isdecimal() and stamp.size is not None and int(whole) != stamp.size:
            raise object_changed(url)
        if stamp.etag and self._headers.get("ETag", stamp.etag) != stamp.etag:
            raise object_changed(url)
        left = int(length)
        if unit != f"bytes {start}-{end - 1}" or left != end - start:
            raise NotDirect
        while left:
            view = to.room()
            got = self._body.receive(view[: min(len(view), left)])
            if not got:
                return False  # cut: the caller sees that bytes are missing
            to.advance(got)
            left -= got
        return self._lasting


def _headers(parts: SplitResult, given: Mapping[str, str], stamp: ObjectStamp, start: int, end: int) -> dict[str, str]:
    host = parts.netloc.rpartition("@")[2]
    found = {"Host": host, "User-Agent": _AGENT, "Accept-Encoding": "identity", **given}
    found["Range"] = f"bytes={start}-{end - 1}"
    if stamp.etag and not stamp.etag.startswith("W/"):
        found["If-Match"] = stamp.etag
    if parts.username and "Authorization" not in found:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        found["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    if any("\r" in text or "\n" in text for pair in found.items() for text in pair):
        raise NotDirect
    return found


def _through_proxy(parts: SplitResult) -> bool:
    with import_lock:
        from urllib.request import getproxies_environment, proxy_bypass

    proxies = getproxies_environment()
    named = proxies.get(parts.scheme) or proxies.get("all")
    return bool(named) and not proxy_bypass(parts.hostname or "")
