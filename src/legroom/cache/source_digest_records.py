"""What the stores remember of sources: the digest of each, and for a short time the version of a remote object.

Digests are small files in ``sources/``, and links in ``samples/``. A record contains its own name and a checksum, so a
record that was swapped, renamed or damaged is not used. It is trusted if its stamp and the stamps of all referenced
files match, and the file had been unchanged for two seconds when hashing began. File system clocks are coarse: a file
that is written twice within one tick keeps its stamp. A record made earlier is trusted only for requests from before
the hashing began: hashing at that time could not have given them a better answer.

The version of a remote object is asked of its server at most once a minute: ranks and workers that open the same URL at
once ask once. With ``ask`` the server is asked now.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from legroom.cache.file_stamps import Stamp
from legroom.cache.manifest import is_key
from legroom.cache.mapped_files_and_checksums import opened
from legroom.cache.source_stamps_and_digests import DIGITS, Source, same_lookup
from legroom.cache.store_directories import Store, existing_stores, is_resource_shortage, read_small_file, store_lock
from legroom.formats.base_reader import Lookup
from legroom.remote.remote_object import ObjectStamp, ObjectUrl, stamp_from_json
from legroom.system.file_writes import write_all
from legroom.system.lazy_and_optional_imports import import_lock

RECORD_FORMAT = 2  # a record of another format is ignored: the source is hashed again
QUIET_NS = 2_000_000_000
TEMPORARY = ".tmp-"
SAMPLES = "samples"
_LARGEST_RECORD = 64 << 20
_NO_RECORD = (errno.ENOENT, errno.ELOOP, errno.ENXIO)
# A record's own checksum is its first line, over every byte that follows it.
_OPENING = b'{"record_crc32": "%08x",\n'
_OPENING_LENGTH = len(_OPENING % 0)


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """Digests of one source, by algorithm, and when they were computed."""

    digests: Mapping[str, str]
    hashed_ns: int  # when hashing began
    changed_ns: int  # the latest change of any file at that time
    paths: tuple[str, ...]
    referenced: tuple[tuple[str, str], ...] = ()  # (path, stamp) of referenced files
    lookups: tuple[Lookup, ...] = ()  # how the referenced files were found
    readers: tuple[str, ...] | None = None  # packages and versions of readers; revisions of Legroom's own

    def is_trusted(self, asked_ns: int) -> bool:
        """Whether a request made at ``asked_ns`` may use it."""
        return self.hashed_ns - self.changed_ns >= QUIET_NS or self.hashed_ns >= asked_ns


def read_record(store: Store, source: Source) -> SourceRecord | None:
    """The record of that source. None if there is none, or it is no longer valid."""
    try:
        record = read_record_named(store, source.name)
    except OSError as problem:
        if is_resource_shortage(problem):
            raise
        return None  # hashing will report the same problem
    if record is None:
        return None
    for path, stamp in record.referenced:
        try:
            if str(Stamp.of(os.stat(path))) != stamp:
                return None
        except (OSError, ValueError):
            return None
    return record if _same_lookups(record, source) else None


def _same_lookups(record: SourceRecord, source: Source) -> bool:
    if not record.lookups:
        return True
    # The source may have been renamed: lookups start from its current path.
    holders = dict(zip(map(Path, record.paths), map(Path, source.paths), strict=False))
    return all(same_lookup(replace(one, holder=holders.get(one.holder, one.holder))) for one in record.lookups)


def read_record_named(store: Store, name: str) -> SourceRecord | None:
    """The record of that name, without checking its files. None for anything that is not a record.

    Raises OSError if it could not be read.
    """
    try:
        data = read_small_file(store.sources, name, _LARGEST_RECORD)
    except OSError as problem:
        if problem.errno in _NO_RECORD:
            return None
        raise
    try:
        if data[:_OPENING_LENGTH] != _OPENING % zlib.crc32(data[_OPENING_LENGTH:]):
            return None
        return _parse(json.loads(data.decode("ascii")), name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def all_records(store: Store) -> Iterator[SourceRecord]:
    """Every readable record of a store."""
    for name in os.listdir(store.sources):
        try:
            record = read_record_named(store, name)
        except OSError:
            continue
        if record is not None:
            yield record


def _parse(value: Any, name: str) -> SourceRecord | None:
    if value["format"] != RECORD_FORMAT or value["name"] != name:
        return None
    digests = {name: text for name, text in value["digests"].items() if _is_digest(name, text)}
    numbers = value["hashed_ns"], value["changed_ns"]
    paths = tuple(value["paths"])
    behind = tuple((path, stamp) for path, stamp in value["behind"])
    lookups = tuple(
        Lookup(kind, name, Path(holder), None if found is None else Path(found))
        for kind, name, holder, found in value["lookups"]
    )
    readers = None if value.get("readers") is None else tuple(value["readers"])
    texts = (*paths, *(readers or ()), *(part for pair in behind for part in pair), *(one.name for one in lookups))
    if not digests or not all(type(n) is int for n in numbers) or not all(type(t) is str for t in texts):
        return None
    return SourceRecord(digests, *numbers, paths, behind, lookups, readers)


def _is_digest(name: str, text: Any) -> bool:
    return isinstance(text, str) and len(text) == DIGITS.get(name) and not set(text) - set("0123456789abcdef")


def write_record(
    store: Store, source: Source, digests: Mapping[str, str], hashed_ns: int, readers: tuple[str, ...] | None = None
) -> None:
    """Replace the source's record by rename.

    Under the store's lock, so a temporary file that is seen under it was left by a killed process.
    """
    value = {
        "format": RECORD_FORMAT,
        "name": source.name,
        "digests": dict(digests),
        "hashed_ns": hashed_ns,
        "changed_ns": source.changed_ns,
        "paths": [os.fspath(path) for path in source.paths],
        "behind": [[os.fspath(file.path), str(file.stamp)] for file in source.referenced],
        "lookups": [
            [one.kind, one.name, os.fspath(one.holder), None if one.found is None else os.fspath(one.found)]
            for one in source.lookups
        ],
        "readers": readers,
    }
    with store_lock(store):
        body = json.dumps(value).removeprefix("{").encode("ascii")
        replace_record(store, source.name, _OPENING % zlib.crc32(body) + body)


def replace_record(store: Store, name: str, data: bytes) -> None:
    """Write a file in ``sources/`` by rename, under the store's lock."""
    scratch = TEMPORARY + secrets.token_hex(8)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with opened(scratch, flags, 0o600, dir_fd=store.sources) as fd:
            write_all(fd, data, 0)
            if store.backing == "disk":
                os.fsync(fd)
        os.rename(scratch, name, src_dir_fd=store.sources, dst_dir_fd=store.sources)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch, dir_fd=store.sources)
        raise


