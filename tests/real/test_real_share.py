"""Groups of trainers in a 64 MB /dev/shm, in a memory cgroup, and beside other users."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rigs

from legroom.loader.dataloader.sharing.group_folder import groups
from torch_memory import beside_torch

pytest.importorskip("torch")
MB = 1 << 20
ROOM = 11  # batches: what must stay free, see advice/memory_need.py
PLAYER = [sys.executable, str(Path(__file__).parent / "share_player.py"), "24"]  # and seconds
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
    found = played(rigs.small_shm([*PLAYER, "200"]))
    assert found["mine"]["peak"] < MB // 4


@pytest.fixture
def own_stores(monkeypatch: pytest.MonkeyPatch, _stores: tuple[str, str]) -> None:
    """Not the stores of the person who runs the test, for players that see the machine's own /dev/shm."""
    for name, folder in zip(("LEGROOM_SHM", "LEGROOM_DIR"), _stores, strict=True):
        monkeypatch.setenv(name, folder)


@pytest.mark.real("cgroup")
@pytest.mark.usefixtures("own_stores")
def test_a_memory_cgroup_that_is_just_large_enough_for_one_window() -> None:
    """Beside two interpreters with torch and the copied pages of their forks: a window of two batches, for each worker
    a batch and its samples, for each trainer a batch that it makes itself, its samples and the batch before.
    """
    with rigs.memory_cgroup(beside_torch(150 + (2 + 2 * 2 + 2 * 3 + ROOM) * 24, 2)) as group:
        played(group.command([*PLAYER, "200"]))
        assert group.oom_kills() == 0


@pytest.mark.real("cgroup")
@pytest.mark.load_sensitive(
    reason="at its limit, the kernel may reclaim and read the libraries' pages again for minutes"
)
@pytest.mark.usefixtures("own_stores")
@pytest.mark.parametrize("megabytes", [270, 360])
def test_in_a_memory_cgroup_that_is_too_small_a_trainer_gets_an_error_with_figures(megabytes: int) -> None:
    """The other one may fit when that is gone."""
    with rigs.memory_cgroup(beside_torch(megabytes, 2)) as group:
        done = subprocess.run(group.command([*PLAYER, "60"]), capture_output=True, text=True, timeout=140)
        assert group.oom_kills() == 0 and done.returncode == 0, (done.returncode, done.stderr[-3000:])
        path = group.path
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert all(trainer["good"] for trainer in found.values()), found
    errors = [trainer["refused"] for trainer in found.values() if "refused" in trainer]
    assert errors, found
    for refused in errors:
        assert refused["code"] == "budget-too-small" and refused["fix"], found
        assert "not enough" in refused["message"] and str(path) in refused["why"], found
        assert len(re.findall(r"\d[.\d]* MB", refused["why"])) >= 2, found


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


JOIN = """
import os, socket, sys
os.fchdir(int(sys.argv[1]))
os.setgroups([]); os.setgid(12345); os.setuid(12345)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.settimeout(60)
sock.connect(sys.argv[2])
try:
    sock.send(sys.stdin.buffer.read())
    print(len(sock.recv(1 << 16)))
except OSError as problem:
    print(type(problem).__name__)
"""
REACH = """
import os, signal, sys
os.setgroups([]); os.setgid(12345); os.setuid(12345)
for pid in map(int, sys.argv[2:]):
    for work in (
        lambda: os.kill(pid, signal.SIGSTOP),
        lambda: os.listdir(f"/proc/{pid}/fd"),
        lambda: open(f"/proc/{pid}/mem"),
        lambda: open(f"/proc/{pid}/environ").read(),
        lambda: os.listdir(f"/proc/{pid}/map_files"),
    ):
        try:
            print(work())
        except OSError as problem:
            print(type(problem).__name__)
try:
    print(os.listdir(sys.argv[1]))
except OSError as problem:
    print(type(problem).__name__)
"""


@pytest.mark.real("user")
def test_another_user_can_neither_join_nor_read_nor_block_a_group_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the permissions of folder and socket are wrong: both ends ask the kernel who the other is."""
    import share_data

    with tempfile.TemporaryDirectory(prefix="legroom-test-") as place:
        os.chmod(place, 0o1777)
        monkeypatch.setenv("LEGROOM_SHM", place)
        group = share_data.Trainers(Path(place), dataset=share_data.Noise(400, seconds=0.001))
        expected = share_data.reference(group.loader(), 1)
        try:
            for _ in range(2):
                group.start(1, stop_at=20)  # it runs until everything was tried
            group.await_producer()
            (producer,) = group.producers()
            folder = Path(place) / f"legroom-{os.geteuid()}" / "share"
            pids = [producer, *share_data.workers_of(producer), *(one.pid for one in group.processes)]
            command = [sys.executable, "-c", REACH, str(folder), *map(str, pids)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert set(done.stdout.split()) == {"PermissionError"}, done.stdout
            assert len(done.stdout.split()) == 5 * len(pids) + 1
            (name,) = (path.name for path in folder.glob("*.sock"))
            leaked = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            os.chmod(folder / name, 0o666)
            os.chmod(folder, 0o711)
            for message in (("hello", 1.0, False, "a stranger", True), ("status",)):
                done = subprocess.run(
                    [sys.executable, "-c", JOIN, str(leaked), name], input=pickle.dumps(message), pass_fds=[leaked],
                    capture_output=True, check=True,
                )  # fmt: skip
                assert done.stdout.split()[0] in (b"0", b"ConnectionResetError", b"BrokenPipeError"), done.stdout
            os.close(leaked)
            os.chmod(folder, 0o700)
            (status,) = [one for one in groups() if one["producer"]]
            assert {one["pid"] for one in status["trainers"]} <= {one.pid for one in group.processes}
            (group.folder / "continue").touch()
            group.join()
            for number in (0, 1):
                assert group.lines(number) == [*expected, "end"]
        finally:
            group.end()
            until = time.monotonic() + 60
            while group.producers() and time.monotonic() < until:
                time.sleep(0.05)
        groups()  # removes what is left of groups that are gone


@pytest.mark.real("user")
def test_users_with_the_same_name_have_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that has made the other's folder first blocks nobody. In forks: another user cannot read every Python."""
    import legroom

    with tempfile.TemporaryDirectory(prefix="legroom-test-") as place:
        os.chmod(place, 0o1777)
        monkeypatch.setenv("LEGROOM_SHM", place)
        (Path(place) / "legroom-12345").mkdir(0o755)  # of root: the user 12345 cannot use it

        def batches() -> int:
            monkeypatch.setenv("LEGROOM_DIR", f"{place}/disk-{os.geteuid()}")
            return len(list(legroom.DataLoader(list(range(40)), 4, num_workers=1, share="train")))  # type: ignore[arg-type]

        assert batches() == 10
        for uid in (12346, 12345):
            child = os.fork()
            if child == 0:
                try:
                    os.setgroups([])
                    os.setgid(uid)
                    os.setuid(uid)
                    os._exit(batches())
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(99)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
        assert (Path(place) / "legroom-12346").stat().st_uid == 12346
