"""Read Zarr stores, version 2 and 3: a directory or a zip file, with nested groups and every codec that zarr has.

Refuses arrays of Python objects and strings of variable length. Reads in pieces cut between chunks, which zarr decodes
in parallel. ``files`` is the directory itself: everything below it belongs to the store.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import LegroomError, UnsupportedData
from legroom.formats.base_reader import (
    ArraySpec,
    BaseReader,
    Description,
    Selection,
    TableSpec,
    as_json,
    native_dtype,
    what_is_read,
)
from legroom.formats.file_reads_and_errors import alias, damaged, unreadable
from legroom.formats.fill_output_arrays import PIECE, Array, Progress
from legroom.messages import say
from legroom.system.lazy_and_optional_imports import import_lock, require

NAME = "array"  # for a store that is a single array without a name
_SLAB = 4 * PIECE  # enough for zarr to decode several chunks at once
_MOST_CHUNKS = 4096  # of a call of zarr's, which takes a kilobyte for each of them
_AT_ONCE = 10  # zarr's default number of chunks read and decoded at once


class ZarrReader(BaseReader):
    """A Zarr store."""

    _accounts_memory = True

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._zarr = require("zarr", "zarr", "Zarr")
        self._arrays: dict[str, Any] = {}
        with _zarr_errors(path, "its metadata"):
            storage = self._zarr.storage
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                # Through the descriptor: the path may be replaced before a chunk is read.
                below = alias(self._fd) or os.fspath(path)
                self._store = _checking_store()(
                    storage.LocalStore(below, read_only=True)
                    if path.is_dir()
                    else storage.ZipStore(below, mode="r", read_only=True)
                )
            except BaseException:
                os.close(self._fd)
                raise
            try:
                self._root = self._zarr.open(store=self._store, mode="r")
            except BaseException:
                self._close()
                raise

    def _describe(self) -> Description:
        with _zarr_errors(self.path, "its metadata"):
            if isinstance(self._root, self._zarr.Array):
                found, attributes = {NAME: self._root}, {}
            else:
                attributes = as_json(self._root.attrs.asdict())
                members = sorted(self._root.members(max_depth=None))
                found = {name: node for name, node in members if isinstance(node, self._zarr.Array)}
                for name, node in members:
                    if name not in found and self.selection.takes(name):
                        own = as_json(node.attrs.asdict())
                        attributes.update({name + "/" + key: value for key, value in own.items()})
            self._arrays = {name: found[name] for name in self.selection.choose([*found], self.path)}
            specs = tuple(self._spec(name, node) for name, node in self._arrays.items())
        return Description("zarr", specs, attributes, (self.path,))

    def _spec(self, name: str, node: Any) -> ArraySpec:
        dtype = node.dtype
        if not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.kind not in "biufcSUVMm":
            raise UnsupportedData(
                say("cannot load {name!r} of {path} as an array", name=name, path=self.path),
                why=say("its elements are {dtype}: objects or strings of variable length", dtype=dtype),
                fix=(say("load only what you need: keys=[…]"), say("or store fixed-length strings")),
            )
        return ArraySpec(name, tuple(node.shape), native_dtype(dtype), as_json(node.attrs.asdict()))

    def _library_errors(self, name: str | None) -> AbstractContextManager[None]:
        return _zarr_errors(self.path, what_is_read(name))

    def _read(self, spec: ArraySpec, out: Array, progress: Progress) -> None:
        if out.nbytes == 0:
            progress(0)
            return
        node = self._arrays[spec.name]
        if out.ndim == 0:
            with _zarr_errors(self.path, repr(spec.name)):
                out[...] = node[...]
            progress(out.nbytes)
            return
        self._store.of, self._store.stated = (f"{node.path}/" if node.path else ""), _stated_size(node)
        # Shards are read whole, so pieces are cut between shards, not between the chunks in them.
        rows, *others = getattr(node, "shards", None) or node.chunks
        chunks = prod(-(-size // other) for size, other in zip(out.shape[1:], others, strict=True))  # that hold a row
        at_once = min(-(-max(1, _SLAB // max(1, out.nbytes // len(out))) // rows), max(1, _MOST_CHUNKS // chunks))
        step = at_once * rows
        for start in range(0, len(out), step):
            part = out[start : start + step]
            with (
                self.memory.take_some(self._decoding(spec), _AT_ONCE, self._label(spec)) as count,
                _zarr_errors(self.path, repr(spec.name)),
                self._zarr.config.set({"async.concurrency": count}),
            ):
                self._fill(node, start, part)
            progress(part.nbytes)

    def descriptors(self) -> list[int]:
        """File descriptor of the directory or of the zip file."""
        return [self._fd]

    def _fill(self, node: Any, start: int, part: Array) -> None:
        """Decode some rows into ``part``, without a second copy if their bytes need no conversion."""
        rows = slice(start, start + len(part))
        if _in_place(node, part.dtype):
            from zarr.buffer.cpu import NDBuffer

            buffer: Any = part
            try:
                node.get_basic_selection(rows, out=NDBuffer.from_ndarray_like(buffer))
            except BaseException:
                _wait_for_zarr()
                raise
        else:
            part[...] = node[rows]

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        """One chunk or shard as stored (at most as large as decoded) and decoded, plus a copy where zarr makes one."""
        assert isinstance(spec, ArraySpec)
        node = self._arrays[spec.name]
        shards = getattr(node, "shards", None)
        chunk: int = prod(shards or node.chunks) * spec.dtype.itemsize
        rows = (shards or node.chunks)[0] if spec.shape else 1
        slab = max(_SLAB, spec.nbytes // max(1, spec.shape[0] if spec.shape else 1) * rows)
        converted = 0 if _in_place(node, spec.dtype) else min(spec.nbytes, slab)
        return (3 if shards else 2) * chunk + converted

    def _close(self) -> None:
        self._arrays.clear()
        self._store.close()
        os.close(self._fd)


@cache
def _checking_store() -> Any:
    """A store that refuses a chunk that was cut short: Blosc reads on behind its end, which gives other data."""
    from zarr.abc.store import RangeByteRequest
    from zarr.storage import WrapperStore

    class CheckingStore(WrapperStore[Any]):
        of = ""  # the array whose chunks are read
        stated: Callable[[Any], int] | None = None  # what a chunk states as its size

        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            found = await super().get(key, prototype, byte_range)
            needed = 0
            if isinstance(byte_range, RangeByteRequest):
                needed = byte_range.end - byte_range.start
            elif byte_range is None and found is not None and self.stated is not None and key.startswith(self.of):
                needed = self.stated(found)
            if found is not None and len(found) < needed:
                raise ValueError(f"the chunk {key} is cut short: it has {len(found)} bytes of {needed}")
            return found

    return CheckingStore


def _stated_size(node: Any) -> Callable[[Any], int] | None:
    """How many bytes a stored chunk, or a shard with its index in front, must have; None: its codecs verify it."""
    codecs = [type(codec).__name__ for codec in getattr(node, "compressors", None) or ()]
    if not any("blosc" in name.lower() for name in codecs):
        return None
    shards = getattr(node, "shards", None)
    if shards is None:
        # The header of Blosc: versions, flags, sizes of type, data and blocks, and at byte 12 its own size.
        return (lambda found: max(16, _little(found, 12, 16))) if "blosc" in codecs[-1].lower() else None
    if str(getattr(node.metadata.codecs[0], "index_location", "")).endswith("end"):
        return None  # it would be cut too
    count = prod(-(-shard // chunk) for shard, chunk in zip(shards, node.chunks, strict=True))

    def end_of_shard(found: Any) -> int:
        index = np.frombuffer(found[: 16 * count].to_bytes().ljust(16 * count, b"\xff"), "<u8").reshape(count, 2)
        written = index[index[:, 0] != np.iinfo(np.uint64).max]
        return int(written.sum(axis=1).max(initial=16 * count))

    return end_of_shard


def _little(found: Any, start: int, end: int) -> int:
    return int.from_bytes(found[start:end].to_bytes(), "little")


def _in_place(node: Any, dtype: Any) -> bool:
    """Whether zarr can decode directly into memory of that type, and its tasks can be waited for."""
    return bool(node.dtype == dtype and dtype.kind in "biufc" and _has_zarr_internals())


@cache
def _has_zarr_internals() -> bool:
    if find_spec("zarr.buffer") is None or find_spec("zarr.core.sync") is None:
        return False
    from zarr.core import sync

    return callable(getattr(sync, "sync", None))


def _wait_for_zarr() -> None:
    """Wait until zarr has stopped writing into the caller's memory.

    An unreadable chunk or an interrupt ends the call, but zarr's thread continues with the other chunks. The memory it
    writes to may be unmapped by then.
    """
    with import_lock:
        import asyncio  # zarr has imported it

    from zarr.core.sync import sync

    async def others() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    sync(others())


@contextmanager
def _zarr_errors(path: Path, doing: str) -> Iterator[None]:
    """Translate what zarr and its codecs raise for a damaged store into a SourceError."""
    try:
        with warnings.catch_warnings():
            # About unstable specifications and unknown files in the store: the user cannot act on them.
            warnings.simplefilter("ignore")
            yield
    except (LegroomError, MemoryError):
        raise
    except OSError as problem:
        if problem.errno is None:
            raise damaged(path, f"{doing}: {problem}") from problem
        raise unreadable(path, problem) from problem  # from the operating system: the store may be intact
    except Exception as problem:
        text = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise damaged(path, f"{doing}: {text}") from problem
