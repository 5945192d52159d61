"""What a sample or a batch is made of, seen as a worker's queue sees it.

Covers: the tensors in any object that can be pickled, their bytes, and the bytes of everything else.
Does not cover: sending it.

A batch crosses from a worker by pickling, so pickling is how it is looked into: whatever class holds the tensors,
exactly those are found that the loader would move through shared memory.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Contents:
    """Bytes in one object."""

    tensors: tuple[int, ...]  # of each tensor itself
    storages: tuple[int, ...]  # of each storage behind them, once: a view travels with all it is a view of
    other: int  # pickled
    unsendable: str | None  # why it cannot be pickled; then the figures are what was found until there


class _Counted(io.RawIOBase):
    """A sink that remembers only how much went in."""

    total = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.total += size
        return size


class _Finder(pickle.Pickler):
    def __init__(self, sink: _Counted, tensor: type) -> None:
        super().__init__(sink, pickle.HIGHEST_PROTOCOL)
        self._tensor = tensor
        self.found: list[Any] = []

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, self._tensor):
            return None
        self.found.append(thing)
        return len(self.found)


def contents(thing: object) -> Contents:
    """The bytes of every tensor in ``thing``, wherever it sits, and of the rest."""
    import torch

    sink = _Counted()
    finder = _Finder(sink, torch.Tensor)
    unsendable = None
    try:
        finder.dump(thing)
    except Exception as problem:  # whatever a class's own __reduce__ may raise
        unsendable = f"{type(problem).__name__}: {problem}"
    storages: dict[int, int] = {}
    for tensor in finder.found:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:  # sparse: counted by what it says of itself
            storages[id(tensor)] = _bytes(tensor)
    return Contents(
        tensors=tuple(_bytes(tensor) for tensor in finder.found),
        storages=tuple(size for size in storages.values() if size),
        other=sink.total,
        unsendable=unsendable,
    )


def _bytes(tensor: Any) -> int:
    import torch

    if tensor.layout is torch.strided:
        return int(tensor.nbytes)
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return int(whole.indices().nbytes + whole.values().nbytes)
    return int(tensor.values().nbytes)
