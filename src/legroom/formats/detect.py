"""Open a data file by its content, not by its name: recognize the format, then create its reader.

``FORMATS`` lists our own formats, one record each. Where none of them recognizes a file, the formats that other
packages have registered are asked (format_registry.py). Formats that run code when read (pickle) or need guessing (CSV)
are refused. Nothing below a directory is listed to recognize it, since it may be large.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from legroom.errors import UnknownFormat, UnreadableSource
from legroom.formats.base_reader import BaseReader, Selection
from legroom.formats.data_file import SourceFile, damaged, unreadable
from legroom.formats.decoding_memory import UNLIMITED, DecodingMemory
from legroom.formats.format_registry import Candidate, Format, PluginFormat, find_plugin
from legroom.formats.hdf5_open import signature_at
from legroom.formats.npy_reader import NPY_MAGIC
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import lazy_import

ZARR_FILES = (".zgroup", ".zarray", "zarr.json")
_NAMES_READ = 10_000  # of a directory that is refused, to suggest a pattern
_ZIP = b"PK\x03\x04", b"PK\x05\x06"
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ": ("xz", "unxz -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
_HINTS = {
    b"\x80": (phrase("it looks like a pickle file; reading one runs code"), phrase("save the arrays with numpy.savez")),
    b"FEA1": (phrase("it is Feather version 1"), phrase("rewrite it: pyarrow.feather.write_feather(table, path)")),
    b"PARE": (phrase("it is Parquet with an encrypted footer"), phrase("write it without encryption")),
    b"CDF\x01": (
        phrase("it is netCDF 3"),
        phrase("convert it to netCDF 4, which is HDF5: nccopy -k nc4 {path} out.nc"),
    ),
    b"CDF\x02": (
        phrase("it is netCDF 3"),
        phrase("convert it to netCDF 4, which is HDF5: nccopy -k nc4 {path} out.nc"),
    ),
    b"MATLAB 5": (phrase("it is a MATLAB 5 file"), phrase("save it in MATLAB with -v7.3, which is HDF5")),
}

# How our own formats are recognized.


def _starts_with(mark: bytes) -> Callable[[Candidate], bool]:
    return lambda one: one.head.startswith(mark)


def _starts_and_ends_with(mark: bytes, name: str) -> Callable[[Candidate], bool]:
    def recognizes(one: Candidate) -> bool:
        if not one.head.startswith(mark):
            return False
        tail = one.read_at(max(0, one.size - len(mark)), min(len(mark), one.size))
        if tail != mark or one.size < 3 * len(mark):
            raise damaged(
                one.path,
                say(
                    "it starts as {name} but ends with {tail!r} instead of {mark!r}: the file is truncated",
                    name=name,
                    tail=tail,
                    mark=mark,
                ),
            )
        return True

    return recognizes


def _has_member(*endings: str) -> Callable[[Candidate], bool]:
    return lambda one: any(name.endswith(endings) for name in one.members)


def _is_arrow_stream(one: Candidate) -> bool:
    """An Arrow stream has no magic number: it starts with a continuation marker and the length of a message."""
    length = int.from_bytes(one.head[4:8], "little")
    return one.head.startswith(b"\xff\xff\xff\xff") and 0 < length < 1 << 28 and length % 8 == 0


def _is_safetensors(one: Candidate) -> bool:
    return one.head[8:9] == b"{" and int.from_bytes(one.head[:8], "little") < 1 << 32


def _contains(*names: str) -> Callable[[Path], bool]:
    return lambda path: any(os.path.lexists(path / name) for name in names)


def _hf_dataset_files(path: Path) -> list[Path]:
    files: list[Path] = lazy_import("legroom.formats.hf_datasets_reader").dataset_files(path)
    return files


# Asked in this order; the first that recognizes a file reads it.
FORMATS = (
    Format(
        "npy",
        "legroom.formats.npy_reader:NpyReader",
        recognizes=_starts_with(NPY_MAGIC),
        at_offsets=True,
        endings=(".npy",),
    ),
    Format(
        "zarr",
        "legroom.formats.zarr_reader:ZarrReader",
        phrase("Zarr v2 and v3"),
        recognizes=lambda one: any(name in one.members for name in ZARR_FILES),
        recognizes_directory=_contains(*ZARR_FILES),
        endings=(".zarr",),
    ),
    Format(
        "npz",
        "legroom.formats.npy_reader:NpzReader",
        recognizes=_has_member(".npy"),
        at_offsets=True,
        endings=(".npz",),
    ),
    Format(
        "torch",
        "legroom.formats.torch_reader:TorchReader",
        phrase("torch checkpoints"),
        recognizes=_has_member("data.pkl"),
        at_offsets=True,
    ),
    Format(
        "parquet",
        "legroom.formats.parquet_reader:ParquetReader",
        "Parquet",
        recognizes=_starts_and_ends_with(b"PAR1", "Parquet"),
        at_offsets_with_keys=True,
        endings=(".parquet",),
    ),
    Format(
        "arrow",
        "legroom.formats.arrow_reader:ArrowReader",
        phrase("Arrow IPC (file, stream, Feather v2)"),
        recognizes=_starts_and_ends_with(b"ARROW1", "Arrow IPC"),
        endings=(".arrow", ".feather"),
    ),
    Format(
        "hdf5",
        "legroom.formats.hdf5_reader:Hdf5Reader",
        "HDF5",
        recognizes=lambda one: signature_at(one.file) is not None,
        at_offsets_with_keys=True,
        endings=(".h5", ".hdf5"),
    ),
    Format(
        "arrow-stream",
        "legroom.formats.arrow_reader:ArrowReader",
        phrase("Arrow IPC (file, stream, Feather v2)"),
        recognizes=_is_arrow_stream,
    ),
    Format(
        "safetensors",
        "legroom.formats.safetensors_reader:SafetensorsReader",
        recognizes=_is_safetensors,
        at_offsets=True,
        endings=(".safetensors",),
    ),
    Format(
        "lmdb",
        "legroom.formats.lmdb_reader:LmdbReader",
        "LMDB",
        recognizes=lambda one: one.head[16:20] == b"\xde\xc0\xef\xbe",
        recognizes_directory=_contains("data.mdb"),
        directory_files=lambda path: [path / "data.mdb"],  # lock.mdb changes when the database is read
        at_offsets=True,
        endings=(".mdb", ".lmdb"),
    ),
    Format(
        "hf-datasets",
        "legroom.formats.hf_datasets_reader:HfDatasetsReader",
        phrase("directories of Hugging Face datasets"),
        recognizes_directory=_contains("dataset_info.json", "dataset_dict.json"),
        directory_files=_hf_dataset_files,
    ),
)


def open_source(
    path: str | os.PathLike[str], keys: str | Iterable[str] | None = None, memory: DecodingMemory = UNLIMITED
) -> BaseReader:
    """Open a data file.

    Args:
        path: The file, or a directory of a format that has directories (Zarr).
        keys: The items, or groups of items, to read; None: all.
        memory: What describing and decoding may take.
    """
    found, selection = Path(path), Selection(keys)
    if _is_directory(found):
        return directory_format(found).open(found, selection, memory)
    with SourceFile(found) as file:
        if file.size == 0:
            raise damaged(found, say("it is empty (0 bytes)"))
        known = _file_format(Candidate(file))
        plain = known.format if isinstance(known, PluginFormat) else known
        if not plain.reads_at_offsets(selection):
            file.wait_for_all()
    return known.open(found, selection, memory)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as problem:
        raise unreadable(path, problem) from problem


def _file_format(candidate: Candidate) -> Format | PluginFormat:
    for known in FORMATS:
        if known.recognizes is not None and known.recognizes(candidate):
            return known
    plugin = find_plugin(lambda one: one.recognizes(candidate), candidate.path)
    if plugin is None:
        raise _unknown(candidate)
    return plugin


def directory_format(path: Path) -> Format | PluginFormat:
    """The format of a directory. Raises UnreadableSource, with a pattern of the data files in it, if it has none."""
    for known in FORMATS:
        if known.recognizes_directory is not None and known.recognizes_directory(path):
            return known
    plugin = find_plugin(lambda one: one.recognizes_directory(path), path)
    if plugin is None:
        raise _unknown_directory(path)
    return plugin


def directory_files(path: Path) -> Sequence[Path] | None:
    """The files that hold a directory's data; None: everything below it."""
    known = directory_format(path)
    if known.directory_files is None:
        return None
    return known.directory_files(path)


