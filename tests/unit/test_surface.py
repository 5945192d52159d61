"""The surface: exported names, light start, help of every verb, a verb a page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import numpy as np
import pytest

import legroom
from legroom.cli.main import COMMANDS, cli, run

REPO = Path(__file__).parents[2]
HEAVY = {"numpy", "torch", "h5py", "pyarrow", "rich", "pynvml", "psutil", "textual"}


def test_exported_names_are_all_there_and_nothing_else() -> None:
    for name in legroom.__all__:
        assert getattr(legroom, name) is not None
    assert set(legroom._HOMES) | {"__version__"} == set(legroom.__all__)
    assert set(legroom.__all__) <= set(dir(legroom))


def test_the_errors_need_no_import_of_their_own() -> None:
    program = "import legroom; print(issubclass(legroom.errors.NoRoom, legroom.LegroomError))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = legroom.nonsense


def test_classes_that_a_repr_or_a_page_names_can_be_imported() -> None:
    found = [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *(REPO / "src").rglob("*.py"), REPO / "po" / "zh.po"]
    pages = [path for path in found if path.parent.name != "decisions"]  # which also record earlier names
    named = {name for path in pages for name in re.findall(r"\blegroom\.([A-Z]\w+)", path.read_text(encoding="utf-8"))}
    assert {"Data", "DataLoader"} <= named <= set(legroom.__all__)


def test_what_open_returns_is_of_the_class_that_its_repr_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path))
    np.save(tmp_path / "x.npy", np.arange(3))
    with legroom.open(tmp_path / "x.npy", backing="disk") as data:
        assert type(data) is legroom.Data
        assert repr(data).startswith("<legroom.Data on disk:")


def _modules_after(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(shown.stdout.splitlines()[-1]))


def test_import_and_help_pull_nothing_heavy() -> None:
    assert not _modules_after("import legroom") & HEAVY
    quiet = "import contextlib, io\nfrom legroom.cli.main import run\nwith contextlib.redirect_stdout(io.StringIO()):\n    run(['--help'])"
    assert not _modules_after(quiet) & HEAVY


def test_doctor_does_without_numpy_and_torch() -> None:
    quiet = "import contextlib, io\nfrom legroom.cli.main import run\nwith contextlib.redirect_stdout(io.StringIO()):\n    run(['doctor'])"
    assert not _modules_after(quiet) & (HEAVY - {"pynvml", "psutil"})


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_command_has_help_json_a_page_and_a_file(verb: str) -> None:
    door = click.Context(cli, **cli.context_settings)
    command = cli.get_command(door, verb)
    assert command is import_module(f"legroom.cli.{verb}").command
    text = command.get_help(click.Context(command, door, f"legroom {verb}"))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "--json" in text
    assert (REPO / "docs" / f"{verb}.md").is_file()


@pytest.mark.parametrize(
    ("verb", "shown", "earlier"),
    [
        ("doctor", "--pid", "--job"),
        ("leak", "--html", "--page"),
        ("tune", "--benchmark", "--climb"),
        ("tune", "--world-size", "--ranks"),
    ],
)
def test_earlier_names_of_options_are_accepted_and_not_in_the_help(verb: str, shown: str, earlier: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    assert [one.opts for one in command.params if earlier in one.opts] == [[shown, earlier]]
    text = command.get_help(click.Context(command))
    assert f"  {shown} " in text and earlier not in text


def test_every_package_has_a_map_of_its_modules() -> None:
    for path in (REPO / "src" / "legroom").rglob("*.py"):
        text = path.read_text()
        assert text.lstrip("r").startswith('"""'), path
        if path.name == "__init__.py" and path.parent.name != "legroom" and "Covers:" not in text:
            docstring = text.split('"""')[1]
            modules = {one.stem for one in path.parent.glob("*.py")} - {"__init__"}
            assert not [name for name in sorted(modules) if not re.search(rf"\b{name}\b", docstring)], path


@pytest.mark.parametrize("words", [[], ["plan"], ["cache"], ["cache", "load"], ["help"]])
def test_help_may_come_before_the_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", *words]) == run([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :] and shown.startswith("Usage: legroom")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["help", "plam"], "Did you mean 'plan'?"),
        (["help", "plan", "x"], "unexpected extra argument (x)"),
        (["hlep"], "Did you mean 'help'?"),
    ],
)
def test_help_about_what_is_not_there(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2 and part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["explain", "a.log", "b.log"], True),
        (["plan", "--data", "a.npy", "b.npy", "c.npy"], True),
        (["check", "--batch", "2", "--data", "a.npy", "b.npy"], True),
        (["report", "--log", "a.log", "b.log"], True),
        (["watch", "--replay", "a", "b"], True),
        (["doctor", "a"], False),  # takes no file
    ],
)
@pytest.mark.parametrize(
    ("language", "extra", "give"), [("en", "unexpected extra", "Give one file"), ("zh", "多余", "请给出一个文件")]
)
def test_a_command_that_takes_one_file_explains_what_the_shell_made_of_a_pattern(
    words: list[str], hint: bool, language: str, extra: str, give: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--lang", language, *words]) == 2
    shown = capsys.readouterr().err
    assert extra in shown and (give in shown) is hint


def test_a_shell_completes_what_help_is_about() -> None:
    def offered(*words: str) -> list[str]:
        from click.shell_completion import ShellComplete

        complete = ShellComplete(cli, {}, "legroom", "_LEGROOM_COMPLETE")
        return [item.value for item in complete.get_completions(list(words[:-1]), words[-1])]

    assert offered("he") == ["help"] and offered("help", "") == [*COMMANDS, "help"]
    assert offered("help", "cache", "l") == ["list", "load"] and offered("help", "plan", "") == []


def test_ctrl_c_before_anything_has_begun_is_no_traceback() -> None:
    script = (
        "import sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Impatient())\n"
        "from legroom.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, "--help"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_the_script_uses_the_same_entry_point() -> None:
    import tomllib

    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"legroom": "legroom.__main__:main"}
