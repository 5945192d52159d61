"""The /dev/shm probe against real loaders, real kills and real users, in a tmpfs of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import rigs

MB = 1 << 20

# Everything runs inside the namespace of the small /dev/shm, the probe too: this is the probe's end of it.
COMMON = """
import dataclasses, json, mmap, os, signal, subprocess, sys, time
from legroom.probe.shm_segments import has_writer
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.memory_of_running_jobs import job
from legroom.probe.process_and_limits import processes, tree
from legroom.probe.shm import shm

def look(host=Host()):
    found = dataclasses.asdict(shm(host))
    found["now"] = {file["name"]: file["mapped"] for file in found["files"]}
    return found

def settled(least):
    # A loader that has filled its queue holds still; until then it moves under the probe's eyes.
    used, since, deadline = None, time.monotonic(), time.monotonic() + 60
    while (used is None or used < least or time.monotonic() - since < 0.5) and time.monotonic() < deadline:
        stats = os.statvfs("/dev/shm")
        now = (stats.f_blocks - stats.f_bfree) * stats.f_frsize
        if now != used:
            used, since = now, time.monotonic()
        time.sleep(0.05)

def tell(**facts):
    print(json.dumps(facts, default=str), flush=True)
"""

LOADER = """
import torch, torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

FIVE = 5 * (2 << 20)  # what two workers with two batches each ahead make, and the trainer's own

