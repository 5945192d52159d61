"""Datasets as figures, for tests of pure choices."""

from __future__ import annotations

from typing import Any

from legroom.records.workload import Measured, Transport

MB = 1 << 20


def dataset(**changes: Any) -> Measured:
    """16 samples a batch, 1 MB each, 5 ms of CPU each, a cheap way from a worker."""
    figures: dict[str, Any] = {
        "tensors": (16 * MB,), "sample_bytes": MB, "sample_seconds": 0.005, "cpu_seconds": 0.005, "wait_seconds": 0.0,
        "collate_seconds": 0.001, "rows": 100_000, "source": "test", "batch_size": 16, "samples": 32, "spread": 0.01,
        "transport": Transport(0.001, 0.0005, 0.0005, worker_ram=15 * MB),
    }  # fmt: skip
    return Measured(**{**figures, **changes})


def cheap(**changes: Any) -> Measured:
    way = Transport(0.001, 0.002, 0.0005, worker_ram=15 * MB)
    return dataset(sample_seconds=1e-6, cpu_seconds=1e-6, transport=way, **changes)


def waiting(**changes: Any) -> Measured:
    return dataset(sample_seconds=0.005, cpu_seconds=0.0001, wait_seconds=0.0049, **changes)
