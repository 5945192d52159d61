"""What ``data.batches`` may be asked for, checked.

Covers: the arguments and the errors about them. Does not cover: what depends on the data (columns.py) or on the
device (cuda.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from legroom.errors import UsageError
from legroom.loader.rows.share import UNEVEN, Uneven
from legroom.system.argument_checks import check_choice, check_integer
from legroom.system.imports import require
from legroom.words import say

FORMATS = ("torch", "numpy")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """One loop's wishes, as given."""

    batch_size: int
    shuffle: bool = False
    seed: int = 0
    epoch: int | None = None
    device: Any = None
    format: str = "torch"
    keys: str | Iterable[str] | None = None
    drop_last: bool = False
    rank: int | None = None
    world_size: int | None = None
    uneven: Uneven = "pad"
    transform: Callable[[dict[str, Any]], Any] | None = None
    resident: bool = False

    @property
    def on_host(self) -> bool:
        """Whether batches stay in memory."""
        return self.device is None or str(self.device) == "cpu"

    def check(self) -> None:
        """Raise UsageError for arguments that no data could make right."""
        check_integer("batch_size", self.batch_size, 1)
        check_integer("seed", self.seed, 0)
        if self.epoch is not None:
            check_integer("epoch", self.epoch, 0)
        check_choice("format", self.format, FORMATS)
        check_choice("uneven", self.uneven, UNEVEN)
        if self.transform is not None and not callable(self.transform):
            raise UsageError(
                say("transform={value!r} cannot be called", value=self.transform),
                why=say("transform is a function of a batch, which is a dict of its columns"),
                fix=(say("transform=lambda batch: {**batch, 'images': batch['images'] / 255}"),),
            )
        if self.resident and self.on_host:
            raise UsageError(
                say("resident=True needs a device"),
                why=say(
                    "it keeps the arrays in the memory of a GPU; in this machine's memory they are already"
                ),
                fix=("device='cuda', resident=True", say("or leave resident out")),
            )
        if self.format == "torch":
            _need_torch()
        elif not self.on_host:
            raise UsageError(
                say("format={format!r} has no batches on {device}", format=self.format, device=self.device),
                why=say("numpy arrays lie in this machine's memory"),
                fix=("format='torch'", say("or leave device out")),
            )


def _need_torch() -> None:
    require(
        "torch", "torch", say("batches of tensors"), instead=(say("format='numpy' gives batches of arrays"),)
    )
