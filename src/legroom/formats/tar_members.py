"""Read the headers of a tar archive: its members, and what its links stand for.

Reads ustar, GNU and PAX archives, and what Unix version 7 wrote. Every header's checksum is verified, and an archive
must end as the format says, with two blocks of zeros: one that was cut between two files is refused. Sparse files,
and headers that two programs would read differently, are refused with the name of the file.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from legroom.errors import UnsupportedData
from legroom.formats.file_reads_and_errors import SourceFile, damaged
from legroom.formats.gather_byte_ranges import GrowingMemory
from legroom.messages import say
from legroom.units import format_size

BLOCK = 512
_REGULAR = b"0\0" + b"7"  # also "contiguous files", which everybody reads as regular ones
_HARD, _SYMBOLIC = b"1", b"2"
LINKS = (_HARD, _SYMBOLIC)
DIRECTORY = b"5"
_WITHOUT_DATA = b"123456"  # links, devices, directories, pipes: whatever size their header states
_PAX = b"xX"  # for the next file; Solaris wrote X
_MOST_EXTENDED = 1 << 20  # bytes of a long name or a PAX header
_MOST_TAIL = 16 << 20  # bytes of zeros after the end: tape blocks
_MOST_DIGITS = 20  # of a length or size in decimal
_SMALLEST_READ, _LARGEST_READ = 3 * BLOCK, 64 << 10
_NEAR = 8 << 10  # bytes between headers so close that reading on is cheaper than reading anew


@dataclass(slots=True)
class _Pending:
    """What the headers before a file's own say about it."""

    name: str | None = None
    size: int | None = None
    target: bytes | None = None  # of a link
    headers: bytes = b""  # their types


def is_tar(file: SourceFile) -> bool:
    """Whether a file starts with a tar header."""
    if file.size < BLOCK:
        return False
    block = file.read_at(0, BLOCK)
    return block[0] != 0 and _has_checksum(block)


Member = tuple[bytes, str, int, int, bytes]


def members(file: SourceFile) -> Iterator[Member]:
    """(type, name, first byte, size, target of a link) of each member, in order; the type of a regular file is 0."""
    blocks, at, pending = _Blocks(file), 0, _Pending()
    while True:
        block = blocks.at(at)
        if not any(block):
            if pending.headers:
                raise damaged(file.path, f"it ends after the long name of a file, at byte {at}")
            _require_end(file, at)
            return
        if not _has_checksum(block):
            raise damaged(file.path, f"the header at byte {at} does not match its checksum")
        kind, size, data = block[156:157], _number(file, block[124:136], at), at + BLOCK
        if kind in b"LKg" or kind in _PAX:
            _read_extended(file, kind, data, size, at, pending)
            at = data + _padded(size)
            continue
        name = _name(file, block, at) if pending.name is None else pending.name
        size = size if pending.size is None else pending.size
        if kind == b"S":
            raise _sparse(file, name)
        if kind in _REGULAR and not (kind == b"\0" and _plain_name(block).endswith(b"/")):
            file.require(data, size)
            yield b"0", name, data, size, b""
            at = data + _padded(size)
        elif kind in _WITHOUT_DATA or kind in _REGULAR:
            target = block[157:257].partition(b"\0")[0] if pending.target is None else pending.target
            yield (DIRECTORY if kind in _REGULAR else kind), name, data, 0, target if kind in LINKS else b""
            at = data
        else:
            file.require(data, size)  # unknown to everybody: skipped with its data
            yield kind, name, data, size, b""
            at = data + _padded(size)
        pending = _Pending()


class _Blocks:
    """The headers of a file: those close to each other come with one read."""

    def __init__(self, file: SourceFile) -> None:
        self._file, self._data, self._start, self._last, self._read = file, b"", 0, 0, _SMALLEST_READ

    def at(self, offset: int) -> bytes:
        if offset + BLOCK > self._file.size:
            raise damaged(
                self._file.path,
                say(
                    "it ends at byte {size} without the two blocks of zeros that end a tar archive: it is truncated",
                    size=self._file.size,
                ),
            )
        if not self._start <= offset <= self._start + len(self._data) - BLOCK:
            near = offset - self._last <= _NEAR
            self._read = min(2 * self._read, _LARGEST_READ) if near else _SMALLEST_READ
            self._data = self._file.read_at(offset, min(self._read, self._file.size - offset))
            self._start = offset
        self._last = offset
        return self._data[offset - self._start : offset - self._start + BLOCK]


