"""Which rows are used, which of them each rank gets, and in which order; the rank of this process and the world size.

The permutation of an epoch and its division among ranks are pure functions, so that every rank, and a resumed run with
another world size, computes the same.

Rank and world size come from arguments, torch.distributed or the launcher's environment.
torch is asked only where the program has imported torch.distributed itself. In a Slurm batch script SLURM_PROCID=0 and
SLURM_NTASKS are set although one process runs; only SLURM_STEP_NUM_TASKS describes this process.
Ranks that share their data (tensor or pipeline parallelism) must pass rank and world_size.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from legroom.errors import UsageError
from legroom.messages import RANKS, counted, phrase, say

log = logging.getLogger("legroom")
NDArray = np.ndarray[Any, Any]
Uneven = Literal["pad", "drop", "all"]

# Random numbers: numpy holds the interpreter's lock meanwhile, and the next epoch's are made in a thread.
_AT_ONCE = 1 << 13


class SampledBatch(NamedTuple):
    """One rank's batch: a range of positions in the order (past its end it wraps around), and the position after."""

    first: int
    last: int
    after: int  # the position once every rank has had its batch


@dataclass(frozen=True, slots=True)
class RankSampler:
    """The batches that one rank gets of an order of ``rows`` rows.

    In each step every rank gets one batch: rank r of W takes the r-th of the next W × batch_size positions. So after
    any number of steps a prefix of the order has been given out. Its length is the whole progress, and another world
    size or batch size can resume from it without skipping or repeating a row. The rest for the last step is split
    evenly, by ``uneven``:

        pad    every rank gets the same number, filled up with rows from the start (as torch's DistributedSampler)
        drop   every rank gets the same number; fewer than W rows are left out
        all    every row once; ranks may differ by one row, and so by one batch
    """

    rows: int
    batch_size: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    uneven: Uneven = "pad"

    def step(self, position: int) -> SampledBatch | None:
        """The batch after ``position`` rows have been given out; None: nothing is left for this rank."""
        left = self.rows - position
        if left >= self.batch_size * self.world_size:
            first = position + self.rank * self.batch_size
            return SampledBatch(first, first + self.batch_size, position + self.batch_size * self.world_size)
        first, last = self._tail(left)
        if first == last or (self.drop_last and last - first < self.batch_size):
            return None
        return SampledBatch(position + first, position + last, self.rows)

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        full, left = divmod(self.rows, self.batch_size * self.world_size)
        return full + (self.step(self.rows - left) is not None)

    def _tail(self, left: int) -> tuple[int, int]:
        """This rank's part of the last rows, which are fewer than a step takes."""
        each, over = divmod(left, self.world_size)
        if self.uneven == "all":
            first = self.rank * each + min(self.rank, over)
            return first, first + each + (self.rank < over)
        if self.uneven == "pad" and over:
            each += 1
        return self.rank * each, (self.rank + 1) * each


_ROWS = phrase("{count} row"), phrase("{count} rows")


