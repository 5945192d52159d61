"""The choice: keeps up at the least memory, keeps the effective batch, is monotone, and says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import GB, MB, healthy, with_pool
from measured_data import cheap, dataset, waiting

from legroom.advice.choose_settings import Step, TuneRequest, batch_seconds, choose, within_dataset
from legroom.advice.explain_settings import changes, milliseconds, settle
from legroom.errors import UsageError
from legroom.records.machine import Cpu, Gpu, Gpus, Machine
from legroom.records.workload import Measured, Transport


def cores(count: int, machine: Machine | None = None) -> Machine:
    return replace(machine or healthy(), cpu=Cpu(count, None, "test"))


def room(ram: int, shm: int, count: int = 8) -> Machine:
    machine = with_pool(cores(count), "ram", 64 * GB, 64 * GB - ram, ram)
    return with_pool(machine, "shm", 32 * GB, 32 * GB - shm, shm)


def card(machine: Machine) -> Machine:
    gpu = Gpu(0, "card", "uuid", 80 * GB, 0, 80 * GB, ())
    return replace(machine, gpus=Gpus((gpu,), 1, "550", "NVML"))


def test_cheap_samples_need_no_worker() -> None:
    settings = settle(cheap(), cores(16), TuneRequest(16))
    assert settings.num_workers == 0 and settings.prefetch_factor is None and not settings.persistent_workers
    assert "without workers" in settings.why["num_workers"]
    assert "num_workers" in settings.loader() and "prefetch_factor" not in settings.loader()


def test_computing_takes_cores_and_no_more() -> None:
    assert settle(dataset(), cores(4), TuneRequest(16)).num_workers == 4
    assert settle(dataset(), cores(2), TuneRequest(16)).num_workers == 2
    assert "no core" in settle(dataset(), cores(2), TuneRequest(16)).why["num_workers"]


def test_waiting_goes_beyond_the_cores() -> None:
    settings = settle(waiting(), cores(2), TuneRequest(16))
    assert settings.num_workers == 8
    assert "waiting" in settings.why["num_workers"]


def test_a_step_needs_only_what_keeps_up() -> None:
    """16 samples of 5 ms are 80 ms of work: two workers keep up with a 45 ms step, one with a 90 ms step."""
    two = settle(dataset(), cores(16), TuneRequest(16, step=Step(0.045)))
    assert two.num_workers == 2
    assert (
        two.why["num_workers"]
        == "workers 2: 5.00 ms per sample, 45.0 ms per training step of 16 samples; another worker would be idle"
    )
    assert settle(dataset(), cores(16), TuneRequest(16, step=Step(0.090))).num_workers == 1
    assert settle(dataset(), cores(16), TuneRequest(16, step=Step(5.0))).num_workers == 0


def test_steps_on_the_cpu_leave_less_for_workers() -> None:
    without = batch_seconds(dataset(), 16, 2, 1, 2, Step(0.02))
    assert batch_seconds(dataset(), 16, 2, 1, 2, Step(0.02, cpu_seconds=0.08)) > without


def test_uneven_samples_are_prefetched() -> None:
    even, uneven = dataset(spread=0.0), dataset(spread=4.0)
    assert settle(even, cores(8), TuneRequest(16)).prefetch_factor == 1
    assert (settle(uneven, cores(8), TuneRequest(16)).prefetch_factor or 0) > 1


def test_idle_workers_are_prefetched() -> None:
    slow = dataset(transport=Transport(0.001, 0.0005, 0.05, worker_ram=15 * MB))
    assert settle(slow, cores(4), TuneRequest(16)).prefetch_factor == 2


def test_batches_that_cannot_be_sent_stay_here() -> None:
    settings = settle(dataset(unsendable="TypeError: cannot pickle"), cores(8), TuneRequest(16))
    assert settings.num_workers == 0 and "cannot pickle" in settings.why["num_workers"]


def test_an_iterable_dataset_gets_one_worker() -> None:
    settings = settle(dataset(iterable=True), cores(8), TuneRequest(16))
    assert settings.num_workers == 1 and "does not shard itself" in settings.why["num_workers"]


def test_no_more_workers_than_batches() -> None:
    assert settle(dataset(rows=40), cores(8), TuneRequest(16)).num_workers == 3


def test_a_small_shm_lowers_prefetch_before_workers() -> None:
    uneven = dataset(spread=4.0)
    ideal = settle(uneven, room(50 * GB, 30 * GB), TuneRequest(16, loader_kind="torch"))
    assert ideal.prefetch_factor == 4
    tight = settle(uneven, room(50 * GB, 250 * MB), TuneRequest(16, loader_kind="torch"))
    assert tight.num_workers == ideal.num_workers and tight.prefetch_factor == 1
    tighter = settle(uneven, room(50 * GB, 64 * MB), TuneRequest(16, loader_kind="torch"))
    assert tighter.num_workers == 1 and "shm" in tighter.why["num_workers"]
    ours = settle(uneven, room(50 * GB, 64 * MB), TuneRequest(16, loader_kind="legroom"))
    assert ours.num_workers == ideal.num_workers, "the arena is RAM, not /dev/shm"


def test_the_batch_shrinks_last_and_accumulation_makes_up() -> None:
    settings = settle(dataset(), room(24 * MB, 32 * GB), TuneRequest(16, effective_batch=64, ranks=2))
    assert (settings.batch_size, settings.accumulation, settings.num_workers) == (
        2,
        16,
        0,
    )  # two ranks, each with two batches and the samples of a third, in four fifths of 24 MB
    assert settings.effective_batch == 64
    assert "instead of 16" in settings.why["batch_size"]
    assert "ranks = 64" in settings.why["accumulation"]


def test_the_plan_reports_that_nothing_fits() -> None:
    settings = settle(dataset(), room(MB, MB), TuneRequest(16))
    assert settings.batch_size == 1 and settings.num_workers == 0
    assert settings.plan is not None and settings.plan.verdict == "too-big" and settings.plan.problems


def test_pinning_goes_before_workers_do() -> None:
    many = settle(dataset(), card(room(50 * GB, 30 * GB)), TuneRequest(16))
    assert many.pin_memory and many.allocator == "expandable_segments:True"
    need = many.plan.need.ram if many.plan else 0
    tight = settle(dataset(), card(room(int((need - 1) / 0.8), 30 * GB)), TuneRequest(16))
    assert not tight.pin_memory and tight.num_workers == many.num_workers
    assert "PYTORCH_CUDA_ALLOC_CONF" in tight.environment()
    assert not settle(dataset(), cores(8), TuneRequest(16)).pin_memory


def test_low_memory_when_the_data_do_not_fit() -> None:
    assert not settle(dataset(), room(300 * GB, GB), TuneRequest(16)).low_memory
    scarce = settle(dataset(), room(20 * GB, GB), TuneRequest(16))
    assert scarce.low_memory and "97.7 GB" in scarce.why["low_memory"]
    unknown = settle(dataset(rows=None), room(GB, GB), TuneRequest(16))
    assert not unknown.low_memory and "no length" in unknown.why["low_memory"]


def test_ranks_share_cores_and_memory() -> None:
    assert settle(dataset(), cores(8), TuneRequest(16, ranks=4)).num_workers == 2
    assert settle(dataset(), cores(8), TuneRequest(16, ranks=4, local_ranks=2)).num_workers == 4
    one, four = (settle(dataset(rows=None), cores(8), TuneRequest(16, ranks=r)).plan for r in (1, 4))
    assert one and four and four.need.ram >= one.need.ram


def test_presets() -> None:
    def at(name: str | None) -> int:
        return settle(dataset(), cores(8), TuneRequest(16, preset=name)).num_workers

    assert at("development") == 1 and at("production") == at("cluster") == at(None) == 8
    assert not settle(dataset(), cores(8), TuneRequest(16, preset="development")).persistent_workers
    room_for = [
        settle(dataset(), room(300 * MB, 32 * GB), TuneRequest(16, preset=name, loader_kind="torch")).num_workers
        for name in ("production", "cluster")
    ]
    assert room_for[0] < room_for[1]
    with pytest.raises(UsageError, match=r"preset must be one of .* .got 'fast'"):
        at("fast")


@pytest.mark.parametrize(
    "asked",
    [TuneRequest(0), TuneRequest(-1), TuneRequest(16, ranks=0), TuneRequest(16, effective_batch=0), TuneRequest(True)],
)
def test_sizes_without_meaning(asked: TuneRequest) -> None:
    with pytest.raises(UsageError, match="must be an integer >= 1"):
        choose(dataset(), healthy(), asked)


def test_an_effective_batch_that_cannot_be_kept_names_its_neighbours() -> None:
    with pytest.raises(UsageError) as caught:
        choose(dataset(), healthy(), TuneRequest(16, effective_batch=100, ranks=2))
    assert "96 or 128" in str(caught.value) and "a batch size of 10 or 25" in str(caught.value)


def test_levers_name_bytes_or_are_unknown() -> None:
    settings = settle(dataset(spread=4.0), card(cores(8)), TuneRequest(16))
    found = {lever.name: lever.saves for lever in settings.levers}
    assert found.keys() >= {
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "batch_size",
        "sequence_length",
        "image_size",
    }
    assert found["mixed_precision"] is None
    without = settings.override(num_workers=0)
    assert without.num_workers == 0
    assert all(saves is None or saves > 0 for saves in found.values())


def test_tensors_of_one_size_all_become_smaller() -> None:
    """input_ids, attention_mask and labels: a quarter less length saves a quarter of their bytes, not two of three."""
    one = settle(dataset(tensors=(3 * MB,)), cores(8), TuneRequest(16))
    three = settle(dataset(tensors=(MB, MB, MB)), cores(8), TuneRequest(16))
    saved = [{lever.name: lever.saves or 0 for lever in found.levers}["sequence_length"] for found in (one, three)]
    assert abs(saved[0] - saved[1]) < MB // 10


def test_changes_name_what_moved_and_why() -> None:
    before = settle(dataset(), room(50 * GB, 30 * GB), TuneRequest(16))
    after = settle(dataset(), room(200 * MB, 30 * GB), TuneRequest(16))
    told = changes(before, after)
    assert set(told) >= {"num_workers"} and "→" in told["num_workers"] and "ram" in told["num_workers"]
    assert not changes(before, before)


measurements = st.builds(
    dataset,
    tensors=st.lists(st.integers(1, 64 * MB), min_size=1, max_size=4).map(tuple),
    sample_seconds=st.floats(1e-6, 0.5),
    cpu_seconds=st.floats(1e-6, 0.5),
    wait_seconds=st.floats(0, 0.5),
    spread=st.floats(0, 5),
    rows=st.none() | st.integers(1, 10**7),
    iterable=st.booleans(),
)
asks = st.builds(
    lambda batch, steps, ranks, step, kind: TuneRequest(
        batch, ranks=ranks, effective_batch=batch * steps * ranks, step=Step(step), loader_kind=kind
    ),
    st.integers(1, 64), st.integers(1, 8), st.integers(1, 4), st.sampled_from([0.0, 0.01, 0.2]),
    st.sampled_from(["torch", "legroom"]),
)  # fmt: skip


def in_flight(measured: Measured, machine: Machine, asked: TuneRequest) -> int:
    settings = settle(measured, machine, asked)
    assert settings.effective_batch == asked.effective_batch
    assert settings.num_workers >= 0 and settings.batch_size >= 1 and settings.accumulation >= 1
    assert settings.plan is not None and min(settings.plan.need.shm, settings.plan.need.ram) >= 0
    return settings.num_workers * (settings.prefetch_factor or 0) * settings.batch_size * measured.batch_bytes


@given(measurements, asks, st.integers(0, 8 * GB), st.integers(0, 8 * GB), st.integers(0, GB), st.integers(0, GB))
def test_less_memory_never_means_more_in_flight(
    measured: Measured, asked: TuneRequest, ram: int, shm: int, less_ram: int, less_shm: int
) -> None:
    more = in_flight(measured, room(ram, shm), asked)
    less = in_flight(measured, room(max(0, ram - less_ram), max(0, shm - less_shm)), asked)
    assert less <= more


@given(measurements, asks, st.integers(0, 8 * GB), st.integers(0, 8 * GB))
def test_what_is_chosen_fits_or_is_the_least(measured: Measured, asked: TuneRequest, ram: int, shm: int) -> None:
    settings = settle(measured, room(ram, shm), asked)
    assert settings.plan is not None
    if settings.plan.verdict == "too-big":
        assert settings.num_workers == 0 and settings.batch_size == 1
    else:
        assert settings.plan.need.ram <= ram * 0.8 and settings.plan.need.shm <= shm * 0.8


@given(measurements, st.integers(1, 64), st.integers(1, 16), st.floats(1, 64))
def test_the_pace_is_positive_and_workers_never_slow_it(
    measured: Measured, batch: int, workers: int, cores: float
) -> None:
    even = replace(measured, spread=0.0)
    one = batch_seconds(even, batch, workers, 2, cores, Step())
    assert 0 < batch_seconds(even, batch, workers + 1, 2, cores, Step()) <= one
    assert batch_seconds(even, batch, workers, 4, cores, Step()) <= one


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.000412, "0.412 ms"), (0.0112, "11.2 ms"), (0.9994, "999 ms"), (0.9999, "1 s"), (1.02, "1.02 s"),
     (28.449, "28.4 s"), (284.49, "4 min 44 s")],
)  # fmt: skip
def test_a_time_is_printed_in_the_unit_one_would_say(seconds: float, shown: str) -> None:
    assert milliseconds(seconds) == shown


@pytest.mark.parametrize(
    ("asked", "rows", "ranks", "effective", "batch"),
    [
        (100_000, 256, 1, None, 256),
        (100_000, 256, 3, None, 85),
        (256, 256, 1, None, 256),
        (8, None, 1, None, 8),
        (4, 2, 4, None, 1),
        (512, 256, 1, 1024, 512),  # an effective batch that was asked for is kept
    ],
)
def test_a_batch_has_no_more_samples_than_a_rank(
    asked: int, rows: int | None, ranks: int, effective: int | None, batch: int
) -> None:
    request = TuneRequest(batch_size=asked, ranks=ranks, effective_batch=effective)
    found = within_dataset(request, replace(cheap(), rows=rows))
    assert found.batch_size == batch
    assert found.larger_than_dataset == (asked if batch != asked else None)


def test_a_batch_that_the_dataset_limits_says_so() -> None:
    measured = replace(cheap(), rows=256)
    settings = settle(measured, cores(4), within_dataset(TuneRequest(100_000), measured))
    assert settings.batch_size == 256 and settings.accumulation == 1
    assert "instead of 100000: the dataset has no more samples" in settings.why["batch_size"]
    assert "unchanged" not in settings.why["accumulation"]


@pytest.mark.parametrize(("count", "text"), [(1, ": 1 core per rank"), (4, ": 4 cores per rank")])
def test_one_core_is_no_plural(count: int, text: str) -> None:
    assert text in settle(cheap(), cores(count), TuneRequest(8)).why["threads"]
