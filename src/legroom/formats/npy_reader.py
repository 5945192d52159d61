"""Read .npy files (one array) and .npz files (a zip archive of .npy members).

Reads all header versions, both byte orders, C and Fortran order, records, and stored or deflated members, whose CRC-32
is verified. Refuses arrays of Python objects and encrypted members; ignores members that are not arrays. Titles of
fields are left out, and whether a record is aligned is not kept: its offsets and padding are.

The header is a Python literal. It is parsed with ``ast.literal_eval`` under a limit on its length, and type strings
are matched against those that numpy writes before numpy sees them. So no file can name an object type or run code.
"""

from __future__ import annotations

import ast
import re
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import DamagedSource, SourceError, UnsupportedData
from legroom.formats.base_reader import ArraySpec, Checksum, Description, Extent, FileReader, native_dtype
from legroom.formats.decompress_deflate import zlib_module
from legroom.formats.file_reads_and_errors import SourceFile, damaged, wrong_checksum
from legroom.formats.fill_output_arrays import PIECE, Progress, ReadNext, bytes_of, copy_raw, fill_in_order, sequential
from legroom.messages import say

NAME = "array"  # a .npy file holds one array without a name
_ENCRYPTED, _UTF8 = 0x1, 0x800
NPY_MAGIC = b"\x93NUMPY"
_MOST_HEADER = 1 << 18
_TYPE = re.compile(r"[<>|=]?(?:[?bBhHiIlLqQefdgFDG]|[biufcSUV][0-9]{1,9}|[Mm]8(?:\[[0-9A-Za-zμ/]{0,20}\])?)")


def is_raw(header: NpyHeader) -> bool:
    """Whether the file stores the bytes exactly as they are in memory."""
    fortran = header.fortran and len(header.shape) > 1
    return not fortran and header.dtype == native_dtype(header.dtype)


class NpyReader(FileReader):
    """A .npy file: one array."""

    def _describe(self) -> Description:
        self._header = read_header(self._file.read_at, self.path, NAME)
        spec = ArraySpec(NAME, self._header.shape, native_dtype(self._header.dtype))
        self.selection.choose([NAME], self.path)
        self._file.require(self._header.size, spec.nbytes)
        return Description("npy", (spec,), {}, (self.path,))

    def _extent(self, spec: ArraySpec) -> Extent | None:
        return Extent(self.path, self._header.size, spec.nbytes) if is_raw(self._header) else None

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        header = self._header
        if is_raw(header):
            copy_raw(self._file, header.size, out, progress)
        else:
            read_next = sequential(self._file, header.size)
            fill_in_order(read_next, out, header.dtype, header.fortran, progress)


@dataclass(frozen=True, slots=True)
class _Member:
    info: zipfile.ZipInfo
    header: NpyHeader
    start: int  # offset of the member's bytes in the archive


