"""Read one range of an object, bound to one version of it where the protocol allows that.

S3 and HTTP requests carry the version or ETag, so a replaced object is refused by the server itself, and a silent
server is noticed at the next byte. http_connections.py makes the request, signed by s3fs. Where it cannot, s3fs's
``_call_s3`` or the session of fsspec's HTTP file system does. Any other protocol is read by ``cat_file``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from legroom.errors import UnsupportedData
from legroom.messages import say
from legroom.remote.http_connections import Connections, NotDirect, Sink
from legroom.remote.remote_errors_and_retries import object_changed, timeout
from legroom.remote.remote_object import HTTP, REMOTE_DATA, S3, ObjectStamp, ObjectUrl
from legroom.system.lazy_and_optional_imports import import_lock, require

_BLOCK = 256 << 10
_SLOWEST = 100_000  # bytes a second: a call without progress in between is given this long
_SIGNED_FOR = 900  # seconds: clocks may differ
_SIGNED_AGAIN = 60  # seconds after which credentials of now are used


class RangeReader:
    """Reads ranges of one object. Threads may use it at the same time."""

    def __init__(self, fs: Any, path: str, url: ObjectUrl) -> None:
        self._fs, self._path, self._url = fs, path, url
        self._connections = Connections(os.environ.get("AWS_CA_BUNDLE") or None if url.protocol in S3 else None)
        self._direct = self._can_be_direct()
        self._signature: tuple[str | None, float, str] | None = None  # version, when, address

    def read(self, stamp: ObjectStamp, start: int, end: int, to: Sink) -> None:
        """Read the bytes from ``start`` to ``end``. Raises what the libraries raise."""
        fs, path, url = self._fs, self._path, self._url
        if self._direct:
            try:
                address, headers = self._signed(stamp)
                self._connections.read(address, headers, url, stamp, start, end, to)
                return
            except NotDirect:
                self._direct = False
        if url.protocol in S3 and hasattr(fs, "_call_s3") and hasattr(fs, "split_path"):
            _sync(fs, _s3, fs, path, url, stamp, start, end, to)
        elif url.protocol in HTTP and hasattr(fs, "set_session"):
            _sync(fs, _http, fs, path, url, stamp, start, end, to)
        else:
            _put(url, to, memoryview(_call(fs, path, start, end)))

    def interrupt(self) -> None:
        """End the requests that are running, where they are direct."""
        self._connections.interrupt()

    def close(self) -> None:
        """Close connections that are not in use."""
        self._connections.close()

    def _can_be_direct(self) -> bool:
        """Whether a plain request with an address and headers does what fsspec would do."""
        fs = self._fs
        if self._url.protocol in S3:  # encryption keys and payers are headers that a signed URL lacks
            return hasattr(fs, "sign") and not (
                getattr(fs, "req_kw", None)
                or getattr(fs, "s3_additional_kwargs", None)
                or "verify" in getattr(fs, "client_kwargs", {})
            )
        if self._url.protocol in HTTP:
            return (
                hasattr(fs, "encode_url")
                and not getattr(fs, "client_kwargs", None)
                and not set(getattr(fs, "kwargs", {})) - {"headers"}
            )
        return False

    def _signed(self, stamp: ObjectStamp) -> tuple[str, dict[str, str]]:
        """The address for one request, signed with credentials of the last minute, and its headers."""
        fs = self._fs
        if self._url.protocol in HTTP:
            return str(fs.encode_url(self._path)), dict(getattr(fs, "kwargs", {}).get("headers", {}))
        known = self._signature
        if known is None or known[0] != stamp.version or time.monotonic() - known[1] > _SIGNED_AGAIN:
            own = fs.split_path(self._path)[2]
            version = {"VersionId": stamp.version} if stamp.version and not own else {}
            address = str(fs.sign(self._path, expiration=_SIGNED_FOR, **version))
            self._signature = known = stamp.version, time.monotonic(), address
        return known[2], {}


def _sync(fs: Any, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """The result of a coroutine in the thread of fsspec's event loop."""
    return require("fsspec.asyn", "remote", REMOTE_DATA).sync(fs.loop, call, *arguments, **more)


def _put(url: ObjectUrl, to: Sink, block: memoryview) -> None:
    while len(block):
        view = to.room()
        count = min(len(view), len(block))
        if not count:
            raise object_changed(url)  # more than was asked for
        view[:count] = block[:count]
        to.advance(count)
        block = block[count:]


def _call(fs: Any, path: str, start: int, end: int) -> bytes:
    limit = timeout() + (end - start) / _SLOWEST
    if getattr(fs, "async_impl", False):
        data = _sync(fs, fs._cat_file, path, start=start, end=end, timeout=limit)
    else:
        data = fs.cat_file(path, start=start, end=end)
    return bytes(data)


async def _s3(fs: Any, path: str, url: ObjectUrl, stamp: ObjectStamp, start: int, end: int, to: Sink) -> None:
    bucket, key, version = fs.split_path(path)
    bound: dict[str, Any] = {"IfMatch": stamp.etag} if stamp.etag else {}
    if version or stamp.version:
        bound["VersionId"] = version or stamp.version
    answer = await fs._call_s3(
        "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **bound, **getattr(fs, "req_kw", {})
    )
    body = answer["Body"]
    try:
        await _blocks(url, body.read, to)
    finally:
        body.close()


async def _http(fs: Any, path: str, url: ObjectUrl, stamp: ObjectStamp, start: int, end: int, to: Sink) -> None:
    from aiohttp import ClientTimeout

    options = dict(fs.kwargs)
    headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    if stamp.etag and not stamp.etag.startswith("W/"):
        headers["If-Match"] = stamp.etag
    options["timeout"] = ClientTimeout(total=None, sock_connect=timeout(), sock_read=timeout())
    session = await fs.set_session()
    async with session.get(fs.encode_url(path), headers=headers, **options) as answer:
        if answer.status == 412:
            raise object_changed(url)
        answer.raise_for_status()
        if answer.status != 206:
            raise _no_ranges(url)
        if stamp.etag and answer.headers.get("ETag", stamp.etag) != stamp.etag:
            raise object_changed(url)
        whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if whole.isdecimal() and stamp.size is not None and int(whole) != stamp.size:
            raise object_changed(url)
        await _blocks(url, answer.content.read, to)


async def _blocks(url: ObjectUrl, read: Callable[[int], Any], to: Sink) -> None:
    with import_lock:
        import asyncio  # fsspec has imported it

    while block := await asyncio.wait_for(read(_BLOCK), timeout()):
        _put(url, to, memoryview(block))


def _no_ranges(url: ObjectUrl) -> UnsupportedData:
    return UnsupportedData(
        say("the server of {path} cannot send parts of it", path=url),
        why=say("it answers a range request with the whole object"),
    )


def read_stream(fs: Any, path: str, url: ObjectUrl) -> Iterator[bytes]:
    """The whole object in one request, for servers that cannot send parts or give no version."""
    options = {"block_size": 0} if url.protocol in HTTP else {}
    with fs.open(path, "rb", **options) as stream:
        while block := stream.read(1 << 20):
            yield block
