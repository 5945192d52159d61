"""HDF5 types as numpy dtypes; strings and sequences of variable length as one array of offsets and one of values.

Supports integers, floats, booleans, enumerations, complex numbers, fixed strings, records and arrays of them, in any
byte order, and strings and sequences of variable length. Refuses references, opaque bytes, times, and variable length
inside records.

Each element of variable length is a reference (length, address, index) into a global heap of the file. Where the
references can be read raw, their lengths are known without reading the heap, and threads copy the rows from it. In
all other cases (compact and virtual datasets, uncommon filters) h5py reads the rows, a few megabytes at a time.

HDF5 trusts the sizes in a heap. A wrong bit, or a page of zeros after an interrupted download, makes it loop forever or
crash. So heaps are parsed here with every number checked, and verified before HDF5 reads string attributes from them.
Not verified: attributes stored outside their object's header, as very many or very large ones are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import DamagedSource, UnsupportedData
from legroom.formats.base_reader import native_dtype
from legroom.formats.decoding_memory_budget import UNLIMITED, DecodingMemory
from legroom.formats.file_reads_and_errors import SourceFile, damaged
from legroom.formats.fill_output_arrays import (
    PIECE,
    Array,
    DType,
    Progress,
    bytes_of,
    copy_raw,
    in_parallel,
    no_progress,
)
from legroom.formats.hdf5_chunks_and_filters import ChunkedDataset, chunked, has_fill_value, read_chunks
from legroom.formats.hdf5_open import hdf5_errors
from legroom.messages import say
from legroom.units import format_size


@dataclass(frozen=True, slots=True)
class StoredType:
    """How a dataset stores its elements, and which dtype they get in memory."""

    dtype: DType  # of one element in memory; for variable length, of one value
    inner: tuple[int, ...]  # axes that belong to the element (HDF5 array types)
    file_dtype: DType | None  # a numpy dtype of the file's bytes, if there is one
    memory_type: Any  # the h5py type to read with
    notes: Mapping[str, Any] = field(default_factory=dict)
    meaning: Mapping[str, Any] = field(default_factory=dict)  # also of enumerations within records
    variable: bool = False  # strings or sequences of variable length
    text: bool = False


def stored_type(dataset: Any, name: str, path: Path) -> StoredType:
    """How that dataset is stored; UnsupportedData if it cannot be an array."""
    from h5py import check_string_dtype, check_vlen_dtype, h5t

    kind = dataset.id.get_type()
    try:
        dtype = kind.dtype
    except TypeError as problem:
        raise _unsupported(name, path, str(problem)) from problem
    string = check_string_dtype(dtype)
    if string is not None and string.length is None:
        return StoredType(np.dtype(np.uint8), (), np.dtype(np.uint8), None, variable=True, text=True)
    base = check_vlen_dtype(dtype)
    if base is not None:
        return _sequence(kind, base, name, path)
    _refuse_parts(dtype, name, path)
    element, inner = dtype.subdtype or (dtype, ())
    memory_type = _memory_type(kind, dtype)
    raw = kind == h5t.py_create(dtype, logical=True)
    if not raw:
        try:
            h5t.find(kind, memory_type)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise _unsupported(name, path, say("HDF5 cannot convert its type to a numpy type")) from problem
    names = _enums(dtype)
    meaning = {"hdf5_enum": names} if names else {}
    notes = {} if element.names is not None else meaning
    return StoredType(native_dtype(element), inner, element if raw else None, memory_type, notes, meaning)


def _sequence(kind: Any, base: DType, name: str, path: Path) -> StoredType:
    from h5py import h5t

    if not isinstance(base, np.dtype) or base.hasobject:
        raise _unsupported(name, path, say("its elements are nested sequences of variable length"))
    _refuse_parts(base, name, path)
    if base.subdtype is not None:
        raise _unsupported(name, path, say("its elements are sequences of arrays"))
    raw = kind.get_super() == h5t.py_create(base, logical=True)
    names = _enums(base)
    meaning = {"hdf5_enum": names} if names else {}
    notes = {} if base.names is not None else meaning
    return StoredType(native_dtype(base), (), base if raw else None, None, notes, meaning, variable=True)


def _memory_type(kind: Any, dtype: DType) -> Any:
    """The type to request from HDF5: the file's, in native byte order and with numpy's string padding."""
    from h5py import h5t

    if isinstance(kind, h5t.TypeStringID):
        same = kind.copy()
        same.set_strpad(h5t.STR_NULLPAD)
        return same
    if isinstance(kind, h5t.TypeBitfieldID):
        return {1: h5t.NATIVE_B8, 2: h5t.NATIVE_B16, 4: h5t.NATIVE_B32, 8: h5t.NATIVE_B64}[dtype.itemsize]
    return h5t.py_create(dtype.newbyteorder("="), logical=True)


def _enums(dtype: DType) -> dict[str, Any]:
    """The names of an enumeration's numbers; of a record, those of each field that has some."""
    from h5py import check_enum_dtype

    if (own := check_enum_dtype(dtype)) is not None:
        return {str(name): int(number) for name, number in own.items()}
    if dtype.subdtype is not None:
        return _enums(dtype.subdtype[0])
    fields: Mapping[str, Any] = dtype.fields or {}
    return {name: found for name in dtype.names or () if (found := _enums(fields[name][0]))}


