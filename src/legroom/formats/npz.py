"""Several arrays in an .npz file: a zip archive of .npy members.

Covers: stored members (read raw, by threads) and deflated ones (inflated as they stream), checked against
the archive's own checksums. Does not cover: members that are no arrays, which are left out, encrypted
members and arrays of Python objects, which are refused.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import SourceError, UnsupportedData
from legroom.formats.base import BaseReader
from legroom.formats.dtypes import in_memory
from legroom.formats.fill import PIECE, Take, bytes_of, copy_raw, fill_in_order
from legroom.formats.inflate import zlib_module
from legroom.formats.npy import is_raw
from legroom.formats.npy_header import NpyHeader, read_header
from legroom.formats.protocol import ArraySpec, Checksum, Description, Extent, Progress
from legroom.formats.selection import Selection
from legroom.formats.source import SourceFile, damaged, wrong_checksum
from legroom.words import say

_ENCRYPTED, _UTF8 = 0x1, 0x800


@dataclass(frozen=True, slots=True)
class _Member:
    info: zipfile.ZipInfo
    header: NpyHeader
    start: int  # where the member's bytes begin in the archive


class NpzReader(BaseReader):
    """An .npz file."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._file = SourceFile(path)
        self._members: dict[str, _Member] = {}
        try:
            self._infos = member_infos(self._file)
        except BaseException:
            self._file.close()
            raise

    def _look(self) -> Description:
        starts = {info.filename: _data_start(self._file, info) for info in self._infos}
        names = {info.filename.removesuffix(".npy"): info for info in self._infos if _is_array(info)}
        taken = {name: info for name, info in names.items() if self.selection.takes(name)}
        self.selection.check(taken, names, self.path)
        self._members = {
            name: self._member(name, info, starts[info.filename]) for name, info in taken.items()
        }
        specs = tuple(
            ArraySpec(name, member.header.shape, in_memory(member.header.dtype))
            for name, member in self._members.items()
        )
        for spec in specs:
            member = self._members[spec.name]
            if member.header.size + spec.nbytes != member.info.file_size:
                raise damaged(
                    self.path,
                    say(
                        "{name!r} takes {needed} bytes, the archive has {has} for it",
                        name=spec.name,
                        needed=member.header.size + spec.nbytes,
                        has=member.info.file_size,
                    ),
                )
        return Description("npz", specs, {}, (self.path,))

    def _member(self, name: str, info: zipfile.ZipInfo, start: int) -> _Member:
        if info.flag_bits & _ENCRYPTED:
            raise UnsupportedData(
                say("{name!r} of {path} is encrypted", name=name, path=self.path),
                fix=(say("write the archive without a password"),),
            )
        self._file.require(start, info.compress_size)
        read = self._reader_of_head(info, start)
        return _Member(info, read_header(read, self.path, name), start)

    def _reader_of_head(self, info: zipfile.ZipInfo, start: int) -> Callable[[int, int], bytes]:
        """Random access to the beginning of a member, where its header is."""
        head = b""
        take = self._take(info, start, None)

        def read(offset: int, count: int) -> bytes:
            nonlocal head
            if offset + count > info.file_size:
                raise damaged(self.path, say("{name!r} ends within its header", name=info.filename))
            while len(head) < offset + count:
                buffer = bytearray(offset + count - len(head))
                take(memoryview(buffer))
                head += buffer
            return head[offset : offset + count]

        return read

    def _is_raw(self, member: _Member) -> bool:
        return member.info.compress_type == zipfile.ZIP_STORED and is_raw(member.header)

    def _extent(self, spec: ArraySpec) -> Extent | None:
        member = self._members[spec.name]
        if not self._is_raw(member):
            return None
        header = zlib_module().crc32(self._file.read_at(member.start, member.header.size))
        checksum = Checksum(member.info.CRC, header, member.header.size)
        return Extent(self.path, member.start + member.header.size, spec.nbytes, checksum)

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        member = self._members[spec.name]
        crc = _Checksum()
        if self._is_raw(member):
            crc.add(self._file.read_at(member.start, member.header.size))
            copy_raw(self._file, member.start + member.header.size, out, progress)
            crc.add(bytes_of(out))
        else:
            take = self._take(member.info, member.start, crc)
            take(memoryview(bytearray(member.header.size)))
            fill_in_order(take, out, member.header.dtype, member.header.fortran, progress)
        if crc.value != member.info.CRC:
            raise wrong_checksum(self.path, spec.name, crc.value, member.info.CRC)

    def _take(self, info: zipfile.ZipInfo, start: int, crc: _Checksum | None) -> Take:
        """The member's bytes from its beginning, in order."""
        stream = _open_member(self._file, info, start)

        def take(view: memoryview) -> None:
            done = 0
            while done < len(view):
                try:
                    part = stream(len(view) - done)
                except (ValueError, EOFError, OSError, zipfile.BadZipFile) as problem:
                    if isinstance(problem, SourceError):
                        raise
                    raise damaged(
                        self.path, say("{name!r}: {problem}", name=info.filename, problem=problem)
                    ) from problem
                if not part:
                    raise damaged(self.path, say("{name!r} ends too early", name=info.filename))
                view[done : done + len(part)] = part
                done += len(part)
            if crc is not None:
                crc.add(view)

        return take

    def descriptors(self) -> list[int]:
        """Of its file."""
        return [self._file.fileno()]

    def _close(self) -> None:
        self._file.close()


