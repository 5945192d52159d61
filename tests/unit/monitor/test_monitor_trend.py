"""Leaks are seen coming and warm-ups are not taken for them: on randomised courses, and on single shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from monitor_samples import GB, MB, moments, pool, row, sample
from monitor_traces import HEALTHY, SIZE, Course, healthy, leak, workers_starting

from legroom.monitor.history_and_trend import SHORTEST, FreePoint, find_trend, theil_sen
from legroom.records.finding_and_alarm import Alarm
from legroom.records.watch_sample import ProcessRow, Sample

LEAD = 30  # samples, which at one a second are the seconds before death


def _rows(used: float, workers: int = 0) -> tuple[ProcessRow, ...]:
    return (row(4711, rss=used, shmem=used), *(row(5000 + n, 4711, rss=9 * MB) for n in range(workers)))


def _samples(course: Course, name: str = "shm", interval: float = 1.0) -> Iterator[Sample]:
    for place, used in enumerate(course):
        yield sample(place * interval, pool(name, SIZE, used), interval=interval, processes=_rows(used))


def _first_trend(samples: Iterator[Sample]) -> tuple[int, Alarm] | None:
    for place, moment in enumerate(moments(samples)):
        for alarm in moment.begun:
            if alarm.code.endswith("-filling"):
                return place, alarm
    return None


@pytest.mark.parametrize("seed", range(20))
def test_a_steady_leak_is_reported_in_time(seed: int) -> None:
    course = leak(seed)
    name = "shm" if seed % 2 else "ram"
    found = _first_trend(_samples(course, name))
    assert found is not None, "nothing was said before it died"
    place, alarm = found
    assert len(course) - place >= LEAD
    assert alarm.code == f"{name}-filling" and alarm.pool == name and alarm.pids == (4711,)
    # The forecast is of the right size: noise and stairs move it, not by more than double or half.
    left = float(alarm.evidence["full_in_seconds"])
    assert (len(course) - place) / 2.2 <= left <= (len(course) - place) * 2.2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [kind for kind in HEALTHY if kind is not workers_starting])
def test_a_healthy_warm_up_is_not_taken_for_a_leak(kind: type, seed: int) -> None:
    assert _first_trend(_samples(healthy(kind, seed))) is None


@pytest.mark.parametrize("seed", range(8))
def test_workers_that_start_one_after_another_are_not_a_leak(seed: int) -> None:
    course = healthy(workers_starting, seed)

    def samples() -> Iterator[Sample]:
        born: list[tuple[float, float]] = []  # when, how much
        for place, used in enumerate(course):
            held = sum(size for _, size in born)
            if place == 0 or (used - held > 0.008 * SIZE and used > max(course[:place])):
                born.append((float(place), used - held))
            rows = tuple(
                row(100 + n, 1, rss=size, shmem=size, born=when or None) for n, (when, size) in enumerate(born)
            )
            yield sample(place, pool("shm", SIZE, used), processes=rows)

    assert _first_trend(samples()) is None


def test_a_stream_of_new_processes_is_reported_all_the_same() -> None:
    def samples() -> Iterator[Sample]:
        for place in range(600):
            rows = tuple(row(100 + n, rss=64 * MB, born=float(n * 5) or None) for n in range(place // 5 + 1))
            used = 64 * MB * len(rows)
            if used >= 7 * GB:
                return
            yield sample(place, pool("ram", 7 * GB, used), processes=rows)

    assert _first_trend(samples()) is not None


def test_time_is_counted_in_intervals() -> None:
    course = leak(3)
    slow, fast = (_first_trend(_samples(course, interval=interval)) for interval in (1.0, 0.1))
    assert slow is not None and fast is not None and slow[0] == fast[0]
    assert float(fast[1].evidence["full_in_seconds"]) == pytest.approx(
        float(slow[1].evidence["full_in_seconds"]) / 10, abs=0.1
    )


def test_the_message_names_the_time_the_rate_and_the_process() -> None:
    def samples() -> Iterator[Sample]:
        for place in range(1000):
            used = (1200 + place * 41 / 60) * MB
            rows = (row(4711, shmem=used / 5), *(row(4712 + n, 4711, shmem=used / 5) for n in range(4)))
            yield sample(place, pool("shm", 2048 * MB, used), processes=rows)

    found = _first_trend(samples())
    assert found is not None
    alarm = found[1]
    assert alarm.level == "warning"
    assert alarm.message == "shm full in about 6 min at 41 MB/min, from pid 4711 and its 4 workers"
    assert set(alarm.pids) == {4711, 4712, 4713, 4714, 4715}


def test_growth_that_no_watched_process_explains_is_reported_as_such() -> None:
    samples = (sample(n, pool("ram", 8 * GB, (2 + n / 100) * GB), processes=(row(7, rss=50 * MB),)) for n in range(580))
    found = _first_trend(samples)
    assert found is not None and found[1].message.endswith("not from any watched process")


def test_a_trend_that_stops_ends_its_alarm() -> None:
    course = [min(0.85, 0.3 + n / 400) * SIZE for n in range(600)]
    seen = [{a.code for a in m.alarms} for m in moments(_samples(course, "gpu0"))]
    assert any("gpu-filling" in codes for codes in seen)
    assert "gpu-filling" not in seen[-1]


def test_no_trend_from_too_little() -> None:
    points = [FreePoint(float(n), SIZE - int(SIZE * n / SHORTEST), SIZE) for n in range(SHORTEST - 1)]
    assert find_trend(points, 1.0) is None
    assert find_trend([], 1.0) is None
    # The same over enough samples is one.
    longer = [FreePoint(float(n), SIZE - int(SIZE * n / 100), SIZE) for n in range(90)]
    found = find_trend(longer, 1.0)
    assert (
        found is not None
        and found.full_in == pytest.approx(11, abs=1)
        and found.rate == pytest.approx(SIZE / 100, rel=0.01)
    )


def _points(shares: list[float]) -> list[FreePoint]:
    return [FreePoint(float(n), SIZE - int(share * SIZE), SIZE) for n, share in enumerate(shares)]


def _ever(shares: list[float]) -> bool:
    return any(find_trend(_points(shares[:end]), 1.0) is not None for end in range(1, len(shares) + 1))


def test_ground_that_was_held_before_is_no_news() -> None:
    climb = [0.1 + 0.7 * n / 200 for n in range(200)]
    assert _ever([0.1] * 60 + climb)
    assert not _ever([0.8] * 60 + climb)  # it has been there, and gave it back


def test_what_has_come_to_an_end_is_over_soon() -> None:
    assert not _ever([0.64 * n / 400 for n in range(400)] + [0.64] * 120)
    assert _ever([0.64 * n / 400 for n in range(520)])  # the same, going on
    # One that took more was told; an eighth of its time later it is told no more.
    assert find_trend(_points([0.8 * n / 400 for n in range(400)]), 1.0) is not None
    assert find_trend(_points([0.8 * n / 400 for n in range(400)] + [0.8] * 50), 1.0) is None


def test_growth_that_falls_back_all_the_time_is_none() -> None:
    rising = [0.2 + 0.7 * n / 32 for n in range(33)]
    assert find_trend(_points(rising), 1.0) is not None
    assert find_trend(_points([share + (0.1 if n // 2 % 2 else -0.1) for n, share in enumerate(rising)]), 1.0) is None


def test_the_slope_does_not_mind_wild_points() -> None:
    times = [float(n) for n in range(16)]
    levels = [3.0 * n for n in times]
    levels[3], levels[9], levels[12] = 1e9, -1e9, 0.0
    assert theil_sen(times, levels) == pytest.approx(3.0, rel=0.05)
