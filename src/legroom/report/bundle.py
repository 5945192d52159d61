"""Parts become one file.

Covers: hiding what is private in all of them together, the list of contents, zip and tar.gz, writing it once and for
its owner alone. Does not cover: gathering (gather.py), what is private (known.py, redact.py). Sends nothing.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
import zipfile
from collections.abc import Mapping, Sequence

from legroom.errors import UsageError
from legroom.report.parts import Gathered, Packed
from legroom.report.redact import Redactor
from legroom.system.atomic_file import PRIVATE, create_file
from legroom.units import format_size
from legroom.words import say

CONTENTS = "CONTENTS.txt"
_OPEN_TO_OWNER = 0o600


def redacted(gathered: Gathered, redactor: Redactor) -> tuple[Packed, ...]:
    """Every part without what is private, and before them the list of what is inside."""
    for part in gathered.parts:
        redactor.learn(part.content)
    packed = []
    for part in gathered.parts:
        if isinstance(part.content, str):
            text = redactor.text(part.content, addresses=part.addresses)
        else:
            value = redactor.value(part.content, addresses=part.addresses)
            text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
        # Directories of cgroups are named after containers and users.
        packed.append(Packed(redactor.text(part.name, addresses=False), part.about, text))
    left_out = [redactor.text(line) for line in gathered.left_out]
    contents = contents_text(packed, left_out, redactor.counts)
    return (Packed(CONTENTS, say("this list"), contents), *packed)


def contents_text(packed: Sequence[Packed], left_out: Sequence[str], hidden: Mapping[str, int]) -> str:
    """The list that lies in the bundle."""
    column = max(len(one.name) for one in packed)
    rows = [f"{one.name:<{column}}  {format_size(one.size):>9}  {one.about}" for one in packed]
    rows += ["", hidden_line(hidden)]
    rows += [say("left out: {what}", what=line) for line in left_out]
    rows += [say("machine/ is a recording: legroom doctor --root machine reads it.")]
    return "\n".join(rows) + "\n"


def hidden_line(hidden: Mapping[str, int]) -> str:
    """How often something was hidden, by kind."""
    counts = ", ".join(f"{kind} {hidden[kind]}" for kind in sorted(hidden))
    return say("hidden: {counts}", counts=counts) if counts else say("hidden: nothing was found to hide")


def pack(packed: Sequence[Packed], path: str, now: float | None = None) -> bytes:
    """The parts as an archive of the kind that the path's ending asks for."""
    when = time.time() if now is None else now
    buffer = io.BytesIO()
    if path.endswith(".zip"):
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for one in packed:
                entry = zipfile.ZipInfo(one.name, time.gmtime(when)[:6])
                entry.external_attr = _OPEN_TO_OWNER << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, one.text.encode())
    else:
        # A TarInfo of our own has no owner's name; the gzip header has no file's.
        with tarfile.open(fileobj=buffer, mode="w:gz") as bag:
            for one in packed:
                member = tarfile.TarInfo(one.name)
                member.size, member.mode, member.mtime = one.size, _OPEN_TO_OWNER, int(when)
                bag.addfile(member, io.BytesIO(one.text.encode()))
    return buffer.getvalue()


def checked_path(path: str) -> str:
    """The path, if a bundle can be written there; what is there already is never replaced."""
    if not path.endswith((".zip", ".tar.gz", ".tgz")):
        raise UsageError(
            say("{path}: what kind of file is that to be?", path=path),
            why=say("a report is a .zip or a .tar.gz"),
            fix=(say("--out report.zip"),),
        )
    if os.path.lexists(path):
        raise _taken(path)
    return path


def write(data: bytes, path: str) -> None:
    """Write the bundle: whole or not at all, readable by its owner alone, never over another file."""
    try:
        create_file(path, data, mode=PRIVATE)
    except FileExistsError:
        raise _taken(path) from None
    except OSError as problem:
        raise _unwritable(path, problem) from problem


def _taken(path: str) -> UsageError:
    return UsageError(
        say("{path} is there already", path=path),
        why=say("a report never replaces a file"),
        fix=(say("give another name with --out, or remove it first"),),
    )


def _unwritable(path: str, problem: OSError) -> UsageError:
    return UsageError(
        say("cannot write {path}", path=path),
        why=problem.strerror or str(problem),
        fix=(say("name a file in a directory of yours: --out /tmp/report.zip"),),
    )
