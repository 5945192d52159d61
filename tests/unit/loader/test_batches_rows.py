"""``data.batches(rows=…)``: a training and a validation part of one file, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_data import ROWS, flat, labels, plain

from legroom.errors import UsageError
from legroom.loader.batches import batch_iterator
from legroom.loader.batches.cuda_gather_base import _is_order
from legroom.loader.batches.legroom_open import Data, open
from legroom.loader.rank_sampler import choose_rows, permutation

torch = pytest.importorskip("torch")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    return plain(tmp_path, monkeypatch)


def mask(*rows: int) -> Any:
    found = np.zeros(ROWS, bool)
    found[list(rows)] = True
    return found


CHOICES: list[tuple[Any, list[int]]] = [
    (slice(10), list(range(10))),
    (slice(-10, None), list(range(87, 97))),
    (slice(90, 1000), list(range(90, 97))),  # as in Python: it stops at the end
    (slice(None, None, -1), list(range(96, -1, -1))),
    (range(5, 50, 5), list(range(5, 50, 5))),
    (range(9, -1, -3), [9, 6, 3, 0]),
    ([3, 1, 4, 1, 5], [3, 1, 4, 1, 5]),  # in this order; a row may come twice
    ([42], [42]),
    (np.array([2, 7, 1], np.uint8), [2, 7, 1]),
    (torch.tensor([2, 7, 1]), [2, 7, 1]),
    (torch.utils.data.Subset(range(ROWS), [8, 3]), [8, 3]),
    ((row for row in (6, 2, 9)), [6, 2, 9]),
    (mask(4, 8, 80), [4, 8, 80]),
    (mask(4, 8, 80).tolist(), [4, 8, 80]),
    (slice(None), list(range(ROWS))),
]


@pytest.mark.parametrize(("rows", "wanted"), CHOICES, ids=[str(number) for number in range(len(CHOICES))])
def test_only_these_rows_in_this_order(data: Data, rows: Any, wanted: list[int]) -> None:
    batches = data.batches(4, rows=rows)
    assert len(batches) == -(-len(wanted) // 4)
    assert flat(labels(batches)) == flat(labels(batches)) == wanted
    assert flat(labels(pickle.loads(pickle.dumps(batches)))) == wanted
    shuffled = data.batches(4, rows=wanted, shuffle=True, seed=3, epoch=2)
    assert flat(labels(shuffled)) == np.array(wanted)[permutation(len(wanted), 3, 2)].tolist()


def test_a_split_covers_every_row_once(data: Data) -> None:
    train = data.batches(8, rows=slice(None, -20), shuffle=True)
    held_out = data.batches(8, rows=slice(-20, None))
    for _ in range(2):
        assert sorted(flat(labels(train))) == list(range(77)) and flat(labels(held_out)) == list(range(77, 97))
    parts = torch.utils.data.random_split(range(ROWS), [0.8, 0.2])
    found = [flat(labels(data.batches(8, rows=part.indices))) for part in parts]
    assert sorted(flat(found)) == list(range(ROWS)) and len(found[1]) == 19


def test_the_next_order_of_a_thread_has_these_rows_too(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_iterator, "_LEAST_PREPARED", 10)
    batches = data.batches(10, rows=range(40, 80), shuffle=True)
    found = [flat(labels(batches)) for _ in range(3)]
    assert found == [(permutation(40, 0, epoch) + 40).tolist() for epoch in range(3)]


@pytest.mark.parametrize("rows", [range(40, 80), [7, 3, 3, 60]])
def test_the_order_of_chosen_rows_can_be_kept_in_gpu_memory(rows: Any) -> None:
    chosen = choose_rows(rows, ROWS)
    assert chosen is not None
    orders = [batch_iterator.EpochOrders(chosen.count, 0, chosen).take(1)]
    orders += [chosen.numbers] if chosen.numbers is not None else []  # without shuffling
    for order in orders:
        assert order.dtype == np.int64 and _is_order(order) and _is_order(order[1:3]) and order[1:3].base is order


@pytest.mark.parametrize("uneven", ["pad", "drop", "all"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rows", [range(10, 41), [*range(30, 10, -1), *range(50, 61)]])
def test_ranks_divide_these_rows(data: Data, rows: Any, shuffle: bool, uneven: Any) -> None:
    ranks = [
        flat(labels(data.batches(4, rows=rows, shuffle=shuffle, epoch=1, uneven=uneven, rank=rank, world_size=3)))
        for rank in range(3)
    ]
    seen = flat(ranks)
    assert set(seen) <= set(rows)
    if uneven == "all":
        assert sorted(seen) == sorted(rows)
    else:
        assert len({len(rank) for rank in ranks}) == 1
        assert len(set(seen)) == len(rows) if uneven == "pad" else len(seen) == len(set(seen)) == 30


def test_a_state_resumes_with_the_same_rows_alone(data: Data) -> None:
    rows = [*range(0, 97, 2), 1]
    batches = data.batches(7, rows=rows, shuffle=True, seed=1)
    taken = labels(batches, 3)
    state = json.loads(json.dumps(batches.state_dict()))
    again = data.batches(7, rows=np.array(rows), shuffle=True, seed=1)
    again.load_state_dict(state)
    assert flat(taken + labels(again)) == np.array(rows)[permutation(50, 1, 0)].tolist()
    for other in (None, range(50), rows[::-1]):
        with pytest.raises(UsageError, match="other rows of the data"):
            data.batches(7, rows=other, shuffle=True, seed=1).load_state_dict(state)
    with pytest.raises(UsageError, match="other rows of the data"):
        again.load_state_dict(data.batches(7, shuffle=True, seed=1).state_dict())


def test_all_rows_are_the_same_as_no_choice_and_a_range_as_its_numbers(data: Data) -> None:
    whole = data.batches(7).state_dict()
    assert "chosen" not in whole
    for rows in (slice(None), range(ROWS), np.arange(ROWS), np.ones(ROWS, bool)):
        assert data.batches(7, rows=rows).state_dict() == whole
    states = [data.batches(7, rows=rows).state_dict() for rows in (slice(8, 20, 3), range(8, 20, 3), [8, 11, 14, 17])]
    assert states[0] == states[1] == states[2] and states[0]["chosen"] == "8:20:3"


def test_numbers_are_copied(data: Data) -> None:
    rows = np.array([5, 1, 9])
    batches = data.batches(2, rows=rows)
    rows[:] = 0
    assert flat(labels(batches)) == [5, 1, 9]


def test_rows_of_token_files_are_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    with open(tmp_path / "tokens.bin", dtype="uint16") as tokens:
        (batch,) = tokens.batches(4, sequence_length=10, rows=slice(-2, None))
        assert batch["tokens"].tolist() == [list(range(80, 91)), list(range(90, 101))]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (range(90, 98), "rows has 97, which is not a row of the data"),
        (range(-5, 5), "rows has -5"),
        ([0, 1, -1], "rows has -1"),
        ([0, 97], "rows has 97"),
        (np.array([2**64 - 1], np.uint64), "18446744073709551615"),
        ([], "rows chooses no row"),
        (range(0), "rows chooses no row"),
        (slice(200, 300), "rows chooses no row"),
        (mask(), "rows chooses no row"),
        (np.ones(5, bool), r"^rows is a mask of 5 values for 97 rows \["),
        (np.ones((97, 2), bool), "^rows is a mask of 97×2 values for 97 rows"),
        (1000, r"rows must be a range, a slice, row numbers or a mask \(got int\)"),
        ([0.5, 1.0], "float64"),
        ([True, 2], "row numbers and True or False are mixed"),
        ((1, np.bool_(False)), "row numbers and True or False are mixed"),
        ([[0], [1]], r"shape \[2, 1\]"),
        ("train", "got str"),
        (slice("a", None), "got slice"),
        (slice(None, None, 0), "got slice"),
    ],
)
def test_what_chooses_no_rows_is_refused(data: Data, rows: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        data.batches(4, rows=rows)
    assert caught.value.why and caught.value.fix


def test_no_rows_of_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(plain(tmp_path, monkeypatch, rows=0).batches(3, rows=slice(None))) == []
