"""The clean-up after tests that kill processes: only semaphores that no process will finish."""

from __future__ import annotations

import os
import time
from pathlib import Path

from killed_semaphores import remove_killed_semaphores


def test_only_unfinished_semaphores_of_this_run_are_removed(tmp_path: Path) -> None:
    now = time.time()
    for name, size, age in (
        ("sem.YT1ILD", 32, 60), ("sem.mp-a1b2c3", 32, 60), ("sem.Zz1234", 31, 60), ("sem.Aa0000", 32, 600), ("sem.Bb1111", 32, 0),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(bytes(size))
        os.utime(tmp_path / name, (now - age, now - age))
    assert remove_killed_semaphores(now - 120, tmp_path) == ["sem.YT1ILD"]
    assert len(list(tmp_path.iterdir())) == 4
