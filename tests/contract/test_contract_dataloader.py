"""legroom.DataLoader against torch's, batch by batch: whatever torch's loader is documented to do, ours does."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loader_programs as programs
import loader_samples as samples
import numpy as np
import pytest

import legroom
from legroom.errors import BadArgument

torch = pytest.importorskip("torch")
data = torch.utils.data
HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork")


def same(ours: Any, theirs: Any) -> None:
    """Equal in every part, types included."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape and ours.layout is theirs.layout
        assert ours.requires_grad == theirs.requires_grad and ours.device == theirs.device
        if theirs.is_quantized:
            return  # torch's own loader loses the scale on the way, and nothing can be asked of the rest
        if theirs.layout is torch.strided and theirs.device.type == "cpu":
            dense = torch.empty_like(theirs.detach()).stride() == theirs.stride()
            assert ours.stride() == theirs.stride() or not dense
            a, b = ours.detach().resolve_conj(), theirs.detach().resolve_conj()
            assert a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
        elif theirs.layout is not torch.strided:
            assert torch.equal(ours.to_dense(), theirs.to_dense())
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.flags.writeable
        assert ours.flags.c_contiguous == theirs.flags.c_contiguous
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            same(*pair)
    elif dataclasses.is_dataclass(theirs):
        same(vars(ours), vars(theirs))
    else:
        assert ours == theirs


def both(make: Callable[[Any], Any], passes: int = 1) -> None:
    """The same loader by either class gives the same batches, epoch after epoch."""
    given = []
    for kind in (legroom.DataLoader, data.DataLoader):
        torch.manual_seed(7)
        loader = make(kind)
        given.append([list(loader) for _ in range(passes)])
    same(*given)


@pytest.mark.parametrize("kind", [*samples.KINDS])
def test_every_kind_of_sample(kind: str) -> None:
    both(lambda loader: loader(samples.Rows(kind), batch_size=5, num_workers=2))


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 4, "shuffle": True},
        {"batch_size": None},
        {"batch_size": None, "shuffle": True},
        {"sampler": [3, 1, 4, 1, 5], "batch_size": 2},
        {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
        {"batch_size": 30},
    ],
    ids=str,
)
def test_order(workers: int, options: dict[str, Any]) -> None:
    both(lambda kind: kind(samples.ManyRows("tuple"), num_workers=workers, **options), passes=2)


def test_a_generator_decides_order_and_augmentation() -> None:
    def make(kind: Any) -> Any:
        own = torch.Generator().manual_seed(3)
        return kind(samples.Rows("random"), 4, shuffle=True, num_workers=2, generator=own)

    both(make, passes=2)


def test_the_global_seed_decides_augmentation() -> None:
    both(lambda kind: kind(samples.Rows("random"), 4, num_workers=2), passes=2)


def test_samplers_of_torchs() -> None:
    def weighted(kind: Any) -> Any:
        sampler = data.WeightedRandomSampler([1.0] * 23, 10, generator=torch.Generator().manual_seed(1))
        return kind(samples.Rows(), 3, sampler=sampler, num_workers=2)

    def distributed(kind: Any) -> Any:
        sampler = data.DistributedSampler(samples.Rows(), num_replicas=3, rank=1, seed=4)
        return kind(samples.Rows(), 3, sampler=sampler, num_workers=2)

    both(weighted, passes=2)
    both(distributed)


@pytest.mark.parametrize("fn", [samples.custom, samples.as_numpy, samples.by_default_and_more, samples.odd_tensors])
@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:Sparse invariant checks")
def test_custom_collate(fn: Any) -> None:
    both(lambda kind: kind(samples.Rows("tensor"), 4, num_workers=2, collate_fn=fn))


