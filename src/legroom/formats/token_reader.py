"""Token files: flat numbers of one type (nanoGPT), and llm.c's files, which have a header.

A flat file says nothing about itself: the caller gives the dtype, and a file that is recognizably something else is
refused. The header of llm.c has 256 little-endian int32: a magic number, a version and the number of tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import UsageError
from legroom.formats.base_reader import ArraySpec, BaseReader, Description, Extent, Selection, native_dtype
from legroom.formats.file_reads_and_errors import SourceFile, damaged
from legroom.formats.fill_arrays import Progress, copy_raw, fill_in_order, sequential
from legroom.messages import say

NAME = "tokens"
LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic → version, dtype
_HEADER = 1024


def token_dtype(given: Any) -> str:
    """The dtype of a flat token file in one spelling: an integer, little-endian unless it says otherwise."""
    try:
        dtype = np.dtype(given)
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
