"""`legroom.leak.watch`, and what a `legroom watch` beside it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import legroom

GROW = """
import dataclasses, json, os, sys, threading, time
from pathlib import Path
import legroom
from legroom.errors import UsageError
from legroom.leak import memory_recorder
from legroom.leak.leak_report import publish
from legroom.monitor.script_marks_and_steps import AnnotationReader
from legroom.probe.host_files_and_syscalls import Host

memory_recorder._WIDER = 0.0  # after a pause at the beginning, samples as often as without it

def grow():
    kept = []
    for _ in range(160):
        kept.append(bytearray(50_000))
        legroom.step()
        time.sleep(0.003)

folder = Path(sys.argv[1])
"""
BLOCK = """
threads = threading.active_count()
with legroom.leak.watch() as growth:
    grow()
growth.page(folder / "page.html")
try:
    with growth:
        again = "started"
except UsageError:
    again = "refused"
sites = [dataclasses.asdict(site) for site in growth.sites]
more, left = threading.active_count() - threads, memory_recorder.running_recorder()
print(json.dumps({"sites": sites, "text": str(growth), "again": again, "threads": more, "left": left}))
"""
BESIDE = """
recorder = memory_recorder.Recorder(str(folder), share=100.0)  # samples are not fewer where other programs use the processor
recorder.start()
grow()
publish(next(folder.glob("*.jsonl")))
deadline, steps = time.monotonic() + 60, ()
while not (steps and steps[0].steps > 160) and time.monotonic() < deadline:  # its thread writes them once a second
    legroom.step()
    time.sleep(0.05)
    steps = AnnotationReader(Host()).read(1.0, [os.getpid()]).process_steps
recorder.stop()
rows = AnnotationReader(Host()).read(1.0, [os.getpid()]).growing
said = folder / "legroom-said" / f"{os.getpid()}.growing.json"
said.write_text('{"schema": "legroom.growing/1", "sites": [1]}')
damaged = AnnotationReader(Host()).read(1.0, [os.getpid()]).growing
rows = [dataclasses.asdict(row) for row in rows]
steps = [dataclasses.asdict(row) for row in steps]
print(json.dumps({"pid": os.getpid(), "rows": rows, "damaged": damaged, "steps": steps}))
"""

few_samples = pytest.mark.load_sensitive(reason="steps of a few ms: a pause of the process leaves too few samples")


def _run(program: str, folder: Path) -> dict[str, Any]:
    """In a process of its own, without the objects and threads of other tests; what it prints."""
    script = folder / "train.py"
    script.write_text(GROW + program)
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@few_samples
def test_a_block_names_its_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = _run(BLOCK, tmp_path)
    (site,) = found["sites"]
    assert site["holder"] == "kept" and site["lines"][0]["file"] == str(tmp_path / "train.py")
    assert "kept.append" in GROW.splitlines()[site["lines"][0]["line"] - 1]
    assert "kept in kept (bytearray)" in " ".join(found["text"].split())
    assert "kept" in (tmp_path / "page.html").read_text()
    assert found["left"] is None and found["threads"] == 0
    assert found["again"] == "refused"


def test_a_step_without_a_recording_does_nothing() -> None:
    legroom.step()
    legroom.step(5)


@few_samples
def test_a_watch_is_told_which_lines_grow(tmp_path: Path) -> None:
    found = _run(BESIDE, tmp_path)
    (row,) = found["rows"]
    assert row["pid"] == found["pid"] and "kept" in row["what"] and row["rate"] > 40_000 and row["per"] == "step"
    assert found["damaged"] == []
    (steps,) = found["steps"]
    assert steps["pid"] == found["pid"] and steps["steps"] > 160
