"""`legroom tune --emit` and `--params`: the file alone on stdout, the table beside it."""

from __future__ import annotations

import json

import pytest
import yaml

from legroom.cli.main import run
from legroom.loader.tune import legroom_tune as tuning_named
from legroom.records.settings_and_overrides import Settings

BASE = ("tune", "--dataset", "data:set", "--batch", "32", "--ranks", "3")


@pytest.fixture(autouse=True)
def _tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_named, "tune_named", lambda *_, **__: Settings(32, 2, 3))


def test_the_file_alone_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    status = run([*BASE, "--emit", "deepspeed", "--zero", "3", "--offload", "--params", "60506624"])
    shown = capsys.readouterr()
    config = json.loads(shown.out)
    assert status == 0 and config["zero_optimization"]["stage"] == 3 and config["train_batch_size"] == 192
    assert "ZeRO 2" in shown.err and "2P + 18P/N" in shown.err
    assert all(len(line) <= 80 for line in shown.err.splitlines())


def test_accelerates_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, "--emit", "accelerate", "--precision", "no"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["distributed_type"] == "MULTI_GPU"


def test_ranks_on_several_machines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_WORLD_SIZE tells how many of the ranks are on this one."""
    sixteen = ("tune", "--dataset", "data:set", "--batch", "32", "--ranks", "16")
    monkeypatch.setattr(tuning_named, "tune_named", lambda *_, **__: Settings(32, 2, 16))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert run([*sixteen, "--emit", "accelerate", "--zero", "2", "--params", "1000", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    config = yaml.safe_load(report["emit"]["text"])
    assert (config["num_machines"], config["num_processes"]) == (2, 16)
    assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    assert "--machine_rank N --main_process_ip ADDRESS" in report["emit"]["text"]
    assert report["zero"][1]["host"] == 48_000, "4 bytes × 8 ranks × 1.5 for each parameter"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    for more in (("--params", "1000"), ("--emit", "accelerate")):
        assert run([*sixteen, *more]) == 2 and "16 ranks cannot be split evenly over 3" in capsys.readouterr().err


def test_json_holds_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, "--emit", "deepspeed", "--params", "1000", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "legroom.tune/1" and report["emit"]["kind"] == "deepspeed"
    assert json.loads(report["emit"]["text"])["zero_optimization"]["stage"] == 2
    assert [row["gpu"] for row in report["zero"][:2]] == [16_000, 8_000]


def test_the_table_in_words_and_a_host_without_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, "--params", str(10**15)]) == 0
    out = capsys.readouterr().out
    assert "plain torch" in out and "need more host memory than" in out


@pytest.mark.parametrize("more", [("--zero", "2"), ("--offload",), ("--emit", "accelerate", "--offload"), ("--params", "0")])  # fmt: skip
def test_what_makes_no_sense_exits_2(more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, *more]) == 2
    assert capsys.readouterr().out == ""
