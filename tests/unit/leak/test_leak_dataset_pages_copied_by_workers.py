"""What a forked worker copies of a dataset, seen by the worker itself: lists, tuples and dicts, and not arrays."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from legroom.leak.dataset_pages_copied_by_workers import CopiedDataset, _addresses
from legroom.leak.find_leaking_lines import diagnose_process
from legroom.leak.record_files import ProcessRecord

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads this machine's /proc")


@pytest.mark.parametrize(
    "value",
    [
        [[number] for number in range(300)],
        tuple([number] for number in range(300)),
        {number: [number] for number in range(300)},
        {str(number): [number] for number in range(300)},
    ],
)
def test_addresses_are_found_without_reading_the_items(value: Any) -> None:
    items = list(value.values()) if isinstance(value, dict) else list(value)
    found = _addresses(value)
    if isinstance(value, dict) and sys.version_info[:2] > (3, 13):
        assert found is None  # another layout: no name rather than a wrong one
    else:
        assert found == list(map(id, items))


def _in_a_worker(dataset: Any, read: Callable[[], object]) -> dict[str, Any]:
    """What a forked process reports that follows its copies while ``read`` runs."""
    end, start = os.pipe()
    gc.disable()  # before the fork: a collection copies every container, also one that nobody reads
    pid = os.fork()
    if pid == 0:
        try:
            copied = CopiedDataset()
            copied.look_at(dataset)
            kept = read()
            with os.fdopen(start, "w") as out:
                json.dump(copied.read(1.0), out)
            del kept
        finally:
            os._exit(0)
    gc.enable()
    os.close(start)
    with os.fdopen(end) as told:
        found: dict[str, Any] = json.load(told)
    os.waitpid(pid, 0)
    return found


def _named(copied: dict[str, Any]) -> list[str | None]:
    record = ProcessRecord(1, 0, "train.py", role="worker", source="worker")
    record.copied.extend([{**copied, "copied": 0, "step": 1, "time": 0.0}, {**copied, "step": 9}])
    return [site.holder for site in diagnose_process(record).sites]


def test_a_dict_that_a_worker_reads_is_named_and_one_it_does_not_read_is_not() -> None:
    dataset = SimpleNamespace(
        labels={number: [number, str(number)] for number in range(150_000)},
        names=[f"images/{number:08d}.jpg" for number in range(5000)],
    )
    found = _in_a_worker(dataset, lambda: [one[0] for one in dataset.labels.values()] and None)
    assert found["attribute"] == "dataset.labels" and found["share"] > 0.9 and found["items"] == 150_000
    assert _named(found) == ["dataset.labels"]
    unread = _in_a_worker(dataset, lambda: None)
    assert unread["share"] is None or unread["share"] < 0.1
    assert _named({**unread, "copied": 40 << 20}) == []  # as after a full garbage collection of other objects


def test_a_list_of_arrays_is_as_large_as_its_objects() -> None:
    dataset = SimpleNamespace(images=[np.ones(4000) for _ in range(2000)])
    found = _in_a_worker(dataset, lambda: [float(image.sum()) for image in dataset.images] and None)
    assert found["attribute"] == "dataset.images" and found["size"] < 1 << 20  # its data take 64 MB
    assert _named(found) == [] and _named({**found, "copied": 40 << 20}) == []


def test_memory_that_was_written_to_is_not_a_read_dataset() -> None:
    copied = {"time": 1.0, "copied": 60 << 20, "shared": 1 << 30, "attribute": "dataset.names", "items": 10**6,
              "size": 90 << 20, "share": 0.6, "only_read": 50 << 20}  # fmt: skip
    assert _named(copied) == ["dataset.names"]
    assert _named({**copied, "only_read": 6 << 20}) == []
    assert _named({**copied, "only_read": None}) == ["dataset.names"]  # not readable: its objects lie on these pages
