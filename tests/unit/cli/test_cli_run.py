"""run: exits as its child, leaves its bytes alone, passes signals on, starts again with less, keeps what worked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from legroom.cli import main
from legroom.units import format_duration

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups are POSIX's")

# Dies of a refused allocation until its workers are few enough; says what it was started with.
STUBBORN = """
import argparse, os, sys
p = argparse.ArgumentParser()
p.add_argument("--num_workers", type=int, default=4); p.add_argument("--batch", type=int, default=8)
p.add_argument("--accum_iter", type=int, default=1); p.add_argument("--resume", default="nothing")
p.add_argument("--lives-at", type=int, default=0)
a = p.parse_args()
print("workers", a.num_workers, "batch", a.batch, "accumulation", a.accum_iter, "from", a.resume)
print(os.environ.get("LEGROOM_SETTINGS", "none"))
if a.num_workers > a.lives_at: raise MemoryError
"""


def _run(*words: str, folder: Path, stdin: str | None = None, **more: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **more}
    return subprocess.run(
        [sys.executable, "-m", "legroom", "run", *words], capture_output=True, timeout=240, cwd=folder,
        env=environment, check=False, input=None if stdin is None else stdin.encode(),
    )  # fmt: skip


def _script(folder: Path, text: str = STUBBORN) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def _report(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["schema"] == "legroom.run/1"
    return report


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("kill -SEGV $$", 139)],
)
def test_exits_as_the_child_does(script: str, status: int, tmp_path: Path) -> None:
    assert _run("--quiet", "--", "sh", "-c", script, folder=tmp_path).returncode == status


def test_bytes_pass_unchanged_and_apart(tmp_path: Path) -> None:
    code = "import os, sys; data = bytes(range(256)) * 3000; os.write(1, data); os.write(2, data[::-1]); sys.stdout.write(input())"
    done = _run("--", sys.executable, "-c", code, folder=tmp_path, stdin="typed\n")
    data = bytes(range(256)) * 3000
    assert done.stdout == data + b"typed"
    assert done.stderr.endswith(data[::-1])


def test_json_has_stdout_to_itself(tmp_path: Path) -> None:
    done = _run("--json", "--quiet", "--", "sh", "-c", "echo out; echo err >&2; exit 4", folder=tmp_path)
    assert sorted(done.stderr.split()) == [b"err", b"out"]
    report = _report(done)
    assert (report["exit"], report["verdict"], len(report["attempts"])) == (4, "not-memory", 1)
    assert done.returncode == 4


def test_a_command_that_is_not_there_or_not_runnable(tmp_path: Path) -> None:
    done = _run("--", "no-such-command-anywhere", folder=tmp_path)
    assert done.returncode == 127 and b"command not found: no-such-command-anywhere" in done.stderr
    done = _run("--", "sh -c true", folder=tmp_path)
    assert (
        done.returncode == 127 and b"one quoted word" in done.stderr and b" legroom run -- sh -c true\n" in done.stderr
    )
    (tmp_path / "plain.txt").write_text("x")
    done = _run("--", "./plain.txt", folder=tmp_path)
    assert done.returncode == 126 and b"it is not executable" in done.stderr and b"chmod +x" in done.stderr
    done = _run("--", str(tmp_path), folder=tmp_path)
    assert done.returncode == 126 and b"it is a directory" in done.stderr and b"chmod" not in done.stderr
    assert _run(folder=tmp_path).returncode == 2
    assert _run("--flag", "nonsense=--x", "--", "true", folder=tmp_path).returncode == 2
    assert _run("--resume-flag", "--resume", "--", "true", folder=tmp_path).returncode == 2


def test_starts_again_with_less_and_remembers_what_worked(tmp_path: Path) -> None:
    command = ["--retries", "3", "--", sys.executable, _script(tmp_path), "--num_workers", "4", "--batch=8"]
    done = _run("--report", "story", *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert [line for line in lines if line.startswith("workers")] == [
        "workers 4 batch 8 accumulation 1 from nothing",
        "workers 2 batch 8 accumulation 1 from nothing",
        "workers 0 batch 8 accumulation 1 from nothing",
    ]
    assert json.loads(lines[-1]) == {"num_workers": 0}
    told = done.stderr.decode()
    # One block for the first death, a line for the second of its kind, one closing line.
    assert told.count("  why: ") and told.count("ram-allocation, 95% sure") == 2
    assert told.count("ram-allocation, 95% sure again") == 1
    (closing,) = (line for line in told.splitlines() if "finished on attempt" in line)
    lost = sum(one["seconds"] for one in json.loads((tmp_path / "story.json").read_text())["attempts"][:2])
    said = "finished on attempt 3 with num_workers 0 (was 4); 2 failed attempts took "
    near = [said + format_duration(lost + rounding) for rounding in (-0.001, 0.0, 0.001)]  # the report has milliseconds
    assert closing.endswith(tuple(near)) and lost > 0
    again = _run(*command, folder=tmp_path)
    assert (
        again.stdout.decode().splitlines()[0].startswith("workers 0")
        and b"num_workers 4 \xe2\x86\x92 0 (--fresh" in again.stderr
    )
    fresh = _run("--fresh", *command, folder=tmp_path)
    assert fresh.stdout.decode().splitlines()[0].startswith("workers 4")


# Fails above a micro-batch of 8, as a machine with little memory does.
UP_TO_8 = """
import argparse
p = argparse.ArgumentParser()
for name in ("--batch_size", "--accum_iter", "--num_workers"): p.add_argument(name, type=int)
a = p.parse_args()
print(a.batch_size, a.accum_iter, a.num_workers, flush=True)
if a.batch_size > 8 and a.num_workers >= 0: raise MemoryError
"""


def test_what_a_run_needed_limits_a_later_one_and_keeps_its_effective_batch(tmp_path: Path) -> None:
    script = _script(tmp_path, UP_TO_8)

    def ran(batch: int, steps: int, workers: int, *options: str) -> list[str]:
        words = ["--batch_size", str(batch), "--accum_iter", str(steps), "--num_workers", str(workers)]
        done = _run(*options, "--", sys.executable, script, *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode().splitlines()

    retries = ("--retries", "3")
    assert ran(16, 1, 4, *retries) == ["16 1 4", "8 2 4"]
    assert ran(4, 1, 4, *retries) == ["4 1 4"]
    assert ran(2, 1, 6) == ["2 1 6"]  # a run within the limits leaves them
    assert ran(32, 2, 2, *retries) == ["8 8 2"]
    assert ran(16, 1, 4, *retries) == ["8 2 4"]
    assert ran(16, 1, 4, "--fresh", *retries) == ["16 1 4", "8 2 4"]
    _script(tmp_path, UP_TO_8.replace("> 8", "> 99"))  # it needs less now
    assert ran(16, 1, 4, *retries) == ["8 2 4"]
    assert ran(16, 1, 4) == ["16 1 4"]  # which removes the limits
    assert ran(16, 1, 4, *retries) == ["16 1 4"]


def test_an_allocation_larger_than_the_machine_is_not_tried_again_when_a_change_left_it_as_large(
    tmp_path: Path,
) -> None:
    text = "raise MemoryError('Unable to allocate 900. PiB for an array with shape (9,)')"
    words = ("--num_workers", "4", "--batch_size", "16", "--accum_iter", "1")
    done = _run("--retries", "5", "--json", "--", sys.executable, _script(tmp_path, text), *words, folder=tmp_path)
    report = _report(done)
    assert len(report["attempts"]) == 2 and "900 PB" in report["stopped"]
    assert "batch_size 16 → 8" in report["attempts"][1]["changed"][0]


def test_an_option_that_needs_retries_is_refused_or_its_effect_is_printed(tmp_path: Path) -> None:
    checkpoint = ("--checkpoint", "*.pt")
    for words in (("--fresh",), (*checkpoint, "--resume-flag", "--resume"), (*checkpoint, "--resume-existing")):
        done = _run(*words, "--", "touch", "started", folder=tmp_path)
        needed = b"needs --retries" if words[-1] != "--resume" else b"--resume-flag needs --retries"
        assert done.returncode == 2 and needed in done.stderr and not (tmp_path / "started").exists()
    for words, message in (
        (checkpoint, b"--checkpoint without --retries only"),
        (("--flag", "batch=--bs"), b"--flag without --retries changes no"),
    ):
        done = _run(*words, "--", "true", folder=tmp_path)
        assert done.returncode == 0 and message in done.stderr
        assert message not in _run("--retries", "1", *words, "--", "true", folder=tmp_path).stderr


def test_the_micro_batch_goes_down_and_accumulation_up_and_then_it_stops(tmp_path: Path) -> None:
    words = [sys.executable, _script(tmp_path), "--num_workers=0", "--batch", "4", "--lives-at=-1"]
    named = ["--flag", "accumulation=--accum_iter"]
    done = _run("--retries", "9", "--json", *named, "--", *words, folder=tmp_path)
    report = _report(done)
    assert [(a["settings"]["batch"], a["settings"].get("accumulation", 1)) for a in report["attempts"]] == [
        (4, 1),
        (2, 2),
        (1, 4),
    ]
    assert report["verdict"] == "ram-allocation" and report["stopped"] == "nothing is left to lower"
    assert done.returncode == 1 and report["exit"] == 1


SMALL_SHM = """
import argparse, os
parser = argparse.ArgumentParser()
for name in ("--num_workers", "--prefetch_factor"): parser.add_argument(name, type=int)
args = parser.parse_args()
print("loader", os.environ.get("LEGROOM_LOADER", "torch"), "workers", args.num_workers, flush=True)
if args.num_workers == 0: raise ValueError("prefetch_factor option could only be specified in multiprocessing.")
if "LEGROOM_LOADER" not in os.environ:
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)")
"""
_TORCH, _OURS = "loader torch workers {}", "loader legroom workers {}"


def test_in_a_small_dev_shm_the_last_step_is_another_loader_and_is_remembered(tmp_path: Path) -> None:
    script = [sys.executable, _script(tmp_path, SMALL_SHM), "--num_workers", "2", "--prefetch_factor", "2"]
    command = ["--retries", "3", "--", *script]
    for given, environment in ((["--loader", "torch"], {}), ([], {"LEGROOM_DISABLE": "1"})):
        done = _run(*given, *command, folder=tmp_path, **environment)
        assert done.returncode == 1 and "→ legroom.DataLoader" not in done.stderr.decode(), done.stderr
    done = _run(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == [_TORCH.format(2)] * 2 + [_TORCH.format(1), _OURS.format(1)]
    assert (
        "attempt 4 of 4: torch's DataLoader → legroom.DataLoader: its batches do not use /dev/shm"
        in done.stderr.decode()
    )
    again = _run("--json", *command, folder=tmp_path)
    (only,) = _report(again)["attempts"]
    assert only["settings"] == {"workers": 1, "prefetch": 1, "loader": "legroom"}
    unused = _run("--loader", "torch", *command, folder=tmp_path)  # what is remembered is not forced on the user
    assert b"loader legroom" not in unused.stdout


def test_a_script_without_flags_gets_another_loader_too(tmp_path: Path) -> None:
    """It comes first: nothing shows whether the script reads settings in the environment."""
    done = _run("--retries", "3", "--json", "--", sys.executable, _script(tmp_path, SMALL_SHM), folder=tmp_path)
    report = _report(done)
    assert (report["exit"], len(report["attempts"])) == (0, 2), report
    assert report["attempts"][-1]["settings"] == {"loader": "legroom"}


def test_an_error_that_a_change_of_settings_may_have_caused(tmp_path: Path) -> None:
    done = _run("--retries", "3", "--json", "--", sys.executable, _script(tmp_path, SMALL_SHM), "--num_workers", "2", folder=tmp_path)  # fmt: skip
    report = _report(done)
    attempts = report["attempts"]
    assert [one["verdict"] for one in attempts] == ["shm-full", "not-memory", "shm-full", None], report
    for told in (attempts[1]["summary"], attempts[2]["changed"][0], done.stderr.decode()):
        assert "num_workers 2 → 0" in told and "may have caused" in told
    assert attempts[3]["settings"] == {"workers": 1, "loader": "legroom"}
    assert b"would not help" not in done.stderr


def test_what_memory_did_not_do_is_not_started_again(tmp_path: Path) -> None:
    done = _run("--retries", "3", "--json", "--", "sh", "-c", "exit 3", "--workers", "4", folder=tmp_path)
    assert len(_report(done)["attempts"]) == 1


SAVES = """
import os, zipfile
if not os.path.exists("step2.pt"):
    with zipfile.ZipFile("step1.pt", "w") as archive: archive.writestr("data", b"x" * 100)
    open("step2.pt", "wb").write(open("step1.pt", "rb").read()[:90])
    os.utime("step1.pt", (1, 1))
