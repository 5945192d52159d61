"""Token files: flat numbers of one type (nanoGPT), and llm.c's files, which have a header.

A flat file says nothing about itself: the caller gives the dtype, and a file that is recognizably something else (CSV,
JSON, text, a compressed file) is refused. Tokens may look like anything by chance, so a mark of two bytes is not
enough: a gzip header has a third one, a pickle is followed through its first instructions. Other types are in the table
of unsupported_file_types.py.

The header of llm.c has 256 little-endian int32: a magic number, a version and the number of tokens.
"""

from __future__ import annotations

import json
import pickletools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import UsageError
from legroom.formats.base_reader import ArraySpec, Description, Extent, FileReader, Selection, native_dtype
from legroom.formats.detect import dtype_name
from legroom.formats.file_reads_and_errors import SourceFile, damaged
from legroom.formats.fill_output_arrays import Progress, copy_raw, fill_in_order, sequential
from legroom.formats.unsupported_file_types import Unsupported, never_tokens, unsupported_type
from legroom.messages import say

_LLM_C_OTHER = (20240326, 20240327, 20240522)  # model weights, debug state, evaluation data
_LOOK = 4096  # bytes at the start of a flat file in which other formats are recognized
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_LEAST_OPCODES = 8  # of a pickle; fewer may be chance
_LINE = 1 << 20  # of text in a pickle
_BOM = b"\xef\xbb\xbf"  # at the start of text that Windows programs write
_LINES = 20  # of text, in which columns are counted


def refused_as_tokens(file: SourceFile, dtype: str) -> Unsupported | None:
    """What a file is that was given as flat tokens of this type, if it is recognizably something else.

    Text is not tokens, unless they are its bytes.
    """
    head = file.read_at(0, min(_LOOK, file.size))
    if (found := never_tokens(file)) is not None:
        return found
    if len(head) >= 8 and int.from_bytes(head[:4], "little") in _LLM_C_OTHER:
        return _looks_like(say("a file of llm.c that holds no tokens"), dtype)
    if _is_pickle(file):
        return _looks_like("pickle", dtype)
    if np.dtype(dtype).itemsize > 1 and _is_text(head):
        text = text_format(file)
        fix = text.fix if text is not None else ()
        return unsupported_type(file) or replace(_looks_like(say("text"), dtype), fix=fix)
    return None


def _looks_like(other: str, dtype: str) -> Unsupported:
    why = say("dtype={dtype!r} was given, but the file looks like {other}", dtype=dtype_name(dtype), other=other)
    return Unsupported(why, (), converts=True)


def text_format(file: SourceFile) -> Unsupported | None:
    """CSV, JSON, JSON Lines or other text; None if the file is not text."""
    head = file.read_at(0, min(_LOOK, file.size))
    if not _is_text(head):
        return None
    lines = head.removeprefix(_BOM).decode("utf-8", "replace").splitlines()
    if file.size > len(head) and len(lines) > 1:
        lines = lines[:-1]  # it may be cut
    lines = [line for line in lines if line.strip()]
    first = lines[0].strip() if lines else ""
    if first.startswith("[") or (first.startswith("{") and not _is_json(first)):
        return _text(
            say("it is a JSON file, and JSON is not read"),
            _parquet(file.path, "json, pyarrow, pyarrow.parquet", "pyarrow.Table.from_pylist(json.load(open({path})))"),
        )
    if first.startswith("{"):
        return _text(
            say("it is a JSON Lines file, and JSON is not read"),
            _parquet(file.path, "pyarrow.json, pyarrow.parquet", "pyarrow.json.read_json({path})"),
        )
    delimiter = _delimiter(lines)
    if delimiter is None:
        return _text(
            say("it is a text file, and text is not read"),
            say("write its token IDs to a file with numpy.save; for its bytes as tokens, pass dtype='uint8'"),
        )
    options = "" if delimiter == "," else f", parse_options=pyarrow.csv.ParseOptions(delimiter={delimiter!r})"
    return _text(
        say("it is a CSV file, and CSV is not read"),
        _parquet(file.path, "pyarrow.csv, pyarrow.parquet", f"pyarrow.csv.read_csv({{path}}{options})"),
    )


