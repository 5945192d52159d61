"""Checks the arguments of ``data.batches``, selects the columns, and chooses the path that batches take.

The path and its reason are ``Batches.path`` and ``Batches.why``.

    cpu               gathered in this process's memory                       no device
    cuda-resident     arrays in GPU memory, gathered there                    resident=True
    cuda-copy-engine  fetched by the GPU's copy engines, row by row           entries in shared memory, large rows
    cuda-kernel       gathered by a kernel that takes few of the GPU's cores  entries in shared memory, small rows
    cuda-registered   gathered by torch's index_select on the GPU             where the kernel cannot be compiled
    cuda-pinned       gathered into page-locked buffers, then copied          entries on disk, or registering failed
    cuda-copy         gathered into ordinary memory, then copied              where page-locking failed too

Entries on disk are not registered: that would read all of them into RAM and lock them there. The copy engines and the
kernel are compared in the first batches of a loop over scattered rows (choose_faster_cuda_path.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from legroom.cache.cached_arrays_and_tables import Ragged
from legroom.cache.cached_tables import ColumnChunks, TableRows
from legroom.errors import UnsupportedData, UsageError
from legroom.formats.base_reader import Selection
from legroom.loader.batches.cpu_gather import Batch, Column, Gatherer, HostGatherer, types_of
from legroom.loader.rank_sampler import Uneven
from legroom.messages import counted, joined, listed, phrase, say
from legroom.records.cache_entry import Entry
from legroom.system.argument_checks import check_arguments, check_integer
from legroom.system.lazy_and_optional_imports import import_lock, require

if TYPE_CHECKING:
    import torch

    from legroom.cache.cached_arrays_and_tables import CachedData
    from legroom.loader.batches.cuda_calls_for_gather import Driver
    from legroom.loader.batches.legroom_open import Data


NDArray = np.ndarray[Any, Any]
# Paths that ``path=`` may force; the others follow from the arguments or are the last resort.
CudaPath = Literal["cuda-copy-engine", "cuda-kernel", "cuda-registered", "cuda-pinned"]
CUDA_PATHS: tuple[CudaPath, ...] = get_args(CudaPath)

_OPTIONAL = ("epoch", "sequence_length", "stride")
# Each of these has a check of its own, which says more.
_CHECKED = ("keys", "transform", "rows")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The arguments of ``data.batches``, as given."""

    batch_size: int
    shuffle: bool = False
    seed: int = 0
    epoch: int | None = None
    device: Any = None
    format: Literal["torch", "numpy"] = "torch"
    keys: str | Iterable[str] | None = None
    drop_last: bool = False
    rank: int | None = None
    world_size: int | None = None
    uneven: Uneven = "pad"
    transform: Callable[[dict[str, Any]], Any] | None = None
    resident: bool = False
    path: CudaPath | None = None
    sequence_length: int | None = None
    stride: int | None = None
    rows: slice | Iterable[int] | None = None

    @property
    def on_host(self) -> bool:
        """Whether batches stay in RAM."""
        return self.device is None or str(self.device) == "cpu"

    @property
    def consecutive(self) -> bool:
        """Whether a batch is one run of rows; ``rows`` as `ChosenRows.rows` gives them."""
        return not self.shuffle and (self.rows is None or (isinstance(self.rows, range) and self.rows.step == 1))

    def checked(self) -> BatchSettings:
        """The same with plain integers; UsageError for arguments that are invalid for any data."""
        least = {"batch_size": 1, "seed": 0, "epoch": 0, "sequence_length": 1, "stride": 1}
        given = {name: value for name in least if (value := getattr(self, name)) is not None or name not in _OPTIONAL}
        plain: dict[str, Any] = {name: check_integer(name, value, least[name]) for name, value in given.items()}
        found = replace(self, **plain)
        check_arguments(BatchSettings.__init__, {one.name: getattr(found, one.name) for one in fields(found)}, _CHECKED)
        found._check()
        return found

    def _check(self) -> None:
        if self.transform is not None and not callable(self.transform):
            raise UsageError(
                say("transform must be callable (got {value!r})", value=self.transform),
                why=say("transform receives a batch: a dict of columns"),
                fix=(say("transform=lambda batch: {**batch, 'images': batch['images'] / 255}"),),
            )
        self._check_windows()
        if self.resident and self.on_host:
            raise UsageError(
                say("resident=True needs a device"),
                why=say("it keeps the arrays in GPU memory; they are in RAM already"),
                fix=("device='cuda', resident=True", say("or remove resident=True")),
            )
        if self.path is not None and (self.on_host or self.resident):
            raise UsageError(
                say("path={path!r} cannot be used here", path=self.path),
                why=say("resident=True gathers in GPU memory") if self.resident else say("batches stay in RAM"),
                fix=(say("remove path"),) if self.resident else ("device='cuda'", say("or remove path")),
            )
        if self.format == "torch":
            require("torch", "torch", _TENSORS, instead=_WITHOUT_TORCH)
        elif not self.on_host:
            raise UsageError(
                say("format={format!r} cannot be used with device={device}", format=self.format, device=self.device),
                why=say("numpy arrays are in RAM, not in GPU memory"),
                fix=("format='torch'", say("or remove device")),
            )

    def _check_windows(self) -> None:
        if self.sequence_length is None:
            if self.stride is not None:
                raise UsageError(
                    say("stride={stride} needs sequence_length", stride=self.stride),
                    why=say("stride is the distance of windows of a token file"),
                    fix=("sequence_length=1024",),
                )
            return
        for name in ("keys", "resident"):
            if getattr(self, name):
                raise UsageError(
                    say("{name} cannot be used with sequence_length", name=name),
                    why=say("windows are made of the tokens of the file, and gathered in RAM"),
                    fix=(say("remove {name}", name=name),),
                )