"""
ASKED = ("--retries", "2", "--checkpoint", "step*.pt", "--resume-flag", "--resume")


def test_resumes_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    script = _script(tmp_path, SAVES + STUBBORN)
    done = _run(*ASKED, "--", sys.executable, script, "--num_workers", "2", folder=tmp_path)
    assert done.returncode == 0 and b"does not pass the checkpoint" not in done.stderr
    assert done.stdout.decode().splitlines()[-2].endswith("from step1.pt")
    assert b"step2.pt" in done.stderr


def test_a_resume_flag_without_dashes_is_remarked_on(tmp_path: Path) -> None:
    asked = ("--retries", "1", "--checkpoint", "step*.pt")
    for flag, remarked in (("resume", True), ("--resume", False), ("resume=", False), ("resume_from={}", False)):
        done = _run(*asked, "--resume-flag", flag, "--", "true", folder=tmp_path)
        assert done.returncode == 0 and (b"has no dashes" in done.stderr) is remarked, flag
        assert (b"--resume-flag --resume" in done.stderr) is remarked


def test_without_a_resume_flag_nothing_is_reported_as_resumed(tmp_path: Path) -> None:
    words = ["--json", "--", sys.executable, _script(tmp_path, SAVES + STUBBORN), "--num_workers", "2"]
    done = _run("--retries", "2", "--checkpoint", "step*.pt", *words, folder=tmp_path)
    report = _report(done)
    assert report["exit"] == 0 and [one["resumed_from"] for one in report["attempts"]] == [None, None]
    assert b"without --resume-flag the script must find it" in done.stderr
    assert b"a restart does not pass the checkpoint to the script" in done.stderr.partition(b"attempt 2")[0]


def test_a_checkpoint_of_an_earlier_run_is_resumed_only_when_asked_for(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "step9.pt", "w") as archive:
        archive.writestr("data", b"x" * 100)
    words = ["--", sys.executable, _script(tmp_path), "--num_workers", "2"]
    done = _run(*ASKED, "--fresh", *words, folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.decode().splitlines()[-2].endswith("from nothing")
    assert b"step9.pt is older than this run" in done.stderr and b"--resume-existing" in done.stderr
    done = _run(*ASKED, "--fresh", "--resume-existing", *words, folder=tmp_path)
    assert done.stdout.decode().splitlines()[-2].endswith("from step9.pt")
    assert _run("--resume-existing", "--", "true", folder=tmp_path).returncode == 2


def test_settings_reach_a_script_without_flags_through_the_environment(tmp_path: Path) -> None:
    text = "import json, os\ns = json.loads(os.environ.get('LEGROOM_SETTINGS', '{}'))\nprint(s, flush=True)\nif s.get('num_workers') != 0: raise MemoryError\n"
    done = _run("--retries", "3", "--", sys.executable, _script(tmp_path, text), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines()[-1] == "{'num_workers': 0, 'prefetch_factor': 1, 'low_memory': True}"
    told = " ".join(done.stderr.decode().split())
    assert "num_workers 0 (only in LEGROOM_SETTINGS, which the script may not read)" in told
    unread = "only in LEGROOM_SETTINGS, which the script may not read. If it has a flag, name it: --flag {}=--ITS-FLAG"
    assert all(unread.format(name) in told for name in ("prefetch", "workers"))
    again = _run("--retries", "3", "--", sys.executable, _script(tmp_path, text), folder=tmp_path)
    assert again.stdout.splitlines() == done.stdout.splitlines()[-1:]
    broken = _run("--", "true", folder=tmp_path, LEGROOM_SETTINGS="no JSON")
    assert broken.returncode == 0, "read only for a restart"


def test_a_switch_that_was_taken_off_the_command_line_is_told_as_turned_off(tmp_path: Path) -> None:
    text = "import sys\nif '--pin_memory' in sys.argv: raise RuntimeError('CUDA error: out of memory in pin memory thread')\n"
    done = _run("--retries", "1", "--", sys.executable, _script(tmp_path, text), "--pin_memory", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "with pin_memory off (was on);" in " ".join(done.stderr.decode().split())


@pytest.mark.load_sensitive(reason="a worker that lives for three seconds is sampled as often as the machine allows")
def test_a_setting_that_the_job_was_seen_to_ignore_is_reported_so(tmp_path: Path) -> None:
    """The script takes the flag and starts a worker all the same, under torch's name; it ends when that was sampled."""
    text = """
import argparse, ctypes, os, time
p = argparse.ArgumentParser(); p.add_argument("--num_workers", type=int); p.parse_args()
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"pt_data_worker", 0, 0, 0)
    time.sleep(3)
    os._exit(0)
os.wait()
raise MemoryError
"""
    done = _run("--retries", "1", "--", sys.executable, _script(tmp_path, text), "--num_workers", "2", folder=tmp_path)
    told = " ".join(done.stderr.decode().split())
    assert "num_workers 0 (ignored by the job: it had DataLoader workers)" in told, told


