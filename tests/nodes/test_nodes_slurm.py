"""``srun --ntasks-per-node=1 legroom cache load`` with Debian's munge, slurmctld and slurmd."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from object_server import object_server

ROOT = Path(__file__).parents[2]
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
_MISSING = [name for name in _PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") is None]
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(_MISSING) or os.geteuid() != 0, reason=f"needs root and {_MISSING}: apt-get install slurmctld slurmd munge"
    ),
]


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        found: int = one.getsockname()[1]
        return found


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster of one node on loopback, with a key, a socket and files of its own. Yields the environment for srun."""
    name = socket.gethostname().partition(".")[0]
    folder = Path("/run") / f"legroom-slurm-{os.getpid()}"
    folder.mkdir(mode=0o755)
    key, place = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(
        f"""ClusterName=legroom
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={_port()}
SlurmdPort={_port()}
AuthType=auth/munge
AuthInfo=socket={place}
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/d
SlurmctldPidFile={folder}/c.pid
SlurmdPidFile={folder}/d.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
NodeName={name} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes={name} Default=YES State=UP
"""
    )
    environment = {**os.environ, "SLURM_CONF": str(config), "PATH": os.environ["PATH"] + ":/usr/sbin"}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        logs = stack.enter_context(open(tmp_path / "log", "wb"))
        for command in (
            [
                "munged",
                "-F",
                f"--key-file={key}",
                f"--socket={place}",
                f"--pid-file={folder}/m.pid",
                f"--log-file={folder}/m.log",
                f"--seed-file={folder}/m.seed",
                "--force",
            ],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-N", name],
        ):
            process = subprocess.Popen(command, env=environment, stdout=logs, stderr=logs, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            time.sleep(1)
        deadline = time.monotonic() + 60
        while (
            "idle"
            not in subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True).stdout
        ):
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield environment


def test_one_task_on_each_node_loads(slurm: dict[str, str], tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(1_000_000))
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir(mode=0o700)
    slurm |= {
        "LEGROOM_SHM": str(tmp_path / "shm"),
        "LEGROOM_DIR": str(tmp_path / "disk"),
        "PYTHONPATH": str(ROOT / "src"),
    }
    with object_server(x__npy=file.getvalue()) as server:
        command = [
            "srun",
            "--nodes=1",
            "--ntasks-per-node=1",
            sys.executable,
            "-m",
            "legroom",
            "cache",
            "load",
            server.url("x.npy"),
            "--json",
        ]
        done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["entries"][0]["built"] is True
        again = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=120)
        assert json.loads(again.stdout)["entries"][0]["built"] is False
        assert server.sent == len(file.getvalue())
