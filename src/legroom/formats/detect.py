"""Open a data file by its content, not by its name: recognize the format, then create its reader.

``FORMATS`` lists our own formats, one record each. Where none of them recognizes a file, the formats that other
packages have registered are asked (plugin_formats.py). Formats that run code when read (pickle) or need guessing (CSV)
are refused. A directory is recognized by a few names, since it may be large.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from legroom.errors import FormatPluginFailed, UnknownFormat, UnreadableSource, UsageError
from legroom.formats.base_reader import BaseReader, Candidate, Format, Selection
from legroom.formats.decoding_memory_budget import UNLIMITED, DecodingMemory
from legroom.formats.file_reads_and_errors import SourceFile, damaged, unreadable
from legroom.formats.hdf5_open import signature_at
from legroom.formats.npy_reader import NPY_MAGIC
from legroom.formats.plugin_formats import BrokenPackage, PluginFormat, find_plugin, name_broken
from legroom.messages import listed, phrase, say
from legroom.system.lazy_and_optional_imports import lazy_import

if TYPE_CHECKING:
    from legroom.formats.unsupported_file_types import Unsupported

ZARR_FILES = (".zgroup", ".zarray", "zarr.json")
MDS_FILE = "index.json"
NAMES_READ = 10_000  # of a directory, to recognize it or to suggest a pattern

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


def _is_tar(one: Candidate) -> bool:
    """Archives of Unix version 7 have no magic number: what all have is a checksum in octal digits."""
    digits = one.head[148:156].strip(b" \0")
    return bool(digits) and digits.isdigit() and bool(lazy_import("legroom.formats.tar_members").is_tar(one.file))


def _is_arrow_stream(one: Candidate) -> bool:
    """An Arrow stream has no magic number: it starts with a continuation marker and the length of a message.

    Before Arrow 0.15 it started with the length.
    """
    length = int.from_bytes(one.head[4:8], "little")
    if not one.head.startswith(b"\xff\xff\xff\xff"):
        return _is_old_arrow_stream(one.head, one.size)
    if not 0 < length < 1 << 28 or length % 8:
        return False
    # Tokens may be those numbers too, but hardly a message: its root is a table in it, with its fields before it.
    return one.dtype is None or _is_message(one.head[8:])


def _is_message(flat: bytes) -> bool:
    """Whether a flatbuffer begins like the message of a schema: its version, its type, and no body."""
    root, fields = _flat_table(flat, 0)
    if not 4 <= fields <= len(flat) - 10 or root + 4 > len(flat):
        return False
    size, own, version, kind = struct.unpack_from("<4H", flat, fields)
    return size >= 8 and own >= 8 and max(version, kind) < own and flat[root + kind : root + kind + 1] == b"\1"


def _is_old_arrow_stream(head: bytes, size: int) -> bool:
    """Whether a file begins with the length of a schema's message. Without a marker, more of the message is checked."""
    length, flat = int.from_bytes(head[:4], "little"), head[4:]
    if not 16 <= length <= min(size - 4, 1 << 28) or length % 4 or not _is_message(flat):
        return False
    root, root_fields = _flat_table(flat, 0)
    count, own, version, _, schema = struct.unpack_from("<5H", flat, root_fields)
    if root % 4 or count not in (10, 12, 14) or own > 64 or not (0 < version < own and 0 < schema < own):
        return False
    if root + own > len(flat) - 4 or int.from_bytes(flat[root + version : root + version + 2], "little") > 4:
        return False
    below, below_fields = _flat_table(flat, root + schema)
    if below % 4 or not 0 < below_fields <= len(flat) - 2:
        return False
    return struct.unpack_from("<H", flat, below_fields)[0] in (8, 10, 12)


def _flat_table(flat: bytes, at: int) -> tuple[int, int]:
    """The table of a flatbuffer that a reference at this position leads to, and its list of fields."""
    table = at + int.from_bytes(flat[at : at + 4], "little")
    return table, table - int.from_bytes(flat[table : table + 4], "little", signed=True)


