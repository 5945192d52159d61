"""Users beside each other: none reads, plants or blocks another's data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import rigs

AS_USER = """
import os, sys
import numpy, h5py, legroom
from legroom.cache import elect_builder_and_publish, list_and_verify, open_without_cache
os.setgroups([])
os.setegid(int(sys.argv[1]))
os.seteuid(int(sys.argv[1]))
try:
    {body}
except (legroom.LegroomError, OSError) as problem:
    print(type(problem).__name__, problem)
"""


def as_user(uid: int, body: str, shared: Path, *arguments: object) -> str:
    """What that body prints, run with the effective uid of another user."""
    env = {**os.environ, "LEGROOM_SHM": str(shared), "LEGROOM_DIR": str(shared / "disk")}
    script = AS_USER.replace("{body}", body.replace("\n", "\n    "))
    command = [sys.executable, "-c", script, str(uid), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /dev/shm that other users reach.

    Not below pytest's own: each pytest that starts closes the directory above all of them to other users.
    """
    folder = Path(tempfile.mkdtemp(prefix="legroom-test-"))
    for name in ("", "disk"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name).chmod(0o1777)
    np.save(folder / "a.npy", np.arange(1000))
    (folder / "a.npy").chmod(0o644)
    yield folder
    shutil.rmtree(folder)


OPEN = "data = legroom.open(sys.argv[2]); print(data.info.backing, data.info.store, int(data['array'].sum()))"


@pytest.mark.real("user")
def test_each_user_has_a_store_that_others_cannot_read(shared: Path) -> None:
    for uid in (12345, 12346):
        assert as_user(uid, OPEN, shared, shared / "a.npy").split() == ["shm", f"{shared}/legroom-{uid}", "499500"]
    assert as_user(12346, "print(os.listdir(sys.argv[2]))", shared, shared / "legroom-12345").startswith(
        "PermissionError"
    )


@pytest.mark.real("user")
def test_a_squatted_store_is_passed_over_for_the_disk(shared: Path) -> None:
    as_user(12346, "os.mkdir(sys.argv[2], 0o777); os.chmod(sys.argv[2], 0o777)", shared, shared / "legroom-12345")
    assert as_user(12345, OPEN, shared, shared / "a.npy").split()[0] == "disk"
    told = as_user(12345, OPEN + "; print([f.code for f in data.findings])", shared, shared / "b.npy")
    assert told.startswith("UnreadableSource")
    np.save(shared / "b.npy", np.arange(10))
    told = as_user(12345, OPEN + "; print([f.code for f in data.findings])", shared, shared / "b.npy")
    assert "store-squatted" in told


@pytest.mark.real("user")
def test_a_file_that_may_not_be_read(shared: Path) -> None:
    (shared / "a.npy").chmod(0o600)
    told = as_user(12345, OPEN, shared, shared / "a.npy")
    assert told.startswith("UnreadableSource") and "no read permission" in told


