"""The guard of a trial run: what it reads, when it stops the command, and how it ends it."""

from __future__ import annotations

import errno
import marshal
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from legroom.loader.measure import memory_guard_script, start_memory_guard
from legroom.loader.measure.memory_guard_script import MemoryMeter
from open_descriptors import open_descriptors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is watched on Linux")
MB = 1 << 20


class Counters:
    """The files of a cgroup with a limit of 100 MB."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("usage", 10 * MB), self.write("peak", 10 * MB), self.write("kills", "oom_kill_disable 0\noom_kill 0")
        self.write("stat", "total_inactive_file 0\ntotal_active_file 0")

    def write(self, name: str, value: object) -> None:
        (self.folder / name).write_text(f"{value}\n")

    @property
    def where(self) -> dict[str, Any]:
        paths = {name: str(self.folder / name) for name in ("usage", "stat")}
        own = {**paths, "limit": 100 * MB, "path": str(self.folder)}
        return {
            "own": own, "shared": False, "limited": [own], "peak": str(self.folder / "peak"), "kills": str(self.folder / "kills"),
            "reclaimable": ["total_inactive_file", "total_active_file"], "reserve": 2 * MB, "shm": "/dev/shm",
            "shm_reserve": 65536,
        }  # fmt: skip


@pytest.fixture
def counters(tmp_path: Path) -> Any:
    yield Counters(tmp_path)
    memory_guard_script.close_files()


def test_it_stops_before_memory_runs_out(counters: Counters) -> None:
    meter = MemoryMeter(counters.where)
    counters.write("usage", 97 * MB)
    assert meter.read() is None and meter.ram == 87 * MB
    counters.write("usage", 99 * MB)
    assert meter.read() == "ram"
    counters.write("stat", f"total_inactive_file {5 * MB}\ntotal_active_file 0")  # the kernel can take that back
    meter = MemoryMeter(counters.where)
    assert meter.read() is None


def test_an_oom_kill_that_it_did_not_see_coming_stops_the_rest(counters: Counters) -> None:
    meter = MemoryMeter(counters.where)
    counters.write("kills", "oom_kill_disable 0\noom_kill 1")
    time.sleep(2 * memory_guard_script.STAT_S)
    assert meter.read() == "ram"


def test_the_kernels_peak_is_recorded_with_its_time(counters: Counters) -> None:
    """So the peak of each part of a trial run is known, not only that of the whole."""
    meter = MemoryMeter(counters.where)
    counters.write("peak", 60 * MB)
    time.sleep(2 * memory_guard_script.STAT_S)
    meter.read()
    counters.write("peak", 80 * MB)
    meter.finish()
    assert [peak for _, peak in meter.history] == [50 * MB, 70 * MB] and meter.ram == 70 * MB


def test_it_opens_no_file_while_the_command_runs(counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a full cgroup an open file can be the allocation for which the OOM killer takes the guard."""
    meter = MemoryMeter(counters.where)
    counters.write("usage", 20 * MB)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("opened a file")

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr("builtins.open", refused)
    time.sleep(2 * memory_guard_script.STAT_S)
    assert meter.read() is None and meter.ram == 10 * MB


def test_memory_that_others_in_the_cgroup_free_does_not_hide_what_the_command_takes(counters: Counters) -> None:
    """Their memory is in the same counter: a need that is too low says yes to what is OOM-killed."""
    meter = MemoryMeter({**counters.where, "shared": True})
    program = f"taken = bytearray(b'x') * {40 * MB}; print('on', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", program], **pipes) as child:  # type: ignore[call-overload]
        child.stdout.readline()
        meter.pid = child.pid
        counters.write("usage", 1 * MB), counters.write("peak", 90 * MB)
        time.sleep(2 * memory_guard_script.TREE_S)
        assert meter.read() is None
        seen = meter.ram
        counters.write("usage", 90 * MB)  # scarce: a sum over processes would open files
        child.stdin.write(b"\n")
    time.sleep(2 * memory_guard_script.TREE_S)
    assert meter.read() is None
    meter.finish()
    assert 40 * MB < seen < 60 * MB and meter.ram == seen + seen // memory_guard_script.UNSEEN


def test_it_knows_whether_others_run_in_the_cgroup(tmp_path: Path) -> None:
    host, below = start_memory_guard.Host(), tmp_path / "below"
    below.mkdir()
    assert start_memory_guard._others_in_cgroup(host, str(tmp_path))  # unreadable
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n{os.getppid()}\n")
    assert not start_memory_guard._others_in_cgroup(host, str(tmp_path))
    (below / "cgroup.procs").write_text("999999999\n")
    assert start_memory_guard._others_in_cgroup(host, str(tmp_path))


