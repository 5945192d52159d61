"""Errors of every command name the options that were typed; Python keeps its own words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from rigs import TREES

import legroom
from legroom.cli.main import cli, run
from legroom.cli.nodes import _in_options, warm
from legroom.cli.options import in_options, translated
from legroom.errors import DatasetFailed, UsageError
from legroom.loader.tune.legroom_tune import tune_named
from legroom.messages import speak
from legroom.records.node_results import NodeError, NodeLoad

ROOT = ("--root", str(TREES / "bare-v2"))
# A line of each command that ends soon, before its options and after them. Not demo: it takes a minute.
LINES: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("check",): (
        ("--batch", "8", "--workers", "2", "--val-workers", "1", "--params", "1M", "--data", "x.npz", *ROOT),
        (),
    ),
    ("plan",): (
        ("--batch", "8", "--workers", "2", "--val-workers", "1", "--params", "1M", "--data", "x.npz", *ROOT),
        (),
    ),
    ("tune",): (("--dataset", "no_such_module:data", "--batch", "8", "--emit", "deepspeed"), ()),
    ("run",): ((), ("--", "true")),
    ("leak",): ((), ("--", "true")),
    ("watch",): (("--once", *ROOT), ()),
    ("doctor",): (ROOT, ()),
    ("report",): ((), ()),
    ("explain",): (("no-such.log",), ()),
    ("cache", "load"): (("x.npz",), ()),
    ("cache", "gc"): ((), ()),
    ("cache", "drop"): (("x.npz",), ()),
    ("cache", "verify"): ((), ()),
    ("cache", "list"): ((), ()),
    ("cache", "info"): (("x.npz",), ()),
}
PYTHON = {
    name
    for function in (legroom.check, legroom.plan, legroom.tune, legroom.open, tune_named)
    for name in inspect.signature(function).parameters
}
# What starts servers or processes, or stands in for the machine.
LEFT_OUT = {"--lang", "--web", "--prometheus", "--webhook", "--on-alarm", "--replay", "--read", "--out"}


def _wrong_options() -> Iterator[tuple[tuple[str, ...], str, str]]:
    for words in LINES:
        command: click.Command = cli
        for word in words:
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), word) or command
        for option in command.params:
            if isinstance(option, click.Option) and not option.is_flag and option.opts[0] not in LEFT_OUT:
                for value in ("-1", "0", "nonsense"):
                    yield words, option.opts[0], value


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", x=np.zeros((8, 4)))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path / "shm"))
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path / "disk"))


@pytest.mark.usefixtures("child_in_fork")
@pytest.mark.parametrize(("words", "option", "value"), [*_wrong_options()])
def test_a_wrong_value_is_named_by_its_option(
    words: tuple[str, ...], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = LINES[words]
    if option in before:
        place = before.index(option)
        before = (*before[:place], *before[place + 2 :])
    more = ("--sample-bytes", "--dataset", "--measure", "--match", "--per-process")
    if option in more and "--data" in before:
        before = before[: before.index("--data")] + ROOT
    run([*words, *before, option, value, *after])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    shown = set(re.findall(r"(?<![\w-])([a-z]\w*)=", err.replace("--set ", "--set-"))) & PYTHON
    assert not shown, err
    assert not re.search(r"^(legroom: |Error: )[a-z_]+ must be", err), err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("check", "--batch", "0", "--sample-bytes", "1MB"),
            ("--batch must be an integer >= 1", "pass --batch 1 or more"),
        ),
        (
            ("check", "--batch", "8", "--sample-bytes", "1MB", "--workers", "-1"),
            ("--workers must be an integer >= 0 (got -1)", "pass --workers 0 or more"),
        ),
        (("check", "--batch", "8", "--data", "x.npz", "--keys", "nope"), ("omit --keys to load everything",)),
        (("plan", "--per-process", "1MB", "--ranks", "0"), ("--ranks must be an integer >= 1",)),
        (("plan", "--per-process", "1MB", "--gpus", "0"), ("--gpus must be an integer >= 1",)),
        (("plan", "--per-process", "1MB", "--jobs-per-gpu", "0"), ("--jobs-per-gpu must be an integer >= 1",)),
        (("tune", "--dataset", "a:b", "--batch", "0"), ("--batch must be an integer >= 1",)),
        (("tune", "--dataset", "a:b", "--batch", "8", "--ranks", "0"), ("--world-size must be an integer >= 1",)),
        (
            ("tune", "--dataset", "a:b", "--batch", "8", "--effective-batch", "0"),
            ("--effective-batch must be an integer >= 1", "pass --effective-batch 1 or more"),
        ),
        (("tune", "--dataset", "a:b", "--batch", "8", "--set", "batch=0"), ("pass --set batch=1 or more",)),
        (("--lang", "zh", "check", "--batch", "0", "--sample-bytes", "1MB"), ("--batch 必须是不小于 1 的整数",)),
        (("cache", "load", "x.npz", "--keys", "nope"), ("omit --keys to load everything",)),
    ],
)
def test_what_a_user_reads(
    arguments: tuple[str, ...], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert run(list(arguments)) == 2
    finally:
        speak("en")
    err = capsys.readouterr().err
    assert all(text in err for text in said), err


def test_python_keeps_its_words() -> None:
    with pytest.raises(UsageError) as caught:
        legroom.plan(per_process="1MB", num_workers=-1)
    assert "num_workers must be an integer" in caught.value.what and "pass num_workers=0" in caught.value.fix[0]


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def test_only_options_of_the_command_are_named() -> None:
    text = "num_workers=0, keys=['a', 'b'], dtype='uint16' or dtype='float16'"
    assert translated(_command("check"), text, "", ())[0] == (
        "--workers 0, --keys a,b, dtype='uint16' or --dtype float16"  # that of check is the model's
    )
    assert translated(_command("explain"), text, "", ())[0] == text


def test_the_user_s_own_code_is_quoted_as_it_is() -> None:
    error = DatasetFailed(
        "loading failed", why="DataLoader(data, num_workers=2): num_workers=2", fix=("num_workers=0",)
    )
    in_options(error, _command("check"))
    assert error.why == "DataLoader(data, num_workers=2): num_workers=2" and error.fix == ("--workers 0",)


def test_the_user_s_own_command_is_quoted_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--", "python train.py checkpoint=last.ckpt loader=legroom"]) == 127
    shown = " ".join(capsys.readouterr().err.split())
    assert "checkpoint=last.ckpt loader=legroom" in shown and "--checkpoint last" not in shown
    assert run(["run", "--flag", "loader=legroom", "--", "true"]) == 2
    assert "'loader=legroom'" in capsys.readouterr().err


def test_the_error_of_a_node_names_options_too() -> None:
    error = NodeError("missing-key", "keys=['a'] selects nothing", "", ("omit keys= to load everything",))
    fields = dict.fromkeys(inspect.signature(NodeLoad).parameters)
    load = _in_options(NodeLoad(**{**fields, "error": error}))  # type: ignore[arg-type]
    assert load.error is not None and load.error.message == "--keys a selects nothing"
    assert load.error.fix == ("omit --keys to load everything",) and warm.name == "warm"
