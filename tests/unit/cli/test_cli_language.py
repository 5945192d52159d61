"""The command line in Chinese: chosen by option and environment, whole, 80 columns wide, and the same to programs."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rigs import TREES

from legroom import messages
from legroom.cli.main import COMMANDS, run
from legroom.cli.text_layout import elide
from legroom.messages import cells

ALL = sorted(path.name for path in TREES.iterdir() if path.is_dir())
LOGS = sorted((Path(__file__).parents[2] / "real" / "deaths" / "logs").glob("*.log"))
PLAN = ("--gpus", "8", "--jobs-per-gpu", "6", "--per-process", "5.75MB")
ROOT = ("--root", str(TREES / "docker-v2"))
ENGLISH = re.compile(r"(?<![\w'/=.-])(?:[A-Za-z][a-z]*,? ){3,}[a-z]+(?![\w'/=.-])")


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(list(arguments))
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def _english_left(text: str) -> list[str]:
    """Four English words in a row that are neither quoted nor part of a command."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|“[^”]*”", "", " ".join(text.split()))
    return ENGLISH.findall(text)


def _fits_80(text: str) -> None:
    # A command or a path is never broken: a line may be long for one word's sake only.
    for line in text.splitlines():
        assert cells(line) <= 80 or max(map(len, line.split())) > 60, line


def test_the_detector_sees_english_and_passes_commands() -> None:
    assert _english_left("原因：it is not what was written 这里")
    assert not _english_left("处理：docker run --shm-size=2G …；'unable to allocate shared memory' 见 /dev/shm")


