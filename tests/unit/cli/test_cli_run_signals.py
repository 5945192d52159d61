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
        env=_environment(tmp_path), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as started:  # fmt: skip
        assert started.stdin is not None and started.stdout is not None
        assert started.stdout.readline().strip() == ignored
        os.kill(_supervisor(started.pid), number)
        if status == 0:
            started.stdin.write("lived\n")
        else:
            started.wait(60)
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


# A daemon: forked twice, in a session of its own. Its status goes to a file, so that nothing holds the job's output.
DAEMON = """
import os, subprocess, sys
def daemon(*words):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2): os.dup2(null, stream)
            os.execvp(words[0], words)
        os._exit(0)
    os.wait()
"""
# Without a cgroup of its own, as in most containers.
SHARED = """
import sys, legroom.rescue.supervisor as supervisor
from legroom.cli.main import main
supervisor.make_job_cgroup = lambda host, name: supervisor.JobCgroup(None, None, False, "for a test")
sys.argv = ["legroom", *sys.argv[2:]]
sys.exit(main())
"""
OWN = SHARED.replace("supervisor.make_job_cgroup", "unused")


def _supervised(program: str, code: str, folder: Path) -> tuple[int, str]:
    """The status of a job that writes the process ID of its daemon to a file, and the state of that daemon after it."""
    (folder / "job.py").write_text(DAEMON + code)
    words = [sys.executable, "-c", program, "legroom", "run", "--quiet", "--", sys.executable, "job.py"]
    done = subprocess.run(words, cwd=folder, env=_environment(folder), timeout=240)
    pid = int((folder / "pid").read_text())
    try:
        return done.returncode, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return done.returncode, "gone"
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


WAIT_FOR_IT = """
while not os.path.exists("pid"): pass
"""


@pytest.mark.parametrize("program", [SHARED, OWN], ids=["shared cgroup", "its own cgroup"])
@pytest.mark.parametrize(("status", "state"), [(7, "gone"), (0, "S")])
def test_a_daemon_of_a_failed_job_is_killed_and_that_of_a_successful_one_lives(
    program: str, status: int, state: str, tmp_path: Path
) -> None:
    start = "daemon('sh', '-c', 'echo $$ > new; mv new pid; exec sleep 100')"
    assert _supervised(program, f"{start}{WAIT_FOR_IT}\nsys.exit({status})", tmp_path) == (status, state)


@pytest.mark.parametrize("program", [SHARED, OWN], ids=["shared cgroup", "its own cgroup"])
def test_a_daemon_that_ends_during_the_job_is_waited_for(program: str, tmp_path: Path) -> None:
    """By the supervisor, whose child it has become: an ended process keeps its ID until it is waited for."""
    code = (
        "daemon('sh', '-c', 'echo $$ > new; mv new pid')"
        + WAIT_FOR_IT
        + "import time\npid, end = open('pid').read().strip(), time.monotonic() + 60\n"
        "while os.path.exists(f'/proc/{pid}') and time.monotonic() < end: time.sleep(0.1)\n"
        "sys.exit(5 if os.path.exists(f'/proc/{pid}') else 0)"
    )
    assert _supervised(program, code, tmp_path) == (0, "gone")


def test_children_that_the_supervisor_had_before_are_not_the_job_s(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SHARED, "legroom", "run", "--quiet", "--", "sh", "-c", "exit 3"]
    script = 'setsid sleep 100 & echo $! > pid; exec "$@"'
    done = subprocess.run(["sh", "-c", script, "sh", *words], cwd=tmp_path, env=_environment(tmp_path), timeout=240)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # raises if it is gone
    assert done.returncode == 3


def test_readings_that_fail_leave_the_job_alone(tmp_path: Path) -> None:
    code = (
        "import sys, legroom.rescue.job_sampling as sampling\n"
        "from legroom.cli.main import main\n"
        "def sample(self): raise {kind}\n"
        "sampling.JobSampler.sample = sample\n"
        "sys.argv = ['legroom', 'run', '--', 'sh', '-c', 'sleep 1; echo done; touch ended']\n"
        "sys.exit(main())"
    )

    def ran(kind: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", code.replace("{kind}", kind)]
        return subprocess.run(
            words, cwd=tmp_path, env=_environment(tmp_path), timeout=240, capture_output=True, text=True
        )

    done = ran("OSError(24, 'Too many open files')")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr.count("legroom: the job's resources are not read: Too many open files") == 1
    (tmp_path / "ended").unlink()
    done = ran("ZeroDivisionError")  # an error in Legroom: nobody would read the job's output any more
    assert done.returncode != 0 and not (tmp_path / "ended").exists()
