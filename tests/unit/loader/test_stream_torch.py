"""Streams under torch's DataLoader: workers share the rows, spawn and fork alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stream_data import ids, write

from legroom.loader.stream.stream_dataset import stream

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402


def _loaded(data: Any, **options: Any) -> list[Any]:
    return list(DataLoader(data, batch_size=None, **options))


@pytest.mark.parametrize(("method", "form"), [("fork", "arrow"), ("fork", "torch"), ("spawn", "torch")])
def test_workers_share_the_rows(tmp_path: Path, method: str, form: Any) -> None:
    paths, _ = write(tmp_path, [50, 47], 20)
    data = stream(paths, columns=["id"], batch_size=10, shuffle_buffer=15, format=form)
    assert isinstance(data, IterableDataset)
    batches = _loaded(data, num_workers=2, multiprocessing_context=method)
    found = ids(batches) if form == "arrow" else torch.cat([batch["id"] for batch in batches]).tolist()
    assert sorted(found) == list(range(97))
    assert len(batches) == len(data) == 10  # as many as without workers


def test_two_ranks_with_two_workers_each(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [50, 47], 20)
    parts = [
        _loaded(stream(paths, batch_size=8, rank=rank, world_size=2, uneven="all"), num_workers=2) for rank in range(2)
    ]
    found = [ids(part) for part in parts]
    assert sorted(found[0] + found[1]) == list(range(97))
    assert [len(part) for part in parts] == [6, 7]  # 48 and 49 rows


def test_persistent_workers_advance_by_themselves(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [60], 10)
    data = stream(paths, columns=["id"], batch_size=10, shuffle_buffer=20)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    epochs = [ids(loader), ids(loader)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(60))
    assert epochs[0] != epochs[1]
    fresh = []
    for epoch in range(2):
        data.set_epoch(epoch)
        fresh.append(ids(DataLoader(data, batch_size=None, num_workers=2)))
    assert fresh == epochs


def test_made_before_torch_it_becomes_a_dataset_when_asked(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [12], 5)
    script = """
import sys, legroom
data = legroom.stream(sys.argv[1], columns=["id"], batch_size=5)
assert "torch" not in sys.modules
from torch.utils.data import DataLoader, IterableDataset
assert not isinstance(data, IterableDataset)
assert isinstance(data.dataset(), IterableDataset)
rows = [x for b in DataLoader(data.dataset(), batch_size=None, num_workers=2) for x in b.column("id").to_pylist()]
assert sorted(rows) == list(range(12)), rows
"""
    done = subprocess.run([sys.executable, "-c", script, str(paths[0])], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
