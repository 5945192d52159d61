"""What a dead job left in /dev/shm is removed, and nothing that another job has there."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from legroom.probe.host_files_and_syscalls import Host
from legroom.rescue.job_sampling import JobShmFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")

SHM = Path("/dev/shm")
HOLD = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    area = mmap.mmap(file.fileno(), 0)
print(flush=True)
input()
"""


@pytest.fixture
def made() -> Iterator[list[Path]]:
    """Files to remove at the end."""
    paths: list[Path] = []
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def make(made: list[Path], name: str) -> Path:
    path = SHM / name
    made.append(path)
    path.write_bytes(bytes(8192))
    return path


def unique(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex[:12]}"


@contextmanager
def holder(path: Path) -> Iterator[int]:
    """A process that maps the file; its pid."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        yield process.pid
        process.communicate("\n")


def test_what_the_job_used_is_removed_when_nobody_uses_it_any_more(made: list[Path]) -> None:
    before = make(made, unique("psm_"))
    files = JobShmFiles(Host())
    left, others, notes = (make(made, unique(prefix)) for prefix in ("psm_", "psm_", "notes_"))
    with holder(left) as job, holder(before) as more, holder(notes) as also:
        files.update(lambda: [job, more, also])
        assert files.remove() == 0 and left.exists()
    assert files.remove() == 8192
    # Another job made one of them: it may be on its way from one process to the next.
    assert not left.exists() and before.exists() and others.exists() and notes.exists()
    assert files.remove() == 0


def test_a_torch_file_names_its_creator(made: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(type(host), "link", lambda _, path: {"/proc/self/ns/pid": "pid:[4026531836]"}.get(path))
    files = JobShmFiles(host)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        pass
    files.add_processes([ended.pid])
    mine = make(made, unique(f"torch_{ended.pid}_"))
    theirs = make(made, unique(f"torch_{2**22 + 1}_"))
    cache = make(made, unique("torch_cache_"))
    assert files.remove() == 8192  # also one that came after the last sample
    assert not mine.exists() and theirs.exists() and cache.exists()


def test_in_a_container_a_pid_in_a_name_proves_nothing(made: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(type(host), "link", lambda _, path: {"/proc/self/ns/pid": "pid:[4026532000]"}.get(path))
    files = JobShmFiles(host)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        pass
    files.add_processes([ended.pid])
    theirs = make(made, unique(f"torch_{ended.pid}_"))
    assert files.remove() == 0 and theirs.exists()


def test_a_file_whose_user_comes_later_is_looked_up_again(made: list[Path]) -> None:
    now = 0.0
    files = JobShmFiles(Host(), clock=lambda: now)
    left = make(made, unique("psm_"))
    asked = 0

    def nobody() -> list[int]:
        nonlocal asked
        asked += 1
        return []

    files.update(nobody)
    files.update(nobody)
    assert asked == 1  # not at every sample
    with holder(left) as job:
        now = 2.0
        files.update(lambda: [job])
    assert files.remove() == 8192


def test_legroom_run_removes_it_after_a_job_that_was_killed(tmp_path: Path) -> None:
    name = unique("psm_")
    job = tmp_path / "job.py"
    job.write_text(
        "import os, pathlib, signal, sys, time\n"
        "area = open('/dev/shm/' + sys.argv[1], 'w+b')\n"
        "area.write(bytes(3 << 20)); area.flush()\n"
        "time.sleep(1.5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "legroom", "run", "--", sys.executable, str(job), name],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "LEGROOM_DIR": str(tmp_path)},
    )  # fmt: skip
    try:
        assert not (SHM / name).exists(), ran.stderr
        assert "removed 3 MB that the job left in /dev/shm" in ran.stderr, ran.stderr
    finally:
        (SHM / name).unlink(missing_ok=True)
