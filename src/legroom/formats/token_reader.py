"""Token files: flat numbers of one type (nanoGPT), and llm.c's files, which have a header.

A flat file says nothing about itself: the caller gives the dtype, and a file that is recognizably something else is
refused. The header of llm.c has 256 little-endian int32: a magic number, a version and the number of tokens.
"""

from __future__ import annotations

import pickletools
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import UsageError
from legroom.formats.base_reader import ArraySpec, BaseReader, Description, Extent, Selection
from legroom.formats.data_file import SourceFile, damaged
from legroom.formats.fill_arrays import Progress, copy_raw, fill_in_order, native_dtype, sequential
from legroom.messages import say

NAME = "tokens"
LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic → version, dtype
_LLM_C_OTHER = (20240326, 20240327, 20240522)  # model weights, debug state, evaluation data
_HEADER = 1024
_LOOK = 4096  # bytes at the start of a flat file in which other formats are recognized
_MAGICS = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"GGUF": "GGUF",
    b"\x89PNG\r\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"\x7fELF": "ELF",
    b"SQLite format 3": "SQLite",
    b"%PDF-": "PDF",
}
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_LEAST_OPCODES = 8  # of a pickle; fewer may be chance
_LINE = 1 << 20  # of text in a pickle


def token_dtype(given: Any) -> str:
    """The dtype of a flat token file in one spelling: an integer, little-endian unless it says otherwise."""
    try:
        dtype = np.dtype(given)
    except (TypeError, ValueError):
        dtype = np.dtype("V1")
    if dtype.kind not in "iu" or dtype.shape:
        raise UsageError(
            say("dtype={given!r} is not a type of tokens", given=given),
            why=say("tokens are integers of 1, 2, 4 or 8 bytes"),
            fix=("dtype='uint16'", say("use the dtype that the file was written with")),
        )
    return str(dtype.str if dtype.str.startswith(">") else dtype.newbyteorder("<").str)


def require_dtype(path: Path, stated: np.dtype[Any], given: str | None) -> None:
    """Refuse a dtype that differs from what the file itself states."""
    if given is not None and np.dtype(given) != stated:
        raise UsageError(
            say("dtype={given!r} is not the type of {path}", given=np.dtype(given).name, path=path),
            why=say("the file states {dtype}", dtype=stated.name),
            fix=(say("omit dtype"),),
        )


class TokenReader(BaseReader):
    """A flat token file, or one of llm.c: one array."""

    def __init__(self, path: Path, selection: Selection, dtype: str | None = None) -> None:
        super().__init__(path, selection)
        self._file = SourceFile(path)
        try:
            self._start, count, stored = self._layout(dtype)
        except BaseException:
            self._file.close()
            raise
        self._format = "llm.c" if self._start else "tokens"
        self._stored = stored
        self._spec = ArraySpec(NAME, (count,), native_dtype(stored))

    def _layout(self, given: str | None) -> tuple[int, int, np.dtype[Any]]:
        """Where the tokens start, how many there are, and their type."""
        file = self._file
        if is_llm_c(file):
            stored, count = _llm_c_header(file)
            require_dtype(self.path, stored, given)
            return _HEADER, count, stored
        assert given is not None  # detect.py
        stored = np.dtype(given)
        if file.size % stored.itemsize:
            raise damaged(
                self.path,
                say(
                    "its {size} bytes are not a whole number of {dtype} tokens of {width} bytes",
                    size=file.size, dtype=stored.name, width=stored.itemsize,
                ),
            )  # fmt: skip
        return 0, file.size // stored.itemsize, stored

    def _describe(self) -> Description:
        self.selection.check([NAME], [NAME], self.path)
        return Description(self._format, (self._spec,), {}, (self.path,))

    def _extent(self, spec: ArraySpec) -> Extent | None:
        return Extent(self.path, self._start, spec.nbytes) if self._stored == spec.dtype else None

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        if self._stored == spec.dtype:
            copy_raw(self._file, self._start, out, progress)
        else:
            fill_in_order(sequential(self._file, self._start), out, self._stored, False, progress)

    def descriptors(self) -> list[int]:
        """File descriptors of the files being read."""
        return [self._file.fileno()]

    def _close(self) -> None:
        self._file.close()


