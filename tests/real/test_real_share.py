"""Groups of trainers in a 64 MB /dev/shm, in a memory cgroup, and beside other users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rigs

pytest.importorskip("torch")
MB = 1 << 20
PLAYER = [sys.executable, str(Path(__file__).parent / "share_player.py"), "24"]
STRANGER = """
import os, socket, sys
folder, batch = sys.argv[1:]
os.setgroups([]); os.setgid(12345); os.setuid(12345)
for work in (
    lambda: os.listdir(folder),
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(folder + "/key.sock"),
    lambda: os.open(folder + "/key.lock", os.O_RDONLY),  # whoever can open it can hold it, and stop the group
    lambda: os.open(folder + "/key.alone", os.O_RDONLY),
    lambda: os.open(folder + "/other.lock", os.O_CREAT | os.O_WRONLY),
    lambda: os.open(batch, os.O_RDONLY),  # the memory of a batch
):
    try:
        print(work())
    except OSError as problem:
        print(type(problem).__name__)
"""


def played(command: Sequence[str], **env: str) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for trainer in found.values():
        assert trainer["good"] and trainer["shared"] >= 60, found
    return found


@pytest.mark.real("mount")
def test_batches_larger_than_shm_are_shared_without_it() -> None:
    found = played(rigs.small_shm(PLAYER))
    assert found["mine"]["peak"] < MB // 4


@pytest.mark.real("cgroup")
def test_in_a_memory_cgroup_no_process_is_killed() -> None:
    with rigs.memory_cgroup(1600 * MB) as group:
        played(group.command(PLAYER))
        assert group.oom_kills() == 0


@pytest.mark.real("user")
def test_other_users_can_neither_see_nor_reach_a_group(tmp_path: Path) -> None:
    from legroom.loader.dataloader.memory_slots import Slot
    from legroom.loader.dataloader.sharing.group_folder import SOCKET, GroupFiles
    from legroom.system.unix_sockets import listen

    with tempfile.TemporaryDirectory(prefix="legroom-test-") as place:
        os.chmod(place, 0o755)
        files = GroupFiles(Path(place) / "share", "key")
        listening, slot = listen(files.folder, "key" + SOCKET), Slot.make(1 << 16, 1)
        held = files.lock(), files.stand_alone()
        names = [place + "/share", f"/proc/{os.getpid()}/fd/{slot.fd}"]
        done = subprocess.run([sys.executable, "-c", STRANGER, *names], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["PermissionError"] * 6
        for lock in held:
            assert lock is not None
            lock.release()
        connection = files.connect()
        assert connection is not None
        connection.close(), listening.close()
        os.chmod(place + "/share", 0o755)  # a folder that others may enter is not used at all
        with pytest.raises(PermissionError):
            _ = GroupFiles(Path(place) / "share", "key").folder
        files.close()
