"""`legroom demo` from start to end, and interrupted: it measures what it shows, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import rigs

from legroom.demo.demo_setup import remove_leftovers

PATIENCE = 240.0
MB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the demo measures memory by /proc")


def _start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """A demo whose every file lies below ``folder``."""
    command = [sys.executable, "-m", "legroom", "demo", "--quick", *options]
    environment = {**os.environ, "LEGROOM_DIR": str(folder), "HOME": str(folder)}
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _of(folder: Path) -> list[str]:
    """Command lines of living processes that name the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in command:
                found.append(command)
    return found


def _left(folder: Path) -> list[str]:
    """What is in the folder apart from the picture, and what demos have in /dev/shm."""
    return [name for name in os.listdir(folder) if not name.endswith((".png", ".svg"))] + _in_shm()


def _in_shm() -> list[str]:
    return [str(path) for path in Path("/dev/shm").glob("legroom-demo-*")]


def _wait(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"{words!r} was never printed")


@pytest.mark.soak
def test_the_demo_measures_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    process = _start(tmp_path, "--json", "--out", str(tmp_path / "demo.svg"))
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    data = json.loads(out)
    assert data["schema"] == "legroom.demo/1"
    _check_trainings(data)
    _check_loaders(data)
    assert Path(data["picture"]).read_text().startswith("<svg")
    assert "killed on purpose" in err and all(len(line) <= 80 for line in err.splitlines())
    assert _left(tmp_path) == [] and _of(tmp_path) == []


def _check_trainings(data: dict[str, Any]) -> None:
    assert [training["name"] for training in data["trainings"]] == ["one", "two", "three", "four"]
    assert all(training["finished"] for training in data["trainings"])
    assert len({training["steps"] for training in data["trainings"]}) == 1
    rescue = data["rescue"]
    assert rescue["verdict"] == "killed" and rescue["signal"] == 9
    assert 0 < rescue["resumed_from"] <= rescue["at_step"] and rescue["resumed_from"] < data["trainings"][0]["steps"]
    assert [training["starts"] for training in data["trainings"]] == [1, 1, 2, 1]
    memory, held = data["memory"], data["data_bytes"]
    assert memory["separate"] > 4 * held and held < memory["shared"] < memory["separate"]
    for act in ("separate", "shared"):
        totals = [sum(w["held"].values()) for w in data["weights"] if w["act"] == act and len(w["held"]) == 4]
        assert memory[act] == max(totals)
    opening = data["opening"]
    assert 0 < opening["later"] <= opening["later_ready"] and opening["plain"] > 0 and opening["at_once"] > 0


def _check_loaders(data: dict[str, Any]) -> None:
    found = data["loaders"]
    assert set(found["rates"]) == {"torch", "legroom", "batches"} and all(rate > 0 for rate in found["rates"].values())
    assert data["shm_own"] or data["shm_why"]
    if rigs.why_not_mount() is None:
        assert data["shm_own"] and data["shm_size"] == 64 * MB
        theirs, ours = found["trials"]
        assert theirs["loader"] == "torch" and theirs["died"] and theirs["delivered"] < theirs["of"]
        assert theirs["stood_still"] or theirs["verdict"] == "shm-full"
        assert ours["loader"] == "legroom" and not ours["died"] and ours["delivered"] == ours["of"]
    else:
        assert found["trials"] or found["why"]


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: int, status: int) -> None:
    process = _start(tmp_path, "--json", "--no-torch")
    _wait(process, "training runs with a copy each")
    deadline = time.monotonic() + PATIENCE
    while number == signal.SIGTERM and len(_of(tmp_path)) < 8:  # the other one comes while they are started
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, err
    assert _of(tmp_path) == [] and _left(tmp_path) == [] and os.listdir(tmp_path) == []


def test_children_of_a_killed_demo_end_and_the_next_demo_cleans_up(tmp_path: Path) -> None:
    process = _start(tmp_path, "--json", "--no-torch")
    _wait(process, "all had it")
    process.kill()
    process.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while _of(tmp_path):
        assert time.monotonic() < deadline, _of(tmp_path)
        time.sleep(0.1)
    assert len(_left(tmp_path)) == 1 and _in_shm() == []
    remove_leftovers(tmp_path)  # what the next demo begins with
    assert _left(tmp_path) == []
