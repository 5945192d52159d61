"""Read directories of Hugging Face datasets as the tables that ``datasets`` shows.

``save_to_disk``   ``state.json`` lists the files in order. A DatasetDict has such a directory for each split.
``load_dataset``   its cache: ``dataset_info.json`` lists the splits, and each has ``<name>-<split>*.arrow``.

The selection of columns (``set_format(columns=...)``) is honoured. An indices mapping, files with other features than
``dataset_info.json`` states, and dictionaries, which ``datasets`` converts, are refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from legroom.errors import UnsupportedData
from legroom.formats.arrow_reader import ArrowReader
from legroom.formats.base_reader import (
    ArraySpec,
    BaseReader,
    Description,
    Selection,
    TableSpec,
    column_names,
    what_is_read,
)
from legroom.formats.base_table_reader import NAME, arrow_errors, every_type, write_ipc
from legroom.formats.file_reads_and_errors import SourceFile, damaged, make_room_for_files, unreadable
from legroom.formats.fill_output_arrays import Progress
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import require

DICT, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"
_MOST_JSON = 16 << 20
_MOST_NAMES = 100_000  # in a directory of load_dataset's cache
_STATE_FIELDS = {
    *("_data_files", "_fingerprint", "_format_columns", "_format_kwargs", "_format_type", "_output_all_columns"),
    "_split",
}
_OLD_STATE_FIELDS = {"_indexes", "_indices_data_files", "_indices_files"}
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


@dataclass(frozen=True)
class _Split:
    """A table: its files in the order of their rows, and what is stated of them."""

    name: str
    files: tuple[Path, ...]
    features: Any  # by column; None: not stated
    columns: tuple[str, ...] | None = None  # those that are shown; None: all
    rows: tuple[int, ...] | None = None  # of each file; None: not stated


@dataclass
class _Layout:
    """A directory by its JSON files, which stay open: a file that is replaced meanwhile must be noticed."""

    splits: list[_Split] = field(default_factory=list)
    json_files: list[SourceFile] = field(default_factory=list)


def dataset_files(path: Path) -> list[Path]:
    """Every file that the data come from. Other files, such as those that ``map`` caches there, are no part of it."""
    with ExitStack() as stack:
        layout = _read_layout(path, stack)
        return [*(file.path for file in layout.json_files), *(file for split in layout.splits for file in split.files)]


class HfDatasetsReader(BaseReader):
    """A directory of ``save_to_disk``, or of ``load_dataset``'s cache."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._files = ExitStack()
        self._shards: dict[str, list[_Shard]] = {}
        with ExitStack() as stack:
            self._layout = _read_layout(path, stack)
            make_room_for_files(sum(len(split.files) for split in self._layout.splits))
            for split in self._layout.splits:
                shards = [stack.enter_context(_Shard(file, Selection(None))) for file in split.files]
                self._shards[split.name] = shards
            self._files = stack.pop_all()

    def _library_errors(self, name: str | None) -> AbstractContextManager[None]:
        return arrow_errors(self.path, what_is_read(name))

    def _describe(self) -> Description:
        columns = {split.name: self._columns(split) for split in self._layout.splits}
        taken, every = [], []
        for name, shown in columns.items():
            chosen = self.selection.columns(name, shown)
            every += shown
            if chosen or self.selection.takes(name):
                taken += column_names(name, chosen)
                for shard in self._shards[name]:
                    shard.chosen = chosen
            else:
                self._close_split(name)
        self.selection.check(taken, [*columns, *dict.fromkeys(every)] if len(columns) > 1 else every, self.path)
        specs = tuple(self._spec(split) for split in self._layout.splits if self._shards[split.name])
        return Description("hf-datasets", specs, {}, (self.path,))

    def _close_split(self, name: str) -> None:
        for shard in self._shards[name]:
            shard.close()
        self._shards[name] = []

    def _columns(self, split: _Split) -> list[str]:
        """The columns that are shown of a split, whose files agree with each other and with what is stated."""
        first, *others = self._shards[split.name]
        for shard in self._shards[split.name]:
            shard.require_end()
            _check_features(shard, split.features)
        for other in others:
            if not other.schema.equals(first.schema):
                raise damaged(other.path, f"its columns are not those of {first.path.name!r}")
        names = first.names()
        missing = set(split.columns or ()) - set(names)
        if missing:
            raise damaged(self.path, f"{STATE} shows a column {min(missing)!r} that no file has")
        return names if split.columns is None else [name for name in names if name in split.columns]

    def _spec(self, split: _Split) -> TableSpec:
        parts = []
        for index, shard in enumerate(self._shards[split.name]):
            (part,) = shard.describe().items
            assert isinstance(part, TableSpec)
            if split.rows is not None and part.rows != split.rows[index]:
                stated = split.rows[index]
                raise damaged(shard.path, f"it has {part.rows} rows, but its metadata states {stated}")
            parts.append(part)
        first = parts[0]
        nbytes = sum(part.nbytes for part in parts)
        rows = sum(part.rows for part in parts)
        meaning = first.meaning if split.features is None else {"huggingface": split.features}
        return TableSpec(split.name, rows, first.columns, nbytes, first.attributes, meaning)

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        return max(shard.decoding(NAME) for shard in self._shards[spec.name])

    def _write(self, spec: TableSpec, path: Path, progress: Progress, ask: Progress) -> int:
        shards = self._shards[spec.name]
        batches = (batch for shard in shards for batch in shard.batches())
        rows, taken = write_ipc(
            shards[0].chosen_schema(), batches, path, spec.nbytes, progress, self.path, ask, self.memory.write_through
        )
        if rows != spec.rows:
            why = say("it has {rows} rows, but its metadata states {stated}", rows=rows, stated=spec.rows)
            raise damaged(self.path, why)
        return taken

    def descriptors(self) -> list[int]:
        """File descriptors of the files being read."""
        shards = [fd for group in self._shards.values() for shard in group for fd in shard.descriptors()]
        return [*(file.fileno() for file in self._layout.json_files), *shards]

    def _close(self) -> None:
        self._files.close()


