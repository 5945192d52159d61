"""How much a stream decodes at a time: by its stored columns, within the memory limit."""

from __future__ import annotations

from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

import legroom  # noqa: E402
from legroom.loader.stream.stream_memory import StreamDemand, divide  # noqa: E402

MB = 1 << 20


@pytest.mark.parametrize(("columns", "step"), [(1, 2), (4, 2), (8, 4), (16, 8), (40, 8)])
def test_a_step_grows_with_the_columns(columns: int, step: int) -> None:
    assert divide(1024 * MB, StreamDemand(None, 3, 0, columns)).step == step * MB
    assert divide(40 * MB, StreamDemand(None, 3, 0, columns)).step == 12 * MB // 16  # a small bound decides before that


def test_nested_columns_and_those_of_filters_count(tmp_path: Path) -> None:
    rows = {f"c{index}": [1, 2] for index in range(3)} | {"s": [{"a": 1, "b": 2, "c": [3]}] * 2}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    path = tmp_path / "a.parquet"
    assert legroom.stream(path).memory_division.demand.columns == 6
    assert legroom.stream(path, columns="s").memory_division.demand.columns == 3
    assert legroom.stream(path, columns="c0", filters=[("c1", ">", 0)]).memory_division.demand.columns == 2
