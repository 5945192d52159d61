"""What a format is: how its files are recognized, the base class of its reader, and the records that it returns.

This is the interface between file formats and the rest of Legroom. To add a format, subclass BaseReader, implement the
methods under "Implemented by each format", and register a Format: in detect.py, or from another package by an entry
point (plugin_formats.py).

Rules for every reader:
- Arrays are native-endian and in C order, whatever the file holds.
- A reader owns its open files and nothing else. Buffers belong to the caller.
- One thread at a time uses a reader. It may start threads of its own, which end before the call returns.

Selection is the ``keys`` argument: which arrays, groups and columns are read. Each format walks its file in its own way
and asks it what to enter and what to read.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from math import isfinite, prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from legroom.errors import MissingKey, UnsupportedData, UsageError
from legroom.formats.decoding_memory_budget import UNLIMITED, DecodingMemory
from legroom.formats.file_reads_and_errors import SourceFile
from legroom.formats.fill_output_arrays import PIECE, Progress, check_out, no_progress
from legroom.messages import listed, say, shown
from legroom.system.lazy_and_optional_imports import lazy_import

_MOST_BYTES = 1 << 50  # the limit of a manifest
_MOST_AXES = 32  # numpy 1's limit
MOST_ELEMENTS = 1024
_MOST_TEXT = 1 << 20
_HEAD = 512
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")


# What a file holds: the result of describe().


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array as it will be in memory.

    Ragged data (strings, sequences of variable length) are two arrays, ``<name>/offsets`` and ``<name>/values``. Row i
    is ``values[offsets[i]:offsets[i + 1]]``. If the rows are not a flat list, ``attributes["ragged_shape"]`` is their
    shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # native byte order, never object
    attributes: Mapping[str, Any] = field(default_factory=dict)  # can be stored as JSON
    ragged: str | None = None  # the common name of offsets and values
    text: bool = False  # the values of ragged data are UTF-8
    # By attribute, what the values are where the dtype does not say it; it must be the same in files that are joined.
    meaning: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        # Not numpy's product: a damaged file may claim a shape that overflows 64 bits.
        return prod(self.shape) * self.dtype.itemsize


def native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same type in native byte order, without metadata; records keep their offsets and padding.

    Saving an array whose dtype has metadata drops it with a warning, so it is removed here.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((native_dtype(base), shape))
    if dtype.names is None or dtype.fields is None:
        return np.dtype(dtype.newbyteorder("=").str) if dtype.kind != "V" else np.dtype((np.void, dtype.itemsize))
    fields = [dtype.fields[name] for name in dtype.names]
    return np.dtype(
        {
            "names": list(dtype.names),
            "formats": [native_dtype(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
        }
    )


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table, to be written as an Arrow IPC file."""

    name: str
    rows: int
    columns: Mapping[str, str]  # column name → Arrow type as text
    nbytes: int  # upper bound of the IPC file's size: space is reserved by it
    attributes: Mapping[str, Any] = field(default_factory=dict)
    meaning: Mapping[str, Any] = field(default_factory=dict)  # as ArraySpec's


@dataclass(frozen=True, slots=True)
class Lookup:
    """One search for a file that another file refers to. Repeating it must find the same file, or the data changed."""

    # Which search rules apply: "link", "virtual", "storage" (hdf5_find_datasets.py), "beside" (megatron_reader.py).
    kind: str
    name: str  # as written in the referring file
    holder: Path  # the referring file
    found: Path | None  # None: missing; if it appears later, the data change