class _Shard(ArrowReader):
    """One of the files of a table."""

    chosen: list[str]

    def names(self) -> list[str]:
        """All its columns. Refuses two of one name."""
        return super()._columns(self._whole_schema)

    def _columns(self, schema: Any) -> list[str]:
        return self.chosen

    @property
    def schema(self) -> Any:
        return self._whole_schema

    def chosen_schema(self) -> Any:
        return self._schema()

    def batches(self) -> Iterator[Any]:
        return self._batches()

    def require_end(self) -> None:
        """Refuse a stream without an end marker: ``datasets`` writes one, so the file is truncated."""
        if not self._is_file and self._file.read_at(max(0, self._file.size - len(_END)), len(_END)) != _END:
            raise damaged(self.path, say("it ends without the end marker of an Arrow stream: the file is truncated"))


def _check_features(shard: _Shard, stated: Any) -> None:
    """Refuse a file for which ``datasets`` would convert columns: its types are not those of dataset_info.json."""
    arrow = require("pyarrow", "parquet", phrase("Arrow IPC"))
    for part in shard.schema:
        if any(arrow.types.is_dictionary(kind) for kind in every_type(part.type)):
            raise _unsupported(shard.path, say("its column {name!r} has a dictionary", name=part.name))
    own = (shard.schema.metadata or {}).get(b"huggingface")
    written = None if own is None else _item(_parsed(own, shard.path, "huggingface"), "info", dict, shard.path, {})
    features = None if written is None else written.get("features")
    if stated is None:
        return
    if features is not None and features != stated:
        raise _unsupported(shard.path, say("its features are not those of {file}", file=INFO))
    if set(stated) != set(shard.schema.names):
        raise _unsupported(shard.path, say("its columns are not those of {file}", file=INFO))
    for name, feature in stated.items():
        expected = _arrow_type(feature, arrow)
        has = shard.schema.field(name).type
        if (expected is None and features is None) or (expected is not None and expected != has):
            raise _unsupported(shard.path, say("the type of its column {name!r} is {has}, not that of {file}",
                                               name=name, has=has, file=INFO))  # fmt: skip


def _arrow_type(feature: Any, arrow: Any) -> Any:
    """The Arrow type of a feature that is a single value; None for others."""
    kind = feature.get("_type") if isinstance(feature, dict) else None
    if kind == "ClassLabel":
        return arrow.int64()
    if kind != "Value":
        return None
    try:
        return arrow.type_for_alias(feature.get("dtype"))
    except (ValueError, TypeError):
        return None


# The JSON files.


def _read_layout(path: Path, stack: ExitStack) -> _Layout:
    layout = _Layout()

    def read(file: Path) -> dict[str, Any]:
        source = stack.enter_context(SourceFile(file))
        layout.json_files.append(source)
        if source.size > _MOST_JSON:
            raise damaged(file, f"it has {source.size} bytes; at most {_MOST_JSON} are read")
        value = _parsed(source.read_at(0, source.size), file, file.name)
        if not isinstance(value, dict):
            raise damaged(file, "it is not a JSON object")
        return value

    # In this order datasets itself looks: one may have been saved over the other.
    if os.path.lexists(path / STATE) and os.path.lexists(path / INFO):
        layout.splits.append(_saved(path, NAME, read))
    elif os.path.lexists(path / DICT):
        names = _item(read(path / DICT), "splits", list, path / DICT)
        if not names or len(set(map(str, names))) != len(names):
            raise damaged(path / DICT, "it names no splits, or one of them twice")
        for name in names:
            layout.splits.append(_saved(path / _plain(name, path / DICT), name, read))
    else:
        layout.splits += _downloaded(path, read(path / INFO))
    return layout


