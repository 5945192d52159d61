"""The version of a remote object: asked of its server, and remembered for a short time in the stores.

Ranks and workers that open the same URL at once ask once. With ``ask`` the server is asked now.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from contextlib import suppress

from legroom.cache.remembered_source_digests import replace_record
from legroom.cache.store_directories import existing_stores, read_small_file, store_lock
from legroom.remote.object_url import ObjectUrl
from legroom.remote.object_version import ObjectStamp, stamp_from_json
from legroom.system.lazy_and_optional_imports import import_lock

_FORMAT = 1
_MOST = 1 << 16
_here: dict[str, tuple[float, ObjectStamp]] = {}  # in this process: by identity, when it was asked for


def version_of(url: ObjectUrl, *, ask: bool = False) -> ObjectStamp:
    """The object's version now, or, unless ``ask``, as it was within the last seconds."""
    with import_lock:
        from legroom.remote.object_store import RemoteObject, fresh_seconds

    if not ask:
        known = _remembered(url, fresh_seconds())
        if known is not None:
            return known
    asked = time.time()
    found = RemoteObject(url).stat()
    _here[url.identity] = asked, found
    return found


def remember(url: ObjectUrl) -> None:
    """Write what this process knows about an object into the stores, for other processes."""
    known = _here.get(url.identity)
    if known is None:
        return
    value = {"format": _FORMAT, "name": _name(url), "asked": known[0], "stamp": known[1].as_json()}
    body = json.dumps(value).encode("ascii")
    data = b"%08x " % zlib.crc32(body) + body
    for store in existing_stores():
        with suppress(OSError):
            with store_lock(store):
                replace_record(store, _name(url), data)
            return


def forget(url: ObjectUrl) -> None:
    """Ask the server the next time."""
    _here.pop(url.identity, None)
    for store in existing_stores():
        with suppress(OSError):
            os.unlink(_name(url), dir_fd=store.sources)


def _remembered(url: ObjectUrl, seconds: float) -> ObjectStamp | None:
    now = time.time()
    asked, stamp = _here.get(url.identity, (0.0, None))
    if stamp is not None and 0 <= now - asked < seconds:
        return stamp
    for store in existing_stores():
        try:
            data = read_small_file(store.sources, _name(url), _MOST)
            if data[:9] != b"%08x " % zlib.crc32(data[9:]):
                continue
            value = json.loads(data[9:])
            if value["format"] != _FORMAT or value["name"] != _name(url):
                continue
            stamp, asked = stamp_from_json(value["stamp"]), float(value["asked"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if 0 <= now - asked < seconds:
            _here[url.identity] = asked, stamp
            return stamp
    return None


def _name(url: ObjectUrl) -> str:
    return "url-" + url.identity