def no_time_passes(monkeypatch: pytest.MonkeyPatch, sleep: Any) -> None:
    """In the guard alone: other threads of this process may sleep, and no time limit ends because no core was free."""
    monkeypatch.setattr(memory_guard_script, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))


def test_it_waits_until_a_killed_command_has_returned_its_memory(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = MemoryMeter(counters.where)
    counters.write("usage", 99 * MB)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            counters.write("usage", 20 * MB)

    no_time_passes(monkeypatch, sleep)
    meter.wait_released()
    assert len(slept) == 3


def test_the_command_is_the_first_that_the_oom_killer_takes(tmp_path: Path) -> None:
    """From its first instruction: an interpreter that still imports its modules is no smaller than ``check``."""
    command = ["/bin/cat", "/proc/self/oom_score_adj"]
    pid = memory_guard_script._start({"output": str(tmp_path / "output"), "command": command, "environment": {}})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "output").read_text().strip() == "1000"


def test_a_group_is_ended_without_reading_proc_but_for_what_ignores_sigterm() -> None:
    """multiprocessing's resource tracker ignores it: it has semaphores to unlink."""
    ignores = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    )
    program = (
        "import subprocess, sys, time\n"
        f"tracker = subprocess.Popen([sys.executable, '-S', '-c', {ignores!r}], stdout=subprocess.PIPE)\n"
        "tracker.stdout.readline(); worker = subprocess.Popen(['sleep', '600'])\n"
        "print(tracker.pid, worker.pid, flush=True); time.sleep(600)\n"
    )
    line = [sys.executable, "-S", "-c", program]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    with child.stdout:
        tracker, worker = map(int, child.stdout.readline().split())
    try:
        memory_guard_script.kill_without_memory(child.pid)
        assert child.wait(60) == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while worker in memory_guard_script._in_group(child.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(memory_guard_script._in_group(child.pid)) == {tracker}
    finally:
        os.kill(tracker, signal.SIGKILL)


def test_a_resource_tracker_that_has_just_been_forked_is_known() -> None:
    """Until it runs its own program it looks like the process that forked it; its signals are blocked already."""
    program = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, {2, 15}); print('on', flush=True); time.sleep(60)"
    for blocks in (True, False):
        line = [sys.executable, "-S", "-c", program if blocks else program.replace("{2, 15}", "{2}")]
        child = subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True)
        assert child.stdout is not None
        with child.stdout:
            child.stdout.readline()
        try:
            assert memory_guard_script._in_group(child.pid) == {child.pid: blocks}
        finally:
            child.kill()
            child.wait()


def test_a_fork_that_is_not_the_guard_closes_its_files(counters: Counters) -> None:
    before = open_descriptors()
    MemoryMeter(counters.where)
    assert open_descriptors() - before
    memory_guard_script.close_files()
    assert not open_descriptors() - before


def test_it_waits_until_torch_has_unlinked_the_files_of_ended_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, earlier = tmp_path / "torch_999999999_1_2", tmp_path / "torch_999999999_0_0"
    left.touch(), earlier.touch(), (tmp_path / f"torch_{os.getpid()}_1_0").touch()  # the last one is in use
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            left.unlink()

    no_time_passes(monkeypatch, sleep)
    memory_guard_script._wait_unlinked(str(tmp_path), {earlier.name})
    assert len(slept) == 3