def _is_safetensors(one: Candidate) -> bool:
    # The second of 8-byte tokens may look like a brace too; the text of a header has no zeros.
    text = one.dtype is None or b"\0" not in one.head[8:64]
    return one.head[8:9] == b"{" and int.from_bytes(one.head[:8], "little") < 1 << 32 and text


def _is_llm_c(one: Candidate) -> bool:
    return bool(lazy_import("legroom.formats.token_reader").is_llm_c(one.file))


def _is_tokens(one: Candidate) -> bool:
    """A flat token file has no marks: the caller's dtype says that it is one, unless it is something else."""
    if one.dtype is None:
        return False
    found = lazy_import("legroom.formats.token_reader").refused_as_tokens(one.file, one.dtype)
    if found is not None:
        raise _refused(one.path, found)
    return True


class _Contains:
    """Recognizes a directory by a name in it."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, path: Path) -> bool:
        return bool(self.marks(path))

    def marks(self, path: Path) -> list[str]:
        return [name for name in self.names if os.path.lexists(path / name)]


def _hf_dataset_files(path: Path) -> list[Path]:
    files: list[Path] = lazy_import("legroom.formats.hf_datasets_reader").dataset_files(path)
    return files


# Without marks: a directory that no other format recognizes is looked at last (directory_format).
_IMAGE_FOLDER = Format(
    "imagefolder", "legroom.formats.image_folder_reader:ImageFolderReader", phrase("folders of images by class")
)
_TOKENS = Format(
    "tokens",
    "legroom.formats.token_reader:TokenReader",
    phrase("token files"),
    recognizes=_is_tokens,
    at_offsets=True,
    takes_dtype=True,
)
# Asked in this order; the first that recognizes a file reads it.
FORMATS = (
    Format(  # first: the names and files in it may look like other formats
        "webdataset",
        "legroom.formats.tar_reader:TarReader",
        phrase("WebDataset tar"),
        recognizes=_is_tar,
        endings=(".tar",),
    ),
    Format("mds", "legroom.formats.mds_reader:MdsReader", "MosaicML MDS", recognizes_directory=_Contains(MDS_FILE)),
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
        recognizes_directory=_Contains(*ZARR_FILES),
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
        recognizes_directory=_Contains("data.mdb"),
        directory_files=lambda path: [path / "data.mdb"],  # lock.mdb changes when the database is read
        at_offsets=True,
        endings=(".mdb", ".lmdb"),
    ),
    Format(
        "hf-datasets",
        "legroom.formats.hf_datasets_reader:HfDatasetsReader",
        phrase("directories of Hugging Face datasets"),
        recognizes_directory=_Contains("dataset_info.json", "dataset_dict.json"),
        directory_files=_hf_dataset_files,
    ),
    Format(
        "megatron",
        "legroom.formats.megatron_reader:MegatronReader",
        phrase("token files"),
        recognizes=_starts_with(b"MMIDIDX\0\0"),
        takes_dtype=True,
        endings=(".idx",),
    ),
    Format(
        "llm.c",
        "legroom.formats.token_reader:TokenReader",
        phrase("token files"),
        recognizes=_is_llm_c,
        at_offsets=True,
        takes_dtype=True,
    ),
    _TOKENS,
    _IMAGE_FOLDER,
)


def open_source(
    path: str | os.PathLike[str],
    keys: str | Iterable[str] | None = None,
    memory: DecodingMemory = UNLIMITED,
    dtype: str | None = None,
) -> BaseReader:
    """Open a data file.

    Args:
        path: The file, or a directory of a format that has directories (Zarr).
        keys: The items, or groups of items, to read; None: all.
        memory: What describing and decoding may take.
        dtype: Of a flat token file, which does not say it itself; None refuses such a file.
    """
    found, selection = Path(path), Selection(keys)
    if _is_directory(found):
        return _open(directory_format(found), found, selection, memory, dtype)
    with SourceFile(found) as file:
        if file.size == 0:
            raise damaged(found, say("it is empty (0 bytes)"))
        known = _file_format(Candidate(file, dtype))
        plain = known.format if isinstance(known, PluginFormat) else known
        if not plain.reads_at_offsets(selection):
            file.wait_for_all()
    return _open(known, found, selection, memory, dtype)


def _open(
    known: Format | PluginFormat, path: Path, selection: Selection, memory: DecodingMemory, dtype: str | None
) -> BaseReader:
    plain = known.format if isinstance(known, PluginFormat) else known
    if dtype is not None and not plain.takes_dtype:
        raise UsageError(
            say("dtype={dtype!r} cannot be used with {path}", dtype=dtype_name(dtype), path=path),
            why=say("its format, {kind}, states the types of its arrays", kind=plain.name),
            fix=(say("omit dtype="),),
        )
    return known.open(path, selection, memory, dtype)


def dtype_name(dtype: str) -> str:
    """A dtype of tokens as it is written by hand: uint16, not <u2; >u2 if it is not the machine's byte order."""
    stored = np.dtype(dtype)
    return stored.name if stored.isnative else dtype


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as problem:
        raise unreadable(path, problem) from problem


