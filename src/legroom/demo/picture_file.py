"""Where the picture goes.

Covers: a name that can be written, checked before the demo begins; the kind by what is installed. Does not cover:
what is drawn (picture.py).
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from legroom.demo.picture import drawing
from legroom.demo.result import Result
from legroom.errors import UsageError
from legroom.words import say

_NAME = "legroom-demo"
_KINDS = (".png", ".svg")


def picture_path(asked: str | None) -> Path:
    """Where to: as asked for, else here, else in the folder for temporary files."""
    if asked is None:
        kind = ".png" if importlib.util.find_spec("matplotlib") is not None else ".svg"
        folder = Path.cwd() if os.access(".", os.W_OK) else Path(tempfile.gettempdir())
        return folder / (_NAME + kind)
    path = Path(asked).absolute()
    kind = path.suffix.lower()
    if kind not in _KINDS:
        raise UsageError(
            say("cannot draw {path}", path=asked),
            why=say("the end of its name says which picture it is, and {kind!r} is none", kind=kind),
            fix=(say("end it in {kinds}", kinds=", ".join(_KINDS)),),
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise UsageError(
            say("cannot write {path}", path=asked),
            why=say(
                "it is a directory, or {folder} is not one that is yours to write in", folder=path.parent
            ),
            fix=(say("name a file in a directory that exists"),),
        )
    if kind == ".png":
        from legroom.monitor.plot_png import ready

        ready()  # says now, not in a minute, that it cannot be drawn
    return path


def draw(result: Result, path: Path) -> None:
    """Write the picture, replacing an old one as a whole."""
    shapes = drawing(result)
    if path.suffix.lower() == ".png":
        from legroom.demo.picture_png import png

        content = png(shapes)
    else:
        from legroom.demo.picture_svg import svg

        content = svg(shapes)
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
