"""A node of a Ray cluster: what it answers, and its part in loading an object with others.

It answers with its machine's memory and findings, and its cache entries, and loads an object by itself. With others it
reads pieces, and receives those of other nodes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from legroom.cache import downloads_in_store
from legroom.cache.cached_arrays_and_tables import CachedData
from legroom.cache.download import PIECE, Download
from legroom.cache.find_or_build_entry import OpenRequest, open_as, source_paths
from legroom.cache.manifest import npy_header
from legroom.cache.source_stamps_and_digests import new_hasher
from legroom.errors import ClusterUnreachable, LegroomError
from legroom.messages import say
from legroom.remote.remote_object import object_url, redacted
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread


def load_here(path: str, keys: tuple[str, ...] | None, backing: str, revalidate: bool) -> dict[str, Any]:
    """Load a source by this node alone: a path, or an object that cannot be read in parts."""
    begun = time.time()
    try:
        request = OpenRequest(source_paths(path), keys, backing, revalidate=revalidate)
        with open_as(CachedData, request) as data:
            entry = data.info
            fresh = entry.created is not None and entry.created >= begun
            return {
                "key": entry.key, "digest": f"{entry.hash} {entry.digest}", "bytes": entry.bytes,
                "read": entry.bytes if fresh else 0, "fresh": fresh,
            }  # fmt: skip
    except Exception as problem:
        return {"error": error_of(problem)}


def answer_here(what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run one of the commands on this node."""
    try:
        return _ANSWERS[what](**arguments)
    except Exception as problem:
        return {"error": error_of(problem)}


def _doctor() -> dict[str, Any]:
    with import_lock:
        from legroom.advice.choose_settings import safe_settings
        from legroom.advice.findings import findings
        from legroom.probe.host_files_and_syscalls import Host
        from legroom.probe.snapshot import snapshot

    machine = snapshot(Host())
    return {
        "place": dataclasses.asdict(machine.runtime),
        "pools": [dataclasses.asdict(pool) for pool in machine.pools],
        "settings": [dataclasses.asdict(row) for row in safe_settings(machine)],
        "findings": [dataclasses.asdict(finding) for finding in findings(machine)],
    }


def _entries(what: str | Sequence[str] | None = None) -> dict[str, Any]:
    with import_lock:
        from legroom.cache.list_and_verify import listing

    found = listing(what)
    return {
        "entries": [dataclasses.asdict(entry) for entry in found.entries],
        "stores": [dataclasses.asdict(room) for room in found.rooms],
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
    }


def _drop(what: str | Sequence[str] | None = None, force: bool = False) -> dict[str, Any]:
    with import_lock:
        from legroom.cache.drop_and_gc import drop
        from legroom.errors import NotLoaded

    try:
        gone = drop(what, force=force)
    except NotLoaded:
        return {"removed": [], "kept": [], "freed": 0}
    return {
        "removed": [dataclasses.asdict(entry) for entry in gone.entries],
        "kept": [dataclasses.asdict(entry) for entry in gone.kept],
        "freed": gone.freed,
    }


_ANSWERS: Mapping[str, Callable[..., dict[str, Any]]] = {"doctor": _doctor, "entries": _entries, "drop": _drop}


def error_of(problem: BaseException) -> dict[str, Any]:
    """An error as a plain object, without credentials; that of a call, as the node that ran it raised it."""
    cause = getattr(problem, "cause", None)  # within Ray's error, whose text is a traceback
    problem = cause if isinstance(cause, BaseException) else problem
    if isinstance(problem, LegroomError):
        return problem.as_dict()
    if isinstance(problem, ModuleNotFoundError) and "legroom" in str(problem):
        return {
            "code": "missing-package",
            "message": say("Legroom is not installed on this node"),
            "why": redacted(str(problem)),
            "fix": ["pip install legroom"],
        }
    return {"code": "node-failed", "message": redacted(str(problem)) or type(problem).__name__, "why": "", "fix": []}


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
            return {"state": "ended", **self._result}
        missing = self._download.missing()
        return {"state": "waits", "stamp": str(self._download.stamp), "size": self._download.size, "missing": missing}

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
