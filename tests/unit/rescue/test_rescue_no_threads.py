"""A supervised job where ``ulimit -v`` leaves the supervisor no room for threads: nothing of its output is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from no_room_for_threads import run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

SUPERVISED = """
import subprocess, sys, legroom.cli.main, legroom.cli.run, legroom.rescue.supervisor
import legroom.rescue.job_attempt, legroom.advice.findings, legroom.probe.snapshot
leave_no_room_for_threads()
sys.argv = ["legroom", "run", *{options!r}, "--", *{command!r}]
sys.exit(legroom.cli.main.main())
"""


def _supervised(tmp_path: Path, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run_program(SUPERVISED.format(options=list(options), command=list(command)), tmp_path)


def test_both_streams_pass_and_the_cause_is_found_in_them(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for n in range(20000): print('line', n)\n"
        "print('to stderr', file=sys.stderr)\n"
        "raise MemoryError('no memory left')\n"
    )
    ran = _supervised(tmp_path, sys.executable, "-c", code, options=("--json",))
    assert ran.returncode == 1, ran.stderr[-2000:]
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["verdict"] == "ram-allocation", report
    # With --json the job's stdout goes to stderr.
    lines = ran.stderr.splitlines()
    assert [line for line in lines if line.startswith("line ")] == [f"line {n}" for n in range(20000)]
    assert "to stderr" in lines and "MemoryError: no memory left" in lines
    assert any("between two readings: ulimit -v" in line for line in lines), lines[:5]


def test_a_job_that_leaves_a_process_with_its_output_open_ends(tmp_path: Path) -> None:
    ran = _supervised(tmp_path, "sh", "-c", "sleep 30 & echo done; exit 0")
    assert ran.returncode == 0 and ran.stdout == "done\n", ran


def test_a_reader_that_went_away_ends_the_job_as_without_a_supervisor(tmp_path: Path) -> None:
    program = SUPERVISED.format(options=["--quiet"], command=["sh", "-c", "while echo y; do :; done; echo no > left"])
    text = f"import os\nread, write = os.pipe()\nos.dup2(write, 1)\nos.close(read)\nos.close(write)\n{program}"
    ran = run_program(text, tmp_path)
    assert ran.returncode != 0, ran


def test_disks_that_were_not_read_leave_a_bus_error_unexplained(tmp_path: Path) -> None:
    ran = _supervised(tmp_path, "sh", "-c", "kill -BUS $$", options=("--json", "--quiet"))
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["verdict"] == "unknown", report
    assert any(line.startswith("disk usage: ulimit -v") for line in report["evidence"]), report
