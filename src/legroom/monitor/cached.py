"""The datasets of the shared cache, as a watch shows them.

Covers: rows for a sample. Does not cover: anything about the cache itself (cache).
"""

from __future__ import annotations

from legroom.errors import LegroomError
from legroom.model import EntryRow


def entry_rows() -> tuple[EntryRow, ...] | None:
    """Every entry of every store; None where the cache cannot be looked into."""
    from legroom.cache.catalog import entries  # brings in numpy: not before somebody asks

    try:
        found = entries()
    except (LegroomError, OSError):
        return None
    return tuple(
        EntryRow(
            entry.key or "",
            entry.sources[0] if entry.sources else "",
            entry.backing,
            entry.bytes,
            entry.in_use,
        )
        for entry in found
    )
