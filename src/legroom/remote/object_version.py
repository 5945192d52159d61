"""Which version of a remote object was seen: what its store says about it.

Two equal stamps of one URL are taken for the same bytes, as two equal stamps of a file are. An S3 ETag of a multipart
upload is not a hash of the content, but it changes when the object does. A time of change alone is weak: it may be
coarse. A store that says nothing gives no identity, and the object is read and hashed each time.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Literal

Kind = Literal["sha256", "version", "etag", "md5", "modified", "none"]
STRONG: tuple[Kind, ...] = ("sha256", "version", "etag", "md5")
_NEVER_QUIET = 1 << 62  # a time of change that no hashing is later than
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


@dataclass(frozen=True, slots=True)
class ObjectStamp:
    """The version of an object, by the best that its store vouches for."""

    size: int | None  # None: known only after reading it
    kind: Kind
    tag: str = ""
    modified_ns: int = 0
    etag: str | None = None  # for conditional requests
    version: str | None = None
    hashes: Mapping[str, str] = field(default_factory=dict, hash=False)  # of the content, as the store states them
    etag_md5: str | None = None  # an ETag that is the MD5 of the content in most stores, not in all
    ranges: bool = True  # whether parts of it can be read

    @property
    def is_strong(self) -> bool:
        """Whether a change of the object is sure to change the stamp."""
        return self.kind in STRONG

    @property
    def by_ranges(self) -> bool:
        """Whether it may be read in parts: they must be known to belong to one version."""
        return self.is_strong and self.ranges and self.size is not None

    @property
    def changed_ns(self) -> int:
        """When it last changed, for the rule that a source must have been unchanged for a while to be remembered."""
        if self.is_strong:
            return 0
        return self.modified_ns if self.kind == "modified" else _NEVER_QUIET

    @property
    def expected(self) -> dict[str, str]:
        """By algorithm, the digest that the content should have."""
        found = dict(self.hashes)
        if self.etag_md5 is not None:
            found.setdefault("md5", self.etag_md5)
        return found

    def is_sure(self, algorithm: str) -> bool:
        """Whether the store states that digest itself."""
        return algorithm in self.hashes

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return {name: getattr(self, name) for name in _FIELDS} | {"hashes": dict(self.hashes)}

    def __str__(self) -> str:
        return f"{self.kind} {self.tag} {self.size}" if self.tag else f"{self.kind} {self.size}"


_FIELDS = ("size", "kind", "tag", "modified_ns", "etag", "version", "etag_md5", "ranges")


def stamp_from_json(value: Mapping[str, Any]) -> ObjectStamp:
    """The stamp of these fields. Raises KeyError, TypeError or ValueError if they are not a stamp's."""
    found = ObjectStamp(**{name: value[name] for name in _FIELDS}, hashes=dict(value["hashes"]))
    size_ok = found.size is None or type(found.size) is int
    if not size_ok or type(found.kind) is not str or type(found.tag) is not str or type(found.modified_ns) is not int:
        raise ValueError("not a stamp")
    return found


def stamp_of_info(protocol: str, info: Mapping[str, Any]) -> ObjectStamp:
    """The stamp in what fsspec says about an object."""
    size = info.get("size")
    etag = _text(info, "ETag", "etag", "e_tag")
    version = _text(info, "VersionId", "generation", "version_id")
    if version == "null":  # S3: not versioned
        version = None
    hashes = _hashes(info)
    modified = _time(info)
    common: dict[str, Any] = {
        "size": size if type(size) is int and size >= 0 else None,
        "modified_ns": modified,
        "etag": etag,
        "version": version,
        "hashes": hashes,
        "etag_md5": _etag_md5(protocol, etag),
        "ranges": info.get("partial", True) is not False,
    }
    if "sha256" in hashes:
        return ObjectStamp(kind="sha256", tag=hashes["sha256"], **common)
    if version is not None:
        return ObjectStamp(kind="version", tag=version, **common)
    if etag is not None and not etag.startswith("W/"):
        return ObjectStamp(kind="etag", tag=etag.strip('"'), **common)
    if blob := _text(info, "blob_id"):  # a git blob: the hash of the content
        return ObjectStamp(kind="version", tag=blob, **common)
    if "md5" in hashes:
        return ObjectStamp(kind="md5", tag=hashes["md5"], **common)
    if modified:
        return ObjectStamp(kind="modified", tag=str(modified), **common)
    return ObjectStamp(kind="none", **common)


def _etag_md5(protocol: str, etag: str | None) -> str | None:
    match = _MD5.fullmatch(etag or "")
    return match[1] if match is not None and protocol in ("s3", "s3a") else None


def _text(info: Mapping[str, Any], *names: str) -> str | None:
    found = next((info[name] for name in names if info.get(name)), None)
    return None if found is None else str(found)


def _hashes(info: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    lfs = info.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
    if isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256):
        found["sha256"] = sha256
    md5 = _text(info, "md5Hash", "Content-MD5", "content_md5")
    if md5 is not None:
        try:
            digest = base64.b64decode(md5, validate=True)
        except (binascii.Error, ValueError):
            digest = b""
        if len(digest) == 16:
            found["md5"] = digest.hex()
    return found


def _time(info: Mapping[str, Any]) -> int:
    found: Any = next((info[name] for name in _TIMES if info.get(name)), None)
    if isinstance(found, str):
        for read in (parsedate_to_datetime, datetime.datetime.fromisoformat):
            try:
                found = read(found)
                break
            except ValueError:
                continue
    if isinstance(found, datetime.datetime):
        if found.tzinfo is None:
            found = found.replace(tzinfo=datetime.UTC)
        found = found.timestamp()
    return int(found * 1e9) if isinstance(found, (int, float)) and found > 0 else 0


_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "modified", "created")
