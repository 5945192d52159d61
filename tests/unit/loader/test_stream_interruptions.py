"""Loops over streams that Ctrl-C or an error strikes: every batch comes, once, in this loop or in one that resumes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from stream_data import small_steps, write

import legroom
from interrupted_loops import Interrupted, InterruptedAt
from legroom.loader.stream import parquet_row_groups, shard_and_shuffle, stream_dataset, stream_files

FILES = [module.__file__ for module in (stream_dataset, shard_and_shuffle, parquet_row_groups, stream_files)]


def made(paths: list[Path], **options: Any) -> Any:
    return legroom.stream(paths, columns=["id"], batch_size=4, epoch=0, **options)


def rows(batch: Any) -> list[int]:
    return list(batch["id"].tolist() if isinstance(batch, dict) else batch.column("id").to_pylist())


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="raises from a trace function")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of a file that was being opened
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("options", [{}, {"shuffle_buffer": 7, "format": "numpy"}], ids=["in order", "shuffled"])
@pytest.mark.parametrize(("files", "step"), [(FILES[:1], 1), (FILES, 23)], ids=["the loop", "its readers"])
def test_an_interruption_at_any_line_loses_no_batch(
    tmp_path: Path, kind: str, options: dict[str, Any], files: list[Any], step: int
) -> None:
    paths, _ = write(tmp_path, [11, 6], 5, kind)
    with small_steps(3):
        expected = [rows(batch) for batch in made(paths, **options)]
        interruptions = wrong_loops = wrong_states = 0
        for number in range(1, 10_000, step):
            stream = made(paths, **options)
            loop, found, ends, seen = iter(stream), list[list[int]](), InterruptedAt(number, *files), interruptions
            while True:
                try:
                    with ends:
                        batch = next(loop)
                except Interrupted:
                    interruptions += 1
                    again = made(paths, **options)
                    state = stream.state_dict()
                    if state["position"] is not None or found != expected:  # else it is the next epoch's
                        again.load_state_dict(state)
                        wrong_states += found + [rows(one) for one in again] != expected
                    continue
                except StopIteration:
                    break
                found.append(rows(batch))
                assert stream.state_dict()["batches"] == len(found)
            wrong_loops += found != expected
            if interruptions == seen:
                break
    assert (wrong_loops, wrong_states) == (0, 0), interruptions
    assert interruptions > 40


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where __del__ is interrupted
def test_a_loop_that_an_interruption_strikes_while_it_begins_is_not_begun(tmp_path: Path) -> None:
    paths, _ = write(tmp_path, [20], 5)
    stream = legroom.stream(paths, columns=["id"], batch_size=4)
    next(iter(stream))
    state = stream.state_dict()
    for number in range(1, 1000):
        again = legroom.stream(paths, columns=["id"], batch_size=4)
        again.load_state_dict(state)
        try:
            with InterruptedAt(number, stream_dataset.__file__):
                iter(again)
        except Interrupted:
            assert again.state_dict() == state
            assert [rows(batch)[0] for batch in again] == [4, 8, 12, 16]
        else:
            break
    assert number > 5


def test_a_stopiteration_is_not_taken_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, _ = write(tmp_path, [20], 5)
    stream = made(paths, format="python")
    loop = iter(stream)
    assert next(loop)[0]["id"] == 0

    def raises(*_: object) -> Any:
        raise StopIteration

    with monkeypatch.context() as patched:
        patched.setattr(stream_dataset, "object_bytes", raises)  # as a method of an extension type may
        with pytest.raises(RuntimeError, match="StopIteration"):
            next(loop)
    assert stream.state_dict()["batches"] == 1
    assert [batch[0]["id"] for batch in loop] == [4, 8, 12, 16]