class NpzReader(FileReader):
    """An .npz file."""

    def _describe(self) -> Description:
        infos = {info.filename: info for info in member_infos(self._file) if self._is_array(info)}
        # As numpy finds them: "x" is the member x, or else x.npy.
        short = {name: name.removesuffix(".npy") for name in infos}
        names = {name if short[name] in infos else short[name]: info for name, info in infos.items()}
        self._members = {name: self._member(name, names[name]) for name in self.selection.choose([*names], self.path)}
        specs = tuple(
            ArraySpec(name, member.header.shape, native_dtype(member.header.dtype))
            for name, member in self._members.items()
        )
        for spec in specs:
            member = self._members[spec.name]
            if member.header.size + spec.nbytes != member.info.file_size:
                raise damaged(
                    self.path,
                    f"{spec.name!r} needs {member.header.size + spec.nbytes} bytes, but the archive holds "
                    f"{member.info.file_size}",
                )
        return Description("npz", specs, {}, (self.path,))

    def _is_array(self, info: zipfile.ZipInfo) -> bool:
        """Whether a member is an array: by its name, or else by its first bytes."""
        if info.filename.endswith(".npy"):
            return True
        if info.file_size < len(NPY_MAGIC) or info.flag_bits & _ENCRYPTED:
            return False
        start = bytearray(len(NPY_MAGIC))
        try:
            self._read_next(info, data_start(self._file, info), None)(memoryview(start))
        except (DamagedSource, UnsupportedData):
            return False  # it is ignored
        return start == NPY_MAGIC

    def _member(self, name: str, info: zipfile.ZipInfo) -> _Member:
        if info.flag_bits & _ENCRYPTED:
            raise UnsupportedData(
                say("{name!r} of {path} is encrypted", name=name, path=self.path),
                fix=(say("write the archive without a password"),),
            )
        start = data_start(self._file, info)
        self._file.require(start, info.compress_size)
        read = self._reader_of_head(info, start)
        return _Member(info, read_header(read, self.path, name), start)

    def _reader_of_head(self, info: zipfile.ZipInfo, start: int) -> Callable[[int, int], bytes]:
        """A function that reads from the start of a member, where its header is."""
        head = b""
        read_next = self._read_next(info, start, None)

        def read(offset: int, count: int) -> bytes:
            nonlocal head
            if offset + count > info.file_size:
                raise damaged(self.path, f"{info.filename!r} ends within its header")
            while len(head) < offset + count:
                buffer = bytearray(offset + count - len(head))
                read_next(memoryview(buffer))
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
        crc = _RunningCrc()
        if self._is_raw(member):
            crc.add(self._file.read_at(member.start, member.header.size))
            copy_raw(self._file, member.start + member.header.size, out, progress)
            crc.add(bytes_of(out))
        else:
            read_next = self._read_next(member.info, member.start, crc)
            read_next(memoryview(bytearray(member.header.size)))
            fill_in_order(read_next, out, member.header.dtype, member.header.fortran, progress)
        if crc.value != member.info.CRC:
            raise wrong_checksum(self.path, spec.name, crc.value, member.info.CRC)

    def _read_next(self, info: zipfile.ZipInfo, start: int, crc: _RunningCrc | None) -> ReadNext:
        """A function that reads the member's bytes from its start, in order."""
        stream = _open_member(self._file, info, start)

        def read_next(view: memoryview) -> None:
            done = 0
            while done < len(view):
                try:
                    part = stream(len(view) - done)
                except (ValueError, EOFError, OSError, zipfile.BadZipFile) as problem:
                    if isinstance(problem, SourceError):
                        raise
                    raise damaged(self.path, f"{info.filename!r}: {problem}") from problem
                if not part:
                    raise damaged(self.path, say("{name!r} is truncated", name=info.filename))
                view[done : done + len(part)] = part
                done += len(part)
            if crc is not None:
                crc.add(view)

        return read_next


class _RunningCrc:
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
        raise damaged(file.path, f"invalid zip archive: {problem}") from problem
    except (struct.error, UnicodeDecodeError, IndexError) as problem:  # a damaged directory
        raise damaged(file.path, f"invalid zip directory: {problem}") from problem


def data_start(file: SourceFile, info: zipfile.ZipInfo) -> int:
    """Offset of a member's bytes: after its local header, which repeats the name and has an extra field of its own."""
    local = file.read_at(info.header_offset, 30)
    if local[:4] != b"PK\x03\x04":
        raise damaged(file.path, f"there is no member at byte {info.header_offset}")
    name, extra = (int(n) for n in struct.unpack("<HH", local[26:30]))
    encoding = "utf-8" if info.flag_bits & _UTF8 else "cp437"
    if file.read_at(info.header_offset + 30, name) != info.orig_filename.encode(encoding, "replace"):
        raise damaged(file.path, f"the zip directory and the member header name {info.filename!r} differently")
    return info.header_offset + 30 + name + extra


