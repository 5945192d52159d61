"""How a child ended, from every source of a status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from legroom.system import process_control
from legroom.system.process_control import ExitStatus, prefer_oom_kill, signal_name


def test_signal_names() -> None:
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert signal_name(1000) == "signal 1000"


@pytest.mark.parametrize(
    ("code", "text", "shell", "success"),
    [(0, "exit code 0", 0, True), (3, "exit code 3", 3, False)]
    + ([(-9, "killed by signal 9 (SIGKILL)", 137, False)] if os.name == "posix" else []),
)
def test_the_status_that_subprocess_gives(code: int, text: str, shell: int, success: bool) -> None:
    script = f"import os, sys; os.kill(os.getpid(), {-code}) if {code} < 0 else sys.exit({code})"
    ended = ExitStatus.of(subprocess.run([sys.executable, "-c", script]).returncode)
    assert (str(ended), ended.shell_status, ended.success) == (text, shell, success)


def test_a_signal_is_recognized_also_behind_a_shell() -> None:
    assert ExitStatus(signal=9).by_signal(9) and ExitStatus(137).by_signal(9)
    assert not ExitStatus(9).by_signal(9) and not ExitStatus(signal=15).by_signal(9)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_oom_killer_takes_this_process_first() -> None:
    child = os.fork()
    if child == 0:
        prefer_oom_kill()
        os._exit(0 if Path("/proc/self/oom_score_adj").read_text().strip() == "1000" else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_child_ends_with_its_parent() -> None:
    child = (
        "import signal, time; from legroom.system.process_control import die_with_parent\n"
        "die_with_parent(signal.SIGKILL); print('ready', flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); input()"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None and started.stdout.readline() == "ready\n"
        started.kill()
        assert started.stdout.read() == ""  # the child had it open too: its end is the end of the child


NO_MAPS = """
import mmap, sys
from legroom.system import process_control
from legroom.system.process_control import room_for_threads, start_daemon_thread, why_no_thread
assert room_for_threads(4) and start_daemon_thread(lambda: None, "before") is not None
held = []
try:
    while True:
        held.append(mmap.mmap(-1, mmap.PAGESIZE))
except OSError:
    pass
process_control._maps_seen.clear()  # as a moment later
for left in (0, 8):
    del held[len(held) - left:]
    assert not room_for_threads(1) and start_daemon_thread(lambda: None, "after") is None
    assert "max_map_count" in why_no_thread(), why_no_thread()
del held[:]
assert room_for_threads(4)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or int(Path("/proc/sys/vm/max_map_count").read_text()) > 200_000,
    reason="it takes too long to reach this machine's vm.max_map_count",
)
def test_no_thread_is_started_where_a_process_may_have_no_more_maps() -> None:
    """With 8 left a thread starts and finds no memory: CPython waits for it forever."""
    ended = subprocess.run([sys.executable, "-c", NO_MAPS], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


EXIT = """
import atexit, os, sys, time, types, _thread
@atexit.register  # registered before legroom's, so it runs after that
def report():
    print("not begun:", len(process_control._not_begun), flush=True)
from legroom.system import process_control
from legroom.system.process_control import start_thread_at_once

def start_late(function, arguments):
    _thread.start_new_thread(lambda: (time.sleep(0.3), function(*arguments)), ())

process_control._thread = types.SimpleNamespace(start_new_thread=start_late)
assert start_thread_at_once(time.sleep, 0)
if "fork" in sys.argv:
    if os.fork():
        os._exit(0 if os.waitstatus_to_exitcode(os.wait()[1]) == 0 else 1)
    process_control.time = types.SimpleNamespace(monotonic=time.monotonic)  # it cannot sleep
"""


@pytest.mark.parametrize("given", [[], ["fork"]])
def test_an_exit_waits_until_threads_have_begun(given: list[str]) -> None:
    """A thread that begins while Python frees its state crashes some versions; a forked child has no such thread."""
    ended = subprocess.run([sys.executable, "-c", EXIT, *given], capture_output=True, text=True, check=True)
    assert ended.stdout == "not begun: 0\n" and ended.stderr == ""


def test_a_thread_that_cannot_be_started_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", none_left)
    assert not process_control.start_thread_at_once(print)
    assert not process_control._not_begun
