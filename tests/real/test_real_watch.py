"""Real leaks, seen coming: into a small /dev/shm, and into RAM under a cgroup's limit. And a real kill of a watch.

The alarm counts time in sampling intervals, so a watch at 0.1 s sees in seconds what one at 1 s sees in minutes.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import rigs

from legroom.monitor.watch_log import read_samples

INTERVAL = 0.1

# A leak at an even pace: so many bytes every 50 ms, kept for ever. It takes two steps for each line that it is sent, and
# is sent one for each sample: on a busy machine a watch may stand still for longer than the leak takes to fill its memory.
LEAK_SHM = """
import mmap, os, sys, time
each, kept = int(sys.argv[1]), []
def grow(size):
    fd = os.open(f"/dev/shm/leak-{len(kept)}", os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(fd, 0, size)
    area = mmap.mmap(fd, size); area[:] = b"x" * size; kept.append(area); os.close(fd)
grow(8 << 20)
while sys.stdin.readline():
    for _ in range(2):
        grow(each)
        time.sleep(0.05)
"""
LEAK_RAM = """
import sys, time
each, kept = int(sys.argv[1]), [bytearray(b"x") * (30 << 20)]
while sys.stdin.readline():
    for _ in range(2):
        kept.append(bytearray(b"x") * each)
        time.sleep(0.05)
"""


@contextmanager
def _running(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(command, text=True, **more)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream:
                stream.close()


def _watch(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "legroom", "watch", "--interval", str(INTERVAL), "--json", *arguments]


def _sampled(child: subprocess.Popen[str]) -> None:
    """Tell a leak that a sample was taken; it may have died by then."""
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        os.write(child.stdin.fileno(), b"\n")


def _watching(child: subprocess.Popen[str]) -> AbstractContextManager[subprocess.Popen[str]]:
    return _running(_watch("--pid", str(child.pid)), stdout=subprocess.PIPE)


def _until_dead(watch: subprocess.Popen[str], leak: subprocess.Popen[str], code: str) -> tuple[dict[str, Any], float]:
    """The alarm of that code, and how many intervals before the leak's death it came."""
    assert watch.stdout is not None
    found, clock, last = None, 0.0, 0.0
    for number, line in enumerate(watch.stdout):
        if number >= 10:  # it stands still for a second
            _sampled(leak)
        data = json.loads(line)
        last = data["clock"]
        for alarm in data["alarms"]:
            if alarm["code"] == code and found is None:
                found, clock = alarm, last
    assert leak.wait(60) != 0, "the leak was meant to die of it"
    assert found is not None, "nothing was said before it died"
    return found, (last - clock) / INTERVAL


@pytest.mark.real("mount")
def test_a_leak_into_dev_shm_is_reported_before_it_is_full() -> None:
    # The watch stands outside: the leak has a /dev/shm of its own, as in a container.
    with (
        _running(
            rigs.small_shm([sys.executable, "-c", LEAK_SHM, str(210 << 10)], "64m"),
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as leak,
        _running(_watch("--pid", str(leak.pid)), stdout=subprocess.PIPE) as watch,
    ):
        alarm, lead = _until_dead(watch, leak, "shm-filling")
    assert alarm["pids"] == [leak.pid] and f"from pid {leak.pid} (" in alarm["message"]
    assert lead >= 30
    rate = alarm["evidence"]["bytes_per_second"]
    assert 1 << 20 < rate < 6 << 20


@pytest.mark.real("cgroup")
def test_a_leak_into_ram_is_reported_before_the_kernel_kills() -> None:
    with rigs.memory_cgroup(160 << 20) as group:
        command = group.command([sys.executable, "-c", LEAK_RAM, str(430 << 10)])
        with _running(command, stdin=subprocess.PIPE) as leak, _watching(leak) as watch:
            alarm, lead = _until_dead(watch, leak, "ram-filling")
        assert leak.returncode == -signal.SIGKILL and group.oom_kills() == 1
    assert alarm["pids"] == [leak.pid]
    assert lead >= 30


@pytest.mark.real("cgroup")
def test_a_warm_up_of_the_same_size_is_silent() -> None:
    warm = (
        "import sys\nkept = [bytearray(b'x') * (5 << 20) for _ in range(16) if sys.stdin.readline()]\nsys.stdin.read()"
    )
    with rigs.memory_cgroup(160 << 20) as group:
        command = group.command([sys.executable, "-c", warm])
        with _running(command, stdin=subprocess.PIPE) as child, _watching(child) as watch:
            assert watch.stdout is not None
            assert child.stdin is not None
            lines = []
            for line in watch.stdout:
                lines.append(json.loads(line))
                if len(lines) <= 16:
                    _sampled(child)
                elif len(lines) == 16 + 40:
                    child.stdin.close()
            assert watch.wait(60) == 0  # it ends with what it watches
    assert len(lines) > 16 + 40
    assert not [alarm for line in lines for alarm in line["alarms"] if alarm["code"].endswith("-filling")]
    assert max(pool["used"] for line in lines for pool in line["pools"] if pool["name"] == "ram") > 80 << 20
    # To the last sample it is the group's limit that counts: a process that has just died is in no group any more.
    assert [pool["size"] for line in lines[5:] for pool in line["pools"] if pool["name"] == "ram"] == [160 << 20] * len(
        lines[5:]
    )


def test_a_watch_that_is_killed_leaves_a_log_that_can_be_replayed(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with _running(_watch("--pid", str(os.getpid()), "--log", str(log)), stdout=subprocess.DEVNULL) as watch:
        deadline = time.monotonic() + 60
        while not log.exists() or log.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < deadline and watch.poll() is None
            time.sleep(0.05)
        os.kill(watch.pid, signal.SIGKILL)
    found = list(read_samples(log, lambda text: None))
    assert len(found) >= 5 and all(row.pid for one in found for row in one.processes)


def test_sigterm_ends_a_watch_with_its_log_whole(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with _running(_watch("--pid", str(os.getpid()), "--log", str(log)), stdout=subprocess.DEVNULL) as watch:
        deadline = time.monotonic() + 60
        while not log.exists() or log.read_bytes().count(b"\n") < 2:
            assert time.monotonic() < deadline and watch.poll() is None
            time.sleep(0.05)
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(60) == 0
    assert log.read_bytes().endswith(b"\n")


def _until(what: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_watch_by_command_line_waits_for_its_job_outlives_it_and_can_be_stopped(tmp_path: Path, number: int) -> None:
    log = tmp_path / "run.jsonl"
    word = f"job-{os.getpid()}-{number}"

    def between_two_runs() -> bool:
        return '"processes":[]' in log.read_text().splitlines()[-1]

    with _running(
        _watch("--match", word, "--log", str(log)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as watch:
        assert watch.stderr is not None and "waiting" in watch.stderr.readline()
        with _running([sys.executable, "-c", "import time; time.sleep(600)", word]) as job:
            _until(lambda: log.exists() and f'"pid":{job.pid},' in log.read_text())
        _until(between_two_runs)
        before, began = _cpu_seconds(watch.pid), time.monotonic()
        time.sleep(2)
        assert _cpu_seconds(watch.pid) - before < 0.25 * (time.monotonic() - began), "it spins"
        with _running([sys.executable, "-c", "import time; time.sleep(600)", word]) as second:
            _until(lambda: f'"pid":{second.pid},' in log.read_text())
        _until(between_two_runs)  # before the signal: it must stop a watch that has nothing to watch
        watch.send_signal(number)
        assert watch.wait(60) == 0


@pytest.mark.real("cgroup")
@pytest.mark.parametrize("by", ["--pid", "--match"])
def test_the_oom_kill_of_what_is_watched_is_reported(by: str) -> None:
    word = f"victim-{os.getpid()}"
    with rigs.memory_cgroup(96 << 20) as group:
        command = group.command([sys.executable, "-c", LEAK_RAM, str(8 << 20), word])
        with (
            _running(command, stdin=subprocess.PIPE) as leak,
            _running(
                _watch(by, str(leak.pid) if by == "--pid" else word), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as watch,
        ):
            assert watch.stdout is not None
            for line in watch.stdout:
                _sampled(leak)
                found = [alarm for alarm in json.loads(line)["alarms"] if alarm["code"] == "oom-kill"]
                if found:
                    break
            else:
                pytest.fail("it was killed and nothing was said")
            assert leak.wait(60) == -signal.SIGKILL
    assert found[0]["level"] == "critical" and leak.pid in found[0]["pids"]


def test_a_pipe_that_is_not_read_holds_up_no_other_output(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    command = _watch("--pid", str(os.getpid()), "--log", str(log))
    with _running(command, stdout=subprocess.PIPE) as watch:
        assert watch.stdout is not None
        fcntl.fcntl(watch.stdout, fcntl.F_SETPIPE_SZ, 4096)
        _until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 20)  # far more than the pipe holds
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(60) == 0  # although nobody reads what it still had to write
    assert log.read_bytes().endswith(b"\n")


@pytest.mark.real("swap", "cgroup")
def test_swap_that_moves_is_reported() -> None:
    # 60 MB walked over and over where 32 fit: what is thrown out is needed again at once.
    walk = (
        "import time\narea = bytearray(60 << 20)\nend = time.monotonic() + 240\n"
        "while time.monotonic() < end:\n    for place in range(0, len(area), 4096): area[place] = 1\n"
    )
    with rigs.swap_file(128 << 20), rigs.memory_cgroup(32 << 20, swap=100 << 20) as group:
        command = group.command([sys.executable, "-c", walk])
        with _running(command) as child, _watching(child) as watch:
            assert watch.stdout is not None
            for line in watch.stdout:
                alarms = {alarm["code"]: alarm for alarm in json.loads(line)["alarms"]}
                if "swap-moving" in alarms:
                    break
            else:
                pytest.fail("swap moved and nothing was said")
    assert alarms["swap-moving"]["evidence"]["out_per_second"] > 0
