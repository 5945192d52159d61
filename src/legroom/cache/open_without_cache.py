"""Open data without the cache: read into this process (``LEGROOM_DISABLE=1``), or map the file in place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.cache import mapped_files_and_checksums
from legroom.cache.cached_arrays_and_tables import DataContents, ragged_of
from legroom.cache.lease_and_map_entry import array_view, arrays_of, tables_of
from legroom.cache.mapped_files_and_checksums import MappedFile
from legroom.cache.plan_entry_files import ArrayTarget, BuildPlan, plan_files
from legroom.cache.source_stamps_and_digests import opened_source, source_changed_error
from legroom.cache.store_free_space import decoding_memory
from legroom.cache.write_entry_files import check_source_checksum
from legroom.errors import SourceError, UnsupportedData
from legroom.formats.base_reader import ArraySpec, BaseReader, Extent
from legroom.formats.detect import open_source
from legroom.formats.file_reads_and_errors import arriving, make_room_for_files
from legroom.formats.fill_output_arrays import bytes_of
from legroom.formats.plugin_formats import PluginReader
from legroom.messages import say
from legroom.records.cache_entry import Entry
from legroom.remote.remote_object import ObjectUrl, SourcePath
from legroom.system.lazy_and_optional_imports import import_lock, lazy_import

if TYPE_CHECKING:
    from legroom.cache.download import Download

NDArray = np.ndarray[Any, Any]
_PAGE = 4096


def in_process(
    paths: Sequence[SourcePath],
    keys: tuple[str, ...] | None,
    progress: Callable[[int, int], None] | None,
    dtype: str | None = None,
) -> DataContents:
    """Read everything into arrays of this process."""
    downloads: list[Download] = []
    with _named_by_their_urls(downloads), ExitStack() as stack:
        memory = decoding_memory()
        local = [_local(path, keys, stack, downloads) for path in paths]
        make_room_for_files(len(local))
        readers = [stack.enter_context(open_source(path, keys, memory, dtype)) for path in local]
        planned = plan_files([reader.describe() for reader in readers], paths)
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            if progress is not None:
                progress(min(done, planned.nbytes), planned.nbytes)

        arrays = {target.spec.name: _read(target, readers, count) for target in planned.arrays}
        tables: dict[str, list[bytes]] = {}
        if planned.tables:
            # Readers write tables to files. Only this process needs these.
            with tempfile.TemporaryDirectory(prefix="legroom-") as folder:
                for target in planned.tables:
                    path = Path(folder, target.file)
                    readers[target.source].write_table(target.name, path, count)
                    tables.setdefault(target.part_of or target.name, []).append(path.read_bytes())
    return DataContents(_entry(paths, planned, "memory"), arrays, tables, ragged_of(specs(planned)))


@contextmanager
def _named_by_their_urls(downloads: Sequence[Download]) -> Iterator[None]:
    """Errors about the files that objects are downloaded to, in words of their URLs: the files are gone by then."""
    try:
        yield
    except SourceError as problem:
        if not downloads:
            raise
        raise lazy_import("legroom.cache.downloads_in_store").in_words_of_the_url(problem, downloads) from None


def _local(path: SourcePath, keys: tuple[str, ...] | None, stack: ExitStack, downloads: list[Download]) -> Path:
    """The path; of a remote object, a file in a temporary directory that it is downloaded to."""
    if not isinstance(path, ObjectUrl):
        return path
    with import_lock:
        from legroom.cache.download import Download
        from legroom.remote.object_store import RemoteObject

    stamp = RemoteObject(path).stat()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="legroom-")))
    download = stack.enter_context(Download(path, stamp, folder, whole=keys is None))
    downloads.append(download)
    download.start()
    stack.enter_context(arriving(download.path, download))
    return download.path


def in_place(paths: Sequence[SourcePath], keys: tuple[str, ...] | None, dtype: str | None = None) -> DataContents:
    """Map the arrays in the file itself. It must not be truncated while they are used."""
    arrays: dict[str, NDArray] = {}
    extents: dict[str, Extent] = {}
    if len(paths) != 1:
        raise _cannot(say("several files"), say("arrays in different files cannot be mapped as one"))
    if isinstance(paths[0], ObjectUrl):
        raise _cannot(str(paths[0]), say("it is in remote storage"))
    with open_source(paths[0], keys, dtype=dtype) as reader:
        planned = plan_files([reader.describe()], paths)
        if planned.tables:
            raise _cannot(planned.tables[0].spec.name, say("it is a table"))
        for target in planned.arrays:
            extent = reader.extent(target.spec.name)
            if extent is None:
                raise _not_in_one_piece(target.spec, reader, planned.kind)
            arrays[target.spec.name] = _mapped(target.spec, extent, reader)
            extents[target.spec.name] = extent
    return DataContents(_entry(paths, planned, "inplace"), arrays, {}, ragged_of(specs(planned)), extents.get)


def _not_in_one_piece(spec: ArraySpec, reader: BaseReader, kind: str) -> UnsupportedData:
    """The error for an array whose bytes do not lie in a file as they are in memory."""
    chunks = say("it is compressed, chunked, or not in native byte order")
    if kind == "zarr":  # no file of it could be mapped, however it is written
        return _cannot(spec.name, chunks)
    own = reader.own if isinstance(reader, PluginReader) else reader
    if spec.ragged or type(own)._extent is BaseReader._extent:  # of such a format no array lies in a file in one piece
        return _cannot(spec.name, say("no file has it: it is made while the file is loaded"))
    return _cannot(spec.name, chunks, say("write it contiguous, uncompressed and in native byte order"))


def _mapped(spec: ArraySpec, extent: Extent, reader: BaseReader) -> NDArray:
    if extent.nbytes == 0:
        return np.empty(spec.shape, spec.dtype)
    if extent.offset % max(1, spec.dtype.alignment):
        why = say("its byte offset {offset} is not a multiple of {alignment}",
                  offset=extent.offset, alignment=spec.dtype.alignment)  # fmt: skip
        raise _cannot(spec.name, why)
    start = extent.offset - extent.offset % _PAGE
    with opened_source(extent.path) as fd:
        if not any(os.path.samestat(os.fstat(fd), os.fstat(own)) for own in reader.descriptors()):
            raise source_changed_error(extent.path)  # its name leads to another file since its header was read
        length = extent.offset - start + extent.nbytes
        if os.fstat(fd).st_size < start + length:
            raise _cannot(spec.name, say("the file is shorter than its data"))
        mapped = MappedFile(fd, length, offset=start)
        array = array_view(mapped, spec.shape, spec.dtype, extent.offset - start)
        if extent.checksum is not None:  # read once and compare, as numpy does
            check_source_checksum(
                extent, spec.name, [(mapped_files_and_checksums.crc32()(bytes_of(array)), extent.nbytes)]
            )
        return array


def _read(target: ArrayTarget, readers: Sequence[BaseReader], count: Callable[[int], None]) -> NDArray:
    whole: NDArray = np.ndarray(target.spec.shape, target.spec.dtype)  # numpy.empty would make U0 into U1
    if len(target.pieces) == 1:
        readers[0].read_into(target.spec.name, whole, count)
        return whole
    row = 0
    for piece in target.pieces:
        part: NDArray = (
            np.empty(piece.shape, whole.dtype) if piece.shift or piece.skip else whole[row : row + piece.shape[0]]
        )
        readers[piece.source].read_into(piece.name, part, count)
        rows = piece.shape[0] - piece.skip
        if piece.shift or piece.skip:
            whole[row : row + rows] = part[piece.skip :] + piece.shift
        row += rows
    return whole


def specs(planned: BuildPlan) -> list[ArraySpec]:
    """The arrays of a plan."""
    return [target.spec for target in planned.arrays]


def _entry(paths: Sequence[SourcePath], planned: BuildPlan, backing: Any) -> Entry:
    arrays = arrays_of(specs(planned))
    tables = tables_of((target.part_of or target.name, target.spec) for target in planned.tables)
    sources = tuple(os.fspath(path) for path in paths)
    return Entry(None, sources, None, None, planned.kind, backing, planned.nbytes, arrays, tables, planned.attributes)


def _cannot(name: str, why: str, *more: str) -> UnsupportedData:
    return UnsupportedData(
        say("{name} cannot be mapped in place", name=name),
        why=why,
        fix=(say("use backing='auto' to make one shared copy"), *more),
    )
