"""The views that ``legroom.freeze`` returns: a Sequence and a Mapping on one shared copy of bytes.

Items are decoded on access: each access gives a new object, and changing it changes nothing else. Containers lie in
four arrays (docs/cache-format.md): the bytes of all items, where each item begins, one row for each container, and
the hash index of its dicts.
"""

from __future__ import annotations

import zlib
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any, overload

import numpy as np

from legroom.cache.frozen_encoding import decoder, key_bytes
from legroom.messages import say
from legroom.records.cache_entry import Entry
from legroom.system.lazy_and_optional_imports import lazy_import
from legroom.units import format_size

LIST, TUPLE, DICT = range(3)
_KINDS = {LIST: "list", TUPLE: "tuple", DICT: "dict"}
ROW = 6  # numbers of a container: kind, first offset of its items, count, first offset of its keys, index, bits
ARRAYS = {"data": "<u1", "offsets": "<u8", "containers": "<u8", "index": "<u4"}

NDArray = np.ndarray[Any, Any]


class FrozenContents:
    """The arrays of one frozen object. They keep their mappings, and the entry's lease, alive."""

    __slots__ = ("arrays", "containers", "decode", "entry", "index", "offsets", "reopen")

    def __init__(self, arrays: Mapping[str, NDArray], entry: Entry, reopen: tuple[Any, ...] | None) -> None:
        self.arrays, self.entry = dict(arrays), entry
        self.reopen = reopen  # what another process needs to attach the entry; None: it is not in a store
        self.offsets, self.index = arrays["offsets"].data, arrays["index"].data
        self.containers = arrays["containers"].reshape(-1, ROW)
        self.decode = decoder(self.view, arrays["data"].data, arrays["data"])

    def view(self, number: int = 0) -> FrozenSequence | FrozenMapping:
        """The container of that number; 0 is the frozen object itself."""
        kind, at, count, keys_at, index_at, bits = self.containers[number].tolist()
        if kind == DICT:
            return FrozenMapping(self, number, at, count, keys_at, index_at, bits)
        return FrozenSequence(self, number, kind, at, count)


class _View:
    """What both views have: the entry behind them, and pickling by its key."""

    __slots__ = ("_contents", "_number")

    def __init__(self, contents: FrozenContents, number: int) -> None:
        self._contents, self._number = contents, number

    @property
    def info(self) -> Entry:
        """The entry of the cache that holds it."""
        return self._contents.entry

    def _origin(self) -> tuple[Any, ...]:
        """What another process rebuilds the contents from: the entry's key, or the arrays where there is no entry."""
        contents = self._contents
        return (contents.reopen, self._number) if contents.reopen else ((contents.arrays, contents.entry), self._number)

    def _shown(self, kind: str, count: int) -> str:
        entry = self._contents.entry
        items = "item" if count == 1 else "items"
        where = "on disk" if entry.backing == "disk" else f"in {entry.backing}"
        return f"<frozen {kind} of {count:,} {items}, {format_size(entry.bytes)} {where}>"


