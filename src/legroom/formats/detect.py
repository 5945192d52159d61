"""Open a data file by its content, not by its name: recognize the format, then create its reader.

Refuses formats that run code when read (pickle) or need guessing (CSV). A directory must be a Zarr store;
nothing below it is listed, since it may be large.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from legroom.errors import UnknownFormat, UnreadableSource, UsageError
from legroom.formats.base_reader import BaseReader, Selection
from legroom.formats.data_file import SourceFile, damaged, unreadable
from legroom.formats.decoding_memory import UNLIMITED, DecodingMemory
from legroom.formats.hdf5_open import signature_at
from legroom.formats.npy_reader import NPY_MAGIC, member_infos
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import lazy_import

READABLE = phrase(
    "HDF5, npy, npz, Parquet, Arrow IPC (file, stream, Feather v2), Zarr v2 and v3, safetensors, torch checkpoints, "
    "token files"
)

_READERS = {  # format → module of this package, class
    "hdf5": ("hdf5_reader", "Hdf5Reader"),
    "npy": ("npy_reader", "NpyReader"),
    "npz": ("npy_reader", "NpzReader"),
    "parquet": ("parquet_reader", "ParquetReader"),
    "arrow": ("arrow_reader", "ArrowReader"),
    "safetensors": ("safetensors_reader", "SafetensorsReader"),
    "torch": ("torch_reader", "TorchReader"),
    "zarr": ("zarr_reader", "ZarrReader"),
    "megatron": ("megatron_reader", "MegatronReader"),
    "llm.c": ("token_reader", "TokenReader"),
    "tokens": ("token_reader", "TokenReader"),
}
_TOKENS = ("megatron", "llm.c", "tokens")  # their readers take a dtype
# Read through SourceFile at offsets alone, so also while the file is being downloaded, and only where it is needed.
_AT_OFFSETS = ("npy", "npz", "safetensors", "torch", "llm.c", "tokens")
_ON_DEMAND = ("hdf5", "parquet")  # these too with keys=; their libraries read them through a stream then
ZARR_FILES = (".zgroup", ".zarray", "zarr.json")
_DATA = (".h5", ".hdf5", ".npy", ".npz", ".parquet", ".arrow", ".feather", ".safetensors", ".zarr")
_NAMES_READ = 10_000  # of a directory that is refused, to suggest a pattern
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ": ("xz", "unxz -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
_COMPRESSED_NAMES = [name for name, _ in _COMPRESSED.values()]
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


def open_source(
    path: str | os.PathLike[str],
    keys: str | Iterable[str] | None = None,
    memory: DecodingMemory = UNLIMITED,
    dtype: str | None = None,
) -> BaseReader:
    """Open a data file.

    Args:
        path: The file, or the directory of a Zarr store.
        keys: The items, or groups of items, to read; None: all.
        memory: What describing and decoding may take.
        dtype: Of a flat token file, which does not say it itself; None refuses such a file.
    """
    reader = _reader(Path(path), Selection(keys), dtype)
    reader.memory = memory
    return reader


def _reader(path: Path, selection: Selection, dtype: str | None) -> BaseReader:
    if _is_directory(path):
        require_zarr_store(path)
        return _open("zarr", path, selection, dtype)
    with SourceFile(path) as file:
        if file.size == 0:
            raise damaged(path, say("it is empty (0 bytes)"))
        kind = _kind(file, dtype)
        if kind not in _AT_OFFSETS and not (kind in _ON_DEMAND and selection.keys is not None):
            file.wait_for_all()
    return _open(kind, path, selection, dtype)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as problem:
        raise unreadable(path, problem) from problem


def _kind(file: SourceFile, dtype: str | None) -> str:
    head = file.read_at(0, min(64, file.size))
    if head.startswith(NPY_MAGIC):
        return "npy"
    if head.startswith(_ZIP):
        return _zip_kind(file, head)
    if head.startswith(b"PAR1"):
        _require_end(file, b"PAR1", "Parquet")
        return "parquet"
    if head.startswith(b"ARROW1"):
        _require_end(file, b"ARROW1", "Arrow IPC")
        return "arrow"
    if signature_at(file) is not None:
        return "hdf5"
    if _is_stream(head):
        return "arrow"
    # The second of 8-byte tokens may look like a brace too; the text of a header has no zeros.
    text = dtype is None or b"\0" not in head[8:]
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32 and text:
        return "safetensors"
    return _token_kind(file, head, dtype)


def _token_kind(file: SourceFile, head: bytes, dtype: str | None) -> str:
    if head.startswith(b"MMIDIDX\0\0"):
        return "megatron"
    tokens = lazy_import("legroom.formats.token_reader")
    if tokens.is_llm_c(file):
        return "llm.c"
    if dtype is None:
        raise _unknown(file.path, head)
    other = lazy_import("legroom.formats.recognize_other_files").other_format(file)
    if other in _COMPRESSED_NAMES or head.startswith(tuple(mark for mark in _HINTS if len(mark) > 2)):
        raise _unknown(file.path, head)
    if other is not None:
        why = say("dtype={dtype!r} was given, but the file looks like {other}", dtype=dtype, other=other)
        raise _unknown(file.path, head, why)
    return "tokens"


def _require_end(file: SourceFile, mark: bytes, name: str) -> None:
    tail = file.read_at(max(0, file.size - len(mark)), min(len(mark), file.size))
    if tail != mark or file.size < 3 * len(mark):
        raise damaged(
            file.path,
            say(
                "it starts as {name} but ends with {tail!r} instead of {mark!r}: the file is truncated",
                name=name,
                tail=tail,
                mark=mark,
            ),
        )


def _is_stream(head: bytes) -> bool:
    """An Arrow stream has no magic number: it starts with a continuation marker and the length of a message."""
    length = int.from_bytes(head[4:8], "little")
    return head.startswith(b"\xff\xff\xff\xff") and 0 < length < 1 << 28 and length % 8 == 0


def _zip_kind(file: SourceFile, head: bytes) -> str:
    names = [info.filename for info in member_infos(file)]
    if any(name in ZARR_FILES for name in names):
        return "zarr"
    if any(name.endswith(".npy") for name in names):
        return "npz"
    if any(name.endswith("data.pkl") for name in names):
        return "torch"
    raise _unknown(
        file.path, head, say("it is a zip archive without .npy members"), say("extract it and pass one of its files")
    )


def _unknown(path: Path, head: bytes, why: str = "", fix: str = "") -> UnknownFormat:
    given = why
    for mark, (name, command) in _COMPRESSED.items():
        if not why and head.startswith(mark):
            why = say("the whole file is compressed with {name}", name=name)
            fix = say("decompress it first: {command} {path}", command=command, path=path)
    for mark, (reason, advice) in _HINTS.items():
        if not why and head.startswith(mark):
            why, fix = say(reason), say(advice, path=path)
    flat = not given and (not why or head.startswith(b"\x80"))
    shown = say("its first bytes are {shown!r} ({hex})", shown=head[:16], hex=head[:16].hex(" "))
    return UnknownFormat(
        say("unsupported file format: {path}", path=path),
        why=say("{why}; {shown}", why=why, shown=shown) if why else shown,
        fix=(
            *([fix] if fix else []),
            say("convert it to one of: {readable}", readable=say(READABLE)),
            *([say("if it is a flat file of tokens, pass their type: dtype='uint16'")] if flat else []),
        ),
    )


def _open(kind: str, path: Path, selection: Selection, dtype: str | None) -> BaseReader:
    """Import the format's module now, and create its reader."""
    module, name = _READERS[kind]
    make = getattr(lazy_import("legroom.formats." + module), name)
    if kind not in _TOKENS and dtype is not None:
        raise UsageError(
            say("dtype={dtype!r} cannot be used with {path}", dtype=dtype, path=path),
            why=say("it is a {kind} file, which states the types of its arrays", kind=kind),
            fix=(say("omit dtype"),),
        )
    reader: BaseReader = make(path, selection, dtype) if kind in _TOKENS else make(path, selection)
    return reader


def require_zarr_store(path: Path) -> None:
    """Raise UnreadableSource for a directory that is not a Zarr store, with a pattern of the data files in it."""
    if any(os.path.lexists(path / mark) for mark in ZARR_FILES):
        return
    found = Counter(ending for name in _names(path) if (ending := os.path.splitext(name)[1]) in _DATA)
    if found:
        pattern = path / f"*{found.most_common(1)[0][0]}"
        fix = say("pass the files in it as a pattern: '{pattern}'", pattern=pattern)
    else:
        fix = say("pass a file in it")
    raise UnreadableSource(
        say("cannot read {path}", path=path),
        why=say("it is a directory but not a Zarr store: it has no .zgroup, .zarray or zarr.json"),
        fix=(fix,),
    )


def _names(path: Path) -> list[str]:
    try:
        with os.scandir(path) as found:
            return [one.name for one in islice(found, _NAMES_READ)]
    except OSError as problem:
        raise unreadable(path, problem) from problem
