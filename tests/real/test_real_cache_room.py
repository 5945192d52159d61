"""Too little room, of every real kind: a small /dev/shm, a memory cgroup, a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import rigs

MB = 1 << 20

OPEN = """
import json, os, sys
import numpy as np
import legroom
path, options = sys.argv[1], json.loads(sys.argv[2])
def left():
    return [name for root in (os.environ["LEGROOM_SHM"], os.environ["LEGROOM_DIR"])
            for folder, _, names in os.walk(root) for name in names if name not in ("store.lock", "used") and not name.startswith("src-")]
try:
    data = legroom.open(path, **options)
except legroom.LegroomError as problem:
    print(json.dumps({"code": problem.code, "text": str(problem), "left": left()}))
else:
    array = data["array"]
    total = sum(int(array[start : start + (1 << 20)].sum()) for start in range(0, len(array), 1 << 20))
    print(json.dumps({"backing": data.info.backing, "sum": total}))
"""


def write(path: Path, size: int) -> int:
    array = np.random.default_rng(3).integers(0, 255, size, np.uint8)
    np.save(path, array)
    return int(array.sum())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A file of 300 MB, which fits into none of the rigs, and the sum of it."""
    path = tmp_path_factory.mktemp("large") / "a.npy"
    return path, write(path, 300 * MB)


def environment(shm: Path, disk: Path) -> dict[str, str]:
    return {**os.environ, "LEGROOM_SHM": str(shm), "LEGROOM_DIR": str(disk)}


def opened(command: list[str], env: dict[str, str]) -> dict[str, object]:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.real("mount")
def test_a_small_shm_is_slower_and_never_fatal(large: tuple[Path, int], tmp_path: Path) -> None:
    path, total = large
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "-c", OPEN, str(path), "{}"]
    result = opened(rigs.small_shm(command, "64m"), environment(Path("/dev/shm"), disk))
    assert result == {"backing": "disk", "sum": total}


@pytest.mark.real("mount")
def test_shm_alone_reports_what_is_missing_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.npy", 100 * MB)
    command = [sys.executable, "-c", OPEN, str(tmp_path / "a.npy"), '{"backing": "shm"}']
    result = opened(rigs.small_shm(command, "64m"), environment(Path("/dev/shm"), tmp_path / "disk"))
    assert result["code"] == "no-room"
    assert result["left"] == []
    assert "more needed" in str(result["text"]) and (
        "remount,size=" in str(result["text"]) or "--shm-size=" in str(result["text"])
    )


@pytest.mark.real("mount")
def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.npy", 60 * MB)
    full = tmp_path / "full"
    full.mkdir()
    inner = [sys.executable, "-c", OPEN, str(tmp_path / "a.npy"), "{}"]
    script = f'mount -t tmpfs -o size=32m tmpfs {full} && exec "$@"'
    command = rigs.small_shm(["sh", "-c", script, "sh", *inner], "16m")
    result = opened(command, environment(Path("/dev/shm"), full))
    assert result["code"] == "no-room"
    assert result["left"] == []


@pytest.mark.real("mount")
@pytest.mark.parametrize("chunks", [None, (1 << 20,)])
def test_a_disk_that_fills_up_during_the_load_is_an_error_too(tmp_path: Path, chunks: object) -> None:
    """The room is there when it is looked at, and gone when the data are written."""
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = np.random.default_rng(3).integers(0, 255, 20 * MB, np.uint8)
        file.create_dataset("array", data=data, chunks=chunks, compression="gzip" if chunks else None)
    disk = tmp_path / "disk"
    disk.mkdir()
    thief = (
        "from legroom.cache import store_directories\n"
        "def steal(name):\n"
        "    if name == 'allocate':\n"
        "        import os\n"
        "        fd = os.open(os.environ['LEGROOM_DIR'] + '/thief', os.O_CREAT | os.O_RDWR)\n"
        "        os.posix_fallocate(fd, 0, 24 << 20)\n"
        "        os.unlink(os.environ['LEGROOM_DIR'] + '/thief')\n"
        "store_directories.step_hook = steal\n"
    )
    inner = [sys.executable, "-c", thief + OPEN, str(tmp_path / "a.h5"), '{"backing": "disk"}']
    script = f'mount -t tmpfs -o size=40m tmpfs {disk} && exec "$@"'
    result = opened(rigs.small_shm(["sh", "-c", script, "sh", *inner], "16m"), environment(Path("/dev/shm"), disk))
    assert result["code"] == "no-room", result
    assert result["left"] == []