def is_llm_c(file: SourceFile) -> bool:
    """Whether the file starts as a token file of llm.c, even if it is cut off there."""
    head = file.read_at(0, min(4, file.size))
    return any(magic.to_bytes(4, "little").startswith(head) for magic in LLM_C)


def _llm_c_header(file: SourceFile) -> tuple[np.dtype[Any], int]:
    if file.size < _HEADER:
        raise damaged(
            file.path,
            say("it starts as a token file of llm.c, but ends within its header: {size} of {header} bytes",
                size=file.size, header=_HEADER),
        )  # fmt: skip
    magic, version, count = (int(number) for number in np.frombuffer(file.read_at(0, 12), "<i4"))
    known, kind = LLM_C[magic]
    stored = np.dtype(kind)
    if version != known:
        raise damaged(
            file.path,
            say("it starts as a token file of llm.c of version {version}; version {known} is supported",
                version=version, known=known),
        )  # fmt: skip
    if _HEADER + count * stored.itemsize != file.size or count < 0:
        raise damaged(
            file.path,
            say("its header states {count} tokens of {width} bytes, but {rest} bytes follow it",
                count=count, width=stored.itemsize, rest=file.size - _HEADER),
        )  # fmt: skip
    return stored, count


def other_format(file: SourceFile) -> str | None:
    """What a file is that was given as flat tokens, if it is recognizably something else."""
    head = file.read_at(0, min(_LOOK, file.size))
    for mark, name in _MAGICS.items():
        if head.startswith(mark):
            return name
    if len(head) >= 8 and int.from_bytes(head[:4], "little") in _LLM_C_OTHER:
        return say("a file of llm.c that holds no tokens")
    if head[16:20] == b"\xde\xc0\xef\xbe":
        return "LMDB"
    if _is_pickle(file):
        return "pickle"
    if _is_tar(head):
        return "tar"
    if _is_text(head):
        return say("text")
    return None


def _is_pickle(file: SourceFile) -> bool:
    """Whether it starts with instructions of a pickle. From protocol 2 on, its number comes first."""
    sure, at = False, 0
    for _ in range(_LEAST_OPCODES):
        if at >= file.size:
            return sure  # cut off
        opcode = _OPCODES.get(chr(file.read_at(at, 1)[0]))
        if opcode is None:
            return False
        if opcode.name == "STOP":
            return at == file.size - 1
        after = _after(file, at + 1, opcode)
        if after is None:
            return False
        if at == 0:  # evidence enough, unless something follows that is no instruction
            sure = opcode.name == "GLOBAL" or (opcode.name == "PROTO" and 2 <= file.read_at(0, after)[-1] <= 5)
        at = after
    return True


def _after(file: SourceFile, at: int, opcode: Any) -> int | None:
    """The position after an instruction's argument; None if that is no argument."""
    width = 0 if opcode.arg is None else opcode.arg.n
    if width >= 0:
        return min(at + width, file.size)
    if width != pickletools.UP_TO_NEWLINE:
        size = {"1": 1, "4": 4, "8": 8}[opcode.arg.name[-1]]
        return min(at + size, file.size) + int.from_bytes(file.read_at(at, min(size, file.size - at)), "little")
    for _ in range(2 if opcode.name in ("GLOBAL", "INST") else 1):
        text = file.read_at(at, min(_LINE, file.size - at))
        line, end, _ = text.partition(b"\n")
        if not end and at + len(text) < file.size:
            return None
        if opcode.name != "UNICODE" and not (line.isascii() and line.decode("ascii").isprintable()):
            return None
        at += len(line) + len(end)
    return at


def _is_tar(head: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _is_text(head: bytes) -> bool:
    """Whether the bytes are printable UTF-8. The last character may be cut."""
    for cut in range(4):
        try:
            text = head[: len(head) - cut].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return bool(text) and all(letter.isprintable() or letter in "\t\n\r\f" for letter in text)
    return False
