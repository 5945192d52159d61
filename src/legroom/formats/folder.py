"""A directory that is given as data: a Zarr store, or refused at once.

Covers: telling the two apart by a look at a few names, and what to type instead. Does not cover: reading a store
(zarr.py). Nothing below the directory is walked: it may be the root of everything.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from pathlib import Path

from legroom.errors import UnreadableSource
from legroom.formats.source import unreadable
from legroom.words import say

MARKS = (".zgroup", ".zarray", "zarr.json")
_DATA = (".h5", ".hdf5", ".npy", ".npz", ".parquet", ".arrow", ".feather", ".safetensors", ".zarr")
_LOOKED_AT = 10_000  # names, for the advice


def require_store(path: Path) -> None:
    """UnreadableSource for a directory that is no Zarr store, with the pattern of the data files in it."""
    if any(os.path.lexists(path / mark) for mark in MARKS):
        return
    found = Counter(ending for name in _names(path) if (ending := os.path.splitext(name)[1]) in _DATA)
    if found:
        pattern = path / f"*{found.most_common(1)[0][0]}"
        fix = say("name the files in it by a pattern: '{pattern}'", pattern=pattern)
    else:
        fix = say("name a file in it")
    raise UnreadableSource(
        say("cannot read {path}", path=path),
        why=say("it is a directory and no Zarr store: it has no .zgroup, .zarray or zarr.json"),
        fix=(fix,),
    )


def _names(path: Path) -> list[str]:
    try:
        with os.scandir(path) as found:
            return [one.name for one in islice(found, _LOOKED_AT)]
    except OSError as problem:
        raise unreadable(path, problem) from problem
