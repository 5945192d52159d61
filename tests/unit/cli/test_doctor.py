"""doctor on recorded machines and with bad input: a clear answer, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rigs import TREES

from legroom.cli.main import run
from legroom.cli.text_layout import pool_line
from legroom.records.machine import Pool

ALL = sorted(path.name for path in TREES.iterdir() if path.is_dir())
FIELDS = {"name", "size", "used", "free", "source"}


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["doctor", *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.mark.parametrize("tree", ALL)
def test_every_recorded_machine_gets_an_answer(tree: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, "--json", "--root", str(TREES / tree))
    report = json.loads(out)
    assert err == "" and report["schema"] == "legroom.doctor/1"
    critical = [finding["code"] for finding in report["findings"] if finding["severity"] == "critical"]
    assert status == (1 if critical else 0)
    for pool in report["pools"]:
        assert pool.keys() >= FIELDS
        if pool["size"] is None:
            assert pool["reason"], pool
    for finding in report["findings"]:
        assert finding.keys() == {"code", "severity", "message", "why", "fix"}
    status_again, text, _ = _run(capsys, "--root", str(TREES / tree))
    assert status_again == status
    assert "None" not in text and "Traceback" not in text
    for pool in report["pools"]:
        if pool["size"] is None:
            assert any(line.split()[:1] == [pool["name"]] and "unknown" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("tree", "size"), [("docker-v1", 8 << 30), ("docker-v2", 8 << 30), ("kubernetes-ancestor", 4 << 30)]
)
def test_ram_is_what_the_cgroup_allows(tree: str, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(_run(capsys, "--json", "--root", str(TREES / tree))[1])
    assert {pool["name"]: pool["size"] for pool in report["pools"]}["ram"] == size


@pytest.mark.parametrize("tree", ALL)
@pytest.mark.parametrize("plain", [True, False])
def test_fits_eighty_columns(
    tree: str, plain: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = _run(capsys, "--root", str(TREES / tree), *(["--plain"] if plain else []))[1]
    long = [line for line in text.splitlines() if len(line) > 80 and " " in line.strip()]
    # Only an unbreakable word, such as a path, and a command may stick out. Recorded files that are old, as in an
    # unpacked sdist, have one that removes them.
    assert all(max(map(len, line.split())) > 60 or line.split()[0] == "rm" for line in long), long
    if plain:
        assert "█" not in text and "░" not in text


def test_a_root_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = _run(capsys, "--root", str(tmp_path / "nowhere"))
    assert status == 2 and out == "" and "[no-such-root]" in err and "does not exist" in err
    status, out, _ = _run(capsys, "--json", "--root", str(tmp_path / "nowhere"))
    assert status == 2 and json.loads(out)["error"]["code"] == "no-such-root"


def test_an_empty_root_is_all_unknown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "recording.json").write_text("{}")
    status, out, _ = _run(capsys, "--json", "--root", str(tmp_path))
    report = json.loads(out)
    assert status == 0
    for pool in report["pools"]:
        assert pool["used"] is None and pool["size"] in (None,), pool
    _, text, _ = _run(capsys, "--root", str(tmp_path))
    assert "no resource is running out" not in text and "No findings, but shm, ram could not be read." in text


@pytest.mark.parametrize("nonsense", ["not json", "[]", "\x00\x01"])
def test_a_broken_recording_is_refused(nonsense: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "recording.json").write_text(nonsense)
    status, _, err = _run(capsys, "--root", str(tmp_path))
    assert status == 2 and "recording.json" in err


def test_a_pid_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--job", "999999999")
    assert status == 2 and "[no-such-process]" in err


def test_a_pattern_that_matches_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--match", "no such training as this [0-9]{9}")
    assert status == 2 and "[nothing-matches]" in err


def test_a_pattern_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--match", "(")
    assert status == 2 and "(" in err


def test_pid_and_match_together_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--pid", "1", "--match", "x")
    assert status == 2 and "cannot be combined" in err


def test_an_unknown_command_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docter"]) == 2
    assert "Did you mean 'doctor'?" in capsys.readouterr().err


def test_every_process_that_matches_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    mark = f"rank-of-a-job-{time.time_ns()}"
    line = [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()", mark]
    ranks = [subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(8)]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline()
        report = json.loads(_run(capsys, "--json", "--match", mark)[1])
        assert {one["pid"] for one in report["jobs"]} == {rank.pid for rank in ranks}
        assert report["job"] == report["jobs"][0]
        text = _run(capsys, "--match", mark)[1]
        assert "8 jobs match" in text and all(f"Job {rank.pid} " in text for rank in ranks)
    finally:
        for rank in ranks:
            rank.communicate()


def test_a_job_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "train.py", "--batch_size", "32", "--num_workers=4"]
    )
    try:
        status, out, _ = _run(capsys, "--json", "--pid", str(child.pid))
        text = _run(capsys, "--job", str(child.pid))[1]
    finally:
        child.kill()
        child.wait()
    job = json.loads(out)["job"]
    assert status in (0, 1) and job["pid"] == child.pid
    assert {"batch", "workers"} <= job["flags"].keys()
    assert job["held"]["ram"] > 0 and job["binds"]
    assert f"Job {child.pid}" in text and "batch" in text and "32" in text


@pytest.mark.skipif(os.name == "nt", reason="pipes differ")
@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["doctor"], ["--help"]])
def test_a_closed_pipe_is_no_traceback(arguments: list[str]) -> None:
    script = " ".join([sys.executable, "-m", "legroom", *arguments]) + " | true"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = _run(capsys, "--root", str(TREES / ALL[0]))[1]
    assert "\x1b" not in text
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    from legroom.cli.text_layout import paint

    assert paint("x", "critical").startswith("\x1b[31m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "critical") == "x"


def test_what_a_file_system_keeps_back_is_named() -> None:
    line = pool_line(Pool("disk", 250 << 30, 30 << 30, 70 << 30, ""), plain=True)
    assert "150 GB" in line.splitlines()[1]
    assert len(pool_line(Pool("disk", 250 << 30, 30 << 30, 220 << 30, ""), plain=True).splitlines()) == 1
