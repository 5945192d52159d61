"""Read LMDB databases: ``data.mdb``, or the directory that holds it, without the lmdb library.

The library maps the file and trusts every page number in it, so a damaged file ends the process. Here every number is
checked. Keys and values are ragged bytes in the order of the keys, ``key`` and ``value``.

Read are files of 64-bit little-endian machines (LMDB 0.9, data version 1) with one unnamed database. Named databases,
several values for a key, and key orders other than by bytes are refused. A commit by another process is noticed: the
pages of a committed state stay as they are until the next commit, which changes one of the two meta pages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from legroom.errors import DamagedSource, SourceChanged, UnsupportedData
from legroom.formats.base_reader import ArraySpec, Description, FileReader, Slab
from legroom.formats.file_reads_and_errors import damaged
from legroom.formats.fill_output_arrays import PIECE, Array
from legroom.formats.gather_byte_ranges import SlabReader, ragged_specs
from legroom.messages import say

FILE = "data.mdb"
MAGIC = 0xBEEFC0DE
_VERSION = 1
_HEADER = struct.Struct("<QHHHH")  # of a page: its number, padding, flags, end of the node offsets, start of the nodes
_META = struct.Struct("<IIQQ")  # magic, version, address, size of the map
_TREE = struct.Struct("<IHHQQQQQ")  # padding, flags, depth, branch, leaf, overflow pages, entries, root
_LAST = struct.Struct("<QQ")  # last page, transaction
_META_BYTES = _META.size + 2 * _TREE.size + _LAST.size
_BRANCH, _LEAF, _OVERFLOW, _IS_META = 1, 2, 4, 8
_BIG, _NAMED, _DUPLICATES = 1, 2, 4  # of a node: the value is in pages of its own, is a database, has several values
_INTEGER_KEYS, _FIXED_MAP, _NO_DIRECTORY = 8, 1, 0x4000
_NO_PAGE = (1 << 64) - 1
_NODE = 8  # bytes before a key
_MOST_DEPTH = 32  # the library's limit
_SLAB = 4 * PIECE
_INT = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class _Tree:
    """The state of the database after one transaction."""

    page_size: int
    flags: int
    depth: int
    entries: int
    root: int
    last_page: int
    transaction: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where in the file the keys, or the values, are."""

    starts: Array  # byte in the file; a value in pages of its own starts 16 bytes after the start of a page
    offsets: Array  # in all keys or values together, one more than rows