def _unknown(candidate: Candidate) -> UnknownFormat:
    path, head, why, fix = candidate.path, candidate.head, "", ""
    if head.startswith(_ZIP):
        why, fix = say("it is a zip archive without .npy members"), say("extract it and pass one of its files")
    for mark, (name, command) in _COMPRESSED.items():
        if not why and head.startswith(mark):
            why = say("the whole file is compressed with {name}", name=name)
            fix = say("decompress it first: {command} {path}", command=command, path=path)
    for mark, (reason, advice) in _HINTS.items():
        if not why and head.startswith(mark):
            why, fix = say(reason), say(advice, path=path)
    shown = say("its first bytes are {shown!r} ({hex})", shown=head[:16], hex=head[:16].hex(" "))
    readable = ", ".join(dict.fromkeys(map(_shown, FORMATS)))
    return UnknownFormat(
        say("unsupported file format: {path}", path=path),
        why=say("{why}; {shown}", why=why, shown=shown) if why else shown,
        fix=(*([fix] if fix else []), say("convert it to one of: {readable}", readable=readable)),
    )


def _shown(known: Format) -> str:
    return say(known.title) if known.title else known.name


def _unknown_directory(path: Path) -> UnreadableSource:
    data = {ending for one in FORMATS for ending in one.endings}
    found = Counter(ending for name in _names(path) if (ending := os.path.splitext(name)[1]) in data)
    if found:
        pattern = path / f"*{found.most_common(1)[0][0]}"
        fix = say("pass the files in it as a pattern: '{pattern}'", pattern=pattern)
    else:
        fix = say("pass a file in it")
    readable = ", ".join(_shown(one) for one in FORMATS if one.recognizes_directory is not None)
    return UnreadableSource(
        say("cannot read {path}", path=path),
        why=say("it is a directory, but none of these: {formats}", formats=readable),
        fix=(fix,),
    )


def _names(path: Path) -> list[str]:
    try:
        with os.scandir(path) as found:
            return [one.name for one in islice(found, _NAMES_READ)]
    except OSError as problem:
        raise unreadable(path, problem) from problem
