"""The page of measured figures is what the result files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "bench/tables.py", "--check"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
