"""explain: a verdict from a file or a pipe, as text and as JSON; a clear error for what cannot be read."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from legroom.cli.main import run

LOG = "Traceback (most recent call last):\n  File 'a'\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"


def test_a_file_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    assert run(["explain", "--json", str(log)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "legroom.explain/1"
    assert report["verdict"] == "gpu-oom" and report["confidence"] <= 0.85
    assert any("CUDA out of memory" in line for line in report["evidence"]) and report["fix"]


def test_a_pipe_as_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "legroom", "explain", "-"], input=LOG, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("gpu-oom, 85% sure") and "  do:  " in done.stdout
    assert all(len(line) <= 100 or " " not in line.strip() for line in done.stdout.splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/fd and /dev/zero")
def test_a_pipe_has_many_names_and_what_has_no_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(path: str, status: int = 0) -> str:
        assert run(["explain", path]) == status
        shown = capsys.readouterr()
        return shown.err if status else shown.out

    fifo, log = str(tmp_path / "fifo"), tmp_path / "train.log"
    os.mkfifo(fifo)
    log.write_text(LOG * 50_000)  # more than a pipe holds
    with subprocess.Popen(["sh", "-c", 'sleep 0.2; exec cat "$0" > "$1"', str(log), fifo]):
        assert told(fifo).startswith("gpu-oom")
    monkeypatch.setattr("legroom.system.open_file_or_pipe._WRITER_WITHIN", 0.1)
    assert "no process writes into this FIFO" in told(fifo, 2)
    for text, verdict in ((LOG, "gpu-oom"), ("", "unknown")):  # as the shell writes <(COMMAND)
        with subprocess.Popen(["printf", "%s", text], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert told(f"/dev/fd/{writer.stdout.fileno()}").startswith(verdict)
    for device in ("/dev/zero", "/dev/urandom"):
        assert "a device" in told(device, 2)
        with open(device) as endless:
            done = subprocess.run([sys.executable, "-m", "legroom", "explain", "-"], stdin=endless, capture_output=True)
        assert done.returncode == 2 and b"a device" in done.stderr
    assert told("/dev/null").startswith("unknown")
    assert told("/proc/self/status").startswith("unknown")  # of no size


@pytest.mark.parametrize("content", [b"", b"epoch 1\nloss 0.3\n", bytes(range(256)) * 40])
def test_a_log_without_evidence_is_reported_as_such(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "silent.log"
    log.write_bytes(content)
    assert run(["explain", "--json", str(log)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "unknown" and report["confidence"] <= 0.1
    assert [one["verdict"] for one in report["likely"]] == ["ram-oom-kill", "killed", "not-memory"]
    assert all(one["why"] for one in report["likely"])
    assert [step.splitlines()[-1] for step in report["fix"]] == ["legroom run -- COMMAND …"]
    told = " ".join([report["summary"], *report["evidence"], *report["fix"]])
    assert "not for want of memory" not in told and "no part in this" not in told and "not memory" not in told
    assert ("the log is empty" in report["evidence"]) is not bool(content)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("train.py", b"raise RuntimeError('CUDA out of memory')\nMemoryError\n", "train.py is source code"),
        ("core", bytes(range(256)) * 40 + b"\nMemoryError\n", "is binary"),
        ("train.log.gz", gzip.compress(LOG.encode()), "zcat FILE | legroom explain -"),
    ],
)
def test_what_is_not_a_log_is_not_judged(
    name: str, content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(["explain", "--json", str(tmp_path / name)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "unknown" and "not the log of a job" in report["summary"]
    assert any(told in line for line in report["evidence"])


@pytest.mark.parametrize("around", ["{}", "\0\0\0\0{}", "\x1b[31m{}\x1b[0m\r\n"])
def test_a_log_with_zeros_or_colours_is_one(around: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    for encoding in ("utf-8", "utf-16"):
        log.write_bytes(around.format(LOG).encode(encoding))
        assert run(["explain", "--json", str(log)]) == 0
        assert json.loads(capsys.readouterr().out)["verdict"] == "gpu-oom"
    log.write_bytes(b"\0" * 100_000 + LOG.encode())  # truncated by another program while it was written
    assert run(["explain", "--json", str(log)]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "gpu-oom"


def test_a_bug_is_still_reported_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "bug.log"
    log.write_text("Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n")
    assert run(["explain", "--json", str(log)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "not-memory" and "does not name a resource" in report["summary"]
    assert report["likely"] == []


def test_unknown_as_text_names_the_likely_causes_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "killed.log"
    log.write_text("step 1\nKilled\n")
    assert run(["explain", str(log)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("unknown\n") and "% sure" not in told
    assert 0 < told.index("or:  ram-oom-kill: ") < told.index("or:  killed: ")


def test_an_unreadable_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(tmp_path / "no.log")]) == 2
    assert "cannot read the log" in capsys.readouterr().err
    assert run(["explain", "--json", str(tmp_path)]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "unreadable-source"


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.npy", bytes(range(256)) * 40, "is binary"),
        ("train.py", b"raise RuntimeError('CUDA out of memory')\n", "source code"),
        ("train.log", "loss 0.3 \x1b[32mok\x1b[0m 损失\r\n".encode() * 20, ""),
        ("train.log", "loss 0.3 损失\r\n".encode("gb18030") * 20, ""),
        ("train.log", "loss 0.3\r\n".encode("utf-16") * 20, ""),
    ],
)
def test_a_file_that_is_not_a_log_is_named(
    name: str, content: bytes, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(["explain", "--json", str(tmp_path / name)]) == 0
    evidence = " ".join(json.loads(capsys.readouterr().out)["evidence"])
    assert word in evidence if word else "the output of the job" not in evidence