@pytest.mark.load_sensitive(reason="a job that lives for a second is sampled as often as the machine allows")
def test_the_report_lists_every_attempt(tmp_path: Path) -> None:
    words = [sys.executable, _script(tmp_path), "--num_workers", "1", "--resume", "<script>alert(1)</script>"]
    done = _run("--retries", "1", "--report", "story.html", "--", *words, folder=tmp_path)
    assert done.returncode == 0
    report = json.loads((tmp_path / "story.json").read_text())
    assert [attempt["verdict"] for attempt in report["attempts"]] == ["ram-allocation", None]
    (changed,) = report["attempts"][1]["changed"]
    assert changed.startswith("num_workers 1 → 0 (the training process ran out of memory")
    page = (tmp_path / "story.html").read_text()
    assert "<svg" in page and "<script" not in page and "&lt;script&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors of other processes are read from /proc")
def test_a_report_that_cannot_be_written_is_refused_before_the_start(tmp_path: Path) -> None:
    done = _run("--report", "nowhere/story", "--", "sh", "-c", "touch started", folder=tmp_path)
    assert done.returncode == 2 and b"cannot write nowhere/story" in done.stderr
    for name in ("a.json", "b.html"):
        (tmp_path / name).mkdir()
        done = _run("--report", name[0], "--", "sh", "-c", "touch started", folder=tmp_path)
        assert done.returncode == 2 and f"cannot write {name[0]}".encode() in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_report_that_fails_at_the_end_leaves_the_status_alone(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    done = _run("--report", "there/story", "--", "sh", "-c", "rmdir there; exit 5", folder=tmp_path)
    assert done.returncode == 5 and b"cannot write there/story: " in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_bad_limit_is_explained_as_it_is_typed(tmp_path: Path) -> None:
    done = _run("--gpu-limit", "banana", "--", "true", folder=tmp_path)
    assert done.returncode == 2 and b"write --gpu-limit as" in done.stderr and b"limit(" not in done.stderr
    done = _run("--gpu-limit", "80", "--", "true", folder=tmp_path)
    assert done.returncode == 2 and b"80% or 80GB?" in done.stderr and b"write --gpu-limit as" in done.stderr


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU here")
def test_a_limit_without_a_gpu_is_reported_to_have_no_effect(tmp_path: Path) -> None:
    done = _run("--gpu-limit", "80%", "--", "true", folder=tmp_path)
    assert done.returncode == 0 and b"--gpu-limit has no effect here: " in done.stderr
    assert b"--gpu-limit" not in _run("--", "true", folder=tmp_path).stderr


def test_an_alarm_of_a_running_job_is_reported_once_and_kept(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; held = [open('/dev/null') for _ in range(85)]\n"
        "sys.stderr.write('\\r 45% |####'); sys.stderr.flush()\n"
        "until = time.monotonic() + 120\n"
        "while not os.path.exists('reported') and time.monotonic() < until: time.sleep(0.05)\n"
        "time.sleep(1)"  # in which it could be reported again
    )
    words = ["sh", "-c", 'ulimit -n 100; exec "$0" -c "$1"', sys.executable, code]
    shown = ""
    with _started("--report", "story", "--", *words, folder=tmp_path) as started:
        assert started.stderr is not None
        while "fds-nearly-out" not in shown and (line := started.stderr.readline()):
            shown += line
        (tmp_path / "reported").touch()
        shown += started.communicate(timeout=240)[1]
    assert started.returncode == 0, shown
    assert shown.count("legroom: warning fds-nearly-out: fds is ") == 1
    assert "45% |####\nlegroom: warning fds-nearly-out" in shown  # on a line of its own
    report = json.loads((tmp_path / "story.json").read_text())
    kept = [alarm for alarm in report["attempts"][0]["alarms"] if alarm["code"] == "fds-nearly-out"]
    assert len(kept) == 1 and 0 <= kept[0]["since"] < 60 and kept[0]["level"] == "warning"
    assert "fds-nearly-out" in (tmp_path / "story.html").read_text()


@contextlib.contextmanager
def _started(*words: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    started = subprocess.Popen(
        [sys.executable, "-m", "legroom", "run", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, cwd=folder,
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.poll() is None:
            started.terminate()
            started.communicate(timeout=240)


SLOW = """
import os, signal, sys, time
def say(text): os.write(1, text.encode())  # whole lines: two processes write here
def stop(number, frame):
    say(f"got {signal.Signals(number).name}\\n")
    if number == signal.SIGTERM and "stubborn" not in sys.argv: sys.exit(5)
for name in ("SIGTERM", "SIGUSR1"): signal.signal(getattr(signal, name), stop)
say("ready\\n")
while True: time.sleep(0.1)
"""


def test_signals_pass_through_and_sigterm_gives_time(tmp_path: Path) -> None:
    with _started("--retries", "3", "--", sys.executable, _script(tmp_path, SLOW), folder=tmp_path) as started:
        assert started.stdout is not None and started.stdout.readline() == "ready\n"
        started.send_signal(signal.SIGUSR1)
        assert started.stdout.readline() == "got SIGUSR1\n"
        started.send_signal(signal.SIGTERM)
        out, err = started.communicate(timeout=240)
    assert out == "got SIGTERM\n" and started.returncode == 5
    assert "received a signal to stop" in err  # and was not started again


def test_after_the_grace_the_whole_group_is_killed(tmp_path: Path) -> None:
    script = f"{sys.executable} {_script(tmp_path, SLOW)} stubborn & echo $! > child; exec {sys.executable} {tmp_path}/train.py stubborn"
    with _started("--grace", "1s", "--", "sh", "-c", script, folder=tmp_path) as started:
        assert started.stdout is not None
        assert [started.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=240)
    assert started.returncode == 137
    pid = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 60
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="the test reads a pseudo-terminal as Linux gives it")
def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    code = "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(1).columns > 0)"
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    subprocess.run(["stty", "cols", "90", "rows", "30"], stdin=theirs, check=True)
    done = subprocess.Popen(
        [sys.executable, "-m", "legroom", "run", "--quiet", "--", sys.executable, "-c", code],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    assert done.wait(60) == 0
    os.close(theirs)
    shown = os.read(ours, 4096)
    os.close(ours)
    assert shown == b"True True True\r\n"


# Becomes the owner of its terminal, as a login does, and then the command in its arguments.
AT_TERMINAL = (
    "import fcntl, os, sys, termios; t = os.open(sys.argv[1], os.O_RDWR); fcntl.ioctl(t, termios.TIOCSCTTY, 0); "
    "os.dup2(t, 2); sys.argv[2] == 'keyboard' and os.dup2(t, 0); os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"
)


@pytest.mark.skipif(sys.platform != "linux", reason="the test types at a pseudo-terminal as Linux gives it")
@pytest.mark.parametrize("stdin", ["keyboard", "nothing"])
def test_ctrl_c_is_reported_as_such(stdin: str, tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    code = "import time; print('started', flush=True); time.sleep(60)"
    words = ["-m", "legroom", "run", "--json", "--report", "r.json", "--", sys.executable, "-c", code]
    started = subprocess.Popen(
        [sys.executable, "-c", AT_TERMINAL, os.ttyname(theirs), stdin, *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    shown = b""
    while b"started" not in shown:
        shown += os.read(ours, 4096)
    os.close(theirs)
    os.write(ours, b"\x03")
    out = started.communicate(timeout=240)[0]
    os.close(ours)
    report = json.loads(out)
    (attempt,) = report["attempts"]
    assert report["verdict"] == "killed" and "Ctrl-C" in attempt["summary"], attempt
    assert attempt["fix"] == [] and started.returncode == 130


def test_a_sigint_from_elsewhere_is_not_called_ctrl_c(tmp_path: Path) -> None:
    done = _run("--json", "--", "sh", "-c", "kill -INT $$", folder=tmp_path)
    (attempt,) = _report(done)["attempts"]
    assert attempt["verdict"] == "killed" and "Ctrl-C" not in attempt["summary"]
    assert any("what sent the signal" in step for step in attempt["fix"])


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "SIGINT (Ctrl-C)"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_to_legroom_is_named_in_the_summary(number: signal.Signals, said: str, tmp_path: Path) -> None:
    code = "import time; print('started', flush=True); time.sleep(60)"
    started = subprocess.Popen(
        [sys.executable, "-m", "legroom", "run", "--", sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert started.stdout is not None and started.stdout.readline() == "started\n"
    started.send_signal(number)
    err = started.communicate(timeout=240)[1]
    assert f"legroom: killed, 100% sure: the job was stopped by {said}.\n" in err
    assert "another process" not in err


def test_a_reader_that_goes_away_ends_it_like_any_pipe(tmp_path: Path) -> None:
    command = f"{sys.executable} -m legroom run --quiet -- yes | head -n 2; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=240, check=True, cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == "y\ny\n141\n"


def test_a_reader_that_closes_the_pipe_is_named(tmp_path: Path) -> None:
    code = "for i in range(10**6): print(i, flush=True)"
    command = f"{sys.executable} -m legroom run -- {sys.executable} -c '{code}' | head -n 2"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=240, check=True, cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert "closed the pipe, as `| head` does" in done.stderr and "legroom: not-memory, 95% sure" in done.stderr
    assert "> output.log" in done.stderr and "does not name a resource" not in done.stderr


def test_messages_begin_a_line_beside_a_progress_bar(tmp_path: Path) -> None:
    code = "import sys; sys.stderr.write('\\r 45% |####'); sys.stderr.flush(); raise SystemExit(3)"
    joined = subprocess.run(
        [sys.executable, "-m", "legroom", "run", "--", sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path,
    )  # fmt: skip
    assert b"45% |####\nlegroom: " in joined.stdout
    quiet = _run("--quiet", "--", sys.executable, "-c", code, folder=tmp_path)
    assert quiet.stderr == b"\r 45% |####"


@pytest.mark.parametrize(
    ("word", "why", "fix"),
    [
        ("CUDA_VISIBLE_DEVICES=0", "environment variable", "legroom leak -- env CUDA_VISIBLE_DEVICES=0 …"),
        ("cd", "a command of the shell", "legroom leak -- bash -c 'cd … && python …'"),
        ("cd runs && python train.py", "a line for a shell", "legroom leak -- bash -c 'cd runs && python train.py'"),
        ("python train.py", "one quoted word", "legroom leak -- python train.py"),
        ("train.sh", "not a file", "legroom leak -- python …"),
    ],
)
def test_a_command_that_needs_a_shell_is_explained(
    word: str, why: str, fix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/bin/python" if name == "python" else None)
    assert main.run(["leak", "--", word]) == 127
    err = capsys.readouterr().err
    assert why in err and f"       {fix}\n" in err


def test_a_pattern_without_quotes_is_not_taken_for_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "1.pt", tmp_path / "2.pt"
    for path in (first, second):
        path.write_bytes(b"")
    rest = [str(second), "--resume-flag", "--resume", "--", "true"]
    assert main.run(["run", "--retries", "2", "--checkpoint", str(first), *rest]) == 2
    assert f"--checkpoint '{tmp_path}/*.pt'" in capsys.readouterr().err


def test_a_report_path_that_names_no_file_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, why in ((".", "it is a directory"), ("..", "it is a directory"), (f"{tmp_path}/", "it is a directory"),
                      ("none/story", f"the directory {tmp_path}/none does not exist")):  # fmt: skip
        assert main.run(["run", "--report", path, "--", "true"]) == 2
        assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_likely_causes_follow_where_they_are_announced(tmp_path: Path) -> None:
    text = "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly"
    done = _run("--", sys.executable, "-c", f"import sys; sys.exit({text!r})", folder=tmp_path)
    err = done.stderr.decode()
    assert "unknown: the evidence does not show the cause. Likely causes follow" in err
    assert "legroom:   or:  ram-oom-kill: " in err and "legroom:   or:  not-memory: " in err
    done = _run("--", "sh", "-c", "echo sample 3: the answer is CUDA out of memory; exit 1", folder=tmp_path)
    err = done.stderr.decode()
    assert "gpu-oom, 60% sure" in err and "legroom:   or:  not-memory: " in err and "or:  gpu-oom" not in err


@pytest.mark.parametrize(
    "arguments",
    [["cache", "load", "a.npy"], ["plan", "--batch", "2", "--data", "*.npy"], ["demo", "--quick"],
     ["tune", "--dataset", "data:train_set", "--batch", "2"], ["check", "--sample-bytes", "1MB", "--batch", "2"]],
)  # fmt: skip
def test_a_working_directory_that_was_removed_is_named(arguments: list[str], tmp_path: Path) -> None:
    line = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    command = ["sh", "-c", line, "sh", sys.executable, "-m", "legroom", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "legroom: the working directory does not exist [unreadable-source]" in done.stderr
    assert 'cd "$PWD"' in done.stderr and "Traceback" not in done.stderr
