"""How a child ended, from every source of a status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from legroom.system.processes_and_threads import ExitStatus, handling_signals, prefer_oom_kill, signal_name


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


def test_a_handler_of_c_code_cannot_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(number: int, handler: object) -> None:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")

    monkeypatch.setattr(signal, "signal", install)  # it returns None for such a handler
    with handling_signals([signal.SIGTERM], lambda *_: None):
        pass


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
        "import signal, time; from legroom.system.processes_and_threads import die_with_parent\n"
        "die_with_parent(signal.SIGKILL); print('ready', flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); input()"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None and started.stdout.readline() == "ready\n"
        started.kill()
        assert started.stdout.read() == ""  # the child had it open too: its end is the end of the child


@pytest.mark.skipif(os.name != "posix", reason="SIGHUP")
def test_an_ignored_signal_stays_ignored_and_the_others_are_handled() -> None:
    seen: list[int] = []
    numbers = (signal.SIGHUP, signal.SIGUSR1)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling_signals(numbers, lambda number, _: seen.append(number)):
            for number in numbers:
                os.kill(os.getpid(), number)
        assert seen == [signal.SIGUSR1] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
