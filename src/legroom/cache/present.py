"""What a path holds now, compared with what entries were built from: by content, as ``load`` does it.

Covers: the one rule by which list, info, drop, gc --stale and verify find the entries of a file. A file that was
touched, moved or copied has the entry that its bytes have. Does not cover: opening entries (find.py).

A believed record tells the digest. Else size and a sample of a few pages say which entries it may be, and only for
those the file is hashed, once for each hash.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from legroom.cache import identity, records
from legroom.cache.identity import Source
from legroom.cache.manifest import Manifest
from legroom.cache.place import Store
from legroom.errors import (
    DamagedSource,
    LegroomError,
    MissingKey,
    UnknownFormat,
    UnsupportedData,
)
from legroom.formats.detect import open_source

Paths = tuple[Path, ...]
_OTHER_FILE = (DamagedSource, UnknownFormat, UnsupportedData, MissingKey)  # what was loaded had none of these


class Present:
    """The files of one command, each looked at and hashed at most once."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = stores
        self._asked_ns = time.time_ns()
        self._looked: dict[Paths, Source] = {}
        self._sources: dict[tuple[Paths, tuple[str, ...] | None, bool], Source] = {}
        self._samples: dict[Source, str] = {}
        self._digests: dict[tuple[Source, str], str] = {}
        self._known: dict[str, list[Paths]] | None = None

    def holds(self, paths: Sequence[Path], manifest: Manifest) -> bool:
        """Whether these paths hold the bytes that the entry was built from."""
        named = tuple(paths)
        if named not in self._looked:
            self._looked[named] = identity.look(named)
        for store in self._stores:
            record = records.read(store, self._looked[named])
            if record is not None and record.believed(self._asked_ns):
                if record.digests.get(manifest.hash) == manifest.digest:
                    return True
                # Other keys may have other files behind them, and with these another digest.
                if manifest.hash in record.digests and manifest.kind != "hdf5":
                    return False
        try:
            source = self._source(named, manifest)
        except _OTHER_FILE:
            return False
        if source.size != manifest.source_bytes:
            return False
        if source not in self._samples:
            self._samples[source] = identity.sample(source)
        if self._samples[source] != manifest.sample:
            return False
        return self.digest(source, manifest.hash) == manifest.digest

    def digest(self, source: Source, algorithm: str) -> str:
        """The digest of a source as it is now."""
        if (source, algorithm) not in self._digests:
            identity.settle(source)
            self._digests[source, algorithm] = identity.digest(source, algorithm)
            if not identity.unchanged(source):
                raise identity.changed(source.paths[0])
        return self._digests[source, algorithm]

    def replaced(self, manifest: Manifest) -> bool:
        """Whether files that the entry is known to be of hold other bytes now, and none holds its own still.

        The same bytes may have been opened under other names since. What cannot be read is not known to be another.
        """
        answers: set[bool | None] = set()
        for paths in dict.fromkeys((tuple(map(Path, manifest.paths)), *self._opened(manifest.digest))):
            if all(os.path.lexists(path) for path in paths):
                try:
                    answers.add(self.holds(paths, manifest))
                except LegroomError:
                    answers.add(None)
        return answers == {False}

    def _opened(self, digest: str) -> list[Paths]:
        """The paths that were opened and had this digest then."""
        if self._known is None:
            self._known = {}
            for store in self._stores:
                for record in records.all_of(store):
                    for one in record.digests.values():
                        self._known.setdefault(one, []).append(tuple(map(Path, record.paths)))
        return self._known.get(digest, [])

    def _source(self, paths: Paths, manifest: Manifest) -> Source:
        """The source with every file behind it that the entry's keys need."""
        with_others = manifest.kind == "hdf5"
        key = paths, manifest.options.keys if with_others else None, with_others
        if key not in self._sources:
            self._sources[key] = source_now(paths, manifest)
        return self._sources[key]


def source_now(paths: Sequence[Path], manifest: Manifest) -> Source:
    """What these paths stand for now, as the entry's load would take them."""
    source = identity.look(paths)
    if manifest.kind != "hdf5":
        return source
    with ExitStack() as stack:
        readers = [stack.enter_context(open_source(path, manifest.options.keys)) for path in paths]
        source = identity.described(source, [reader.describe() for reader in readers])
        identity.require_own(source, readers)
    return source
