"""Whether files still have the content that an entry was built from: ``gc --stale``, ``verify``, ``list FILE``.

A file that was touched, moved or copied has the entry that its bytes have. A trusted record gives the digest.
Otherwise size and a sample of a few pages select candidate entries, and only for those the file is hashed, once for
each hash algorithm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from legroom.cache import remembered_source_digests, source_stamps_and_digests
from legroom.cache.manifest import Manifest
from legroom.cache.source_stamps_and_digests import Source
from legroom.cache.store_directories import Store
from legroom.errors import DamagedSource, LegroomError, MissingKey, UnknownFormat, UnsupportedData
from legroom.formats.detect import open_source
from legroom.remote.object_url import ObjectUrl, SourcePath, is_url, object_url
from legroom.remote.object_version import ObjectStamp


def same_versions(source: Source, manifest: Manifest) -> bool | None:
    """Whether remote objects are those that an entry was built from. None if their versions do not tell."""
    stamps = {str(file.path): file.stamp for file in source.files}
    if all(
        isinstance(stamp := stamps.get(path), ObjectStamp) and stamp.is_strong and str(stamp) == then
        for path, then in zip(manifest.paths, manifest.stamps, strict=True)
    ):
        return True
    if None not in (file.stamp.size for file in source.files) and source.size != manifest.source_bytes:
        return False
    hashes = [file.stamp.hashes if isinstance(file.stamp, ObjectStamp) else {} for file in source.files]
    if len(hashes) == 1 and manifest.hash in hashes[0]:
        return hashes[0][manifest.hash] == manifest.digest
    return None


def recorded_paths(texts: Iterable[str]) -> Paths:
    """Paths and URLs from their text in a manifest or record."""
    return tuple(object_url(text) if is_url(text) else Path(text) for text in texts)


Paths = tuple[SourcePath, ...]
_REFERRING = ("hdf5", "megatron")  # formats whose data may be in other files too
_OTHER_FILE = (DamagedSource, UnknownFormat, UnsupportedData, MissingKey)  # a loaded source raised none of these


class SourceMatcher:
    """Compares files with entries by content. Each file is stamped and hashed at most once."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = stores
        self._asked_ns = time.time_ns()
        self._looked: dict[Paths, Source] = {}
        self._sources: dict[tuple[Paths, tuple[str, ...] | None, bool], Source] = {}
        self._samples: dict[Source, str] = {}
        self._digests: dict[tuple[Source, str], str] = {}
        self._known: dict[str, list[Paths]] | None = None

    def matches(self, paths: Sequence[SourcePath], manifest: Manifest) -> bool:
        """Whether these paths have the content that the entry was built from."""
        return self._matches(paths, manifest) is True

    def _matches(self, paths: Sequence[SourcePath], manifest: Manifest) -> bool | None:
        """The same; None if it is not known."""
        if not manifest.paths:
            return False  # a frozen object
        named = tuple(paths)
        if named not in self._looked:
            self._looked[named] = source_stamps_and_digests.stamp_source(named)
        for store in self._stores:
            record = remembered_source_digests.read_record(store, self._looked[named])
            if record is not None and record.is_trusted(self._asked_ns):
                if record.digests.get(manifest.hash) == manifest.digest:
                    return True
                # Other keys may refer to other files, and have another digest.
                if manifest.hash in record.digests and manifest.kind not in _REFERRING:
                    return False
        if self._looked[named].is_remote:
            return same_versions(self._looked[named], manifest)
        try:
            source = self._source(named, manifest)
        except _OTHER_FILE:
            return False
        if source.size != manifest.source_bytes:
            return False
        if source not in self._samples:
            self._samples[source] = source_stamps_and_digests.sample_source(source)
        if self._samples[source] != manifest.sample:
            return False
        return self.digest(source, manifest.hash) == manifest.digest

    def digest(self, source: Source, algorithm: str) -> str:
        """The digest of a source as it is now."""
        if (source, algorithm) not in self._digests:
            source_stamps_and_digests.flush_source(source)
            self._digests[source, algorithm] = source_stamps_and_digests.digest_source(source, algorithm)
            if not source_stamps_and_digests.is_unchanged(source):
                raise source_stamps_and_digests.source_changed_error(source.paths[0])
        return self._digests[source, algorithm]

    def is_replaced(self, manifest: Manifest) -> bool:
        """Whether the entry's known files have other content now, and none has its own.

        The same content may have been opened under other names since. An unreadable file is not known to differ.
        """
        if not manifest.paths:
            return False
        answers: set[bool | None] = set()
        for paths in dict.fromkeys((recorded_paths(manifest.paths), *self._opened(manifest.digest))):
            if all(_can_look(path) for path in paths):
                try:
                    answers.add(self._matches(paths, manifest))
                except LegroomError:
                    answers.add(None)
        return answers == {False}

    def _opened(self, digest: str) -> list[Paths]:
        """The paths that had this digest when they were opened."""
        if self._known is None:
            self._known = {}
            for store in self._stores:
                for record in remembered_source_digests.all_records(store):
                    for one in record.digests.values():
                        self._known.setdefault(one, []).append(recorded_paths(record.paths))
        return self._known.get(digest, [])

    def _source(self, paths: Paths, manifest: Manifest) -> Source:
        """The source with every referenced file that the entry's keys need."""
        with_others = manifest.kind in _REFERRING
        key = paths, manifest.options.keys if with_others else None, with_others
        if key not in self._sources:
            self._sources[key] = current_source(paths, manifest)
        return self._sources[key]


def _can_look(path: SourcePath) -> bool:
    return path.is_reopenable if isinstance(path, ObjectUrl) else os.path.lexists(path)


def current_source(paths: Sequence[SourcePath], manifest: Manifest) -> Source:
    """The source of these paths now, as a load with the entry's keys would see it."""
    source = source_stamps_and_digests.stamp_source(paths)
    if manifest.kind not in _REFERRING:
        return source
    with ExitStack() as stack:
        options = manifest.options
        readers = [stack.enter_context(open_source(Path(path), options.keys, dtype=options.dtype)) for path in paths]
        source = source_stamps_and_digests.with_referenced_files(source, [reader.describe() for reader in readers])
        source_stamps_and_digests.require_stamped(source, readers)
    return source
