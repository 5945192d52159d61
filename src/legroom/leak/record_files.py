"""The file in which a process records its memory from step to step, as JSON lines; written by it, read by the report.

Each line is one write: a process that is killed loses at most the line that it was writing. Amounts of a holder are
written when they change.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from legroom.leak.process_counters import Counters

SCHEMA = "legroom.leak-record/1"
_AVERAGED = 4  # measurements of items
DIRECTORY = "LEGROOM_LEAK"  # the environment variable that names the directory of these files
_LONGEST_LINE = 1 << 22
_MOST_BYTES = 64 << 20  # of one file; a week at the longest interval takes 20 MB


class RecordWriter:
    """Appends to this process's file. Without space the records end; the script does not notice."""

    def __init__(self, directory: str, pid: int, started: float | None) -> None:
        self.path = Path(directory, f"{pid}-{int(started or 0)}.jsonl")
        self._file: int | None = None
        self._closed = False
        self._written = 0

    def write(self, kind: str, **values: Any) -> None:
        """Append one record."""
        if self._closed:
            return
        try:
            if self._file is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o600)
            line = json.dumps({"kind": kind, **values}, separators=(",", ":")).encode() + b"\n"
            self._written += len(line)
            if self._written > _MOST_BYTES or os.write(self._file, line) < len(line):
                self.close()
        except (OSError, ValueError):
            self.close()

    def close(self) -> None:
        """Write no more."""
        self._closed = True
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass
class CounterSample:
    """Counters at one step."""

    step: int | None  # None: taken by the clock, not at a step
    time: float  # seconds since the recording began
    counters: Counters
    free: dict[str, int] = field(default_factory=dict)  # bytes left in a pool, where they were read
    walked: bool = True  # whether the holders were read


@dataclass
class CreatedItems:
    """What one line made of a holder's newest items, in one window of tracemalloc."""

    file: str
    line: int
    pools: dict[str, int] = field(default_factory=dict)  # bytes
    graphs: int = 0  # tensors with an autograd graph
    tensors: int = 0
    through: tuple[tuple[str, int], ...] = ()  # the user's lines in the calls around it, innermost first


@dataclass
class HolderRecord:
    """One holder over time."""

    number: int
    name: str
    word: str
    file: str
    function: str
    line: int | None
    unit: str  # items, bytes, nodes of an autograd graph, files
    limit: int | None = None
    amounts: list[tuple[int | None, float, int | None]] = field(default_factory=list)  # step, time, amount
    item: dict[str, int] = field(default_factory=dict)  # bytes of one item by pool, the mean of the last measurements
    item_type: str = ""
    measured: list[dict[str, int]] = field(default_factory=list)  # bytes of one item, each time of a few new ones
    graphs: int = 0  # tensors with an autograd graph in one item
    tensors: int = 0
    created: list[CreatedItems] = field(default_factory=list)  # lines that made its newest items
    unknown: list[CreatedItems] = field(default_factory=list)  # newest items that no line was seen to make
    existing: int = 0  # windows in which it grew by items that had been made before


@dataclass
class TraceWindow:
    """One window of tracemalloc."""

    steps: int
    seconds: float
    sites: list[tuple[str, int, int, int, int, int]]  # file, line, blocks, bytes, later blocks, later bytes
    tensors: list[tuple[str, int, int, dict[str, int]]] | None = None  # file, line, count, bytes by pool


@dataclass
class ProcessRecord:
    """Everything that one process has recorded."""

    pid: int
    parent: int
    command: str
    role: str = "main"  # main, worker, forked
    rank: str | None = None
    started: float = 0.0  # Unix time
    source: str | None = None  # what its steps are: script, optimizer, loader, worker
    samples: list[CounterSample] = field(default_factory=list)
    holders: dict[int, HolderRecord] = field(default_factory=dict)
    windows: list[TraceWindow] = field(default_factory=list)
    copied: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    malloc_known: bool = True


def _mean(measured: list[dict[str, int]]) -> dict[str, int]:
    """Items differ in size, and each measurement is one of a few: alone it may be a third too small."""
    pools = {pool for one in measured for pool in one}
    return {pool: sum(one.get(pool, 0) for one in measured) // len(measured) for pool in sorted(pools)}


def read_directory(directory: str | os.PathLike[str]) -> list[ProcessRecord]:
    """The records of all processes, in the order in which they started."""
    found = [read_file(path) for path in sorted(Path(directory).glob("*.jsonl"))]
    return sorted((one for one in found if one is not None), key=lambda one: (one.started, one.pid))


def read_file(path: Path) -> ProcessRecord | None:
    """The records of one process; None if it wrote none. Lines that cannot be read are left out."""
    record: ProcessRecord | None = None
    try:
        with path.open("rb") as file:
            for line in iter(partial(file.readline, _LONGEST_LINE), b""):
                try:
                    record = _take(record, json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue
    except OSError:
        return None
    return record


def _take(record: ProcessRecord | None, data: dict[str, Any]) -> ProcessRecord | None:
    kind = data.pop("kind")
    if kind == "process":
        data.pop("schema", None)
        return ProcessRecord(**data)
    if record is None:
        return None
    if kind == "sample":
        counters = data["counters"]
        counters["gpus"] = tuple(counters.get("gpus", ()))
        read = CounterSample(
            data["step"], data["time"], Counters(**counters), data.get("free", {}), data.get("walked", True)
        )
        record.samples.append(read)
        for number, amount in data.get("amounts", ()):
            record.holders[number].amounts.append((data["step"], data["time"], amount))
    elif kind == "holder":
        data["amounts"] = [tuple(one) for one in data.get("amounts", ())]
        record.holders[data["number"]] = HolderRecord(**data)
    elif kind == "item":
        holder = record.holders[data["number"]]
        if data["type"] != holder.item_type:
            holder.measured.clear()
        holder.measured = [*holder.measured, data["pools"]][-_AVERAGED:]
        holder.item, holder.item_type = _mean(holder.measured), data["type"]
        holder.graphs, holder.tensors = data["graphs"], data["tensors"]
    elif kind == "created":
        holder = record.holders[data["number"]]
        for file, line, pools, graphs, tensors, through in data["sites"]:
            made = CreatedItems(file, line, pools, graphs, tensors, tuple((name, at) for name, at in through))
            (holder.created if file else holder.unknown).append(made)
    elif kind == "existing":
        record.holders[data["number"]].existing += 1
    elif kind == "window":
        tensors = data.get("tensors")
        record.windows.append(
            TraceWindow(
                data["steps"],
                data["seconds"],
                [tuple(one) for one in data["sites"]],
                None if tensors is None else [tuple(one) for one in tensors],
            )
        )
    elif kind == "copied":
        record.copied.append(data)
    elif kind == "source":
        record.source = data["source"]
        for sample in record.samples:  # its steps were counted by another source
            sample.step = None
        for holder in record.holders.values():
            holder.amounts = [(None, clock, amount) for _, clock, amount in holder.amounts]
        record.windows.clear()
    elif kind == "role":
        record.role = data["role"]
    elif kind == "note":
        record.notes.append(data["text"])
    return record


def counters_object(counters: Counters) -> dict[str, Any]:
    """The counters as JSON, without what is unknown."""
    return {name: value for name, value in asdict(counters).items() if value is not None and value != ()}
