"""What to run, and how. Covers: the order a supervisor is given. Does not cover: carrying it out (supervisor.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from legroom.rescue.flags import Named


@dataclass(frozen=True)
class Order:
    """What to run, and how."""

    command: tuple[str, ...]
    retries: int = 0
    named: tuple[Named, ...] = ()
    checkpoint: str | None = None  # a pattern
    resume_flag: str | None = None
    resume_existing: bool = False  # also from checkpoints that were there before the start
    grace: float = 30.0  # seconds between a passed-on SIGTERM and SIGKILL
    stall: float = 60.0  # seconds of standing still on a full /dev/shm; 0: never ended for that
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    stdout: int = 1  # where the child's output goes
    fresh: bool = False  # do not begin with the settings that worked last
    quiet: bool = False  # nothing is told on standard error

    @property
    def folders(self) -> list[str]:
        """Where it writes, as far as that is known: the directory of its checkpoints."""
        if self.checkpoint is None:
            return []
        folder = os.path.dirname(os.path.abspath(os.path.expanduser(self.checkpoint)))
        while "*" in folder or not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return [folder]
