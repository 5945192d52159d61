"""HDF5's global heaps, where strings and rows of variable length lie, read with every number checked.

Covers: one heap's objects; the heaps that an object's attributes refer to. Does not cover: what the objects
mean (hdf5_rows.py), and attributes stored apart from their object's header, as very many or large ones are.

HDF5 follows the sizes in a heap unchecked: one that is wrong by a bit, or a page of zeros where a download
stopped, makes it loop for ever or crash. So heaps are read here where that can be, and looked over before
HDF5 reads string attributes from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from legroom.errors import DamagedSource
from legroom.formats.source import SourceFile, damaged
from legroom.words import say

_SIGNATURE = b"GCOL"
_HEADER = 16  # of a heap, and of each object in it
_FIRST_READ = 4096  # the size of a heap unless an object is larger
_CONTINUATION = 0x10
_MOST_BLOCKS = 1000

Places = dict[int, tuple[int, int]]  # an object's index: where it begins in the heap, how long it is


class Heaps:
    """The heaps of one file; ``base`` is where its addresses count from."""

    def __init__(self, file: SourceFile, base: int, path: Path) -> None:
        self._file = file
        self._base = base
        self._path = path

    def read(self, address: int) -> tuple[bytes, Places]:
        """One heap: its bytes, and where each object lies in them."""
        start = self._base + address
        self._file.require(start, _HEADER)
        heap = self._file.read_at(start, min(_FIRST_READ, self._file.size - start))
        if heap[:4] != _SIGNATURE or heap[4] != 1:
            raise damaged(self._path, say("no heap begins at byte {start}", start=start))
        size = int.from_bytes(heap[8:16], "little")
        self._file.require(start, size)
        if size > len(heap):
            heap = self._file.read_at(start, size)
        return heap, self._places(heap, size, start)

    def _places(self, heap: bytes, size: int, start: int) -> Places:
        places: Places = {}
        at = _HEADER
        while at + _HEADER <= size:
            index = int.from_bytes(heap[at : at + 2], "little")
            length = int.from_bytes(heap[at + 8 : at + 16], "little")
            # Index 0 is free space, whose length counts its own header; the others are rounded up to 8.
            step = _HEADER + (length + 7) // 8 * 8 if index else length
            if step < _HEADER or at + step > size:
                what = say("object {index} of the heap at byte {start}", index=index, start=start)
                raise damaged(self._path, say("{what} has {length} bytes", what=what, length=length))
            if index:
                places[index] = (at + _HEADER, length)
            at += step
        return places

    def check_attributes(self, header: int) -> None:
        """Look over every heap that the object with its header at ``header`` refers to."""
        seen: set[int] = set()
        for block in self._header_blocks(header):
            # Anything in the header that is the address of a heap is taken for a reference to it.
            for shift in range(8):
                words = np.frombuffer(block[shift : shift + (len(block) - shift) // 8 * 8], "<u8")
                seen.update(words[(words > 0) & (words < self._file.size)].tolist())
        for address in seen:
            start = self._base + address
            if start + 4 <= self._file.size and self._file.read_at(start, 4) == _SIGNATURE:
                self.read(address)

    def _header_blocks(self, address: int) -> Iterator[bytes]:
        """The blocks of an object header, as far as they can be followed; HDF5 has followed them before."""
        waiting, seen = [(address, 0)], set[int]()
        while waiting and len(seen) < _MOST_BLOCKS:
            at, length = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            try:
                block, messages = self._block(at, length)
            except (DamagedSource, IndexError):
                continue
            yield block
            for kind, data in messages:
                if kind == _CONTINUATION and len(data) >= 16:
                    waiting.append((int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little")))

    def _block(self, address: int, length: int) -> tuple[bytes, list[tuple[int, bytes]]]:
        """One block and its messages; the first of a header (length 0) says itself how long it is."""
        start = self._base + address
        lead = self._file.read_at(start, min(64, self._file.size - start))
        if lead[:4] == b"OHDR":
            flags = lead[5]
            at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
            width = 1 << (flags & 3)
            length = int.from_bytes(lead[at : at + width], "little")
            block = self._file.read_at(start + at + width, length)
            return block, list(_messages(block, 0, 6 if flags & 4 else 4))
        if lead[:4] == b"OCHK":
            block = self._file.read_at(start, length)
            # Whether messages carry their order is said in the first block only: try without, then with.
            return block, [*_messages(block, 4, 4), *_messages(block, 4, 6)]
        if length == 0:
            length = int.from_bytes(lead[8:12], "little")
            start += 16
        block = self._file.read_at(start, length)
        return block, list(_messages(block, 0, 8))


def _messages(block: bytes, at: int, head: int) -> Iterator[tuple[int, bytes]]:
    """(type, data) of each message; headers of 8 bytes have types of two, the newer ones of one."""
    old = head == 8
    while at + head <= len(block):
        kind = int.from_bytes(block[at : at + (2 if old else 1)], "little")
        first = at + (2 if old else 1)
        size = int.from_bytes(block[first : first + 2], "little")
        yield kind, block[at + head : at + head + size]
        at += head + size