class _Checksum:
    """A running CRC-32."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, data: bytes | memoryview) -> None:
        self.value = zlib_module().crc32(data, self.value)


def member_infos(file: SourceFile) -> list[zipfile.ZipInfo]:
    """The archive's directory."""
    try:
        with file.as_stream() as stream, zipfile.ZipFile(stream) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError, EOFError) as problem:
        raise damaged(file.path, say("as a zip archive: {problem}", problem=problem)) from problem
    except (struct.error, UnicodeDecodeError, IndexError) as problem:  # a mangled directory
        raise damaged(file.path, say("the archive's directory: {problem}", problem=problem)) from problem


def _is_array(info: zipfile.ZipInfo) -> bool:
    return info.filename.endswith(".npy")


def _data_start(file: SourceFile, info: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: the local header repeats the name with an extra field of its own."""
    local = file.read_at(info.header_offset, 30)
    if local[:4] != b"PK\x03\x04":
        raise damaged(file.path, say("no member begins at byte {at}", at=info.header_offset))
    name, extra = (int(n) for n in struct.unpack("<HH", local[26:30]))
    encoding = "utf-8" if info.flag_bits & _UTF8 else "cp437"
    if file.read_at(info.header_offset + 30, name) != info.orig_filename.encode(encoding, "replace"):
        raise damaged(
            file.path, say("its directory and its member disagree about {name!r}", name=info.filename)
        )
    return info.header_offset + 30 + name + extra


def _open_member(file: SourceFile, info: zipfile.ZipInfo, start: int) -> Callable[[int], bytes]:
    """A function that gives the member's next bytes, at most as many as asked for."""
    if info.compress_type == zipfile.ZIP_STORED:
        return _stored(file, info, start)
    if info.compress_type == zipfile.ZIP_DEFLATED:
        return _deflated(file, info, start)
    raise UnsupportedData(
        say("{name!r} of {path} cannot be decompressed", name=info.filename, path=file.path),
        why=say("it is packed by method {method}, neither stored nor deflated", method=info.compress_type),
        fix=(say("write the archive with numpy.savez or numpy.savez_compressed"),),
    )


def _stored(file: SourceFile, info: zipfile.ZipInfo, start: int) -> Callable[[int], bytes]:
    position = start

    def read(most: int) -> bytes:
        nonlocal position
        count = min(most, start + info.compress_size - position, PIECE)
        position += count
        return file.read_at(position - count, count)

    return read


def _deflated(file: SourceFile, info: zipfile.ZipInfo, start: int) -> Callable[[int], bytes]:
    module = zlib_module()
    machine = module.decompressobj(-15)
    position, end = start, start + info.compress_size
    waiting, piece = b"", 1 << 12  # a header needs little

    def read(most: int) -> bytes:
        nonlocal position, waiting, piece
        while not machine.eof:
            if not waiting and position < end:
                count = min(piece, end - position)
                piece = min(4 * piece, 1 << 20)
                waiting = file.read_at(position, count)
                position += count
            try:
                part: bytes = machine.decompress(waiting, min(most, PIECE))
            except module.error as problem:
                raise ValueError(str(problem)) from problem
            waiting = machine.unconsumed_tail
            if part or (not waiting and position == end):
                return part
        return b""

    return read