class Ones(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(1 << 18)  # 1 MB

def loading(strategy):
    torch.multiprocessing.set_sharing_strategy(strategy)
    batches = iter(DataLoader(Ones(), batch_size=2, num_workers=2, prefetch_factor=2))
    return batches, next(batches)
"""


def inside(script: str, *words: str, size: str = "64m", wrap: Any = list) -> Any:
    """What the script told, run with a /dev/shm of its own."""
    command = rigs.small_shm(wrap([sys.executable, "-c", COMMON + script, *words]), size)
    with tempfile.TemporaryDirectory(prefix="lr-") as folder:  # killed loaders leave their sockets behind
        os.chmod(folder, 0o1777)
        env = {**os.environ, "TMPDIR": folder}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.real("mount")
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_everything_a_loader_holds_is_explained(strategy: str) -> None:
    pytest.importorskip("torch")
    told = inside(
        LOADER
        + """
batches, first = loading(sys.argv[1])
settled(FIVE)
found = look()
family = job(Host(), os.getpid())
tell(found=found, held=family.held, each=[(p.shm, p.rss_shmem) for p in family.processes])
""",
        strategy,
    )
    found, held = told["found"], told["held"]
    assert (found["mounted"], found["size"]) == (True, 64 * MB)
    # Two workers with two batches each ahead, and the one in the trainer's hand, of 2 MB.
    assert found["used"] >= 5 * 2 * MB
    assert found["hidden"] == 0
    assert held["shm"] == found["used"]
    torch_files = [file for file in found["files"] if file["kind"] == "torch"]
    if strategy == "file_descriptor":
        assert torch_files == []  # no listing shows any of it
        assert found["unlinked"] == found["used"]
    else:
        assert len(torch_files) == 5
        assert all(file["mapped"] is True for file in torch_files)  # those on their way too
        assert found["unlinked"] < MB  # the queues' semaphores
    assert found["unlinked"] > 0
    # What each process holds is not what RssShmem shows: no process but the maker has touched the pages yet.
    assert sum(shmem for _, shmem in told["each"]) < found["used"]


@pytest.mark.real("mount")
def test_what_a_killed_training_run_leaves_is_found() -> None:
    pytest.importorskip("torch")
    told = inside(
        LOADER
        + """
if sys.argv[1:] == ["train"]:
    batches, first = loading("file_system")
    settled(FIVE)
    print("ready", flush=True)
    time.sleep(60)
    sys.exit()
script = sys.orig_argv[sys.orig_argv.index("-c") + 1]
child = subprocess.Popen([sys.executable, "-c", script, "train"], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
alive = look()
family = tree(processes(Host()), child.pid)
managers = [p.pid for p in family if p.command.endswith("torch_shm_manager")]
for pid in managers + [p.pid for p in family if p.pid not in managers]:  # or they would tidy up
    os.kill(pid, signal.SIGKILL)
child.wait()
deadline = time.monotonic() + 60
while {p.pid for p in processes(Host())} & {p.pid for p in family} and time.monotonic() < deadline:
    time.sleep(0.05)
while (dead := look())["unlinked"] or dead["hidden"]:  # the kernel takes back what had no name
    if time.monotonic() > deadline:
        break
    time.sleep(0.05)
tell(managers=len(managers), alive=alive, dead=dead)
"""
    )
    assert told["managers"] > 0
    assert all(told["alive"]["now"].values())
    dead = told["dead"]
    assert len(dead["files"]) >= 5
    assert {file["kind"] for file in dead["files"]} == {"torch"}
    assert set(dead["now"].values()) == {False}
    assert sum(file["size"] for file in dead["files"]) == dead["used"]
    assert (dead["hidden"], dead["unlinked"]) == (0, 0)


HOLDER = """
import _multiprocessing, mmap, os, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
lock = _multiprocessing.SemLock(1, 1, 1, "/mp-legroomtest", False)  # a name that stays
block = SharedMemory(create=True, size=1 << 20)
block.buf[:] = bytes(1 << 20)
resource_tracker.unregister(block._name, "shared_memory")  # or the tracker would tidy up after the kill
print(block.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.real("mount")
def test_semaphores_and_pythons_blocks_are_named_and_their_death_is_seen() -> None:
    told = inside(
        """
holder = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=-1, stdout=-1, text=True)
block = holder.stdout.readline().strip()
alive = look()
holder.kill()
holder.wait()
tell(block=block, alive=alive, dead=look())
""",
        HOLDER,
    )
    for when, used in (("alive", True), ("dead", False)):
        assert told[when]["now"] == {"sem.mp-legroomtest": used, told["block"]: used}
        kinds = {file["name"]: file["kind"] for file in told[when]["files"]}
        assert kinds == {"sem.mp-legroomtest": "semaphore", told["block"]: "python"}
        assert told[when]["hidden"] == 0


@pytest.mark.real("mount")
def test_files_are_counted_by_blocks() -> None:
    told = inside(
        """
with open("/dev/shm/psm_sparse", "wb") as file:
    file.truncate(1 << 30)  # as a failed allocation leaves it
    file.seek(1 << 20)
    file.write(b"x")
os.makedirs("/dev/shm/a/b")
os.link("/dev/shm/psm_sparse", "/dev/shm/a/b/again")
tell(found=look())
"""
    )
    found = told["found"]
    assert {file["name"]: file["size"] for file in found["files"]} == {"psm_sparse": 4096, "a/b/again": 4096}
    assert (found["used"], found["hidden"]) == (4096, 0)


@pytest.mark.real("mount")
def test_another_shm_of_the_same_path_is_not_ours() -> None:
    told = inside(
        """
holder = subprocess.Popen(
    ["unshare", "--mount", "--propagation", "private", "sh", "-c",
     'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh", sys.executable, "-c", sys.argv[1]],
    stdin=-1, stdout=-1, text=True)
holder.stdout.readline()
elsewhere = job(Host(), holder.pid).held["shm"]
found = look()
holder.kill()
holder.wait()
tell(found=found, elsewhere=elsewhere)
""",
        HOLDER,
    )
    assert (told["found"]["files"], told["found"]["used"], told["found"]["unlinked"]) == ([], 0, 0)
    assert told["elsewhere"] == 0


@pytest.mark.real("mount")
def test_a_user_in_another_pid_namespace_is_still_a_user() -> None:
    told = inside(
        """
if sys.argv[1:2] == ["look"]:
    tell(found=look(), seen=len(processes(Host())))
    sys.exit()
holder = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=-1, stdout=-1, text=True)
block = holder.stdout.readline().strip()
script = sys.orig_argv[sys.orig_argv.index("-c") + 1]
apart = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script, "look"]
alive = json.loads(subprocess.run(apart, capture_output=True, text=True, check=True).stdout)
holder.kill()
holder.wait()
dead = json.loads(subprocess.run(apart, capture_output=True, text=True, check=True).stdout)
tell(block=block, alive=alive, dead=dead)
""",
        HOLDER,
    )
    assert told["alive"]["seen"] == 1  # the holder is in nobody's /proc there
    assert set(told["alive"]["found"]["now"].values()) == {True}
    assert set(told["dead"]["found"]["now"].values()) == {False}


@pytest.mark.real("mount", "user")
def test_a_plain_user_sees_their_own_files_and_is_told_of_others() -> None:
    told = inside(
        """
uid = 54321
with open("/dev/shm/psm_roots", "wb") as roots:
    roots.write(b"x")
for name in ("psm_own", "sem.own", "plain_own"):
    with open(f"/dev/shm/{name}", "wb") as own:
        own.write(b"x")
    os.chown(f"/dev/shm/{name}", uid, uid)
    os.chmod(f"/dev/shm/{name}", 0o600)
os.chmod("/dev/shm/psm_roots", 0o600)
busy = open("/dev/shm/psm_busy", "wb")
os.fchown(busy.fileno(), uid, uid)
child = os.fork()
if child == 0:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    found = look()
    tell(found=found)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    found = told["found"]
    assert found["unreadable_processes"] > 0
    assert found["writable"] is True
    assert found["now"] == {
        "psm_roots": None,  # somebody who may not be looked into could hold it
        "plain_own": None,  # nobody writes to it; that says nothing about readers
        "psm_own": False,  # those are always open for writing, and the kernel says it is not
        "sem.own": False,
        "psm_busy": True,  # its holder may not be looked into, the kernel knows of it
    }


@pytest.mark.real("mount", "user")
def test_a_plain_users_own_nameless_segments_are_measured_without_rights() -> None:
    pytest.importorskip("torch")
    told = inside(
        LOADER
        + """
batches, first = loading("file_descriptor")
settled(FIVE)
tell(found=look(), held=job(Host(), os.getpid()).held, uid=os.geteuid())
""",
        wrap=lambda command: rigs.as_user(54321, command),
    )
    assert told["uid"] == 54321
    used = told["found"]["used"]
    assert used >= 5 * 2 * MB
    assert told["held"]["shm"] == used
    assert told["found"]["hidden"] <= used / 256  # where the probe stops looking
    assert told["found"]["unlinked"] + told["found"]["hidden"] == used


@pytest.mark.real("mount")
def test_asking_for_writers_disturbs_no_process(tmp_path: Path) -> None:
    told = inside(
        """
path = "/dev/shm/psm_x"
open(path, "wb").close()
answers = []
answers.append(has_writer(Host(), path))
writing = open(path, "r+b")
answers.append(has_writer(Host(), path))
area = mmap.mmap(os.open(path, os.O_RDWR), 0) if os.path.getsize(path) else None
writing.write(b"x" * 4096)
writing.flush()
area = mmap.mmap(writing.fileno(), 4096)
writing.close()
answers.append(has_writer(Host(), path))  # mapped, the descriptor closed
area.close()
answers.append(has_writer(Host(), path))
reading = open(path, "rb")
answers.append(has_writer(Host(), path))
answers.append(has_writer(Host(), "/dev/shm/none"))
fds = len(os.listdir("/proc/self/fd"))
tell(answers=answers, fds=fds)
"""
    )
    assert told["answers"] == [False, True, True, False, False, None]


@pytest.mark.real("mount")
def test_the_probe_leaves_nothing_behind() -> None:
    told = inside("before = sorted(os.listdir('/dev/shm')); look(); tell(b=before, a=sorted(os.listdir('/dev/shm')))")
    assert told["a"] == told["b"] == []
    assert os.path.isdir("/dev/shm")
