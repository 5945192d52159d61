"""run: signals and dispositions that it was started with, and processes that the job leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc as Linux has them")
RUN = [sys.executable, "-m", "legroom", "run"]

# Waits for a line, so that the signal certainly arrives before its end.
WAITS = """
import signal, sys
print(*(name for name in ("SIGHUP", "SIGINT", "SIGQUIT") if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN), flush=True)
print(sys.stdin.readline(), end="")
"""


def _environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **more}


@pytest.mark.parametrize(
    ("start", "ignored", "number", "status"),
    [
        ('trap "" HUP; exec "$@"', "SIGHUP", signal.SIGHUP, 0),  # what nohup does
        ('exec 3<&0; "$@" <&3 & wait $!', "SIGINT SIGQUIT", signal.SIGINT, 0),
        ('exec "$@"', "", signal.SIGHUP, 128 + signal.SIGHUP),
    ],
    ids=["nohup", "background job of a script", "plain"],
)  # fmt: skip
def test_a_signal_is_ignored_where_the_command_alone_would_ignore_it(
    start: str, ignored: str, number: int, status: int, tmp_path: Path
) -> None:
    words = [*RUN, "--quiet", "--", sys.executable, "-c", WAITS]
    with subprocess.Popen(
        ["sh", "-c", start, "sh", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env=_environment(tmp_path),
    ) as started:  # fmt: skip
        assert started.stdin is not None and started.stdout is not None
        assert started.stdout.readline().strip() == ignored
        os.kill(_supervisor(started.pid), number)
        if status == 0:
            started.stdin.write("lived\n")
        out = started.communicate(timeout=240)[0]
    assert (out, started.returncode) == ("lived\n" if status == 0 else "", status)


def _supervisor(pid: int) -> int:
    """The first process from that one down which is `legroom run`."""
    below = [pid]
    for one in below:
        if Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")[1:4] == [b"-m", b"legroom", b"run"]:
            return one
        below += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    raise AssertionError("no supervisor")


def test_a_signal_that_arrives_while_the_job_is_started_is_sent_to_it(tmp_path: Path) -> None:
    """It comes when the process is there and the supervisor does not know its number yet."""
    code = (
        "import os, signal, subprocess, sys\n"
        "from legroom.cli.main import main\n"
        "class Popen(subprocess.Popen):\n"
        "    def __init__(self, words, **more):\n"
        "        super().__init__(words, **more)\n"
        "        if sys.executable in words: os.kill(os.getpid(), signal.SIGTERM)\n"
        "subprocess.Popen = Popen\n"
        "sys.argv = ['legroom', 'run', '--quiet', '--', sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=_environment(tmp_path), timeout=25)
    assert done.returncode == 128 + signal.SIGTERM


def test_the_status_is_known_where_the_parent_ignored_sigchld(tmp_path: Path) -> None:
    words = [*RUN, "--quiet", "--", "sh", "-c", "exit 3"]
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, env=_environment(tmp_path), timeout=240)
    assert done.returncode == 3


@pytest.mark.parametrize("options", [[], ["--checkpoint", "a/*.pt"]])
def test_a_removed_working_directory_is_the_job_s_affair(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = 'rmdir ../gone; exec "$@"'
    words = ["sh", "-c", script, "sh", *RUN, "--quiet", *options, "--", "sh", "-c", "exit 5"]
    done = subprocess.run(words, cwd=tmp_path / "gone", env=_environment(tmp_path), timeout=240, capture_output=True)
    assert done.returncode == 5, done.stderr


def test_an_invalid_variable_costs_neither_the_status_nor_the_report(tmp_path: Path) -> None:
    environment = _environment(tmp_path, LEGROOM_SETTINGS='{"bogus": 1}')
    words = ["--json", "--report", "story", "--", "sh", "-c", "touch started; exit 3"]
    done = subprocess.run([*RUN, *words], cwd=tmp_path, env=environment, timeout=240, capture_output=True)
    assert done.returncode == 3 and json.loads(done.stdout)["exit"] == 3, done.stderr
    assert (tmp_path / "story.json").exists()
    (tmp_path / "started").unlink()
    done = subprocess.run(
        [*RUN, "--retries", "1", *words], cwd=tmp_path, env=environment, timeout=240, capture_output=True
    )
    assert done.returncode == 2 and b"unknown setting 'bogus'" in done.stderr + done.stdout
    assert not (tmp_path / "started").exists(), "it is read before the start if a restart may need it"
