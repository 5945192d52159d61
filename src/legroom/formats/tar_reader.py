"""Read WebDataset shards: a tar archive whose files form samples, as raw bytes.

Files in a row with the same name up to the first dot of the last path component are one sample. What follows the dot,
in lower case, is a column: a ragged array of bytes. ``__key__`` is the samples' names. Names without a dot, names in
double underscores, directories and devices are skipped, as the webdataset package does. What macOS keeps beside a file
(AppleDouble, ._NAME) is skipped as well: webdataset makes samples of it. It raises for a file that a sample has twice;
so does this. A sample that lacks a column is refused, because a row of a ragged array
can be empty but not missing.

webdataset skips links, so their samples are missing there. Here a link to a file of the same archive is that file, as
tarfile resolves it; any other is refused.
"""

from __future__ import annotations

import logging
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from legroom.errors import LegroomError, UnsupportedData
from legroom.formats.base_reader import ArraySpec, Description, Selection, Slab
from legroom.formats.file_reads_and_errors import SourceFile, are_among, changed_while_read, packed_stamp
from legroom.formats.fill_output_arrays import Array
from legroom.formats.gather_byte_ranges import GrowingMemory, SlabReader, gather_ranges, ragged_specs, slabs_of_rows
from legroom.formats.tar_members import LINKS, Links, members
from legroom.messages import say

log = logging.getLogger("legroom")
KEY = "__key__"
_MOST_COLUMNS = 1000
_ROW = 18  # bytes of a column's row in the index: two numbers, and what a growing array allocates ahead


class TarReader(SlabReader):
    """A tar archive of samples."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        file = SourceFile(path)
        self._size, self._stamp = file.size, packed_stamp(os.fstat(file.fileno()))
        # A dataset has thousands of shards, more than a process may open at once. The stamp of a file that is being
        # downloaded changes.
        self._kept = file if file.is_arriving else None
        if self._kept is None:
            file.close()
        self._columns: dict[str, _Column] = {}
        self._keys = _Column()

    def _describe(self) -> Description:
        index = _Index(self)
        skipped = 0
        with self.opened() as file:
            links: Links | None = None
            for number, member in enumerate(members(file)):
                kind, name, start, size, _ = member
                if is_apple_double(name):
                    skipped += kind == b"0"
                elif kind == b"0":
                    index.add(name, start, size)
                elif kind in LINKS and split_name(name)[0] is not None:
                    links = links or Links(file, index.memory)
                    leads = links.follow(number, member)
                    if isinstance(leads, str):
                        index.add(name, 0, 0, leads)
                    elif leads is not None:
                        index.add(name, *leads)
        index.finish()
        index.warn_of_dots_in_keys()
        if skipped:
            log.info(
                "%s",
                say(
                    "{path}: {count} files named ._* are skipped, which macOS writes beside others (AppleDouble)",
                    path=self.path, count=skipped,
                ),
            )  # fmt: skip
        if not index.seen:
            raise UnsupportedData(
                say("{path} has no samples", path=self.path),
                why=say("no file in it is named KEY.EXTENSION"),
                fix=(say("name the files of a sample KEY.EXTENSION, with the same extensions in every sample"),),
            )
        self._columns, self._keys = index.columns, index.keys
        self._key_text = np.frombuffer(index.key_text, np.uint8)
        specs = [spec for name, column in self._columns.items() for spec in ragged_specs(name, *column.size)]
        specs += ragged_specs(KEY, *self._keys.size, text=True)
        taken = [spec for spec in specs if self.selection.takes(spec.name)]
        known = [f"{name}/{part}" for name in index.seen for part in ("offsets", "values")]
        every = dict.fromkeys([*known, *(spec.name for spec in specs)])
        self.selection.check([spec.name for spec in taken], every, self.path)
        return Description("webdataset", tuple(taken), {}, (self.path,))

    def _slabs(self, spec: ArraySpec) -> Sequence[Slab] | None:
        column = self._columns.get(str(spec.ragged))
        if column is None or not spec.name.endswith("/values"):
            return None
        starts, offsets, what = column.starts_array(), column.offsets_array(), self._label(spec)

        def decode(start: int, end: int) -> Iterator[memoryview]:
            with self.opened() as file:
                yield from gather_ranges(file, starts, offsets, self.memory, what, start, end)

        return slabs_of_rows(offsets, decode)

    def _small(self, spec: ArraySpec) -> Array:
        if spec.name.endswith("/offsets"):
            return self._columns.get(str(spec.ragged), self._keys).offsets_array()
        return self._key_text

    @contextmanager
    def opened(self) -> Iterator[SourceFile]:
        """The archive; SourceChanged if it is another file than at first."""
        if self._kept is not None:
            yield self._kept
            return
        with SourceFile(self.path) as file:
            if packed_stamp(os.fstat(file.fileno())) != self._stamp:
                raise changed_while_read(self.path)
            yield file

    def is_listed_among(self, stamps: bytes) -> bool:
        """Whether the archive has one of these stamps."""
        return are_among(self._stamp, stamps)

    def descriptors(self) -> list[int]:
        """File descriptor of the archive while it is being downloaded; else it is opened when it is read."""
        return [self._kept.fileno()] if self._kept is not None else []

    def _close(self) -> None:
        if self._kept is not None:
            self._kept.close()


class _Column:
    """Where each row of a ragged array begins in the archive, and in the array."""

    def __init__(self) -> None:
        self.starts, self.offsets = array("q"), array("q", [0])

    def append(self, start: int, size: int) -> None:
        self.starts.append(start)
        self.offsets.append(self.offsets[-1] + size)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and bytes."""
        return len(self.starts), self.offsets[-1]

    def starts_array(self) -> Array:
        return np.frombuffer(self.starts, np.int64)

    def offsets_array(self) -> Array:
        return np.frombuffer(self.offsets, np.int64)


