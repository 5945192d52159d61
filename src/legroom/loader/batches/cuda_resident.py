"""Path cuda-resident: the arrays are copied to GPU memory once, and batches are gathered there.

There is no transfer to overlap, so everything runs on the consumer's current stream. A gather takes hundredths of a
millisecond, and sending row numbers would take as long again. So the order of an epoch is sent whole with its first
batch, and each batch uses a view of it. The consumer may use several streams: the device is synchronized before the
order is used and before anything is freed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.errors import NoRoom
from legroom.loader.batches.cuda_driver import Driver
from legroom.loader.batches.cuda_gather import RESOURCES, ResourceUse, RowLayout, require_usable
from legroom.units import format_size
from legroom.words import say

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
_LEAST_LEFT = 1 << 30
_ROUNDING = 2 << 20  # that torch's allocator may add to a large request
_MOST_AT_ONCE = 1 << 27  # bytes of row numbers kept in GPU memory


class ResidentGatherer:
    """Gathers from arrays in GPU memory, kept as rows of integers; a use is None where a row has no bytes."""

    path = "cuda-resident"

    def __init__(
        self,
        driver: Driver,
        rows: Mapping[str, RowLayout],
        uses: Mapping[str, ResourceUse[torch.Tensor] | None],
        columns: Mapping[str, NDArray],
        why: str,
    ) -> None:
        self.why = why
        self._driver, self._rows, self._uses = driver, dict(rows), dict(uses)
        self._columns = dict(columns)  # they keep the entry in the cache
        self._order: tuple[NDArray, torch.Tensor] | None = None
        self._pid = os.getpid()
        self._open = True

    def gather(self, rows: NDArray) -> dict[str, torch.Tensor]:
        """The batch of these rows, gathered on the current stream."""
        import torch

        require_usable(self._pid, self._open)
        parts: dict[str, torch.Tensor] = {}
        # A batch gathered under ``inference_mode`` can still be trained on.
        with torch.inference_mode(False):
            chosen = self._chosen(rows)
            for name, use in self._uses.items():
                kind = self._rows[name]
                if use is None:
                    parts[name] = kind.empty(len(rows), self._driver.device)
                else:
                    parts[name] = kind.restore(torch.index_select(use.resource, 0, chosen))
        return parts

    def begin(self, rows: NDArray) -> None:
        """Nothing: the GPU would only do the same work earlier."""

    def close(self) -> None:
        """Release the arrays; returned batches stay valid."""
        if not self._open or self._pid != os.getpid():
            return
        self._open = False
        self._driver.synchronize()
        self._order = None
        for use in self._uses.values():
            if use is not None:
                use.release()
        self._uses.clear()
        self._columns.clear()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit() and getattr(self, "_open", False):
            self.close()

    def _chosen(self, rows: NDArray) -> torch.Tensor:
        """Row numbers in GPU memory: a view of the whole order where ``rows`` is one."""
        whole = rows.base
        if not isinstance(whole, np.ndarray) or whole.itemsize != 8 or not 0 < whole.nbytes <= _MOST_AT_ONCE:
            return self._driver.row_numbers(rows)
        if self._order is None or self._order[0] is not whole:
            sent = self._driver.row_numbers(whole.view(np.int64))
            self._driver.synchronize()  # also for the previous order, which is freed now
            self._order = whole, sent
        first = (rows.ctypes.data - whole.ctypes.data) // 8
        return self._order[1][first : first + len(rows)]


def open_resident(
    driver: Driver, columns: Mapping[str, NDArray], rows: Mapping[str, RowLayout]
) -> ResidentGatherer:
    """A gatherer on copies in GPU memory; NoRoom where they would not leave enough free."""
    keys = {
        name: ("resident", str(driver.device), column.ctypes.data, column.nbytes)
        for name, column in columns.items()
    }
    uses: dict[str, ResourceUse[torch.Tensor] | None] = {}
    try:
        for name, column in columns.items():
            if column.nbytes == 0:
                uses[name] = None
                continue
            rest = sum(columns[other].nbytes for other, key in keys.items() if key not in RESOURCES)
            make: Callable[[], torch.Tensor] = partial(_copy, driver, column, rows[name], rest)
            uses[name] = RESOURCES.use(keys[name], column, make, _nothing)
    except BaseException:
        for use in uses.values():
            if use is not None:
                use.release()
        raise
    size = sum(column.nbytes for column in columns.values())
    why = say("resident=True: {size} in GPU memory", size=format_size(size))
    return ResidentGatherer(driver, rows, uses, columns, why)


def _copy(driver: Driver, column: NDArray, kind: RowLayout, rest: int) -> torch.Tensor:
    """Copy a column to GPU memory, if all columns still to be copied (``rest`` bytes) fit."""
    import torch

    free, total = driver.memory()
    left = max(_LEAST_LEFT, total // 10)
    if rest + _ROUNDING > free - left:
        raise NoRoom(
            say("the arrays do not fit in the memory of {device}", device=driver.device),
            why=say(
                "{size} to copy; {free} of {total} free, of which {left} stay reserved for training",
                size=format_size(rest), free=format_size(free), total=format_size(total), left=format_size(left),
            ),
            fix=(say("remove resident=True: the GPU then gathers from shared memory over PCIe"),
                 say("select fewer columns: keys=(…)")),
        )  # fmt: skip
    contiguous = column if column.flags.c_contiguous else np.ascontiguousarray(column)
    with warnings.catch_warnings():
        # Read-only under vm.overcommit_memory=2, and only read here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        words = torch.from_numpy(kind.words(contiguous))
    try:
        return words.to(driver.device, copy=True)
    except RuntimeError as problem:  # another process took memory meanwhile
        raise NoRoom(
            say("the arrays do not fit in the memory of {device}", device=driver.device),
            why=str(problem).partition("\n")[0],
            fix=(say("remove resident=True"),),
        ) from problem


def _nothing(_: object) -> None:
    """torch frees the memory when the tensor is deleted."""
