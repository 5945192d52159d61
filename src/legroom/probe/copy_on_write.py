"""Memory that forked workers inherited from their parent: what they still share with it, and what they have copied.

A forked process shares all pages with its parent until one of them writes. Reading a Python object writes its reference
count, so workers that only read a list of objects copy it page by page. The kernel shows for each page of a process
whether it alone maps it (/proc/<pid>/pagemap, readable for processes of the same user without privileges).

A page is copied if the worker shared it at the first reading, maps it alone now, and the parent still has one there.
It does not matter which of the two wrote: the page exists twice.
Memory that a worker allocates itself was never shared, and is not counted, whatever its address.

A worker also copies pages by writing: malloc and Python reuse memory that the parent had freed before the fork. How
much depends on the parent, and no limit in bytes tells it from reading. The contents do: a reference count that was
raised and lowered again leaves the page as it was, or differs in counts alone. So a sample of the pages that were
copied since the last reading is compared in both processes (/proc/<pid>/mem).

`WorkerCopies` reads now and then, within a share of the time, while a job is watched. What workers copied by writing is
not counted there. Workers of one parent read the same dataset, so at most two of each parent are read.
"""

from __future__ import annotations

import errno
import mmap
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from legroom.messages import say
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.watch_sample import ProcessRow

PAGE = mmap.PAGESIZE
_ENTRY = 8  # bytes of a pagemap entry; the last one holds the flags (Documentation/admin-guide/mm/pagemap.rst)
_PRESENT, _FILE, _EXCLUSIVE = 0x80, 0x20, 0x01
_BLOCK = 1 << 14  # pages of one bit set: 64 MB
_COMPARED = 96  # pages of one reading whose contents are compared
_WORDS = PAGE // 8
_MOST_COUNTS = _WORDS // 4  # objects on a page whose reference counts may differ: the smallest take 32 bytes
_LARGEST_COUNT = 1 << 32
_MOSTLY = 0.5  # of the pages that were compared
_NO_HASH = (1 << 64) - 1  # in a str whose hash no one has asked for
_MOST_PAGES = 1 << 26  # of one process: 256 GB take about a second; address space that is only reserved can be larger

# For each flag byte the digit of a bit set: anonymous pages that others map too, and those of this process alone.
_ANONYMOUS = {flags for flags in range(256) if flags & _PRESENT and not flags & _FILE}
_SHARED_DIGIT = bytes(ord("1") if f in _ANONYMOUS and not f & _EXCLUSIVE else ord("0") for f in range(256))
_OWN_DIGIT = bytes(ord("1") if f in _ANONYMOUS and f & _EXCLUSIVE else ord("0") for f in range(256))

BitSets = Mapping[int, int]  # by number of block, one bit for each page of it


@dataclass(frozen=True, slots=True)
class AnonymousPages:
    """The anonymous pages of a process at one moment: those it shares with others, and its own."""

    shared: BitSets
    own: BitSets
    reason: str | None = None  # why they could not be read

    @property
    def shared_bytes(self) -> int:
        return page_count(self.shared) * PAGE


def anonymous_pages(host: Host, pid: int, within: Iterable[range] | None = None) -> AnonymousPages:
    """The pages of private anonymous memory (heap, mmap), where Python objects are; ``within`` these addresses."""
    areas = anonymous_areas(host, pid)
    if areas is None:
        return _unread(host.why(f"/proc/{pid}/maps"))
    if within is not None:
        areas = list(_common(areas, list(within)))
    if sum(map(len, areas)) > _MOST_PAGES * PAGE:
        return _unread(say("process {pid} has more than 256 GB of address space to read", pid=pid))
    shared: dict[int, int] = {}
    own: dict[int, int] = {}
    file = f"/proc/{pid}/pagemap"
    try:
        with host.path(file).open("rb", buffering=0) as pagemap:
            for first, last in _pieces(areas):
                pagemap.seek(first * _ENTRY)
                flags = (pagemap.read((last - first) * _ENTRY) or b"")[_ENTRY - 1 :: _ENTRY]
                if flags.count(0) == len(flags):
                    continue
                block = first // _BLOCK
                places_right = (block + 1) * _BLOCK - first - len(flags)  # the first page is the leftmost digit
                for found, digits in ((shared, _SHARED_DIGIT), (own, _OWN_DIGIT)):
                    if bits := int(flags.translate(digits), 2):
                        found[block] = found.get(block, 0) | bits << places_right
    except (OSError, ValueError):
        return _unread(host.why(file))
    return AnonymousPages(shared, own)


