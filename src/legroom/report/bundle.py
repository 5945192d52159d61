"""The bundle: its parts as they were read, the same without what is private, and the file that is written.

The file is written whole or not at all, for its owner alone, and never over another file. Nothing is sent anywhere.
"""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legroom.advice.fix_commands import free_disk
from legroom.errors import UsageError
from legroom.messages import say
from legroom.report.redact import Redactor
from legroom.system.atomic_file import PRIVATE, create_file
from legroom.units import format_size

CONTENTS = "CONTENTS.txt"
_FIRST, _LAST = 315532800.0, 4354819198.0  # a .zip holds the times from 1980 to 2107


@dataclass(frozen=True, slots=True)
class Attachments:
    """Files that the user adds to the bundle."""

    log: str | None = None  # of a training run
    run: str | None = None  # written by `legroom run --report`
    watch: str | None = None  # written by `legroom watch --log`


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the bundle: a text, or a value that becomes JSON."""

    name: str
    about: str  # one line of description
    content: Any
    addresses: bool = True  # False: its numbers with dots are versions, not addresses


@dataclass(frozen=True, slots=True)
class Collected:
    """Every part as it was read, with private things in it."""

    parts: tuple[Part, ...]
    left_out: tuple[str, ...]  # what could not be read, and why
    files: tuple[str, ...] = ()  # paths of data files, whose names are hidden


@dataclass(frozen=True, slots=True)
class RedactedPart:
    """One file of the finished bundle."""

    name: str
    about: str
    text: str

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.text.encode())


def redacted(collected: Collected, redactor: Redactor) -> tuple[RedactedPart, ...]:
    """Every part without what is private, and the list of contents before them."""
    for part in collected.parts:
        redactor.learn(part.content)
    packed = []
    for part in collected.parts:
        if isinstance(part.content, str):
            text = redactor.text(part.content, addresses=part.addresses)
        else:
            value = redactor.value(part.content, addresses=part.addresses)
            text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
        # Directories of cgroups have names of containers and users.
        packed.append(RedactedPart(redactor.text(part.name, addresses=False), part.about, text))
    left_out = [redactor.text(line) for line in collected.left_out]
    contents = contents_text(packed, left_out, redactor.counts)
    return (RedactedPart(CONTENTS, say("list of the files"), contents), *packed)


def contents_text(packed: Sequence[RedactedPart], left_out: Sequence[str], hidden: Mapping[str, int]) -> str:
    """The list of contents."""
    column = max(len(one.name) for one in packed)
    rows = [f"{one.name:<{column}}  {format_size(one.size):>9}  {one.about}" for one in packed]
    rows += ["", hidden_line(hidden)]
    rows += [say("left out: {what}", what=line) for line in left_out]
    rows += [
        say("machine/ has the files of /proc and /sys that were read; show them with legroom doctor --root machine")
    ]
    return "\n".join(rows) + "\n"


def hidden_line(hidden: Mapping[str, int]) -> str:
    """How many things were hidden, by kind."""
    counts = ", ".join(f"{kind} {hidden[kind]}" for kind in sorted(hidden))
    return say("replaced: {counts}", counts=counts) if counts else say("replaced: nothing")


def pack(packed: Sequence[RedactedPart], path: str, now: float | None = None) -> bytes:
    """The parts as a .zip or .tar.gz archive, by the suffix of the path."""
    when = min(max(time.time() if now is None else now, _FIRST), _LAST)  # without a battery, a clock begins at 1970
    buffer = io.BytesIO()
    if path.endswith(".zip"):
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for one in packed:
                entry = zipfile.ZipInfo(one.name, time.gmtime(when)[:6])
                entry.external_attr = PRIVATE << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, one.text.encode())
    else:
        # A new TarInfo has no owner's name, and the gzip header no file name.
        with tarfile.open(fileobj=buffer, mode="w:gz") as bag:
            for one in packed:
                member = tarfile.TarInfo(one.name)
                member.size, member.mode, member.mtime = one.size, PRIVATE, int(when)
                bag.addfile(member, io.BytesIO(one.text.encode()))
    return buffer.getvalue()


def checked_path(path: str) -> str:
    """The path, if a bundle can be written there."""
    if not path.endswith((".zip", ".tar.gz", ".tgz")):
        raise UsageError(
            say("{path}: unknown archive format", path=path),
            why=say("a report is a .zip or a .tar.gz file"),
            fix=("--out report.zip",),
        )
    if os.path.lexists(path):
        raise _exists(path)
    return path


def write(data: bytes, path: str) -> None:
    """Write the bundle: whole or not at all, for its owner alone (0600), never over another file."""
    try:
        create_file(path, data, mode=PRIVATE)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as problem:
        raise _unwritable(path, problem) from problem


def _exists(path: str) -> UsageError:
    return UsageError(
        say("{path} already exists", path=path),
        why=say("a report never overwrites a file"),
        fix=(say("pass another name with --out, or remove the file"),),
    )


def _unwritable(path: str, problem: OSError) -> UsageError:
    fix: tuple[str, ...] = (
        say("choose a file in an existing directory that you can write to"),
        "--out /tmp/report.zip",
    )
    if problem.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
        folder = os.path.dirname(path) or "."
        fix = (say("the disk is full. Write to another disk: --out DIRECTORY/report.zip"), *free_disk(folder))
    return UsageError(say("cannot write {path}", path=path), why=problem.strerror or str(problem), fix=fix)
