"""Versions of torch and Python without the private names that the DataLoader uses: torch's own way is the fallback."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import multiprocessing.queues
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import loader_samples as samples
import pytest

import legroom
from legroom.errors import UsageError
from legroom.loader.dataloader import dataloader, epoch_iterator, queues, torch_internals
from legroom.loader.dataloader.queues import LockFreeEvent, direct_context

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork"),
]


def indices(batches: Any) -> list[int]:
    return [int(value) for value in itertools.chain(*(batch.reshape(-1) for batch in batches))]


@pytest.mark.skipif(not samples.OUT_OF_ORDER, reason="this torch has no in_order")
def test_an_iterator_without_private_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    for read in (torch_internals.workers, torch_internals.batches_ordered, torch_internals.batches_in_flight):
        assert read(object()) is None
        for module in (torch_internals, dataloader, epoch_iterator):
            if hasattr(module, read.__name__):
                monkeypatch.setattr(module, read.__name__, lambda _: None)
    assert torch_internals.dataset_ended(object()) is False
    assert torch_internals.all_batches_queued(object()) is None
    assert torch_internals.all_requests_taken(object()) is False
    torch_internals.drop_iterator(object())
    gc.collect()
    loader = legroom.DataLoader(samples.Rows("int"), 3, num_workers=2, in_order=False)
    iterator = iter(loader)
    first = next(iterator)
    assert iterator._group.pids == {one.pid for one in iterator._workers}
    with pytest.raises(UsageError, match="cannot save a state"):
        loader.state_dict()
    assert sorted(indices([first, *iterator])) == list(range(23))


def without_frames(_: int) -> None:
    """As ``worker_init_fn``: this interpreter shows no frames, and torch has another watchdog."""
    from torch.utils.data._utils import worker

    torch_internals.sys = SimpleNamespace()
    del worker.ManagerWatchdog.is_alive
    worker.ManagerWatchdog.is_alive = property(lambda self: lambda: True)


def test_a_worker_without_private_names_sends_batches_by_torch() -> None:
    loader = legroom.DataLoader(
        samples.Rows("int"), 3, num_workers=2, multiprocessing_context="fork", worker_init_fn=without_frames
    )
    assert indices(loader) == list(range(23))


def test_a_collate_table_that_is_missing_or_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils import collate

    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, lambda *_, **__: None)
    assert not torch_internals.replace_tensor_collate(lambda one: one)
    monkeypatch.delattr(collate, "default_collate_fn_map")
    assert not torch_internals.replace_tensor_collate(lambda one: one)


def test_a_worker_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils import worker

    monkeypatch.delattr(worker, "ManagerWatchdog")
    torch_internals.add_liveness_check(lambda: True)
    assert torch_internals.workers_ending() is None  # not in torch's worker loop
    assert torch_internals.current_fetcher([]) is None


def test_the_identity_of_a_storage_without_its_private_field() -> None:
    class Storage:
        def data_ptr(self) -> int:
            return 17

    class Tensor:
        def untyped_storage(self) -> Storage:
            return Storage()

    assert torch_internals.storage_id(Tensor()) == 17


def test_a_queue_without_private_fields_is_multiprocessings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "_QUEUE_FIELDS", (*queues._QUEUE_FIELDS, "_no_such_field"))
    context: Any = direct_context(multiprocessing.get_context("fork"))
    assert type(context.Queue()) is multiprocessing.queues.Queue
    assert indices(legroom.DataLoader(samples.Rows("int"), 3, num_workers=2)) == list(range(23))


def test_a_semaphore_without_its_private_method_has_multiprocessings_event(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing.synchronize

    context: Any = direct_context(multiprocessing.get_context("fork"))
    assert isinstance(context.Event(), LockFreeEvent)

    class Semaphore:
        _semlock = object()

        def __init__(self, *_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(multiprocessing.synchronize, "Semaphore", Semaphore)
    assert isinstance(context.Event(), multiprocessing.synchronize.Event)


class Patched(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
    """Raises where its class was changed in a worker."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        assert type(self).__iter__ is Patched.__dict__["__iter__"] is _ITER
        info = torch.utils.data.get_worker_info()
        for number in range(self.start, 12):
            self.start = number
            if number % 2 == info.id:
                yield torch.tensor(number)
        self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"] + 1


_ITER = Patched.__dict__["__iter__"]


def see_dataset(_: int) -> None:
    """As ``worker_init_fn``: code in a worker uses the dataset as if it were not wrapped."""
    dataset = torch.utils.data.get_worker_info().dataset
    assert isinstance(dataset, Patched) and isinstance(dataset, torch.utils.data.IterableDataset)
    dataset.seen = dataset.start
    assert "seen" in vars(getattr(dataset, "_dataset", dataset))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_resuming_changes_no_class_of_the_user(method: str) -> None:
    def make() -> Any:
        return legroom.DataLoader(
            Patched(), 1, num_workers=2, multiprocessing_context=method, worker_init_fn=see_dataset
        )

    loader = make()
    iterator = iter(loader)
    before = indices(itertools.islice(iterator, 3))  # so it is the second worker's turn
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    del iterator
    again = make()
    again.load_state_dict(state)
    assert before + indices(again) == list(range(12))