def _refuse_parts(dtype: DType, name: str, path: Path) -> None:
    """Refuse references, opaque bytes and variable length at any depth."""
    from h5py import check_ref_dtype

    if dtype.subdtype is not None:
        _refuse_parts(dtype.subdtype[0], name, path)
    elif dtype.names is not None and dtype.fields is not None:
        for part in dtype.names:
            _refuse_parts(dtype.fields[part][0], name + "." + part, path)
    elif check_ref_dtype(dtype) is not None:
        raise _unsupported(name, path, say("it holds references to other parts of the file"))
    elif dtype.kind == "V":
        raise _unsupported(name, path, say("it holds opaque bytes"))
    elif dtype.hasobject:
        raise _unsupported(name, path, say("it holds fields of variable length"))


def _unsupported(name: str, path: Path, why: str) -> UnsupportedData:
    return UnsupportedData(
        say("cannot load {name!r} of {path} as an array", name=name, path=path),
        why=why,
        fix=(say("load only what you need: keys=[…]"),),
    )


_REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])
_LENGTHS = 16  # bytes per row: its length and its offset
_ORDER = 56  # bytes per row to sort the rows by heap: indices, addresses, order, cumulative sizes
_HEAP_SIGNATURE = b"GCOL"
_HEAP_HEADER = 16  # bytes, of a heap and of each object in it
_FIRST_READ = 4096  # the size of a heap unless an object is larger
_CONTINUATION = 0x10
_MOST_BLOCKS = 1000
HeapObjects = dict[int, tuple[int, int]]  # index of an object → its offset in the heap, its length