@pytest.mark.real("cgroup")
@pytest.mark.parametrize("backing", ["auto", "shm"])
def test_a_cgroup_with_a_neighbour_has_no_oom_kill(large: tuple[Path, int], tmp_path: Path, backing: str) -> None:
    path, total = large
    shm, disk = Path(f"/dev/shm/legroom-test-{os.getpid()}-{backing}"), tmp_path / "disk"
    shm.mkdir(mode=0o700)
    disk.mkdir()
    hog = f"import time; block = bytearray({80 * MB}); block[::4096] = b'x' * len(block[::4096]); print('on', flush=True); time.sleep(600)"
    try:
        with rigs.memory_cgroup(200 * MB) as group:
            neighbour = subprocess.Popen(group.command([sys.executable, "-c", hog]), stdout=subprocess.PIPE, text=True)
            try:
                assert neighbour.stdout is not None
                assert neighbour.stdout.readline() == "on\n"
                command = [sys.executable, "-c", OPEN, str(path), json.dumps({"backing": backing})]
                result = opened(group.command(command), environment(shm, disk))
                time.sleep(0.1)
                assert neighbour.poll() is None
                assert group.oom_kills() == 0
            finally:
                neighbour.kill()
                neighbour.wait()
                neighbour.stdout.close()
        if backing == "auto":
            assert result == {"backing": "disk", "sum": total}
        else:
            assert result["code"] == "no-room"
            assert "cgroup" in str(result["text"])
            assert result["left"] == []
    finally:
        subprocess.run(["rm", "-rf", str(shm)], check=True)


@pytest.mark.real("mount")
def test_a_shm_full_to_the_last_page_is_passed_by(tmp_path: Path) -> None:
    total = write(tmp_path / "a.npy", 3 * MB)
    disk = tmp_path / "disk"
    disk.mkdir()
    inner = [sys.executable, "-c", OPEN, str(tmp_path / "a.npy"), "{}"]
    script = 'head -c 2000000 /dev/zero > /dev/shm/full; exec "$@"'
    command = rigs.small_shm(["sh", "-c", script, "sh", *inner], "1m")
    assert opened(command, environment(Path("/dev/shm"), disk)) == {"backing": "disk", "sum": total}


@pytest.mark.real("mount")
def test_a_user_in_another_pid_namespace_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from legroom.cache import drop_and_gc, list_and_verify
    from legroom.errors import EntryInUse

    write(tmp_path / "a.npy", MB)
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir(mode=0o700)
    env = environment(tmp_path / "shm", tmp_path / "disk")
    monkeypatch.setenv("LEGROOM_SHM", env["LEGROOM_SHM"])
    monkeypatch.setenv("LEGROOM_DIR", env["LEGROOM_DIR"])
    hold = "import legroom, sys; data = legroom.open(sys.argv[1]); print('on', flush=True); sys.stdin.read()"
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", hold, str(tmp_path / "a.npy")]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdin is not None and user.stdout is not None
        assert user.stdout.readline() == "on\n"
        # And seen from inside another one, where the user has no number at all.
        look = "import sys; from legroom.cache import list_and_verify; print(list_and_verify.info(sys.argv[1]).in_use)"
        inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", look, str(tmp_path / "a.npy")]
        assert subprocess.run(inside, env=env, capture_output=True, text=True, check=True).stdout == "True\n"
        with pytest.raises(EntryInUse):
            drop_and_gc.drop(tmp_path / "a.npy")
        user.stdin.close()
    assert list_and_verify.info(tmp_path / "a.npy").in_use is False
    drop_and_gc.drop(tmp_path / "a.npy")


