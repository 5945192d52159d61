"""Read safetensors files: eight bytes of length, a JSON header, raw bytes.

The format is checked strictly: known types, offsets in bounds, in order, without gap or overlap. Types narrower than a
byte are refused. bfloat16 and the 8-bit floats have no numpy type: their bits are read as uint16 and uint8. The true
type is in ``attributes["safetensors_dtype"]``.
"""

from __future__ import annotations

import json
import sys
from math import prod
from typing import Any

import numpy as np

from legroom.errors import UnsupportedData
from legroom.formats.base_reader import ArraySpec, Description, Extent, FileReader, native_dtype
from legroom.formats.file_reads_and_errors import SourceFile, damaged
from legroom.formats.fill_output_arrays import Progress, copy_raw, fill_in_order, sequential
from legroom.messages import say

MOST_HEADER = 100_000_000  # the format's own limit
_TYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip
# The types of which the bits are read, and torch's names of them.
_BITS = {
    "BF16": ("<u2", "bfloat16"), "F8_E4M3": ("u1", "float8_e4m3fn"), "F8_E5M2": ("u1", "float8_e5m2"),
    "F8_E8M0": ("u1", "float8_e8m0fnu"), "F8_E4M3FNUZ": ("u1", "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": ("u1", "float8_e5m2fnuz"),
}  # fmt: skip
_FIELDS = {"dtype", "shape", "data_offsets"}
_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")


class SafetensorsReader(FileReader):
    """A .safetensors file."""

    def _describe(self) -> Description:
        header, self._start = _read_header(self._file)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise damaged(self.path, "__metadata__ is not an object of strings")
        self._ranges = {name: self._range(name, entry) for name, entry in header.items()}
        self._check_ranges()
        specs = tuple(self._spec(name, header[name]) for name in self.selection.choose([*header], self.path))
        return Description("safetensors", specs, metadata, (self.path,))

    def _range(self, name: str, entry: object) -> tuple[int, int]:
        if not isinstance(entry, dict) or entry.keys() != _FIELDS:
            raise damaged(self.path, f"{name!r} must have exactly dtype, shape and data_offsets")
        offsets = entry["data_offsets"]
        if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise damaged(self.path, f"invalid offsets of {name!r}: {offsets}")
        return offsets[0], offsets[1]

    def _check_ranges(self) -> None:
        """In the order of their offsets, the tensors must cover everything after the header exactly once."""
        end = 0
        for name, (first, last) in sorted(self._ranges.items(), key=lambda item: item[1]):
            if first != end:
                raise damaged(self.path, f"{name!r} starts at {first}, but the previous tensor ends at {end}")
            end = last
        self._file.require(self._start, end)
        if self._start + end != self._file.size:
            extra = self._file.size - self._start - end
            raise damaged(self.path, f"{extra} bytes after the last tensor")

    def _spec(self, name: str, entry: dict[str, Any]) -> ArraySpec:
        kind, shape = entry["dtype"], entry["shape"]
        if kind in _SUB_BYTE:
            raise UnsupportedData(
                say("{name!r} of {path} has type {kind}", name=name, path=self.path, kind=kind),
                why=say("its elements are narrower than a byte"),
                fix=(say("convert it to 8 bits or more"), say("load only what you need: keys=[…]")),
            )
        text, exact = _BITS.get(kind) or (_TYPES.get(kind), "") if isinstance(kind, str) else (None, "")
        if text is None:
            raise damaged(self.path, f"{name!r} has the unknown type {kind!r}")
        if not _is_sizes(shape) or len(shape) > 32:
            raise damaged(self.path, f"invalid shape of {name!r}: {shape}")
        dtype = np.dtype(text)
        first, last = self._ranges[name]
        if prod(shape) * dtype.itemsize != last - first:
            raise damaged(
                self.path, f"{name!r} has {last - first} bytes, which does not match shape {shape} and type {kind}"
            )
        notes, meaning = ({"safetensors_dtype": kind}, {"safetensors_dtype": exact}) if exact else ({}, {})
        return ArraySpec(name, tuple(shape), native_dtype(dtype), notes, meaning=meaning)

    def _file_dtype(self, spec: ArraySpec) -> np.dtype[Any]:
        return spec.dtype.newbyteorder("<")

    def _extent(self, spec: ArraySpec) -> Extent | None:
        if sys.byteorder != "little" and self._file_dtype(spec) != spec.dtype:
            return None
        return Extent(self.path, self._start + self._ranges[spec.name][0], spec.nbytes)

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        offset = self._start + self._ranges[spec.name][0]
        if self._extent(spec) is not None:
            copy_raw(self._file, offset, out, progress)
        else:
            fill_in_order(sequential(self._file, offset), out, self._file_dtype(spec), False, progress)


def _read_header(file: SourceFile) -> tuple[dict[str, Any], int]:
    """The header as an object, and the offset of the tensors."""
    length = int.from_bytes(file.read_at(0, 8), "little")
    if length > MOST_HEADER:
        raise damaged(file.path, f"the header has {length} bytes; at most {MOST_HEADER} are allowed")
    text = file.read_at(8, length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as problem:
        raise damaged(file.path, f"its header: {problem}") from problem
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise damaged(file.path, "its header is not a JSON object")
    return header, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _is_sizes(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