def _open_member(file: SourceFile, info: zipfile.ZipInfo, start: int) -> Callable[[int], bytes]:
    """A function that returns the member's next bytes, at most as many as requested."""
    if info.compress_type == zipfile.ZIP_STORED:
        return _stored(file, info, start)
    if info.compress_type == zipfile.ZIP_DEFLATED:
        return _deflated(file, info, start)
    raise UnsupportedData(
        say("{name!r} of {path} cannot be decompressed", name=info.filename, path=file.path),
        why=say("its compression method is {method}; only stored and deflate are supported", method=info.compress_type),
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
    inflater = module.decompressobj(-15)
    position, end = start, start + info.compress_size
    waiting, piece = b"", 1 << 12  # a header needs little

    def read(most: int) -> bytes:
        nonlocal position, waiting, piece
        while not inflater.eof:
            if not waiting and position < end:
                count = min(piece, end - position)
                piece = min(4 * piece, 1 << 20)
                waiting = file.read_at(position, count)
                position += count
            try:
                part: bytes = inflater.decompress(waiting, min(most, PIECE))
            except module.error as problem:
                raise ValueError(str(problem)) from problem
            waiting = inflater.unconsumed_tail
            if part or (not waiting and position == end):
                return part
        return b""

    return read


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The header of a .npy array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # as in the file
    fortran: bool
    size: int  # bytes before the data


def read_header(read: Callable[[int, int], bytes], path: Path, name: str) -> NpyHeader:
    """Parse the header; ``read(offset, count)`` returns exactly the bytes requested, or raises."""
    lead = read(0, 8)
    if lead[:6] != NPY_MAGIC:
        raise damaged(path, f"{name!r} has no .npy header")
    version = lead[6]
    if version not in (1, 2, 3) or lead[7] != 0:
        raise damaged(path, f"{name!r}: unknown .npy version {version}.{lead[7]}")
    width = 2 if version == 1 else 4
    length = int.from_bytes(read(8, width), "little")
    if length > _MOST_HEADER:
        raise damaged(path, f"{name!r}: the header is too long ({length} bytes)")
    text = read(8 + width, length)
    try:
        shape, dtype, fortran = _parse(text.decode("utf-8" if version == 3 else "latin-1"))
    except _PythonObjects:
        raise UnsupportedData(
            say("{name!r} of {path} holds Python objects", name=name, path=path),
            why=say("they are stored as a pickle; reading one runs code"),
            fix=(say("save it as numbers, fixed-length strings or records: numpy.save(..., allow_pickle=False)"),),
        ) from None
    except Exception as problem:  # literal_eval also raises MemoryError, RecursionError and SystemError
        raise damaged(path, f"the header of {name!r}: {problem}") from problem
    return NpyHeader(shape, dtype, fortran, 8 + width + length)


_LONG_SHAPE = re.compile(r"'shape': \([\dL, ]*\)")  # Python 2 writes (3L, 2L)


class _PythonObjects(Exception):
    """The type is or contains Python objects."""


def _parse(text: str) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    try:
        header = ast.literal_eval(text.strip())
    except SyntaxError:
        header = ast.literal_eval(_LONG_SHAPE.sub(lambda found: found[0].replace("L", ""), text.strip()))
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise ValueError("it is not a dictionary of descr, fortran_order and shape")
    shape, fortran = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n <= sys.maxsize for n in shape):
        raise ValueError("shape is not a tuple of integers ≥ 0")
    if len(shape) > 32:
        raise ValueError(f"{len(shape)} dimensions; at most 32 are supported")
    if not isinstance(fortran, bool):
        raise ValueError("fortran_order is neither True nor False")
    _check_type(header["descr"])
    dtype = np.lib.format.descr_to_dtype(header["descr"])
    if dtype.hasobject:
        raise _PythonObjects
    return shape, dtype, fortran


def _check_type(descr: object, depth: int = 0) -> None:
    """Refuse types that numpy itself does not write, before numpy sees them."""
    if depth > 32:
        raise ValueError("types nested too deeply")
    if isinstance(descr, str):
        if descr.lstrip("<>|=").startswith("O"):
            raise _PythonObjects
        if not _TYPE.fullmatch(descr):
            raise ValueError(f"{descr!r} is not a numpy type")
    elif isinstance(descr, list):
        for field in descr:
            if not isinstance(field, tuple) or len(field) not in (2, 3):
                raise ValueError("a field is not (name, type) or (name, type, shape)")
            _check_type(field[1], depth + 1)
    elif isinstance(descr, tuple) and len(descr) == 2:
        _check_type(descr[0], depth + 1)
    else:
        raise ValueError(f"{descr!r} is not a numpy type")
