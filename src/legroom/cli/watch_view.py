"""The views of `legroom watch`: the screen, the page, the picture. Wires them; draws nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from legroom.errors import MissingPackage
from legroom.words import say

if TYPE_CHECKING:
    from legroom.model import Moment, Sample
    from legroom.monitor.stream import Output
    from legroom.monitor.terminal import Terminal
    from legroom.monitor.web import Web


def page_at(where: str, tell: Callable[[str], object]) -> Web:
    """The watch as a page; its address is told."""
    from legroom.monitor.web import PORT, Web

    served = Web(where or str(PORT))
    tell(say("a page at {url}", url=served.url))
    return served


def plot_to(path: str, tell: Callable[[str], object]) -> Output:
    """A picture at the end."""
    from legroom.monitor.plot import Plot

    return Plot(path, tell)


def screen_if_any(tell: Callable[[str], object]) -> Terminal | None:
    """The full-screen view, where there is a screen and Textual to draw on it."""
    from legroom.monitor.terminal import Terminal, ready, why_no_screen

    if why_no_screen() is not None:
        return None
    try:
        ready()
    except MissingPackage as problem:
        tell(say("{name}: {why}", name=problem.what, why=problem.fix[0]))
        return None
    return Terminal()


def full_screen(
    stream: Iterable[Moment],
    outputs: Sequence[Output],
    screen: Terminal,
    stop: threading.Event,
    tell: Callable[[str], object],
) -> Moment | None:
    """Drive the watch behind the screen; what was said meanwhile is told when the screen is left."""
    from legroom.monitor.terminal import at_the_screen

    try:
        return at_the_screen(stream, outputs, screen, stop)
    finally:
        for note in screen.notes:  # what was said while the screen was drawn over
            tell(note)


def replayed(samples: Iterable[Sample], stop: threading.Event, page: Web | None) -> Iterator[Sample]:
    """A replay's samples until it is stopped; a page that shows it stays open to the end."""
    for sample in samples:
        if stop.is_set():
            return
        yield sample
    if page is not None:
        page.finish()
        stop.wait()
