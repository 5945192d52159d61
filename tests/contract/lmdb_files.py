"""LMDB files written without the lmdb library: one transaction into an empty database, pages in the order of its keys.

Laid out as LMDB 0.9 does on 64-bit little-endian machines; tests/unit/formats/test_formats_lmdb_reader.py compares it
with the library where that is installed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

NO_PAGE = (1 << 64) - 1


def write_lmdb(
    path: Path, entries: Mapping[bytes, bytes], page: int = 4096, flags: int = 0, node_flags: int = 0
) -> Path:
    """Write the entries in the order of their keys. ``flags`` are the database's, ``node_flags`` those of each entry."""
    pages: list[bytes] = [b"", b""]  # the two meta pages come last
    level: list[tuple[bytes, int]] = []  # first key and number of each page of the level above
    nodes: list[bytes] = []
    first = b""
    overflow = 0
    for key, value in sorted(entries.items()):
        big = 8 + len(key) + len(value) > (page - 16) // 2 - 2
        if big:
            count = -(-(16 + len(value)) // page)
            overflow += count
            data = struct.pack("<Q", len(pages))
            whole = struct.pack("<QHHI", len(pages), 0, 4, count) + value
            whole += bytes(count * page - len(whole))
            pages += [whole[at : at + page] for at in range(0, len(whole), page)]
        else:
            data = value
        node = struct.pack("<HHHH", len(value) & 0xFFFF, len(value) >> 16, big | node_flags, len(key)) + key + data
        if nodes and _full(nodes, node, page):
            level.append((first, _put(pages, nodes, 2, page)))
            nodes = []
        first = first if nodes else key
        nodes.append(node)
    leaves = len(level) + bool(nodes)
    if nodes:
        level.append((first, _put(pages, nodes, 2, page)))
    depth, branches = (1 if level else 0), 0
    while len(level) > 1:
        above: list[tuple[bytes, int]] = []
        nodes = []
        for key, number in level:
            bare = b"" if not nodes else key  # the first key of a branch page is not needed
            node = struct.pack("<HHHH", number & 0xFFFF, number >> 16 & 0xFFFF, number >> 32, len(bare)) + bare
            if nodes and _full(nodes, node, page):
                above.append((first, _put(pages, nodes, 1, page)))
                nodes, node = [], struct.pack("<HHHH", number & 0xFFFF, number >> 16 & 0xFFFF, number >> 32, 0)
            first = first if nodes else key
            nodes.append(node)
        above.append((first, _put(pages, nodes, 1, page)))
        branches += len(above)
        level, depth = above, depth + 1
    root = level[0][1] if level else NO_PAGE
    main = struct.pack("<IHHQQQQQ", 0, flags, depth, branches, leaves, overflow, len(entries), root)
    for number in (0, 1):  # the older one first: an empty database
        older = struct.pack("<IHHQQQQQ", 0, flags, 0, 0, 0, 0, 0, NO_PAGE)
        free = struct.pack("<IHHQQQQQ", page, 8, 0, 0, 0, 0, 0, NO_PAGE)
        meta = struct.pack("<QHHI", number, 0, 8, 0) + struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, 1 << 30) + free
        meta += (main if number else older) + struct.pack("<QQ", len(pages) - 1, number)
        pages[number] = meta + bytes(page - len(meta))
    path.write_bytes(b"".join(pages))
    return path


def _full(nodes: list[bytes], node: bytes, page: int) -> bool:
    return 16 + sum(2 + _even(one) for one in (*nodes, node)) > page


def _even(node: bytes) -> int:
    return len(node) + len(node) % 2


def _put(pages: list[bytes], nodes: list[bytes], kind: int, page: int) -> int:
    body, starts, upper = bytearray(page), [], page
    for node in nodes:
        upper -= _even(node)
        body[upper : upper + len(node)] = node
        starts.append(upper)
    head = struct.pack("<QHHHH", len(pages), 0, kind, 16 + 2 * len(starts), upper)
    head += struct.pack(f"<{len(starts)}H", *starts)
    body[: len(head)] = head
    pages.append(bytes(body))
    return len(pages) - 1
