"""Where a chart goes: which names it can have, checked before a long run, and the content of the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from legroom.charts.drawing import Drawing, svg
from legroom.charts.png import png, require_matplotlib
from legroom.errors import UsageError
from legroom.words import listed, say


def check_path(path: str | os.PathLike[str], kinds: Sequence[str]) -> Path:
    """The path, where a file of one of these kinds (``.svg``) can be written there."""
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in kinds:
        raise UsageError(
            say("cannot draw {path}", path=target),
            why=say("the suffix selects the format, and {kind!r} is not one of them", kind=kind),
            fix=(say("use a name that ends in {kinds}", kinds=listed(kinds)),),
        )
    folder = target.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or target.is_dir():
        raise UsageError(
            say("cannot write {path}", path=target),
            why=say("it is a directory, or {folder} is not a directory that you can write to", folder=folder),
            fix=(say("name a file in a directory that exists"),),
        )
    if kind == ".png":
        require_matplotlib()
    return target


def render(drawing: Drawing, kind: str) -> bytes:
    """The drawing as the content of a ``.png`` or ``.svg`` file."""
    return png(drawing) if kind == ".png" else svg(drawing).encode()
