"""Buffers of batches: never reused while a view of them exists, and reused afterwards."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_data import ROWS, flat, labels, plain

from legroom.loader.batches import batch_iterator, cpu_gather
from legroom.loader.batches.cpu_gather import BufferPool
from legroom.loader.batches.legroom_open import Data

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


@pytest.fixture
def _no_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that waits for a core looks like one that works: the next batch would take a third buffer."""
    monkeypatch.setattr(batch_iterator, "prefetch_pays", lambda *_: False)


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
@pytest.mark.usefixtures("_no_prefetch")
def test_memory_is_reused(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gather, "_MOST_GROUPED", 0)  # test_batches_groups.py has the groups of small batches
    addresses = {batch["images"].data_ptr() for batch in data.batches(2)}
    assert len(addresses) == 2  # the loop's variable holds one while the next is made
    assert all(address % 4096 == 0 for address in addresses)


DROPPED_AT_ONCE = """
import mmap
from legroom.loader.batches.cpu_gather import BufferPool

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE

size = 8 << 20
buffers = BufferPool(size)
before = resident()
kept = [buffers.take(size) for _ in range(20)]
for array in kept:
    array[:] = 1
print(len({array.ctypes.data for array in kept}), (resident() - before) / size)
del array
kept.clear()
print((resident() - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_batches_dropped_at_once_are_returned_to_the_system() -> None:
    # In a process of its own: threads that other tests left change the memory of this one.
    done = subprocess.run([sys.executable, "-c", DROPPED_AT_ONCE], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    different, held, left = map(float, done.stdout.split())
    assert different == 20 and held > 19 and left < 5


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


@pytest.mark.usefixtures("_no_prefetch")
def test_the_next_loop_reuses_the_buffers_of_the_last(data: Data) -> None:
    def addresses() -> set[int]:
        return {batch["images"].data_ptr() for batch in data.batches(10)}

    gc.collect()
    first = addresses()
    (gatherer,) = data.gatherers.values()
    assert addresses() <= first and list(data.gatherers.values()) == [gatherer]
    for size in (11, 12):
        data.batches(size)
    assert [key[1] for key in data.gatherers] == [11, 12]  # type: ignore[index]
    data.close()
    assert not data.gatherers