@dataclass(frozen=True, slots=True)
class Description:
    """What a file holds, without the data."""

    format: str
    items: tuple[ArraySpec | TableSpec, ...]
    attributes: Mapping[str, Any]  # of the file; those of a group are under "<group>/<attribute>"
    # Every file that the data come from, the opened one first. A directory stands for everything below it.
    files: tuple[Path, ...]
    lookups: tuple[Lookup, ...] = ()  # how the further files were found
    reader: str | None = None  # the package and version of a reader that is not Legroom's; set by plugin_formats.py

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Checksum:
    """The CRC-32 that the file stores for an array's bytes and the header directly before them."""

    whole: int  # of header and array
    header: int  # of the header alone
    header_bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a file holds an array's bytes exactly as they will be in memory, so that they can be copied or mapped.

    A caller that reads the bytes must verify the checksum where there is one, as the format's own library does.
    """

    path: Path
    offset: int
    nbytes: int
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class Slab:
    """Consecutive bytes of an array that any thread can decode, in parallel with other slabs."""

    start: int  # in the array's bytes
    nbytes: int
    decode: Callable[[], Iterator[memoryview]]  # yields the bytes in order; parts stay valid while referenced
    decoding: int = 0  # bytes of memory that decoding it needs at once


class BaseReader:
    """An opened file, described once."""

    memory: DecodingMemory = UNLIMITED  # what decoding may take; set by open_source()
    _accounts_memory = False  # True: the subclass takes memory from ``self.memory`` piece by piece as it decodes

    def __init__(self, path: Path, selection: Selection) -> None:
        self.path = path
        self.selection = selection
        self._description: Description | None = None
        self._by_name: dict[str, ArraySpec | TableSpec] | None = None
        self._closed = False

    # Implemented by each format.

    def _describe(self) -> Description:
        raise NotImplementedError(f"{type(self).__name__} has no method _describe")

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no method _read")

    def _extent(self, spec: ArraySpec) -> Extent | None:
        return None

    def _slabs(self, spec: ArraySpec) -> Sequence[Slab] | None:
        return None

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        """Two pieces by default: one as stored in the file, one converted (fill_output_arrays.py)."""
        return 2 * PIECE if isinstance(spec, TableSpec) or self._extent(spec) is None else 0

    def _write(self, spec: TableSpec, path: Path, progress: Progress, ask: Progress) -> int:
        raise NotImplementedError(f"{type(self).__name__} has no method _write")

    def _close(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no method _close")

    def _library_errors(self, name: str | None) -> AbstractContextManager[None]:
        """Translate what the format's library raises for a damaged file into a SourceError.

        ``name`` is the item that is read, None if it is the file's contents as a whole (`what_is_read`).

        Every call that reads no data runs inside it. h5py converts types and pyarrow parses schemas in attributes that
        look harmless, so wrapping single calls would miss some.
        """
        return nullcontext()

    # Called by the cache and the loaders.

    def describe(self) -> Description:
        """Describe the file. Reads no data except the lengths of ragged rows."""
        if self._closed:
            raise ValueError(f"{self.path} was closed")
        if self._description is None:
            with self._library_errors(None):
                found = self._describe()
            if not found.items and self.path.is_dir():
                lazy_import("legroom.formats.detect").refuse_other_data(self.path, found.format)
            self._require_names(found.items)
            for item in found.items:
                if isinstance(item, ArraySpec):
                    self._require_possible(item)
            self._description = found
        return self._description

    def read_into(self, name: str, out: np.ndarray[Any, Any], progress: Progress = no_progress) -> None:
        """Read one whole array into ``out``, which has the spec's shape and dtype and is C-contiguous."""
        spec = self._array(name)
        check_out(spec, out)
        with self._reserve(spec):
            self._read(spec, out, progress)

    def extent(self, name: str) -> Extent | None:
        """Where the array's raw bytes are in a file, or None if it must be decoded."""
        spec = self._array(name)
        with self._library_errors(name):
            return self._extent(spec)

    def slabs(self, name: str) -> Sequence[Slab] | None:
        """The array as consecutive slabs from its first byte to its last, or None if it can only be read whole."""
        spec = self._array(name)
        with self._library_errors(name):
            return self._slabs(spec)

    def write_table(self, name: str, path: Path, progress: Progress = no_progress, ask: Progress = no_progress) -> int:
        """Write one table as an Arrow IPC file and return its size.

        ``ask`` is called with a number of bytes before they are written, and may raise to refuse them.
        """
        spec = self._item(name)
        if not isinstance(spec, TableSpec):
            raise TypeError(f"{name!r} of {self.path} is an array, not a table: use read_into")
        with self._reserve(spec):
            return self._write(spec, path, progress, ask)

    def decoding(self, name: str) -> int:
        """Bytes of memory that reading an array, or writing a table, needs besides the result, with one thread.

        The limit is the DecodingMemory that the file was opened with: more threads decode where more memory is free.
        """
        spec = self._item(name)
        with self._library_errors(name):
            return self._decoding(spec)

    def _reserve(self, spec: ArraySpec | TableSpec) -> AbstractContextManager[None]:
        if self._accounts_memory:
            return nullcontext()
        return self.memory.take(self.decoding(spec.name), self._label(spec))

    def _label(self, spec: ArraySpec | TableSpec) -> str:
        return say("{name!r} of {path}", name=spec.name, path=self.path)

    def descriptors(self) -> Sequence[int]:
        """File descriptors of the files, or the directory, being read; callers check that no file was replaced."""
        raise NotImplementedError(f"{type(self).__name__} has no method descriptors")

    def is_listed_among(self, stamps: bytes) -> bool:
        """Whether every file that is opened by name later has one of these stamps (file_reads_and_errors.py)."""
        return True

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _array(self, name: str) -> ArraySpec:
        spec = self._item(name)
        if not isinstance(spec, ArraySpec):
            raise TypeError(f"{name!r} of {self.path} is a table, not an array: use write_table")
        return spec

    def _item(self, name: str) -> ArraySpec | TableSpec:
        items = self.describe().items
        if self._by_name is None:
            self._by_name = {item.name: item for item in items}
        if name not in self._by_name:
            raise missing_key(name, self._by_name, self.path)
        return self._by_name[name]

    def _require_names(self, items: Sequence[ArraySpec | TableSpec]) -> None:
        """Refuse names that stand for two things: a column ``b/values`` beside ragged data ``b``."""
        names = [item.name for item in items]
        ragged = {item.ragged for item in items if isinstance(item, ArraySpec) and item.ragged not in (None, item.name)}
        twice = [name for name, count in Counter(names).items() if count > 1 or name in ragged]
        odd = [name for name in names if not _is_unicode(name)]
        for name in (*twice, *odd):
            raise UnsupportedData(
                say("{path} has a column name that cannot be used: {name!r}", path=self.path, name=name),
                why=say("it stands for two things") if name in twice else say("it is not valid Unicode"),
                fix=(say("rename the column"), say("load only what you need: keys=[…]")),
            )

    def _require_possible(self, spec: ArraySpec) -> None:
        """Refuse a shape that numpy cannot represent; an array without elements may still have impossible lengths."""
        most = prod(length for length in spec.shape if length) * max(1, spec.dtype.itemsize)
        if most > _MOST_BYTES or len(spec.shape) > _MOST_AXES:
            raise UnsupportedData(
                say("{name!r} of {path} is too large for a numpy array", name=spec.name, path=self.path),
                why=say("its shape is {shape}", shape=spec.shape),
                fix=(say("check the file"), say("load only what you need: keys=[…]")),
            )