def warn_of_no_batches(rows: int, batch_size: int, world_size: int, uneven: Uneven) -> None:
    """Warn of an epoch without batches although there are rows. No error: a loop of torch's DataLoader ends at once."""
    each = -(-rows // world_size) if uneven == "pad" else rows // world_size
    if each:
        log.warning(
            "%s",
            say(
                "an epoch has no batches: batch_size={size} is more than the {rows} of each rank, and drop_last=True "
                "drops smaller batches. Pass batch_size={each} or less, or drop_last=False",
                rows=counted(each, *_ROWS), size=batch_size, each=each,
            ),
        )  # fmt: skip
    elif uneven == "drop":
        log.warning(
            "%s",
            say(
                "an epoch has no batches of {rows} for {ranks}: uneven='drop' drops the rows that do not "
                "divide evenly. Pass uneven='pad'",
                rows=counted(rows, *_ROWS), ranks=counted(world_size, *RANKS),
            ),
        )  # fmt: skip


def permutation(rows: int, seed: int, epoch: int) -> NDArray:
    """The row numbers 0 … rows-1 in the order of that epoch, as int64: a function of (rows, seed, epoch) alone.

    Every row gets 64 bits of Philox under the key (seed, epoch), with the low bits replaced by its own number, and the
    rows are sorted by that. numpy guarantees the raw stream of a bit generator, but not the result of ``permutation``
    and ``shuffle``. No two keys are equal, so every sort gives the same result. (Two rows whose random bits agree stay
    in ascending order: for a million rows, one pair in thirty epochs.)
    """
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    keys = np.empty(rows, np.uint64)
    numbers = np.uint64((1 << max(0, rows - 1).bit_length()) - 1)
    for first in range(0, rows, _AT_ONCE):
        last = min(first + _AT_ONCE, rows)
        part = generator.random_raw(last - first)
        part &= ~numbers
        np.bitwise_or(part, np.arange(first, last, dtype=np.uint64), out=keys[first:last])
    keys.sort()
    keys &= numbers
    keys.flags.writeable = False  # copies of the order on a GPU stay right
    return keys.view(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """Some rows of the data, in the order given: start, start + step and so on, or the numbers in an array."""

    count: int
    start: int = 0
    step: int = 1
    numbers: NDArray | None = None

    def at(self, positions: NDArray) -> NDArray:
        """The row numbers at these positions, 0 … count-1."""
        found: NDArray = positions * self.step + self.start if self.numbers is None else self.numbers[positions]
        return found

    @property
    def rows(self) -> range | NDArray:
        """The row numbers, as ``choose_rows`` takes them."""
        if self.numbers is not None:
            return self.numbers
        return range(self.start, self.start + self.count * self.step, self.step)

    @property
    def identity(self) -> str:
        """The same for the same rows in the same order, in every process."""
        if self.numbers is None:
            return f"{self.start}:{self.start + self.count * self.step}:{self.step}"
        return hashlib.md5(self.numbers.astype("<i8").tobytes(), usedforsecurity=False).hexdigest()


def choose_rows(rows: slice | Iterable[int] | None, total: int) -> ChosenRows | None:
    """The rows that a slice, a range, row numbers or a mask choose of ``total``; None: all of them, in their order."""
    if rows is None:
        return None
    if isinstance(rows, slice):
        try:
            rows = range(*rows.indices(total))
        except (TypeError, ValueError) as problem:
            raise _not_rows(rows, str(problem)) from problem
    if isinstance(rows, range):
        found = ChosenRows(len(rows), rows.start, rows.step if len(rows) > 1 else 1)
    else:
        found = _numbered(rows, total)
    if found.numbers is None and (found.start, found.step, found.count) == (0, 1, total):
        return None
    if not found.count:
        raise UsageError(
            say("rows chooses no row"),
            why=say("the data have {total} rows", total=total),
            fix=(say("pass rows that the data have, for example {example}", example="rows=range(0, 1000)"),),
        )
    lowest, highest = _bounds(found)
    if lowest < 0 or highest >= total:
        raise UsageError(
            say("rows has {row}, which is not a row of the data", row=lowest if lowest < 0 else highest),
            why=say("the data have {total} rows, counted from 0", total=total),
            fix=(
                say("choose rows from 0 to {last}", last=total - 1),
                say(
                    "or pass a slice, which counts from the end and stops at it: {example}",
                    example="rows=slice(-1000, None)",
                ),
            ),
        )
    return found


def _bounds(chosen: ChosenRows) -> tuple[int, int]:
    if chosen.numbers is not None:
        return int(chosen.numbers.min()), int(chosen.numbers.max())
    last = chosen.start + (chosen.count - 1) * chosen.step
    return min(chosen.start, last), max(chosen.start, last)


_BOOLS = (bool, np.bool_)


def _numbered(rows: Iterable[int], total: int) -> ChosenRows:
    """Row numbers, or a mask of all rows; as a range where they are one."""
    try:
        given = np.asarray(rows if hasattr(rows, "__array__") else list(rows))
    except (TypeError, ValueError, OverflowError, RuntimeError) as problem:
        raise _not_rows(rows, str(problem)) from problem
    if given.ndim == 1 and not given.size:
        return ChosenRows(0)
    if isinstance(rows, (list, tuple)) and given.dtype != bool and any(isinstance(one, _BOOLS) for one in rows):
        raise _not_rows(rows, say("row numbers and True or False are mixed"))
    if given.dtype == bool and given.shape != (total,):
        raise UsageError(
            say(
                "rows is a mask of {shape} values for {total} rows", shape="×".join(map(str, given.shape)), total=total
            ),
            why=say("a mask has one value for each row, True for those to use"),
            fix=(
                say("pass a mask of {total} values", total=total),
                say("pass row numbers, for example {example}", example="rows=numpy.flatnonzero(mask)"),
            ),
        )
    if given.ndim != 1 or given.dtype.kind not in "biu":
        raise _not_rows(rows, say("{dtype} of shape {shape} was given", dtype=given.dtype, shape=list(given.shape)))
    numbers = np.flatnonzero(given) if given.dtype == bool else given
    if numbers.size and numbers.max() > np.iinfo(np.int64).max:
        raise _not_rows(rows, say("the largest number is {number}", number=int(numbers.max())))
    numbers = np.array(numbers, np.int64)  # a copy: the caller may change its own
    numbers.flags.writeable = False  # as an order: copies of it on a GPU stay right
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    if len(numbers) and step and bool((np.diff(numbers) == step).all()):
        return ChosenRows(len(numbers), int(numbers[0]), step)
    return ChosenRows(len(numbers), numbers=numbers)


def _not_rows(rows: object, why: str) -> UsageError:
    return UsageError(
        say("rows must be a range, a slice, row numbers or a mask (got {kind})", kind=type(rows).__name__),
        why=why,
        fix=(say("pass for example {example}", example="rows=range(0, 1000)"),),
    )


LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate, DeepSpeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)


def rank_and_world(
    rank: int | None, world_size: int | None, env: Mapping[str, str], group: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Rank and world size: the arguments, else the process group's, else the launcher's, else 0 of 1."""
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError(
                say("pass both rank and world_size (got rank={rank}, world_size={world})", rank=rank, world=world_size),
                why=say("the rows of a rank depend on both"),
                fix=(say("pass both"), say("or pass neither: torch.distributed or the launcher's environment is used")),
            )
        return _checked(rank, world_size, say("the arguments rank and world_size"))
    if group is not None:
        return _checked(*group, "torch.distributed")
    for rank_name, world_name in LAUNCHERS:
        if rank_name in env and world_name in env:
            where = say("the environment variables {rank} and {world}", rank=rank_name, world=world_name)
            return _checked(_number(env[rank_name], rank_name), _number(env[world_name], world_name), where)
    return 0, 1


def process_group() -> tuple[int, int] | None:
    """Rank and world size of torch's default process group, if it is initialized."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            say("{name} must be an integer (got {text!r})", name=name, text=text),
            why=say("rank and world_size are read from the launcher's environment"),
            fix=(say("unset {name}", name=name), say("or pass rank and world_size")),
        ) from None


_MOST_RANKS = 1 << 31


def _checked(rank: int, world_size: int, where: str) -> tuple[int, int]:
    if world_size >= _MOST_RANKS:
        raise UsageError(
            say("world_size must be less than 2**31 (got {world})", world=world_size),
            why=say("the values come from {where}", where=where),
            fix=(say("pass a matching rank and world_size"),),
        )
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            say(
                "rank must be from 0 to world_size - 1 (got rank={rank}, world_size={world})",
                rank=rank,
                world=world_size,
            ),
            why=say("the values come from {where}", where=where),
            fix=(say("pass a matching rank and world_size"),),
        )
    return int(rank), int(world_size)  # plain ones, for states
