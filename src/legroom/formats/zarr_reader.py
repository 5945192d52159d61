"""Zarr stores, versions 2 and 3, as arrays.

Covers: a directory or a zip file, nested groups, attributes, every codec the zarr package has; slabs cut
between chunks, which zarr decodes in parallel. Does not cover: arrays of Python objects or of strings of
variable length, which are refused, and stores elsewhere than in files.

``files`` is the directory itself: what lies below it are the store's chunks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import LegroomError, UnsupportedData
from legroom.formats.base_reader import BaseReader, as_json
from legroom.formats.buffers import PIECE, Array, native_dtype
from legroom.formats.protocol import ArraySpec, Description, Extent, Progress, TableSpec
from legroom.formats.selection import Selection
from legroom.formats.source_file import alias, damaged, unreadable
from legroom.system.imports import require
from legroom.words import say

NAME = "array"  # a store that is one array has no name for it
_SLAB = 4 * PIECE  # enough chunks at once for zarr to work on several
_AT_ONCE = 10  # chunks that zarr reads and decodes at once, unless it is told otherwise


class ZarrReader(BaseReader):
    """A Zarr store."""

    _counts_itself = True

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._zarr = require("zarr", "zarr", "Zarr")
        self._arrays: dict[str, Any] = {}
        with _trouble(path, say("its metadata")):
            storage = self._zarr.storage
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                # Below the descriptor: the path may lead elsewhere by the time a chunk is read.
                below = alias(self._fd) or os.fspath(path)
                self._store = (
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

    def _look(self) -> Description:
        with _trouble(self.path, say("its metadata")):
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
            self._arrays = {name: node for name, node in found.items() if self.selection.takes(name)}
            self.selection.check(self._arrays, found, self.path)
            specs = tuple(self._spec(name, node) for name, node in self._arrays.items())
        return Description("zarr", specs, attributes, (self.path,))

    def _spec(self, name: str, node: Any) -> ArraySpec:
        dtype = node.dtype
        if not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.kind not in "biufcSUVMm":
            raise UnsupportedData(
                say("{name!r} of {path} cannot be shared as an array", name=name, path=self.path),
                why=say("its elements are {dtype}: objects or strings of variable length", dtype=dtype),
                fix=(
                    say("leave it out: name the arrays you need with keys=[…]"),
                    say("or store fixed-length strings"),
                ),
            )
        return ArraySpec(name, tuple(node.shape), native_dtype(dtype), as_json(node.attrs.asdict()))

    def _library_errors(self, doing: str) -> AbstractContextManager[None]:
        return _trouble(self.path, doing)

    def _extent(self, spec: ArraySpec) -> Extent | None:
        return None

    def _read(self, spec: ArraySpec, out: Array, progress: Progress) -> None:
        if out.nbytes == 0:
            progress(0)
            return
        node = self._arrays[spec.name]
        if out.ndim == 0:
            with _trouble(self.path, say("{name!r}", name=spec.name)):
                out[...] = node[...]
            progress(out.nbytes)
            return
        # Shards are read whole: they, not the chunks in them, must not be cut.
        rows = (getattr(node, "shards", None) or node.chunks)[0]
        step = -(-max(1, _SLAB // max(1, out.nbytes // len(out))) // rows) * rows
        for start in range(0, len(out), step):
            part = out[start : start + step]
            with (
                self.memory.take_some(self._decoding(spec), _AT_ONCE, self._called(spec)) as count,
                _trouble(self.path, say("{name!r}", name=spec.name)),
                self._zarr.config.set({"async.concurrency": count}),
            ):
                self._fill(node, start, part)
            progress(part.nbytes)

    def descriptors(self) -> list[int]:
        """Of the directory, or of the zip file."""
        return [self._fd]

    def _fill(self, node: Any, start: int, part: Array) -> None:
        """Decode some rows into ``part``, without a second copy of them where their bytes need no conversion."""
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
        """One chunk or shard as it is stored, at most as large as decoded, and decoded; twice where zarr copies it."""
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


def _in_place(node: Any, dtype: Any) -> bool:
    """Whether zarr can decode straight into memory of that type, and be waited for."""
    return bool(node.dtype == dtype and dtype.kind in "biufc" and _has_parts())


@cache
def _has_parts() -> bool:
    if find_spec("zarr.buffer") is None or find_spec("zarr.core.sync") is None:
        return False
    from zarr.core import sync

    return callable(getattr(sync, "sync", None))


def _wait_for_zarr() -> None:
    """Wait until zarr writes nothing more into memory that it was given.

    A chunk that cannot be read ends the call, and an interrupt does; zarr's thread goes on with the other chunks. What
    it writes to may be unmapped by then.
    """
    import asyncio  # zarr has imported it

    from zarr.core.sync import sync

    async def others() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    sync(others())


@contextmanager
def _trouble(path: Path, doing: str) -> Iterator[None]:
    """Turn whatever zarr and its codecs say about a broken store into one error."""
    try:
        with warnings.catch_warnings():
            # About specifications in flux and foreign files in the store: nothing a reader can act on.
            warnings.simplefilter("ignore")
            yield
    except (LegroomError, MemoryError):
        raise
    except OSError as problem:
        if problem.errno is None:
            raise damaged(path, say("{doing}: {text}", doing=doing, text=problem)) from problem
        raise unreadable(path, problem) from problem  # of the system: it proves nothing about the store
    except Exception as problem:
        text = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise damaged(path, say("{doing}: {text}", doing=doing, text=text)) from problem
