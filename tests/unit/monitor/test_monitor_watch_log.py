"""Logs: written so that a kill costs one line at most, read back as they were, garbage refused in words."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitor_samples import GB, MB, moments, pool, row, sample

from legroom.errors import DamagedSource, UnreadableSource, UsageError
from legroom.monitor.watch_log import InvalidRecord, WatchLog, _Repeats, json_line, parse_sample, read_samples
from legroom.records.machine import Pressure
from legroom.records.watch_sample import Annotations, EntryRow, GpuCopyRow, GroupRow, Mark, Moment, Sample, TrainerRow


def _full(clock: float = 5.0) -> Sample:
    return sample(
        clock,
        pool("shm", 64 * MB, 60 * MB),
        processes=(
            row(7, 1, rss=GB, shmem=3, command='a "quoted" <script>\u2028', pss=5, pss_at=1.5, gpu=None, born=2.0),
        ),
        pressure=(Pressure("cgroup", 1.5, 2.5, 0.0, 0.0, "memory.pressure"),),
        said=Annotations({"model": 5, "data": 6}, "epoch 3", (Mark(1.0, "epoch 3"),), 12, 0.5),
        entries=(EntryRow("abc", "/data/x.h5", "shm", GB, True),),
        groups=(
            GroupRow("aug", 90, 2, 3, 8, MB, None, (TrainerRow(7, "train.py", "slow", 1, 4, 9, 30, 2),)),
            GroupRow("one", None, 0, 0, 0, 0, None, (TrainerRow(8, "train.py", "alone", None, None, None, 0, 0),)),
        ),
        gpu_copies=(GpuCopyRow("3f2a", "ab", "/data/x.h5: images", GB, (7, 8)),),
        swap_in=None,
        notes=("a note",),
        cost=0.001,
        gpu_at=3.0,
    )


def test_a_sample_comes_back_as_it_was() -> None:
    before = _full()
    data = json.loads(json_line(next(moments([before]))))
    assert data["schema"] == "legroom.watch/1" and data["alarms"][0]["code"] == "shm-nearly-full"
    assert parse_sample(data) == before


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["schema", "pools", "when", "events", "said", "processes"]), x, max_size=4)))  # fmt: skip
def test_any_json_is_a_sample_or_refused(data: object) -> None:
    with pytest.raises(InvalidRecord):
        parse_sample(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [("when", "noon"), ("pools", None), ("pools", [3]), ("processes", [{"pid": "x"}]), ("events", []), ("clock", True),
     ("said", {"components": {"a": "b"}}), ("said", {"marks": [{"when": 1}]}), ("interval", None),
     ("gpu_copies", [3]), ("gpu_copies", [{"gpu": "a", "key": "b", "name": "c", "bytes": 1, "users": ["x"]}])],
)  # fmt: skip
def test_a_sample_with_one_thing_wrong_is_refused(field: str, value: object) -> None:
    data = json.loads(json_line(Moment(_full())))
    with pytest.raises(InvalidRecord):
        parse_sample({**data, field: value})


def test_unknown_fields_are_left_alone_and_defaults_filled_in() -> None:
    data = {**json.loads(json_line(Moment(_full()))), "invented": 1}
    data["processes"][0].pop("born")
    assert parse_sample(data).processes[0].born is None


def _write(path: Path, count: int, first: int = 0) -> list[Sample]:
    told: list[str] = []
    log = WatchLog(path, told.append)
    made = [_full(float(n)) for n in range(first, first + count)]
    for moment in moments(made):
        log.show(moment)
    log.close()
    assert told == []
    return made


def test_a_log_is_appended_to_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    made = _write(path, 5) + _write(path, 3, first=5)
    told: list[str] = []
    assert list(read_samples(path, told.append)) == made and told == []


@pytest.mark.parametrize("seed", range(10))
def test_a_log_cut_anywhere_gives_what_is_whole(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "run.jsonl"
    made = _write(path, 6)
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    cut = random.Random(seed).randrange(ends[0], len(whole))
    path.write_bytes(whole[:cut])
    told: list[str] = []
    kept = sum(end <= cut for end in ends)
    on_the_edge = cut + 1 in ends  # only the line's end is missing: the line itself is whole
    assert list(read_samples(path, told.append)) == made[: kept + on_the_edge]
    if cut not in ends and not on_the_edge:
        assert told == [f"skipped the last line of {path}: it is incomplete"]
    # The next watch appends; only the half line is lost.
    more = _write(path, 2, first=50)
    told.clear()
    assert list(read_samples(path, told.append)) == made[: kept + on_the_edge] + more
    assert len(told) == (cut not in ends and not on_the_edge)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "empty"), (b"\n\n", "empty"), (b"hello\nworld\n", "not JSON"), (b"\x89PNG\r\n\x00\xff" * 99, "not JSON"),
     (b'{"schema": "legroom.watch/2"}\n', "legroom.watch/2"), (b'{"a": 1}\n{"b": 2}\n', "schema must be"),
     (b'{"schema":"legroom.watch/1"}', "Sample.when"), (b"[" * 100_000, "not JSON")],
)  # fmt: skip
def test_a_file_that_is_not_a_log_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(DamagedSource) as caught:
        list(read_samples(path, lambda text: None))
    assert why in caught.value.why and caught.value.exit_status == 2


def test_a_line_without_end_is_passed_over_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legroom.monitor.watch_log._LONGEST_LINE", 4096)
    path = tmp_path / "run.jsonl"
    made = _write(path, 1)
    with path.open("ab") as file:
        file.write(b"x" * 50_000 + b"\n")
    made += _write(path, 1, first=9)
    told: list[str] = []
    assert list(read_samples(path, told.append)) == made and len(told) == 1


def test_files_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource):
        list(read_samples(tmp_path / "none", lambda text: None))
    with pytest.raises(UnreadableSource):
        list(read_samples(tmp_path, lambda text: None))
    with pytest.raises(UsageError, match="cannot write the log"):
        WatchLog(tmp_path / "no" / "where", lambda text: None)


def test_a_log_without_an_end_is_refused_and_a_pipe_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreadableSource) as caught:
        list(read_samples("/dev/zero", pytest.fail))
    assert "a device" in caught.value.why
    fifo, log = str(tmp_path / "fifo"), tmp_path / "run.jsonl"
    os.mkfifo(fifo)
    made = _write(log, 3)
    with subprocess.Popen(["sh", "-c", 'exec cat "$0" > "$1"', str(log), fifo]):
        assert list(read_samples(fifo, pytest.fail)) == made
    with subprocess.Popen(["cat", str(log)], stdout=subprocess.PIPE) as writer:  # as the shell writes <(COMMAND)
        assert writer.stdout is not None
        assert list(read_samples(f"/dev/fd/{writer.stdout.fileno()}", pytest.fail)) == made
    monkeypatch.setattr("legroom.system.open_file_or_pipe._WRITER_WITHIN", 0.1)
    with pytest.raises(UnreadableSource) as caught:
        list(read_samples(fifo, pytest.fail))
    assert "no process writes into this FIFO" in caught.value.why


def test_a_full_disk_ends_the_log_and_not_the_watch() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    told: list[str] = []
    log = WatchLog(full, told.append)
    for moment in moments([_full(1.0), _full(2.0)]):
        log.show(moment)
    log.close()
    assert len(told) == 1 and "No space left" in told[0]


def test_lists_that_do_not_change_are_written_once_and_read_back_in_every_sample(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    entries = tuple(EntryRow(f"{n:064x}", f"/data/imagenet/train/part-{n:05d}.h5", "shm", GB, True) for n in range(29))
    idle = replace(entries[0], in_use=False)
    made = [replace(_full(n + 0.25), entries=(idle, *entries[1:]) if n in (5, 6, 700) else entries) for n in range(800)]
    made[9] = replace(made[9], entries=None)
    for log in (WatchLog(path, pytest.fail), WatchLog(path, pytest.fail)):
        for moment in moments(made):
            log.show(moment)
        log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert list(read_samples(path, pytest.fail)) == made + made
    assert sum(b'"entries":[' in line for line in lines[:800]) == 18  # changes, and every 60th
    assert max(map(len, lines)) > 4 * len(lines[1]) and b'"gpu_copies":[' not in lines[1]
    # Old logs, with everything in every line, and --json.
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json_line(moment) + "\n" for moment in moments(made)))
    assert list(read_samples(old, pytest.fail)) == made
    # Two watches that write into one log; a log without its beginning.
    mixed = tmp_path / "mixed.jsonl"
    shifted = [replace(one, clock=one.clock + 0.5, entries=entries[:3]) for one in made[:20]]
    logs = WatchLog(mixed, pytest.fail), WatchLog(mixed, pytest.fail)
    for one, two in zip(moments(made[:20]), moments(shifted), strict=True):
        logs[0].show(one)
        logs[1].show(two)
    for log in logs:
        log.close()
    both = [one for pair in zip(made[:20], shifted, strict=True) for one in pair]
    assert list(read_samples(mixed, pytest.fail)) == both
    path.write_bytes(b"".join(lines[1:800]))
    found = list(read_samples(path, pytest.fail))
    assert [one.entries for one in found[:4]] == [None] * 4 and found[4:] == [
        replace(one, groups=new.groups, gpu_copies=new.gpu_copies, processes=new.processes)
        for one, new in zip(made[5:], found[4:], strict=True)
    ]
    assert found[-1] == made[-1]


def _idle_beside_busy(count: int) -> list[Sample]:
    """Four processes: one changes in every sample, one in the 5th, two never, and one of these ends."""
    made = []
    for n in range(count):
        rows = (
            row(1, rss=GB + n, command="busy"),
            row(2, rss=GB, command="idle", pss=5, pss_at=1.5),
            row(3, rss=(n >= 5) * MB, command="once"),
            *(() if n >= 30 else (row(4, rss=MB, command="ends"),)),
        )
        made.append(replace(_full(n + 0.25), processes=rows[::-1] if n % 7 == 0 else rows))
    return made


def test_a_process_of_which_nothing_has_changed_is_not_written_again(tmp_path: Path) -> None:
    path, made = tmp_path / "run.jsonl", _idle_beside_busy(200)
    log = WatchLog(path, pytest.fail)
    for moment in moments(made):
        log.show(moment)
    log.close()
    assert list(read_samples(path, pytest.fail)) == made
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [one for line in lines for one in line["processes"]]
    assert [sum("rss" in one for one in rows if one["pid"] == pid) for pid in (1, 2, 3, 4)] == [200, 4, 5, 1]
    assert lines[1]["processes"][1] == {"pid": 2, "unchanged_since": 0.25}
    # Two watches of the same processes into one log.
    mixed = tmp_path / "mixed.jsonl"
    logs = WatchLog(mixed, pytest.fail), WatchLog(mixed, pytest.fail)
    shifted = [replace(one, clock=one.clock + 0.5) for one in _idle_beside_busy(80)]
    for one, two in zip(moments(made[:80]), moments(shifted), strict=True):
        logs[0].show(one)
        logs[1].show(two)
    for log in logs:
        log.close()
    assert list(read_samples(mixed, lambda _: None)) == [
        one for pair in zip(made[:80], shifted, strict=True) for one in pair
    ]


def test_a_process_whose_line_is_lost_is_as_in_the_line_before_or_left_out(tmp_path: Path) -> None:
    path, made = tmp_path / "run.jsonl", _idle_beside_busy(30)
    log = WatchLog(path, pytest.fail)
    for moment in moments(made):
        log.show(moment)
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    told: list[str] = []
    path.write_bytes(b"".join([*lines[:5], lines[5][:200] + b"\n", *lines[6:]]))  # of process 3 the only line
    found = list(read_samples(path, told.append))
    assert len(told) == 1 and [one.pid for one in found[5].processes] == [1, 2, 3, 4]
    assert found[5].processes[2] == made[4].processes[2] and found[5].processes[1] == made[6].processes[1]
    path.write_bytes(b"".join(lines[1:]))  # the beginning was removed
    assert [one.pid for one in next(iter(read_samples(path, pytest.fail))).processes] == [1]


@pytest.mark.parametrize(
    "row", [{"unchanged_since": 1.0}, {"pid": 1, "unchanged_since": "x"}, {"pid": [], "unchanged_since": 1}]
)
def test_a_row_that_refers_to_nothing_is_refused(tmp_path: Path, row: object) -> None:
    path, told = tmp_path / "run.jsonl", list[str]()
    data = json.loads(json_line(Moment(_full())))
    path.write_text(json.dumps(data) + "\n" + json.dumps({**data, "processes": [row]}) + "\n" + json.dumps(data))
    assert len(list(read_samples(path, told.append))) == 2 and "1 line" in told[0]


def test_what_is_kept_while_a_log_is_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legroom.monitor.watch_log._ROWS_KEPT", 8)
    path, repeats = tmp_path / "run.jsonl", _Repeats()
    made = [replace(_full(float(n)), processes=(row(n, rss=n), row(1000, rss=MB))) for n in range(50)]
    log = WatchLog(path, pytest.fail)
    for moment in moments(made):
        log.show(moment)
    log.close()
    assert [repeats.read(json.loads(line)) for line in path.read_text().splitlines()] == made
    assert len(repeats._rows) == 8 and len(repeats._newest) <= 8


def test_a_log_of_two_watches_at_once_is_reported_and_one_of_two_runs_is_not(tmp_path: Path) -> None:
    runs, mixed = tmp_path / "runs.jsonl", tmp_path / "mixed.jsonl"
    _write(runs, 20)
    _write(runs, 20)
    assert len(list(read_samples(runs, pytest.fail))) == 40
    for n in range(20):
        _write(mixed, 1, first=n)
        _write(mixed, 1, first=n + 100)
    told: list[str] = []
    assert len(list(read_samples(mixed, told.append))) == 40
    assert told == [f"several watches wrote into {mixed} at once: leaks are not found in it"]


@pytest.mark.parametrize("value", [3, "entries", ["entries"], None, {"entries": [1]}])
def test_a_reference_to_an_earlier_line_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    path, told = tmp_path / "run.jsonl", list[str]()
    data = json.loads(json_line(Moment(_full())))
    path.write_text(json.dumps(data) + "\n" + json.dumps({**data, "unchanged_since": value}) + "\n" + json.dumps(data))
    assert len(list(read_samples(path, told.append))) == 2 and "1 line" in told[0]
