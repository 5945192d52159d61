"""Ranks and workers share rows without overlap or loss, and a stream that was stopped goes on exactly.

Covers: random files, worlds, workers, batch sizes, filters, shuffling, and stops at random batches.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stream_data import as_worker, ids, small_steps, write

from legroom.errors import UsageError
from legroom.loader.stream.shard_and_shuffle import ShardPiece, pieces, rank_range, worker_range
from legroom.loader.stream.stream_dataset import stream

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
KINDS = st.sampled_from(["parquet", "arrow", "stream"])
FILTERS = st.sampled_from([None, [("part", "!=", 1)], [("id", ">", 15)]])


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    group=st.integers(1, 25),
    kind=KINDS,
    step=st.integers(1, 12),
    batch_size=st.integers(1, 20),
    world=st.integers(1, 5),
    workers=st.integers(1, 3),
    buffer=st.sampled_from([0, 1, 9, 1000]),
    filters=FILTERS,
    uneven=st.sampled_from(["pad", "drop", "all"]),
    drop_last=st.booleans(),
)
@QUICK
def test_shards_neither_overlap_nor_lose(
    counts: list[int], group: int, kind: str, step: int, batch_size: int, world: int, workers: int,
    buffer: int, filters: Any, uneven: Any, drop_last: bool,
) -> None:  # fmt: skip
    with TemporaryDirectory(prefix="legroom-test-") as folder, small_steps(step):
        paths, whole = write(Path(folder), counts, group, kind)
        wanted = Counter(ids(whole.to_batches() if filters is None else [_filtered(whole, filters)]))
        every: Counter[int] = Counter()
        lengths = []
        for rank in range(world):
            data = stream(
                paths, columns=["id"], batch_size=batch_size, shuffle_buffer=buffer, filters=filters, rank=rank,
                world_size=world, uneven=uneven, drop_last=drop_last, seed=1,
            )  # fmt: skip
            count = 0
            for worker in range(workers):
                with as_worker(worker, workers):
                    batches = list(iter(data))
                data.set_epoch(0)
                count += len(batches)
                every.update(ids(batches))
            lengths.append(count)
            counted = filters is None or (world > 1 and uneven != "all")
            if counted:
                assert count == len(data)
        if uneven != "all" and (filters is None or world > 1):
            assert len(set(lengths)) == 1
        if drop_last:
            assert not every - Counter(dict.fromkeys(wanted, world * 2))
        elif uneven == "all" or world == 1:
            assert every == wanted
        elif uneven == "pad":
            assert set(every) == set(wanted)
            assert sum(every.values()) == -(-len(wanted) // world) * world
        else:
            assert not every - wanted
            assert sum(every.values()) == len(wanted) // world * world


def _filtered(whole: Any, filters: Any) -> Any:
    import pyarrow.parquet as pq

    return whole.filter(pq.filters_to_expression(filters))


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    group=st.integers(1, 25),
    kind=KINDS,
    step=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    buffer=st.sampled_from([0, 1, 9, 30]),
    filters=FILTERS,
    world=st.integers(1, 3),
    uneven=st.sampled_from(["pad", "all"]),
    stops=st.lists(st.integers(0, 6), max_size=5),
)
@QUICK
def test_stopped_and_resumed_is_as_if_never_stopped(
    counts: list[int], group: int, kind: str, step: int, batch_size: int, buffer: int, filters: Any, world: int,
    uneven: Any, stops: list[int],
) -> None:  # fmt: skip
    with TemporaryDirectory(prefix="legroom-test-") as folder, small_steps(step):
        paths, _ = write(Path(folder), counts, group, kind)

        def make() -> Any:
            return stream(
                paths, columns=["id"], batch_size=batch_size, shuffle_buffer=buffer, filters=filters, seed=7,
                rank=world - 1, world_size=world, uneven=uneven,
            )  # fmt: skip

        through = make()
        wanted = [[batch.column("id").to_pylist() for batch in through] for _ in range(2)]
        found: list[Any] = []
        state = make().state_dict()
        for stop in [*stops, 10**6]:
            data = make()
            data.load_state_dict(json.loads(json.dumps(state)))
            loop = iter(data)
            for _ in range(stop):
                batch = next(loop, None)
                if batch is None:
                    break
                found.append(batch.column("id").to_pylist())
                state = data.state_dict()
            assert data.state_dict() == state or batch is None
        assert found == wanted[0]
        # The epoch is over: the next loop is the next epoch's.
        data.load_state_dict(data.state_dict())
        assert [batch.column("id").to_pylist() for batch in data] == wanted[1]


def test_rows_of_a_line_are_shared_as_documented() -> None:
    assert [rank_range(10, rank, 4, "all") for rank in range(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [rank_range(10, rank, 4, "pad") for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert [rank_range(10, rank, 4, "drop") for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [worker_range(5, 30, w, 2, 10, False) for w in range(2)] == [(5, 15), (15, 30)]
    assert [worker_range(5, 30, w, 2, 10, True) for w in range(2)] == [(5, 15), (15, 25)]
    assert pieces([4, 3, 5], [2, 0, 1], 3, 13) == [
        ShardPiece(2, 3, 5), ShardPiece(0, 0, 4), ShardPiece(1, 0, 3), ShardPiece(2, 0, 1),
    ]  # fmt: skip
    assert pieces([0, 0], [0, 1], 0, 5) == []


def test_resuming_reads_no_group_that_is_done(tmp_path: Path) -> None:
    """Proved by removing what was read: only the rows that are left are still there."""
    paths, _ = write(tmp_path, [30, 30, 30], 10)
    data = stream(paths, columns=["id"], batch_size=10)
    loop = iter(data)
    for _ in range(6):
        next(loop)
    state = data.state_dict()
    fresh = stream(paths, columns=["id"], batch_size=10)
    for path in paths[:2]:
        path.unlink()
    fresh.load_state_dict(state)
    assert ids(fresh) == list(range(60, 90))


def test_a_state_can_be_taken_before_within_and_after_an_epoch(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [20], 5)
    data = stream(paths, batch_size=5, shuffle_buffer=10)
    first = data.state_dict()
    assert first["epoch"] == 0 and first["position"] is None
    epochs = [ids(data), ids(data)]
    assert data.state_dict()["epoch"] == 2
    data.load_state_dict(first)
    assert data.state_dict() == first
    assert [ids(data), ids(data)] == epochs
    # Leaving a loop early ends that epoch, unless its state is loaded.
    loop = iter(data)
    next(loop)
    within = data.state_dict()
    assert (within["epoch"], within["batches"]) == (2, 1)
    third = ids(stream(paths, batch_size=5, shuffle_buffer=10, epoch=2))
    data.load_state_dict(within)
    data.set_epoch(2)  # the usual `set_epoch` at the top of an epoch does not undo it
    assert ids(data) == third[5:]
    data.load_state_dict(within)
    data.set_epoch(1)
    assert ids(data) == epochs[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 6}, "batch_size was 5 and is 6"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"columns": ["id"]}, "the data"),
        ({"filters": [("id", ">", 3)]}, "filters was None"),
        ({"rank": 0, "world_size": 2}, "world_size was 1 and is 2"),
        ({"uneven": "all"}, "uneven was 'pad'"),
        ({"memory": "300MB"}, "memory was"),
        ({"shuffle_buffer": 0, "shuffle_groups": True}, "shuffle_buffer was 10 and is 0"),
    ],
)
def test_a_state_of_another_stream_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    paths, _ = write(tmp_path, [20], 5)
    given: dict[str, Any] = {"batch_size": 5, "shuffle_buffer": 10}
    state = stream(paths, **given).state_dict()
    with pytest.raises(UsageError, match="saved with another stream") as caught:
        stream(paths, **{**given, **change}).load_state_dict(state)
    assert named in caught.value.why


def test_a_state_of_other_data_or_of_another_format_is_refused(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [20, 30], 5)
    state = stream(paths).state_dict()
    with pytest.raises(UsageError, match="saved with another stream"):
        stream(paths[:1]).load_state_dict(state)
    for wrong in ({}, {"legroom_stream": 2}, 5):
        with pytest.raises(UsageError, match="not a state_dict of a stream"):
            stream(paths).load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="incomplete"):
        stream(paths).load_state_dict({**state, "position": {"nonsense": 1}})
    with as_worker(1, 2):
        there = stream(paths)
        next(iter(there))
        state = there.state_dict()
    here = stream(paths)
    here.load_state_dict(state)
    with pytest.raises(UsageError, match="another DataLoader worker"):
        iter(here)


def test_memory_and_format_may_change_where_rows_are_not_shuffled(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [40], 40)
    with small_steps(3):
        data = stream(paths, batch_size=5)
        next(loop := iter(data))
        state = data.state_dict()
        del loop
    other = stream(paths, batch_size=5, memory="100MB", format="python")
    other.load_state_dict(state)
    assert [row["id"] for batch in other for row in batch] == list(range(5, 40))


def test_a_stream_can_be_pickled_with_where_it_stands(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [20], 5)
    data = stream(paths, batch_size=5, filters=[("id", ">", 3)])
    next(iter(data))
    state = data.state_dict()
    again = pickle.loads(pickle.dumps(data))
    again.load_state_dict(state)
    assert ids(again) == list(range(9, 20))