def _text(why: str, fix: str) -> Unsupported:
    return Unsupported(why, (fix,), converts=True)


def _parquet(path: Path, modules: str, table: str) -> str:
    read = table.format(path=repr(str(path)))
    written = repr(str(path.with_suffix(".parquet")))
    code = f"import {modules}\npyarrow.parquet.write_table({read}, {written})"
    return say("convert it to Parquet in Python:\n{code}", code=code)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _delimiter(lines: list[str]) -> str | None:
    """What separates the columns, if every line has the same number of them. Quoted text may have more."""
    plain = [line for line in lines[:_LINES] if '"' not in line]
    for delimiter in ",\t;|":
        counts = {line.count(delimiter) for line in plain}
        if len(lines) > 1 and len(counts) == 1 and 0 not in counts:
            return delimiter
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


def _is_text(head: bytes) -> bool:
    """Whether the bytes are printable UTF-8. The last character may be cut."""
    head = head.removeprefix(_BOM)
    for cut in range(4):
        try:
            text = head[: len(head) - cut].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return bool(text) and all(letter.isprintable() or letter in "\t\n\r\f" for letter in text)
    return False


NAME = "tokens"
LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic → version, dtype
_HEADER = 1024


def token_dtype(given: Any) -> str:
    """The dtype of a flat token file in one spelling: an integer, little-endian unless it says otherwise."""
    name = str(given)
    try:
        dtype = np.dtype(name.removeprefix("torch.") if name.startswith("torch.") else given)
    except (TypeError, ValueError, SyntaxError):
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
            fix=(say("omit dtype="),),
        )


class TokenReader(FileReader):
    """A flat token file, or one of llm.c: one array."""

    def __init__(self, path: Path, selection: Selection, dtype: str | None = None) -> None:
        super().__init__(path, selection)
        self._given = dtype

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
            why = say(
                "its {size} bytes are {count} tokens of {width} bytes, and {rest} more",
                size=file.size, count=file.size // stored.itemsize, width=stored.itemsize,
                rest=file.size % stored.itemsize,
            )  # fmt: skip
            error = damaged(self.path, why)
            raise type(error)(
                say("dtype={dtype!r} does not divide the size of {path}", dtype=dtype_name(given), path=self.path),
                why=error.why,
                fix=(say("pass the dtype it was written with"), *error.fix),
            )
        return 0, file.size // stored.itemsize, stored

    def _describe(self) -> Description:
        self._start, count, self._stored = self._layout(self._given)
        self.selection.choose([NAME], self.path)
        spec = ArraySpec(NAME, (count,), native_dtype(self._stored))
        return Description("llm.c" if self._start else "tokens", (spec,), {}, (self.path,))

    def _extent(self, spec: ArraySpec) -> Extent | None:
        return Extent(self.path, self._start, spec.nbytes) if self._stored == spec.dtype else None

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        if self._stored == spec.dtype:
            copy_raw(self._file, self._start, out, progress)
        else:
            fill_in_order(sequential(self._file, self._start), out, self._stored, False, progress)


def is_llm_c(file: SourceFile) -> bool:
    """Whether the file starts as a token file of llm.c, even if it is cut off there."""
    head = file.read_at(0, min(4, file.size))
    return any(magic.to_bytes(4, "little").startswith(head) for magic in LLM_C)


def _llm_c_header(file: SourceFile) -> tuple[np.dtype[Any], int]:
    if file.size < _HEADER:
        raise damaged(
            file.path, f"it starts as a token file of llm.c, but ends within its header: {file.size} of {_HEADER} bytes"
        )
    magic, version, count = (int(number) for number in np.frombuffer(file.read_at(0, 12), "<i4"))
    known, kind = LLM_C[magic]
    stored = np.dtype(kind)
    if version != known:
        raise damaged(
            file.path, f"it starts as a token file of llm.c of version {version}; version {known} is supported"
        )
    if _HEADER + count * stored.itemsize != file.size or count < 0:
        raise damaged(
            file.path,
            f"its header states {count} tokens of {stored.itemsize} bytes, but {file.size - _HEADER} bytes follow it",
        )
    return stored, count
