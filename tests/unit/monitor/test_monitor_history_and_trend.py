"""History stays small however long the watch is, and still knows how it began."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

from monitor_samples import GB, MB, pool, row, sample

from legroom.monitor.history_and_trend import History, ThinningBuffer, growing_processes
from legroom.monitor.watch_loop import MomentStream
from legroom.records.watch_sample import ProcessRow, Sample


def test_tiers_are_bounded_ordered_and_reach_back() -> None:
    tiers: ThinningBuffer[int] = ThinningBuffer(each=16, tiers=4, thin=4)
    for number in range(5000):
        tiers.add(number)
        assert len(tiers) <= 64
    kept = list(tiers)
    assert kept == sorted(kept) and kept[-16:] == list(range(4984, 5000))
    assert kept[0] < 5000 - 16 * (1 + 4 + 16)
    assert tiers.last(3) == [4997, 4998, 4999] and tiers.last(99) == kept[-16:]


def _hour(processes: int, seconds: int) -> Iterator[Sample]:
    """Every process's figures change at every sample: nothing can be shared."""
    for second in range(seconds):
        rows = tuple(row(pid, rss=second * 4096 + pid, shmem=second * 4096, pss_at=second) for pid in range(processes))
        yield sample(float(second), pool("shm", 8 * GB, second % 977 * MB), processes=rows)


def test_memory_is_flat_over_an_hour_of_samples() -> None:
    stream = MomentStream(_hour(40, 3600))
    sizes = []
    tracemalloc.start()
    try:
        for place, _ in enumerate(stream):
            if place in (1300, 3599):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # Twice and a half as many samples later; older tiers still fill, with sixteen processes each.
    assert sizes[1] < sizes[0] * 1.25
    assert sizes[1] < 40 * MB


def test_old_samples_keep_those_that_hold_most() -> None:
    history = History()
    for second in range(600):
        rows = tuple(row(pid, rss=pid * MB) for pid in range(1, 51))
        history.add(sample(float(second), processes=rows))
    oldest = next(iter(history.samples))
    assert len(oldest.processes) == 16 and {one.pid for one in oldest.processes} == set(range(35, 51))
    assert history.latest is not None and len(history.latest.processes) == 50
    found = history.at(300.5)
    assert found is not None and 290 <= found.clock <= 300.5


def test_peaks_survive_thinning() -> None:
    history = History()
    for second in range(3000):
        history.add(sample(float(second), pool("shm", GB, GB // 2 if second == 7 else MB)))
    assert history.peaks["shm"].used == GB // 2
    assert history.peaks["shm"].when == history.samples.last()[0].when - 2999 + 7


def test_a_clock_that_goes_back_begins_a_new_history() -> None:
    history = History()
    for clock in (0.0, 1.0, 2.0, 0.0, 1.0):
        history.add(sample(clock))
    assert [one.clock for one in history.samples] == [0.0, 1.0]


def test_a_size_that_was_unknown_before_is_not_growth() -> None:
    before = sample(0, processes=(row(7, rss=GB), ProcessRow(8, 1, "python other.py", None), row(9, rss=MB)))
    after = sample(9, processes=(row(7, rss=2 * GB), row(8, rss=30 * GB), row(9, rss=MB, gpu=GB), row(10, rss=3 * GB)))
    assert growing_processes(before, after, "ram").pids == (10, 7)
    assert growing_processes(before, after, "gpu0").pids == (9,)
