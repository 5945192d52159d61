"""The URL of a remote object, and its text without credentials.

A URL may contain a password, a token or a signature. Only ``ObjectUrl.url`` has them, and only the request that reads
the object uses it. Manifests, records, messages and JSON get ``text``.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit, urlunsplit

HIDDEN = "…"
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
    web = scheme in ("http", "https")
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
