"""Loops of a DataLoader that Ctrl-C or an error strikes: its state resumes after the last batch that was returned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

import legroom
from interrupted_loops import Interrupted, InterruptedAt
from legroom.errors import UsageError

torch = pytest.importorskip("torch")
from torch.utils.data import Dataset, IterableDataset  # noqa: E402

from legroom.loader.dataloader import epoch_iterator, receive, resume, torch_internals  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings(
        "ignore:.*multi-threaded, use of fork", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]
ROWS, SIZE = 14, 2
FILES = [module.__file__ for module in (epoch_iterator, receive, resume, torch_internals)]


class Rows(Dataset[Any]):
    failing: tuple[int, ...] = ()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        if i in self.failing:
            raise ValueError(f"row {i}")
        return torch.tensor(i)


class Counted(IterableDataset[Any]):
    """Iterates in this file, so that an interruption may strike in the middle of a batch."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < ROWS:
            self.at += 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def made(data: Any, workers: int, **options: Any) -> Any:
    if not isinstance(data, IterableDataset):
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    return legroom.DataLoader(data, SIZE, num_workers=workers, **options)


def rest(loader: Any, state: dict[str, Any]) -> list[list[int]]:
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="raises from a trace function")
@pytest.mark.parametrize(
    ("kind", "workers", "step"), [(Rows, 0, 1), (Rows, 2, 17), (Counted, 0, 1), (Counted, 1, 7)]
)  # fmt: skip
def test_a_state_after_an_interruption_at_any_line_continues_there(kind: Any, workers: int, step: int) -> None:
    files = [*FILES, torch.utils.data.dataloader.__file__, torch.utils.data._utils.fetch.__file__]
    files += [__file__] if workers == 0 else []
    expected = [batch.tolist() for batch in made(kind(), workers)]
    interruptions = wrong = silent = 0
    for number in range(1, 10_000, step):
        loader, found = made(kind(), workers), list[list[int]]()
        loop, ends = iter(loader), InterruptedAt(number, *files)
        try:
            while True:
                with ends:
                    batch = next(loop)
                found.append(batch.tolist())
        except StopIteration:
            break
        except Interrupted:
            interruptions += 1
        state = loader.state_dict()
        again = [] if len(found) * SIZE == ROWS and not state["begun"] else rest(made(kind(), 0), state)
        wrong += found + again != expected
        try:
            found += [batch.tolist() for batch in loop]
        except UsageError:
            assert found == expected[: len(found)]
        else:
            silent += found != expected
    assert (wrong, silent) == (0, 0), interruptions
    assert interruptions > 10


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_failed_comes_again_and_no_other(workers: int) -> None:
    expected = [batch.tolist() for batch in made(Rows(), 0)]
    data = Rows()
    data.failing = (expected[2][1], expected[4][0])
    loader = made(data, workers)
    loop, found, failed = iter(loader), list[list[int]](), 0
    for number in range(7):
        try:
            found.append(next(loop).tolist())
        except ValueError:
            failed += 1
        state = loader.state_dict()
        assert sorted(found + rest(made(Rows(), 0), state)) == sorted(expected), number
        assert state["yielded"] == len(found)
    assert failed == 2
    resumed = made(Rows(), 0)
    resumed.load_state_dict(state)
    assert next(iter(resumed)).tolist() == expected[2]
    assert rest(made(Rows(), 0), resumed.state_dict()) == [expected[4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loop_that_does_not_start_leaves_the_state(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = made(Rows(), workers)
    loop = iter(loader)
    expected = [batch.tolist() for batch in made(Rows(), 0)]
    assert next(loop).tolist() == expected[0]
    state = loader.state_dict()
    del loop
    again = made(Rows(), workers)
    again.load_state_dict(state)

    def interrupted(*_: Any, **__: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(torch.utils.data.dataloader._BaseDataLoaderIter, "__init__", interrupted)
        with pytest.raises(Interrupted):
            iter(again)
    assert again.state_dict()["yielded"] == 1
    assert [batch.tolist() for batch in again] == expected[1:]
