"""What the page is sent: the story so far once, then every moment, as server-sent events.

Covers: encoding once for all clients, and clients of every speed. Does not cover: sockets (web.py).

There is no queue for a client: each remembers which moment it had last and is given the newest, so that one which
reads slowly misses some and one which never reads costs nothing. Encoding happens in the clients' threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from legroom.model import Moment, PoolPoint, ProcessRow
from legroom.monitor.course import thinned
from legroom.monitor.record import object_of
from legroom.monitor.story import Story

MOST_PROCESSES = 200  # shown of a watch; those that hold most
_MOST_DOTS = 700  # of a pool, in the story so far
_MOST_TOLD = 50  # marks and alarms sent along with every moment
_BEAT = b": still here\n\n"
_END = b"event: end\ndata: {}\n\n"


class Feed:
    """Filled by the watch, read by many."""

    def __init__(self) -> None:
        self._story = Story()
        self._changed = threading.Condition()
        self._number = 0
        self._ended = False
        self.listening = 0
        self._encoding = threading.Lock()
        self._encoded: dict[str, tuple[int, bytes]] = {}  # kind of event: number and bytes of the newest

    def put(self, moment: Moment) -> None:
        """The next moment."""
        with self._changed:
            self._story.add(moment)
            self._number += 1
            self._changed.notify_all()

    def end(self) -> None:
        """There will be no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """One client's place in the stream."""
        with self._changed:
            self.listening += 1
        try:
            yield Seat(self)
        finally:
            with self._changed:
                self.listening -= 1

    def wait(self, seen: int, timeout: float) -> tuple[int, bool]:
        """The number of the newest moment, once it is another than ``seen``, and whether the watch has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != seen or self._ended, timeout)
            return self._number, self._ended

    def event(self, kind: str) -> tuple[int, bytes]:
        """The newest ``moment``, or the whole ``story``, as bytes to be sent; encoded by whoever asks first."""
        with self._encoding:
            known = self._encoded.get(kind)
            with self._changed:
                number = self._number
                if known is not None and known[0] == number:
                    return known
                body: dict[str, Any] = {} if self._story.moment is None else _now(self._story)
                dots = self._story.dots() if kind == "story" else {}
            if kind == "story":
                body["courses"] = {name: _few(course) for name, course in dots.items()}
            text = json.dumps(body, separators=(",", ":"))  # ASCII, so that no name can be half a character
            self._encoded[kind] = number, f"event: {kind}\ndata: {text}\n\n".encode()
            return self._encoded[kind]


class Seat:
    """Where one client is."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._seen: int | None = None
        self._over = False

    def next(self, timeout: float) -> bytes | None:
        """What to send next; a word of life when nothing came for so long, None after the end."""
        if self._over:
            return None
        if self._seen is None:
            self._seen, event = self._feed.event("story")
            return event
        number, ended = self._feed.wait(self._seen, timeout)
        if number != self._seen:
            self._seen, event = self._feed.event("moment")
            return event
        self._over = ended
        return _END if ended else _BEAT


def _now(story: Story) -> dict[str, Any]:
    """The newest moment as the page reads it: the log's object, the lesser processes left out, marks and alarms."""
    moment = story.moment
    if moment is None:
        return {}
    rows = moment.sample.processes
    most = sorted(rows, key=_weight, reverse=True)[:MOST_PROCESSES]
    return {
        **object_of(replace(moment, sample=replace(moment.sample, processes=tuple(most)))),
        "began": story.began,
        "processes_in_all": len(rows),
        "marked": [asdict(mark) for mark in list(story.marks)[-_MOST_TOLD:]],
        "spells": [asdict(spell) for spell in story.spells()[-_MOST_TOLD:]],
    }


def _few(dots: list[PoolPoint]) -> list[PoolPoint]:
    while len(dots) > _MOST_DOTS:
        dots = thinned(dots)
    return dots


def _weight(row: ProcessRow) -> int:
    return max(row.host or 0, row.rss_shmem or 0, row.gpu or 0)
