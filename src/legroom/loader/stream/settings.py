"""What a stream may be asked for, checked.

Covers: the arguments and the errors about them, and the part of them that a saved state must agree with.
Does not cover: what depends on the files (stream/catalog.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from legroom.loader.rows.share import UNEVEN, Uneven
from legroom.loader.stream.batch import Format
from legroom.system.argument_checks import check_choice, check_integer


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """One stream's wishes."""

    batch_size: int
    memory: int
    shuffle_buffer: int
    shuffle_groups: bool
    seed: int
    form: Format
    rank: int
    world_size: int
    uneven: Uneven
    drop_last: bool

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, 1)
        check_integer("shuffle_buffer", self.shuffle_buffer, 0)
        check_integer("seed", self.seed, 0)
        check_choice("uneven", self.uneven, UNEVEN)

    def order(self) -> dict[str, Any]:
        """What decides which rows come when: a saved state is of use only where all of it is the same."""
        found: dict[str, Any] = {
            "batch_size": self.batch_size,
            "shuffle_buffer": self.shuffle_buffer,
            "shuffle_groups": self.shuffle_groups,
            "seed": self.seed,
            "rank": self.rank,
            "world_size": self.world_size,
            "uneven": self.uneven,
            "drop_last": self.drop_last,
        }
        if self.shuffle_buffer:
            # A shuffle buffer that is full in bytes before it is in rows depends on the bound and on its parts.
            found |= {"memory": self.memory, "format": self.form}
        return found
