"""`legroom plan`: seed 000's figures, running processes, snippets, bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rigs import TREES

import legroom
from legroom.cli.main import run
from legroom.errors import UsageError

MB, GB = 1 << 20, 1 << 30
BARE = str(TREES / "bare-v2")  # whose /dev/shm others use too
CLEAN = str(TREES / "docker-v2")
SEED = ("--gpus", "8", "--jobs-per-gpu", "6", "--per-process", "5.75MB")


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["plan", *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(_run(capsys, "--json", *arguments)[1])
    return report


def test_the_seeds_figures(capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, *SEED, "--root", CLEAN)
    assert report["schema"] == "legroom.plan/1"
    assert report["need"]["shm"] == 276 * MB
    assert set(report["need"]) == {"shm", "ram", "gpu", "pinned", "fds", "disk"}
    sizes = report["recommend"]
    assert (sizes["minimum"], sizes["recommended"], sizes["conservative"]) == (512 * MB, GB, 2 * GB)
    assert [row["jobs_per_gpu"] for row in report["table"]] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert report["table"][-1] == {"jobs_per_gpu": 12, "processes": 96, "need": 552 * MB, "recommended": 2 * GB}
    assert report["verdict"] in ("fits", "too-big") and set(report["fits_now"]) == {"jobs_per_gpu"}
    assert isinstance(report["settings"], dict)


@pytest.mark.parametrize("tree", sorted(path.name for path in TREES.iterdir() if path.is_dir()))
def test_every_recorded_machine_gets_a_plan(tree: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = ("--root", str(TREES / tree))
    status, text, err = _run(capsys, *SEED, *root)
    report = _json(capsys, *SEED, *root)
    assert err == "" and status == (1 if report["verdict"] == "too-big" else 0)
    assert "276 MB" in text and "None" not in text and "Traceback" not in text
    long = [line for line in text.splitlines() if len(line) > 80]
    assert all(max(map(len, line.split())) > 60 for line in long), long
    ram = report["recommend"]["capped_by"]
    if ram is not None:
        assert "capped" in " ".join(text.split())


def test_what_others_hold_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, *SEED, "--root", BARE)
    others = report["now"]["others"]
    assert others > 256 * MB and report["need"]["shm"] == 276 * MB
    assert report["recommend"]["minimum"] == 1 << (276 * MB + others - 1).bit_length()
    assert "by other processes now" in " ".join(_run(capsys, *SEED, "--root", BARE)[1].split())


def test_text_shows_how_it_was_calculated(capsys: pytest.CaptureFixture[str]) -> None:
    text = _run(capsys, *SEED, "--root", str(TREES / "docker-v2"))[1]
    flat = " ".join(text.split())
    assert "8 GPUs × 6 jobs = 48 processes" in flat and "5.75 MB per process × 48; given by you" in flat
    assert "minimum 512 MB" in flat and "recommended 1 GB" in flat and "conservative 2 GB" in flat
    assert "--shm-size=1G" in flat and "check: df -h /dev/shm" in flat


@pytest.mark.parametrize(
    ("language", "title", "workers"),
    [
        ("en", "Need: 1 GPU × 1 job = 1 process", "1 worker × 2 + 3"),
        ("zh", "需求：1 张显卡 × 1 个任务 = 1 个进程", "1 个 worker × 2 + 3"),
    ],
)
def test_one_is_no_plural(language: str, title: str, workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", "1", "--sample-bytes", "1MB", "--batch", "4", "--workers", "1", "--prefetch", "2")
    text = _run(capsys, *options, "--root", BARE, "--lang", language)[1]
    assert title in text and workers in " ".join(text.split()), text


def test_a_predicted_need_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "images.npy"
    np.save(path, np.zeros((1024, 64, 64, 3), np.uint8))
    options = ("--gpus", "2", "--data", str(path), "--batch", "16", "--workers", "4", "--prefetch", "2")
    report = _json(capsys, *options, "--root", BARE)
    one = 11 * -(-(16 * 12288 + 64) // 4096) * 4096 + 40 * 4096
    assert report["need"]["shm"] == 2 * one
    assert any("images.npy" in term["source"] for term in report["terms"])
    assert any("float32" in note for note in report["notes"])
    shared = _json(capsys, *options, "--shared", "--root", BARE)
    assert shared["need"]["shm"] == 2 * one + 1024 * 12288
    both = _json(capsys, *options, "--val-workers", "4", "--ranks", "2", "--root", BARE)
    assert both["need"]["shm"] == 2 * 2 * 2 * one
    ours = _json(capsys, *options, "--loader", "legroom", "--root", BARE)
    assert ours["need"]["shm"] == 2 * 40 * 4096 and ours["need"]["ram"] > ours["need"]["shm"]


def test_a_model_on_the_host_counts(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", "1", "--params", "125M", "--optimizer", "adam", "--root", BARE)
    assert _json(capsys, *options)["need"]["ram"] == 125_000_000 * 16


HOLD = """
import mmap, os, sys, time
mine = mmap.mmap(-1, 3 << 20)
mine[:] = bytes(3 << 20)  # shared, resident, and not in /dev/shm: RssShmem has it, /dev/shm has not
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.unlink(sys.argv[1])
os.posix_fallocate(file, 0, 1 << 20)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
def test_running_processes_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    mark = f"legroom-plan-test-{os.getpid()}"
    children = [
        subprocess.Popen([sys.executable, "-c", HOLD, f"/dev/shm/{mark}-{n}"], stdout=subprocess.PIPE) for n in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        by_match = _json(capsys, "--gpus", "8", "--jobs-per-gpu", "3", "--match", mark)
        pids = [str(child.pid) for child in children]
        by_pid = _json(capsys, "--gpus", "8", "--jobs-per-gpu", "3", "--measure", *pids)
        text = _run(capsys, "--gpus", "8", "--match", mark)[1]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    for report in (by_match, by_pid):
        assert report["need"]["shm"] == 24 * MB
        assert report["need"]["ram"] > report["need"]["shm"]
        for one in report["now"]["measured"]:
            assert one["shm"] == MB and one["rss_shmem"] >= 3 * MB
    assert len(by_match["now"]["measured"]) == 2
    assert "RssShmem counts" in text


SHARE = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.posix_fallocate(file, 0, 1 << 20)
held = mmap.mmap(file, 1 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
def test_what_running_processes_share_was_measured_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = f"legroom-plan-test-{os.getpid()}"
    shared = Path(f"/dev/shm/{mark}-shared")
    children = [
        subprocess.Popen([sys.executable, "-c", SHARE, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    data = tmp_path / "images.npy"
    np.save(data, np.zeros((64, 1024), np.uint8))
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        alone = _json(capsys, "--gpus", "1", "--match", mark)
        both = _json(capsys, "--gpus", "1", "--match", mark, "--data", str(data), "--shared")
    finally:
        for child in children:
            child.communicate(timeout=240)
        shared.unlink(missing_ok=True)
    (term,) = (one for one in alone["terms"] if "shared datasets" in one["what"])
    assert (term["bytes"], term["source"]) == (MB, "measured on running jobs: 2")
    (term,) = (one for one in both["terms"] if "shared datasets" in one["what"])
    assert term["source"] == "measured on running jobs: 2, read from the data file"


@pytest.mark.parametrize("kind", ["docker", "compose", "kubernetes", "kubernetes-warm", "slurm", "fstab"])
def test_a_snippet_is_all_that_is_printed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *SEED, "--emit", kind, "--root", CLEAN)
    assert status == 0 and err == ""
    if kind in ("compose", "kubernetes"):
        assert yaml.safe_load(out)
    if kind == "kubernetes-warm":
        assert yaml.safe_load(out)["kind"] == "DaemonSet" and "legroom cache load" in out
    assert {"docker": "--shm-size=1g", "fstab": "size=1G"}.get(kind, "") in out
    report = json.loads(_run(capsys, *SEED, "--emit", kind, "--json", "--root", CLEAN)[1])
    assert report["emit"]["text"] + "\n" == out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--gpus", "0", "--per-process", "1MB"),
        ("--jobs-per-gpu", "-1", "--per-process", "1MB"),
        ("--per-process", "-5MB"),
        ("--per-process", "many"),
        ("--per-process", "1MB", "--ranks", "0"),
        ("--sample-bytes", "1MB", "--batch", "0"),
        ("--sample-bytes", "1MB"),
        ("--batch", "4"),
        ("--sample-bytes", "1MB", "--batch", "4", "--workers", "-2"),
        ("--sample-bytes", "1MB", "--batch", "4", "--workers", "2", "--prefetch", "0"),
        ("--measure", "999999999"),
        ("--measure", "1", "999999999"),
        ("--per-process", "1MB", "17"),
        ("--match", "no such training as this [0-9]{9}"),
        ("--match", "("),
        ("--data", "/no/such/file.h5", "--batch", "4"),
        ("--params", "a few"),
        ("--per-process", "1MB", "--emit", "nomad"),
    ],
)
def test_bad_input_is_exit_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *arguments)
    assert status == 2 and out == "" and err and "Traceback" not in err


def test_a_measure_and_a_statement_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--measure", str(os.getpid()), "--per-process", "1MB")
    assert status == 2 and "cannot be combined" in err


def test_gpus_are_counted_where_none_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, "--per-process", "1MB", "--root", BARE)
    assert report["gpus"] >= 1
    assert any("GPU" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ((), {}),
        (("--sample-bytes", "1MB"), {"sample_bytes": "1MB"}),
        (("--batch", "8"), {"batch_size": 8}),
        (("--measure", str(os.getpid()), "--per-process", "1MB"), {"measure": [os.getpid()], "per_process": "1MB"}),
    ],
)
def test_advice_names_arguments_in_python_and_options_on_the_command_line(
    arguments: tuple[str, ...], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        legroom.plan(**settings)
    advice = " ".join(caught.value.fix)
    assert re.search(r"\b[a-z_]+=", advice) and "--" not in advice
    assert run(["plan", *arguments]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "--" in shown and not re.search(r"\b[a-z_]+=", shown)


def test_notes_name_arguments_in_python_and_options_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    notes = " ".join(legroom.plan(per_process="1MB", gpus=2, ranks=2).notes)
    assert "process_ram='4GB'" in notes and "nccl='33MB'" in notes and "--" not in notes
    run(["plan", "--per-process", "1MB", "--gpus", "2", "--ranks", "2"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--process-ram 4GB or --measure PID" in shown and "process_ram=" not in shown


def test_a_shared_copy_of_no_data_is_refused() -> None:
    with pytest.raises(UsageError, match="shared=True needs a data file") as caught:
        legroom.plan(gpus=1, batch_size=4, num_workers=1, sample_bytes=100, shared=True)
    assert caught.value.fix


def test_a_need_above_ram_is_no_size_and_needs_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run(capsys, "--per-process", "500GB", "--root", CLEAN)
    assert status == 1 and "no change needed" not in out and "0.0 ×" not in out
    for name in ("minimum", "recommended", "conservative"):
        assert re.search(rf"^  {name} +above RAM$", out, re.MULTILINE), out
