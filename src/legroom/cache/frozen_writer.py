"""Write a frozen object: encode its containers one after the other into four arrays, hashed while they are written.

Bytes are encoded, hashed and written piece by piece; only the offsets of one container are kept until its end.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from legroom.cache import mapped_files_and_checksums
from legroom.cache.frozen_encoding import ENCODING, LARGE_ARRAY, Encoder, check_keys
from legroom.cache.frozen_sequence_and_mapping import ARRAYS, DICT, LIST, TUPLE, build_index
from legroom.cache.manifest import Array, file_name, npy_header, stamp_of
from legroom.cache.staging_directory import StagingDirectory
from legroom.errors import UsageError
from legroom.messages import say
from legroom.system.file_writes import write_all, write_parts, write_through
from legroom.system.processes_and_threads import room_for_threads, usable_cpus

TYPES: dict[type, int] = {list: LIST, tuple: TUPLE, dict: DICT}
_FEW, _MANY = 64, 1024  # in a container of few items, one with many is a view of its own
_PIECE = 1 << 20  # bytes that are hashed and written together
_CHUNK = 64  # items encoded together, while they are in the CPU's cache
_WAITING = 4  # pieces between the encoder and the writer
_HEADER = 128  # bytes of the .npy header of a flat array, whatever its length

NDArray = np.ndarray[Any, Any]


def is_large(value: Any) -> bool:
    """Whether an item is stored on its own: a container with many items, or a large array."""
    if type(value) is np.ndarray:
        return value.nbytes >= LARGE_ARRAY
    return type(value) in TYPES and len(value) >= _MANY


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: sizes and checksums by array, and the digest of everything."""

    sizes: Mapping[str, int]
    crcs: Mapping[str, int]
    digest: str


class Outputs:
    """Where the arrays go. This one keeps nothing: it is for computing the digest."""

    def write(self, part: str, position: int, data: Any) -> None:
        """Write bytes of one array at a position, which follows the bytes written before."""


class MemoryOutputs(Outputs):
    """Keeps the arrays in this process."""

    def __init__(self) -> None:
        self.buffers = {part: bytearray() for part in ARRAYS}

    def write(self, part: str, position: int, data: Any) -> None:
        self.buffers[part] += data