@pytest.mark.parametrize("tree", ALL)
def test_doctor_and_plan_are_whole_and_fit(
    tree: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = ("--root", str(TREES / tree))
    for verb in (("doctor",), ("plan", *PLAN)):
        _, text, err = _run(capsys, *verb, *root, "--lang", "zh")
        assert err == "" and not _english_left(text), text
        _fits_80(text)


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_explain_is_whole(log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, text, err = _run(capsys, "explain", "--lang", "zh", str(log))
    assert err == "" and re.match(r"(?:unknown|[a-z-]+，把握 \d+%)\n", text)
    _fits_80(text)
    told = " ".join(log.read_text(errors="replace").split())
    assert not [left for left in _english_left(text) if left not in told], text


def test_columns_line_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, text, _ = _run(capsys, "--lang", "zh", "plan", *PLAN, "--root", str(TREES / "docker-v2"))
    lines = text.splitlines()
    head = next(place for place, line in enumerate(lines) if line.endswith("推荐"))
    assert len({cells(line) for line in _paragraph(lines, head)}) == 1
    _, *sizes = _paragraph(lines, lines.index("/dev/shm 的大小"))
    needs = [line.partition("  302 MB（")[0] for line in sizes if "  302 MB（需求 + 其他）" in line]
    assert len(needs) > 1 and len({cells(need) for need in needs}) == 1


def _paragraph(lines: list[str], first: int) -> list[str]:
    """The lines from that one to the next empty one; a table has more than its heading."""
    found = list(itertools.takewhile(str.strip, lines[first:]))
    assert len(found) > 1
    return found


def _shape(value: Any) -> Any:
    """What programs match: keys and numbers; words are left out."""
    if isinstance(value, dict):
        return {key: _shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shape(each) for each in value]
    return "…" if isinstance(value, str) else value


@pytest.mark.parametrize("tree", ALL)
def test_json_keeps_its_keys_codes_and_numbers(tree: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = ("--json", "--root", str(TREES / tree))
    for verb in (("doctor",), ("plan", *PLAN)):
        english = json.loads(_run(capsys, *verb, *root, "--lang", "en")[1])
        chinese = json.loads(_run(capsys, *verb, *root, "--lang", "zh")[1])
        assert _shape(english) == _shape(chinese) and english != chinese
        assert english["schema"] == chinese["schema"] and english.get("verdict") == chinese.get("verdict")
        for one, other in zip(english.get("findings", ()), chinese.get("findings", ()), strict=True):
            assert (one["code"], one["severity"]) == (other["code"], other["severity"])


def test_either_side_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    root = ("--root", str(TREES / "docker-v2"))
    before = _run(capsys, "--lang", "zh", "doctor", *root)
    after = _run(capsys, "doctor", "--lang", "zh", *root)
    assert before == after and "严重 shm-default-64mb" in before[1]
    assert "CRITICAL shm-default-64mb" in _run(capsys, "--lang=en", "doctor", *root)[1]


def test_started_processes_use_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    _run(capsys, "--lang", "zh_CN", "doctor", "--root", str(TREES / "docker-v2"))
    assert os.environ["LEGROOM_LANG"] == "zh"


@pytest.mark.parametrize("where", [("--lang", "fr", "doctor"), ("doctor", "--lang", "fr")])
def test_a_language_that_is_not_spoken(where: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *where, "--json")
    assert status == 2 and "'fr'" in err and "en, zh" in err
    report = json.loads(out)
    assert report["schema"] == "legroom.doctor/1" and report["error"]["code"] == "bad-usage"


def test_an_option_after_the_command_of_run_is_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    status = run(["run", "--", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--lang", "fr"])
    assert status == 0 and "['--lang', 'fr']" in capfd.readouterr().out


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--lang", "zh", "doctor", "--root", "/nowhere/at/all")
    assert status == 2 and "[no-such-root]" in err and "  原因：" in err and "  处理：" in err
    assert not _english_left(err)


def test_clicks_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--lang", "zh", "dctor")
    assert status == 2 and "错误：没有命令" in err and "doctor" in err
    assert "没有选项" in _run(capsys, "--lang", "zh", "doctor", "--bogus")[2]
    assert "Error: No such" in _run(capsys, "--lang", "en", "doctor", "--bogus")[2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("doctor --lang zh --bogus", "没有选项"),
        ("doctor --bogus --lang=zh", "没有选项"),
        ("--bogus doctor --lang zh", "没有选项"),
        ("dctor --lang zh", "没有命令"),
        ("cache lst --lang zh", "没有命令"),
        ("plan --gpus many --lang zh", "必须是不小于"),
        ("run --retries many --lang zh -- true", "必须是不小于"),
        ("doctor --json=3 --lang zh", "不带值"),
        ("cache load --lang zh", "缺少参数"),
        ("run --lang zh", "缺少参数"),
        ("doctor --lang fr --lang zh --root", "需要"),
    ],
)
def test_a_refused_line_is_refused_in_the_language_it_asks_for(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = _run(capsys, *line.split())
    assert status == 2 and out == "" and said in err, err


@pytest.mark.parametrize(
    "line",
    [
        "doctor --lang fr --bogus",  # no language of ours
        "doctor --root --lang zh",  # the value of --root
        "run --retries many -- train --lang zh",  # the command's own
        "run --bogus -- train --lang zh",
    ],
)
def test_what_is_no_language_of_ours_leaves_english(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, *line.split())
    assert status == 2 and ("Error: " in err or "must be an integer" in err), err


def test_a_command_without_dashes_before_it_keeps_its_language(capfd: pytest.CaptureFixture[str]) -> None:
    told = "import os, sys; print(sys.argv[1:], os.environ.get('LEGROOM_LANG'))"
    status = run(["run", sys.executable, "-c", told, "--lang", "zh"])
    shown = capfd.readouterr()
    assert status == 0 and "['--lang', 'zh'] None" in shown.out and messages.language() == "en"


@pytest.mark.parametrize("name", ["fr", "fr_FR.UTF-8", "chinese"])
def test_a_language_of_the_environment_that_is_none_of_ours_is_reported(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_LANG", name)
    told = f"legroom: LEGROOM_LANG={name} has no effect: the supported languages are en, zh\n"
    assert _run(capsys, "doctor", *ROOT)[2] == told
    _, text, err = _run(capsys, "doctor", *ROOT, "--json")
    assert json.loads(text)["schema"].startswith("legroom.doctor/") and err == told
    assert _run(capsys, "doctor", *ROOT, "--lang", "en")[2] == ""
    assert "LEGROOM_LANG" not in _run(capsys, "doctor", "--lang", "xx")[2]  # which is refused
    for known in ("", "en_GB", "C"):
        monkeypatch.setenv("LEGROOM_LANG", known)
        assert _run(capsys, "doctor", *ROOT)[2] == ""


def test_the_environments_language_does_not_disturb_a_supervised_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_LANG", "fr")
    told = "import os, sys; print(os.environ['LEGROOM_LANG']); sys.exit(3)"
    assert run(["run", "--quiet", "--", sys.executable, "-c", told]) == 3
    assert capfd.readouterr() == ("fr\n", "")
    assert run(["run", "--", sys.executable, "-c", told]) == 3
    shown = capfd.readouterr()
    assert shown.out == "fr\n" and shown.err.count("LEGROOM_LANG=fr has no effect") == 1


def test_help_after_a_language_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert "显示本说明并退出" in _run(capsys, "--lang", "zh", "doctor", "-h")[1]


def test_help_before_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    told = _run(capsys, "help", "--lang", "zh", "cache", "load")
    assert told == _run(capsys, "--lang", "zh", "cache", "load", "--help") and "显示本说明并退出" in told[1]


@pytest.mark.parametrize("verb", [*COMMANDS, "help"])
def test_help(verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, text, _ = _run(capsys, verb, "--lang", "zh", "--help")
    assert status == 0 and "显示本说明并退出" in text and not _english_left(text), text
    _fits_80(text)
    assert "Show this message and exit." in _run(capsys, verb, "--lang", "en", "--help")[1]


def _legroom(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    kept = {
        name: os.environ[name] for name in ("PATH", "COVERAGE_PROCESS_START", "COVERAGE_FILE") if name in os.environ
    }
    return subprocess.run(
        [sys.executable, "-m", "legroom", *arguments], capture_output=True, env={**kept, **environment}
    )


def test_the_locale_alone() -> None:
    done = _legroom("doctor", *ROOT, LANG="zh_CN.UTF-8", PYTHONUTF8="1")
    assert "严重 shm-default-64mb" in done.stdout.decode() and done.stderr == b""


def test_streams_that_cannot_carry_it_get_english() -> None:
    for encoding in ("ascii", "latin-1"):
        done = _legroom("doctor", *ROOT, "--lang", "zh", PYTHONIOENCODING=encoding)
        assert done.returncode == 1 and b"CRITICAL shm-default-64mb" in done.stdout
        assert done.stderr.startswith(b"legroom: --lang zh has no effect: the encoding of standard output, ")
    done = _legroom("doctor", *ROOT, LEGROOM_LANG="zh", PYTHONIOENCODING="ascii")
    assert b"CRITICAL shm-default-64mb" in done.stdout and done.stderr == b""  # set once for all commands


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_json_on_every_stream(encoding: str) -> None:
    done = _legroom("doctor", "--json", *ROOT, "--lang", "zh", PYTHONIOENCODING=encoding)
    told = json.loads(done.stdout.decode("utf-8" if encoding != "latin-1" else encoding))
    assert done.stderr == b"" and "容器" in json.dumps(told, ensure_ascii=False)


def test_names_that_are_no_text_do_not_break_the_output(tmp_path: Path) -> None:
    missing = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    done = _legroom("doctor", "--root", missing, "--json", LC_ALL="C.UTF-8")
    told = json.loads(done.stdout.decode())
    assert done.returncode == 2 and told["error"]["code"] == "no-such-root" and b"Traceback" not in done.stderr


def test_only_words_are_elided_not_chinese_sentences() -> None:
    assert elide("内存" * 60) == "内存" * 60
    path = "/sys/fs/cgroup/" + "a" * 80
    assert "…" in elide(f"上限来自 cgroup（{path}）") and elide(f"（{path}）").startswith("（/sys/fs/cgroup/")
