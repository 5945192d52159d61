"""The demo: how large it is, its table, screen and chart, messages of children, and cleaning up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from legroom.charts.demo_chart import demo_chart
from legroom.charts.drawing import Circle, Polygon, Text, svg, text_width
from legroom.cli.demo import Lines, bar_lines, chart_path, ratio, stamped, table_lines, table_rows
from legroom.cli.main import run
from legroom.demo import demo_setup
from legroom.demo.demo_scripts import CLASSES, ROW_BYTES, learn, send
from legroom.demo.demo_setup import RUNS, demo_size, h5py_seconds, make_dataset, rows_that_overflow
from legroom.demo.demo_stages import Child, Demo, best_rates, end_all, peak, steps_for
from legroom.errors import MissingPackage, NoRoom, UsageError
from legroom.messages import cells
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import SOCKET_TAIL, longest_socket
from legroom.records.machine import Pool

MB, GB = 1 << 20, 1 << 30
NAMES = ("one", "two", "three", "four")


def _result(**changes: object) -> dict[str, Any]:
    trial = {
        "loader": "torch", "batch_bytes": 19 * MB, "delivered": 2, "of": 12, "died": True, "stood_still": False,
        "verdict": "shm-full", "confidence": 0.97, "shm_peak": 60 * MB,
    }  # fmt: skip
    ours = {**trial, "loader": "legroom", "delivered": 12, "died": False, "verdict": None, "shm_peak": 0}
    return {
        "machine": {
            "cpu": "a CPU", "cpus": 2, "memory": 8 * GB, "system": "Linux", "python": "3.11", "packages": {"numpy": "2"},
            "load": 0.1, "when": "2026-01-01T00:00:00Z",
        },
        "shm_size": 64 * MB, "shm_own": True, "shm_why": None, "data_bytes": 512 * MB, "rows": 40_000, "engine": "torch",
        "notes": [], "trainings": [{"name": name, "steps": 100, "finished": True, "loss": 0.5, "starts": 1} for name in NAMES],
        "memory": {"separate": 2400 * MB, "shared": 1000 * MB},
        "opening": {"at_once": 0.9, "later": 0.01, "later_ready": 0.05, "plain": 0.4, "plain_at_once": 1.5, "backing": "disk"},
        "rescue": {"name": "three", "signal": 9, "at_step": 55, "verdict": "killed", "resumed_from": 50, "back_after": 2.5},
        "loaders": {"trials": [trial, ours], "rates": {"torch": 200.0, "legroom": 800.0, "batches": 4000.0}, "why": None},
        "weights": [
            {"when": when, "act": act, "held": dict.fromkeys(NAMES, size)}
            for act, first, size in (("separate", 10.0, 600 * MB), ("shared", 20.0, 250 * MB))
            for when in (first, first + 1, first + 2)
        ],
        "marks": [{"when": 21.0, "text": "killed"}, {"when": 22.0, "text": "resumed"}], "seconds": 60.0,
    } | changes  # fmt: skip


# How large it is.


def test_a_large_machine_gets_the_whole_demo() -> None:
    found = demo_size(32 * GB, 100 * GB, no_torch=None, quick=False)
    assert (found.engine, found.runs, found.no_loaders, found.notes) == ("torch", RUNS, None, ())
    assert demo_size(32 * GB, 100 * GB, no_torch=None, quick=True).rows < found.rows


@pytest.mark.parametrize("ram", [2 * GB, 1200 * MB, 600 * MB, 284 * MB])
def test_a_small_machine_gets_a_smaller_demo_and_a_note(ram: int) -> None:
    found = demo_size(ram, 100 * GB, no_torch=None, quick=False)
    assert found.notes
    # Every run can hold a copy of its own, and some memory stays free.
    assert found.runs * found.rows * ROW_BYTES < 0.8 * ram
    less = demo_size(ram, 100 * GB, no_torch=None, quick=False, in_memory=True)
    assert less.rows < found.rows or less.runs < found.runs


def test_too_little_memory_is_refused_with_numbers() -> None:
    with pytest.raises(NoRoom, match="128 MB free") as refused:
        demo_size(128 * MB, 100 * GB, no_torch=None, quick=True)
    assert "MB" in refused.value.why


def test_a_small_disk_limits_the_data_and_no_torch_means_no_loaders() -> None:
    found = demo_size(32 * GB, 90 * MB, no_torch="torch is not installed", quick=False)
    assert found.rows * ROW_BYTES <= 30 * MB and found.engine == "numpy"
    assert found.no_loaders == "torch is not installed"
    assert demo_size(None, 100 * GB, no_torch=None, quick=True).notes


def test_batches_overflow_a_small_shm_only() -> None:
    rows = rows_that_overflow(64 * MB)
    assert rows is not None and 5 * rows * ROW_BYTES * 4 > 64 * MB
    assert rows_that_overflow(8 * GB) is None and rows_that_overflow(None) is None


def test_steps_follow_the_measured_rate_within_limits() -> None:
    assert steps_for(50.0, 10.0) == 500
    assert steps_for(0.1, 1.0) == 40 and steps_for(1e9, 10.0) == 20_000


def test_a_peak_needs_all_children_in_one_sample() -> None:
    alone = {"act": "shared", "held": {"one": 900}}
    both = {"act": "shared", "held": {"one": 100, "two": 200}}
    assert peak([alone, both, {"act": "separate", "held": {"one": 999, "two": 1}}], "shared", 2) == 300
    assert peak([alone], "shared", 2) is None


def test_the_best_round_of_each_loader_counts() -> None:
    rates = [{"loader": "torch", "rate": 3.0}, {"loader": "torch", "rate": 5.0}, {"loader": "legroom", "rate": 9.0}]
    assert best_rates(rates) == {"torch": 5.0, "legroom": 9.0}


# The table, the chart and the screen.


def test_a_label_lies_inside_its_layer_or_is_left_out() -> None:
    rising = [
        {"when": 10 + at, "act": "separate", "held": {"one": at * 60 * MB, "two": at * 9 * MB, "three": at * 70 * MB, "four": 6 * MB}}
        for at in range(12)
    ]  # fmt: skip
    shapes = demo_chart(_result(weights=rising)).shapes
    layers = {one.tip: one.points for one in shapes if isinstance(one, Polygon) and one.tip in NAMES}
    labels = [one for one in shapes if isinstance(one, Text) and one.text in NAMES]
    assert {label.text for label in labels} == {"one", "two", "three"}
    for label in labels:
        points, half = layers[label.text], text_width(label.text, label.size) / 2
        edges = points[: len(points) // 2], points[len(points) // 2 :][::-1]
        for x in (label.x - half, label.x, label.x + half):
            top, bottom = (np.interp(x, *zip(*edge, strict=True)) for edge in edges)
            assert top <= label.y - 11 and label.y + 3 <= bottom, label


def test_the_table_fits_80_columns_and_has_every_figure() -> None:
    lines = table_lines(table_rows(_result()), 80)
    text = "\n".join(lines)
    assert all(cells(line) <= 80 for line in lines)
    for words in ("2.34 GB", "1000 MB", "2.4 times less", "200", "800", "20 times torch's", "1 of 1", "0 of 1",
                  "shm-full after", "10 ms", "back in 2.5 s", "from step 50"):  # fmt: skip
        assert words in text, words
    assert "torch, not data" not in text
    few = table_lines(table_rows(_result(data_bytes=96 * MB)), 80)
    assert "904 MB of both are Python and torch, not data" in " ".join(" ".join(few).split())
    narrow = table_lines(table_rows(_result()), 50)
    assert "  without: 1 of 1" in narrow and "  Legroom: 0 of 1" in narrow


def test_what_was_not_measured_gives_the_reason() -> None:
    opening = {**_result()["opening"], "later": None, "later_ready": None}
    none = {"trials": [], "rates": None, "why": "torch is not installed"}
    bare = _result(loaders=none, memory={"separate": None, "shared": 5}, opening=opening, weights=[])
    text = "\n".join(table_lines(table_rows(bare), 80))
    assert "torch is not installed" in text and "unknown" in text and "no run started later" in text
    assert ElementTree.fromstring(svg(demo_chart(bare))) is not None


def test_ratios_have_two_digits() -> None:
    assert (ratio(2.44), ratio(12.6)) == ("2.4", "13")


def test_the_chart_shows_every_figure_inside_its_frame() -> None:
    chart = demo_chart(_result())
    for shape in chart.shapes:
        points = [(shape.x, shape.y)] if isinstance(shape, Text | Circle) else shape.points
        assert all(0 <= x <= chart.width and 0 <= y <= chart.height for x, y in points), shape
    words = {shape.text for shape in chart.shapes if isinstance(shape, Text)}
    assert {"2.34 GB", "1000 MB", "killed", "resumed", "4000", "0 of 1", "one", "four", "1.5 GB", "2 s"} <= words
    assert sum(isinstance(shape, Polygon) for shape in chart.shapes) == 8 + 8  # two stacks; a bar of 0 is not drawn


def test_the_chart_goes_to_a_file_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert chart_path(None).parent == tmp_path and chart_path("x.svg") == tmp_path / "x.svg"
    for bad in ("x.txt", "nowhere/x.svg", str(tmp_path)):
        with pytest.raises(UsageError):
            chart_path(bad)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage):
        chart_path("x.png")


def _child(name: str, folder: Path, *messages: dict[str, Any]) -> Child:
    return Child(name, ("train",), folder, {}, messages=list(messages), pss=143 * MB, rss=512 * MB)


def test_bars_fit_80_columns_and_lines_have_the_same_figures(tmp_path: Path) -> None:
    step = {"kind": "step", "step": 12_345, "of": 20_000, "loss": 0.123}
    children = [_child("one", tmp_path, step), _child("two", tmp_path), _child("three", tmp_path, step)]
    children[2].note = "killed"
    pools = (Pool("shm", 64 * MB, 63 * MB, MB, "here"), Pool("ram", None, None, None, "nowhere", "not known"))
    lines = [line.plain for line in bar_lines(pools, children, 80)]
    assert all(cells(line) <= 80 for line in lines)
    one, two, three = (next(line for line in lines if line.startswith(name)) for name in ("one", "two", "three"))
    assert "62%" in one and "12345 / 20000" in one and "0.12" in one and one.endswith("143 MB    512 MB")
    assert "starting" in two and "killed" in three and len(one) == len(two) == len(three)
    assert "429 MB" in lines[-1]
    assert all(len(text.plain) <= 40 for text in bar_lines(pools, children, 40))
    printed: list[str] = []
    screen = Lines(printed.append)
    screen.headline(0.0, "a stage")
    screen.draw(12.0, pools, children)
    screen.draw(12.0, pools, children)  # not twice within a few seconds
    text = " ".join(" ".join(printed).split())
    assert printed[:2] == ["", "a stage"] and text.count("one 62%") == 1
    assert "together 429 MB" in text and "63 MB of 64 MB" in text


def test_events_are_wrapped_beside_their_time() -> None:
    lines = stamped(12.0, "words " * 30)
    assert lines[0].startswith("  12 s  words") and len(lines) > 1
    assert all(line.startswith("        words") for line in lines[1:])


@pytest.mark.parametrize("flags", [["--out", "x.txt"], ["--out", "/nowhere/x.svg"], ["--size", "3"]])
def test_bad_options_are_refused_before_anything_starts(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", *flags]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_chart_that_cannot_be_written_loses_no_figures(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    result = {**_result(), "kept": None}
    monkeypatch.setattr("legroom.demo.demo_stages.run_demo", lambda *_, **__: result)
    monkeypatch.setattr("legroom.system.atomic_file.replace_file", refuse)
    chart = tmp_path / "x.svg"
    assert run(["demo", "--out", str(chart), *flags]) == 2
    shown = capsys.readouterr()
    assert f"cannot write {chart}: No space left on device" in shown.err
    if flags:
        assert json.loads(shown.out) == {**result, "picture": None}
    else:
        assert "2.34 GB" in shown.out and str(chart) not in shown.out


# Children.


def test_messages_of_a_child_arrive_whole_and_once(tmp_path: Path) -> None:
    child, path = Child("one", ("train",), tmp_path, {}), tmp_path / "messages.jsonl"
    child.update()
    send(str(path), "step", step=1)
    child.update()
    child.update()
    assert [message["step"] for message in child.messages] == [1]
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "st')  # unfinished
    child.update()
    assert len(child.messages) == 1
    with path.open("ab") as file:
        file.write(b'ep": 2}\n')
    child.update()
    assert [message["step"] for message in child.all("step")] == [1, 2]
    assert child.last("step") == child.messages[1] and child.last("done") is None and not child.done


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_a_model_learns_and_continues_from_its_state(engine: str, tmp_path: Path) -> None:
    lib = pytest.importorskip(engine)
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "train.h5"
    assert make_dataset(path, 700) == path.stat().st_size
    assert h5py_seconds(path) > 0
    with h5py.File(path) as file:
        images, labels = file["images"][:], file["labels"][:]
    assert set(labels) == set(range(CLASSES)) and images.any(axis=(1, 2, 3)).all()  # the last chunk too
    batches = [
        {"images": lib.asarray(images[at : at + 64]), "labels": lib.asarray(labels[at : at + 64])}
        for at in range(0, 640, 64)
    ]
    weights = lib.asarray(np.random.default_rng(0).normal(0, 0.001, (ROW_BYTES, CLASSES)).astype("f4"))
    losses = [learn(lib, weights, batch, 0.05) for batch in (*batches, batches[0])]
    assert losses[-1] < 0.75 * losses[0]
    saved = lib.asarray(np.asarray(weights).copy())
    assert learn(lib, saved, batches[1], 0.05) == learn(lib, weights, batches[1], 0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_child_ends_with_its_parent() -> None:
    child = (
        "from legroom.demo.demo_scripts import end_with_parent; end_with_parent(9); print('on', flush=True); input()"
    )
    parent = (
        "import os, subprocess, sys\n"
        "os.environ['LEGROOM_DEMO_PARENT'] = str(os.getpid())\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=240)
    pid, deadline = int(done.stdout), time.monotonic() + 60
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)
    orphan = {**os.environ, "LEGROOM_DEMO_PARENT": "1"}  # its parent has ended already
    assert subprocess.run([sys.executable, "-c", child], env=orphan, timeout=240).returncode == 137


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Directories.


@pytest.mark.skipif(sys.platform != "linux", reason="directories are locked")
def test_only_directories_of_dead_demos_are_removed(tmp_path: Path) -> None:
    made = demo_setup.make_directory(Host(env={"LEGROOM_DIR": str(tmp_path)}))
    dead, young = tmp_path / "legroom-demo-dead", tmp_path / "legroom-demo-young"
    for folder in (dead, young):
        folder.mkdir()
    (dead / "train.h5").touch()
    link = tmp_path / "legroom-demo-link"
    link.symlink_to(dead)
    demo_setup.remove_leftovers(tmp_path)
    assert {made.path, young, link} == set(tmp_path.iterdir())
    kept = made.remove(keep=True)
    assert kept is not None
    demo_setup.remove_leftovers(tmp_path)
    assert {kept, young, link} == set(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="the demo runs on Linux")
def test_children_write_to_the_directory_of_the_demo_by_a_short_path(tmp_path: Path) -> None:
    parent = tmp_path / ("y" * 100)
    made = demo_setup.make_directory(Host(env={"LEGROOM_DIR": str(parent)}))
    variables = demo_setup.environment(made.path)
    # Sockets of a DataLoader's workers are made there, and a longer path than this cannot be bound.
    assert len(variables["TMPDIR"]) <= longest_socket(sys.platform) - SOCKET_TAIL
    code = "import tempfile, legroom; print(tempfile.mkdtemp(), legroom.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=variables, cwd=made.path, capture_output=True, text=True
    )
    folder, source = done.stdout.split()
    assert os.listdir(made.path / "tmp") == [Path(folder).name]
    assert Path(source).parent == Path(demo_setup.__file__).parents[1]
    assert made.remove(keep=False) is None and not made.path.exists()


def test_a_child_that_has_ended_has_no_unread_messages(tmp_path: Path) -> None:
    child = Child("one", ("train",), tmp_path, {})
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        child.process = process
        child.update()
        assert not child.ended
        send(str(tmp_path / "messages.jsonl"), "done")  # its last word; the demo sees its end before it reads this
        process.communicate()
        child.update()
    assert child.ended and child.done


def test_a_killed_run_is_not_resumed_from_a_step_after_the_one_it_was_killed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps between two messages, and those made until the signal arrives, are in its checkpoint."""
    (tmp_path / "shared").mkdir()
    lines: list[str] = []
    screen = SimpleNamespace(tell=lambda clock, text: lines.append(text), draw=lambda *_: None)
    demo = Demo(screen, folder=tmp_path)  # type: ignore[arg-type]
    checkpoint = tmp_path / "step-000045.npz"
    script = (
        "import io, os, sys, time, zipfile\n"
        "if '--resume' in sys.argv:\n"
        "    send = [dict(kind='resumed', step=45), dict(kind='step', step=46, of=100, loss=1.0)]\n"
        "else:\n"
        "    send = [dict(kind='started'), dict(kind='step', step=44, of=100, loss=1.0)]\n"
        "import json\n"
        "with open('messages.jsonl', 'a') as file:\n"
        "    for one in send:\n"
        "        file.write(json.dumps({'pid': os.getpid(), 'when': time.monotonic(), **one}) + chr(10))\n"
        "time.sleep(60)\n"
    )
    child = Child("one", (sys.executable, "-c", script), tmp_path, {**os.environ})
    demo.children = [child]
    child.start(tmp_path)
    try:
        demo.until(lambda: child.last("step"))
        np.savez(checkpoint, step=45)
        rescue = demo._kill_and_resume(child)
    finally:
        end_all([child])
    assert (rescue["at_step"], rescue["resumed_from"]) == (45, 45)
    assert any("killed on purpose after step 45" in line for line in lines)