# Samples: one symbolic link per (hash, size, sample), which points to the entry. By its name a cold open finds out
# whether hashing first may save the load, however many entries there are. It is a hint. If it is missing, the source
# is loaded and its entry is found at publishing. If it is wrong, one hash is wasted. A link is created in one step and
# needs no page on a full file system.


def note_sample(store: Store, algorithm: str, size: int, sample: str, key: str) -> None:
    """Remember the entry that a source with this sample has."""
    name = _sample_name(algorithm, size, sample)
    try:
        os.mkdir(SAMPLES, 0o700, dir_fd=store.fd)
    except FileExistsError:
        if _sampled(store, name):
            return
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=store.fd)
    with suppress(FileExistsError):  # another process was faster
        os.symlink(key, name, dir_fd=store.fd)


def may_hold(store: Store, algorithm: str, size: int, sample: str) -> bool:
    """Whether an entry exists that was built from a source of this size with this sample."""
    return _sampled(store, _sample_name(algorithm, size, sample))


def clear_samples(store: Store) -> None:
    """Delete the samples of entries that are gone."""
    try:
        names = os.listdir(store.root / SAMPLES)
    except OSError:
        return
    for name in names:
        if not _sampled(store, f"{SAMPLES}/{name}"):
            with suppress(FileNotFoundError):
                os.unlink(f"{SAMPLES}/{name}", dir_fd=store.fd)


def _sampled(store: Store, name: str) -> bool:
    try:
        key = os.readlink(name, dir_fd=store.fd)
        os.stat(key, dir_fd=store.fd, follow_symlinks=False)
    except (OSError, ValueError):
        return False
    return is_key(key)


def _sample_name(algorithm: str, size: int, sample: str) -> str:
    return f"{SAMPLES}/{algorithm}-{size}-{sample}"


_FORMAT = 1
_LARGEST_VERSION = 1 << 16
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
    with suppress(OSError):  # looking for the stores may fail, too
        for store in existing_stores():
            with suppress(OSError):
                with store_lock(store):
                    replace_record(store, _name(url), data)
                return


def _remembered(url: ObjectUrl, seconds: float) -> ObjectStamp | None:
    now = time.time()
    asked, stamp = _here.get(url.identity, (0.0, None))
    if stamp is not None and 0 <= now - asked < seconds:
        return stamp
    for store in existing_stores():
        try:
            data = read_small_file(store.sources, _name(url), _LARGEST_VERSION)
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
