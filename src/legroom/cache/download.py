"""Download a remote object into a file, in parallel ranges, so that readers can use what has arrived.

The file ``data`` has the object's size from the start. ``pieces`` is a journal: for each piece of 1 MiB that was
written, its number and CRC-32. A download that was killed finds the journal, compares each piece with its checksum, and
asks only for the rest. A reader that needs some bytes waits for them, and they are asked for before all others. On a
full link one connection may stand still for a second while the others go on: a piece that a reader waits for is then
asked for again, over another connection. What comes first is written, once.

An object without a version, or on a server that cannot send parts, comes in one request, and nothing of it is kept.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path

from legroom.cache import mapped_files_and_checksums
from legroom.cache.mapped_files_and_checksums import read_at
from legroom.errors import LegroomError, RemoteError
from legroom.remote.object_store import CONNECTIONS, BufferSink, RemoteObject
from legroom.remote.remote_object import ObjectStamp, ObjectUrl
from legroom.system.file_writes import write_parts, write_through
from legroom.system.processes_and_threads import lower_thread_priority, start_daemon_thread, why_no_thread

PIECE = 1 << 20
_LARGEST = 8  # pieces in one request
_REQUEST = 0.25  # seconds that one request should take: readers want the bytes in order
_LATENCIES = 8  # or this many times as long as the server takes to answer
_OVERTAKEN = 2  # pieces for each connection that came after one: it stands still
_RECORD = struct.Struct("<QII")  # number, CRC-32 of the piece, CRC-32 of these two
_MISSING, _RUNNING, _CLAIMED, _WRITING, _HERE = range(5)  # claimed: in the journal, not compared yet
_PATIENCE = 5.0  # seconds that closing waits for requests that are still running
DATA, JOURNAL = "data", "pieces"
_local = threading.local()  # .buffer: of one piece, small enough to stay in the core's cache until it is written


class Download:
    """One object and the file it is written to. Use it in a ``with`` statement: leaving it ends its threads."""

    def __init__(
        self,
        url: ObjectUrl,
        stamp: ObjectStamp,
        folder: Path,
        *,
        whole: bool = True,
        ask: Callable[[int], None] = lambda _: None,
        threads: int = CONNECTIONS,
        supplied: bool = False,
        through: bool = False,
        in_memory: bool = False,
    ) -> None:
        """Begin or resume it in an existing folder of its own.

        Args:
            folder: Where its file and journal are.
            whole: Fetch all of it; else only what is waited for.
            ask: Called before bytes are written; raises if they no longer fit.
            supplied: Ask the server for nothing: every piece comes by ``put``.
            through: Write through to the disk: free memory does not hold the object.
            in_memory: The folder is in a file system in memory, where reading a mapped file cannot fail.
        """
        self.url, self.stamp, self.path = url, stamp, folder / DATA
        self._ask, self._whole, self._supplied, self._in_memory = ask, whole, supplied, in_memory
        self._write_parts = write_through if through else write_parts
        self.waiting: Callable[[], None] = lambda: None  # called now and then by every thread that waits
        self._changed = threading.Condition()
        self.problem: BaseException | None = None  # why it failed, if it has
        self._stopped = self._closed = False
        self._threads: list[threading.Thread] = []
        self._wanted: deque[tuple[int, int]] = deque()  # ranges of pieces that are waited for, not asked for yet
        self._awaited: list[tuple[int, int]] = []  # by readers, now
        self._next = self._requests = 0  # of the whole object
        self._came = 0  # pieces that came over the network
        self._asked: dict[int, int] = {}  # by running piece: how many had come when it was asked for
        self._begun = 0.0  # when the first request was made
        self._answers: float | None = None  # the shortest time until an answer began
        self._granted = 0  # bytes that may be put without another question
        self.received = 0  # bytes that came over the network
        self.size = stamp.size if stamp.by_ranges else None
        self._checksums: dict[int, int] = {}
        self._claimed: set[int] = set()  # pieces of an earlier attempt
        self._state = bytearray()
        self._users = 1  # this object and each of its threads
        self._most = max(1, threads)
        self._remote: RemoteObject | None = None
        self.present = 0  # bytes that are known to be right
        with ExitStack() as unless_open:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._file = os.open(self.path, flags, 0o600)
            unless_open.callback(os.close, self._file)
            self._journal = os.open(folder / JOURNAL, flags | os.O_APPEND, 0o600)
            unless_open.callback(os.close, self._journal)
            if self.size is not None:
                self._state = bytearray(-(-self.size // PIECE))
                self._claim()
            unless_open.pop_all()

    def start(self) -> None:
        """Start the requests. An object that comes in one request is read here, to its end."""
        if self._supplied and self.size is not None:
            self._compare_all()
            return
        if self.size is None:
            self._read_stream()
            return
        if not self._state:
            return
        threads = min(self._most, len(self._state))
        for number in range(threads):
            with self._changed:
                self._users += 1
            thread = start_daemon_thread(self._run, f"legroom-download-{number}")
            if thread is not None:
                self._threads.append(thread)
                continue
            with self._changed:
                self._users -= 1
            if not self._threads:
                raise MemoryError(why_no_thread())
            break

    @property
    def is_whole(self) -> bool:
        """Whether all of it comes, in pieces."""
        return self._whole and bool(self._state)

    def crc32(self, start: int) -> int:
        """The checksum of the bytes from ``start`` to the end, when all have come."""
        assert self.is_complete and self.size is not None
        first = start // PIECE
        head = memoryview(bytearray(self._end(first) - start))
        read_at(self._file, head, start)
        rest = range(first + 1, len(self._state))
        return mapped_files_and_checksums.combined(
            [
                (mapped_files_and_checksums.crc32()(head), len(head)),
                *((self._checksums[number], self._end(number) - number * PIECE) for number in rest),
            ]
        )

    def _end(self, number: int) -> int:
        """Where a piece ends."""
        assert self.size is not None
        return min(self.size, (number + 1) * PIECE)

    @property
    def is_complete(self) -> bool:
        return self.size is not None and self.present == self.size

    def wait(self, offset: int, count: int) -> None:
        """Return when these bytes are in the file."""
        if count <= 0 or not self._state:
            return
        first, last = offset // PIECE, min(len(self._state), (offset + count - 1) // PIECE + 1)
        asked = False
        try:
            while True:
                with self._changed:
                    if all(state == _HERE for state in self._state[first:last]):
                        return
                    if self.problem is not None or self._stopped:
                        break
                    if not asked:
                        asked = True
                        self._wanted.append((first, last))
                        self._awaited.append((first, last))
                        self._changed.notify_all()
                    self._changed.wait(0.1)
                self.waiting()  # without the lock: what it calls may take its time
        finally:
            if asked:
                with self._changed:
                    self._awaited.remove((first, last))
        raise _copy_of(self.problem) if self.problem is not None else ValueError("the download was closed")

    def wait_some(self, offset: int, most: int) -> int:
        """Return when some of these bytes are in the file: how many, one after the other."""
        if not self._state or offset >= (self.size or 0):
            return most
        self.wait(offset, 1)
        last = min(len(self._state), (offset + most - 1) // PIECE + 1)
        number = offset // PIECE + 1
        while number < last and self._state[number] == _HERE:
            number += 1
        return min(most, number * PIECE - offset)

    def mapped(self) -> memoryview | None:
        """The file in memory, if it is in a file system in memory and the address space has room for it."""
        if not self._in_memory or not self.size:
            return None
        try:
            return memoryview(mmap.mmap(self._file, self.size, prot=mmap.PROT_READ))
        except (OSError, ValueError):
            return None

    def want(self, offset: int, count: int) -> None:
        """Fetch these bytes in the background, after those that are waited for."""
        if count > 0 and self._state:
            with self._changed:
                self._wanted.append((offset // PIECE, min(len(self._state), (offset + count - 1) // PIECE + 1)))
                self._changed.notify_all()

    def missing(self) -> list[int]:
        """The numbers of the pieces that are not in the journal."""
        return [number for number, state in enumerate(self._state) if state == _MISSING]

    def put(self, number: int, data: memoryview) -> None:
        """Write a piece that came another way, already verified by the caller. Once: another time does nothing."""
        start = number * PIECE
        if self.size is None or len(data) != self._end(number) - start:
            raise ValueError(f"piece {number} has {len(data)} bytes")
        with self._changed:
            if self._state[number] != _MISSING:
                return
            if self._file < 0:
                raise ValueError("the download was closed")
            self._state[number] = _RUNNING
        try:
            self._ask_ahead(len(data))
            self._write(number, data)
        except BaseException:
            with self._changed:
                self._state[number] = _MISSING
            raise
        self._done(number)

    def _ask_ahead(self, count: int) -> None:
        """Ask for the room of pieces that come by ``put``, for several at once: an answer takes a millisecond."""
        assert self.size is not None
        with self._changed:
            if self._granted >= count:
                self._granted -= count
                return
            more = max(count, min(_LARGEST * PIECE, self.size - self.present))
        self._ask(more)
        with self._changed:
            self._granted += more - count

    def read(self, first: int, last: int, into: memoryview) -> None:
        """Fill ``into`` with some pieces: from the file if they are there, else from the server. Keeps nothing."""
        start, at = first * PIECE, first
        while at < last:
            here = self._state[at] == _HERE
            end = next((n for n in range(at, last) if (self._state[n] == _HERE) != here), last)
            view = into[at * PIECE - start : self._end(end - 1) - start]
            if here:
                read_at(self._file, view, at * PIECE)
            else:
                self._object().read(self.stamp, at * PIECE, at * PIECE + len(view), BufferSink(view, self._count))
            at = end

    def fail(self, problem: BaseException) -> None:
        """Let every reader that waits fail with this."""
        with self._changed:
            self.problem = self.problem or problem
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads and close the files. What was written stays. Calling it again does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = self._stopped = True
            self._changed.notify_all()
            remote = self._remote
        if remote is not None:
            remote.interrupt()
        deadline = time.monotonic() + _PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._leave()

    def _leave(self) -> None:
        """Close the files with the last one that uses them: a thread may still wait for a silent server."""
        with self._changed:
            self._users -= 1
            if self._users == 0:
                if self._remote is not None:
                    self._remote.close()
                os.close(self._file)
                os.close(self._journal)
                self._file = self._journal = -1

    def __enter__(self) -> Download:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Threads.

    def _run(self) -> None:
        lower_thread_priority()
        try:
            while (task := self._take()) is not None:
                first, last = task
                if first in self._claimed:
                    self._compare(first, last)
                else:
                    self._fetch(first, last)
        except BaseException as problem:
            with self._changed:
                if self.problem is None and not self._stopped:
                    self.problem = problem
                self._stopped = True
                self._changed.notify_all()
        finally:
            self._leave()

    def _take(self) -> tuple[int, int] | None:
        """The next pieces to fetch or compare, marked as running. None when the download is closed."""
        with self._changed:
            while not self._stopped:
                while self._wanted:
                    first, last = self._wanted.popleft()
                    found = self._run_of(first, last)
                    if found is not None:
                        if found[1] < last:
                            self._wanted.appendleft((found[1], last))
                        return found
                if (found := self._overtaken()) is not None:
                    return found
                if self._whole and (found := self._run_of(self._next, len(self._state))) is not None:
                    self._next = found[1]
                    return found
                self._changed.wait(1.0)
        return None

    def _overtaken(self) -> tuple[int, int] | None:
        """A piece that a reader waits for and whose connection stands still: it is asked for once more."""
        for first, last in self._awaited:
            for number in range(first, last):
                if self._state[number] == _HERE:
                    continue
                asked = self._asked.get(number)
                overtaken = asked is not None and self._came - asked >= _OVERTAKEN * self._most
                if self._state[number] == _RUNNING and overtaken:
                    self._asked[number] = self._came
                    return number, number + 1
                break  # the reader waits for this one
        return None

    def _run_of(self, first: int, last: int) -> tuple[int, int] | None:
        """The first consecutive pieces of one state that no thread has."""
        for number in range(first, last):
            state = self._state[number]
            if state not in (_MISSING, _CLAIMED):
                continue
            end = number
            together = self._together
            self._requests += 1
            while end < last and self._state[end] == state and end - number < together:
                self._state[end] = _RUNNING
                self._asked[end] = self._came
                end += 1
            return number, end
        return None

    @property
    def _together(self) -> int:
        """Pieces in one request. The first and the last requests are small: the hash reads in order, and can begin
        early and end soon after the last byte, while all connections are in use. On a slow link all are small."""
        begun = self._requests // self._most + 1
        left = (len(self._state) - self._next) // (2 * self._most)
        seconds = self._most * (time.monotonic() - self._begun) / max(1, self._came)  # of a piece, on one connection
        allowed = int(max(_REQUEST, _LATENCIES * (self._answers or 0.0)) / max(seconds, 1e-6)) if self._came else begun
        return max(1, min(_LARGEST, begun, left, allowed))

    def _fetch(self, first: int, last: int) -> None:
        start, end = first * PIECE, self._end(last - 1)
        self._ask(end - start)
        self._begun = self._begun or time.monotonic()
        self._object().read(self.stamp, start, end, _PieceSink(self, first))

    def _begin(self, number: int) -> None:
        """A request that is running has come to this piece."""
        if number in self._asked:
            self._asked[number] = self._came

    def _answered(self, seconds: float) -> None:
        """An answer began that long after its request."""
        self._answers = min(seconds, self._answers or seconds)

    def _keep(self, number: int, data: memoryview) -> None:
        """Write a piece that has come, unless another request was faster."""
        with self._changed:
            self._came += 1
            if self._state[number] != _RUNNING:
                return
            self._state[number] = _WRITING
            self._asked.pop(number, None)
        self._write(number, data)
        self._done(number)

    def _compare(self, first: int, last: int) -> None:
        """Compare pieces of an earlier attempt with their checksums. Those that differ are fetched."""
        for number in range(first, last):
            if self._as_recorded(number):
                self._done(number)
            elif self._state[number] != _HERE:  # another thread may have fetched it meanwhile
                self._fetch(number, number + 1)

    def _compare_all(self) -> None:
        """Compare the pieces of an earlier attempt. Those that differ are missing."""
        for number in self._checksums:
            self._state[number] = _MISSING
            if self._as_recorded(number):
                self._done(number)

    def _as_recorded(self, number: int) -> bool:
        """Whether a piece in the file has the checksum that the journal has of it."""
        start = number * PIECE
        buffer = memoryview(bytearray(self._end(number) - start))
        return read_at(self._file, buffer, start) == len(buffer) and (
            mapped_files_and_checksums.crc32()(buffer) == self._checksums[number]
        )

    def _write(self, number: int, data: memoryview) -> None:
        self._write_parts(self._file, [data], number * PIECE)
        self._checksums[number] = crc = mapped_files_and_checksums.crc32()(data)
        head = struct.pack("<QI", number, crc)
        os.write(self._journal, head + struct.pack("<I", zlib.crc32(head)))  # after the data, in one call

    def _done(self, number: int) -> None:
        with self._changed:
            if self._state[number] != _HERE:  # two threads may have compared it
                self._state[number] = _HERE
                self.present += self._end(number) - number * PIECE
                self._changed.notify_all()

    def _count(self, more: int) -> None:
        self.received += more
        if self._stopped:
            raise ValueError("the download was closed")

    def _object(self) -> RemoteObject:
        with self._changed:
            if self._remote is None:
                self._remote = RemoteObject(self.url)
            return self._remote

    def _claim(self) -> None:
        """Read the journal of an earlier attempt."""
        assert self.size is not None
        if os.fstat(self._file).st_size != self.size:
            os.ftruncate(self._file, self.size)
        for number, crc in _records(self._journal):
            if number < len(self._state):
                self._state[number] = _CLAIMED
                self._checksums[number] = crc
                self._claimed.add(number)

    def _read_stream(self) -> None:
        """Read the object in one request. A broken one starts again from its beginning."""

        def begin() -> None:
            os.ftruncate(self._file, 0)
            self.present = 0

        def take(block: bytes) -> None:
            self._ask(len(block))
            self._write_parts(self._file, [memoryview(block)], self.present)
            self.received += len(block)
            self.present += len(block)
            self.waiting()

        try:
            self._object().read_whole(begin, take, self.stamp.size)
        except RemoteError as problem:
            self.problem = problem
            raise
        self.size = self.present
        self.stamp = replace(self.stamp, size=self.present)


class _PieceSink:
    """Pieces of one request: each is written and counted when its last byte has come."""

    def __init__(self, download: Download, first: int) -> None:
        self._download, self._number = download, first
        if not hasattr(_local, "buffer"):
            _local.buffer = memoryview(bytearray(PIECE))
        self._buffer: memoryview = _local.buffer  # fsspec's thread may be the one that fills it
        self._asked: float | None = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self._piece = self._buffer[: max(0, self._download._end(self._number) - self._number * PIECE)]
        self._filled = 0

    def room(self) -> memoryview:
        return self._piece[self._filled :]

    def advance(self, count: int) -> None:
        if self._asked is not None:
            self._download._answered(time.monotonic() - self._asked)
            self._asked = None
        self._filled += count
        self._download._count(count)
        if self._filled == len(self._piece):
            self._download._keep(self._number, self._piece)
            self._number += 1
            self._begin()
            self._download._begin(self._number)


def _records(journal: int) -> Iterator[tuple[int, int]]:
    """The pieces in a journal. A record that a kill cut off, or that is damaged, is skipped."""
    data = os.pread(journal, os.fstat(journal).st_size, 0)
    for at in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
        number, crc, check = _RECORD.unpack_from(data, at)
        if zlib.crc32(data[at : at + 12]) == check:
            yield number, crc


def _copy_of(problem: BaseException) -> BaseException:
    """The same error for another thread: one exception object must not be raised by several."""
    return copy(problem) if isinstance(problem, LegroomError) else problem


def first_problem(downloads: Iterable[Download]) -> BaseException | None:
    """The first error among downloads."""
    return next((_copy_of(one.problem) for one in downloads if one.problem is not None), None)
