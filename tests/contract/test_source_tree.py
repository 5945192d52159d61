"""The source tree explains itself: packages list their files, no name is used twice, no file is too long."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from doc_pages import REPO

SOURCE = REPO / "src" / "legroom"
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
MOST_LINES = 600
LONGER = {  # and why
    "loader/measure/memory_guard_script.py": "a script that imports nothing of Legroom: its own memory matters"
}


def _files(package: Path) -> set[str]:
    """Its modules and packages."""
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    return modules | {path.parent.name for path in package.glob("*/__init__.py")}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(SOURCE.parent)))
def test_the_docstring_of_a_package_lists_its_files(package: Path) -> None:
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    entries = ""
    for line in (ast.get_docstring(tree) or "").splitlines()[1:]:
        # "name  what it is", "- name: what it is", "one, two, three" with the text on the next line
        entries += re.split(r"  +|: ", re.sub(r"^[\s-]*", "", line))[0] + "\n"
    listed = set(re.findall(r"\w+", entries))
    assert _files(package) <= listed, _files(package) - listed


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(SOURCE.parent)))
def test_a_package_lists_no_file_that_it_does_not_have(package: Path) -> None:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    listed = re.findall(r"^[\s-]*([a-z][a-z0-9]*_[a-z0-9_]+)(?:  +|: |$)", text, re.M)
    assert set(listed) <= _files(package), set(listed) - _files(package)


def test_no_file_name_is_used_twice() -> None:
    names = Counter(path.name for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_is_longer_than_it_should_be() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_bytes().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name for name, count in lengths.items() if count > MOST_LINES} == LONGER.keys()


def test_no_class_name_is_used_twice() -> None:
    """A name with an underscore is known in its own file only."""
    found: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
