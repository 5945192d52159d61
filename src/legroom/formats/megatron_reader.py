"""Megatron's indexed datasets: tokens in a .bin file, and the .idx file beside it that says where sequences start.

The .idx holds, little-endian and without padding: a magic number, version, dtype code, the numbers of sequences and of
document indices, then the arrays: sequence lengths (int32, in tokens), pointers (int64, in bytes of the .bin), document
indices (int64, in sequences) and, in multimodal datasets, modes (int8). Everything is checked against the .bin.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import UnreadableSource, UnsupportedData
from legroom.formats.base_reader import ArraySpec, BaseReader, Description, Extent, Lookup, Selection
from legroom.formats.file_reads_and_errors import SourceFile, absolute, damaged, truncated
from legroom.formats.fill_output_arrays import Progress, copy_raw
from legroom.formats.token_reader import require_dtype
from legroom.messages import say

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)
_AT_ONCE = 1 << 18  # sequences that are checked at once

NDArray = np.ndarray[Any, Any]


def look_beside(index: Path) -> Lookup:
    """Search the .bin of an .idx: beside its name, else beside the file that a link leads to."""
    for name in (index, Path(os.path.realpath(index))):
        if (found := name.with_suffix(".bin")).is_file():
            return Lookup("beside", ".bin", index, absolute(found))
    return Lookup("beside", ".bin", index, None)


def with_indexes(paths: Sequence[Any]) -> list[Any]:
    """The paths, with the .idx instead of each .bin that has one: the pair is the same data under one name."""
    found = []
    for path in paths:
        index = _index_of(path) if isinstance(path, Path) else None
        if index is None:
            found.append(path)
        elif index not in paths:  # "corpus*" names both files
            found.append(index)
    return found


def _index_of(path: Path) -> Path | None:
    """The .idx of Megatron beside a .bin, if there is one."""
    if path.suffix != ".bin":
        return None
    index = path.with_suffix(".idx")
    try:
        if not index.is_file():  # a pipe would be waited for
            return None
        with index.open("rb") as file:
            return index if file.read(len(MAGIC)) == MAGIC else None
    except OSError:
        return None


class MegatronReader(BaseReader):
    """A pair of .idx and .bin. Sequences and documents are ragged: see ``_items``."""

    def __init__(self, path: Path, selection: Selection, dtype: str | None = None) -> None:
        super().__init__(path, selection)
        self._lookup = look_beside(path)
        if self._lookup.found is None:
            raise UnreadableSource(
                say("the .bin file of {path} is missing", path=path),
                why=say("it is an index of Megatron; the tokens are in a .bin file of the same name beside it"),
                fix=(say("put both files into one directory on this machine"),),
            )
        self._index = SourceFile(path)
        try:
            self._bin = SourceFile(self._lookup.found)
        except BaseException:
            self._index.close()
            raise
        try:
            self._read_header()
            require_dtype(path, self._dtype, dtype)
        except BaseException:
            self._close()
            raise

    def _read_header(self) -> None:
        head = self._index.read_at(0, _HEADER.size)
        magic, version, code, self._sequences, self._documents = _HEADER.unpack(head)
        if magic != MAGIC or version != 1:
            raise damaged(self.path, f"unknown version {version} of Megatron's index")
        if code in _FLOATS:
            raise UnsupportedData(
                say("{path} holds no tokens", path=self.path),
                why=say("its type is a floating-point number (code {code})", code=code),
                fix=(say("write the dataset with an integer type"),),
            )
        if code not in _DTYPES:
            raise damaged(self.path, f"unknown type code {code}")
        self._dtype = np.dtype(_DTYPES[code])
        lengths, pointers = 4 * self._sequences, 8 * self._sequences
        self._pointers = _HEADER.size + lengths
        self._document_at = self._pointers + pointers
        self._modes = self._document_at + 8 * self._documents
        if self._modes > self._index.size:
            raise truncated(self.path, self._modes, self._index.size)
        if self._index.size not in (self._modes, self._modes + self._sequences):
            raise damaged(
                self.path,
                f"{self._sequences} sequences and {self._documents} document indices need {self._modes} "
                f"bytes, but it has {self._index.size}",
            )

    def _describe(self) -> Description:
        self._check_sequences()
        self._check_documents()
        items = self._items()
        chosen = set(self.selection.choose([item.name for item in items], self.path))
        taken = tuple(item for item in items if item.name in chosen)
        return Description("megatron", taken, {}, (self.path, self._bin.path), (self._lookup,))

    def _items(self) -> list[ArraySpec]:
        """``sequences``: one row of tokens each. ``documents``: one row each, the lengths of its sequences."""
        long = np.dtype(np.int64)
        items = [
            ArraySpec("sequences/offsets", (self._sequences + 1,), long, ragged="sequences"),
            ArraySpec("sequences/values", (self._bin.size // self._dtype.itemsize,), self._dtype, ragged="sequences"),
            ArraySpec("documents/offsets", (self._documents,), long, ragged="documents"),
            ArraySpec("documents/values", (self._sequences,), np.dtype(np.int32), ragged="documents"),
        ]
        if self._sequences and self._index.size > self._modes:
            items.append(ArraySpec("modes", (self._sequences,), np.dtype(np.int8)))
        return items

    def _check_sequences(self) -> None:
        """Every sequence starts where the one before it ends, the first at 0, and the last ends with the .bin."""
        end = 0
        for first, lengths in self._lengths():
            if lengths.min() < 0:
                row = first + int(np.argmax(lengths < 0))
                raise damaged(self.path, f"the length of sequence {row} is negative")
            starts = end + (np.cumsum(lengths) - lengths) * self._dtype.itemsize
            pointers = self._numbers(self._pointers + 8 * first, "<i8", len(lengths))
            wrong = np.flatnonzero(pointers != starts)
            if len(wrong):
                row = int(wrong[0])
                raise damaged(
                    self.path,
                    f"sequence {first + row} starts at byte {int(pointers[row])} of the .bin file; the one "
                    f"before it ends at byte {int(starts[row])}",
                )
            end += int(lengths.sum()) * self._dtype.itemsize
            if end > self._bin.size:
                break
        if end != self._bin.size:
            raise damaged(
                self.path,
                say("its sequences end at byte {end}, but {bin} has {size} bytes: it belongs to another .bin file",
                    end=end, bin=self._bin.path, size=self._bin.size),
            )  # fmt: skip

    def _check_documents(self) -> None:
        """Document indices start at 0, never fall, and end with the number of sequences."""
        last = 0
        for first in range(0, self._documents, _AT_ONCE):
            count = min(_AT_ONCE, self._documents - first)
            indices = self._numbers(self._document_at + 8 * first, "<i8", count)
            if (first == 0 and indices[0] != 0) or indices[0] < last or (indices[1:] < indices[:-1]).any():
                raise damaged(self.path, "its document indices are not in order")
            last = int(indices[-1])
        if self._documents == 0 or last != self._sequences:
            raise damaged(self.path, f"its documents end at sequence {last}, but there are {self._sequences}")

    def _lengths(self) -> Iterator[tuple[int, NDArray]]:
        """The number of the first sequence of each piece, and the lengths in it as int64."""
        for first in range(0, self._sequences, _AT_ONCE):
            count = min(_AT_ONCE, self._sequences - first)
            yield first, self._numbers(_HEADER.size + 4 * first, "<i4", count).astype(np.int64)

    def _numbers(self, offset: int, dtype: str, count: int) -> NDArray:
        return np.frombuffer(self._index.read_at(offset, count * np.dtype(dtype).itemsize), dtype)

    def _extent(self, spec: ArraySpec) -> Extent | None:
        if spec.name == "sequences/values":
            return Extent(self._bin.path, 0, spec.nbytes)
        at = {"documents/offsets": self._document_at, "documents/values": _HEADER.size, "modes": self._modes}
        return Extent(self.path, at[spec.name], spec.nbytes) if spec.name in at else None

    def _read(self, spec: ArraySpec, out: NDArray, progress: Progress) -> None:
        extent = self._extent(spec)
        if extent is not None:
            file = self._bin if spec.name == "sequences/values" else self._index
            copy_raw(file, extent.offset, out, progress)
            return
        out[0] = 0
        progress(8)
        for first, lengths in self._lengths():
            part = out[first + 1 : first + 1 + len(lengths)]
            np.cumsum(lengths, out=part)
            part += out[first]
            progress(part.nbytes)

    def descriptors(self) -> list[int]:
        """File descriptors of the files being read."""
        return [self._index.fileno(), self._bin.fileno()]

    def _close(self) -> None:
        self._index.close()
        self._bin.close()
