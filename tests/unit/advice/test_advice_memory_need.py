"""The need: its arithmetic on known figures, and what must hold for every workload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import GB, MB

from legroom.advice.memory_need import Each, batch_pages, flights, least, need, pinned_size, semaphores, spare
from legroom.records.workload import Need, PlannedLoader, Workload

POOLS = ("shm", "ram", "pinned", "fds", "disk", "gpu")
sizes = st.integers(0, 64 * MB)
loaders = st.builds(
    PlannedLoader,
    tensors=st.lists(sizes, min_size=1, max_size=4).map(tuple),
    num_workers=st.integers(0, 8),
    prefetch_factor=st.integers(1, 8),
    batches=st.none() | st.integers(1, 40),
    pin_memory=st.booleans(),
    loader_kind=st.sampled_from(["torch", "legroom"]),
)
workloads = st.builds(
    Workload,
    processes=st.integers(1, 64),
    loaders=st.lists(loaders, max_size=3).map(tuple),
    process_shm=sizes,
    process_shm_source=st.just("measured"),
    process_ram=sizes,
    process_ram_source=st.just("measured"),
    host_model=sizes,
    host_model_source=st.just("measured"),
    worker_ram=sizes,
    entries_shm=sizes,
    nccl=sizes,
    mapped=sizes,
    gpu=sizes,
    per_gpu=st.integers(1, 8),
    checkpoint=sizes,
)


def _at_most(small: Need, large: Need) -> None:
    for pool in POOLS:
        assert getattr(small, pool) <= getattr(large, pool), pool


def test_one_large_tensor() -> None:
    loader = PlannedLoader(tensors=(24 * MB,), num_workers=4, prefetch_factor=2)
    assert (
        flights(replace(loader, persistent_workers=True)) == 10
        and flights(loader) == 11
        and semaphores(loader.num_workers) == 40
    )
    found = need(Workload(loaders=(loader,)))
    assert found.shm == 11 * (24 * MB + 4096) + 40 * 4096
    assert found.ram == found.shm + 4 * 24 * MB  # tmpfs is memory, and each worker has the samples of its next batch


def test_fifty_small_tensors_take_a_page_each() -> None:
    assert batch_pages([20] * 50) == 50 * 4096
    assert batch_pages([4032]) == 4096 and batch_pages([4033]) == 8192 and batch_pages([0]) == 4096


def test_without_workers_there_is_no_shared_memory() -> None:
    found = need(Workload(loaders=(PlannedLoader(tensors=(24 * MB,), num_workers=0),)))
    assert found.shm == 0 and found.ram == (2 + 1) * 24 * MB  # two batches, and the samples of the next


def test_our_loader_takes_memory_and_not_shm() -> None:
    loader = PlannedLoader(tensors=(24 * MB,), num_workers=4, prefetch_factor=2, loader_kind="legroom")
    found = need(Workload(loaders=(loader,)))
    assert found.shm == semaphores(loader.num_workers) * 4096
    slot, samples = 24 * MB + 4096, 4 * 24 * MB
    kept = spare(least(Each(0, 24 * MB, slot), 4))
    assert found.ram == found.shm + (2 * 4 + 4 * 2) * slot + samples + kept
    squeezed = need(Workload(loaders=(replace(loader, slots=5),)))
    assert squeezed.ram == found.shm + 5 * slot + samples + kept
    more = need(Workload(loaders=(replace(loader, making=50 * MB, slots=5),), worker_ram=10 * MB))
    assert more.ram >= squeezed.ram + 4 * (26 + 10) * MB


def test_a_short_epoch_bounds_what_is_in_flight() -> None:
    assert (
        flights(PlannedLoader(tensors=(1,), num_workers=4, prefetch_factor=4, batches=3)) == 4
    )  # and the last one of the epoch before
    assert flights(PlannedLoader(tensors=(1,), num_workers=1, prefetch_factor=1, batches=100)) == 4
    assert (
        flights(PlannedLoader(tensors=(1,), num_workers=1, prefetch_factor=1, batches=100, persistent_workers=True))
        == 3
    )
    assert flights(PlannedLoader(tensors=(1,), num_workers=0, batches=100)) == 0


@pytest.mark.parametrize(("asked", "taken"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (300 * MB, 512 * MB)])
def test_pinned_memory_is_rounded_up_to_a_power_of_two(asked: int, taken: int) -> None:
    assert pinned_size(asked) == taken


def test_pinned_batches_are_memory_too() -> None:
    plain = PlannedLoader(tensors=(6 * MB,), num_workers=2, prefetch_factor=2)
    found = need(Workload(loaders=(replace(plain, pin_memory=True),)))
    assert found.pinned == 6 * 8 * MB
    assert found.ram == need(Workload(loaders=(plain,))).ram + found.pinned
    alone = need(Workload(loaders=(PlannedLoader(tensors=(6 * MB,), num_workers=0, pin_memory=True),)))
    assert alone.pinned == 2 * 8 * MB


def test_the_seeds_figures() -> None:
    found = need(Workload(processes=48, process_shm=23 * MB // 4))
    assert found.shm == 276 * MB


def test_datasets_are_counted_once_and_page_tables_for_each() -> None:
    one = Workload(processes=8, entries_shm=GB, mapped=GB, loaders=(PlannedLoader(tensors=(MB,), num_workers=3),))
    tables = [term for term in need(one).terms if "page tables" in term.what]
    assert [term.bytes for term in tables] == [2 * MB * 8 * 4]  # 0.2 % in each process and worker
    assert need(one).shm - need(replace(one, entries_shm=0)).shm == GB


def test_torch_takes_a_descriptor_for_each_tensor_in_flight() -> None:
    tensors = PlannedLoader(tensors=(20,) * 50, num_workers=2, prefetch_factor=2)
    ours = replace(tensors, loader_kind="legroom")
    assert need(Workload(loaders=(tensors,))).fds - need(Workload(loaders=(ours,))).fds == 6 * 50


def test_a_gpu_that_was_not_given_is_unknown() -> None:
    assert need(Workload()).gpu is None
    assert need(Workload(gpu=3 * GB, per_gpu=6)).gpu == 18 * GB


@given(workloads)
def test_terms_add_up_and_nothing_is_negative(workload: Workload) -> None:
    found = need(workload)
    for pool in POOLS:
        terms = [term for term in found.terms if term.pool == pool]
        assert sum(term.bytes for term in terms) == getattr(found, pool) >= 0
    assert all(term.bytes > 0 and term.what and term.source for term in found.terms)
    assert found.ram >= found.shm + found.pinned


@given(workloads, st.integers(2, 8))
def test_it_scales_with_ranks(workload: Workload, ranks: int) -> None:
    once = Workload(**{**_fields(workload), "entries_shm": 0})
    more = need(replace(once, processes=once.processes * ranks))
    for pool in ("shm", "ram", "pinned", "disk"):
        assert getattr(more, pool) == ranks * getattr(need(once), pool)
    assert more.fds == need(once).fds  # of one process


@given(workloads, st.data())
def test_it_grows_with_every_argument_of_a_workload(workload: Workload, data: st.DataObject) -> None:
    names = [name for name, value in _fields(workload).items() if isinstance(value, int)]
    name = data.draw(st.sampled_from(names))
    larger = replace(workload, **{name: getattr(workload, name) + data.draw(st.integers(1, MB))})
    _at_most(need(workload), need(larger))


@given(workloads, loaders, st.data())
def test_it_grows_with_every_argument_of_a_loader(
    workload: Workload, loader: PlannedLoader, data: st.DataObject
) -> None:
    larger = data.draw(
        st.sampled_from(
            [
                replace(loader, num_workers=loader.num_workers + 1),
                replace(loader, prefetch_factor=loader.prefetch_factor + 1),
                replace(loader, batches=None if loader.batches is None else loader.batches + 1),
                replace(loader, tensors=(*loader.tensors, 1)),
                replace(loader, tensors=(loader.tensors[0] + 1, *loader.tensors[1:])),
                replace(loader, pin_memory=True),
            ]
        )
    )
    _at_most(need(replace(workload, loaders=(loader,))), need(replace(workload, loaders=(larger,))))
    _at_most(need(replace(workload, loaders=(loader,))), need(replace(workload, loaders=(loader, larger))))


def _fields(workload: Workload) -> dict[str, Any]:
    return {name: getattr(workload, name) for name in workload.__dataclass_fields__}
