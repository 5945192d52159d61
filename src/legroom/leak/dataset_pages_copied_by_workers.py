"""Pages of the parent's memory that a forked worker copies by reading a dataset of Python objects, and the attribute.

Reading an object writes its reference count. To find out whether the objects of a list were copied, their addresses are
taken from the memory of the list or dict: to read the objects themselves would copy them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from legroom.leak.object_size import size_of
from legroom.probe.copy_on_write import PAGE, CopyReader, share_of
from legroom.probe.host_files_and_syscalls import Host

_LEAST_ITEMS = 1000
_ADDRESSES = 512  # sampled of one list or dict
_MEASURED = 4  # items whose size is measured
_ITEM_POINTER = 24  # of a list: after reference count, type and length
_FIRST_ITEM = 24  # of a tuple
_DICT_KEYS = 32  # of a dict: after reference count, type, length and version
_KEYS_SIZES, _KEYS_COUNT, _KEYS_INDEX = 8, 24, 32  # of its keys: bytes of sizes and kind, entries, first index
_DEEPEST = 3
_MOST_ATTRIBUTES = 200


class CopiedDataset:
    """Reads what this process has copied of its parent's memory since it was forked.

    Make it right after the fork: Python's garbage collector may copy all objects before the first sample is loaded.
    """

    def __init__(self) -> None:
        self._reader = CopyReader(Host(), os.getppid(), compare=True)
        self._reader.read([os.getpid()], 0.0)
        self._attributes: dict[str, tuple[list[int] | None, int, int]] = {}

    def look_at(self, dataset: object) -> None:
        """Find the attributes of the dataset whose objects may be copied."""
        self._attributes = {
            name: (_addresses(value), len(value), _estimated(value))
            for name, value in _containers("dataset", dataset, 0)
        }

    def read(self, clock: float) -> dict[str, Any] | None:
        """Bytes copied so far, and the attribute whose objects lie on copied pages; None where pages are unreadable."""
        (found,) = self._reader.read([os.getpid()], clock)
        if found.copied is None:
            return None
        name, items, size, share = self._most_copied(found.pages)
        return {
            "time": round(clock, 3), "copied": found.copied, "shared": found.shared, "attribute": name, "items": items,
            "size": size, "share": share, "only_read": found.only_read,
        }  # fmt: skip

    def _most_copied(self, pages: Any) -> tuple[str | None, int, int, float | None]:
        best: tuple[str | None, int, int, float | None] = (None, 0, 0, None)
        weight = 0.0
        for name, (addresses, items, size) in self._attributes.items():
            share = share_of(addresses, pages) if addresses is not None else None
            if share is not None and share * size > weight:
                weight, best = share * size, (name, items, size, share)
        return best


def _containers(name: str, thing: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Large containers of Python objects in the attributes of a dataset, and of datasets inside it."""
    try:
        attributes = list(object.__getattribute__(thing, "__dict__").items())[:_MOST_ATTRIBUTES]
    except (AttributeError, TypeError):
        return
    for word, value in attributes:
        path = f"{name}.{word}"
        if isinstance(value, (list, tuple, dict)):
            if len(value) >= _LEAST_ITEMS:
                yield path, value
        elif depth < _DEEPEST and type(value).__module__ not in ("builtins", "torch", "numpy"):
            yield from _containers(path, value, depth + 1)


def _addresses(value: Any) -> list[int] | None:
    """Addresses of some items, without reading the items; None where this Python keeps them in another way."""
    if sys.implementation.name != "cpython":
        return None
    if type(value) is dict:
        return _values_of_dict(value) if _dicts_are_known() else None
    if type(value) is list:
        return _words(_word(id(value) + _ITEM_POINTER), len(value), 8)
    return _words(id(value) + _FIRST_ITEM, len(value), 8) if type(value) is tuple else None


def _values_of_dict(value: dict[Any, Any]) -> list[int]:
    """Addresses of some values: a table of indices, then entries of (hash,) key and value."""
    keys = _word(id(value) + _DICT_KEYS)
    index_bytes, kind = ctypes.string_at(keys + _KEYS_SIZES, 3)[1:]
    entry = 24 if kind == 0 else 16  # keys that are all str have no hash in the entry
    first = keys + _KEYS_INDEX + (1 << index_bytes)
    return [one for one in _words(first + entry - 8, _word(keys + _KEYS_COUNT), entry) if one]


@cache
def _dicts_are_known() -> bool:
    """Whether dicts lie in memory as Python 3.11 to 3.13 keep them: tried with two small ones."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13) or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    value = object()
    return all(
        set(_values_of_dict(tried)) == {id(value)} for tried in (dict.fromkeys("abcdefghijk", value), {1: value})
    )


def _words(start: int, count: int, size: int) -> list[int]:
    step = max(1, count // _ADDRESSES)
    return [_word(start + number * size) for number in range(0, count, step)]


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def _estimated(value: Any) -> int:
    """About the bytes that reading all items copies, from a few of them: of an array, only the object itself."""
    if isinstance(value, dict):
        first = [pair for _, pair in zip(range(_MEASURED), value.items(), strict=False)]
    else:
        first = list(value[:_MEASURED])
    return size_of(first, most_of_each=PAGE).pools.get("ram", 0) // max(1, len(first)) * len(value)
