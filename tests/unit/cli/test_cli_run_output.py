"""run: all of the job's output arrives, however slow or odd the reader is, and what cannot be written is reported."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pipes and /dev/full as Linux has them")
RUN = [sys.executable, "-m", "legroom", "run"]
MUCH = "import os; os.write(1, b'x' * 150000); os.write(1, b'end')"  # more than two pipes hold


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state")}


@contextlib.contextmanager
def _started(*words: str, folder: Path, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([*RUN, *words], cwd=folder, env=_environment(folder), **streams)
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate(timeout=240)


def _job_has_ended(folder: Path) -> None:
    """The job ran ``touch ended`` last."""
    deadline = time.monotonic() + 60
    while not (folder / "ended").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (folder / "ended").exists()


def _words(code: str = MUCH, last: str = "touch ended") -> list[str]:
    # The writer is not waited for by its shell: it may be as blocked as the pipe.
    return ["--quiet", "--", "sh", "-c", f'"$0" -c "$1"; {last}', sys.executable, code]


def test_a_slow_reader_gets_everything(tmp_path: Path) -> None:
    code = MUCH.replace("150000", "100000")  # fits into the job's pipe and what is in the supervisor's hands
    with _started(*_words(code), folder=tmp_path, stdout=subprocess.PIPE) as started:
        _job_has_ended(tmp_path)
        time.sleep(4)  # longer than a leftover process is waited for
        assert started.poll() is None
        assert started.stdout is not None and started.stdout.read() == b"x" * 100000 + b"end"
        assert started.wait(60) == 0


def test_a_signal_ends_the_wait_for_a_reader(tmp_path: Path) -> None:
    code = MUCH.replace("150000", "100000")
    with _started(*_words(code), folder=tmp_path, stdout=subprocess.PIPE) as started:
        _job_has_ended(tmp_path)
        time.sleep(4)
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0  # that of the command, which had ended before


def test_a_process_left_behind_that_writes_on_is_not_waited_for(tmp_path: Path) -> None:
    code = "import time\nfor n in range(10**9): print(n, flush=True); time.sleep(0.01)"
    words = ["--quiet", "--", "sh", "-c", '"$0" -c "$1" & echo $! > left; exit 0', sys.executable, code]
    with _started(*words, folder=tmp_path, stdout=subprocess.DEVNULL) as started:
        assert started.wait(60) == 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


def test_a_non_blocking_pipe_gets_everything(tmp_path: Path) -> None:
    """Programs that share it, such as node and some ssh clients, leave it so."""
    source, target = os.pipe()
    fcntl.fcntl(target, fcntl.F_SETFL, fcntl.fcntl(target, fcntl.F_GETFL) | os.O_NONBLOCK)
    with _started(*_words(), folder=tmp_path, stdout=target) as started, os.fdopen(source, "rb") as reader:
        os.close(target)
        time.sleep(2)
        assert _read_slowly(reader) == b"x" * 150000 + b"end"
        assert started.wait(60) == 0


def _read_slowly(reader: IO[bytes]) -> bytes:
    found = b""
    while data := os.read(reader.fileno(), 4096):
        found += data
    return found


def test_a_full_disk_below_the_output_is_the_verdict(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        words = ["--report", "story", "--", sys.executable, "-c", "print('x' * 150000)"]
        done = subprocess.run(
            [*RUN, *words], cwd=tmp_path, env=_environment(tmp_path), stdout=full, stderr=subprocess.PIPE
        )
    report = json.loads((tmp_path / "story.json").read_text())
    assert done.returncode not in (0, 2) and report["verdict"] == "disk-full", report
    assert "cannot write the command's output: No space left on device" in report["evidence"]
    assert b"legroom: cannot write the command's output: No space left on device" in done.stderr


def test_output_that_is_lost_after_a_good_end_is_reported(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*RUN, "--", "echo", "x"], cwd=tmp_path, env=_environment(tmp_path), stdout=full, stderr=subprocess.PIPE
        )
    assert b"cannot write the command's output: No space left on device" in done.stderr
