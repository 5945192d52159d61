"""Which files a stream reads.

Covers: a file, a directory, a glob pattern, or a list of any of them, in an order that does not depend on the
filesystem. Does not cover: what is in the files (stream/catalog.py), and remote stores.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from legroom.errors import UnreadableSource, UsageError
from legroom.formats.source_file import unreadable
from legroom.words import listed, say

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_ENDINGS = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
_MAGIC = "*?["


def expand(paths: Paths) -> list[Path]:
    """The files meant, each once: patterns and directories sorted by name, lists in the order given."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise UsageError(
            say("there is nothing to stream"),
            why=say("the list of paths is empty"),
            fix=(say("give a file, a directory, a pattern such as 'train-*.parquet', or a list of them"),),
        )
    found: dict[Path, None] = {}
    for one in given:
        for path in _files(os.fspath(one)):
            found[path] = None
    return list(found)


def _files(text: str) -> list[Path]:
    path = Path(text)
    # A file that is there is meant literally, even when its name has brackets in it.
    if path.is_dir():
        return _inside(path)
    if path.exists() or not any(mark in text for mark in _MAGIC):
        if not path.exists():
            raise unreadable(path, FileNotFoundError())
        return [path]
    matched = sorted(Path(name) for name in glob.glob(text, recursive=True))
    files = [match for match in matched if match.is_file()]
    if not files:
        raise UnreadableSource(
            say("no file matches {pattern!r}", pattern=text),
            why=say("it was looked for from {here}", here=os.getcwd()),
            fix=(say("check the pattern:\nls -d PATTERN"), say("** matches directories of any depth")),
        )
    return files


def _inside(folder: Path) -> list[Path]:
    """The data files of a directory and those below it; names that begin with . or _ are other programs' notes."""
    found = []
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found += [Path(base) / name for name in names if not name.startswith((".", "_"))]
    files = sorted(path for path in found if path.suffix.lower() in _ENDINGS)
    if not files:
        raise UnreadableSource(
            say("{folder} holds no file to stream", folder=folder),
            why=say(
                "{count} files are in it and below, none ends in {endings}",
                count=len(found),
                endings=listed(_ENDINGS),
            ),
            fix=(say("name the files, or give a pattern: their content decides, not their names"),),
        )
    return files
