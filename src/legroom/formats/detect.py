"""Open a data file by its content, not by its name: recognize the format, then create its reader.

Refuses formats that run code when read (pickle) or need guessing (CSV). A directory must be a Zarr store, an MDS
dataset or a folder of images by class; it is recognized by a few names, since it may be large.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from legroom.errors import UnknownFormat, UnreadableSource
from legroom.formats.base_reader import BaseReader, Selection
from legroom.formats.data_file import SourceFile, damaged, unreadable
from legroom.formats.decoding_memory import UNLIMITED, DecodingMemory
from legroom.formats.hdf5_open import signature_at
from legroom.formats.npy_reader import NPY_MAGIC, member_infos
from legroom.formats.tar_headers import is_tar
from legroom.messages import listed, phrase, say
from legroom.system.lazy_and_optional_imports import lazy_import

READABLE = phrase(
    "HDF5, npy, npz, Parquet, Arrow IPC (file, stream, Feather v2), Zarr v2 and v3, safetensors, torch checkpoints, "
    "WebDataset tar, MosaicML MDS, folders of images by class"
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
    "webdataset": ("tar_reader", "TarReader"),
    "mds": ("mds_reader", "MdsReader"),
    "imagefolder": ("image_folder_reader", "ImageFolderReader"),
}
# Read through SourceFile at offsets alone, so also while the file is being downloaded, and only where it is needed.
_AT_OFFSETS = ("npy", "npz", "safetensors", "torch")
_ON_DEMAND = ("hdf5", "parquet")  # these too with keys=; their libraries read them through a stream then
ZARR_FILES = (".zgroup", ".zarray", "zarr.json")
MDS_FILE = "index.json"
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision has them
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"})
_BESIDE_CLASSES = (".", "readme", "license")  # how names begin that may stand beside the directories of the classes
_DATA = (".h5", ".hdf5", ".npy", ".npz", ".parquet", ".arrow", ".feather", ".safetensors", ".zarr", ".tar")
_NAMES_READ = 10_000  # of a directory, to recognize it or to suggest a pattern
_CLASSES_LOOKED_INTO = 3
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
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


def open_source(
    path: str | os.PathLike[str], keys: str | Iterable[str] | None = None, memory: DecodingMemory = UNLIMITED
) -> BaseReader:
    """Open a data file.

    Args:
        path: The file, or the directory of a Zarr store.
        keys: The items, or groups of items, to read; None: all.
        memory: What describing and decoding may take.
    """
    reader = _reader(Path(path), Selection(keys))
    reader.memory = memory
    return reader


def _reader(path: Path, selection: Selection) -> BaseReader:
    if _is_directory(path):
        return _open(directory_format(path), path, selection)
    with SourceFile(path) as file:
        if file.size == 0:
            raise damaged(path, say("it is empty (0 bytes)"))
        kind = _kind(file)
        if kind not in _AT_OFFSETS and not (kind in _ON_DEMAND and selection.keys is not None):
            file.wait_for_all()
    return _open(kind, path, selection)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as problem:
        raise unreadable(path, problem) from problem


def _kind(file: SourceFile) -> str:
    if is_tar(file):  # before the names and files in it, which may look like other formats
        return "webdataset"
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
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "safetensors"
    raise _unknown(file.path, head)


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
    for mark, (name, command) in _COMPRESSED.items():
        if not why and head.startswith(mark):
            why = say("the whole file is compressed with {name}", name=name)
            fix = say("decompress it first: {command} {path}", command=command, path=path)
    for mark, (reason, advice) in _HINTS.items():
        if not why and head.startswith(mark):
            why, fix = say(reason), say(advice, path=path)
    shown = say("its first bytes are {shown!r} ({hex})", shown=head[:16], hex=head[:16].hex(" "))
    return UnknownFormat(
        say("unsupported file format: {path}", path=path),
        why=say("{why}; {shown}", why=why, shown=shown) if why else shown,
        fix=(*([fix] if fix else []), say("convert it to one of: {readable}", readable=say(READABLE))),
    )


def _open(kind: str, path: Path, selection: Selection) -> BaseReader:
    """Import the format's module now, and create its reader."""
    module, name = _READERS[kind]
    reader: BaseReader = getattr(lazy_import("legroom.formats." + module), name)(path, selection)
    return reader


def directory_format(path: Path) -> str:
    """The format of a directory; UnreadableSource for any other, with a pattern of the data files in it."""
    is_zarr = any(os.path.lexists(path / mark) for mark in ZARR_FILES)
    if os.path.lexists(path / MDS_FILE):
        if not is_zarr:
            return "mds"
        raise _not_a_dataset(
            path, say("it has the index of an MDS dataset and that of a Zarr store"), say("separate them")
        )
    if is_zarr:
        return "zarr"
    names = _names(path)
    found = Counter(ending for name in names if (ending := os.path.splitext(name)[1]) in _DATA)
    if not found and any(names.values()):
        _require_classes(path, names)
        return "imagefolder"
    if found:
        pattern = path / f"*{found.most_common(1)[0][0]}"
        fix = say("pass the files in it as a pattern: '{pattern}'", pattern=pattern)
    else:
        fix = say("pass a file in it")
    raise _not_a_dataset(
        path,
        say(
            "it is a directory but not a Zarr store (no .zgroup, .zarray or zarr.json), not an MDS dataset "
            "(no index.json) and not a folder of images (no subdirectories with images)"
        ),
        fix,
    )


def _require_classes(path: Path, names: Mapping[str, bool]) -> None:
    """Refuse a directory that may not be one directory of images per class."""
    classes = [name for name in sorted(names) if names[name]]
    beside = [name for name in sorted(names) if not names[name]]
    if all(name.lower() in _SPLITS for name in classes):
        example = path / classes[0]
        why = say("its subdirectories are splits, not classes: {names}", names=listed(classes))
        raise _not_a_dataset(path, why, say("pass one of them: {example}", example=example))
    if files := [name for name in beside if not name.lower().startswith(_BESIDE_CLASSES)]:
        why = say("it has subdirectories and the file {name!r} beside them: it is unclear what to read", name=files[0])
        raise _not_a_dataset(path, why, say("leave nothing but the directories of the classes in it"))
    if not any(_has_image(path / name) for name in classes[:_CLASSES_LOOKED_INTO]):
        why = say("it is a directory without data files, and its subdirectories have no images")
        raise _not_a_dataset(
            path, why, say("pass a file in it, or a directory with one subdirectory of images per class")
        )


def _has_image(path: Path) -> bool:
    """Whether one of the first names below a directory is that of an image."""
    waiting, looked = [path], 0
    while waiting and looked <= _NAMES_READ:
        folder = waiting.pop()
        names = _names(folder)
        looked += 1 + len(names)
        if any(name.lower().endswith(IMAGES) for name, is_folder in names.items() if not is_folder):
            return True
        waiting += [folder / name for name, is_folder in names.items() if is_folder]
    return False


def _not_a_dataset(path: Path, why: str, fix: str) -> UnreadableSource:
    return UnreadableSource(say("cannot read {path}", path=path), why=why, fix=(fix,))


def _names(path: Path) -> dict[str, bool]:
    """The first names in a directory, and whether each is a directory."""
    try:
        with os.scandir(path) as found:
            return {one.name: one.is_dir() for one in islice(found, _NAMES_READ)}
    except OSError as problem:
        raise unreadable(path, problem) from problem