class FileReader(BaseReader):
    """A reader of one file, which stays open as long as the reader."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._file = SourceFile(self._file_path(path))

    def _file_path(self, path: Path) -> Path:
        return path

    def descriptors(self) -> Sequence[int]:
        """File descriptor of the file."""
        return [self._file.fileno()]

    def _close(self) -> None:
        self._file.close()


def _is_unicode(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)  # surrogates


def what_is_read(name: str | None) -> str:
    """The item in words, for an error."""
    return "its contents" if name is None else repr(name)


def as_json(value: object) -> Any:
    """Convert an attribute to a value that JSON can store.

    Manifests are small files, so a large array is described instead of copied. Numbers that JSON lacks (nan, infinity)
    become the strings that ``float()`` accepts.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else {"omitted": "text", "length": len(value)}
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, complex):
        return [as_json(value.real), as_json(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return as_json(bytes(value).decode("utf-8", "replace"))
    if isinstance(value, np.generic):
        return _scalar(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return {"omitted": type(value).__name__}


def _scalar(value: np.generic) -> Any:
    if isinstance(value, np.void) and value.dtype.names:
        return {name: as_json(value[name]) for name in value.dtype.names}
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return str(value)
    if isinstance(value, np.longdouble):
        return as_json(float(value))
    plain = value.item()
    return {"omitted": type(value).__name__} if isinstance(plain, np.generic) else as_json(plain)


def _array(value: np.ndarray[Any, Any]) -> Any:
    if value.size > MOST_ELEMENTS:
        return {"omitted": "array", "shape": list(value.shape), "dtype": str(value.dtype)}
    if value.ndim == 0:
        return as_json(value[()])
    return [_array(row) if isinstance(row, np.ndarray) else as_json(row) for row in value]


_SHOWN, _INDEX_SHOWN = 20, 40
_nearest = partial(difflib.get_close_matches, n=1, cutoff=0.5)


class Selection:
    """The selected keys; None selects everything."""

    def __init__(self, keys: str | Iterable[str] | None = None) -> None:
        self.keys: tuple[str, ...] | None = None
        if keys is None:
            return
        given = (keys,) if isinstance(keys, str) else tuple(keys) if isinstance(keys, Iterable) else ()
        if not given or not all(isinstance(key, str) for key in given):
            raise UsageError(
                say("keys={keys!r} selects nothing", keys=keys),
                why=say("keys lists items of the file; None means all of them"),
                fix=(say("omit keys= to load everything"),),
            )
        self.keys = given
        # A name is taken if it, or a group above it, is one of these; a group is entered if it is above a key.
        self._covering = frozenset(one for key in given for one in (key, key.strip("/")))
        self._above = frozenset(group for key in given for group in _groups(key.strip("/")))

    def takes(self, name: str) -> bool:
        """Whether that item is selected, by its own name or by a group above it."""
        return self.keys is None or name in self._covering or any(one in self._covering for one in _groups(name))

    def enters(self, group: str) -> bool:
        """Whether an item below that group may be selected."""
        return self.takes(group) or group in self._above

    def columns(self, table: str, names: Iterable[str]) -> list[str]:
        """The selected columns of a table: ``column``, ``table/column``, or all by the table's name."""
        every = list(names)
        if self.keys is None:
            return every
        # A column with the table's name takes precedence over the table.
        if table not in every and self.takes(table):
            return every
        below = [key for key in self.keys if not Selection(key).takes(table)]
        inner = Selection(below) if below else None
        return [name for name in every if self.takes(name) or (inner is not None and inner.takes(f"{table}/{name}"))]

    def choose(self, names: Sequence[str], where: object) -> list[str]:
        """The selected names. Refuses a key that matches none."""
        taken = [name for name in names if self.takes(name)]
        self.check(taken, names, where)
        return taken

    def check(self, taken: Collection[str], every: Iterable[str], where: object) -> None:
        """Refuse a key that matches no selected item; ``every`` is listed in the error."""
        covering = {one for name in taken for one in (name, *_groups(name))} if self.keys else ()
        for key in self.keys or ():
            if key not in covering and key.strip("/") not in covering:
                raise missing_key(key, every, where)


def _groups(name: str) -> list[str]:
    """The groups above a name, "" for all of the file."""
    return ["", *(name[:at] for at, letter in enumerate(name) if letter == "/")]


def column_names(table: str, columns: Iterable[str]) -> list[str]:
    """All names that select a table or these columns of it."""
    named = list(columns)
    return [table, *named, *(f"{table}/{name}" for name in named)]


def missing_key(key: str, every: Iterable[str], where: object) -> MissingKey:
    """The error for an unknown name, with the names that exist and the nearest one."""
    names = list(dict.fromkeys(every))
    groups = {name.rpartition("/")[0] for name in names} - {""}
    bare, among = key.strip("/"), [*names, *sorted(groups)]
    # The part before the last slash may be the table, which the column names do not repeat.
    same = [name for name in names if name.endswith("/" + bare)]
    above, _, last = bare.rpartition("/")
    of_table = _nearest(last, [one for one in names if one != above]) if above in names else []
    near = same or of_table or _nearest(bare, among) or _nearest(last, among)
    fix = [say("did you mean {near!r}?", near=near[0])] if near else []
    return MissingKey(
        say("{where} has no {key!r}", where=where, key=key),
        why=say("it holds {shown}", shown=names_shown(names)),
        fix=(*fix, say("omit keys= to load everything")),
    )


def not_a_name(given: object, names: Sequence[str]) -> MissingKey:
    """The error for ``data[0]``, ``data[:5]``, ``data[b"x"]``: the indexes of lists and of torch's datasets."""
    meant = given.decode(errors="replace") if isinstance(given, bytes) else ""
    name = meant if meant in names else next(iter(names), None)
    index = _index_text(given)
    code = f"data[{name!r}]" + ("" if given is None or isinstance(given, bytes) else f"[{index}]")
    return MissingKey(
        say("data[{given}]: data are selected by name, not by {kind}", given=index, kind=type(given).__name__),
        why=say("it holds {shown}", shown=names_shown(names)),
        fix=(
            *([say("for one array: {code}", code=code)] if names else []),
            say("for a torch Dataset of all rows: data.dataset()"),
            say("for batches of all rows: data.batches(32)"),
        ),
    )


def _index_text(given: object) -> str:
    """An index as it is written in brackets, shortened."""
    if isinstance(given, slice):
        ends = ["" if end is None else repr(end) for end in (given.start, given.stop, given.step)]
        return ":".join(ends if given.step is not None else ends[:2])
    text = str(given) if isinstance(given, np.generic) else repr(given)
    return text if len(text) <= _INDEX_SHOWN else "…"


def names_shown(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    held = listed(map(shown, names[:_SHOWN])) or say("nothing")
    return held if len(names) <= _SHOWN else say("{first} and {count} more", first=held, count=len(names) - _SHOWN)


# How a format is recognized.


class Candidate:
    """A file whose format is to be recognized. It is not empty."""

    def __init__(self, file: SourceFile, dtype: str | None = None) -> None:
        self.file = file
        self.dtype = dtype  # that the caller gave
        self.path = file.path
        self.size = file.size
        self.head = file.read_at(0, min(_HEAD, file.size))  # its first 512 bytes

    def read_at(self, offset: int, count: int) -> bytes:
        """Read exactly ``count`` bytes from ``offset``."""
        return self.file.read_at(offset, count)

    @cached_property
    def members(self) -> frozenset[str]:
        """The names in a zip archive; of any other file none."""
        if not self.head.startswith(_ZIP):
            return frozenset()
        if self.dtype is not None and not lazy_import("legroom.formats.unsupported_file_types").is_zip(self.file):
            return frozenset()  # tokens may begin like this by chance
        return frozenset(info.filename for info in lazy_import("legroom.formats.npy_reader").member_infos(self.file))


@dataclass(frozen=True, slots=True)
class Format:
    """How the files of one format are recognized and read.

    Attributes:
        name: As ``Description.format`` and `legroom cache list` show it.
        reader: A subclass of BaseReader, or where it is: ``"package.module:Class"``, imported for the first such file.
        title: As error messages show it; the name by default. Ours are translated.
        recognizes: Whether a file has this format, by its bytes. Reads little, and nothing that depends on its name.
        recognizes_directory: Whether a directory has this format. Lists nothing: it may be large.
        directory_files: The files of such a directory that hold its data, in any order. Without it, everything below
            the directory is part of the data, and an added file makes it another dataset.
        at_offsets: It reads through SourceFile at offsets alone, so also while the file is being downloaded.
        at_offsets_with_keys: The same, if keys are selected.
        takes_dtype: Its reader has a third argument: the type of tokens that the caller gave, or None.
        endings: Of file names, to suggest a pattern for a directory of such files.
    """

    name: str
    reader: str | type[BaseReader]
    title: str = ""
    recognizes: Callable[[Candidate], bool] | None = None
    recognizes_directory: Callable[[Path], bool] | None = None
    directory_files: Callable[[Path], Sequence[Path]] | None = None
    at_offsets: bool = False
    at_offsets_with_keys: bool = False
    takes_dtype: bool = False
    endings: tuple[str, ...] = ()

    def reads_at_offsets(self, selection: Selection) -> bool:
        """Whether a file is read where it is needed, and not as a whole first."""
        return self.at_offsets or (self.at_offsets_with_keys and selection.keys is not None)

    def open(self, path: Path, selection: Selection, memory: DecodingMemory, dtype: str | None = None) -> BaseReader:
        """A reader of that file or directory."""
        kind: Any = self.reader
        if isinstance(kind, str):
            module, _, name = kind.partition(":")
            # The lock of lazy_import is for our own modules: see there.
            kind = getattr(lazy_import(module) if module.startswith("legroom.") else import_module(module), name)
        reader: BaseReader = kind(path, selection, dtype) if self.takes_dtype else kind(path, selection)
        reader.memory = memory
        return reader
