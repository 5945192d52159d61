"""A finished watch drawn into a file: ``--plot out.png|svg|html``.

Covers: gathering during the watch, writing at its end. Does not cover: the drawing (chart_svg.py, plot_html.py,
plot_png.py).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from legroom.errors import UsageError
from legroom.model import Moment
from legroom.monitor.chart_svg import chart
from legroom.monitor.plot_html import page
from legroom.monitor.plot_png import picture, ready
from legroom.monitor.story import Story
from legroom.words import listed, say

KINDS = (".png", ".svg", ".html")


class Plot:
    """Draws what it was shown when it is closed; what cannot work is said before the watch begins."""

    def __init__(self, path: str | os.PathLike[str], tell: Callable[[str], object]) -> None:
        self.path = Path(path)
        self._tell = tell
        self._story = Story()
        kind = self.path.suffix.lower()
        if kind not in KINDS:
            raise UsageError(
                say("cannot draw {path}", path=self.path),
                why=say("the end of its name says which picture it is, and {kind!r} is none", kind=kind),
                fix=(say("end it in {kinds}", kinds=listed(KINDS)),),
            )
        folder = self.path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or self.path.is_dir():
            raise UsageError(
                say("cannot write {path}", path=self.path),
                why=say("it is a directory, or {folder} is not one that is yours to write in", folder=folder),
                fix=(say("name a file in a directory that exists"),),
            )
        if kind == ".png":
            ready()

    def show(self, moment: Moment) -> None:
        self._story.add(moment)

    def close(self) -> None:
        if self._story.moment is None:
            self._tell(say("nothing was seen, so {path} is not drawn", path=self.path))
            return
        try:
            _replace(self.path, drawn(self._story, self.path.suffix.lower()))
        except OSError as problem:
            why = problem.strerror or problem
            self._tell(say("cannot write {path}: {why}", path=self.path, why=why))
        else:
            self._tell(say("drawn: {path}", path=self.path))


def drawn(story: Story, kind: str) -> bytes:
    """The story as a picture of that kind."""
    if kind == ".png":
        return picture(story)
    if kind == ".html":
        return page(story).encode()
    return chart(story.dots(), story.marks, story.spells()).encode()


def _replace(path: Path, content: bytes) -> None:
    """All of it or none: whoever looks at the old picture meanwhile sees the old picture."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