_TENSORS = phrase("batches of tensors")
_WITHOUT_TORCH = (phrase("format='numpy' returns arrays and needs no torch"),)


def columns_of(data: CachedData, keys: str | Iterable[str] | None) -> dict[str, Column]:
    """The columns of a batch: all of them, or those that ``keys`` selects by name or group."""
    asked = Selection(keys).keys
    found: dict[str, Column] = {}
    refused: dict[str, str] = {}
    for name in _names(data, asked):
        try:
            found[name] = _column(data, name)
        except UnsupportedData as problem:
            if asked is not None:
                raise
            refused[name] = problem.why
    if refused:
        lengths = Counter(map(len, found.values()))
        usual = max(lengths, key=lambda rows: (lengths[rows], rows), default=0)
        found = {name: column for name, column in found.items() if len(column) == usual}
        raise UnsupportedData(
            say("these columns cannot be part of a batch: {names}", names=listed(refused)),
            why=joined(say("{name}: {why}", name=name, why=why) for name, why in refused.items()),
            fix=(*([_select_these(found)] if found else []), *_read_without_batches(data, list(found), list(refused))),
        )
    _require_same_length(found)
    return found


# The array of tokens, by the source's format.
_TOKENS = {"tokens": "tokens", "llm.c": "tokens", "megatron": "sequences/values"}


def windows_of(data: CachedData, length: int, stride: int | None) -> NDArray:
    """The column of windows of a token file: a view in which row i is the ``length + 1`` tokens from i × stride on."""
    kind = data.info.format
    if kind not in _TOKENS:
        raise UsageError(
            say("sequence_length needs a token file"),
            why=say("{path} has the format {kind}", path=listed(data.info.names[:1]), kind=kind),
            fix=(say("remove sequence_length"), say("open a token file: legroom.open('train.bin', dtype='uint16')")),
        )
    tokens = data[_TOKENS[kind]]
    if len(tokens) <= length:
        raise UsageError(
            say("the file is shorter than one window"),
            why=say("it has {tokens}; sequence_length={length} needs {needed}: one more for the last target",
                    tokens=counted(len(tokens), phrase("{count} token"), phrase("{count} tokens")),
                    length=length, needed=length + 1),
            fix=(say("pass sequence_length={most} or less", most=max(1, len(tokens) - 1)),),
        )  # fmt: skip
    windows: NDArray = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[:: stride or length]
    return windows


