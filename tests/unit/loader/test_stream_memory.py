"""How a stream divides its memory limit, how much it decodes at a time, and the sizes it reads from pages."""

from __future__ import annotations

import io
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_data import ids, write

from legroom.errors import BudgetTooSmall
from legroom.formats.file_reads_and_errors import SourceFile
from legroom.formats.parquet_reader import from_footer, from_headers, row_groups
from legroom.loader.stream import parquet_row_groups, stream_memory
from legroom.loader.stream.stream_dataset import stream
from legroom.loader.stream.stream_memory import (
    KEPT,
    LIBRARIES,
    DecodeSteps,
    StreamDemand,
    divide,
    least_memory,
    resident,
)

SIZES = st.one_of(st.none(), st.integers(0, 1 << 32))


@given(
    memory=st.integers(0, 1 << 34), batch=SIZES, copies=st.integers(3, 4), window=SIZES, decode=st.integers(0, 1 << 30)
)  # fmt: skip
def test_the_parts_never_add_up_to_more_than_the_bound(
    memory: int, batch: int | None, copies: int, window: int | None, decode: int
) -> None:
    demand = StreamDemand(batch, copies, window)
    least = least_memory(demand, decode)
    assert divide(least, demand).decode >= decode
    try:
        room = divide(memory, demand)
    except BudgetTooSmall:
        assert memory < least_memory(demand)
        return
    held = room.batch if batch is None else batch
    assert held <= room.batch
    assert room.decode + 2 * room.window + copies * held + 3 * room.step <= room.arrow
    assert LIBRARIES + KEPT * room.arrow <= memory
    assert min(room.decode, room.window) >= 0 < room.step
    if window is not None:
        assert room.window <= window


def test_steps_are_whole_batches_where_several_fit() -> None:
    steps = DecodeSteps(1000, 30, 1 << 30)
    assert steps.rows(1) == 990
    assert steps.rows(25) == 30
    assert steps.rows(50) == 20
    assert steps.rows(5000) == 1
    assert DecodeSteps(1 << 40, 1000, 1 << 30).rows(1) <= 1 << 16


def test_memory_is_returned_only_when_the_process_has_grown() -> None:
    sizes = [100 << 20]
    pool = Mock()
    with (
        patch.object(stream_memory, "resident", lambda: sizes[0]),
        patch.object(pa, "default_memory_pool", lambda: pool),
    ):
        steps = DecodeSteps(1 << 20, 1, 64 << 20)
        for size, calls in ((100, 0), (131, 0), (133, 1), (140, 1), (148, 1), (150, 2)):
            sizes[0] = size << 20
            steps.read(5 << 20)
            assert pool.release_unused.call_count == calls, size


def test_where_the_size_is_not_known_what_was_decoded_stands_for_it() -> None:
    pool = Mock()
    with patch.object(stream_memory, "resident", lambda: None), patch.object(pa, "default_memory_pool", lambda: pool):
        steps = DecodeSteps(1 << 20, 1, 64 << 20)
        for _ in range(20):
            steps.read(1 << 20)
        assert pool.release_unused.call_count == 2


def test_the_size_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_memory, "open", lambda *_, **__: io.BytesIO(b"100 50 1"), raising=False)
    assert resident() == 50 * pytest.importorskip("resource").getpagesize()
    monkeypatch.setattr(stream_memory, "open", Mock(side_effect=FileNotFoundError), raising=False)
    assert resident() is None


def test_page_headers_add_up_to_their_chunks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = 100_000
    table = pa.table({"n": rng.integers(0, 1 << 40, rows), "s": [str(number) * 9 for number in range(rows)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, data_page_size=1 << 14, compression="none", dictionary_pagesize_limit=1 << 15)
    with SourceFile(path) as file:
        ((_, chunks),) = row_groups(file) or []
        for index, chunk in enumerate(chunks):
            facts = pq.read_metadata(path).row_group(0).column(index)
            assert chunk.start == facts.dictionary_page_offset
            assert (chunk.compressed, chunk.uncompressed) == (
                facts.total_compressed_size, facts.total_uncompressed_size,
            )  # fmt: skip
            pages = from_headers(file, chunk)
            assert pages is not None
            # Twice: as it is in the file, and decompressed.
            assert 2 * (1 << 13) < pages.page < 2 * (1 << 17)
            assert 2 * (1 << 14) < pages.dictionary < 1 << 18
            assert pages.needed < from_footer([chunk])


def test_a_footer_that_is_too_long_to_ask_is_done_without(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [100, 50], 20)
    with patch.object(parquet_row_groups, "_MOST_FOOTER", 10):
        data = stream(paths, batch_size=16)
        assert data.memory_division.demand.batch is None
        assert ids(data) == list(range(150))
