"""The examples run as their words say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FIRST_LOOK = Path(__file__).parents[2] / "examples" / "first_look" / "first_look.py"


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_first_look() -> None:
    command = [sys.executable, str(FIRST_LOOK), "--size", "8MB", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "same data in all        yes" in done.stdout


@pytest.mark.parametrize("flags", [["--size", "eight"], ["--processes", "0"], ["--what"]])
def test_first_look_refuses_bad_flags(flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(FIRST_LOOK), *flags], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "usage:" in done.stderr
