"""The arguments of a job: DataLoader settings, ranks, model; and the bytes per batch, given or of a data file.

Invalid values are refused here, once for the command line and for Python.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from glob import glob, has_magic
from itertools import cycle, islice
from math import ceil

from legroom.errors import FormatPluginFailed, UnknownFormat, UnsupportedData
from legroom.messages import counted, phrase, say
from legroom.records.loader_settings_and_flags import LoaderKind, LoaderSettings
from legroom.records.workload import PlannedLoader, Workload
from legroom.system.argument_checks import check_choice, check_integer
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.system.open_file_or_pipe import nothing_matches
from legroom.units import format_size

# Additional copies of the parameters in training: gradients and optimizer state.
OPTIMIZERS = {"none": 0, "sgd": 1, "adafactor": 1, "momentum": 2, "adam": 3, "adamw": 3}
_MOST_TENSORS = 1 << 20
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
# Fields of Demand, and the least that each may be.
_INTEGERS = {
    "num_workers": 0, "prefetch_factor": 1, "ranks": 1, "val_workers": 0, "val_batch": 1, "per_process": 0,
    "process_ram": 0, "worker_ram": 0, "nccl": 0, "params": 0, "gpu_bytes": 0, "checkpoint": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Batch:
    """The bytes of each tensor of a batch with that many samples, and the source of the figures."""

    tensors: tuple[int, ...]
    samples: int
    source: str
    rows: int | None = None  # samples in the dataset
    making: int | None = None  # private bytes while it is assembled; None: as many as the batch
    each: bool = False  # every sample has its own tensors: a larger batch has more of them, not larger ones
    pickled: int = 0  # bytes of all that is not a tensor
    endless: bool = False  # only its size is given: there are as many batches as the queues take

    def of(self, samples: int) -> Batch:
        """The batch scaled to another number of samples: larger tensors, rounded up, or more tensors."""
        if self.each:
            count = -(-len(self.tensors) * samples // self.samples)
            scaled = tuple(islice(cycle(self.tensors), count)) if count <= _MOST_TENSORS else self._as_one(samples)
        else:
            scaled = tuple(-(-nbytes * samples // self.samples) for nbytes in self.tensors)
        making = None if self.making is None else -(-self.making * samples // self.samples)
        pickled = -(-self.pickled * samples // self.samples)
        return Batch(scaled, samples, self.source, self.rows, making, self.each, pickled, self.endless)

    def _as_one(self, samples: int) -> tuple[int, ...]:
        """More tensors than any descriptor limit allows: their sizes no longer matter."""
        return (-(-sum(self.tensors) * samples // self.samples), *(0,) * _MOST_TENSORS)


@dataclass(frozen=True, slots=True)
class Demand(LoaderSettings):
    """A job as described by the user; sizes in bytes."""

    ranks: int = 1
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = False
    pin_memory: bool = False
    loader_kind: LoaderKind = "torch"
    multiprocessing_context: str | None = None  # how workers start; None: Python's default
    val_batch: int | None = None  # samples; None: as in training
    val_workers: int | None = None  # None: there is no validation loader
    per_process: int | None = None  # bytes in /dev/shm
    process_ram: int | None = None
    process_ram_source: str = ""  # empty: stated
    worker_ram: int = 0
    worker_ram_source: str = ""  # where it was measured
    nccl: int = 0
    params: int = 0  # kept on the host
    optimizer: str = "none"
    dtype: str = "float32"
    gpu_bytes: int | None = None
    checkpoint: int = 0
    squeezed: bool = False  # legroom.DataLoader with the fewest batches in flight

    def __post_init__(self) -> None:
        for name, least in _INTEGERS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_integer(name, value, least))
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("dtype", self.dtype, DTYPES)


def batch_of(sample_bytes: int, samples: int) -> Batch:
    """A batch of one tensor, with that many bytes per sample."""
    samples = check_integer("batch_size", samples, 1)
    sample_bytes = check_integer("sample_bytes", sample_bytes, 1)
    source = say("{each} per sample, given by you", each=format_size(sample_bytes))
    return Batch((sample_bytes * samples,), samples, source, endless=True)


def loaders_of(demand: Demand, batch: Batch | None) -> tuple[PlannedLoader, ...]:
    """The DataLoaders that are alive at the same time: training, and validation if requested."""
    if batch is None:
        return ()
    found = [_loader(demand, batch, demand.num_workers)]
    if demand.val_workers is not None:
        val = batch.of(demand.val_batch) if demand.val_batch is not None else batch
        # The length of the validation set is unknown: its queues may fill.
        found.append(_loader(demand, replace(val, rows=None), demand.val_workers))
    return tuple(found)


def _loader(demand: Demand, batch: Batch, workers: int) -> PlannedLoader:
    return PlannedLoader(
        tensors=batch.tensors,
        batch_size=batch.samples,
        num_workers=workers,
        prefetch_factor=demand.prefetch_factor,
        batches=None if batch.rows is None else max(1, -(-batch.rows // (batch.samples * demand.ranks))),
        persistent_workers=demand.persistent_workers,
        pin_memory=demand.pin_memory,
        loader_kind=demand.loader_kind,
        source=batch.source,
        making=batch.making,
        slots=workers + 1 if demand.squeezed else None,
    )


def host_model(demand: Demand) -> tuple[int, str]:
    """Bytes of the model and its training state on the host, with the calculation as text."""
    if not demand.params:
        return 0, ""
    each, copies = DTYPES[demand.dtype], 1 + OPTIMIZERS[demand.optimizer]
    text = say(
        "{params} parameters × {each} bytes × {copies} ({parts})",
        params=demand.params, each=each, copies=copies,
        parts=say("weights, gradients, {optimizer}'s state", optimizer=demand.optimizer)
        if copies > 2
        else say("weights, gradients") if copies == 2 else say("weights"),
    )  # fmt: skip
    return demand.params * each * copies, text


def workload_of(demand: Demand, batch: Batch | None, processes: int, per_gpu: int = 1) -> Workload:
    """The workload of that many processes."""
    model, model_source = host_model(demand)
    stated = say("given by you")
    return Workload(
        processes=processes,
        loaders=loaders_of(demand, batch),
        process_shm=demand.per_process or 0,
        process_shm_source=stated,
        process_ram=demand.process_ram or 0,
        process_ram_source=demand.process_ram_source or stated,
        host_model=model,
        host_model_source=model_source,
        worker_ram=demand.worker_ram,
        worker_ram_source=demand.worker_ram_source,
        nccl=demand.nccl,
        gpu=demand.gpu_bytes,
        per_gpu=per_gpu,
        checkpoint=demand.checkpoint,
    )


@dataclass(frozen=True, slots=True)
class DataRows:
    """A data file as a DataLoader reads it."""

    path: str
    rows: int
    tensors: tuple[Fraction, ...]  # bytes of one row of each
    nbytes: int  # of everything in it
    uneven: bool  # some rows are ragged or text: only their average is known
    left_out: tuple[str, ...] = ()  # arrays that have no rows

    def batch(self, samples: int) -> Batch:
        """A batch of that many rows."""
        samples = check_integer("batch_size", samples, 1)
        name = os.path.basename(self.path)
        source = (
            say(
                "{rows} of {path}",
                path=name,
                rows=counted(samples, phrase("{count} average row"), phrase("{count} average rows")),
            )
            if self.uneven
            else say(
                "{rows} of {path}, as large as in the file",
                path=name,
                rows=counted(samples, phrase("{count} row"), phrase("{count} rows")),
            )
        )
        return Batch(tuple(ceil(each * samples) for each in self.tensors), samples, source, self.rows)


def data_rows(path: str | os.PathLike[str], keys: str | Iterable[str] | None = None) -> DataRows:
    """The arrays and columns that a DataLoader would batch from that file, or from all that match a pattern."""
    pattern = os.fspath(path)
    if not has_magic(pattern) or os.path.exists(pattern):
        return _rows_of_file(path, keys)
    found = sorted(glob(pattern))
    if not found:
        raise nothing_matches(pattern)
    shards = [_rows_of_file(one, keys) for one in found]
    rows = sum(one.rows for one in shards)
    if other := next((one for one in shards if len(one.tensors) != len(shards[0].tensors)), None):
        raise UnsupportedData(
            say("the files of {path} have different columns", path=path),
            why=say("{one} has {count}, {other} has {others}", one=shards[0].path, count=len(shards[0].tensors),
                    other=other.path, others=len(other.tensors)),
            fix=(say("load only what you need: keys=[…]"),),
        )  # fmt: skip
    tensors = tuple(
        sum((one.tensors[at] * one.rows for one in shards), Fraction()) / rows for at in range(len(shards[0].tensors))
    )
    return DataRows(
        pattern, rows, tensors, sum(one.nbytes for one in shards),
        any(one.uneven or one.tensors != tensors for one in shards), shards[0].left_out,
    )  # fmt: skip


def _rows_of_file(path: str | os.PathLike[str], keys: str | Iterable[str] | None) -> DataRows:
    with import_lock:
        from legroom.formats.base_reader import ArraySpec
        from legroom.formats.detect import open_source

    try:
        with open_source(path, keys) as reader:
            description = reader.describe()
    except (UnknownFormat, FormatPluginFailed) as problem:
        if any("dtype=" in one for one in problem.fix):  # it can be given to legroom.open, but not here
            size = say("if it is a flat file of tokens, pass the size of a sequence instead: sample_bytes='4KB'")
        else:
            size = say("or pass the size of one sample instead: sample_bytes=SIZE")
        others = [one for one in problem.fix if "dtype=" not in one]
        problem.fix = (size, *others) if isinstance(problem, UnknownFormat) else (*others, size)
        raise
    arrays = [item for item in description.items if isinstance(item, ArraySpec)]
    tables = [item for item in description.items if not isinstance(item, ArraySpec)]
    # Offsets have one entry more than there are rows; the bytes of a ragged pair are in its values.
    ragged = {item.ragged: item.shape[0] - 1 for item in arrays if item.ragged and item.name.endswith("/offsets")}
    counts = Counter([item.shape[0] for item in arrays if item.shape and not item.ragged])
    counts.update(ragged.values())
    counts.update(table.rows for table in tables)
    rows = max(counts, key=lambda count: (counts[count], count), default=0)
    if rows < 1:
        raise UnsupportedData(
            say("{path} has no rows to build batches from", path=path),
            why=say("its arrays have 0 rows")
            if counts
            else say("none of its {count} arrays has a first axis", count=len(description.items))
            if description.items
            else say("it has no arrays"),
            fix=(say("pass the size of one sample instead: sample_bytes='600KB'"),),
        )
    tensors: list[Fraction] = []
    left_out: list[str] = []
    for item in arrays:
        if item.ragged:
            if item.name.endswith("/values") and ragged.get(item.ragged) == rows:
                tensors.append(Fraction(item.nbytes, rows))
        elif item.shape and item.shape[0] == rows:
            tensors.append(Fraction(item.nbytes, rows))
        else:
            left_out.append(item.name)
    for table in tables:
        if table.rows == rows and table.columns:
            tensors += [Fraction(table.nbytes, rows * len(table.columns))] * len(table.columns)
    uneven = bool(ragged) or bool(tables)
    return DataRows(str(path), rows, tuple(tensors), description.nbytes, uneven, tuple(left_out))
