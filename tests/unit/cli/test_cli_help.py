"""Line breaks of --help: at 80 columns, never inside an option name or inside the brackets of a default."""

from __future__ import annotations

import re

import click
import pytest

from legroom.cli import check, plan
from legroom.cli.help import HelpFormatter
from legroom.cli.main import COMMANDS, run
from legroom.messages import cells


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_help_ends_inside_an_option_or_a_bracket(
    command: str, language: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--lang", language, "--help"]) == 0
    text = capsys.readouterr().out
    for line in text.splitlines():
        assert cells(line) <= 80 and not re.search(r"\w-$", line), line
        assert line.count("[") == line.count("]"), line
    if language == "zh":
        assert "用法：legroom" in text and "选项：\n" in text and "默认: " not in text


def test_brackets_that_do_not_fit_begin_a_line_of_their_own() -> None:
    formatter = HelpFormatter(width=60)
    formatter.write_dl(
        [("--timeout TIME", "Time limit for measuring the one.  [default: 60s]"), ("-x", "Two.  [required]")]
    )
    assert formatter.getvalue().splitlines() == [
        "--timeout TIME  Time limit for measuring the one.",
        "                [default: 60s]",
        "-x              Two.  [required]",
    ]


def test_paragraphs_that_must_not_be_wrapped_are_kept() -> None:
    formatter = HelpFormatter(width=50)
    formatter.write_text("One\nparagraph.\n\n\b\n  a  table\n  of two lines")
    assert formatter.getvalue() == "One paragraph.\n\n  a  table\n  of two lines\n"


def test_a_long_usage_line_continues_below_its_first_argument() -> None:
    formatter = HelpFormatter(width=50)
    formatter.write_usage("legroom some-command", "[OPTIONS] " + "SOURCE-FILE... " * 3)
    assert all(cells(line) <= 50 for line in formatter.getvalue().splitlines())
    assert formatter.getvalue().splitlines()[1].startswith(" " * len("Usage: legroom some-command ") + "SOURCE-FILE")
    assert isinstance(formatter, click.HelpFormatter)


def test_check_describes_a_default_that_a_dataloader_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    """Its settings count where none are given, so that a number alone is not the default."""
    texts = _help_of_options("check", capsys)
    for name in check._OF_LOADER | {"batch", "collate", "start_method"}:
        text = texts[name]
        assert "--dataset names" in text and "[default" not in text, text


def test_plan_names_the_option_that_describes_a_dataloader(capsys: pytest.CaptureFixture[str]) -> None:
    texts = _help_of_options("plan", capsys)
    for name in plan._OF_LOADER:
        assert "(with --batch" in texts[name] or "(with --val-workers)" in texts[name], texts[name]


def _help_of_options(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The help of each option by its name."""
    assert run([command, "--lang", "en", "--help"]) == 0
    found = re.split(r"^  --(\S+)", capsys.readouterr().out, flags=re.M)
    return {name.replace("-", "_"): " ".join(text.split()) for name, text in zip(found[1::2], found[2::2], strict=True)}