def anonymous_areas(host: Host, pid: int) -> list[range] | None:
    """The addresses of a process's writable private memory that belongs to no file; None if they cannot be read."""
    text = host.text(f"/proc/{pid}/maps")
    if not text:  # empty for a process that has ended
        return None
    found = []
    for line in text.split("\n"):
        words = line.split(maxsplit=5)
        if len(words) < 5 or words[1] != "rw-p" or words[4] != "0":
            continue
        if len(words) == 5 or words[5] == "[heap]" or words[5].startswith("[anon:"):
            first, _, last = words[0].partition("-")
            found.append(range(int(first, 16), int(last, 16)))
    return found


def page_count(pages: BitSets) -> int:
    """How many pages a bit set holds."""
    return sum(bits.bit_count() for bits in pages.values())


def share_of(addresses: Iterable[int], pages: BitSets) -> float | None:
    """The share of these addresses that lie on such a page; None without addresses."""
    found = count = 0
    for address in addresses:
        block, page = divmod(address // PAGE, _BLOCK)
        found += pages.get(block, 0) >> (_BLOCK - 1 - page) & 1
        count += 1
    return found / count if count else None


@dataclass(frozen=True, slots=True)
class CopiedMemory:
    """What one forked worker has copied of its parent's memory between two readings."""

    pid: int
    copied: int | None  # bytes; None: unknown
    shared: int | None  # bytes of its parent's memory that it still shares
    until: float  # clock of this reading
    pages: BitSets = field(default_factory=dict, repr=False)  # the copied ones
    only_read: int | None = None  # bytes of the copied ones that were not written to; None: not compared, or unreadable
    compared: BitSets = field(default_factory=dict, repr=False)  # of the copied ones, the sample that was compared
    alike: BitSets = field(default_factory=dict, repr=False)  # of the compared ones, those that were only read
    reason: str | None = None  # why something is unknown


@dataclass
class _Worker:
    """What is known of one worker from its earlier readings."""

    shared: BitSets  # at the first reading, or at the fork
    copied: BitSets = field(default_factory=dict)
    only_read: int | None = 0
    compared: dict[int, int] = field(default_factory=dict)
    alike: dict[int, int] = field(default_factory=dict)
    reason: str | None = None


@dataclass
class CopyReader:
    """Reads workers of one parent several times; what they copied counts from the first reading of each.

    ``compare``: also read contents of copied pages, to tell reading from writing; of at most ``pages`` each time.
    ``since_fork``: what they copied before the first reading counts too. Memory that both have allocated since the fork
    at one address is then among it, so ``alike`` must decide.
    """

    host: Host
    parent: int
    compare: bool = False
    pages: int = _COMPARED
    since_fork: bool = False
    _workers: dict[int, _Worker] = field(default_factory=dict)  # by pid

    def read(self, workers: Iterable[int], clock: float) -> tuple[CopiedMemory, ...]:
        """Read the workers now. The first reading of a worker shows 0 bytes copied, and what it shares."""
        areas = anonymous_areas(self.host, self.parent)
        if areas is None:
            why = self.host.why(f"/proc/{self.parent}/maps")
            return tuple(CopiedMemory(pid, None, None, clock, reason=why) for pid in workers)
        return tuple(self._read(pid, clock, areas) for pid in workers)

    def forget(self, pid: int) -> None:
        """Drop the first reading of a worker that has ended: its pid may be used again."""
        self._workers.pop(pid, None)

    def _read(self, pid: int, clock: float, areas: list[range]) -> CopiedMemory:
        now = anonymous_pages(self.host, pid, areas)
        if now.reason is not None:
            return CopiedMemory(pid, None, None, clock, reason=now.reason)
        inherited = _union(now.shared, now.own) if self.since_fork else now.shared
        known = self._workers.setdefault(pid, _Worker(inherited))
        own = _both(known.shared, now.own)
        # Of the parent only these parts are read: a worker that copies nothing has few of them.
        parts = [range(block * _BLOCK * PAGE, (block + 1) * _BLOCK * PAGE) for block in sorted(own)]
        parent = anonymous_pages(self.host, self.parent, parts)
        if parent.reason is not None:
            return CopiedMemory(pid, None, None, clock, reason=parent.reason)
        copied = _both(own, _union(parent.shared, parent.own))
        if self.compare:
            self._compare(pid, known, _without(copied, known.copied))
            known.copied = _union(copied, known.copied)
        return CopiedMemory(
            pid, page_count(copied) * PAGE, now.shared_bytes, clock, copied,
            known.only_read if self.compare else None, known.compared, known.alike, known.reason,
        )  # fmt: skip

    def _compare(self, pid: int, known: _Worker, new: BitSets) -> None:
        """Add the part of the new copies that were only read."""
        count = page_count(new)
        if not count or known.only_read is None:
            return
        chosen = list(islice(_addresses(new), count // (2 * self.pages), None, max(1, count // self.pages)))
        try:
            with _memory(self.host, self.parent) as parents, _memory(self.host, pid) as workers:
                same = [one for one in chosen if was_only_read(_page(parents, one), _page(workers, one))]
        except (OSError, ValueError, OverflowError):
            known.only_read = None
            known.reason = say("the memory of process {pid} cannot be read by this user", pid=pid)
            return
        known.compared = _union(known.compared, _bits(chosen))
        known.alike = _union(known.alike, _bits(same))
        if len(same) >= _MOSTLY * len(chosen):  # a few among many that were written to are the same by chance
            known.only_read += count * PAGE * len(same) // len(chosen)


def was_only_read(parents: bytes, workers: bytes) -> bool:
    """Whether two copies of a page differ in nothing that is written when Python objects are read.

    These are reference counts, each before the address of a type, and the hash of a str. What malloc writes before its
    blocks are two small numbers. A page that is mostly zeros or one repeated word holds few objects, and is often the
    same by chance.
    """
    if len(parents) != PAGE or len(workers) != PAGE or parents == parents[:8] * _WORDS:
        return False
    words = memoryview(parents).cast("Q").tolist()
    if words.count(0) > _WORDS // 2:
        return False
    if parents == workers:
        return True
    differ = 0
    for place, (before, after) in enumerate(zip(words, memoryview(workers).cast("Q"), strict=True)):
        if before == after:
            continue
        differ += 1
        is_count = place % 2 == 0 and 0 < before < _LARGEST_COUNT and 0 < after < _LARGEST_COUNT <= words[place + 1]
        if differ > _MOST_COUNTS or not (is_count or before == _NO_HASH or after == _NO_HASH):
            return False
    return True


def _memory(host: Host, pid: int) -> Any:
    return host.path(f"/proc/{pid}/mem").open("rb", buffering=0)


def _page(memory: Any, address: int) -> bytes:
    """The contents of a page; empty where it is gone by now."""
    memory.seek(address)
    try:
        return memory.read(PAGE) or b""
    except OSError as problem:
        if problem.errno != errno.EIO:
            raise
        return b""


def _addresses(pages: BitSets) -> Iterator[int]:
    """The address of each page, in order."""
    for block in sorted(pages):
        digits = format(pages[block], f"0{_BLOCK}b")
        place = digits.find("1")
        while place >= 0:
            yield (block * _BLOCK + place) * PAGE
            place = digits.find("1", place + 1)


def _bits(addresses: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for address in addresses:
        block, page = divmod(address // PAGE, _BLOCK)
        found[block] = found.get(block, 0) | 1 << (_BLOCK - 1 - page)
    return found


def _unread(reason: str) -> AnonymousPages:
    return AnonymousPages({}, {}, reason)


def _both(one: BitSets, other: BitSets) -> dict[int, int]:
    return {block: bits for block in one.keys() & other.keys() if (bits := one[block] & other[block])}


def _without(one: BitSets, other: BitSets) -> dict[int, int]:
    return {block: bits for block, all_bits in one.items() if (bits := all_bits & ~other.get(block, 0))}


def _union(one: BitSets, other: BitSets) -> dict[int, int]:
    return {block: one.get(block, 0) | other.get(block, 0) for block in one.keys() | other.keys()}


def _common(areas: list[range], others: list[range]) -> Iterator[range]:
    """The addresses in both lists, each of which is in order, as /proc/<pid>/maps is."""
    at = 0
    for area in areas:
        while at < len(others) and others[at].stop <= area.start:
            at += 1
        for other in others[at:]:
            if other.start >= area.stop:
                break
            yield range(max(area.start, other.start), min(area.stop, other.stop))


def _pieces(areas: Iterable[range]) -> Iterator[tuple[int, int]]:
    """The numbers of first and last page of each area, cut at the ends of blocks."""
    for area in areas:
        first, end = area.start // PAGE, area.stop // PAGE
        while first < end:
            last = min(end, (first // _BLOCK + 1) * _BLOCK)
            yield first, last
            first = last


_MOST_OF_A_PARENT = 2
_LEAST_GAP = 5.0  # seconds between two readings of a worker
_MUCH = 32 << 20  # bytes that a worker has copied


@dataclass
class WorkerCopies:
    """Keeps the first reading of each worker, and adds what it has copied since then to its row."""

    host: Host
    share: float = 0.003  # of one core, for all readings
    _readers: dict[int, CopyReader] = field(default_factory=dict)  # by parent
    _chosen: dict[int, int] = field(default_factory=dict)  # workers that are read, and their parents
    _due: float = 0.0
    unread: str | None = None  # why it is unknown whether workers copy by reading, although they copy much

    def update(self, rows: Iterable[ProcessRow], clock: float) -> dict[int, ProcessRow]:
        """The rows of workers that were read now, by pid."""
        by_pid = {row.pid: row for row in rows}
        for pid in [pid for pid, parent in self._chosen.items() if by_pid.get(pid) is None or parent not in by_pid]:
            reader = self._readers.get(self._chosen.pop(pid))
            if reader is not None:
                reader.forget(pid)
        self._readers = {parent: reader for parent, reader in self._readers.items() if parent in by_pid}
        if clock < self._due or self.host.platform != "linux":
            return {}
        self._choose(by_pid)
        began = time.thread_time()
        found = {}
        for parent in set(self._chosen.values()):
            reader = self._readers.setdefault(parent, CopyReader(self.host, parent, compare=True))
            for one in reader.read([pid for pid, its in self._chosen.items() if its == parent], clock):
                if one.only_read is None and (one.copied or 0) >= _MUCH:
                    self.unread = one.reason
                elif one.only_read is not None:
                    found[one.pid] = replace(by_pid[one.pid], copied=one.only_read, copied_at=clock)
        self._due = clock + max(_LEAST_GAP, (time.thread_time() - began) / self.share)
        return found

    def _choose(self, rows: dict[int, ProcessRow]) -> None:
        """Add workers: processes that were forked from a watched one, which have its command line."""
        counts: dict[int, int] = {}
        for parent in self._chosen.values():
            counts[parent] = counts.get(parent, 0) + 1
        for pid, row in rows.items():
            above = rows.get(row.parent)
            if above is None or pid in self._chosen or row.command != above.command:
                continue
            if counts.get(above.pid, 0) < _MOST_OF_A_PARENT:
                self._chosen[pid] = above.pid
                counts[above.pid] = counts.get(above.pid, 0) + 1