def _file_format(candidate: Candidate) -> Format | PluginFormat:
    for known in FORMATS:
        if known.recognizes is not None and known.recognizes(candidate):
            # Nothing but the caller's dtype speaks for flat tokens.
            plugin = find_plugin(lambda one: one.recognizes(candidate), candidate.path)[0] if known is _TOKENS else None
            return plugin or known
    plugin, broken = find_plugin(lambda one: one.recognizes(candidate), candidate.path)
    if plugin is None:
        raise _unknown(candidate, broken)
    return plugin


def has_format(path: Path, names: Sequence[str]) -> bool:
    """Whether a file has one of these formats of ours. Asks no package, and is no for a directory."""
    if _is_directory(path):
        return False
    with SourceFile(path) as file:
        if file.size == 0:
            return False
        candidate = Candidate(file)
        return any(one.recognizes is not None and one.recognizes(candidate) for one in FORMATS if one.name in names)


def directory_format(path: Path) -> Format | PluginFormat:
    """The format of a directory. Raises UnreadableSource, with a pattern of the data files in it, if it has none."""
    ours = [known for known in FORMATS if known.recognizes_directory is not None and known.recognizes_directory(path)]
    if len(ours) > 1:
        why = say("it has the marks of several formats: {formats}", formats=listed(map(_shown, ours)))
        raise not_a_dataset(path, why, say("separate them"))
    if ours:
        return ours[0]
    several: FormatPluginFailed | None = None
    broken: Sequence[BrokenPackage] = ()  # they do not keep folders of images from being read
    try:
        plugin, broken = find_plugin(lambda one: one.recognizes_directory(path), path)
    except FormatPluginFailed as failed:  # nor do several that recognize it
        plugin, several = None, failed
    if plugin is not None:
        return plugin
    names = names_in(path)
    found = _data_endings(names)
    try:
        other = lazy_import("legroom.formats.unsupported_file_types").unsupported_directory(path)
        if other is not None:
            raise not_a_dataset(path, other.why, *other.fix)
        if not found:
            images = lazy_import("legroom.formats.image_folder_reader")
            if any(below and not images.is_hidden(name) for name, below in names.items()):
                images.require_classes(path, names)
                return _IMAGE_FOLDER
            images.refuse_images_without_classes(path, names)
        if broken and names and not found:  # nothing is known about it
            raise broken[0].problem
        raise _unknown_directory(path, found)
    except UnreadableSource as refusal:
        raise several or name_broken(refusal, broken) from None


def _data_endings(names: Iterable[str]) -> Counter[str]:
    data = {ending for one in FORMATS for ending in one.endings}
    return Counter(ending for name in names if (ending := os.path.splitext(name)[1]) in data)


def refuse_other_data(path: Path, kind: str) -> None:
    """Raise if a directory has data of another format, where the reader that its marks chose has found nothing."""
    names = names_in(path)
    others = [f"*{ending}" for ending in _data_endings(names)]
    images = lazy_import("legroom.formats.image_folder_reader")
    others += [name for name in sorted(names) if images.is_image(name)][:1]
    others += [os.path.join(name, "") for name in images.folders_with_images(path, names)]
    if not others:
        return
    recognizes = next((one.recognizes_directory for one in FORMATS if one.name == kind), None)
    marks = [os.fspath(path / mark) for mark in recognizes.marks(path)] if isinstance(recognizes, _Contains) else []
    why = say(
        "it is read as {format} and has no arrays in that format, but other data: {names}",
        format=kind,
        names=listed(others),
    )
    raise not_a_dataset(path, why, say("remove {marks}", marks=listed(marks)) if marks else say("separate them"))


