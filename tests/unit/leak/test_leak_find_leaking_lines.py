"""From records to named lines, and the report as text, JSON and page; no process is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from legroom.cli.main import run
from legroom.leak.find_leaking_lines import _Series, _too_short, diagnose
from legroom.leak.leak_report import leak_page, report_lines, report_object
from legroom.leak.object_size import size_of
from legroom.leak.process_counters import Counters
from legroom.leak.record_files import (
    SCHEMA,
    CounterSample,
    CreatedItems,
    HolderRecord,
    ProcessRecord,
    RecordWriter,
    TraceWindow,
    read_directory,
)
from legroom.records.memory_growth import LeakReport

KB, MB = 1 << 10, 1 << 20
SCRIPT = "history = []\nfor step in range(300):\n    history.append(step)\n"


def _record(rate: float, *, pid: int = 7, blocks: float = 0.0, count: int = 60, **more: Any) -> ProcessRecord:
    """A process whose malloc grows by that many bytes per step."""
    samples = [
        CounterSample(
            step, step * 0.1, Counters(anonymous=int(300 * MB + rate * step), malloc=int(200 * MB + rate * step),
                                       malloc_system=int(210 * MB + rate * step), blocks=int(500_000 + blocks * step)),
            {"ram": 10 << 30},
        )
        for step in range(3, 3 + 5 * count, 5)
    ]  # fmt: skip
    return ProcessRecord(pid, 1, "python train.py", source="optimizer", samples=samples, **more)


def _holder(file: str, size: int, number: int = 0, **more: Any) -> HolderRecord:
    values: dict[str, Any] = {
        "name": "history", "word": "history", "file": file, "function": "", "line": None, "unit": "items",
        "item": {"ram": size}, "item_type": "Tensor", "tensors": 1,
        "amounts": [(step, step * 0.1, step) for step in range(3, 300, 5)], **more,
    }  # fmt: skip
    return HolderRecord(number, **values)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def test_a_holder_and_a_pool_that_grow_alike_are_named(script: str) -> None:
    report = diagnose([_record(80 * KB, holders={0: _holder(script, 80 * KB)})])
    (site,) = report.sites
    assert (site.line.file, site.line.line, site.holder) == (script, 3, "history")  # type: ignore[union-attr]
    assert site.kind == "tensors" and site.certainty == "high" and site.rate == pytest.approx(80 * KB, rel=0.01)
    assert site.full_in == pytest.approx((10 << 30) / (800 * KB), rel=0.05)  # ten steps a second
    assert report.processes[0].pools[0].explained == pytest.approx(1.0, abs=0.02)


def test_a_holder_without_growth_of_the_pool_is_not_named(script: str) -> None:
    assert not diagnose([_record(0, holders={0: _holder(script, 80 * KB)})]).sites


@pytest.mark.parametrize(
    ("seen", "named"), [({}, 1), ({"existing": 2}, 0), ({"existing": 1, "created": [CreatedItems("a.py", 1)]}, 1)]
)
def test_items_that_had_been_made_before_are_not_named_for_a_pool_that_rises_and_falls(
    script: str, seen: dict[str, Any], named: int
) -> None:
    record = _record(0, holders={0: _holder(script, 80 * KB, **seen)})
    for number, sample in enumerate(record.samples):  # up for a while, and down again
        object.__setattr__(sample.counters, "anonymous", 300 * MB + 300 * KB * (number - 30 if 30 < number < 54 else 0))
    assert not pools_grow(record)
    assert len(diagnose([record]).sites) == named


@pytest.mark.parametrize(("rate", "named"), [(40 * KB, ["kept"]), (120 * KB, ["history", "kept"])])
def test_items_that_had_been_made_before_are_named_for_growth_that_no_other_explains(
    script: str, rate: int, named: list[str]
) -> None:
    holders = {
        0: _holder(script, 80 * KB, existing=3),
        1: _holder(script, 40 * KB, 1, name="kept", word="kept", created=[CreatedItems(script, 3)]),
    }
    found = diagnose([_record(rate, holders=holders)]).sites
    assert sorted(str(site.holder) for site in found if site.holder) == named


def pools_grow(record: ProcessRecord) -> bool:
    return any(pool.growing for pool in diagnose([record]).processes[0].pools)


def test_few_samples_in_the_second_half_are_too_few_to_tell() -> None:
    record = _record(0)
    record.samples[30:-2] = []  # the machine was busy: no time for samples
    (process,) = diagnose([record]).processes
    assert not process.sites and "second half of the run: 2" in str(process.reason)
    assert report_lines(diagnose([record]), 80)[0].startswith("cannot tell whether memory grows")
    assert diagnose([_record(0)]).processes[0].reason is None


def test_a_container_with_a_limit_is_not_named(script: str) -> None:
    assert not any(
        site.holder for site in diagnose([_record(80 * KB, holders={0: _holder(script, 80 * KB, limit=10_000)})]).sites
    )


def test_slow_growth_is_listed_apart(script: str) -> None:
    report = diagnose([_record(0, blocks=2, holders={0: _holder(script, 40)})])
    assert not report.sites and report.processes[0].small[0].holder == "history"


def test_what_no_holder_explains_is_outside_python(script: str) -> None:
    (site,) = diagnose([_record(100 * KB)]).sites
    assert site.kind == "native" and site.line is None and site.certainty != "high"


def test_small_objects_without_a_holder_are_unknown_not_native() -> None:
    (site,) = diagnose([_record(0, blocks=2000)]).sites
    assert site.kind == "unknown" and site.line is None


def test_with_garbage_collection_off_it_is_not_called_native() -> None:
    record = _record(100 * KB)
    for sample in record.samples:
        object.__setattr__(sample.counters, "collects", False)
    (site,) = diagnose([record]).sites
    assert site.kind == "unknown" and "gc.disable" in site.why[0]


def test_both_a_holder_and_the_rest_are_reported(script: str) -> None:
    named, rest = diagnose([_record(300 * KB, holders={0: _holder(script, 200 * KB)})]).sites
    assert named.holder == "history" and rest.kind == "native" and rest.rate == pytest.approx(100 * KB, rel=0.05)


def test_windows_of_tracemalloc_name_what_no_variable_keeps(script: str) -> None:
    windows = [
        TraceWindow(steps, 0.1, [(script, 2, steps * 2, steps * 90 * KB, steps, steps * 45 * KB)])
        for steps in (6, 12, 20)
    ]
    (site,) = diagnose([_record(90 * KB, windows=windows)]).sites
    assert site.created is not None and site.created.line == 2 and site.certainty == "medium"
    once = [windows[0], TraceWindow(12, 0.1, []), TraceWindow(20, 0.1, [])]
    assert diagnose([_record(90 * KB, windows=once)]).sites[0].kind == "native"


def test_a_line_that_a_variable_names_is_not_named_again_for_the_rest(script: str) -> None:
    windows = [
        TraceWindow(steps, 0.1, [(script, 3, steps * 2, steps * 80 * KB, steps, steps * 40 * KB)])
        for steps in (6, 12, 20)
    ]
    found = diagnose([_record(160 * KB, holders={0: _holder(script, 80 * KB)}, windows=windows)]).sites
    assert [(site.kind, site.line and site.line.line) for site in found] == [("tensors", 3), ("native", None)]


def test_too_few_samples_are_said_to_be_too_few() -> None:
    report = diagnose([_record(80 * KB, count=5)])
    assert not report.sites and report.processes[0].reason is not None
    assert "too few to tell" in "\n".join(report_lines(report))
    series = _Series("step", [], [])
    assert _too_short(series, 1, 9.0) == "1 step is too few to tell"
    assert "ran for 300 ms:" in _too_short(series, None, 0.3)
    assert "ran for 28 s:" in _too_short(series, None, 28.449)
    assert "no Python process" in "\n".join(report_lines(LeakReport(())))


def test_a_main_process_that_could_not_be_judged_is_mentioned_beside_its_workers(script: str) -> None:
    main, fine = _record(0, count=5), _record(0, role="worker", pid=78)
    leaking = _record(80 * KB, role="worker", pid=79, holders={0: _holder(script, 80 * KB)})
    for worker in (fine, leaking):
        lines = report_lines(diagnose([main, worker]), 80)
        assert any(line.startswith("pid ") and "cannot tell whether memory grows" in line for line in lines), lines


def test_a_copied_dataset_needs_an_attribute_that_explains_it() -> None:
    copied = {"step": 50, "time": 5.0, "copied": 40 * MB, "shared": 0, "attribute": "dataset.boxes", "items": 90_000,
              "size": 60 * MB, "share": 0.6}  # fmt: skip
    first = {**copied, "step": 3, "time": 0.3, "copied": 0}
    (site,) = diagnose([_record(0, role="worker", copied=[first, copied])]).sites
    assert site.kind == "copy-on-write" and site.holder == "dataset.boxes" and site.full_in is None
    for other in ({"attribute": None}, {"copied": 2 * MB}, {"share": 0.02}, {"size": MB}):
        assert not diagnose([_record(0, copied=[first, {**copied, **other}])]).sites, other


def test_the_report_has_eighty_columns_and_groups_processes(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(script).parent)
    records = [_record(80 * KB, pid=pid, role="worker", holders={0: _holder(script, 80 * KB)}) for pid in (11, 12)]
    report = diagnose(records, ["python", "train.py"])
    lines = report_lines(report)
    assert all(len(line) <= 80 for line in lines) and lines[1].startswith("train.py:3 ")
    assert "in 2 processes: 11, 12" in " ".join(" ".join(lines).split())
    found = report_object(report)
    assert json.loads(json.dumps(found)) == found and found["sites"][0]["pids"] == [11, 12]
    page = leak_page(report)
    assert "train.py:3" in page and page.count("<svg") == 2 and "<script" not in page


def test_the_kind_is_never_cut(script: str) -> None:
    nodes = {"unit": "nodes", "item": {}, "graphs": 1, "item_type": "Tensor"}
    text = report_lines(diagnose([_record(80 * KB, holders={0: _holder(script, 0, **nodes)})]), 80)
    assert "autograd graph in RAM " in text[1] and max(map(len, text)) <= 80
    narrow = report_lines(diagnose([_record(80 * KB, holders={0: _holder(script, 0, **nodes)})]), 74)
    assert "…" not in "".join(line[22:] for line in narrow) and narrow[2].split() == ["in", "RAM"]


TWO_LINES = "keep = []\nfor step in range(300):\n    loss = f(x)\n    keep.append(loss)\n    keep.append(ones(9))\n"


@pytest.mark.parametrize(
    ("created", "unknown", "named"),
    [
        ({3: 80, 5: 80 * KB}, 0, {5: "high"}),
        ({3: 80 * KB, 5: 80}, 0, {4: "high"}),
        ({3: 30 * KB, 5: 50 * KB}, 0, {4: "high", 5: "high"}),
        ({3: 30 * KB, 5: 50 * KB}, 90 * KB, {(4, 5): "medium"}),  # most of it had been made before
        ({1: 80 * KB}, 0, {(4, 5): "medium"}),  # by a line that leads to neither
        ({}, 0, {(4, 5): "medium"}),
    ],
)
def test_of_several_lines_those_that_add_the_bytes_are_named_or_all_without_preference(
    tmp_path: Path, created: dict[int, int], unknown: int, named: dict[Any, str]
) -> None:
    (tmp_path / "train.py").write_text(TWO_LINES)
    file = str(tmp_path / "train.py")
    made = [CreatedItems(file, line, {"ram": size}) for line, size in created.items()]
    before = [CreatedItems("", 0, {"ram": unknown})]
    holder = _holder(file, 40 * KB, name="keep", word="keep", created=made, unknown=before)
    holder.amounts = [(step, clock, 2 * (amount or 0)) for step, clock, amount in holder.amounts]
    report = diagnose([_record(80 * KB, holders={0: holder})])
    found: dict[Any, str] = {}
    for site in report.sites:
        numbers = tuple(line.line for line in site.lines)
        found[numbers if site.share is None else numbers[0]] = site.certainty
    assert found == named
    assert sum(site.rate for site in report.sites) == pytest.approx(80 * KB, rel=0.02)
    first = report_lines(report)[1][:22].rstrip()
    assert first.endswith("train.py:4, 5" if (4, 5) in named else f"train.py:{max(named)}"), first


def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    writer = RecordWriter(str(tmp_path), 5, 1.0)
    writer.write("process", schema=SCHEMA, pid=5, parent=1, command="x", source=None, started=1.0)
    writer.write("sample", step=None, time=1.0, counters={"blocks": 1}, amounts=[])
    writer.close()
    with writer.path.open("ab") as file:
        file.write(b'{"kind":"sample","step":4,"ti')
    (tmp_path / "9-1.jsonl").write_bytes(b"\x00\xff garbage\n")
    (record,) = read_directory(tmp_path)
    assert record.pid == 5 and len(record.samples) == 1


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["leak"]) == 2
    assert run(["leak", "--read", str(tmp_path / "no"), "--json"]) == 2
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert run(["leak", "--records", str(tmp_path / "used"), "--", "true"]) == 2
    assert run(["leak", "--page", str(tmp_path / "x.txt"), "--", "true"]) == 2
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    assert run(["leak", "--read", str(tmp_path / "empty"), "--json"]) == 2  # no job has written there
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "unreadable-source"


def test_items_of_different_sizes_are_averaged_as_allocators_count_them(tmp_path: Path) -> None:
    texts = ["".join(("a", str(number), "c")) for number in range(8)]
    assert size_of(texts).pools["ram"] == 8 * 64  # getsizeof says 52
    writer = RecordWriter(str(tmp_path), 7, 1.0)
    writer.write("process", schema=SCHEMA, pid=7, parent=1, command="python", role="main", rank=None, started=1.0,
                 source="optimizer")  # fmt: skip
    writer.write("holder", number=0, name="cache", word="cache", file="train.py", function="", line=None, unit="items",
                 limit=None, amounts=[(1, 0.1, 4)])  # fmt: skip
    for kind, size in (("int", 32), ("tuple", 9000), ("tuple", 7000), ("tuple", 12_000), ("tuple", 8000)):
        writer.write("item", number=0, pools={"ram": size}, type=kind, graphs=0, tensors=0, saved=None)
    writer.close()
    (record,) = read_directory(tmp_path)
    assert record.holders[0].item == {"ram": 9000} and record.holders[0].item_type == "tuple"
