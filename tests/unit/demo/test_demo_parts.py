"""The demo's pure parts: how large it is, what its table and its picture say, what children say, what is left over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from legroom.charts.chart_file import render
from legroom.charts.drawing import Circle, Polygon, Text, svg
from legroom.cli.demo_view import table_lines, wrapped
from legroom.cli.main import run
from legroom.columns import cells
from legroom.demo import picture, place
from legroom.demo.dataset import CLASSES, make_dataset, read_plainly
from legroom.demo.job import Job
from legroom.demo.loaders import best_rates
from legroom.demo.model_numpy import Model
from legroom.demo.picture import demo_chart
from legroom.demo.place import make_place
from legroom.demo.result import (
    SEPARATE,
    SHARED,
    Loaders,
    Memory,
    Opening,
    Rescue,
    Result,
    Training,
    Trial,
    as_object,
)
from legroom.demo.said import Ear, Mouth
from legroom.demo.scale import TRAININGS, rows_too_many, scale, steps_for
from legroom.demo.screen import Lines, View, bars
from legroom.demo.stage import Weight, peak
from legroom.demo.table import rows, times
from legroom.errors import MissingPackage, NoRoom, UsageError
from legroom.model import Pool
from legroom.probe.host import Host
from legroom.probe.limits import TAIL, longest_socket
from legroom.system.atomic_file import replace_file

MB, GB = 1 << 20, 1 << 30


def _result(**changes: object) -> Result:
    weights = [
        Weight(when, act, tuple((name, size) for name in ("one", "two", "three", "four")))
        for act, first, size in ((SEPARATE, 10.0, 600 * MB), (SHARED, 20.0, 250 * MB))
        for when in (first, first + 1, first + 2)
    ]
    trial = Trial("torch", 19 * MB, 2, 12, True, False, "shm-full", 0.97, 60 * MB)
    values: dict[str, object] = {
        "machine": {
            "cpu": "a CPU", "cpus": 2, "memory": 8 * GB, "system": "Linux", "python": "3.11", "packages": {"numpy": "2"},
            "load": 0.1, "when": "2026-01-01T00:00:00Z",
        },
        "shm_size": 64 * MB, "shm_own": True, "shm_why": None, "data_bytes": 512 * MB, "rows": 40_000, "engine": "torch",
        "notes": (), "trainings": tuple(Training(n, 100, True, 0.5, 1) for n in ("one", "two", "three", "four")),
        "memory": Memory(2400 * MB, 1000 * MB), "opening": Opening(0.9, 0.01, 0.05, 0.4, 1.5, "disk"),
        "rescue": Rescue("three", 9, 55, "killed", 0.93, "somebody", ("a line",), 50, 2.5),
        "loaders": Loaders((trial, Trial("legroom", 19 * MB, 12, 12, False, False, None, None, 0)),
                           {"torch": 200.0, "legroom": 800.0, "batches": 4000.0}, MB),
        "weights": tuple(weights), "marks": ((21.0, "killed"), (22.0, "rescued")), "seconds": 60.0,
    }  # fmt: skip
    return Result(**{**values, **changes})  # type: ignore[arg-type]


def test_a_large_machine_gets_the_whole_demo() -> None:
    found = scale(32 * GB, 100 * GB, why_no_torch=None, quick=False)
    assert (found.engine, found.trainings, found.loaders, found.notes) == ("torch", TRAININGS, None, ())
    assert scale(32 * GB, 100 * GB, why_no_torch=None, quick=True).data_bytes < found.data_bytes


@pytest.mark.parametrize("ram", [2 * GB, 1200 * MB, 600 * MB, 284 * MB])
def test_a_small_machine_gets_a_smaller_one_and_is_told(ram: int) -> None:
    found = scale(ram, 100 * GB, why_no_torch=None, quick=False)
    assert found.notes
    # Every training may hold a copy of its own, and something stays free.
    assert found.trainings * found.data_bytes < 0.8 * ram
    less = scale(ram, 100 * GB, why_no_torch=None, quick=False, in_memory=True)
    assert less.data_bytes < found.data_bytes or less.trainings < found.trainings


def test_too_little_memory_is_refused_with_numbers() -> None:
    with pytest.raises(NoRoom, match="128 MB free") as refused:
        scale(128 * MB, 100 * GB, why_no_torch=None, quick=True)
    assert "MB" in refused.value.why


def test_a_small_disk_bounds_the_data_and_no_torch_means_no_loaders() -> None:
    found = scale(32 * GB, 90 * MB, why_no_torch="torch is not installed", quick=False)
    assert (
        found.data_bytes <= 30 * MB and found.engine == "numpy" and found.loaders == "torch is not installed"
    )
    assert scale(None, 100 * GB, why_no_torch=None, quick=True).notes


def test_batches_are_too_large_for_a_small_shm_only() -> None:
    rows_of_64 = rows_too_many(64 * MB, 64 * MB)
    assert rows_of_64 is not None and 5 * rows_of_64 * 3 * 64 * 64 * 4 > 64 * MB
    assert rows_too_many(8 * GB, 8 * GB) is None and rows_too_many(None, None) is None


def test_steps_follow_the_pace_within_bounds() -> None:
    assert steps_for(50.0, 10.0) == 500
    assert steps_for(0.1, 1.0) == 40 and steps_for(1e9, 10.0) == 20_000


def test_a_peak_counts_only_moments_with_everybody() -> None:
    alone = Weight(1.0, SHARED, (("one", 900),))
    both = Weight(2.0, SHARED, (("one", 100), ("two", 200)))
    assert peak([alone, both, Weight(3.0, SEPARATE, (("one", 999), ("two", 1)))], SHARED, 2) == 300
    assert peak([alone], SHARED, 2) is None


def test_the_table_fits_80_columns_and_says_every_figure() -> None:
    lines = table_lines(rows(_result()), 80)
    text = "\n".join(lines)
    assert all(cells(line) <= 80 for line in lines)
    for words in ("2.34 GB", "1000 MB", "2.4 times less", "200", "800", "20 times torch's", "1 of 1", "0 of 1",
                  "shm-full after", "10 ms", "back in 2.5 s", "step 50 of 100"):  # fmt: skip
        assert words in text, words
    narrow = table_lines(rows(_result()), 50)
    assert "  without: 1 of 1" in narrow and "  Legroom: 0 of 1" in narrow


def test_what_was_not_measured_says_why() -> None:
    bare = _result(
        loaders=Loaders(why="torch is not installed"),
        memory=Memory(None, 5),
        opening=Opening(1, None, None, 1, 1, "shm"),
    )
    text = "\n".join(table_lines(rows(bare), 80))
    assert "torch is not installed" in text and "unknown" in text and "nobody came later" in text
    assert ElementTree.fromstring(svg(demo_chart(bare))) is not None


def test_ratios_read_as_people_say_them() -> None:
    assert (times(2.44), times(12.6)) == ("2.4", "13")


def test_the_chart_shows_every_figure_inside_its_frame() -> None:
    chart = demo_chart(_result())
    for shape in chart.shapes:
        points = [(shape.x, shape.y)] if isinstance(shape, Text | Circle) else shape.points
        assert all(0 <= x <= chart.width and 0 <= y <= chart.height for x, y in points), shape
    words = {shape.text for shape in chart.shapes if isinstance(shape, Text)}
    assert {
        "2.34 GB",
        "1000 MB",
        "killed",
        "rescued",
        "4000",
        "0 of 1",
        "one",
        "four",
        "1.5 GB",
        "2 s",
    } <= words
    assert (
        sum(isinstance(shape, Polygon) for shape in chart.shapes) == 8 + 8
    )  # two stacks; a bar of 0 is not drawn


def test_the_picture_goes_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert picture.picture_path(None).parent == tmp_path
    for bad in ("x.txt", "nowhere/x.svg", str(tmp_path)):
        with pytest.raises(UsageError):
            picture.picture_path(bad)
    path = picture.picture_path("x.svg")
    replace_file(path, render(demo_chart(_result()), path.suffix))
    assert (tmp_path / "x.svg").read_text().startswith("<svg") and os.listdir(tmp_path) == ["x.svg"]
    pytest.importorskip("matplotlib")
    assert picture.picture_path("x.png").name == "x.png"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage):
        picture.picture_path("x.png")


def test_json_holds_everything() -> None:
    data = json.loads(json.dumps(as_object(_result(), "x.png", None)))
    assert data["schema"] == "legroom.demo/1" and data["picture"] == "x.png" and data["kept"] is None
    assert data["weights"][0] == {
        "when": 10.0, "act": "separate", "held": dict.fromkeys(("one", "two", "three", "four"), 600 * MB)
    }  # fmt: skip
    assert data["rescue"]["verdict"] == "killed" and data["loaders"]["rates"]["torch"] == 200.0


def test_words_of_a_child_arrive_whole_and_once(tmp_path: Path) -> None:
    ear, mouth = Ear(tmp_path / "said"), Mouth(tmp_path / "said")
    assert ear.listen() == []
    mouth.say("step", step=1)
    assert [words["step"] for words in ear.listen()] == [1] and ear.listen() == []
    with (tmp_path / "said").open("ab") as file:
        file.write(b'{"what": "step", "st')  # not yet all of it
    assert ear.listen() == []
    with (tmp_path / "said").open("ab") as file:
        file.write(b'ep": 2}\n')
    ear.listen()
    last, first = ear.last("step"), ear.first("step")
    assert last is not None and first is not None and (first["step"], last["step"]) == (1, 2)
    assert ear.last("done") is None


def test_the_best_round_counts() -> None:
    told = [{"way": "torch", "rate": 3.0}, {"way": "torch", "rate": 5.0}, {"way": "legroom", "rate": 9.0}]
    assert best_rates(told) == {"torch": 5.0, "legroom": 9.0}


def test_the_data_can_be_learnt(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "train.h5"
    assert make_dataset(path, 700) == path.stat().st_size
    assert read_plainly(path) > 0
    with h5py.File(path) as file:
        images, labels = file["images"][:], file["labels"][:]
    assert set(labels) == set(range(CLASSES)) and images.any(axis=(1, 2, 3)).all()  # the last piece too
    model = Model(seed=0, rate=0.05)
    losses = [
        model.step({"images": images[at : at + 64], "labels": labels[at : at + 64]})
        for at in range(0, 640, 64)
    ] + [model.step({"images": images[:64], "labels": labels[:64]})]
    assert losses[-1] < 0.75 * losses[0]
    again = Model(seed=1, rate=0.05)
    again.restore(model.numbers())
    batch = {"images": images[64:128], "labels": labels[64:128]}
    assert again.step(batch) == model.step(batch)


def _job(name: str, folder: Path, *heard: dict[str, object]) -> Job:
    job = Job(name, "module", (), folder, {})
    job.ear.heard += heard
    job.pss, job.rss = 143 * MB, 512 * MB
    return job


def test_bars_fit_80_columns_and_lines_say_the_same(tmp_path: Path) -> None:
    step = {"what": "step", "step": 12_345, "of": 20_000, "loss": 0.123}
    jobs = [_job("one", tmp_path, step), _job("two", tmp_path), _job("three", tmp_path, step)]
    jobs[2].notes.append("killed")
    pools = (Pool("shm", 64 * MB, 63 * MB, MB, "here"), Pool("ram", None, None, None, "nowhere", "not known"))
    view = View(12.0, "an act", pools, tuple(jobs))
    lines = [line.plain for line in bars(view, 80)]
    assert all(cells(line) <= 80 for line in lines)
    one, two, three = (
        next(line for line in lines if line.startswith(name)) for name in ("one", "two", "three")
    )
    assert "62 %" in one and "12345 / 20000" in one and "0.12" in one and one.endswith("143 MB    512 MB")
    assert "starting" in two and "killed" in three and len(one) == len(two) == len(three)
    assert "429 MB" in lines[-1]
    assert all(len(line) <= 40 for line in (text.plain for text in bars(view, 40)))
    said: list[str] = []
    screen = Lines(said.append, wrapped)
    screen.headline(0.0, "an act")
    screen.draw(view)
    screen.draw(view)  # not twice within a few seconds
    assert said[:2] == ["", "an act"] and " ".join(said).count("one 62%") == 1
    assert "together 429 MB" in " ".join(said) and "63 MB of 64 MB" in " ".join(" ".join(said).split())


def test_lines_hang_on_their_time() -> None:
    lines = wrapped("  12 s  ", "words " * 30)
    assert lines[0].startswith("  12 s  words") and all(
        line.startswith("        words") for line in lines[1:]
    )
    assert len(lines) > 1


@pytest.mark.parametrize("flags", [["--out", "x.txt"], ["--out", "/nowhere/x.svg"], ["--size", "3"]])
def test_bad_flags_are_refused_before_anything_begins(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", *flags]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(sys.platform != "linux", reason="folders are locked")
def test_what_dead_demos_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    from legroom.demo.place import _fresh, _lock, remove_old

    dead, living, kept, foreign = (_fresh(tmp_path) for _ in range(4))
    os.close(_lock(dead))  # its holder is gone
    held = _lock(living)
    (kept / "train.h5").touch()  # kept on purpose: it has no lock
    link = tmp_path / "legroom-demo-link"
    link.symlink_to(foreign)
    assert remove_old(tmp_path) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted([living, kept, foreign, link])
    os.close(held)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_child_on_a_tether_ends_with_its_parent() -> None:
    child = "from legroom.demo.tether import tether; tether(9); print('on', flush=True); input()"
    parent = (
        "import os, subprocess, sys\n"
        f"os.environ['LEGROOM_DEMO_TETHER'] = str(os.getpid())\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    deadline = 200
    while _alive(pid) and deadline:
        deadline -= 1
        subprocess.run(["sleep", "0.05"], check=True)
    assert not _alive(pid)
    orphan = {**os.environ, "LEGROOM_DEMO_TETHER": "1"}  # whoever started it has gone already
    assert subprocess.run([sys.executable, "-c", child], env=orphan, timeout=60).returncode == 137


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="a demo works on Linux")
@pytest.mark.parametrize("more", [0, 1])
def test_workers_of_a_demo_have_room_for_their_sockets(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = longest_socket(sys.platform) - TAIL
    own = len("/legroom-demo-12345678/tmp")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        parent = Path(short, "y" * (longest - own + more - len(short) - 1))
        parent.mkdir()
        monkeypatch.setattr(place, "_parents", lambda host: iter([parent]))
        made = make_place(Host(), 1, None)
        try:
            assert (made.sockets is None) is (more == 0)
            assert len(os.fsencode(made.environment({})["TMPDIR"])) <= longest
        finally:
            made.remove()