def directory_files(path: Path) -> Sequence[Path] | None:
    """The files that hold a directory's data; None: everything below it."""
    known = directory_format(path)
    if known.directory_files is None:
        return None
    return known.directory_files(path)


def _unknown(candidate: Candidate, broken: Sequence[BrokenPackage]) -> UnknownFormat | FormatPluginFailed:
    """The error for a file of another type, or of none that is known: it may be of a package that is broken."""
    path, head = candidate.path, candidate.head
    found = _part_of_directory(path) or lazy_import("legroom.formats.unsupported_file_types").unsupported_type(
        candidate.file
    )
    found = found or lazy_import("legroom.formats.token_reader").text_format(candidate.file)
    if found is not None:
        return name_broken(_refused(path, found), broken)
    fix = [_pass_dtype()]
    if broken and path.suffix != ".bin":  # a name that token files have
        failed = broken[0].problem
        failed.fix = (*failed.fix, *fix)
        return failed
    if path.suffix == ".bin":
        fix.append(
            say("if it is a dataset of Megatron, put its .idx file beside it: {index}", index=path.with_suffix(".idx"))
        )
    fix.append(say("convert it to one of: {readable}", readable=_readable()))
    problem = UnknownFormat(
        say("unsupported file format: {path}", path=path),
        why=say("its first bytes are {shown!r} ({hex})", shown=head[:16], hex=head[:16].hex(" ")),
        fix=fix,
        converts=True,
    )
    return name_broken(problem, broken)


def _refused(path: Path, found: Unsupported) -> UnknownFormat:
    fix = list(found.fix)
    if found.converts and not fix:
        fix.append(say("convert it to one of: {readable}", readable=_readable()))
    if found.may_be_tokens:
        fix.append(_pass_dtype())
    return UnknownFormat(
        say("unsupported file format: {path}", path=path), why=found.why, fix=fix, converts=found.converts
    )


def _readable() -> str:
    return listed(dict.fromkeys(map(_shown, FORMATS)))


def _pass_dtype() -> str:
    return say("if it is a flat file of tokens, pass their type: dtype='uint16'")


def _part_of_directory(path: Path) -> Unsupported | None:
    """What a file is by which a directory of one of our formats is recognized."""
    for one in FORMATS:
        if isinstance(one.recognizes_directory, _Contains) and path.name in one.recognizes_directory.names:
            made: Unsupported = lazy_import("legroom.formats.unsupported_file_types").Unsupported(
                say("it is a part of a directory: {format}", format=_shown(one)),
                (say("pass the directory: {folder}", folder=path.parent),),
            )
            return made
    return None


def _shown(known: Format) -> str:
    return say(known.title) if known.title else known.name


def _unknown_directory(path: Path, found: Counter[str]) -> UnreadableSource:
    if found:
        pattern = path / f"*{found.most_common(1)[0][0]}"
        fix = say("pass the files in it as a pattern: '{pattern}'", pattern=pattern)
    else:
        fix = say("pass a file in it")
    known = (one for one in FORMATS if one.recognizes_directory is not None or one is _IMAGE_FOLDER)
    readable = listed(map(_shown, known))
    return not_a_dataset(path, say("it is a directory, but none of these: {formats}", formats=readable), fix)


def not_a_dataset(path: Path, why: str, *fix: str) -> UnreadableSource:
    """The error for a directory that no reader takes."""
    return UnreadableSource(say("cannot read {path}", path=path), why=why, fix=fix)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory; no for a link in a loop, and for one that may not be followed, as in os.walk."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def names_in(path: Path) -> dict[str, bool]:
    """The first names in a directory, and whether each is a directory."""
    try:
        with os.scandir(path) as found:
            return {one.name: is_folder(one) for one in islice(found, NAMES_READ)}
    except OSError as problem:
        raise unreadable(path, problem) from problem