def test_one_tensor_twice_is_one_tensor() -> None:
    batch = next(iter(legroom.DataLoader(samples.Rows(), 4, num_workers=1, collate_fn=samples.twice)))
    assert batch["one"] is batch["same"] is batch["list"][0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_iterable_datasets(workers: int, batch_size: int | None) -> None:
    both(lambda kind: kind(samples.Stream(), batch_size, num_workers=workers), passes=2)
    both(lambda kind: kind(samples.Stream(3), batch_size, num_workers=2, prefetch_factor=4))


@pytest.mark.parametrize("dataset", [samples.Rows("tuple"), samples.Stream()], ids=["map", "iterable"])
def test_persistent_workers(dataset: Any) -> None:
    both(lambda kind: kind(dataset, 4, num_workers=2, persistent_workers=True), passes=3)


def test_persistent_workers_after_a_break() -> None:
    def passes(kind: Any) -> Iterator[Any]:
        loader = kind(samples.Rows("tuple"), 2, num_workers=2, persistent_workers=True, prefetch_factor=4)
        yield list(itertools.islice(loader, 2))
        yield list(loader)

    same(list(passes(legroom.DataLoader)), list(passes(data.DataLoader)))


def test_worker_init_fn_reaches_the_datasets_copy() -> None:
    both(lambda kind: kind(samples.Stream(), 2, num_workers=2, worker_init_fn=samples.mark_worker))


@pytest.mark.skipif(not samples.OUT_OF_ORDER, reason="this torch has no in_order")
def test_out_of_order_when_asked() -> None:
    context = torch.multiprocessing.get_context("fork")
    dataset = samples.LastFirst(context)
    loader = legroom.DataLoader(dataset, 1, num_workers=2, in_order=False, multiprocessing_context=context)
    got = samples.overtaking(dataset, loader)
    assert sorted(got) == list(range(12)) and got[0] != 0


@pytest.mark.parametrize("workers", [0, 2])
def test_exceptions_keep_their_type_and_name_the_line(workers: int) -> None:
    said = []
    for kind in (legroom.DataLoader, data.DataLoader):
        with pytest.raises(KeyError) as caught:
            list(kind(samples.Raises(), 2, num_workers=workers))
        said.append(str(caught.value).splitlines()[0])
    assert said[0] == said[1] and ("worker process" in said[0] or not workers)


def test_an_exception_does_not_end_the_pass() -> None:
    def survivors(kind: Any) -> list[Any]:
        iterator, got = iter(kind(samples.Raises("int"), 2, num_workers=2)), []
        while True:
            try:
                got.append(next(iterator))
            except StopIteration:
                return got
            except KeyError:
                got.append("failed")

    same(survivors(legroom.DataLoader), survivors(data.DataLoader))


def test_a_worker_that_does_not_start_is_an_error() -> None:
    for kind in (legroom.DataLoader, data.DataLoader):
        with pytest.raises(ValueError, match="will not start"):
            list(kind(samples.Rows(), 2, num_workers=1, worker_init_fn=samples.fails_to_start))


def test_timeout() -> None:
    for kind in (legroom.DataLoader, data.DataLoader):
        with pytest.raises(RuntimeError, match="timed out after"):
            list(kind(samples.Sleeps(), 1, num_workers=1, timeout=1))


@pytest.mark.usefixtures("ordinary_exit")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_dead_worker_is_a_runtime_error_as_torchs_is(number: int) -> None:
    # In a process of its own: torch raises it from a signal handler, wherever the program happens to be. (Its own loader
    # may instead raise ConnectionResetError, when a batch it has been told of waits in the dead worker.)
    script = f"""
import legroom, loader_samples as samples
if __name__ == "__main__":
    try:
        list(legroom.DataLoader(samples.Dies({int(number)}), 2, num_workers=2))
    except RuntimeError as problem:
        print("DataLoader worker" in str(problem))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"batch_size": 0},
        {"batch_size": 2, "batch_sampler": [[1]]},
        {"shuffle": True, "sampler": [1]},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"batch_size": None, "drop_last": True},
        {"num_workers": 1, "multiprocessing_context": "nonsense"},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_alike(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as torchs:
        data.DataLoader(samples.Rows(), **options)
    with pytest.raises(ValueError) as ours:
        legroom.DataLoader(samples.Rows(), **options)
    if isinstance(ours.value, BadArgument):  # which ones: test_dataloader.py
        assert ours.value.why and ours.value.fix
    else:
        assert str(ours.value) == str(torchs.value)


def test_attributes_cannot_be_changed_afterwards_and_lengths_agree() -> None:
    loader = legroom.DataLoader(samples.Rows(), 4, num_workers=2)
    assert isinstance(loader, data.DataLoader)
    assert len(loader) == len(iter(loader)) == 6
    with pytest.raises(ValueError, match="should not be set"):
        loader.batch_size = 3
    assert len(legroom.DataLoader(samples.Sized(), 4)) == 6


def test_several_live_iterators_on_one_loader() -> None:
    def zipped(kind: Any) -> list[Any]:
        torch.manual_seed(1)
        loader = kind(samples.Rows("tuple"), 4, shuffle=True, num_workers=2)
        return list(zip(loader, loader, strict=True))

    same(zipped(legroom.DataLoader), zipped(data.DataLoader))


def test_from_another_thread() -> None:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(legroom.DataLoader(samples.Rows(), 4, num_workers=2)))
    thread.start()
    thread.join()
    same(got, list(data.DataLoader(samples.Rows(), 4)))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(method: str) -> None:
    both(lambda kind: kind(samples.Rows("nested and random"), 4, num_workers=1, multiprocessing_context=method))


@pytest.mark.parametrize("name", [*programs.PROGRAMS])
def test_a_program_sees_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # After an exception torch's own loader waits so long for each worker.
    monkeypatch.setattr(data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    run = programs.PROGRAMS[name]
    same(programs.outcome(run, legroom.DataLoader), programs.outcome(run, data.DataLoader))


def test_any_loader_by_the_collate_function_alone() -> None:
    stock = data.DataLoader(samples.Rows("nested"), 4, num_workers=2, collate_fn=legroom.collate())
    same(list(stock), list(data.DataLoader(samples.Rows("nested"), 4)))
    plain = data.DataLoader(samples.Rows("nested"), 4, num_workers=0, collate_fn=legroom.collate())
    same(list(plain), list(data.DataLoader(samples.Rows("nested"), 4)))


def test_a_loader_can_be_pickled_and_iterated_elsewhere() -> None:
    import pickle

    loader = pickle.loads(pickle.dumps(legroom.DataLoader(samples.Rows(), 4, num_workers=1)))
    same(list(loader), list(data.DataLoader(samples.Rows(), 4)))
