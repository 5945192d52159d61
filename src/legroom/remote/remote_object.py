"""A remote object: its URL, the same as text without credentials, and which version of it was seen.

The URL may contain a password, a token or a signature. Only ``ObjectUrl.url`` has them, and only the request that reads
the object uses it. Manifests, records, messages and JSON get ``text``.

Two equal stamps of one URL are taken for the same bytes, as two equal stamps of a file are. An S3 ETag of a multipart
upload is not a hash of the content, but it changes when the object does. A time of change alone is weak: it may be
coarse. A store that says nothing gives no identity, and the object is read and hashed each time.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from legroom.messages import phrase

HIDDEN = "…"
REMOTE_DATA = phrase("remote data")  # what fsspec is needed for
S3, HTTP = ("s3", "s3a"), ("http", "https")
BOUND = S3 + HTTP  # protocols whose requests name the version: the server sends that one or none
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z0-9+.-]+)*://")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://[^\s'\"<>)\]]+")
# Parameters that sign a request and do not select the object: S3, Google, CloudFront, Azure, and tokens.
_SIGNATURE = re.compile(
    r"x-amz-.*|x-goog-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id|.*token.*|"
    r"sig|se|sp|sv|sr|st|spr|sip|skoid|sktid|skt|ske|sks|skv",
    re.I,
)
_SHOWN = ("versionid", "generation", "revision")  # parameters that name a version are no secret


@dataclass(frozen=True, slots=True)
class ObjectUrl(os.PathLike[str]):
    """A remote object."""

    url: str = field(repr=False)  # as given, possibly with credentials
    text: str  # without them

    @property
    def protocol(self) -> str:
        return self.text.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part of its path."""
        return posixpath.basename(self.text.partition("?")[0].rstrip("/"))

    @property
    def identity(self) -> str:
        """A hash of what selects the object: the URL without credentials, with every other parameter."""
        kept = sorted(pair for pair in _parameters(self.url) if not _SIGNATURE.fullmatch(pair[0]))
        return hashlib.blake2b(repr((self.text, kept)).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    @property
    def is_reopenable(self) -> bool:
        """Whether the text alone leads to the object."""
        return HIDDEN not in self.text

    def below(self, name: str) -> ObjectUrl:
        """An object in this one, taken as a directory."""
        head, mark, query = self.url.partition("?")
        return object_url(head.rstrip("/") + "/" + name + mark + query)

    def __fspath__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text


SourcePath = Path | ObjectUrl


def is_url(text: str) -> bool:
    """Whether a text is a URL and not a path."""
    return _SCHEME.match(text) is not None


def object_url(text: str) -> ObjectUrl:
    """The object of a URL."""
    return ObjectUrl(text, without_credentials(text))


def without_credentials(url: str) -> str:
    """The URL without user and password, without signatures, and with the values of other parameters hidden."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    scheme = scheme.lower()
    web = scheme in HTTP
    host, slash, path = rest.partition("/")
    user, at, server = host.rpartition("@")
    # "container@account" of Azure and "user@host" of SFTP select the object. A password, or any user of a web
    # server, which may be a token, does not.
    if at and (":" in user or web):
        host = server
    path, question, query = path.partition("?")
    if web:
        path, query = path.partition("#")[0], query.partition("#")[0]
    shown = [
        f"{name}={value if name.lower() in _SHOWN else HIDDEN}"
        for name, value in parse_qsl(query, keep_blank_values=True)
        if not _SIGNATURE.fullmatch(name)
    ]
    return f"{scheme}://{host}{slash}{path}" + (question + "&".join(shown) if shown else "")


def redacted(text: str) -> str:
    """A message of a library, with the credentials of every URL in it removed."""
    return _URL.sub(lambda match: without_credentials(match[0]), text)


def _parameters(url: str) -> list[tuple[str, str]]:
    return parse_qsl(url.partition("?")[2].partition("#")[0], keep_blank_values=True)


def local_path(url: str) -> str | None:
    """The path of a ``file://`` URL; None for any other."""
    parts = urlsplit(url)
    if parts.scheme.lower() != "file":
        return None
    return urlunsplit(("", "", parts.path, parts.query, parts.fragment)) or "/"


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
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kind} {self.tag} {self.size}" if self.tag else f"{self.kind} {self.size}"


def stamp_from_json(value: Mapping[str, Any]) -> ObjectStamp:
    """The stamp of these fields. Raises KeyError, TypeError or ValueError if they are not a stamp's."""
    found = ObjectStamp(**{**value, "hashes": dict(value["hashes"])})
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
    return match[1] if match is not None and protocol in S3 else None


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
