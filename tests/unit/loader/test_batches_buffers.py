"""Buffers of batches: never reused while a view of them exists, and reused afterwards."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_data import ROWS, flat, labels, plain

from legroom.loader.batches.gather import BufferPool
from legroom.loader.batches.open_data import Data

HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "slice": lambda tensor: tensor[1:3],
    "numpy": lambda tensor: tensor.numpy(),
    "numpy view": lambda tensor: tensor.numpy()[::2].T,
    "reshaped": lambda tensor: tensor.view(-1),
    "detached": lambda tensor: tensor.detach(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
    "other type": lambda tensor: tensor.view(torch.uint8),
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    return plain(tmp_path, monkeypatch)


def content(held: Any) -> bytes:
    if isinstance(held, torch.UntypedStorage):
        return bytes(held)
    return np.asarray(held).tobytes()


@pytest.mark.parametrize("how", HOLDS)
def test_memory_is_not_reused_while_a_view_exists(data: Data, how: str) -> None:
    held = []
    for batch in data.batches(8, shuffle=True):
        part = HOLDS[how](batch["images"])
        held.append((part, content(part)))
    del batch, part
    gc.collect()
    for _ in data.batches(8):
        pass
    assert all(content(part) == before for part, before in held)


def test_a_batch_that_is_kept_and_one_of_its_columns_that_is_not(data: Data) -> None:
    kept = [batch["labels"] for batch in data.batches(8)]
    assert torch.cat(kept).tolist() == list(range(ROWS))


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts references")
def test_memory_is_reused(data: Data) -> None:
    addresses = {batch["images"].data_ptr() for batch in data.batches(2)}
    assert len(addresses) == 2  # the loop's variable holds one while the next is made
    assert all(address % 4096 == 0 for address in addresses)


def test_batches_dropped_at_once_are_returned_to_the_system() -> None:
    buffers = BufferPool(1 << 16)
    kept = [buffers.take(1 << 16) for _ in range(50)]
    assert len({array.ctypes.data for array in kept}) == 50
    kept.clear()
    assert 0 < len(buffers._free) <= 4


def test_buffers_outlive_their_owner() -> None:
    buffers = BufferPool(100)
    array = buffers.take(100)
    array[:] = 7
    del buffers
    gc.collect()
    assert array.tolist() == [7] * 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_its_own(data: Data) -> None:
    loop = iter(data.batches(8))
    first = next(loop)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            first["images"].fill_(-1)
            del first
            rest = labels(loop)
            right = flat(rest) == list(range(8, ROWS))
            os.write(writing, b"right" if right else b"wrong")
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 10) == b"right"
    os.close(reading)
    os.waitpid(child, 0)
    assert (first["images"][:, 0, 0] == torch.arange(8)).all()
    assert flat(labels(loop)) == list(range(8, ROWS))


def test_the_next_loop_reuses_the_buffers_of_the_last(data: Data) -> None:
    def address() -> int:
        (first, *_) = [batch["images"].data_ptr() for batch in data.batches(10)]
        return int(first)

    gc.collect()
    first = address()
    assert len(data.gatherers) == 1 and data.batches(10)._gatherer is data.batches(10)._gatherer
    assert address() in {block.start for block in _free(data)} and first
    for size in (11, 12):
        data.batches(size)
    assert [key[1] for key in data.gatherers] == [11, 12]  # type: ignore[index]
    data.close()
    assert not data.gatherers


def _free(data: Data) -> list[Any]:
    (gatherer,) = data.gatherers.values()
    takers: Any = gatherer._takers
    taker = takers["images"].__closure__
    found = [cell.cell_contents for cell in taker if hasattr(cell.cell_contents, "_buffers")]
    return list(found[0]._buffers._free)