def _names(data: CachedData, asked: tuple[str, ...] | None) -> list[str]:
    named = list(data)
    if asked is not None:
        every = [*data, *(column for columns in data.columns.values() for column in columns)]
        below = {key: [name for name in every if name.startswith(key.strip("/") + "/")] for key in asked}
        named = [name for key in asked for name in ([key] if key in data else below[key] or [key])]
    # A table is replaced by its columns.
    return [column for name in named for column in data.columns.get(name, (name,))]


def _column(data: CachedData, name: str) -> Column:
    value = data.rows_of(name)
    if isinstance(value, TableRows):
        value = data[name]  # raises with the reason
    if isinstance(value, (Ragged, ColumnChunks)) or (isinstance(value, np.ndarray) and value.ndim > 0):
        return value
    raise UnsupportedData(
        say("{name} has no rows", name=name),
        why=say("it is a scalar"),
        fix=(say("select other columns, or read it without batches: data[{name!r}]", name=name),),
    )


def _require_same_length(columns: Mapping[str, Column]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) == 1:
        return
    if not lengths:
        raise UsageError(say("the data have no columns"), fix=(say("open data with arrays that have rows"),))
    common = max(lengths.values(), key=list(lengths.values()).count)
    raise UsageError(
        say("the columns have different numbers of rows"),
        why=listed(say("{name} has {rows}", name=name, rows=rows) for name, rows in lengths.items()),
        fix=(_select_these([name for name, rows in lengths.items() if rows == common]),),
    )


def _select_these(names: Iterable[str]) -> str:
    return say("select the columns: keys=[{names}]", names=", ".join(map(repr, names)))


def _read_without_batches(data: CachedData, found: Sequence[str], refused: Sequence[str]) -> Iterator[str]:
    """How to read what cannot be part of a batch: text and lists row by row, scalars by their name."""
    by_row = [name for name in refused if isinstance(data.rows_of(name), TableRows)]
    if by_row:
        code = f"data.dataset({', '.join(map(repr, (*found, *by_row)))})"
        yield say("to read {names} too, use a dataset of rows: {code}", names=listed(by_row), code=code)
    elif not found:
        yield say("none of them has rows: read them without batches, as data[{name!r}]", name=refused[0])


_KEPT_GATHERERS = 2  # per Data: one to train and one to evaluate


def gatherer_for(data: Data, columns: Mapping[str, Column], settings: BatchSettings) -> Gatherer:
    """The gatherer of these columns for these settings."""
    types = types_of(columns, data.info) if settings.format == "torch" else None
    if settings.on_host:
        key = (tuple(columns), settings.batch_size, settings.format, settings.sequence_length, settings.stride)
        found = data.gatherers.pop(key, None) or HostGatherer(columns, settings.batch_size, types)
        data.gatherers[key] = found
        while len(data.gatherers) > _KEPT_GATHERERS:
            data.gatherers.pop(next(iter(data.gatherers)))
        return found
    columns = {name: data[name] if isinstance(one, ColumnChunks) else one for name, one in columns.items()}
    movable = {name: one for name, one in columns.items() if isinstance(one, np.ndarray) and types and types[name]}
    if not movable:
        raise UnsupportedData(
            say(
                "none of these columns can be copied to {device}: {names}",
                device=settings.device,
                names=listed(columns),
            ),
            why=say("rows of different lengths, text and dates stay in RAM"),
            fix=(say("remove device"), say("or select a numeric column: keys=(…)")),
        )
    extents = {name: data.where(name) for name in movable}
    files = {name: (extent.path, extent.offset) for name, extent in extents.items() if extent is not None}
    on_device = open_gatherer(movable, data.info, settings, files=files, types=types)
    rest = {name: column for name, column in columns.items() if name not in movable}
    return (
        SplitGatherer(on_device, HostGatherer(rest, settings.batch_size, types), list(columns)) if rest else on_device
    )


