"""`legroom watch` as people and programs call it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from legroom.cli.main import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
TREES = Path(__file__).parents[2] / "trees"


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["watch", *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_one_sample_in_words_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        status, out, _ = _run(capsys, "--once", "--pid", str(child.pid))
        assert status in (0, 1) and f"watching process {child.pid}" in out and "ram" in out
        status, out, _ = _run(capsys, "--once", "--json", "--pid", str(child.pid))
        child.communicate(b"\n")
    data = json.loads(out)
    assert data["schema"] == "legroom.watch/1" and [row["pid"] for row in data["processes"]] == [child.pid]
    assert {"shm", "ram", "swap", "disk"} <= {pool["name"] for pool in data["pools"]}
    assert data.keys() >= {
        "when",
        "clock",
        "interval",
        "swap_in",
        "swap_out",
        "pressure",
        "events",
        "said",
        "entries",
        "alarms",
    }


def test_everything_of_mine_without_the_watch_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        _, out, _ = _run(capsys, "--once", "--json")
        child.communicate(b"\n")
    pids = {row["pid"] for row in json.loads(out)["processes"]}
    assert child.pid in pids and os.getpid() not in pids


def test_a_log_is_written_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(tmp_path / "run.jsonl")
    for _ in range(2):
        assert _run(capsys, "--once", "--log", log)[0] in (0, 1)
    status, out, err = _run(capsys, "--replay", log, "--json")
    assert status == 0 and err == "" and len(out.splitlines()) == 2
    assert out.splitlines() == Path(log).read_text().splitlines()
    status, out, _ = _run(capsys, "--replay", log)
    assert status == 0 and out.count("ram") >= 2
    with open(log, "ab") as file:
        file.write(b'{"schema":"legroom.wat')
    status, out, err = _run(capsys, "--replay", log, "--json")
    assert status == 0 and len(out.splitlines()) == 2 and "incomplete" in err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--pid", "999999999"), "no-such-process"),
        (("--once", "--match", "no process is called like this %%"), "nothing-matches"),
        (("--match", "("), "bad-usage"),
        (("--interval", "1ms"), "bad-usage"),
        (("--replay", "/no/such/file"), "unreadable-source"),
        (("--replay", __file__), "damaged-source"),
        (("--once", "--log", "/no/such/folder/log"), "bad-usage"),
        (("--once", "--webhook", "not-an-address"), "bad-usage"),
        (("--once", "--on-alarm", " "), "bad-usage"),
        (("--prometheus", "nonsense:port"), "cannot-listen"),
        (("--root", "/no/such/root"), "no-such-root"),
    ],
)
def test_bad_input_is_reported_and_exits_2(
    arguments: tuple[str, ...], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = _run(capsys, *arguments, "--json")
    assert status == 2 and f"[{code}]" in err
    assert json.loads(out)["error"]["code"] == code


@pytest.mark.parametrize(
    "arguments", [("--pid", "1", "--match", "x"), ("--pid", "1", "--replay", "x"), ("--interval", "soon")]
)
def test_bad_usage_exits_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(capsys, *arguments)[0] == 2


def test_log_and_replay_of_one_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--log", str(tmp_path / "x"), "--replay", str(tmp_path / "." / "x"))
    assert status == 2 and "same file" in err


@pytest.mark.parametrize(
    "refused",
    [("--plot", "out.bmp"), ("--webhook", "not-an-address"), ("--prometheus", "nonsense:port"),
     ("--web", "nonsense:port"), ("--replay", "/no/such/file")],
)  # fmt: skip
def test_a_watch_that_is_refused_leaves_no_empty_log(
    refused: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(capsys, "--log", str(tmp_path / "w.jsonl"), *refused)[0] == 2
    assert not (tmp_path / "w.jsonl").exists()


@pytest.mark.parametrize("option", ["--plot", "--log"])
def test_a_file_that_could_not_be_written_exits_2(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    path = str(tmp_path / "out.svg") if option == "--plot" else "/dev/full"
    monkeypatch.setattr("legroom.monitor.watch_plot.replace_file", no_space)
    status, _, err = _run(capsys, "--once", "--pid", str(os.getppid()), option, path)
    assert status == 2 and "cannot write" in err and "No space left on device" in err


def test_a_port_in_use_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = _run(capsys, "--prometheus", f"127.0.0.1:{port}")
    assert status == 2 and "[cannot-listen]" in err and str(port) in err


def test_prometheus_without_an_address_is_this_machine_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "0.5"]) as child:  # the watch ends with it
        status, _, err = _run(capsys, "--pid", str(child.pid), "--prometheus", "--interval", "100ms")
    assert "metrics at http://127.0.0.1:9464/metrics" in err if status != 2 else "[cannot-listen]" in err


@pytest.mark.parametrize("tree", sorted(path.name for path in TREES.iterdir() if path.is_dir()))
def test_every_recorded_machine_gives_a_sample(tree: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, "--once", "--json", "--root", str(TREES / tree))
    if status == 2:  # Windows has no user ids to choose by
        assert "cannot tell which processes are yours" in err
        return
    for pool in json.loads(out)["pools"]:
        assert pool["size"] is not None or pool["reason"], pool


def test_a_terminal_without_the_screen_gets_lines_that_fit_and_a_summary_on_its_own(tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", "80", "rows", "24"], stdin=theirs, check=True)
    watch = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "legroom", "watch", "--plain", "--interval", "100ms"],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "LEGROOM_LANG": "en"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    asked = False
    try:
        while True:
            try:
                read = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            shown += read
            if not asked and shown.count(b"\n") > 12:
                asked = os.write(ours, b"\x03") == 1
    finally:
        watch.kill()
        watch.wait()
        os.close(ours)
    lines = shown.decode().splitlines()
    (echo,) = (line for line in lines if "^C" in line)
    # The terminal shows it at once: a sample that is being written may stand behind it.
    assert all(len(line.removeprefix("^C")) <= 80 for line in lines), lines
    assert echo.startswith("^C") and any(line.startswith("watched for ") for line in lines[lines.index(echo) :])
