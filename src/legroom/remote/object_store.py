"""Ask about a remote object, read ranges of it with retries, and list the objects that match a pattern."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from legroom.errors import LegroomError, MissingPackage, NoSuchObject, UnsupportedData, UsageError
from legroom.messages import say
from legroom.remote.conditional_range_requests import RangeReader, read_stream
from legroom.remote.http_connections import Sink
from legroom.remote.remote_errors_and_retries import CallerFailed, remote_error, retried, seconds, short_read, timeout
from legroom.remote.remote_object import REMOTE_DATA, S3, ObjectStamp, ObjectUrl, object_url, redacted, stamp_of_info
from legroom.system.lazy_and_optional_imports import EXTRAS, require

CONNECTIONS = 16
_PACKAGES = {  # besides those of the extra "remote", for s3:// and https://
    "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "abfs": "adlfs", "az": "adlfs",
}  # fmt: skip
_opening = threading.Lock()


class RemoteObject:
    """One object. Threads may read it at the same time."""

    def __init__(self, url: ObjectUrl) -> None:
        self.url = url
        self._fs, self._path = _filesystem(url)
        self._ranges = RangeReader(self._fs, self._path, url)
        self.slept: Callable[[float], None] = time.sleep
        self._interrupted = False

    def stat(self) -> ObjectStamp:
        """Ask the server for its current version and size."""
        info = self._retried(lambda: _info(self._fs, self._path))
        if info.get("type") == "directory":
            raise UnsupportedData(
                say("{path} is a directory of objects", path=self.url),
                why=say("only single objects can be read from remote storage"),
                fix=(say("pass the objects in it as a pattern: '{path}/*.npy'", path=str(self.url).rstrip("/")),),
            )
        return stamp_of_info(self.url.protocol, info)

    def read(self, stamp: ObjectStamp, start: int, end: int, to: Sink) -> None:
        """Read the bytes from ``start`` to ``end``. Tries again after a broken connection, from where it broke."""
        counted = _Counted(to)

        def attempt() -> None:
            try:
                self._ranges.read(stamp, start + counted.done, end, counted)
            except Exception:
                if counted.problem is not None:
                    raise CallerFailed from None
                raise
            if start + counted.done < end:
                raise short_read(self.url, end - start, counted.done)

        try:
            self._retried(attempt, lambda: counted.done)
        except CallerFailed:
            assert counted.problem is not None
            raise counted.problem from None

    def interrupt(self) -> None:
        """Let every request that waits for its server fail now."""
        self._interrupted = True
        self._ranges.interrupt()

    def close(self) -> None:
        """Close its connections."""
        self._ranges.close()

    def read_whole(self, begin: Callable[[], None], take: Callable[[bytes], None], size: int | None) -> None:
        """Read the object in one request, for servers without ranges or versions.

        After a broken connection it begins again: what was taken before is of no use, and does not count as progress.

        Args:
            begin: Called before its first byte comes, each time.
            take: Called with each of its parts, in order.
            size: Of the object; None: unknown.
        """
        failed: list[Exception] = []

        def attempt() -> None:
            begin()
            came = 0
            for block in read_stream(self._fs, self._path, self.url):
                try:
                    take(block)
                except Exception as problem:
                    failed.append(problem)
                    raise CallerFailed from None
                came += len(block)
            if size is not None and came != size:
                raise short_read(self.url, size, came)

        try:
            self._retried(attempt)
        except CallerFailed:
            raise failed[0] from None

    def _retried(self, attempt: Callable[[], Any], progress: Callable[[], int] = lambda: 0) -> Any:
        return retried(
            attempt, lambda raised: remote_error(self.url, raised), progress, lambda: self._interrupted, self.slept
        )


class _Counted:
    """A sink that knows how many bytes have come, and whether its owner failed."""

    def __init__(self, inner: Sink) -> None:
        self._inner, self.room, self.done = inner, inner.room, 0
        self.problem: BaseException | None = None

    def advance(self, count: int) -> None:
        try:
            self._inner.advance(count)
        except BaseException as problem:
            self.problem = problem
            raise
        self.done += count


class BufferSink:
    """Bytes into one buffer."""

    def __init__(self, view: memoryview, received: Callable[[int], None] = lambda _: None) -> None:
        self._left, self._received = view, received

    def room(self) -> memoryview:
        return self._left

    def advance(self, count: int) -> None:
        self._left = self._left[count:]
        self._received(count)


def _info(fs: Any, path: str) -> dict[str, Any]:
    fs.invalidate_cache()
    found: dict[str, Any] = fs.info(path)
    return found


def find_objects(pattern: ObjectUrl) -> list[ObjectUrl]:
    """The objects that match a pattern, sorted by name."""
    problem: LegroomError | None = None
    fs, path = _filesystem(pattern)
    try:
        fs.invalidate_cache()
        names = sorted(fs.glob(path))
        found = [object_url(fs.unstrip_protocol(name)) for name in names]
    except Exception as raised:
        problem = remote_error(pattern, raised)
    if problem is not None:
        raise problem
    if not found:
        raise NoSuchObject(
            say("nothing matches {pattern}", pattern=pattern),
            why=say("the server lists no object with such a name"),
            fix=(say("check the pattern"),),
        )
    return found


def exists(url: ObjectUrl) -> bool:
    """Whether there is such an object."""
    try:
        RemoteObject(url).stat()
    except (NoSuchObject, UnsupportedData):
        return False
    return True


def read_small(url: ObjectUrl, most: int) -> bytes:
    """The content of a small object."""
    remote = RemoteObject(url)
    stamp = remote.stat()
    data = bytearray()

    def check(size: int) -> None:
        if size > most:
            raise UnsupportedData(say("{path} is too large", path=url), why=say("it has {size} bytes", size=size))

    def take(block: bytes) -> None:
        check(len(data) + len(block))
        data.extend(block)

    check(stamp.size or 0)
    try:
        if not stamp.by_ranges:
            remote.read_whole(data.clear, take, stamp.size)
        else:
            assert stamp.size is not None
            data = bytearray(stamp.size)
            remote.read(stamp, 0, len(data), BufferSink(memoryview(data)))
    finally:
        remote.close()
    return bytes(data)


def _filesystem(url: ObjectUrl) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it."""
    if "::" in url.url:
        raise UsageError(
            say("chained URLs cannot be opened: {path}", path=redacted(url.url)),
            why=say("Legroom keeps the data in its own cache"),
            fix=(say("pass the URL of the object itself"),),
        )
    core = require("fsspec.core", "remote", REMOTE_DATA)
    problem: LegroomError | None = None
    try:
        with _opening:  # fsspec's table of file systems is not made for threads
            found: tuple[Any, str] = core.url_to_fs(url.url, **_options(url))
    except ImportError as raised:
        problem = _not_installed(url, raised)
    except ValueError as raised:
        if "not known" not in str(raised):
            problem = remote_error(url, raised)
        else:
            problem = UsageError(
                say("unknown protocol {protocol!r} in {path}", protocol=url.protocol, path=url),
                why=say("fsspec has no file system of that name"),
                fix=(say("check the URL; for example s3://bucket/key, https://host/path"),),
            )
    except Exception as raised:
        problem = remote_error(url, raised)
    if problem is not None:
        raise problem
    return found


def _options(url: ObjectUrl) -> dict[str, Any]:
    if url.protocol not in S3:
        return {}
    config = require("fsspec.config", "remote", REMOTE_DATA).conf
    given = {**config.get("s3", {}), **config.get(url.protocol, {})}
    wanted = {"max_pool_connections": 2 * CONNECTIONS, "connect_timeout": timeout(), "read_timeout": timeout()}
    options: dict[str, Any] = {"config_kwargs": {**wanted, **given.get("config_kwargs", {})}}
    if "versionid=" in url.url.lower():
        options["version_aware"] = True
    return options


def _not_installed(url: ObjectUrl, raised: ImportError) -> MissingPackage:
    package = _PACKAGES.get(url.protocol, EXTRAS["remote"])
    return MissingPackage(
        say("a package for {protocol}:// is not installed", protocol=url.protocol),
        why=redacted(str(raised)),
        fix=(f"pip install {package}",),
    )


def fresh_seconds() -> float:
    """For how long an object's version is used without asking the server again: LEGROOM_REMOTE_FRESH."""
    return max(0.0, seconds("LEGROOM_REMOTE_FRESH"))
