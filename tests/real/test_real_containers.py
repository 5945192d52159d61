"""Commands and the cache in real containers: podman with runc, --shm-size and --memory, on this machine's own files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rigs

pytestmark = [pytest.mark.real("container"), pytest.mark.timeout(240)]

MB = 1 << 20
LIMIT = 1024 * MB
LEGROOM = f"{sys.executable} -m legroom"
DEATH = Path(__file__).parent / "deaths" / "shm_loader_bus.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that containers see, outside of /tmp."""
    found = Path(tempfile.mkdtemp(prefix="legroom-containers-", dir="/var/tmp"))
    yield found
    shutil.rmtree(found)


def _in_container(script: str, folder: Path, *, shm: str, options: list[str] | None = None, **environment: str) -> None:
    """Run a script in a container of its own; each of its commands writes its output into the folder."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "LEGROOM_"))}
    with rigs.container() as box:
        command = box.command(["sh", "-euc", script], cwd=folder, memory=LIMIT, shm=shm, options=options or [])
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, env={**given, **environment, "LC_ALL": "C.UTF-8"}
        )
    assert done.returncode == 0, done.stderr


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return found


def test_every_command_sees_the_containers_limits(folder: Path) -> None:
    """64 MB of /dev/shm and 1 GB of memory, as the container has them, not as the machine has."""
    np.save(folder / "x.npy", np.arange(4 * MB, dtype=np.uint8))
    _in_container(
        f"""
        export LEGROOM_DIR={folder}/store  # not that of the machine, which the container sees
        {LEGROOM} doctor --json > doctor.json || [ $? = 1 ]
        {LEGROOM} check --batch 64 --sample-bytes 600K --workers 4 --json > check.json || [ $? = 1 ]
        {LEGROOM} run --json --quiet --retries 0 -- {sys.executable} {DEATH} > run.json 2> run.log || true
        {LEGROOM} explain --json run.log > explain.json || true
        {LEGROOM} cache load x.npy --json > load.json
        {LEGROOM} cache list --json > list.json
        """,
        folder,
        shm="64m",
    )
    doctor = _read(folder / "doctor.json")
    pools = {pool["name"]: pool for pool in doctor["pools"]}
    assert pools["shm"]["size"] == 64 * MB
    assert any(pool.get("size") == LIMIT or pool.get("limit") == LIMIT for pool in doctor["pools"]), doctor["pools"]
    finding = next(one for one in doctor["findings"] if one["code"] == "shm-default-64mb")
    assert finding["severity"] == "critical" and any("--shm-size" in step for step in finding["fix"])
    check = _read(folder / "check.json")
    assert check["verdict"] == "too-big" and check["largest_batch"] < 64, check
    log = (folder / "run.log").read_text()
    for name in ("run", "explain"):
        assert (found := _read(folder / f"{name}.json"))["verdict"] == "shm-full", (name, found, log)
    [loaded] = _read(folder / "load.json")["entries"]
    assert loaded["built"] is True and loaded["backing"] == "shm"
    assert [one["key"] for one in _read(folder / "list.json")["entries"]] == [loaded["key"]]


def test_two_containers_with_a_common_store_load_once(folder: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 255, 8 * MB, np.uint8)
    np.save(folder / "x.npy", rows)
    with tempfile.TemporaryDirectory(prefix="legroom-test-", dir="/dev/shm") as store:
        script = f"{LEGROOM} cache load x.npy --json > $NAME.json; {LEGROOM} cache verify x.npy > $NAME.txt"
        for name in ("first", "second"):
            _in_container(
                script, folder, shm="64m", options=["--volume", f"{store}:/store"], NAME=name, LEGROOM_SHM="/store",
                LEGROOM_DIR=str(folder),
            )  # fmt: skip
        [first], [second] = (_read(folder / f"{name}.json")["entries"] for name in ("first", "second"))
        assert (first["built"], second["built"]) == (True, False) and first["key"] == second["key"]
        assert first["backing"] == "shm"


def test_two_containers_with_stores_of_their_own_load_each(folder: Path) -> None:
    np.save(folder / "x.npy", np.arange(8 * MB, dtype=np.uint8))
    for name in ("first", "second"):
        _in_container(f"{LEGROOM} cache load x.npy --backing shm --json > $NAME.json", folder, shm="64m", NAME=name)
    [first], [second] = (_read(folder / f"{name}.json")["entries"] for name in ("first", "second"))
    assert (first["built"], second["built"]) == (True, True) and first["key"] == second["key"]


@pytest.fixture
def pod_memory() -> Iterator[Path]:
    """A tmpfs of 512 MB that outlives containers, as an emptyDir in memory does."""
    place = tempfile.mkdtemp(prefix="legroom-pod-", dir="/var/tmp")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m,mode=1777", "tmpfs", place], check=True)
    yield Path(place)
    subprocess.run(["umount", "--lazy", place], check=True)
    os.rmdir(place)


def test_pages_of_a_container_before_a_restart_are_named(folder: Path, pod_memory: Path) -> None:
    """What an earlier container of the pod left in memory is not in this one's cgroup, and fills the pod's limit."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    options = ["--volume", f"{pod_memory}:/dev/shm"]
    write = "dd if=/dev/zero of=/dev/shm/left bs=1M count=300 2> dd.txt"
    ask = f"{LEGROOM} doctor --json > $NAME.json || [ $? = 1 ]"
    _in_container(f"{write}; {ask}", folder, shm="64m", options=options, NAME="first", **pod)
    _in_container(ask, folder, shm="64m", options=options, NAME="restarted", **pod)
    code = "tmpfs-charged-from-earlier-container"
    assert code not in {one["code"] for one in _read(folder / "first.json")["findings"]}  # its own pages
    [found] = [one for one in _read(folder / "restarted.json")["findings"] if one["code"] == code]
    assert "300 MB" in found["message"] and any("legroom cache gc" in step for step in found["fix"])