class FileOutputs(Outputs):
    """Writes the arrays into .npy files of a staging directory. Their headers come last, when the sizes are known."""

    def __init__(self, staging: StagingDirectory) -> None:
        self._staging = staging
        taken: set[str] = set()
        self._names = {part: file_name(part, ".npy", taken) for part in ARRAYS}
        self._fds: dict[str, int] = {}
        self._total = 0
        self._write = write_through if staging.fills_memory() else write_parts

    def __enter__(self) -> FileOutputs:
        try:
            for part, name in self._names.items():
                self._fds[part] = self._staging.create(name)
        except BaseException:  # __exit__ is not called then
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def write(self, part: str, position: int, data: Any) -> None:
        size = len(data)
        self._total += size
        if self._total > self._staging.need.nbytes - (1 << 16):
            self._staging.reserve_more(self._total + max(self._total // 4, 1 << 20))
        self._staging.check_capacity(size)
        self._write(self._fds[part], [memoryview(data).cast("B")], _HEADER + position)

    def sealed(self, written: Written) -> tuple[Array, ...]:
        """Write the headers and make the files read-only."""
        found = []
        for part, dtype in ARRAYS.items():
            kind = np.dtype(dtype)
            shape = (written.sizes[part] // kind.itemsize,)
            header = npy_header(shape, kind)
            assert len(header) == _HEADER
            write_all(self._fds[part], memoryview(header), 0)
        self.__exit__()  # nothing changes the files' times from here on
        for part, dtype in ARRAYS.items():
            kind = np.dtype(dtype)
            stamp = stamp_of(self._staging.seal(self._names[part]))
            crc = mapped_files_and_checksums.hex_digits(written.crcs[part])
            found.append(Array(part, self._names[part], (written.sizes[part] // kind.itemsize,), kind, crc, stamp))
        return tuple(found)


def write_object(obj: Any, called: str, outputs: Outputs) -> Written:
    with _Streams(outputs) as streams:
        _Writer(streams, Encoder(), called).write(obj)
        return streams.finish()


class _Streams:
    """The four arrays as streams: hashed, summed and written in order, in a thread where there is a second core."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._crc32 = mapped_files_and_checksums.crc32()
        self._hashers = {part: hashlib.sha1(usedforsecurity=False) for part in ARRAYS}  # twice as fast as md5
        self._crcs = dict.fromkeys(ARRAYS, 0)
        self.sizes = dict.fromkeys(ARRAYS, 0)
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> _Streams:
        if usable_cpus() > 1 and room_for_threads(1):
            self._thread = ThreadPoolExecutor(1, "legroom-freeze")
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def append(self, part: str, data: Any) -> None:
        """Add bytes to an array."""
        position = self.sizes[part]
        self.sizes[part] += len(data)
        if self._thread is None:
            self._store(part, position, data)
            return
        self._waiting.append(self._thread.submit(self._store, part, position, data))
        while len(self._waiting) > _WAITING:
            self._waiting.popleft().result()

    def finish(self) -> Written:
        """Wait for everything; the digest of all arrays."""
        while self._waiting:
            self._waiting.popleft().result()
        total = hashlib.md5(f"legroom frozen {ENCODING}\n".encode(), usedforsecurity=False)
        for hasher in self._hashers.values():
            total.update(hasher.digest())
        return Written(dict(self.sizes), dict(self._crcs), total.hexdigest())

    def _store(self, part: str, position: int, data: Any) -> None:
        self._hashers[part].update(data)
        self._crcs[part] = self._crc32(data, self._crcs[part])
        self._outputs.write(part, position, data)


@dataclass
class _Writer:
    """Writes containers, the nested ones after the one they are in."""

    streams: _Streams
    encoder: Encoder
    called: str
    rows: list[tuple[int, ...]] = field(default_factory=list)
    later: deque[tuple[Any, str]] = field(default_factory=deque)
    _piece: list[bytes] = field(default_factory=list)
    _pending: int = 0  # bytes in the piece
    _numbers: int = 1  # containers that have a number

    def write(self, obj: Any) -> None:
        self.later.append((obj, self.called))
        while self.later:
            self.rows.append(self._container(*self.later.popleft()))
        self._flush()
        self.streams.append("containers", np.array(self.rows, "<u8").tobytes())

    def _container(self, obj: Any, path: str) -> tuple[int, ...]:
        kind, count = TYPES[type(obj)], len(obj)
        if kind != DICT:
            first = self._items(obj, count, lambda index: f"{path}[{index}]", nested=count <= _FEW)
            return kind, first, count, 0, 0, 0
        if count >= 1 << 32:
            raise UsageError(say("a dict with {count} keys is too large to freeze", count=count))
        hashes = np.empty(count, np.uint32)
        keys = _hashed_keys(obj, path, hashes)
        keys_at = self._items(keys, count, lambda index: f"{path} (key {index})", nested=False)
        index, bits = build_index(hashes)
        index_at = self.streams.sizes["index"] // 4
        self.streams.append("index", index.astype("<u4").tobytes())

        def value_path(index: int) -> str:  # only for an error
            return f"{path}[{next(islice(obj, index, None))!r:.80}]"

        values_at = self._items(obj.values(), count, value_path, nested=count <= _FEW)
        return kind, values_at, count, keys_at, index_at, bits

    def _items(self, items: Iterable[Any], count: int, path: Callable[[int], str], *, nested: bool) -> int:
        """Write items one after the other; the number of the first one's offset."""
        first = self.streams.sizes["offsets"] // 8
        offsets = [np.array([self._position()], "<u8")]
        done = 0
        for chunk in _chunks(items):
            for one in self._encoded(chunk, lambda index, base=done: path(base + index), nested):  # type: ignore[misc]
                offsets.append(self._add(one))
            done += len(chunk)
        if done != count:
            raise UsageError(
                say("the object changed while it was being frozen"),
                why=say("{count} items at the start, {done} at the end", count=count, done=done),
                fix=(say("freeze it when no other thread changes it"),),
            )
        self._flush()
        for some in _joined(offsets):
            self.streams.append("offsets", some)
        return first

    def _encoded(self, chunk: list[Any], path: Callable[[int], str], nested: bool) -> Iterator[list[Any]]:
        """The encoded items of a chunk, in runs; large arrays and nested containers on their own."""
        kinds = set(map(type, chunk))
        if not (np.ndarray in kinds or (nested and kinds & TYPES.keys())):
            yield self.encoder.encode_all(chunk, path)
            return
        for index, item in enumerate(chunk):
            here = path(index)
            if nested and type(item) in TYPES and len(item) >= _MANY:
                yield [b"\xc1C" + self._numbers.to_bytes(4, "little")]
                self._numbers += 1
                self.later.append((item, here))
                continue
            large = self.encoder.encode_array(item, self._position(), here) if type(item) is np.ndarray else None
            if large is not None:
                yield [large]
            else:
                yield self.encoder.encode_all([item], lambda _, here=here: here)  # type: ignore[misc]

    def _position(self) -> int:
        return self.streams.sizes["data"] + self._pending

    def _add(self, encoded: list[Any]) -> NDArray:
        """Add items to the data; the position after each of them."""
        if len(encoded) == 1 and isinstance(encoded[0], tuple):
            head, flat = encoded[0]
            self._piece.append(head)
            self._pending += len(head)
            self._flush()
            for start in range(0, len(flat), _PIECE):
                self.streams.append("data", flat[start : start + _PIECE])
            return np.array([self._position()], "<u8")
        ends = np.cumsum(np.fromiter(map(len, encoded), "<u8", len(encoded))) + np.uint64(self._position())
        self._piece += encoded
        self._pending = int(ends[-1]) - self.streams.sizes["data"]
        if self._pending >= _PIECE:
            self._flush()
        return ends

    def _flush(self) -> None:
        if self._pending:
            self.streams.append("data", b"".join(self._piece))
            self._piece, self._pending = [], 0


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, _CHUNK)):
        yield chunk


def _hashed_keys(obj: Mapping[Any, Any], path: str, hashes: NDArray) -> Iterator[Any]:
    """The keys of a dict; iterating over them computes their hashes."""
    done = 0
    for chunk in _chunks(obj):
        hashes[done : done + len(chunk)] = list(map(zlib.crc32, check_keys(chunk, path)))
        done += len(chunk)
        yield from chunk


def _joined(arrays: Sequence[NDArray]) -> Iterator[bytes]:
    """The arrays as pieces of about a megabyte."""
    for start in range(0, len(arrays), _PIECE // (8 * _CHUNK)):
        yield np.concatenate(arrays[start : start + _PIECE // (8 * _CHUNK)]).tobytes()
