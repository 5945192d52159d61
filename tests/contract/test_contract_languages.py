"""Translations are right and up to date; a message is looked up when it is shown, not when a module is imported."""

from __future__ import annotations

import ast
import gettext
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from babel.messages.catalog import Message

PO = Path(__file__).parents[2] / "po"


@pytest.fixture
def po(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """po/messages.py, which lies beside the translations and in no package."""
    monkeypatch.syspath_prepend(str(PO))
    import messages

    yield messages
    for name in ("messages", "extract"):
        sys.modules.pop(name, None)


def test_no_translation_is_wrong_or_outdated_and_the_compiled_file_is_the_same() -> None:
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


def test_no_sentence_is_built_while_modules_are_imported(po: Any) -> None:
    early = [
        f"{path}:{line}"
        for path in po.SOURCE.rglob("*.py")
        for line in _said_at_import(ast.parse(path.read_text(encoding="utf-8")), sys.modules["extract"].marks)
    ]
    assert early == [], "use phrase() there and say() where it is shown"


@pytest.mark.parametrize(
    "source", ["X = say('a')", "class A:\n    x = say('a')", "def f(x=say('a')): pass", "@d(say('a'))\ndef f(): pass"]
)
def test_the_check_finds_a_sentence_built_at_import(source: str, po: Any) -> None:
    assert list(_said_at_import(ast.parse(source), sys.modules["extract"].marks))
    late = ast.parse("def f():\n    return say('a')\nX = lambda: say('a')")
    assert not list(_said_at_import(late, sys.modules["extract"].marks))


def test_messages_are_found_in_source(po: Any) -> None:
    tree = ast.parse(
        'A = {"x": phrase("one")}\n'
        "@click.command()\n"
        '@click.option("--x", help="two")\n'
        "def f():\n"
        '    """three\n\n    four"""\n'
        '    messages.say("fi" "ve {x}" if x else "six", x=1)\n'
        "    say(variable)\n"
        '    voice.say("an event")\n'
        '    parser.add_argument("--y", help="for programmers")\n'
        "def g():\n"
        '    """not a command"""\n'
    )
    found = [text for _, text in sys.modules["extract"].messages_in(tree)]
    assert sorted(found) == sorted({"one", "two", "three\n\nfour", "five {x}", "six"})


@pytest.mark.parametrize(
    ("template", "translation", "problem"),
    [
        ("{free} left", "还剩", "{free} is missing"),
        ("{free:>8} left", "还剩 {free}", "{free:>8} is missing"),
        ("{free} left", "还剩 {free}（{size}）", "{size} is not in the original"),
        ("{free} left", "还剩 {free", "braces"),
        ("it is full", "it is full", "the same"),
        ("  do: ", "处理：", "begins with a space"),
    ],
)
def test_what_the_check_finds(template: str, translation: str, problem: str, po: Any) -> None:
    found = list(po.problems(Message(template, translation)))
    assert any(problem in one for one in found), found


@pytest.mark.parametrize(
    ("template", "translation"),
    [
        ("{free} of {size}", "共 {size}，空闲 {free}"),
        ("{a}: {b}", "{a}: {b}"),
        (" and more", "，以及更多"),
        ("`df -h`", "`df -h`"),
        ("not translated yet", ""),
    ],
)
def test_what_the_check_lets_pass(template: str, translation: str, po: Any) -> None:
    assert list(po.problems(Message(template, translation))) == []


@pytest.fixture
def copy(po: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one source file, whose messages are "kept {x}" and "new", and three translations."""
    monkeypatch.setattr(po, "HERE", tmp_path / "po")
    monkeypatch.setattr(po, "SOURCE", tmp_path / "src" / "legroom")
    po.SOURCE.mkdir(parents=True)
    po.HERE.mkdir()
    (po.SOURCE / "a.py").write_text('say("kept {x}", x=1)\nsay("Kept {y} %s")\nsay("new")\n')
    entries = [("kept {x}", "留 {x}"), ("Kept {y} %s", "Kept {y} %s"), ("gone", "去")]
    lines = ['msgid ""\nmsgstr "Content-Type: text/plain; charset=utf-8\\n"\n']
    lines += [f'# same\nmsgid "{english}"\nmsgstr "{chinese}"\n' for english, chinese in entries]
    (po.HERE / "zh.po").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def test_update_keeps_adds_and_drops(po: Any, copy: Path) -> None:
    assert any("no longer in the source" in one and "gone" in one for one in po.check("zh"))
    po.update("zh")
    found = {text: (message.string, message.user_comments) for text, message in po.entries(po.stored("zh")).items()}
    assert found == {"kept {x}": ("留 {x}", ["same"]), "Kept {y} %s": ("Kept {y} %s", ["same"]), "new": ("", [])}
    assert [one for one in po.check("zh") if "out of date" not in one] == []
    assert "python-format" not in (copy / "po" / "zh.po").read_text().replace("python-brace-format", "")
    before = (copy / "po" / "zh.po").read_bytes()
    po.update("zh")
    assert (copy / "po" / "zh.po").read_bytes() == before


def test_compile_writes_what_gettext_reads_and_check_compares_it(po: Any, copy: Path) -> None:
    po.update("zh")
    assert any("out of date" in one for one in po.check("zh"))
    po.compile_("zh")
    assert list(po.check("zh")) == []
    with po.shipped("zh").open("rb") as file:
        found = gettext.GNUTranslations(file)
    assert found.gettext("kept {x}") == "留 {x}" and found.gettext("new") == "new"
    text = (copy / "po" / "zh.po").read_text(encoding="utf-8")
    (copy / "po" / "zh.po").write_text(text.replace("留 {x}", "留下 {x}"), encoding="utf-8")
    assert any("out of date" in one for one in po.check("zh"))


def test_no_space_stands_between_chinese_characters() -> None:
    """Nor a line break in a paragraph of a catalogue: help shows it as a space. Pages have columns of output in blocks."""
    wide = r"[\u3400-\u9fff\u3001\u3002\uff0c\uff1a\uff1b\uff08\uff09]"
    stray = re.compile(rf'.*{wide}(?: +|\\n"\n"){wide}')
    for path in (
        PO / "zh.po",
        *sorted(PO.parent.glob("*.zh-CN.md")),
        *sorted(PO.parent.glob("examples/**/*.zh-CN.md")),
    ):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
        assert stray.findall(text) == [], path