class LmdbReader(SlabReader, FileReader):
    """An LMDB database."""

    _slab_memory = 3 * PIECE

    def _file_path(self, path: Path) -> Path:
        return path / FILE if path.is_dir() else path

    def _describe(self) -> Description:
        self._metas = self._read_metas()
        self._tree = self._newest_tree()
        self._require_plain()
        self._rows = dict(zip(("key", "value"), self._find_rows(), strict=True))
        specs = {
            spec.name: spec
            for name, rows in self._rows.items()
            for spec in ragged_specs(name, len(rows.starts), int(rows.offsets[-1]))
        }
        taken = self.selection.choose([*specs], self.path)
        self._require_same_state()
        return Description("lmdb", tuple(specs[name] for name in taken), {}, (self.path,))

    # The state that is read.

    def _read_metas(self) -> tuple[bytes, bytes]:
        first = self._file.read_at(0, min(self._file.size, _HEADER.size + _META_BYTES))
        if len(first) < _HEADER.size + _META_BYTES:
            raise damaged(self.path, "it ends before its first page does")
        return first, self._file.read_at(_page_size(first, self.path), _HEADER.size + _META_BYTES)

    def _newest_tree(self) -> _Tree:
        both = [_tree(meta, number, self.path) for number, meta in enumerate(self._metas)]
        if both[0].page_size != both[1].page_size:
            raise damaged(self.path, "its two meta pages differ in the page size")
        tree = max(both, key=lambda one: one.transaction)
        map_sizes = [_META.unpack_from(meta, _HEADER.size)[3] for meta in self._metas]  # MDB_WRITEMAP: all of the map
        if self._file.size % tree.page_size and self._file.size not in map_sizes:
            raise damaged(self.path, f"its {self._file.size} bytes are not whole pages of {tree.page_size}")
        return tree

    def _require_plain(self) -> None:
        tree = self._tree
        if tree.flags:
            raise _unsupported(
                self.path,
                say("its keys are not in the order of their bytes, or have several values (flags {flags:#x})",
                    flags=tree.flags),
            )  # fmt: skip
        empty = tree.root == _NO_PAGE
        if empty != (tree.entries == 0) or empty != (tree.depth == 0) or tree.depth > _MOST_DEPTH:
            why = say("a tree of depth {depth} with {entries} entries", depth=tree.depth, entries=tree.entries)
            raise damaged(self.path, why)
        # A node has at least its offset and its header, so a page of the file has at most that many.
        most = self._file.size // (_NODE + 2)
        if tree.entries > most:
            raise damaged(self.path, f"it states {tree.entries} entries, but its size allows {most}")

    def _require_same_state(self) -> None:
        try:
            now = self._read_metas()
        except DamagedSource:
            now = (b"", b"")
        if now != self._metas:
            raise SourceChanged(
                say("{path} changed while it was being read", path=self.path),
                why=say("a process has committed a transaction to the database"),
                fix=(say("wait until the writer is done, then open it again"),),
            )

    # The tree.

    def _find_rows(self) -> tuple[_Rows, _Rows]:
        count = self._tree.entries
        what = say("the index of {path}", path=self.path)
        keys, values = (
            _Rows(self.memory.array((count,), _INT, what), self.memory.array((count + 1,), _INT, what))
            for _ in range(2)
        )
        done, last = 0, b""
        with self.memory.take(self._walk_bytes(), what):
            for page in self._leaves():
                found = _Leaf(page, self._tree.page_size, self.path)
                if done + found.count > count:
                    raise damaged(self.path, f"it has more entries than the {count} it states")
                texts = found.keys()
                if (last and texts[0] <= last) or any(first >= second for first, second in pairwise(texts)):
                    raise damaged(self.path, "its keys are not in order")
                last = texts[-1]
                into = slice(done, done + found.count)
                keys.starts[into], keys.offsets[done + 1 : done + 1 + found.count] = found.key_starts, found.key_lengths
                values.starts[into] = self._value_starts(found)
                values.offsets[done + 1 : done + 1 + found.count] = found.value_lengths
                done += found.count
        if done != count:
            raise damaged(self.path, f"it has {done} entries, but states {count}")
        for rows in (keys, values):
            rows.offsets[0] = 0
        with self.memory.take(32 * count, what):
            self._require_disjoint(values)
        for rows in (keys, values):
            np.cumsum(rows.offsets, out=rows.offsets)
        return keys, values

    def _walk_bytes(self) -> int:
        """Memory for the pages on the way to a leaf, with their nodes as Python objects."""
        return 64 * self._tree.page_size * max(1, self._tree.depth)

    def _leaves(self) -> Iterator[bytes]:
        """The leaf pages in the order of their keys."""
        if self._tree.root == _NO_PAGE:
            return
        waiting = [(self._tree.root, 1)]
        visited, most = 0, self._file.size // self._tree.page_size
        while waiting:
            number, depth = waiting.pop()
            visited += 1
            if visited > most:
                raise damaged(self.path, "its tree refers to the same pages several times")
            page = self._page(number, _LEAF if depth == self._tree.depth else _BRANCH)
            if depth == self._tree.depth:
                yield page
            else:
                below = _children(page, self._tree.page_size, self.path)
                waiting += [(child, depth + 1) for child in reversed(below)]

    def _page(self, number: int, kind: int) -> bytes:
        self._require_page(number)
        size = self._tree.page_size
        page = self._file.read_at(number * size, size)
        stated, _, flags, _, _ = _HEADER.unpack_from(page)
        if stated != number or flags != kind:
            raise damaged(self.path, f"page {number} is not the expected one")
        return page

    def _require_page(self, number: int) -> None:
        if not 2 <= number <= self._tree.last_page:
            raise damaged(self.path, f"it refers to page {number} of {self._tree.last_page}")

    def _value_starts(self, leaf: _Leaf) -> Array:
        starts: Array = leaf.value_starts
        for index, number in leaf.big():
            self._require_page(number)
            starts[index] = number * self._tree.page_size + _HEADER.size
            self._file.require(int(starts[index]), int(leaf.value_lengths[index]))
        return starts

    def _require_disjoint(self, values: _Rows) -> None:
        """Refuse two values in the same pages: one of the two page numbers is damaged."""
        size = self._tree.page_size
        big = values.starts % size == _HEADER.size
        starts = values.starts[big]
        pages = -(-(_HEADER.size + values.offsets[1:][big]) // size)
        order = np.argsort(starts)
        starts, pages = starts[order] // size, pages[order]
        if (starts[1:] < starts[:-1] + pages[:-1]).any():
            raise damaged(self.path, "two of its values are in the same pages")

    # The data.

    def _slabs(self, spec: ArraySpec) -> Sequence[Slab] | None:
        pair, _, part = spec.name.partition("/")
        if part == "offsets":
            return None
        rows = self._rows[pair]
        found, first, count = [], 0, len(rows.starts)
        while first < count:
            begin = int(rows.offsets[first])
            last = int(np.searchsorted(rows.offsets, begin + _SLAB, "right")) - 1
            last = min(max(last, first + 1), count)
            nbytes = int(rows.offsets[last]) - begin
            found.append(Slab(begin, nbytes, partial(self._parts, rows, first, last), self._slab_memory))
            first = last
        return found

    def _parts(self, rows: _Rows, first: int, last: int) -> Iterator[memoryview]:
        """The bytes of some rows. Small ones are gathered, large ones come in pieces."""
        with self.memory.take(self._slab_memory, say("the entries of {path}", path=self.path)):
            yield from self._gathered(rows, first, last)
        self._require_same_state()

    def _gathered(self, rows: _Rows, first: int, last: int) -> Iterator[memoryview]:
        size = self._tree.page_size
        gathered, page, held = bytearray(), b"", -1
        starts = rows.starts[first:last].tolist()
        lengths = np.diff(rows.offsets[first : last + 1]).tolist()
        for start, length in zip(starts, lengths, strict=True):
            number, within = divmod(start, size)
            if not length:
                continue  # it may start where its page ends
            if within != _HEADER.size:
                if number != held:
                    page, held = self._page(number, _LEAF), number
                gathered += page[within : within + length]
            else:
                self._require_overflow(number, length)
                for at in range(0, length, PIECE):
                    gathered += self._file.read_at(start + at, min(PIECE, length - at))
                    if len(gathered) >= PIECE:
                        yield memoryview(gathered)
                        gathered = bytearray()
            if len(gathered) >= PIECE:
                yield memoryview(gathered)
                gathered = bytearray()
        if gathered:
            yield memoryview(gathered)

    def _require_overflow(self, number: int, length: int) -> None:
        size = self._tree.page_size
        stated, _, flags, low, high = _HEADER.unpack(self._file.read_at(number * size, _HEADER.size))
        pages = -(-(_HEADER.size + length) // size)
        if stated != number or flags != _OVERFLOW or low | high << 16 != pages:
            raise damaged(self.path, f"page {number} is not the expected one")

    def _small(self, spec: ArraySpec) -> Array:
        return self._rows[str(spec.ragged)].offsets


def _page_size(meta: bytes, path: Path) -> int:
    size = int(_TREE.unpack_from(meta, _HEADER.size + _META.size)[0])
    if not 512 <= size <= 1 << 15 or size & (size - 1):
        raise damaged(path, f"{size} is not a page size")
    return size


def _tree(meta: bytes, number: int, path: Path) -> _Tree:
    """What a meta page states of the main database."""
    stated, _, kind, _, _ = _HEADER.unpack_from(meta)
    magic, version, _, _ = _META.unpack_from(meta, _HEADER.size)
    if stated != number or not kind & _IS_META or magic != MAGIC:
        raise damaged(path, f"page {number} is not a meta page of LMDB")
    if version != _VERSION:
        raise _unsupported(path, say("its data version is {version}, not {ours}", version=version, ours=_VERSION))
    # Of the database of free pages: integer keys, and how the environment was opened.
    free = _TREE.unpack_from(meta, _HEADER.size + _META.size)[1]
    if not free & _INTEGER_KEYS or free & ~(_INTEGER_KEYS | _FIXED_MAP | _NO_DIRECTORY):
        raise damaged(path, f"page {number} is not a meta page of LMDB")
    padding, flags, depth, _, _, _, entries, root = _TREE.unpack_from(meta, _HEADER.size + _META.size + _TREE.size)
    if padding and not flags:  # the length of values, for several of one length at a key
        raise damaged(path, f"page {number} is not a meta page of LMDB")
    last, transaction = _LAST.unpack_from(meta, _HEADER.size + _META.size + 2 * _TREE.size)
    return _Tree(_page_size(meta, path), flags, depth, entries, root, last, transaction)


def _nodes(page: bytes, size: int, path: Path) -> tuple[Array, Array]:
    """Where the nodes of a page begin, and the page as 16-bit numbers."""
    *_, lower, upper = _HEADER.unpack_from(page)
    if not _HEADER.size < lower <= upper <= size or lower % 2:
        raise damaged(path, "a page has no room for its nodes")
    halves: Array = np.frombuffer(page, "<u2")
    starts = halves[_HEADER.size // 2 : lower // 2].astype(_INT)
    if (starts < upper).any() or (starts > size - _NODE).any() or (starts % 2).any():
        raise damaged(path, "a node is outside its page")
    return starts, halves


def _children(page: bytes, size: int, path: Path) -> list[int]:
    starts, halves = _nodes(page, size, path)
    words = [halves[starts // 2 + index].astype(np.int64) for index in range(3)]
    return [int(number) for number in words[0] | words[1] << 16 | words[2] << 32]


class _Leaf:
    """The nodes of a leaf page."""

    def __init__(self, page: bytes, size: int, path: Path) -> None:
        starts, halves = _nodes(page, size, path)
        low, high, self._flags, key = (halves[starts // 2 + index].astype(_INT) for index in range(4))
        self._page, self.count = page, len(starts)
        base = _HEADER.unpack_from(page)[0] * size
        self.key_lengths, self.value_lengths = key, low | high << 16
        self._within = starts + _NODE
        self.key_starts = base + self._within
        self.value_starts = self.key_starts + key
        stored = np.where(self._flags & _BIG, 8, self.value_lengths)
        if (self._within + key + stored > size).any() or (key == 0).any():
            raise damaged(path, "an entry is longer than its page")
        if (self._flags & (_NAMED | _DUPLICATES)).any():
            raise _unsupported(path, say("it has named databases, or several values for a key"))
        if (self._flags & ~_BIG).any():
            raise damaged(path, "an entry has unknown flags")

    def keys(self) -> list[bytes]:
        starts, lengths = self._within.tolist(), self.key_lengths.tolist()
        return [self._page[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def big(self) -> list[tuple[int, int]]:
        """The values in pages of their own: (index, number of the first page)."""
        at = (self._within + self.key_lengths).tolist()
        found = np.flatnonzero(self._flags & _BIG).tolist()
        return [(index, int.from_bytes(self._page[at[index] : at[index] + 8], "little")) for index in found]


def _unsupported(path: Path, why: str) -> UnsupportedData:
    return UnsupportedData(
        say("{path} cannot be read: it is not a plain LMDB database", path=path),
        why=why,
        fix=(say("copy its entries into the unnamed database of a new file, one value for each key"),),
    )