IN_NAMESPACE = """
import ctypes, os, sys
import numpy, legroom
from legroom.cache import elect_builder_and_publish, list_and_verify, store_directories, open_without_cache
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) != 0:  # a user namespace
        os._exit(77)
    os.write(ready[1], b"x")
    os.read(go[0], 1)
    if sys.argv[1] == "mapped":
        os.setresuid(65534, 65534, 65534)
    try:
        assert os.geteuid() == 65534
        with store_directories.open_stores(make=True) as found:
            print([str(one.root) for one in found.found if sys.argv[2] in str(one.root)])
            print([finding.code for finding in found.findings])
    finally:
        sys.stdout.flush()
        os._exit(0)
os.read(ready[0], 1)
if sys.argv[1] == "mapped":
    open(f"/proc/{child}/uid_map", "w").write("65534 65534 1")
os.write(go[1], b"x")
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def _in_namespace(how: str, shared: Path) -> list[str]:
    env = {**os.environ, "LEGROOM_SHM": str(shared), "LEGROOM_DIR": str(shared / "disk")}
    ended = subprocess.run([sys.executable, "-c", IN_NAMESPACE, how, str(shared)], env=env, capture_output=True,
                           text=True, check=False)  # fmt: skip
    if ended.returncode == 77:
        pytest.skip("no user namespaces here")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.real("user")
@pytest.mark.parametrize("how", ["mapped", "unmapped"])
def test_the_overflow_uid_proves_nothing(shared: Path, how: str) -> None:
    for folder in (shared, shared / "disk"):
        (folder / "legroom-65534").mkdir(mode=0o755)
        for name in ("locks", "sources", "work"):
            (folder / "legroom-65534" / name).mkdir(mode=0o755)
        for name in ("", "locks", "sources", "work"):  # of a user that the namespace does not map
            os.chown(folder / "legroom-65534" / name, 12345, 12345)
    found, codes = _in_namespace(how, shared)
    assert found == "[]"
    assert "store-squatted" in codes


@pytest.mark.real("user")
def test_a_program_that_really_runs_as_nobody_has_its_store(shared: Path) -> None:
    told = as_user(65534, OPEN, shared, shared / "a.npy")
    assert told.split() == ["shm", f"{shared}/legroom-65534", "499500"]
    again = as_user(65534, OPEN, shared, shared / "a.npy")
    assert again == told
    found, codes = _in_namespace("mapped", shared)  # its own user, mapped: still its store
    assert f"{shared}/legroom-65534" in found and codes == "[]"


EACH = """
import sys, numpy, legroom
from legroom.cache import drop_and_gc, list_and_verify
known, new = sys.argv[1:]
asked = {
    "list": list_and_verify.listing, "info": lambda: list_and_verify.info(known), "verify": list_and_verify.verify,
    "known": lambda: legroom.open(known)["array"].sum(), "new": lambda: legroom.open(new)["array"].sum(),
    "gc": drop_and_gc.gc, "drop": lambda: drop_and_gc.drop(known),
}
for name, ask in asked.items():
    try:
        print(name, ask() if name in ("known", "new") else "fine", flush=True)
    except legroom.LegroomError as problem:
        print(name, problem.code, flush=True)
print("backing", legroom.open(new).info.backing)
"""


@pytest.mark.real("mount", "user")
@pytest.mark.parametrize("how", ["read-only mount", "read-only folders", "immutable"])
def test_a_store_that_cannot_be_written_is_an_answer_in_words(shared: Path, how: str) -> None:
    """An entry that is there and a file that is not: the first is read or loaded again, the second is on the disk."""
    np.save(shared / "b.npy", np.arange(100))
    env = {**os.environ, "LEGROOM_SHM": str(shared), "LEGROOM_DIR": str(shared / "disk")}
    uid = 12345 if how == "read-only folders" else 0
    (shared / "b.npy").chmod(0o644)
    as_user(uid, OPEN, shared, shared / "a.npy")
    store = shared / f"legroom-{uid}"
    folders = [store, *(path for path in store.rglob("*") if path.is_dir())]
    command = [sys.executable, "-c", EACH, str(shared / "a.npy"), str(shared / "b.npy")]
    try:
        if how == "immutable":
            made = subprocess.run(["chattr", "+i", *map(str, folders)], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no immutable directories here: {made.stderr.strip()}")
        elif how == "read-only folders":
            for folder in folders:
                folder.chmod(0o500)
            command = rigs.as_user(uid, command)
        else:
            line = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", line, str(store), *command]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    finally:
        if how == "immutable":
            subprocess.run(["chattr", "-i", *map(str, folders)], check=False, capture_output=True)
        for folder in folders:
            folder.chmod(0o700)
    assert ended.returncode == 0, ended.stderr
    said = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
    assert said["known"] == "499500" and said["new"] == "4950" and said["backing"] == "disk", ended
    assert set(said) == {"list", "info", "verify", "known", "new", "gc", "drop", "backing"}
