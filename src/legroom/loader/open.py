"""``legroom.open``: the data of a file, one copy for every process, and the loops over them.

Covers: the public door. Does not cover: how the data come about (cache.open), how batches do (batches.py).

The cache knows nothing of loaders; a Data that has ``batches`` is made here, on top of its own. See
docs/decisions/0009-the-door-is-in-the-loader.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from legroom.cache.dataset import Data as CachedData
from legroom.cache.open import Where, open_as
from legroom.formats.selection import Selection

if TYPE_CHECKING:
    from legroom.loader.rows.batches import Batches
    from legroom.loader.rows.share import Uneven


class Data(CachedData):
    """A read-mostly mapping of names to arrays on the shared copy, and batches of them."""

    next_epoch: int = 0  # of the next shuffled loop that was given none

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int | None = None,
        device: Any = None,
        format: str = "torch",
        keys: str | Iterable[str] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "pad",
        transform: Callable[[dict[str, Any]], Any] | None = None,
        resident: bool = False,
    ) -> Batches:
        """Loops over batches of rows: dicts of names to tensors (or arrays, with ``format="numpy"``).

        The order is a function of ``seed`` and ``epoch``; without an epoch every new loop over these data has the
        next one. ``rank`` and ``world_size`` are torch.distributed's or the launcher's where they are not given;
        ``uneven`` says what becomes of rows that do not divide among the ranks: pad, drop or all. ``transform`` gets
        every batch. With ``device="cuda"`` batches are made on the GPU, and with ``resident`` the data are kept there.
        """
        from legroom.loader.rows.batches import Batches
        from legroom.loader.rows.settings import BatchSettings

        settings = BatchSettings(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            epoch=epoch,
            device=device,
            format=format,
            keys=Selection(keys).keys,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            uneven=uneven,
            transform=transform,
            resident=resident,
        )
        return Batches(self, settings)


def open(
    path: Where | Iterable[Where],
    keys: str | Iterable[str] | None = None,
    *,
    backing: str = "auto",
    hash: str = "md5",
    wait: bool = True,
    progress: Callable[[int, int], None] | None = None,
    evict: bool = True,
) -> Data:
    """The arrays of a file (or of several, joined along the first axis), shared by every process of this user.

    ``keys`` names the items to take; ``backing`` is auto, shm, disk or inplace; ``progress`` is called with
    (done, total) bytes; with ``wait=False`` a file that another process is loading raises NotLoaded; ``evict``
    lets unused entries go when room is needed.
    """
    return open_as(Data, path, keys, backing=backing, hash=hash, wait=wait, progress=progress, evict=evict)
