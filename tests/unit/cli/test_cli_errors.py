"""How errors are printed: wrapped on a terminal, whole lines elsewhere, and a JSON object with --json."""

from __future__ import annotations

import io
import json
import sys

import pytest

from legroom.cli import text_layout
from legroom.cli.language_and_streams import error_columns, error_text, message_printer, remark_text
from legroom.cli.main import run
from legroom.cli.text_layout import row
from legroom.errors import UsageError
from legroom.messages import cells, speak

COMMAND = "mount -o remount,size=512M /dev/shm && " + "df -h /dev/shm " * 8
PATH = "/data/" + "long-directory-name/" * 6 + "train.npy"


def _error() -> UsageError:
    return UsageError(
        f"cannot read {PATH} " + "because of this and that " * 4,
        why="the formats are " + "npy, npz, parquet, arrow, " * 10,
        fix=(
            "a module that exits needs " + "a very long guard `if __name__ == '__main__':` " * 4,
            f"remount it:\n{COMMAND}",
        ),
    )


@pytest.mark.parametrize("columns", [50, 80, 100])
def test_an_error_is_wrapped_to_the_terminal_but_not_its_commands_paths_and_code(columns: int) -> None:
    lines = error_text(_error(), columns).splitlines()
    assert "       " + COMMAND in lines and sum(PATH in line for line in lines) == 1
    assert all(cells(line) <= columns or COMMAND in line or PATH in line for line in lines)
    assert sum(line.count("`if __name__ == '__main__':`") for line in lines) == 4
    assert lines[0].startswith("legroom: cannot read") and all(line.startswith("  ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(f"legroom: {_error()}".split())


def test_chinese_errors_are_wrapped_by_columns() -> None:
    speak("zh")
    try:
        text = error_text(UsageError("无法读取" * 30, why="内存不足" * 30, fix=("减小批大小" * 20,)), 80)
    finally:
        speak("en")
    assert all(cells(line) <= 80 for line in text.splitlines()) and len(text.splitlines()) >= 8


def test_lines_of_a_traceback_are_not_broken() -> None:
    frame = f'File "{PATH}", line 3, in __getitem__'
    assert frame in error_text(UsageError("loading failed", why=f"{frame}\n{'code ' * 40}"), 80)


def test_click_s_errors_are_wrapped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(["explain", "one.log", "two.log"]) == 2
    extra = terminal.getvalue()
    assert extra.startswith("Usage: legroom explain") and "\nError: Got unexpected extra argument" in extra
    assert all(len(line) <= 60 for line in extra.splitlines()), extra


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_remark_is_not_broken_inside_of_quotes(monkeypatch: pytest.MonkeyPatch, language: str) -> None:
    install = "pip install 'legroom[watch]'"
    text = f"the package textual is needed for the full-screen view, which is missing: {install}"
    assert remark_text(text) == f"legroom: {text}"
    monkeypatch.setattr("sys.stderr", _Terminal())
    speak(language)
    try:
        for columns in range(40, 120):
            monkeypatch.setenv("COLUMNS", str(columns))
            lines = remark_text(text).splitlines()
            assert any("'legroom[watch]'" in line for line in lines) and all(cells(line) <= columns for line in lines)
    finally:
        speak("en")


def test_messages_of_run_fit_the_terminal_and_commands_below_them_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    tell, command = message_printer(False), "        legroom " + "check " * 20
    tell("gpu-oom, 95% sure: " + "GPU memory ran out. " * 5)
    tell(f"  why: log, line 1 from the end: RuntimeError('{'CUDA out of memory. ' * 6}')")
    tell(f"  do:  {'use a smaller batch, or ' * 5}\n{command}")
    lines = terminal.getvalue().splitlines()
    assert lines.pop() == command and len(lines) > 9
    assert all(len(line) <= 60 and line.startswith(("legroom: ", "  ")) for line in lines), lines


def test_rows_of_a_list_are_whole_in_a_pipe_and_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = "  80d476b33a6b /data/train.npy (3.25 KB): copy intact, source CHANGED: its MD5 is now 0cc175b9c0f1b6a8"
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert row(text) == text
    monkeypatch.setattr("sys.stdout", _Terminal())
    assert [line[:5] for line in row(text).splitlines()] == ["  80d", "    s"]
    assert row(text).split() == text.split() and all(len(line) <= 60 for line in row(text).splitlines())


def test_only_a_terminal_gets_wrapped_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert error_columns() is None
    wrong = ["tune", "--dataset", "data", "--batch", "2"]
    assert run(wrong) == 2
    whole = capsys.readouterr().err
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert error_columns() == 60 and run(wrong) == 2
    wrapped = terminal.getvalue()
    assert all(len(line) <= 60 for line in wrapped.splitlines()) and wrapped.split() == whole.split()
    assert len(wrapped.splitlines()) > len(whole.splitlines())


@pytest.mark.parametrize(
    ("arguments", "schema", "message"),
    [
        (("check", "--batch", "x", "--json"), "legroom.check/1", "--batch must be an integer >= 1 (got 'x')"),
        (("check", "--bogus", "--json"), "legroom.check/1", "--bogus"),
        (("tune", "--json"), "legroom.tune/1", "--dataset"),
        (("leak", "--json"), "legroom.leak/1", "--read DIR"),
        (("cache", "bogus", "--json"), "legroom.cache/1", "bogus"),
        (("cache", "--lang", "en", "list", "--bogus", "--json"), "legroom.cache.list/1", "--bogus"),
        (("bogus", "--json"), "legroom/1", "bogus"),
    ],
)
def test_usage_errors_are_json_too(
    arguments: tuple[str, ...], schema: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(arguments)) == 2
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (
        report["schema"] == schema and report["error"]["code"] == "bad-usage" and message in report["error"]["message"]
    )
    assert report["error"].keys() == {"code", "message", "why", "fix"} and message in shown.err


@pytest.mark.parametrize("problem", [OSError(28, "No space left", "/x/y"), MemoryError(), RecursionError("too deep")])
def test_an_error_that_no_command_expects_has_a_message_and_is_json_too(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr("legroom.cli.doctor.snapshot", fail)
    assert run(["doctor", "--json"]) == 1
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert error["message"].startswith(type(problem).__name__) and "in fail" in error["why"] and error["fix"]
    assert "[error]" in shown.err and "Traceback" not in shown.err


def test_an_option_of_the_supervised_command_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--bogus", "--", "python", "train.py", "--json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--json doctor", "--json goes after the command: legroom doctor --json"),
        ("--pid 12 watch --once", "--pid goes after the command: legroom watch --pid 12 --once"),
        ("--pid=12 watch", "--pid goes after the command: legroom watch --pid=12"),
        ("--lang en --match run watch", "--match goes after the command: legroom watch --lang en --match run"),
        (
            "--retries 2 run -- python --json",
            "--retries goes after the command: legroom run --retries 2 -- python --json",
        ),
        ("--json cache list", "--json goes after the command: legroom cache list --json"),
        ("cache --json list", "--json goes after the command: legroom cache list --json"),
        ("--json", "--json goes after the command: legroom doctor --json"),
    ],
)
def test_an_option_before_its_command(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    printed = capsys.readouterr()
    assert told in printed.err and "Did you mean" not in printed.err
    if line.startswith("--json"):
        assert json.loads(printed.out)["error"]["message"].startswith(told)


@pytest.mark.parametrize("line", ["--jsn doctor", "--invented", "--invented doctor", "doctor --invented"])
def test_an_option_that_no_command_has(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["cache"], ["nodes"]])
def test_a_group_without_a_command_shows_its_help_once(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(arguments) == 2
    shown = terminal.getvalue()
    assert shown.startswith("Usage: legroom") and shown.count("Usage:") == 1 and "Error" not in shown
    assert "\nCommands:\n" in shown


@pytest.mark.parametrize(
    "arguments",
    [["plan", "--per-process", "5MB", "--params", "7", "B"], ["check", "--batch", "2", "--timeout", "5", "s"]],
)
def test_a_unit_that_stands_apart_is_no_file_of_a_pattern(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert f"Got unexpected extra argument ({arguments[-1]})" in err and "pattern" not in err


def test_a_file_with_the_name_of_a_style_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(text_layout, "for_drawing", lambda stream: stream)
    with text_layout.progress_bars() as draw:
        assert draw is not None
        draw("key", "runs[/b]/[red]x.npy", 0, 10)
    assert "runs[/b]/[red]x.npy" in terminal.getvalue()
