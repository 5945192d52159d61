"""A watch where ``ulimit -v`` leaves no room for its threads: it does without, says so, and never hangs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from no_room_for_threads import run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def test_a_script_runs_on_unwatched_with_one_warning(tmp_path: Path) -> None:
    ran = run_program(
        """
import warnings, legroom, legroom.monitor.watch_in_script
leave_no_room_for_threads()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    with legroom.watch(log="run.jsonl", on_alarm=print, prometheus=0) as w:
        w.mark("epoch 0"), w.step()
        print(w.latest, w.alarms, len(w.history.samples))
print(*(one.message for one in warned), sep="\\n")
""",
        tmp_path,
    )
    state, *warned = ran.stdout.splitlines()
    assert state == "None () 0" and len(warned) == 1, ran
    assert warned[0].startswith("legroom.watch: this process is not watched: ulimit -v"), ran
    assert not (tmp_path / "run.jsonl").exists()


def test_slow_outputs_and_alarms_are_written_in_the_watch_s_own_thread(tmp_path: Path) -> None:
    ran = run_program(
        f"""
import sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from monitor_samples import MB, moments, pool, sample
from legroom.monitor.notify import Notifier, function_sender
from legroom.monitor.watch_loop import BackgroundOutput
from legroom.monitor.watch_loop import feed_outputs
class Lines:
    def show(self, moment): print("shown", moment.sample.clock)
    def close(self): print("closed")
full = [sample(float(n), pool("shm", 100 * MB, 99 * MB)) for n in range(3)]
leave_no_room_for_threads()
report = lambda text: print("report", text)
alarms = Notifier(function_sender(lambda alarm: print("alarm", alarm.pool)), report)
failing = Notifier(function_sender(lambda alarm: 1 / 0), report)
feed_outputs(moments(full), [BackgroundOutput(Lines(), threading.Event(), report), alarms, failing])
print(threading.active_count())
""",
        tmp_path,
    )
    lines = ran.stdout.splitlines()
    assert [line for line in lines if line.startswith("shown")] == ["shown 0.0", "shown 1.0", "shown 2.0"], ran
    assert "alarm shm" in lines and "closed" in lines and lines[-1] == "1", ran
    reports = [line for line in lines if line.startswith("report")]
    assert sum("ulimit -v" in line for line in reports) == 3, ran
    assert any("division by zero" in line for line in reports), ran


def test_a_server_that_cannot_be_started_gives_its_port_back(tmp_path: Path) -> None:
    ran = run_program(
        """
from legroom.errors import CannotListen
from legroom.monitor.http_server import Handler, serve
leave_no_room_for_threads()
try:
    serve(("127.0.0.1", 0), Handler)
except CannotListen as problem:
    print(problem.code, "ulimit -v" in problem.why, bool(problem.fix))
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    print([link for link in links if os.path.exists(link) and "socket:" in os.readlink(link)])
""",
        tmp_path,
    )
    assert ran.stdout.split() == ["cannot-listen", "True", "True", "[]"], ran


def test_a_client_is_answered_without_a_thread_of_its_own(tmp_path: Path) -> None:
    ran = run_program(
        """
import http.client, urllib.request, legroom.system.processes_and_threads as control
from legroom.monitor import http_server
class Page(http_server.Handler):
    def page(self, path): self.respond_text(200, path)
server = http_server.serve(("127.0.0.1", 0), Page)
urllib.request.urlopen(server.url + "/before", timeout=30).read()
leave_no_room_for_threads()
print(control.room_for_threads(1))
for number in range(3):
    with urllib.request.urlopen(f"{server.url}/{number}", timeout=30) as answer:
        print(answer.status, answer.read().decode().strip())
server.stop()
""",
        tmp_path,
    )
    assert ran.stdout.split() == ["False", "200", "/0", "200", "/1", "200", "/2"], ran


def test_the_command_samples_and_logs(tmp_path: Path) -> None:
    ran = run_program(
        """
import sys, numpy, legroom.cli.main, legroom.cli.watch, legroom.monitor.take_watch_sample, legroom.monitor.watch_in_script
import legroom.monitor.watch_log
leave_no_room_for_threads()
sys.argv = ["legroom", "watch", "--pid", str(os.getppid()), "--once", "--json", "--log", "run.jsonl"]
sys.exit(legroom.cli.main.main())
""",
        tmp_path,
    )
    assert ran.returncode == 0, ran
    (shown,) = [json.loads(line) for line in ran.stdout.splitlines()]
    (kept,) = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines() if '"pools"' in line]
    assert shown["when"] == kept["when"]
    assert "ulimit -v" in ran.stderr


def test_the_full_screen_view_names_what_to_use_instead(tmp_path: Path) -> None:
    pytest.importorskip("textual")
    ran = run_program(
        """
import threading
from legroom.errors import UsageError
from legroom.monitor.tui import TerminalView, require_textual, run_full_screen
require_textual()
leave_no_room_for_threads()
try:
    run_full_screen([], [], TerminalView(), threading.Event())
except UsageError as problem:
    print("ulimit -v" in problem.why, problem.fix)
""",
        tmp_path,
    )
    assert ran.stdout.strip() == "True ('use --plain',)", ran
