"""Users beside each other: nobody reads, plants or blocks another's data."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

AS_USER = """
import os, sys
import numpy, h5py, legroom
from legroom.cache import build, catalog, plain
os.setgroups([])
os.setegid(int(sys.argv[1]))
os.seteuid(int(sys.argv[1]))
try:
    {body}
except (legroom.LegroomError, OSError) as problem:
    print(type(problem).__name__, problem)
"""


def as_user(uid: int, body: str, shared: Path, *arguments: object) -> str:
    """What that body prints, run with the effective uid of somebody else."""
    env = {**os.environ, "LEGROOM_SHM": str(shared), "LEGROOM_DIR": str(shared / "disk")}
    script = AS_USER.replace("{body}", body.replace("\n", "\n    "))
    command = [sys.executable, "-c", script, str(uid), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like /dev/shm that other users reach."""
    folder = tmp_path_factory.mktemp("shared")
    everybodys = Path(tempfile.gettempdir())
    for above in (folder, *(one for one in folder.parents if everybodys in one.parents)):
        above.chmod(above.stat().st_mode | 0o055)
    for name in ("", "disk"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name).chmod(0o1777)
    np.save(folder / "a.npy", np.arange(1000))
    (folder / "a.npy").chmod(0o644)
    return folder


OPEN = "data = legroom.open(sys.argv[2]); print(data.info.backing, data.info.store, int(data['array'].sum()))"


@pytest.mark.real("user")
def test_each_user_has_a_store_that_others_cannot_look_into(shared: Path) -> None:
    for uid in (12345, 12346):
        assert as_user(uid, OPEN, shared, shared / "a.npy").split() == [
            "shm",
            f"{shared}/legroom-{uid}",
            "499500",
        ]
    assert as_user(12346, "print(os.listdir(sys.argv[2]))", shared, shared / "legroom-12345").startswith(
        "PermissionError"
    )


@pytest.mark.real("user")
def test_a_squatted_store_is_passed_over_for_the_disk(shared: Path) -> None:
    as_user(
        12346, "os.mkdir(sys.argv[2], 0o777); os.chmod(sys.argv[2], 0o777)", shared, shared / "legroom-12345"
    )
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
    assert told.startswith("UnreadableSource") and "may not read" in told
