"""`legroom tune`: answers in words and in JSON, and refuses clearly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.cli.main import run

DATA = """
import torch
class Images:
    def __len__(self): return 64
    def __getitem__(self, index): return torch.zeros(3, 32, 32), index
class Broken(Images):
    def __getitem__(self, index): raise RuntimeError("no such image")
"""


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tuned_images.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "80")


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["tune", *(() if "--last" in arguments else ("--loader", "torch")), *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_settings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(
        capsys, "--dataset", "tuned_images:Images", "--batch", "8", "--effective-batch", "32", "--ranks", "2",
        "--step-seconds", "50ms", "--json",
    )  # fmt: skip
    report = json.loads(out)
    assert status == 0 and err == "" and report["schema"] == "legroom.tune/1" and report["verdict"] == "fits"
    assert report["settings"]["batch_size"] == 8 and report["settings"]["accumulation"] == 2
    assert report["effective_batch"] == 32
    assert report["measured"]["tensors"] == [8 * 3 * 32 * 32 * 4, 64] and report["measured"]["process_ram"] > 0
    assert report["need"]["ram"] >= report["measured"]["process_ram"]
    assert report["loader"]["batch_size"] == 8 and report["why"]["num_workers"]
    assert {lever["name"] for lever in report["levers"]} >= {"batch_size", "mixed_precision"}


@pytest.mark.usefixtures("child_in_fork")
def test_ranks_on_other_machines_do_not_count_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = ("--set", "workers=1", "--set", "prefetch=1")
    common = ("--dataset", "tuned_images:Images", "--batch", "8", "--world-size", "4", *fixed, "--json")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    all_here = json.loads(_run(capsys, *common)[1])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    half_here = json.loads(_run(capsys, *common)[1])
    assert all_here["settings"]["ranks"] == half_here["settings"]["ranks"] == 4
    assert all_here["need"]["shm"] == 2 * half_here["need"]["shm"] > 0


@pytest.mark.usefixtures("child_in_fork")
def test_parameters_are_counted_as_plan_and_check_count_them(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--dataset", "tuned_images:Images", "--batch", "8", "--json")
    told = [json.loads(_run(capsys, *common, "--params", given)[1])["zero"] for given in ("60M", "60000000")]
    assert told[0] == told[1] != []
    status, _, err = _run(capsys, *common, "--params", "many")
    assert status == 2 and "125M" in err


@pytest.mark.parametrize(
    ("spec", "what", "advice"),
    [
        ("tuned_images:Imagse", "tuned_images has no 'Imagse'", "did you mean 'Images'?"),
        ("tuned_images.py:nope", "tuned_images.py has no 'nope'", "module:object"),
        ("tuned_imagse:Images", "there is no module tuned_imagse", "pass its file"),
        ("nowhere.py:Images", "there is no file nowhere.py", "check the path"),
        ("sub/dir.py:Images", "there is no file sub/dir.py", "check the path"),
    ],
)
@pytest.mark.usefixtures("child_in_fork")
def test_a_name_that_is_not_there(spec: str, what: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = _run(capsys, "--dataset", spec, "--batch", "8")
    assert status == 2 and f"{what} [missing-key]" in err and advice in err
    assert "Traceback" not in err and "named.py" not in err and "dataset[0]" not in err


@pytest.mark.parametrize(
    ("source", "what", "why", "advice"),
    [
        (
            "import no_such_package",
            "importing {home} failed",
            "No module named 'no_such_package'",
            "install no_such_package",
        ),
        ("def f(:\n  pass", "importing {home} failed", "SyntaxError", "correct the syntax at"),
        ("raise RuntimeError('no config')", "importing {home} failed", "RuntimeError: no config", "python -c 'import "),
        ("raise SystemExit('usage: x')", "importing {home} failed", "SystemExit: usage: x", "__main__"),
        (
            "def x(root, *, split): ...",
            "{home}:x cannot be called without",
            "it requires: root, split",
            "without required",
        ),
        ("def x(): raise ValueError('no split')", "calling {home}:x failed", "ValueError: no split", "x() of"),
        ("import json as x", "{home}:x is not a dataset", "an object of type module has", "pass a dataset"),
        ("x = 3", "{home}:x is not a dataset", "an object of type int has", "pass a dataset"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".py"])
@pytest.mark.usefixtures("child_in_fork")
def test_a_module_or_function_that_fails_is_named_without_our_frames(
    source: str, what: str, why: str, advice: str, suffix: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("failing_data.py").write_text(source + "\n")
    status, _, err = _run(capsys, "--dataset", f"failing_data{suffix}:x", "--batch", "8")
    assert status == 2 and f"legroom: {what.format(home='failing_data' + suffix)}" in err
    assert why in err and advice in err and "dataset[0]" not in err
    assert "import_dataset.py" not in err and "importlib" not in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("given", "what", "advice"),
    [
        ("wrkers=3", "--set wrkers=3: unknown setting 'wrkers'", "--set workers=2"),
        ("ranks=2", "--set ranks=2: the number of ranks is 1", "--world-size 2"),
        ("workers=many", "--set workers must be an integer >= 0 (got 'many')", "--set workers=0"),
        ("pin_memory=maybe", "--set pin_memory=maybe: the value must be on or off", "--set pin_memory=on"),
    ],
)
@pytest.mark.usefixtures("child_in_fork")
def test_set_answers_in_the_words_of_its_help(
    given: str, what: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = _run(capsys, "--dataset", "tuned_images:Images", "--batch", "8", "--set", given)
    assert status == 2 and what in err and advice in err
    assert not any(other in err for other in ("num_workers", "prefetch_factor", "LEGROOM_SETTINGS"))


@pytest.mark.usefixtures("child_in_fork")
def test_settings_in_words_with_one_set_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run(
        capsys, "--dataset", "tuned_images:Images", "--batch", "8", "--set", "workers=2", "--set", "pin_memory=off",
        "--preset", "production",
    )  # fmt: skip
    assert status == 0 and "num_workers=2" in out and "num_workers 2: set by you" in out
    assert "torch.utils.data.DataLoader(dataset" in out  # whose loader the settings are for
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dataset", "tuned_images:Images"), "the batch size is missing"),
        (("--dataset", "tuned_images:Images", "--batch", "0"), "must be an integer >= 1"),
        (
            ("--dataset", "tuned_images:Images", "--batch", "8", "--effective-batch", "20"),
            "use an effective batch of 16 or 24",
        ),
        (("--dataset", "tuned_images:Broken", "--batch", "8"), "RuntimeError: no such image"),
        (("--dataset", "tuned_images:Images", "--batch", "8", "--step-seconds", "-3"), "cannot read"),
        (("--dataset", "tuned_images:Images", "--batch", "8", "--set", "workers"), "write NAME=VALUE"),
        (
            ("--dataset", "tuned_images:Images", "--batch", "8", "--set", "workers=many"),
            "must be an integer >= 0 (got 'many')",
        ),
        (("--dataset", "tuned_images:Images", "--batch", "8", "--set", "nonsense=1"), "unknown setting"),
        (("--dataset", "Images", "--batch", "8"), "is not the name of a dataset"),
        (("--dataset", "tuned_images:Images", "--batch", "8", "--preset", "fast"), "'fast'"),
    ],
)
@pytest.mark.usefixtures("child_in_fork")
def test_bad_requests_exit_2(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *arguments)
    assert status == 2 and out == "" and said in err and "Traceback (most" not in err


@pytest.mark.usefixtures("child_in_fork")
def test_climbing_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    what = ("--dataset", "tuned_images:Images")
    assert _run(capsys, *what, "--last")[0] == 1
    status, out, _ = _run(capsys, *what, "--last", "--json")
    assert status == 1 and json.loads(out) == {"schema": "legroom.tune/1", "verdict": "unknown", "settings": None}
    status, out, _ = _run(capsys, *what, "--batch", "4", "--benchmark", "--preset", "development", "--json")
    climbed = json.loads(out)
    assert status == 0 and "measured step by step" in climbed["why"]["num_workers"]
    status, out, _ = _run(capsys, *what, "--last", "--json")
    assert status == 0 and json.loads(out)["settings"] == climbed["settings"]


@pytest.mark.usefixtures("child_in_fork")
def test_the_ranks_of_the_stored_settings_are_those_of_the_zero_table(capsys: pytest.CaptureFixture[str]) -> None:
    what = ("--dataset", "tuned_images:Images")
    common = ("--preset", "development", "--params", "7B", "--json")
    found = json.loads(_run(capsys, *what, "--batch", "4", "--ranks", "4", "--benchmark", *common)[1])
    last = (*what, "--last", "--params", "7B", "--json")
    assert json.loads(_run(capsys, *last)[1])["zero"] == found["zero"]
    assert json.loads(_run(capsys, *last, "--world-size", "8")[1])["zero"] != found["zero"]
