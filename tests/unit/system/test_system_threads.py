"""Threads are started only where the limits leave room for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from legroom.system import processes_and_threads

NO_MAPS = """
import mmap, sys
from legroom.system import processes_and_threads
from legroom.system.processes_and_threads import room_for_threads, start_daemon_thread, why_no_thread
assert room_for_threads(4) and start_daemon_thread(lambda: None, "before") is not None
held = []
try:
    while True:
        held.append(mmap.mmap(-1, mmap.PAGESIZE))
except OSError:
    pass
processes_and_threads._maps_seen.clear()  # as a moment later
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
    print("not begun:", len(processes_and_threads._not_begun), flush=True)
from legroom.system import processes_and_threads
from legroom.system.processes_and_threads import start_thread_at_once

def start_late(function, arguments):
    _thread.start_new_thread(lambda: (time.sleep(0.3), function(*arguments)), ())

processes_and_threads._MOST_WAIT_AT_EXIT = 60.0  # on a busy machine a thread may not get a core for seconds
processes_and_threads._thread = types.SimpleNamespace(start_new_thread=start_late)
assert start_thread_at_once(time.sleep, 0)
if "fork" in sys.argv:
    if os.fork():
        os._exit(0 if os.waitstatus_to_exitcode(os.wait()[1]) == 0 else 1)
    processes_and_threads.time = types.SimpleNamespace(monotonic=time.monotonic)  # it cannot sleep
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
    assert not processes_and_threads.start_thread_at_once(print)
    assert not processes_and_threads._not_begun
