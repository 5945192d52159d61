"""A Slurm cluster of one node on loopback: Debian's munged, slurmctld and slurmd, with a key and files of their own.

They run in a PID namespace, so the kernel ends all of them, and the tasks they started, with its first process.
rig_cleanup.py removes everything at the end, also after a failure or a kill.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rig_cleanup
import rigs

_PATH = os.environ["PATH"] + ":/usr/sbin"
_SECONDS = 120  # only reached if a daemon hangs or has ended

_DAEMONS = """
munged -F --key-file=$RIG/munge.key --socket=$RIG/munge.socket --pid-file=$RIG/m.pid --log-file=$RIG/m.log \
    --seed-file=$RIG/m.seed --force &
until [ -S $RIG/munge.socket ]; do sleep 0.05; done
slurmctld -D -c &
slurmd -D -N $NODE &
wait
"""


def why_not() -> str | None:
    """Why there can be no Slurm here, or None."""
    if reason := rigs.why_no_rigs():
        return reason
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name, path=_PATH) is None]
    return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge" if missing else None


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        found: int = one.getsockname()[1]
        return found


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """A cluster whose node is idle. Yields the environment for srun."""
    process = None
    try:
        with rig_cleanup.named() as name:
            folder = Path("/run") / name
            folder.mkdir(mode=0o755)
            (folder / "munge.key").write_bytes(os.urandom(1024))
            (folder / "munge.key").chmod(0o400)
            node = socket.gethostname().partition(".")[0]
            (folder / "slurm.conf").write_text(_configuration(folder, node))
            environment = {
                **os.environ,
                "SLURM_CONF": str(folder / "slurm.conf"),
                "PATH": _PATH,
                rig_cleanup.MARK: name,
            }
            with open(folder / "log", "wb") as log:
                process = subprocess.Popen(
                    rigs.own_pids(["sh", "-uc", _DAEMONS]), env={**environment, "RIG": str(folder), "NODE": node},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                )  # fmt: skip
            deadline = time.monotonic() + _SECONDS
            while "idle" not in _states(environment):
                assert time.monotonic() < deadline, (folder / "log").read_text(errors="replace")[-3000:]
                time.sleep(0.2)
            yield environment
    finally:
        if process is not None:
            process.wait()


def _states(environment: dict[str, str]) -> str:
    return subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True).stdout


def _configuration(folder: Path, node: str) -> str:
    return f"""ClusterName=legroom
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={_port()}
SlurmdPort={_port()}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
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
NodeName={node} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes={node} Default=YES State=UP
"""
