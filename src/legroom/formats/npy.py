"""One array in a .npy file.

Covers: all versions, both byte orders, C and Fortran order, records. Does not cover: archives of several
(npz.py) and arrays of Python objects, which are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from legroom.formats.base import BaseReader
from legroom.formats.dtypes import in_memory
from legroom.formats.fill import copy_raw, fill_in_order, one_after_another
from legroom.formats.npy_header import NpyHeader, read_header
from legroom.formats.protocol import ArraySpec, Description, Extent, Progress
from legroom.formats.selection import Selection
from legroom.formats.source import SourceFile

NAME = "array"  # a .npy file has no name for the one thing it holds


def is_raw(header: NpyHeader) -> bool:
    """Whether the bytes lie in the file as they will lie in memory."""
    fortran = header.fortran and len(header.shape) > 1
    return not fortran and header.dtype == in_memory(header.dtype)


class NpyReader(BaseReader):
    """A .npy file: one array."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._file = SourceFile(path)
        try:
            self._header = read_header(self._file.read_at, path, NAME)
        except BaseException:
            self._file.close()
            raise

    def _look(self) -> Description:
        spec = ArraySpec(NAME, self._header.shape, in_memory(self._header.dtype))
        self.selection.check([NAME], [NAME], self.path)
        self._file.require(self._header.size, spec.nbytes)
        return Description("npy", (spec,), {}, (self.path,))

    def _extent(self, spec: ArraySpec) -> Extent | None:
        return Extent(self.path, self._header.size, spec.nbytes) if is_raw(self._header) else None

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        header = self._header
        if is_raw(header):
            copy_raw(self._file, header.size, out, progress)
        else:
            take = one_after_another(self._file, header.size)
            fill_in_order(take, out, header.dtype, header.fortran, progress)

    def descriptors(self) -> list[int]:
        """Of its file."""
        return [self._file.fileno()]

    def _close(self) -> None:
        self._file.close()
