"""Measures a named dataset, and runs a trial, in a fork of this process, which has torch, not in one that imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def use_forks(replace: Callable[[Any, str, Any], None]) -> None:
    """Replace what starts a new process, by the given function: that of a test undoes it."""
    from legroom.loader.measure import dataloader_trial, measure_in_child
    from legroom.loader.measure.start_memory_guard import GuardedRun, fork_guarded

    mains = {child.__name__: child.main for child in (measure_in_child, dataloader_trial)}

    def in_fork(line: list[str], folder: Path, timeout: float, environment: object = None) -> GuardedRun:
        assert line[1] == "-m"
        return fork_guarded(lambda: mains[line[2]](*line[3:]), folder, timeout)

    if sys.platform == "linux":
        replace(measure_in_child, "run_guarded", in_fork)