def _require_end(file: SourceFile, at: int) -> None:
    """Refuse an archive with a single block of zeros at its end, or with anything but zeros after it."""
    if file.size - at < 2 * BLOCK:
        raise damaged(
            file.path, say("it ends with one block of zeros instead of two, at byte {at}: it is truncated", at=at)
        )
    if file.size - at > _MOST_TAIL:
        raise _follows(file, at)
    for start in range(at, file.size, 1 << 20):
        if file.read_at(start, min(1 << 20, file.size - start)).strip(b"\0"):
            raise _follows(file, at)


def _follows(file: SourceFile, at: int) -> UnsupportedData:
    return UnsupportedData(
        say("{path} continues after the end of the archive", path=file.path),
        why=say(
            "it ends at byte {at}, and {more} follow: two archives may have been joined with cat",
            at=at,
            more=format_size(file.size - at),
        ),
        fix=(say("pass the archives as a list, or join them with: tar -A -f all.tar more.tar"),),
    )


def _has_checksum(block: bytes) -> bool:
    field = block[148:156].strip(b" \0")
    if not field or field.strip(b"01234567"):
        return False
    stated, unsigned = int(field, 8), sum(block) - sum(block[148:156]) + 8 * 32
    # Some old programs added signed bytes.
    return stated == unsigned or stated == unsigned - 256 * sum(1 for byte in block[:148] + block[156:] if byte > 127)


def _number(file: SourceFile, field: bytes, at: int) -> int:
    """The size in a header: octal digits, or base 256."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise damaged(file.path, f"invalid size {field!r} in the header at byte {at}")
    return int(digits or b"0", 8)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _plain_name(block: bytes) -> bytes:
    return block[:100].partition(b"\0")[0]


def _name(file: SourceFile, block: bytes, at: int) -> str:
    name, prefix = _plain_name(block), block[345:500].partition(b"\0")[0]
    if prefix:
        if block[257:265] == b"ustar  \0":
            raise UnsupportedData(  # programs differ in what they make of it
                say("{path} was written by GNU tar with more times than that of the last change", path=file.path),
                why=say("the header at byte {at} has them where other archives have a part of the name", at=at),
                fix=(say("write the archive as a whole: tar without -g and -G"),),
            )
        if block[257:263] != b"ustar\0":
            raise damaged(file.path, f"the header at byte {at} has a name prefix, but is not ustar")
        name = prefix + b"/" + name
    return _text(file, name, at)


def _text(file: SourceFile, name: bytes, at: int) -> str:
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is None or "\n" in text or "\0" in text:
        raise UnsupportedData(
            say("{path} has a file name that is not text", path=file.path),
            why=say("the header at byte {at} has the name {name!r}", at=at, name=name[:100]),
            fix=(say("write the archive with names in UTF-8, without line breaks"),),
        )
    return text


def _read_extended(file: SourceFile, kind: bytes, data: int, size: int, at: int, pending: _Pending) -> None:
    """Read a header that says something about the next file, or about all of them."""
    if size > _MOST_EXTENDED:
        raise damaged(
            file.path,
            f"the extended header at byte {at} claims {format_size(size)}; at most "
            f"{format_size(_MOST_EXTENDED)} are read",
        )
    text = file.read_at(data, size)
    if kind == b"g":
        records = _records(file, text, at)
        if not {b"path", b"linkpath", b"size"}.isdisjoint(records) or any(
            key.startswith(b"GNU.sparse.") for key in records
        ):
            raise damaged(file.path, f"the global header at byte {at} sets the name or size of every file")
        return
    kind = b"x" if kind in _PAX else kind
    if kind in pending.headers:
        raise damaged(file.path, f"the file at byte {at} has two extended headers of the same kind")
    pending.headers += kind
    name = target = None
    if kind in b"LK":
        # Programs end it at the first zero, wherever the size says that it ends.
        text = file.read_at(data, min(_padded(size), file.size - data)).partition(b"\0")[0]
        if len(text) not in (size - 1, size):
            raise damaged(file.path, f"the long name at byte {at} does not have the length it states")
        name, target = (text, None) if kind == b"L" else (None, text)
    elif kind == b"x":
        records = _records(file, text, at)
        name, target = records.get(b"path"), records.get(b"linkpath")
        if any(key.startswith(b"GNU.sparse.") for key in records):
            raise _sparse(file, records.get(b"GNU.sparse.name", name or b"").decode("utf-8", "replace"))
        if (stated := records.get(b"size")) is not None:
            if not stated.isdigit() or len(stated) > _MOST_DIGITS:
                raise damaged(file.path, f"invalid size {stated!r} in the header at byte {at}")
            pending.size = int(stated)
        name = name.rstrip(b"/") if name is not None else None
    if name is not None:
        if pending.name is not None:
            raise damaged(file.path, f"the file at byte {at} has two long names")
        pending.name = _text(file, name, at)
    if target is not None:
        if pending.target is not None:
            raise damaged(file.path, f"the file at byte {at} has two long names of its target")
        pending.target = target


def _records(file: SourceFile, text: bytes, at: int) -> dict[bytes, bytes]:
    """The records of a PAX header, "length key=value" and a line break each: one pass, whatever the lengths claim."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(text) and text[start]:
        space = text.find(b" ", start, start + _MOST_DIGITS)
        digits = text[start : max(start, space)]
        end = start + int(digits) if digits.isdigit() else 0
        key, equals, value = text[space + 1 : end - 1].partition(b"=")
        if end <= space or end > len(text) or text[end - 1 : end] != b"\n" or not equals or not key:
            raise damaged(file.path, f"the extended header at byte {at} is not a list of records")
        records[key] = value
        start = end
    return records


