"""flock and its traps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from legroom.cache import locks
from legroom.system import lazy_and_optional_imports

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no flock")


@pytest.fixture
def folder(tmp_path: Path):
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_exclusive_refuses_others_and_shared_lets_them_in(folder: int) -> None:
    first = locks.acquire(folder, "a.lock")
    assert first is not None
    assert locks.acquire(folder, "a.lock") is None
    assert locks.acquire(folder, "a.lock", shared=True) is None
    assert locks.held(folder, "a.lock")
    first.release()
    first.release()
    assert not locks.held(folder, "a.lock")
    one = locks.acquire(folder, "a.lock", shared=True, lease=True)
    two = locks.acquire(folder, "a.lock", shared=True, lease=True)
    assert one and two
    assert locks.acquire(folder, "a.lock") is None
    one.release()
    assert locks.held(folder, "a.lock")
    two.release()
    assert not locks.held(folder, "a.lock")


def test_a_missing_lock_is_not_created_unless_asked(folder: int, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        locks.acquire(folder, "none.lock", create=False)
    assert not locks.held(folder, "none.lock")
    assert not (tmp_path / "none.lock").exists()


def test_lock_files_are_for_their_owner_alone(folder: int, tmp_path: Path) -> None:
    with locks.acquire(folder, "a.lock"):  # type: ignore[union-attr]
        assert (tmp_path / "a.lock").stat().st_mode & 0o777 == 0o600


def test_a_lock_whose_file_was_unlinked_meanwhile_is_taken_again(folder: int, tmp_path: Path) -> None:
    """A process that waits for a lock that is removed must end up with the lock that has the name."""
    holder = locks.acquire(folder, "a.lock")
    assert holder is not None
    got: list[locks.Lock | None] = []
    waiter = threading.Thread(target=lambda: got.append(locks.acquire(folder, "a.lock", block=True)))
    waiter.start()
    time.sleep(0.05)
    os.unlink(tmp_path / "a.lock")
    holder.release()
    waiter.join(60)
    assert got[0] is not None
    assert os.fstat(got[0].fd).st_ino == (tmp_path / "a.lock").stat().st_ino
    assert locks.acquire(folder, "a.lock") is None
    got[0].release()


SCRIPT = """
import os, sys, time
from legroom.cache import locks
folder = os.open(sys.argv[1], os.O_RDONLY)
lock = locks.acquire(folder, "a.lock", shared=sys.argv[2] == "lease", lease=sys.argv[2] == "lease")
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)  # it has closed, or not closed, what it inherited
    time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


@pytest.mark.parametrize(("kind", "held_by_child"), [("work", False), ("lease", True)])
def test_a_forked_child_keeps_a_lease_and_no_work_lock(
    folder: int, tmp_path: Path, kind: str, held_by_child: bool
) -> None:
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), kind], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert locks.held(folder, "a.lock")
        parent.kill()
        parent.wait()
        assert locks.held(folder, "a.lock") is held_by_child
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
    deadline = time.monotonic() + 60
    while locks.held(folder, "a.lock"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_that_gives_back_a_lease_does_not_take_it_from_its_parent(folder: int) -> None:
    lease = locks.acquire(folder, "a.lock", shared=True, lease=True)
    assert lease is not None
    script = (
        "import fcntl, os, sys\nos.close(int(sys.argv[1]))\n"  # a child's release is a close, which this stands for
    )
    subprocess.run([sys.executable, "-c", script, str(lease.fd)], pass_fds=[lease.fd], check=True)
    assert locks.held(folder, "a.lock")
    lease.release()


def test_a_symlink_is_no_lock(folder: int, tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "a.lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        locks.acquire(folder, "a.lock")


IMPORTED_SLOWLY = """
import os, signal, sys, threading, time
import legroom
from legroom.cache import mapped_files_and_checksums

class Slow:
    # Imports of that module take a second, with its lock held.
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            begun.set()
            sys.meta_path.remove(self)
            time.sleep(1)
        return None

begun = threading.Event()
if sys.argv[1] != "legroom.loader.batches.legroom_open":
    legroom.open  # the function alone; the rest is imported at first use
sys.meta_path.insert(0, Slow())
uses = {
    "open": lambda: legroom.open(sys.argv[2]),
    "fits": lambda: mapped_files_and_checksums._fits(1),
    "available": lambda: legroom.available("gpu0"),
}
use = uses[sys.argv[3]]
thread = threading.Thread(target=use)
thread.start()
assert begun.wait(120)
child = os.fork()
if child == 0:
    signal.alarm(120)
    use()
    os._exit(0)
_, status = os.waitpid(child, 0)
thread.join()
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


@pytest.mark.parametrize(
    ("module", "use", "disabled", "name"),
    [
        ("legroom.cache.elect_builder_and_publish", "open", "", "a.h5"),
        ("legroom.formats.hdf5_reader", "open", "", "a.h5"),
        ("h5py", "open", "", "a.h5"),  # the child waits for its parent's load, and need not import it
        ("legroom.probe.filesystems_and_cgroups", "open", "", "a.h5"),
        # Without the cache the child imports as its parent does: no h5py here, whose import no fork waits for.
        ("legroom.cache.open_without_cache", "open", "1", "a.npy"),
        ("legroom.formats.npy_reader", "open", "1", "a.npy"),
        ("legroom.loader.batches.legroom_open", "open", "", "a.npy"),  # the public name itself
        ("legroom.cache.store_free_space", "fits", "", "a.npy"),  # in the thread that fills the pages of a disk entry
        ("legroom.probe.gpu_devices", "available", "", "a.npy"),
    ],
)
def test_a_fork_during_the_first_import_of_what_builds_leaves_the_child_able_to(
    shm: Path, tmp_path: Path, module: str, use: str, disabled: str, name: str
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = [1, 2, 3]
    np.save(tmp_path / "a.npy", [1, 2, 3])
    env = {**os.environ, "LEGROOM_DISABLE": disabled}
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED_SLOWLY, module, str(tmp_path / name), use]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr


def test_hooks_that_did_not_run_before_a_fork_release_nothing_after_it() -> None:
    """Python runs hooks after a fork also if they were registered when it had begun."""
    for after in (locks._after_fork, lazy_and_optional_imports._after_fork):
        after()
    for lock in (locks._guard, lazy_and_optional_imports.import_lock):
        assert lock.acquire(False)
        lock.release()
