"""Standard streams that are closed, full or unread: one sentence and a status that is no answer, or nothing at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs import TREES

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
BOX = f"--root {TREES / sorted(path.name for path in TREES.iterdir() if path.is_dir())[0]}"
VERBS = ("--help", f"doctor --json {BOX}", f"doctor {BOX}", "explain /dev/null", "watch --once --json")


def _shell(verb: str, streams: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m legroom {verb} {streams}"
    places = {"LEGROOM_SHM": str(tmp_path), "LEGROOM_DIR": str(tmp_path)}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | places,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        check=False,
    )


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("streams", "why"), [(">&-", "it is closed"), (">/dev/full", "No space left")])
def test_an_answer_that_cannot_be_written_is_no_answer(verb: str, streams: str, why: str, tmp_path: Path) -> None:
    ended = _shell(verb, streams, tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("legroom: cannot write to standard output") and why in ended.stderr
    assert "[cannot-write]" in ended.stderr and len(ended.stderr.splitlines()) == 3


@pytest.mark.parametrize("streams", ["| true", "2>&1 | true"])
def test_a_reader_that_has_had_enough_is_met_with_silence(streams: str, tmp_path: Path) -> None:
    ended = _shell(f"doctor --json {BOX}", streams, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full"])
def test_standard_error_that_takes_nothing_changes_no_answer(streams: str, tmp_path: Path) -> None:
    ended = _shell("cache info nowhere.h5 --json", streams, tmp_path)
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["error"]["code"] == "not-loaded"


def test_all_three_closed_is_a_status(tmp_path: Path) -> None:
    assert _shell(f"doctor {BOX}", "<&- >&- 2>&-", tmp_path).returncode == 2


def test_standard_input_that_is_closed(tmp_path: Path) -> None:
    assert _shell(f"doctor {BOX}", "<&-", tmp_path).returncode == 0
    ended = _shell("explain -", "<&-", tmp_path)
    assert ended.returncode == 2 and "[unreadable-source]" in ended.stderr


def test_a_command_that_prints_nothing_needs_no_output(tmp_path: Path) -> None:
    assert _shell("run true", ">&-", tmp_path).returncode == 0


def test_a_file_opened_later_does_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    program = "from legroom.cli import language_and_streams; language_and_streams.guard_streams(); f = open('x', 'w'); assert f.fileno() > 2, f"
    ended = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{program}" <&- >&-'], cwd=tmp_path, timeout=240, check=False
    )
    assert ended.returncode == 0


def test_help_imports_nothing_slow_of_the_standard_library() -> None:
    program = (
        "import sys; from legroom.cli.main import run; run(['--help']); "
        "print(sorted({'shutil', 'locale', 'json', 'subprocess', 'asyncio'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.strip() == "[]" and "doctor" in done.stdout