def _sparse(file: SourceFile, name: str) -> UnsupportedData:
    return UnsupportedData(
        say("{name!r} in {path} is a sparse file", name=name, path=file.path),
        why=say("the archive leaves out its zeros, so its bytes are not in one piece"),
        fix=(say("write the archive without sparse files: tar without -S"),),
    )


_LINK = 250  # bytes that a link, or a file that may be its target, takes while links are resolved, without names


class Links:
    """What the links of an archive stand for. Names are compared as tarfile does; the last of several counts."""

    def __init__(self, file: SourceFile, counted: GrowingMemory) -> None:
        wanted: set[bytes] = set()
        for kind, name, _, _, target in members(file):
            if kind in LINKS:
                counted.add(_LINK + len(target) + len(name))
                wanted.add(_target_name(kind, name, target))
        # By name: (number in the archive, type, first byte, size, name of its target).
        self._named: dict[bytes, list[tuple[int, bytes, int, int, bytes]]] = {}
        for number, (kind, name, start, size, target) in enumerate(members(file)):
            if (path := os.path.normpath(name.encode())) in wanted:
                counted.add(_LINK)
                to = _target_name(kind, name, target) if kind in LINKS else b""
                self._named.setdefault(path, []).append((number, kind, start, size, to))
        self._leads: dict[int, tuple[int, int] | str | None] = {}  # what was found out, by the link's number

    def follow(self, number: int, link: Member) -> tuple[int, int] | str | None:
        """First byte and size of the file that a link stands for; None: of no file; a text: why it cannot be read."""
        kind, name, _, _, target = link
        to, passed = _target_name(kind, name, target), [number]
        if kind == _HARD and to == os.path.normpath(name.encode()) and self._before(to, number) is not None:
            return None  # tar was given a file twice
        if number in self._leads:
            return self._leads[number]
        # What is not known yet, and would be met again: a loop.
        self._leads[number] = say("its target {target!r} is a link that leads back to itself", target=_shown(target))
        while True:
            found = self._before(to, passed[-1] if kind == _HARD else sys.maxsize)
            if found is None or not to:
                leads: tuple[int, int] | str | None = say(
                    "its target {target!r} is not in the archive", target=_shown(to or target)
                )
                break
            at, kind, start, size, to = found
            if kind not in LINKS:
                leads = None if kind == DIRECTORY else (start, size)
                if kind not in (b"0", DIRECTORY):
                    leads = say("its target {target!r} is not a regular file", target=_shown(target))
                break
            if at in self._leads:
                leads = self._leads[at]
                break
            self._leads[at] = self._leads[number]
            passed.append(at)
        self._leads.update(dict.fromkeys(passed, leads))
        return leads

    def _before(self, path: bytes, number: int) -> tuple[int, bytes, int, int, bytes] | None:
        named = self._named.get(path, [])
        place = bisect_left(named, number, key=itemgetter(0))
        return named[place - 1] if place else None


def _target_name(kind: bytes, name: str, target: bytes) -> bytes:
    """The name in the archive that a link leads to; empty if that is outside of it."""
    if not target or b"\0" in target or (kind == _SYMBOLIC and target.startswith(b"/")):
        return b""
    if kind == _HARD:
        return os.path.normpath(target)
    return os.path.normpath(os.path.join(os.path.dirname(name.encode()), target))


def _shown(target: bytes) -> str:
    return target.decode("utf-8", "replace")