class SplitGatherer:
    """Batches of two parts: columns on the device, and the rest in RAM."""

    def __init__(self, first: Gatherer, rest: Gatherer, names: list[str]) -> None:
        self._first, self._rest, self._names = first, rest, names

    @property
    def path(self) -> str:
        """The path on the device, which may change (cuda_pinned.py)."""
        return self._first.path

    @property
    def why(self) -> str:
        return self._first.why

    @property
    def ahead(self) -> int:
        return self._first.ahead

    def gather(self, rows: NDArray) -> Batch:
        parts = {**self._first.gather(rows), **self._rest.gather(rows)}
        return {name: parts[name] for name in self._names}

    def begin(self, rows: NDArray) -> None:
        """Pass the hint to both."""
        self._first.begin(rows)
        self._rest.begin(rows)


def open_gatherer(
    columns: Mapping[str, NDArray],
    entry: Entry,
    settings: BatchSettings,
    *,
    files: Mapping[str, tuple[Path, int]],
    types: Mapping[str, torch.dtype | None] | None = None,
    driver: Driver | None = None,
) -> Gatherer:
    """The gatherer on a CUDA device; ``files`` has the file and the offset of each column.

    ``types``: those of the tensors, if not the arrays'. ``driver`` is the device's unless a test passes its own.
    """
    # Here, so that batches in RAM do not load the CUDA modules.
    with import_lock:
        from legroom.gpu.cuda_driver_api import CudaRefused
        from legroom.loader.batches.choose_faster_cuda_path import open_registered
        from legroom.loader.batches.cuda_calls_for_gather import open_driver
        from legroom.loader.batches.cuda_gather_base import row_layout
        from legroom.loader.batches.cuda_pinned import PinnedGatherer
        from legroom.loader.batches.cuda_registered import register_columns
        from legroom.loader.batches.cuda_resident import open_resident

    driver = driver or open_driver(settings.device)
    rows = {name: row_layout(name, column, (types or {}).get(name)) for name, column in columns.items()}
    if settings.resident:
        return open_resident(driver, columns, rows, entry)
    if settings.path == "cuda-pinned":
        given = say("path={path!r} was given", path=settings.path)
        return PinnedGatherer(driver, columns, rows, given, batch_size=settings.batch_size)
    why = _why_not_registered(entry, columns, files) or driver.why_no_registering()
    if why is None:
        try:
            return open_registered(driver, rows, partial(register_columns, driver, columns, files), settings)
        except CudaRefused as refusal:
            why = str(refusal)
    if settings.path is not None:
        raise UsageError(
            say("path={path!r} cannot be used", path=settings.path),
            why=why,
            fix=(say("remove path: the fastest path that works is chosen"),),
        )
    return PinnedGatherer(driver, columns, rows, why, batch_size=settings.batch_size)


def _why_not_registered(
    entry: Entry, columns: Mapping[str, NDArray], files: Mapping[str, tuple[Path, int]]
) -> str | None:
    """Why registering is not attempted, or None."""
    if entry.backing == "disk":
        return say("the entry is on disk; registering it would lock all of it in RAM")
    if entry.backing != "shm":
        return say("the data are not in the shared cache ({backing})", backing=entry.backing)
    for name, column in columns.items():
        if column.nbytes and (name not in files or not column.flags.c_contiguous):
            return say("{name} is not a contiguous array in a file of the cache", name=name)
    return None
