"""A node's part in loading an object with others of its Ray cluster: read pieces, and receive those of other nodes."""

from __future__ import annotations

import hashlib
import hmac
import threading
from typing import Any

import numpy as np

from legroom.cache import downloads_in_store
from legroom.cache.cached_arrays_and_tables import CachedData
from legroom.cache.download import PIECE, Download
from legroom.cache.find_or_build_entry import OpenRequest, open_as
from legroom.cache.manifest import npy_header
from legroom.cache.source_stamps_and_digests import new_hasher
from legroom.errors import ClusterUnreachable
from legroom.integrations.ray_node_answers import error_of
from legroom.remote.object_url import object_url
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread
from legroom.version import VERSION

GROUP = 8  # pieces at most that are read, hashed and passed on together


class NodeLoader:
    """Loads one object on one node: an actor of Ray, with threads.

    The nodes of one load have a key in common. A group of pieces without a signature by it is refused: one of another
    load or another cluster, and one that arrived damaged.
    """

    def __init__(self, url: str, backing: str, revalidate: bool, key: bytes) -> None:
        self._url, self._key = object_url(url), key
        self._request = OpenRequest((self._url,), None, backing, revalidate=revalidate)
        self._download: Download | None = None
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._result: dict[str, Any] = {}
        self._received = self._kept = 0
        self._data: CachedData | None = None
        self._own: tuple[bytes, memoryview] | None = None  # the object's bytes, in the entry: header and data

    def begin(self) -> dict[str, Any]:
        """Start to open it. Returns when it is known whether something is missing, and what."""
        if start_daemon_thread(self._open, "legroom-node") is None:
            raise MemoryError(why_no_thread())
        while not self._ready.wait(0.05) and not self._ended.is_set():
            pass
        if self._download is None:
            return {"version": VERSION, "state": "ended", **self._result}
        missing = self._download.missing()
        return {
            "version": VERSION,
            "state": "waits",
            "stamp": str(self._download.stamp),
            "size": self._download.size,
            "missing": missing,
        }

    def _open(self) -> None:
        def begun(download: Download) -> None:
            self._download, self._kept = download, download.present
            self._ready.set()

        try:
            with downloads_in_store.supplied(self._url, begun):
                self._data = open_as(CachedData, self._request)
            entry = self._data.info
            self._result = {"key": entry.key, "digest": f"{entry.hash} {entry.digest}", "bytes": entry.bytes}
        except BaseException as problem:
            self._result = {"error": error_of(problem)}
        finally:
            self._ended.set()

    def offer(self) -> dict[str, Any] | None:
        """Rebuild the object's bytes from the entry that is here. None if they cannot be had from it.

        An .npy object is its array with a header before it. The hash of both decides.
        """
        entry = self._data.info if self._data is not None else None
        if self._data is None or entry is None or entry.hash is None or len(entry.arrays) != 1 or entry.tables:
            return None
        array = self._data[next(iter(entry.arrays))]
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or len(entry.versions) != 1:
            return None
        header, data = npy_header(array.shape, array.dtype), array.reshape(-1).view(np.uint8).data
        if entry.hash not in ("md5", "blake3", "xxh3"):
            return None
        hasher = new_hasher(entry.hash)
        hasher.update(header)
        for start in range(0, len(data), GROUP * PIECE):
            hasher.update(data[start : start + GROUP * PIECE])
        if hasher.hexdigest() != entry.digest:
            return None
        self._own = header, data
        return {"stamp": entry.versions[0], "size": len(header) + len(data)}

    def read(self, first: int, last: int, wanted: bool = True) -> tuple[np.ndarray, bytes]:
        """Read a group of pieces: from the entry that is here, else from the storage service, and keep it.

        Returns it with its signature, or nothing if no other node wants it. An array: Ray's object store takes and
        gives those without further copies.
        """
        if self._own is not None:
            header, array = self._own
            start, end = first * PIECE - len(header), last * PIECE - len(header)
            data = np.frombuffer(array[max(0, start) : end], np.uint8)
            if first == 0:
                data = np.concatenate([np.frombuffer(header, np.uint8), data])
            return data, signature(self._key, first, data.data)
        assert self._download is not None and self._download.size is not None
        data = np.empty(min(self._download.size, last * PIECE) - first * PIECE, np.uint8)
        self._download.read(first, last, data.data)
        self._put(first, data.data)
        return (data, signature(self._key, first, data.data)) if wanted else (data[:0], b"")

    def receive(self, first: int, data: np.ndarray, signed: bytes) -> int:
        """Take a group that another node of this load has read."""
        assert self._download is not None
        if not hmac.compare_digest(signature(self._key, first, data.data), signed):
            raise ValueError("a group of pieces is damaged, or of another load or cluster")
        self._put(first, data.data)
        self._received += len(data)
        return len(data)

    def _put(self, first: int, data: memoryview) -> None:
        assert self._download is not None
        for number, start in enumerate(range(0, len(data), PIECE)):
            self._download.put(first + number, data[start : start + PIECE])

    def abandon(self, code: str, message: str) -> None:
        """End the load: the rest will not come. What is there is kept."""
        if self._download is not None:
            self._download.fail(ClusterUnreachable(message, why=code))

    def end(self) -> dict[str, Any]:
        """Wait until the entry is published, or the load has failed."""
        self._ended.wait()
        read = self._download.received if self._download is not None else 0
        return {**self._result, "read": read, "received": self._received, "kept": self._kept}


def signature(key: bytes, first: int, data: bytes | memoryview) -> bytes:
    """What vouches for a group of pieces among the nodes of one load: its bytes and where they belong."""
    return hmac.digest(key, first.to_bytes(8, "little") + hashlib.sha256(data).digest(), "sha256")