class VariableLengthRows:
    """The rows of one dataset of variable length."""

    def __init__(
        self,
        dataset: Any,
        stored: StoredType,
        file: SourceFile | None,
        path: Path,
        name: str,
        memory: DecodingMemory = UNLIMITED,
        source_memory: int = 0,  # bytes that HDF5 needs for the sources of a virtual dataset
    ) -> None:
        self._dataset = dataset
        self._source_memory = source_memory
        self._memory = memory
        self._stored = stored
        self._file = file
        self._name = name
        self._path = path
        self._shape = (0,) if dataset.shape is None else dataset.shape  # None: a dataset with a null dataspace
        # Read here, once: threads must not call h5py.
        self._heaps = GlobalHeaps(file, dataset.file.userblock_size, self._path) if file is not None else None
        references = self._references()
        if references is not None and stored.text and self._begins_with_zeros(references):
            references = None
        if references is None and stored.file_dtype != stored.dtype:
            # h5py returns the rows' bytes as stored in the file and calls them native.
            raise UnsupportedData(
                say("the rows of {name!r} of {path} cannot be read", name=name, path=self._path),
                why=say("they are not in native byte order, and only h5py can read their layout"),
                fix=(say("rewrite it in native byte order"), say("load only what you need: keys=[…]")),
            )
        with memory.take(_LENGTHS * prod(self._shape) + source_memory, self._label()):
            lengths = references["length"].astype(np.int64) if references is not None else self._measured()
            self._raw = references is not None
            self._longest = int(lengths.max(initial=0)) * stored.dtype.itemsize
            self.offsets = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=self.offsets[1:])

    @property
    def total(self) -> int:
        """Number of values in all rows."""
        return int(self.offsets[-1])

    @property
    def decoding(self) -> int:
        """Bytes of memory that reading the values needs: references, their order, the largest heap."""
        count = prod(self._shape) if self._raw else 0
        return (_REFERENCE.itemsize + _ORDER) * count + self._heap + self._source_memory

    @property
    def _heap(self) -> int:
        return self._longest + PIECE  # a heap is a little larger than its largest row

    def _label(self) -> str:
        return say("{name!r} of {path}", name=self._name, path=self._path)

    def read_values(self, out: Array, progress: Progress) -> None:
        """Read all rows, one after the other."""
        references = self._references() if self._raw else None
        if references is None:
            with self._memory.take(self.decoding, self._label()):
                self._read_through_hdf5(out, progress)
        else:
            self._read_heap(references, out, progress)

    # Reading the heaps without HDF5.

    def _references(self) -> np.ndarray[Any, Any] | None:
        """The reference of every element, or None if they cannot be read raw."""
        file = self._file
        if file is None or self._stored.file_dtype is None or self._dataset.shape is None:
            return None
        with hdf5_errors(self._path, repr(self._name)):
            offset, chunks = self._storage()
            if offset is None and chunks is None:
                return None
            table = self._allocate_references()
            if offset is not None and self._dataset.id.get_storage_size() != table.nbytes:
                offset = None
        if offset is not None:
            copy_raw(file, offset, table, no_progress)
        elif chunks is not None:
            read_chunks(chunks, file, _REFERENCE, table, no_progress)
        else:
            return None
        table = table.reshape(-1)
        if int(table["length"].max(initial=0)) * self._stored.dtype.itemsize > file.size:
            raise damaged(self._path, f"a row of {self._name!r} is longer than the file")
        return table

    def _allocate_references(self) -> np.ndarray[Any, Any]:
        self._memory.require((_REFERENCE.itemsize + _LENGTHS) * prod(self._shape), self._label())
        try:
            table = self._memory.array(self._shape, _REFERENCE, self._label())
            table[...] = np.zeros((), _REFERENCE)
            return table
        except (MemoryError, ValueError) as problem:
            raise UnsupportedData(
                say("{name!r} of {path} has too many rows", name=self._name, path=self._path),
                why=say(
                    "the references to {rows} rows alone take {size}",
                    rows=prod(self._shape),
                    size=format_size(prod(self._shape) * _REFERENCE.itemsize),
                ),
                fix=(say("check the file"), say("load only what you need: keys=[…]")),
            ) from problem

    def _begins_with_zeros(self, references: np.ndarray[Any, Any]) -> bool:
        """Whether the first text holds a zero byte, where HDF5 ends it. Some programs store it with each text."""
        filled = np.flatnonzero(references["length"])[:1]
        if not len(filled):
            return False
        (length, address, index), heaps = references[filled[0]].tolist(), self._heaps
        assert heaps is not None  # references exist only with a file
        heap, objects = heaps.read(address)
        first, size = objects.get(index, (0, 0))
        return b"\0" in heap[first : first + min(length, size)]

    def _refuse_zeros(self, text: memoryview) -> None:
        """Refuse a zero byte in the texts: HDF5 ends a text there, and the rows' lengths count it."""
        for start in range(0, len(text), PIECE):
            found = bytes(text[start : start + PIECE]).find(b"\0")
            if found >= 0:
                row = int(np.searchsorted(self.offsets, start + found, "right")) - 1
                raise damaged(self._path, f"the text in row {row} of {self._name!r} has a zero byte")

    def _storage(self) -> tuple[int | None, ChunkedDataset | None]:
        """Where the references are, contiguous or chunked; neither if h5py must read the rows."""
        dataset = self._dataset
        indirect = dataset.is_virtual or dataset.external or has_fill_value(dataset)
        if indirect or dataset.file.id.get_create_plist().get_sizes() != (8, 8):
            return None, None
        return dataset.id.get_offset(), chunked(dataset, self._path, self._memory)

    def _read_heap(self, references: np.ndarray[Any, Any], out: Array, progress: Progress) -> None:
        width = self._stored.dtype.itemsize
        self._memory.require(_ORDER * len(references) + self._heap, self._label())
        target = bytes_of(out)
        filled = np.flatnonzero(references["length"])
        order = filled[np.argsort(references["address"][filled], kind="stable")]
        in_parallel(
            (partial(self._copy_rows, references, rows, target, width) for rows in self._tasks(references, order)),
            progress,
        )
        if self._stored.text:
            self._refuse_zeros(target)
        if self._stored.file_dtype is not None and self._stored.file_dtype != self._stored.dtype:
            step = max(1, PIECE // width)
            for start in range(0, len(out), step):  # in pieces: numpy makes a copy to swap bytes in place
                part = out[start : start + step]
                part[...] = part.view(self._stored.file_dtype)

    def _tasks(self, references: np.ndarray[Any, Any], order: Array) -> Iterator[Array]:
        """Rows sorted by heap, cut between heaps into tasks of some megabytes."""
        if not len(order):
            return
        addresses = references["address"][order]
        cuts = np.flatnonzero(addresses[1:] != addresses[:-1]) + 1
        weight = np.cumsum(references["length"][order].astype(np.int64) * self._stored.dtype.itemsize + 64)
        start = 0
        for cut in [*cuts.tolist(), len(order)]:
            if cut == len(order) or weight[cut - 1] - (weight[start - 1] if start else 0) >= PIECE // 4:
                yield order[start:cut]
                start = cut

    def _copy_rows(self, references: np.ndarray[Any, Any], rows: Array, target: memoryview, width: int) -> int:
        with self._memory.take(self._heap, self._label()):
            return self._copy(references, rows, target, width)

    def _copy(self, references: np.ndarray[Any, Any], rows: Array, target: memoryview, width: int) -> int:
        heaps = self._heaps
        assert heaps is not None  # references exist only with a file
        here, done = None, 0
        heap, objects = b"", HeapObjects()
        for row, (length, address, index) in zip(rows.tolist(), references[rows].tolist(), strict=True):
            if address != here:
                heap, objects = heaps.read(address)
                here = address
            first, size = objects.get(index, (0, -1))
            count = length * width
            if count > size:
                raise damaged(
                    self._path, f"row {row} of {self._name!r} has {count} bytes, but its heap holds {max(size, 0)}"
                )
            start = int(self.offsets[row]) * width
            target[start : start + count] = heap[first : first + count]
            done += count
        return done

    # Through h5py.

    def _measured(self) -> np.ndarray[Any, Any]:
        return np.fromiter((len(row) for row in self._rows()), np.int64)

    def _read_through_hdf5(self, out: Array, progress: Progress) -> None:
        start, reported = 0, 0
        for row in self._rows():
            values = np.frombuffer(row, np.uint8) if self._stored.text else row
            end = start + len(values)
            if end > len(out):
                break
            out[start:end] = values
            start = end
            if (start - reported) * out.itemsize >= PIECE:
                progress((start - reported) * out.itemsize)
                reported = start
        if start != len(out):
            raise damaged(self._path, say("{name!r} changed while it was read", name=self._name))
        progress((start - reported) * out.itemsize)

    def _rows(self) -> Iterator[Any]:
        """Every row, read some megabytes at a time."""
        if self._shape == ():
            yield self._block(())
            return
        start, step = 0, 64
        while prod(self._shape) and start < self._shape[0]:
            block = self._block(slice(start, start + step)).reshape(-1)
            start += step
            size = sum(len(row) for row in block) * self._stored.dtype.itemsize + 64 * len(block)
            step = max(1, min(4 * step, step * PIECE // size))
            yield from block

    def _block(self, part: Any) -> Any:
        with hdf5_errors(self._path, f"the rows of {self._name!r}"):
            return self._dataset[part]


class GlobalHeaps:
    """The global heaps of one file; ``base`` is the offset that its addresses count from."""

    def __init__(self, file: SourceFile, base: int, path: Path) -> None:
        self._file = file
        self._base = base
        self._path = path

    def read(self, address: int) -> tuple[bytes, HeapObjects]:
        """One heap: its bytes, and where each object is in them."""
        start = self._base + address
        self._file.require(start, _HEAP_HEADER)
        heap = self._file.read_at(start, min(_FIRST_READ, self._file.size - start))
        if heap[:4] != _HEAP_SIGNATURE or heap[4] != 1:
            raise damaged(self._path, f"there is no heap at byte {start}")
        size = int.from_bytes(heap[8:16], "little")
        self._file.require(start, size)
        if size > len(heap):
            heap = self._file.read_at(start, size)
        return heap, self._objects(heap, size, start)

    def _objects(self, heap: bytes, size: int, start: int) -> HeapObjects:
        objects: HeapObjects = {}
        at = _HEAP_HEADER
        while at + _HEAP_HEADER <= size:
            index = int.from_bytes(heap[at : at + 2], "little")
            length = int.from_bytes(heap[at + 8 : at + 16], "little")
            # Index 0 is free space, whose length counts its own header; the others are rounded up to 8.
            step = _HEAP_HEADER + (length + 7) // 8 * 8 if index else length
            if step < _HEAP_HEADER or at + step > size:
                raise damaged(
                    self._path, f"object {index} of the heap at byte {start} has an invalid length of {length} bytes"
                )
            if index:
                objects[index] = (at + _HEAP_HEADER, length)
            at += step
        return objects

    def check_attributes(self, header: int) -> None:
        """Verify every heap that the object with its header at ``header`` refers to."""
        seen: set[int] = set()
        for block in self._header_blocks(header):
            # Any number in the header that is the address of a heap counts as a reference to it.
            for shift in range(8):
                words = np.frombuffer(block[shift : shift + (len(block) - shift) // 8 * 8], "<u8")
                seen.update(words[(words > 0) & (words < self._file.size)].tolist())
        for address in seen:
            start = self._base + address
            if start + 4 <= self._file.size and self._file.read_at(start, 4) == _HEAP_SIGNATURE:
                self.read(address)

    def _header_blocks(self, address: int) -> Iterator[bytes]:
        """The blocks of an object header, as far as they can be followed; HDF5 has already read them."""
        waiting, seen = [(address, 0)], set[int]()
        while waiting and len(seen) < _MOST_BLOCKS:
            at, length = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            try:
                block, messages = self._block(at, length)
            except (DamagedSource, IndexError):
                continue
            yield block
            for kind, data in messages:
                if kind == _CONTINUATION and len(data) >= 16:
                    waiting.append((int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little")))

    def _block(self, address: int, length: int) -> tuple[bytes, list[tuple[int, bytes]]]:
        """One block and its messages; the first block of a header (length 0) contains its own length."""
        start = self._base + address
        lead = self._file.read_at(start, min(64, self._file.size - start))
        if lead[:4] == b"OHDR":
            flags = lead[5]
            at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
            width = 1 << (flags & 3)
            length = int.from_bytes(lead[at : at + width], "little")
            block = self._file.read_at(start + at + width, length)
            return block, list(_messages(block, 0, 6 if flags & 4 else 4))
        if lead[:4] == b"OCHK":
            block = self._file.read_at(start, length)
            # Only the first block states whether messages carry their order: try without, then with.
            return block, [*_messages(block, 4, 4), *_messages(block, 4, 6)]
        if length == 0:
            length = int.from_bytes(lead[8:12], "little")
            start += 16
        block = self._file.read_at(start, length)
        return block, list(_messages(block, 0, 8))


def _messages(block: bytes, at: int, head: int) -> Iterator[tuple[int, bytes]]:
    """(type, data) of each message; types take two bytes in 8-byte headers, one byte in newer ones."""
    old = head == 8
    while at + head <= len(block):
        kind = int.from_bytes(block[at : at + (2 if old else 1)], "little")
        first = at + (2 if old else 1)
        size = int.from_bytes(block[first : first + 2], "little")
        yield kind, block[at + head : at + head + size]
        at += head + size