def test_files_of_the_command_s_processes_alone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, left, others, running = (
        "torch_999999998_1_0",
        "torch_999999998_2_1",
        "torch_999999999_1_0",
        f"torch_{os.getpid()}_1_0",
    )
    (tmp_path / earlier).touch()
    leftovers = memory_guard_script.Leftovers(str(tmp_path))
    leftovers.add(["999999998", str(os.getpid())])
    for name in (left, others, running, "cached.npy"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(MB)
    leftovers.remove()
    assert {path.name for path in tmp_path.iterdir()} == {earlier, others, running, "cached.npy"}
    # In a container the number may be that of another container's process: what it has written stays.
    (tmp_path / left).write_bytes(b"batch")
    monkeypatch.setattr(os, "readlink", lambda _: "pid:[4026532000]")
    leftovers.remove()
    assert (tmp_path / left).exists()


@pytest.mark.parametrize("how", ["limit", signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_trial_leaves_no_file(tmp_path: Path, how: Any) -> None:
    """Also where the guard itself is killed."""
    folder, shm = tmp_path / "folder", tmp_path / "shm"
    folder.mkdir(), shm.mkdir()
    worker = f"import os, time; os.truncate(os.open('{shm}/torch_%d_1_0' % os.getpid(), os.O_CREAT | os.O_RDWR), {MB}); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {worker!r}])"
    path = start_memory_guard._plan([sys.executable, "-S", "-c", program], folder, 1 if how == "limit" else 60)
    plan = marshal.loads(path.read_bytes())
    path.write_bytes(marshal.dumps({**plan, "where": {**plan["where"], "shm": str(shm)}}))
    guard = subprocess.Popen([*start_memory_guard._GUARD, str(path)])
    deadline = time.monotonic() + 60
    try:
        while not any(file.stat().st_size for file in shm.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(5 * memory_guard_script.STAT_S)
        if how == "limit":
            assert guard.wait(60) == 0 and (folder / "result").exists()
        else:
            guard.send_signal(how)
            assert guard.wait(60) == -how
            while folder.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not folder.exists()
        assert not list(shm.iterdir())
    finally:
        guard.kill()
        guard.wait()


def test_sockets_of_a_trial_s_workers_are_in_its_folder(tmp_path: Path) -> None:
    """A worker that is killed cannot remove multiprocessing's own directory for temporary files."""
    program = (
        "import sys; from multiprocessing import util; from legroom.loader.measure.dataloader_trial import "
        "prepare_to_be_killed as prepare; prepare(sys.argv[1]); print(util.get_temp_dir())"
    )
    for folder in (tmp_path / "x", tmp_path / ("x" * 100)):  # a socket's path has at most 107 bytes
        line = [sys.executable, "-c", program, str(folder)]
        done = subprocess.run(
            line, capture_output=True, text=True, check=True, cwd="/", env=start_memory_guard.child_environment()
        )
        assert (done.stdout.strip() == str(folder)) == (len(str(folder)) < 80)


@pytest.mark.parametrize(
    ("text", "pool"),
    [
        (b"OSError: [Errno 28] No space left on device\n", "shm"),  # a semaphore
        (b"OSError: [Errno 28] No space left on device: '/psm_1'\n", "shm"),
        (b"OSError: [Errno 28] No space left on device: '/dev/shm/x'\n", "shm"),
        (b"OSError: [Errno 28] No space left on device: '/scratch/cache/x'\n", None),
        (b"OSError: [Errno 28] No space left on device: 'cache/x'\n", None),
        (b"RuntimeError: unable to mmap 4096 bytes from file </torch_1_2>", "shm"),
    ],
)
def test_a_full_disk_is_not_a_full_shm(tmp_path: Path, text: bytes, pool: str | None) -> None:
    (tmp_path / "output").write_bytes(text)
    output = memory_guard_script._Output(str(tmp_path / "output"), [*start_memory_guard._MARKS])
    assert output.reported() == pool


@pytest.mark.parametrize(("number", "stopped", "status"), [(errno.ENOMEM, "ram", None), (errno.EAGAIN, None, 1)])
@pytest.mark.parametrize("where", ["fork", "guard"])
def test_a_process_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int, stopped: str | None, status: int | None
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    if where == "fork":
        monkeypatch.setattr(os, "fork", refuse)
        ran = start_memory_guard.fork_guarded(lambda: None, tmp_path, 60)
    else:
        monkeypatch.setattr(subprocess, "run", refuse)
        ran = start_memory_guard.run_guarded(["true"], tmp_path, 60)
    assert (ran.stopped, ran.status) == (stopped, status)
    assert os.strerror(number) in (tmp_path / "output").read_text()


def test_the_number_of_a_command_that_has_ended_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    ran = start_memory_guard.fork_guarded(lambda: None, tmp_path, 60)
    assert ran.status == 0 and killed == []


def test_free_memory_that_cannot_be_read_again_stays_what_it_was(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = MemoryMeter(counters.where)
    before = meter._available
    content = memory_guard_script._content

    def unreadable(path: str, size: int) -> bytes:
        if path == "/proc/meminfo":
            raise OSError(errno.EMFILE, "Too many open files")
        return content(path, size)

    monkeypatch.setattr(memory_guard_script, "_content", unreadable)
    meter._read_caches()
    assert before and meter._available == before