class FrozenSequence(_View, Sequence[Any]):
    """A frozen list or tuple. Slices are views on the same copy; ``list(view)`` gives plain objects."""

    __slots__ = ("_at", "_decode", "_kind", "_offsets", "_rows")
    __hash__ = None  # type: ignore[assignment]  # as a list

    def __init__(
        self, contents: FrozenContents, number: int, kind: int, at: int, count: int, rows: range | None = None
    ) -> None:
        super().__init__(contents, number)
        self._kind, self._at = kind, at
        self._rows = range(count) if rows is None else rows
        self._offsets, self._decode = contents.offsets, contents.decode

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> FrozenSequence: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            rows = self._rows[index]
            return FrozenSequence(self._contents, self._number, self._kind, self._at, len(rows), rows)
        try:
            at = self._at + self._rows[index]
        except IndexError:
            raise IndexError(
                say("index {index} is out of bounds for {rows} items", index=index, rows=len(self))
            ) from None
        return self._decode(self._offsets[at], self._offsets[at + 1])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        decode, offsets, at = self._decode, self._offsets, self._at
        return (decode(offsets[at + row], offsets[at + row + 1]) for row in self._rows)

    def __reversed__(self) -> Iterator[Any]:
        return iter(self[::-1])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenSequence):
            same = other._kind == self._kind
        else:
            same = type(other) is (tuple if self._kind == TUPLE else list)
        if not same:
            return NotImplemented
        assert isinstance(other, Sequence)
        return len(other) == len(self) and all(one == its for one, its in zip(self, other, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (*self._origin(), self._rows)

    def __repr__(self) -> str:
        return self._shown(_KINDS[self._kind], len(self))


class FrozenMapping(_View, Mapping[Any, Any]):
    """A frozen dict, in its order. A value is decoded when it is asked for."""

    __slots__ = ("_at", "_bits", "_count", "_decode", "_index", "_index_at", "_keys_at", "_offsets")
    __hash__ = None  # type: ignore[assignment]  # as a dict

    def __init__(
        self, contents: FrozenContents, number: int, at: int, count: int, keys_at: int, index_at: int, bits: int
    ) -> None:
        super().__init__(contents, number)
        self._at, self._count, self._keys_at, self._index_at, self._bits = at, count, keys_at, index_at, bits
        self._offsets, self._index, self._decode = contents.offsets, contents.index, contents.decode

    def __getitem__(self, key: Any) -> Any:
        return self._value(self._row(key))

    def __contains__(self, key: object) -> bool:
        try:
            self._row(key)
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[Any]:
        return map(self._key, range(self._count))

    def __len__(self) -> int:
        return self._count

    def items(self) -> ItemsView[Any, Any]:
        """The pairs, in order."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """The values, in order."""
        return _Values(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (FrozenMapping, dict)):
            return NotImplemented
        missing = object()
        pairs = self.items()
        return len(other) == len(self) and all(
            (its := other.get(key, missing)) is not missing and value == its for key, value in pairs
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (*self._origin(), None)

    def __repr__(self) -> str:
        return self._shown("dict", len(self))

    def _row(self, key: Any) -> int:
        hash(key)  # as a dict: a list as a key is a TypeError
        text = key_bytes(key)
        if text is not None and self._count:
            first = self._index_at + (zlib.crc32(text) >> (32 - self._bits))
            start, end = self._index[first], self._index[first + 1]
            order = self._index_at + (1 << self._bits) + 1
            for place in range(order + start, order + end):
                row = self._index[place]
                if self._key(row) == key:
                    return row
        raise KeyError(key)

    def _key(self, row: int) -> Any:
        at = self._keys_at + row
        return self._decode(self._offsets[at], self._offsets[at + 1])

    def _value(self, row: int) -> Any:
        at = self._at + row
        return self._decode(self._offsets[at], self._offsets[at + 1])

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        return ((self._key(row), self._value(row)) for row in range(self._count))

    def _all_values(self) -> Iterator[Any]:
        return map(self._value, range(self._count))


class _Items(ItemsView[Any, Any]):
    _mapping: FrozenMapping

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._mapping._pairs()


class _Values(ValuesView[Any]):
    _mapping: FrozenMapping

    def __iter__(self) -> Iterator[Any]:
        return self._mapping._all_values()


def build_index(hashes: NDArray) -> tuple[NDArray, int]:
    """(index, bits) of a dict's keys by their 32-bit hashes: where each bucket begins, then the rows by bucket."""
    bits = min(32, max(1, len(hashes).bit_length()))
    buckets = hashes.astype(np.uint32) >> np.uint32(32 - bits)
    order = np.argsort(buckets, kind="stable").astype(np.uint32)
    counts = np.bincount(buckets, minlength=1 << bits) if len(buckets) else np.zeros(1 << bits, np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    return np.concatenate([starts, order]), bits


def _rebuild(origin: Any, number: int, rows: range | None) -> FrozenSequence | FrozenMapping:
    """Unpickle: attach the entry by its key, or use the arrays that came with the pickle."""
    if len(origin) == 2:
        arrays, entry = origin
        contents = FrozenContents(arrays, entry, None)
    else:
        contents = lazy_import("legroom.cache.freeze").attach_frozen(*origin)
    view = contents.view(number)
    if isinstance(view, FrozenSequence) and rows is not None:
        view._rows = rows
    return view