BLIND = """
import os, sys
import legroom
from legroom.cache import store_free_space

store_free_space.bounds = store_free_space.bounds_now = lambda store, env=None: [store_free_space.Bound(1 << 40, lambda: "every check sees free space")]
try:
    legroom.open(sys.argv[1], backing="shm")
except legroom.LegroomError as problem:
    left = [name for name in os.listdir(f"/dev/shm/legroom-{os.geteuid()}") if name not in ("locks", "sources", "work")]
    print(problem.code, left, os.statvfs("/dev/shm").f_bfree * 4096 >> 20)
"""


@pytest.mark.real("mount")
def test_compressed_chunks_that_meet_a_full_shm_are_refused(tmp_path: Path) -> None:
    """They are written, not mapped: where the room went after it had been looked at, a write says so."""
    rows = np.random.default_rng(0).integers(0, 4, (100, 1 << 20), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(1, 1 << 20), compression="gzip", compression_opts=1)
    command = [sys.executable, "-c", BLIND, str(tmp_path / "a.h5")]
    done = subprocess.run(
        rigs.small_shm(command, "64m"), env=environment(Path("/dev/shm"), tmp_path), capture_output=True, text=True
    )
    assert done.stdout.split() == ["no-room", "[]", "63"] or done.stdout.split() == ["no-room", "[]", "64"], done.stderr


@pytest.mark.real("mount")
def test_a_shm_without_inodes_is_passed_by(tmp_path: Path) -> None:
    total = write(tmp_path / "a.npy", 3 * MB)
    disk = tmp_path / "disk"
    disk.mkdir()
    inner = [sys.executable, "-c", OPEN, str(tmp_path / "a.npy"), "{}"]
    # Its directories are there: they were made before others took the last inode.
    script = (
        'mount -o remount,nr_inodes=40 /dev/shm && mkdir -p -m 700 "/dev/shm/legroom-$(id -u)/locks"'
        ' "/dev/shm/legroom-$(id -u)/sources"; (cd /dev/shm && touch $(seq 60) 2>/dev/null); exec "$@"'
    )
    command = rigs.small_shm(["sh", "-c", script, "sh", *inner], "64m")
    assert opened(command, environment(Path("/dev/shm"), disk)) == {"backing": "disk", "sum": total}


@pytest.mark.real("cgroup")
def test_what_another_cgroup_is_charged_for_is_not_evicted_in_vain(tmp_path: Path) -> None:
    """The unused entry was built outside: removing it makes no room inside the group."""
    shm, disk = Path(f"/dev/shm/legroom-test-{os.getpid()}-charged"), tmp_path / "disk"
    shm.mkdir(mode=0o700)
    disk.mkdir()
    write(tmp_path / "old.npy", 120 * MB)
    total = write(tmp_path / "new.npy", 100 * MB + 1)
    env = environment(shm, disk)
    try:
        first = opened([sys.executable, "-c", OPEN, str(tmp_path / "old.npy"), "{}"], env)
        assert first["backing"] == "shm"
        with rigs.memory_cgroup(120 * MB) as group:
            command = [sys.executable, "-c", OPEN, str(tmp_path / "new.npy"), "{}"]
            assert opened(group.command(command), env) == {"backing": "disk", "sum": total}
            assert group.oom_kills() == 0
        look = "import sys; from legroom.cache import list_and_verify; print(list_and_verify.info(sys.argv[1]).backing)"
        command = [sys.executable, "-c", look, str(tmp_path / "old.npy")]
        assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == "shm\n"
    finally:
        subprocess.run(["rm", "-rf", str(shm)], check=True)