def _saved(path: Path, name: str, read: Callable[[Path], dict[str, Any]]) -> _Split:
    """A directory of ``save_to_disk``."""
    state, info = read(path / STATE), read(path / INFO)
    where = path / STATE
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UnsupportedData(
            say("{path} has an indices mapping", path=path),
            why=say("its rows are those that a selection or shuffle has chosen, in another order than in its files"),
            fix=(say("save it again: datasets.load_from_disk(path).flatten_indices().save_to_disk(new_path)"),),
        )
    if missing := _STATE_FIELDS - state.keys():
        raise damaged(where, f"it has no {min(missing)!r}")
    if unknown := state.keys() - _STATE_FIELDS - _OLD_STATE_FIELDS:
        raise _unsupported(where, say("it has the unknown field {name!r}", name=min(unknown)))
    entries = _item(state, "_data_files", list, where)
    files = tuple(path / _plain(_item(one, "filename", str, where), where) for one in entries)
    if not files:
        raise _unsupported(path, say("it has no data files: the dataset has no rows"))
    if len(set(files)) != len(files):
        raise damaged(where, "it names a file twice")
    columns = None
    if state.get("_format_columns") is not None and not state.get("_output_all_columns"):
        columns = tuple(str(one) for one in _item(state, "_format_columns", list, where))
    return _Split(name, files, _features(info, path / INFO), columns)


def _downloaded(path: Path, info: dict[str, Any]) -> list[_Split]:
    """The splits in a directory of ``load_dataset``'s cache."""
    where = path / INFO
    splits = info.get("splits")
    if not isinstance(splits, dict) or not splits:
        raise _unsupported(path, say("it has neither {state} nor splits in its {info}", state=STATE, info=INFO))
    names = _names(path)
    found = []
    for name, split in splits.items():
        lengths = _item(split, "shard_lengths", list, where, None)
        rows = tuple(lengths) if lengths and len(lengths) > 1 else (_item(split, "num_examples", int, where),)
        if not all(type(count) is int and count >= 0 for count in rows):
            raise damaged(where, f"invalid number of rows of the split {name!r}")
        if sum(rows) != _item(split, "num_examples", int, where):
            raise damaged(where, f"the rows of the shards of {name!r} are not all its rows")
        files = _split_files(path, names, _plain(name, where), len(rows))
        found.append(_Split(name, files, _features(info, where), rows=rows))
    prefixes = {split.files[0].name.rpartition(f"-{split.name}")[0] for split in found}
    if len(prefixes) > 1:
        raise _unsupported(
            path, say("it holds the files of several datasets: {names}", names=", ".join(sorted(prefixes)))
        )
    return found


def _split_files(path: Path, names: Sequence[str], split: str, count: int) -> tuple[Path, ...]:
    """``<name>-<split>.arrow``, or as many shards of it as are stated."""
    shard = f"-00000-of-{count:05d}" if count > 1 else ""
    first = re.compile(rf"(?P<prefix>.+-{re.escape(split)}){shard}\.arrow")
    matches = [match["prefix"] for match in map(first.fullmatch, names) if match]
    if len(matches) != 1:
        raise _unsupported(
            path,
            say("the split {split!r} should have one file <name>-{split}{shard}.arrow; there are {count}",
                split=split, shard=shard, count=len(matches)),
        )  # fmt: skip
    if count == 1:
        return (path / f"{matches[0]}.arrow",)
    return tuple(path / f"{matches[0]}-{index:05d}-of-{count:05d}.arrow" for index in range(count))


def _names(path: Path) -> list[str]:
    try:
        with os.scandir(path) as found:
            names = [one.name for one in islice(found, _MOST_NAMES + 1)]
    except OSError as problem:
        raise unreadable(path, problem) from problem
    if len(names) > _MOST_NAMES:
        raise _unsupported(path, say("it holds more than {most} files", most=_MOST_NAMES))
    return names


def _features(info: dict[str, Any], where: Path) -> dict[str, Any] | None:
    features = _item(info, "features", dict, where, None)
    return features or None


def _parsed(data: bytes, path: Path, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise damaged(path, f"{what} is not JSON: {problem}") from problem


_NEEDED = object()


def _item(value: Any, name: str, kind: type, path: Path, default: Any = _NEEDED) -> Any:
    """A field of a JSON object, of that type."""
    found = value.get(name) if isinstance(value, dict) else _NEEDED
    if found is None and default is not _NEEDED:
        return default
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise damaged(path, f"{name!r} is missing or is not a {kind.__name__}")
    return found


def _plain(name: Any, path: Path) -> str:
    """A file name. Refuses one that leads out of the directory."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise damaged(path, f"{name!r} is not the name of a file beside it")
    return name


def _unsupported(path: Path, why: str) -> UnsupportedData:
    return UnsupportedData(
        say("{path} cannot be read as a Hugging Face dataset", path=path),
        why=why,
        fix=(
            say("save it again: datasets.load_from_disk(path).save_to_disk(new_path)"),
            say("pass its Arrow files instead, in the order of their rows"),
        ),
    )
