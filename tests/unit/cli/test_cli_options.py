"""Options that would have no effect: beside another, or without another, they are refused by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from legroom.cli.main import run
from legroom.cli.options import in_options
from legroom.errors import UsageError
from legroom.messages import speak

TUNE = ("tune", "--dataset", "data:train_set")
LAST = (*TUNE, "--last")
CHECK = ("check", "--batch", "8", "--sample-bytes", "1MB")
SHARE = ("check", "--batch", "8", "--dataset", "data:train_set", "--share")
PLAN = ("plan", "--per-process", "1MB")
MEASURE = ("plan", "--measure", "1")
REPLAY = ("watch", "--replay", "run.jsonl")


@pytest.mark.parametrize(
    ("arguments", "option", "refused"),
    [
        (LAST, "--last", ("--batch", "8")),
        (LAST, "--last", ("--effective-batch", "8")),
        (LAST, "--last", ("--step-seconds", "1")),
        (LAST, "--last", ("--collate", "data:collate")),
        (LAST, "--last", ("--loader", "torch")),
        (LAST, "--last", ("--loader", "legroom")),  # its default: typed all the same
        (LAST, "--last", ("--preset", "cluster")),
        (LAST, "--last", ("--benchmark",)),
        (LAST, "--last", ("--set", "workers=2")),
        (LAST, "--last", ("--timeout", "5s")),
        (LAST, "--last", ("--world-size", "2")),
        (SHARE, "--share", ("--workers", "2")),
        (SHARE, "--share", ("--params", "1B")),
        (SHARE, "--share", ("--root", "/host")),
        (SHARE, "--share", ("--checkpoint-dir", "runs")),
        (MEASURE, "--measure", ("--workers", "2")),
        (MEASURE, "--measure", ("--sample-bytes", "1MB")),
        (("plan", "--match", "train"), "--match", ("--pin-memory",)),
        (REPLAY, "--replay", ("--interval", "2s")),
        (REPLAY, "--replay", ("--root", "/host")),
        (REPLAY, "--replay", ("--prometheus",)),
        (("watch", "--once"), "--once", ("--prometheus",)),
        (("watch", "--once"), "--once", ("--web",)),
        (("watch", "--json"), "--json", ("--top", "3")),
        (("watch", "--json"), "--json", ("--plain",)),
        (("leak", "--read", "growth"), "--read", ("--records", "other")),
        (("doctor", "--json"), "--json", ("--plain",)),
        (("cache", "drop", "a.npy"), "--all", ("--all",)),
        (("nodes", "drop", "a.npy"), "--all", ("--all",)),
        (("leak", "--read", "growth", "--", "true"), "--read", ()),
        (("run", "--quiet", "--", "true"), "--leak", ("--leak",)),
    ],
)
def test_an_option_without_effect_beside_another_is_refused(
    arguments: tuple[str, ...], option: str, refused: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    group = 2 if arguments[0] in ("cache", "nodes") else 1
    assert run([*arguments[:group], *refused, *arguments[group:]]) == 2
    err = capsys.readouterr().err
    other = (
        {"--leak": "--quiet", "--all": "a.npy", "--read": "COMMAND"}.get(option)
        if refused[:1] in ((), ("--all",), ("--leak",))
        else refused[0]
    )
    assert f"Error: {option} cannot be combined with {other}" in err


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ((*TUNE, "--batch", "8", "--zero", "2"), "--zero needs --emit"),
        ((*TUNE, "--batch", "8", "--offload"), "--offload needs --emit"),
        ((*TUNE, "--batch", "8", "--precision", "fp16"), "--precision needs --emit"),
        ((*CHECK, "--keys", "x"), "--keys needs --data"),
        ((*CHECK, "--prefetch", "4"), "--prefetch needs --workers or --val-workers"),
        ((*CHECK, "--persistent-workers"), "--persistent-workers needs --workers or --val-workers"),
        ((*CHECK, "--start-method", "spawn"), "--start-method needs --workers or --val-workers"),
        ((*CHECK, "--val-batch", "8"), "--val-batch needs --val-workers"),
        ((*CHECK, "--optimizer", "adam"), "--optimizer needs --params"),
        ((*CHECK, "--dtype", "float16"), "--dtype needs --params"),
        ((*CHECK, "--collate", "data:collate"), "--collate needs --dataset"),
        ((*CHECK, "--checkpoint-dir", "."), "--checkpoint-dir needs --checkpoint-bytes"),
        ((*CHECK, "--checkpoint-bytes", "1GB"), "--checkpoint-bytes needs --checkpoint-dir"),
        (("check", "--batch", "8", "--share"), "--share needs --dataset"),
        ((*PLAN, "--workers", "4"), "--workers needs --batch"),
        ((*PLAN, "--pin-memory"), "--pin-memory needs --batch"),
        ((*PLAN, "--loader", "legroom"), "--loader needs --batch"),
        ((*PLAN, "--val-workers", "2"), "--val-workers needs --batch"),
        ((*PLAN, "--sample-bytes", "1MB"), "--sample-bytes needs --batch"),
        ((*PLAN, "--shared"), "--shared needs --data"),
        ((*PLAN, "--data", "x.npy"), "--data needs --batch or --shared"),
        ((*PLAN, "--keys", "x"), "--keys needs --data"),
        ((*PLAN, "--optimizer", "adam"), "--optimizer needs --params"),
        (("run", "--retries", "1", "--resume-flag", "--resume", "--", "true"), "--resume-flag needs --checkpoint"),
        (
            ("run", "--retries", "1", "--checkpoint", "*.pt", "--resume-existing", "--", "true"),
            "--resume-existing needs --resume-flag",
        ),
        (("run", "--fresh", "--", "true"), "--fresh needs --retries"),
        ((*REPLAY, "--plot", "run.svg", "--top", "3"), "--top needs --plain"),
    ],
)
def test_an_option_without_effect_alone_is_refused(
    arguments: tuple[str, ...], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(arguments)) == 2
    assert f"Error: {needed}\n" in capsys.readouterr().err


def test_all_refused_options_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*LAST, "--set", "workers=2", "--batch", "8"]) == 2
    assert "--last cannot be combined with --batch, --set" in capsys.readouterr().err
    try:
        assert run([*LAST, "--set", "workers=2", "--batch", "8", "--lang", "zh"]) == 2
        assert "--last 不能与 --batch、--set 一起使用" in capsys.readouterr().err
    finally:
        speak("en")


@pytest.mark.parametrize("option", [("--prefetch", "4"), ("--persistent-workers",), ("--start-method", "spawn")])
def test_settings_of_workers_are_refused_without_workers_as_torch_does(
    option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """check would answer for a DataLoader that torch does not make."""
    from rigs import TREES

    assert run([*CHECK, "--workers", "0", *option, "--root", str(TREES / "bare-v2")]) == 2
    assert f"{option[0]} needs --workers 1 or more" in capsys.readouterr().err
    if option[0] == "--prefetch":
        assert run(["plan", "--batch", "8", "--sample-bytes", "1MB", "--workers", "0", *option]) == 2
    assert run([*CHECK, "--val-workers", "2", "--prefetch", "4", "--root", str(TREES / "bare-v2")]) == 0


def test_plain_lines_are_printed_beside_the_chart_of_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["watch", "--once", "--log", "run.jsonl"]) in (0, 1)
    capsys.readouterr()
    assert run([*REPLAY, "--plot", "run.svg"]) == 0
    assert capsys.readouterr().out == ""
    assert run([*REPLAY, "--plot", "run.svg", "--plain", "--top", "1"]) == 0
    assert "ram" in capsys.readouterr().out


def test_quiet_prints_the_report_and_no_message_about_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from legroom.cli.leak import show_report

    page = str(tmp_path / "page.html")
    assert show_report(str(tmp_path), (), page, as_json=False, to_stdout=True, quiet=True)
    shown = capsys.readouterr()
    assert shown.out and shown.err == "" and Path(page).exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--retries", "abc", "--", "true"),
        ("watch", "--top", "abc"),
        ("watch", "--pid", "abc"),
        ("doctor", "--pid", "abc"),
        ("plan", "--gpus", "abc"),
        ("plan", "--measure", "abc"),
        ("check", "--batch", "abc"),
        ("check", "--batch", "8", "--workers", "abc"),
        ("tune", "--dataset", "data:train_set", "--world-size", "abc"),
    ],
)
def test_an_integer_option_names_what_was_typed_and_what_is_possible(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(arguments)) == 2
    option, least = arguments[arguments.index("abc") - 1], 0
    err = capsys.readouterr().err
    least = 0 if option in ("--retries", "--top", "--workers") else 1
    assert f"{option} must be an integer >= {least} (got 'abc')" in err


@pytest.mark.parametrize("option", ["--batch", "--val-batch", "--ranks", "--prefetch"])
def test_a_wrong_count_is_refused_before_the_dataset_is_imported(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"--batch": "8", "--workers": "2", "--val-workers": "1", option: "0"}
    words = [word for pair in arguments.items() for word in pair]
    assert run(["check", "--dataset", "no_such_module:data", *words]) == 2
    err = capsys.readouterr().err
    assert f"{option} must be an integer >= 1 (got 0)" in err and "no_such_module" not in err
    if option == "--batch":
        assert run(["tune", "--dataset", "no_such_module:data", "--batch", "0"]) == 2
        assert "--batch must be an integer >= 1 (got 0)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--gpus", "8", "--per-process", "64"),
        ("plan", "--per-process", "1MB", "--nccl", "12"),
        ("check", "--batch", "8", "--sample-bytes", "600"),
        ("cache", "gc", "--free", "8"),
    ],
)
def test_a_small_size_without_a_unit_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(list(arguments)) == 2
    number = arguments[-1]
    assert f"{number} has no unit: write {number}MB, or {number}B for bytes" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["7", "0.5", "1h30"])
def test_a_time_without_a_unit_is_refused_where_entries_are_removed(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cache", "gc", "--older", number]) == 2
    number = number.removeprefix("1h")
    assert f"{number} has no unit: write {number}d for days, or {number}s for seconds" in capsys.readouterr().err


def test_bytes_with_a_unit_zero_and_large_numbers_are_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("64B", "0", "67108864", "4096"):
        assert run(["plan", "--gpus", "8", "--per-process", "64KB", "--nccl", size]) in (0, 1)
    assert capsys.readouterr().err == ""


def test_check_alone_says_what_it_needs_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check"]) == 2
    assert "legroom check --dataset data:train_set --batch 64 --workers 4" in capsys.readouterr().err


def test_only_options_that_the_help_shows_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--jso"]) == 2
    err = capsys.readouterr().err
    assert "--json" in err and "--job" not in err  # an earlier name of --pid


def test_a_flag_of_the_library_is_the_flag_of_the_command() -> None:
    # As `check` raises it where a DataLoader is named, whose own settings count.
    error = UsageError("persistent_workers= needs num_workers=1 or more", fix=("leave persistent_workers= out",))
    in_options(error, import_module("legroom.cli.check").command)
    assert str(error).startswith("--persistent-workers needs --workers 1 or more")
    assert error.fix == ("leave --persistent-workers out",)


def test_a_collate_function_is_not_called_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--batch", "8", "--dataset", "data:train_set", "--collate", "pad"]) == 2
    assert "'pad' is not the name of a collate function" in capsys.readouterr().err


def test_a_pattern_of_data_that_matches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--batch", "8", "--data", "none-*.npy"]) == 2
    assert "nothing matches none-*.npy" in capsys.readouterr().err