class _Index:
    """Groups the files of an archive into samples."""

    def __init__(self, reader: TarReader) -> None:
        self._reader, self._path, self._selection = reader, reader.path, reader.selection
        what = say("the list of files in {path}", path=reader.path)
        self.memory = GrowingMemory(reader.memory, what, reader._size)
        self.columns: dict[str, _Column] = {}
        self.keys, self.key_text = _Column(), bytearray()
        self.seen: dict[str, bool] = {}  # each column's name, and whether it is selected
        self._key: str | None = None
        self._here: set[str] = set()  # the columns of the current sample
        self._first: str | None = None  # the first sample's key

    def add(self, name: str, start: int, size: int, unreadable: str = "") -> None:
        key, column = split_name(name)
        if key is None:
            return
        if key != self._key:
            self.finish()
            self._begin(key)
        if column in self._here:
            raise self._refused(
                key,
                say("it has two files {name!r}", name="." + column),
                say("write each file of a sample once: upper and lower case are the same"),
            )
        self._here.add(column)
        if self._is_selected(key, column):
            if unreadable:
                raise self._refused(
                    key,
                    say("{name!r} is a link: {why}", name=name, why=unreadable),
                    say("write the files themselves into the archive: tar --dereference --hard-dereference -cf …"),
                )
            self.memory.add(_ROW)
            if column not in self.columns:
                self.columns[column] = _Column()
            self.columns[column].append(start, size)
            if len(self.columns[column].starts) < len(self.keys.starts):
                raise self._lacks(str(self._first), column, key)

    def finish(self) -> None:
        """End the current sample, or the archive."""
        if self._key is None:
            return
        rows = len(self.keys.starts)
        for name, column in self.columns.items():
            if len(column.starts) < rows:
                raise self._lacks(self._key, name, str(self._first))

    def warn_of_dots_in_keys(self) -> None:
        """Warn of one sample with the files 1.jpg, 2.jpg, …: a key with a dot in it ends there."""
        if len(self.keys.starts) == 1 and len({re.sub("[0-9]+", "0", one) for one in self._here}) < len(self._here):
            log.warning(
                "%s",
                say(
                    "{path} is one sample {key!r} with {count} files: a key ends at the first dot of the file's name, "
                    "as in webdataset. If they are several samples, name them without this dot",
                    path=self._path, key=self._key, count=len(self._here),
                ),
            )  # fmt: skip

    def _begin(self, key: str) -> None:
        text = key.encode()
        self.memory.add(_ROW + len(text) * 9 // 8)
        self.keys.append(0, len(text))
        self.key_text += text
        self._key, self._here = key, set()
        if self._first is None:
            self._first = key

    def _is_selected(self, key: str, column: str) -> bool:
        if column not in self.seen:
            if not column or (column.startswith("__") and column.endswith("__")):
                raise self._refused(
                    key,
                    say("{name!r} cannot be the name of a column", name=column),
                    say("give the file an extension, such as .txt"),
                )
            if len(self.seen) == _MOST_COLUMNS:
                raise self._refused(
                    key,
                    say("there are more than {most} different extensions", most=_MOST_COLUMNS),
                    say("name the files of a sample KEY.EXTENSION, without a dot in KEY and with the same extensions"),
                )
            self.seen[column] = any(self._selection.takes(f"{column}/{part}") for part in ("offsets", "values"))
        return self.seen[column]

    def _lacks(self, key: str, column: str, other: str) -> UnsupportedData:
        if apart := self._scattered(key, column):
            return apart
        common = [name for name in self.columns if name != column]
        why = say("it has no {name!r}, which sample {other!r} has", name="." + column, other=other)
        if hidden := next((one for one in (key, other) if one.endswith("/")), None):  # all that it has are such files
            why = say("{why}; {key!r} are the files in {key} whose names begin with a dot", why=why, key=hidden)
            fix = say("write the archive without them: {command}", command="tar --exclude='.[!/]*' -cf …")
            return self._refused(key, why, fix)
        keys = ", ".join(map(repr, common or [KEY]))
        return self._refused(key, why, say("load only what all samples have: keys=[{keys}]", keys=keys))

    def _scattered(self, key: str, column: str) -> UnsupportedData | None:
        """The error for a sample that lacks a column because its file stands elsewhere in the archive; else None."""
        runs: list[tuple[str, str]] = []  # the first and the last file of each run of files with this key
        after: str | None = None  # the file after the first run
        last, has_column = None, False
        try:
            with self._reader.opened() as file:
                for kind, name, *_ in members(file):
                    one, its_column = split_name(name)
                    if one is None or is_apple_double(name) or not (kind == b"0" or kind in LINKS):
                        continue
                    if one == key:
                        runs = [*runs[:-1], (runs[-1][0], name)] if last == key else [*runs, (name, name)]
                        has_column = has_column or its_column == column
                    elif last == key:
                        after = after or name
                    last = one
                    if len(runs) > 1 and has_column:
                        break
        except LegroomError:
            return None  # damaged further on: what is known by now is reported
        if len(runs) < 2 or not has_column:
            return None
        return self._refused(
            key,
            say(
                "its files do not follow one another: {other!r} of another sample is between {first!r} and {second!r}",
                other=after, first=runs[0][1], second=runs[1][0],
            ),
            say("write the files of a sample one after the other, for example sorted by name: tar --sort=name -cf …"),
        )  # fmt: skip

    def _refused(self, key: str, why: str, fix: str) -> UnsupportedData:
        return UnsupportedData(
            say("cannot read sample {key!r} of {path}", key=key, path=self._path), why=why, fix=(fix,)
        )


def is_apple_double(name: str) -> bool:
    """Whether a file has what macOS keeps beside another one, by its name."""
    return name.startswith("._", name.rfind("/") + 1)


def split_name(name: str) -> tuple[str | None, str]:
    """A file's sample and its column; (None, "") for a file that belongs to no sample."""
    top, slash, _ = name.partition("/")
    if top.startswith("__") and top.endswith("__") and (len(top) > 3 or not slash):
        return None, ""
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot == base:
        # The last component starts with a dot: the one before it is the sample, unless that has dots too.
        above = name[name.rfind("/", 0, base - 1) + 1 : base] if base else ""
        dot = dot if above and "." not in above else -1
    return (None, "") if dot < 0 else (name[:dot], name[dot + 1 :].lower())
