"""Every sentence has its translation, and is looked up when it is said and not when a module is imported."""

from __future__ import annotations

import ast
import gettext
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PO = Path(__file__).parents[2] / "po"


@pytest.fixture
def po(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The tool's modules, which lie beside the translations and in no package."""
    monkeypatch.syspath_prepend(str(PO))
    import catalogue
    import messages
    import sources

    class Tool:
        pass

    tool: Any = Tool()
    tool.catalogue, tool.messages, tool.sources = catalogue, messages, sources
    yield tool
    for name in ("catalogue", "messages", "sources"):
        sys.modules.pop(name, None)


def test_the_translations_are_complete_and_compiled() -> None:
    done = subprocess.run([sys.executable, str(PO / "messages.py"), "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _said_at_import(tree: ast.Module, speaks: Any) -> Iterator[int]:
    """Lines where something is said while the module is imported: outside functions, in defaults, in decorators."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and speaks(node.func) == "say":
            yield node.lineno
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += [*node.decorator_list, node.args]
        elif not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def test_nothing_is_said_while_modules_are_imported(po: Any) -> None:
    early = [
        f"{path}:{line}"
        for path in po.sources.SOURCE.rglob("*.py")
        for line in _said_at_import(ast.parse(path.read_text(encoding="utf-8")), po.sources.speaks)
    ]
    assert early == [], "use phrase() there and say() where it is shown"


@pytest.mark.parametrize(
    "source",
    ["X = say('a')", "class A:\n    x = say('a')", "def f(x=say('a')): pass", "@d(say('a'))\ndef f(): pass"],
)
def test_the_guard_sees_what_is_said_too_early(source: str, po: Any) -> None:
    assert list(_said_at_import(ast.parse(source), po.sources.speaks))
    late = ast.parse("def f():\n    return say('a')\nX = lambda: say('a')")
    assert not list(_said_at_import(late, po.sources.speaks))


def test_messages_are_found_in_source(po: Any) -> None:
    tree = ast.parse(
        'A = {"x": phrase("one")}\n'
        "@click.command()\n"
        '@click.option("--x", help="two")\n'
        "def f():\n"
        '    """three\n\n    four"""\n'
        '    words.say("fi" "ve {x}" if x else "six", x=1)\n'
        "    say(variable)\n"
        '    voice.say("an event")\n'
        '    parser.add_argument("--y", help="for programmers")\n'
        "def g():\n"
        '    """not a command"""\n'
    )
    assert set(po.sources.said_in(tree)) == {"one", "two", "three\n\nfour", "five {x}", "six"}


@pytest.mark.parametrize(
    ("template", "translation", "problem"),
    [
        ("{free} left", "", "not translated"),
        ("{free} left", "还剩", "{free} is missing"),
        ("{free:>8} left", "还剩 {free}", "{free:>8} is missing"),
        ("{free} left", "还剩 {free}（{size}）", "{size} is not in the original"),
        ("{free} left", "还剩 {free", "braces"),
        ("it is full", "it is full", "the same"),
        ("  do: ", "处理：", "begins with a space"),
    ],
)
def test_what_the_check_finds(template: str, translation: str, problem: str, po: Any) -> None:
    found = list(po.messages.problems(po.catalogue.Entry(template, translation)))
    assert any(problem in one for one in found), found


@pytest.mark.parametrize(
    ("template", "translation"),
    [
        ("{free} of {size}", "共 {size}，空闲 {free}"),
        ("{a}: {b}", "{a}: {b}"),
        (" and more", "，以及更多"),
        ("`df -h`", "`df -h`"),
    ],
)
def test_what_the_check_lets_pass(template: str, translation: str, po: Any) -> None:
    assert list(po.messages.problems(po.catalogue.Entry(template, translation))) == []


def test_files_come_back_as_they_were_written(po: Any, tmp_path: Path) -> None:
    entry = po.catalogue.Entry('say "{x}"\n\ttwice\\', "说“{x}”\n两次\\", ("a.py",), ("#. same",))
    path = tmp_path / "a.po"
    path.write_text(po.catalogue.po_text([entry], "zh"), encoding="utf-8")
    assert po.catalogue.read(path) == {
        entry.template: po.catalogue.Entry(entry.template, entry.translation, (), entry.notes)
    }
    path.write_text('msgid ""\nmsgstr "h"\n\n# note\nmsgid "a "\n"b"\nmsgstr ""\n"甲"\n', encoding="utf-8")
    assert po.catalogue.read(path)["a b"].translation == "甲"
    found = gettext.GNUTranslations(io.BytesIO(po.catalogue.mo_bytes([entry], "zh")))
    assert found.gettext(entry.template) == entry.translation and found.info()["language"] == "zh"


def test_extract_keeps_moves_adds_and_drops(po: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(po.messages, "HERE", tmp_path)
    folder = tmp_path / "zh"
    folder.mkdir()
    old = [
        po.catalogue.Entry("kept", "留"),
        po.catalogue.Entry("moved", "移"),
        po.catalogue.Entry("gone", "去"),
    ]
    (folder / "base.po").write_text(po.catalogue.po_text(old, "zh"), encoding="utf-8")
    monkeypatch.setattr(
        po.messages,
        "messages",
        lambda: {"base": {"kept": ["a.py"]}, "cli": {"moved": ["b.py"], "new": ["b.py"]}},
    )
    monkeypatch.setattr(po.messages, "_print", lambda text: None)
    po.messages.extract("zh")
    found = {
        path.stem: {one.template: one.translation for one in po.catalogue.read(path).values()}
        for path in folder.iterdir()
    }
    assert found == {"base": {"kept": "留"}, "cli": {"moved": "移", "new": ""}}
