"""What a bundle is made of. Covers: parts and what was asked for. Does not cover: filling them (gather.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """Files of the user's that belong into the bundle."""

    log: str | None = None  # a training's
    run: str | None = None  # that `legroom run --report` wrote
    watch: str | None = None  # that `legroom watch --log` wrote


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the bundle: a text, or a value that becomes JSON."""

    name: str
    about: str  # one line, for people
    content: Any
    addresses: bool = True  # False: its numbers with dots are versions, not addresses


@dataclass(frozen=True, slots=True)
class Gathered:
    """Every part, as it was read: nothing has been hidden yet."""

    parts: tuple[Part, ...]
    left_out: tuple[str, ...]  # in words: what could not be had, and why
    files: tuple[str, ...] = ()  # paths of datasets, whose names are to be hidden


@dataclass(frozen=True, slots=True)
class Packed:
    """One file of the finished bundle."""

    name: str
    about: str
    text: str

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.text.encode())
