"""Rigs leave nothing behind: not when a test fails, and not when the run is killed. And what is left is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray_rig
import rig_cleanup
import slurm_rig

HERE = Path(__file__).parent
pytestmark = [pytest.mark.nodes, pytest.mark.timeout(300)]
needs_namespaces = pytest.mark.skipif(ray_rig.why_no_namespaces() is not None, reason=str(ray_rig.why_no_namespaces()))
needs_slurm = pytest.mark.skipif(slurm_rig.why_not() is not None, reason=str(slurm_rig.why_not()))

NODES = """
import subprocess, sys, time
import ray_rig
with ray_rig.namespaces(2, rate="10mbit") as found:
    for node in found.nodes:  # one of its processes has lost its environment, as Ray's workers do
        subprocess.Popen(node.run(["env", "-i", "sleep", "98765"]))
    print(found.name, flush=True)
    time.sleep(1000)
"""
SLURM = """
import subprocess, sys, time
import rig_cleanup, slurm_rig
with slurm_rig.slurm() as environment:
    task = subprocess.Popen(["srun", "sh", "-c", "echo runs; exec env -i sleep 98765"], env=environment,
                            stdout=subprocess.PIPE)
    assert task.stdout.readline() == b"runs\\n"
    print(environment[rig_cleanup.MARK], flush=True)
    time.sleep(1000)
"""


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    "program", [pytest.param(NODES, marks=needs_namespaces, id="nodes"), pytest.param(SLURM, marks=needs_slurm, id="slurm")]
)  # fmt: skip
def test_a_run_that_is_killed_leaves_nothing(program: str, number: signal.Signals) -> None:
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert run.stdout is not None
    with run, run.stdout:
        name = run.stdout.readline().strip()
        found = rig_cleanup.traces(name)
        kinds = {one.partition(" ")[0] for one in found}
        assert kinds >= ({"process", "network", "link", "mount"} if program is NODES else {"process", "file"}), found
        sleeping = _sleeping()
        assert sleeping
        os.kill(run.pid, number)
    _until(lambda: not rig_cleanup.traces(name))
    _until(lambda: not any(map(rig_cleanup.is_running, sleeping)))


def _sleeping() -> list[int]:
    """The processes ``sleep 98765``: nothing but their namespaces shows to which rig they belong."""
    done = subprocess.run(["pgrep", "-x", "-f", "sleep 98765"], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


@needs_namespaces
def test_a_test_that_fails_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), ray_rig.namespaces(1) as found:
        raise ZeroDivisionError
    assert not rig_cleanup.traces(found.name)


@pytest.mark.parametrize("left", ["a file", "a process"])
def test_what_is_left_fails_the_rig(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig_cleanup, "_SECONDS", 0.5)
    monkeypatch.setattr(rig_cleanup, "_REMOVER", [sys.executable, "-c", "import sys; sys.stdin.read()"])
    process = None
    with pytest.raises(AssertionError, match="the rig left behind: .*" + left.split()[1]), rig_cleanup.named() as name:
        if left == "a file":
            Path(f"/tmp/{name}").touch()
        else:
            process = subprocess.Popen(["sleep", "98765"], env={**os.environ, rig_cleanup.MARK: name})
    rig_cleanup.remove(name)
    assert not rig_cleanup.traces(name)
    if process is not None:
        process.wait()


@needs_namespaces
def test_the_next_run_removes_what_was_killed_with_its_remover(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = f"{rig_cleanup._PREFIX}{ended.pid}a"
    subprocess.run(["ip", "netns", "add", f"{name}-0"], check=True)
    process = subprocess.Popen(["ip", "netns", "exec", f"{name}-0", "sleep", "98765"])
    try:
        _until(lambda: f"process {process.pid}" in rig_cleanup.traces(name))
        with rig_cleanup.named():
            assert not rig_cleanup.traces(name)
    finally:
        rig_cleanup.remove(name)
        process.wait()
