"""Read HDF5 files: every dataset under its path (``group/name``), with its attributes.

Threads read contiguous data raw and decode common compression (hdf5_chunks_and_filters.py); h5py reads everything else,
in pieces. Files are never written. What is refused is listed in hdf5_types_and_vlen.py, hdf5_find_datasets.py and
hdf5_open.py.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from legroom.formats.base_reader import (
    ArraySpec,
    BaseReader,
    Description,
    Extent,
    Lookup,
    Selection,
    Slab,
    TableSpec,
    as_json,
    what_is_read,
)
from legroom.formats.file_reads_and_errors import SourceFile, absolute
from legroom.formats.fill_output_arrays import PIECE, Array, Progress, copy_raw
from legroom.formats.hdf5_chunks_and_filters import (
    ChunkedDataset,
    chunked,
    filters_of,
    memory_in_hdf5,
    read_chunks,
    require_filters,
    slabs_of,
)
from legroom.formats.hdf5_find_datasets import DatasetSearch, ExternalFiles, FoundNode, dataset_names, readable
from legroom.formats.hdf5_open import descriptor, hdf5_errors, open_hdf5, path_of, replaced_while_opened
from legroom.formats.hdf5_types_and_vlen import GlobalHeaps, StoredType, VariableLengthRows, stored_type

_MOST_ATTRIBUTE = 16 << 20  # a larger attribute is described, not read


@dataclass(frozen=True, slots=True)
class _Entry:
    """The dataset behind one array of the description."""

    dataset: Any
    stored: StoredType
    rows: VariableLengthRows | None = None
    source_memory: int = 0  # bytes that HDF5 needs for the sources of a virtual dataset


class Hdf5Reader(BaseReader):
    """An HDF5 file."""

    _accounts_memory = True

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        # Absolute, so that the working directory may change while it is open.
        self._file = open_hdf5(absolute(path), on_demand=selection.keys is not None)
        self._linked: dict[int, Any] = {}  # an object of each file that a link led into
        self._raw_files: dict[Path, SourceFile] = {}
        self._entries: dict[str, _Entry] = {}
        self._chunks: dict[str, ChunkedDataset | None] = {}

    def _library_errors(self, name: str | None) -> AbstractContextManager[None]:
        return hdf5_errors(self.path, what_is_read(name))

    # Describing.

    def _describe(self) -> Description:
        import h5py

        items: list[ArraySpec] = []
        attributes = self._attributes(self._file)
        lookups: dict[Lookup, None] = {}
        with ExternalFiles(self.path) as external:
            for found in DatasetSearch(self.path, self.selection, external)(self._file):
                if isinstance(found.node, h5py.Group):
                    if self.selection.takes(found.name):
                        own = self._attributes(found.node)
                        attributes.update({found.name + "/" + name: value for name, value in own.items()})
                        self._record(found, lookups)
                    continue
                specs = self._specs(found, external, lookups)
                if specs:
                    self._record(found, lookups)
                items += specs
        names = [item.name for item in items]
        self.selection.check(names, dataset_names(self._file) if self.selection.keys else (), self.path)
        founds = {lookup.found for lookup in lookups if lookup.found is not None}
        others = sorted(path for path in founds if not _same_file(path, self.path))
        return Description("hdf5", tuple(items), attributes, (self.path, *others), tuple(lookups))

    def _record(self, found: FoundNode, lookups: dict[Lookup, None]) -> None:
        """Record how a dataset or group was reached through other files."""
        if found.through:
            from h5py import h5o

            lookups.update(dict.fromkeys(found.through))
            self._linked.setdefault(h5o.get_info(found.node.id).fileno, found.node)

    def _specs(self, found: FoundNode, external: ExternalFiles, lookups: dict[Lookup, None]) -> list[ArraySpec]:
        """One array for a dataset, two for one of variable length, none if it is not selected."""
        wanted = self.selection.takes(found.name)
        parts = (found.name + "/offsets", found.name + "/values")
        if not wanted and not any(self.selection.takes(part) for part in parts):
            return []
        dataset, name = found.node, found.name
        with hdf5_errors(self.path, repr(name)):
            stored = stored_type(dataset, name, self.path)
            require_filters(filters_of(dataset.id.get_create_plist()), name, self.path)
            notes = {**self._attributes(dataset), **stored.notes}
            shape = (0,) if dataset.shape is None else dataset.shape
        if not stored.variable and not wanted:
            return []
        lookups.update(dict.fromkeys(external.behind_dataset(dataset, name)))
        source_memory = external.memory_behind(dataset)
        if not stored.variable:
            self._entries[name] = _Entry(dataset, stored, source_memory=source_memory)
            return [ArraySpec(name, shape + stored.inner, stored.dtype, notes, meaning=stored.meaning)]
        path = path_of(dataset.file, self.path)
        rows = VariableLengthRows(dataset, stored, self._raw_file(dataset), path, name, self.memory, source_memory)
        if len(shape) != 1:
            notes["ragged_shape"] = list(shape)
        entry = _Entry(dataset, stored, rows)
        sizes = {parts[0]: (len(rows.offsets), np.dtype(np.int64)), parts[1]: (rows.total, stored.dtype)}
        self._entries.update(dict.fromkeys(parts, entry))
        return [
            ArraySpec(part, (length,), dtype, notes, ragged=name, text=stored.text, meaning=stored.meaning)
            for part, (length, dtype) in sizes.items()
            if self.selection.takes(part)
        ]

    def _attributes(self, node: Any) -> dict[str, Any]:
        import h5py

        with hdf5_errors(self.path, f"the attributes of {node.name!r}"):
            kinds = {name: node.attrs.get_id(name) for name in node.attrs}
            header = h5py.h5o.get_info(node.id).addr
            file = self._raw_file(node)
        dtypes = {name: _numpy_type(kind) for name, kind in kinds.items()}
        if file is not None and any(dtype is not None and dtype.hasobject for dtype in dtypes.values()):
            GlobalHeaps(file, node.file.userblock_size, self.path).check_attributes(header)
        with hdf5_errors(self.path, f"the attributes of {node.name!r}"):
            return {readable(name): _attribute(node, name, kind, dtypes[name]) for name, kind in kinds.items()}

    # Reading.

    def _extent(self, spec: ArraySpec) -> Extent | None:
        entry = self._entries[spec.name]
        dataset, stored = entry.dataset, entry.stored
        if entry.rows is not None or stored.file_dtype != stored.dtype or dataset.shape is None:
            return None
        with hdf5_errors(self.path, repr(spec.name)):
            offset = dataset.id.get_offset()
            whole = dataset.id.get_storage_size() == spec.nbytes
        if offset is None or not whole or dataset.external or dataset.chunks is not None:
            return None
        file = self._raw_file(dataset)
        if file is None:
            return None
        file.require(offset, spec.nbytes)
        return Extent(file.path, offset, spec.nbytes)

    def _slabs(self, spec: ArraySpec) -> list[Slab] | None:
        entry = self._entries[spec.name]
        if entry.rows is not None or entry.stored.file_dtype is None or entry.dataset.shape in (None, ()):
            return None
        file, chunks = self._raw_file(entry.dataset), self._chunked(spec.name)
        if chunks is None or file is None:
            return None
        return slabs_of(chunks, file, entry.stored.file_dtype, spec)

    def _chunked(self, name: str) -> ChunkedDataset | None:
        if name not in self._chunks:
            with hdf5_errors(self.path, repr(name)):
                dataset = self._entries[name].dataset
                self._chunks[name] = chunked(dataset, path_of(dataset.file, self.path), self.memory)
        return self._chunks[name]

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        entry = self._entries[spec.name]
        if entry.rows is not None:
            return 0 if spec.name.endswith("/offsets") else entry.rows.decoding
        assert isinstance(spec, ArraySpec)
        if spec.nbytes == 0 or self._extent(spec) is not None:
            return 0
        inner = prod(spec.shape[len(entry.dataset.shape or ()) :]) * spec.dtype.itemsize
        chunk = prod(entry.dataset.chunks or ()) * inner if entry.dataset.chunks else 0
        chunks = self._chunked(spec.name)
        if chunks is not None and self._raw_file(entry.dataset) is not None and entry.stored.file_dtype is not None:
            return chunks.decoding(chunk)
        return 2 * PIECE + memory_in_hdf5(entry.dataset) + entry.source_memory

    def _read(self, spec: ArraySpec, out: Array, progress: Progress) -> None:
        entry = self._entries[spec.name]
        if entry.rows is not None:
            if spec.name.endswith("/offsets"):
                out[...] = entry.rows.offsets
                progress(out.nbytes)
            else:
                entry.rows.read_values(out, progress)
            return
        if out.nbytes == 0:
            progress(0)
            return
        extent = self._extent(spec)
        file = self._raw_file(entry.dataset)
        if extent is not None and file is not None:
            copy_raw(file, extent.offset, out, progress)
            return
        chunks = self._chunked(spec.name)
        if chunks is not None and file is not None and entry.stored.file_dtype is not None:
            read_chunks(chunks, file, entry.stored.file_dtype, out, progress)
        else:
            with self.memory.take(self._decoding(spec), self._label(spec)):
                self._read_slabs(entry, spec.name, out, progress)

    def _read_slabs(self, entry: _Entry, name: str, out: Array, progress: Progress) -> None:
        """Read through HDF5 some megabytes at a time, cut between chunks so that none is decoded twice."""
        from h5py import h5s

        dataset, kind = entry.dataset, entry.stored.memory_type
        shape = dataset.shape
        with hdf5_errors(self.path, repr(name)):
            if shape == ():
                dataset.id.read(h5s.ALL, h5s.ALL, out, kind)
                progress(out.nbytes)
                return
            step = max(1, 2 * PIECE // max(1, out.nbytes // shape[0]))
            if dataset.chunks is not None:
                step = -(-step // dataset.chunks[0]) * dataset.chunks[0]
            for start in range(0, shape[0], step):
                part = out[start : start + step]
                size = (len(part), *shape[1:])
                space = dataset.id.get_space()
                space.select_hyperslab((start,) + (0,) * (len(shape) - 1), size)
                dataset.id.read(h5s.create_simple(size), space, part, kind)
                progress(part.nbytes)

    def _raw_file(self, dataset: Any) -> SourceFile | None:
        """The file that holds a dataset, for reading without HDF5; None if HDF5 splits or hides it."""
        if dataset.file.driver not in ("sec2", "windows", "fileobj"):
            return None
        path = path_of(dataset.file, self.path)
        if path not in self._raw_files:
            self._raw_files[path] = file = SourceFile(path)
            theirs = descriptor(dataset.file)
            if theirs is not None and not os.path.samestat(os.fstat(file.fileno()), os.fstat(theirs)):
                raise replaced_while_opened(file.path)
        return self._raw_files[path]

    def descriptors(self) -> list[int]:
        """File descriptors of the file, of files behind links, and of files read without HDF5."""
        files = [self._file, *(node.file for node in self._linked.values())]
        theirs = [fd for file in files if (fd := descriptor(file)) is not None]
        return [*theirs, *(file.fileno() for file in self._raw_files.values())]

    def _close(self) -> None:
        for file in self._raw_files.values():
            file.close()
        self._entries.clear()
        self._linked.clear()
        self._chunks.clear()
        self._file.close()


def _numpy_type(kind: Any) -> np.dtype[Any] | None:
    """The attribute's dtype, or None if numpy has none (times, floats of other machines)."""
    try:
        dtype: np.dtype[Any] = kind.dtype
    except (TypeError, ValueError):
        return None
    return dtype


def _attribute(node: Any, name: str | bytes, kind: Any, dtype: np.dtype[Any] | None) -> Any:
    from h5py import check_string_dtype

    # netCDF and MATLAB store references in attributes; they have no meaning outside the file.
    if dtype is None or (dtype.hasobject and check_string_dtype(dtype) is None):
        return {"omitted": str(dtype or "unknown type"), "shape": list(kind.shape or ())}
    if prod(kind.shape or ()) * dtype.itemsize > _MOST_ATTRIBUTE:
        return {"omitted": str(dtype), "shape": list(kind.shape or ())}
    return as_json(node.attrs[name])


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
