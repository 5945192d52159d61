"""What a contender must be able to do, and where it may do it.

Covers: the protocol, the marks by which a trial sees who loads. Does not cover: the trial (trial.py).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY = "images"


@dataclass(frozen=True)
class Place:
    """The source, and directories of the contender's own on disk and in shared memory."""

    source: Path
    folder: Path
    memory: Path

    @property
    def marks(self) -> Path:
        return self.folder / "marks"

    def mark(self, what: str) -> None:
        """Say that this process is there, and how much processor time it had used by then."""
        scratch = self.marks / f".{what}-{os.getpid()}"
        scratch.write_text(str(time.process_time()))
        scratch.rename(self.marks / f"{what}-{os.getpid()}")

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around whatever reads the source."""
        self.mark("loading")
        yield
        self.mark("loaded")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One process at a time: what a careful user writes where the library elects nobody."""
        with open(self.folder / "turn.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # goes with the process, however it ends
            yield


class Peer:
    """One way to share; the constructor imports all that it needs, so that imports are not measured."""

    title = ""  # as the table has it
    package: str | None = None  # whose version is of interest
    elects = "the library"  # who sees to it that one process loads

    def __init__(self, place: Place) -> None:
        self.place = place

    def daemon(self) -> list[str] | None:
        """The command of the process that must run, if any; it prints ``awaited`` or makes a file of that name."""
        return None

    awaited = ""

    def connect(self) -> None:
        """Join the daemon."""

    def attach(self) -> Any:
        """The data, which are there; None where they are not."""
        raise NotImplementedError

    def load(self) -> None:
        """Put the source's data where others find them."""

    def get(self) -> Any:
        """The data, whether somebody has loaded them or not."""
        found = self.attach()
        if found is None:
            with self.place.turn():
                found = self.attach()
                if found is None:
                    self.load()
                    found = self.attach()
        return found

    def rows(self, data: Any, index: Any) -> Any:
        """Rows gathered in the way the library itself offers, as an array."""
        return data[index]

    def view(self, data: Any) -> Any:
        """The data as one numpy array without a copy; None where that is not offered."""
        return data

    def held(self) -> int:
        """Bytes that the loaded data take outside of the processes that use them."""
        return used(self.place.folder, apart=self.place.marks) + used(self.place.memory)

    def tidy(self) -> None:
        """What the library offers to clear leftovers."""


def used(folder: Path, apart: Path | None = None) -> int:
    """Bytes of blocks below a directory, as du counts them."""
    total = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(parent, name) != apart]
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
