"""Names of this package that other programs here use: GPU tests, real rigs, benchmarks, examples, documentation.

Most of these programs do not run in CI (they need a GPU, or take long), so a renamed module or function would be noticed
late.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[2]
FOLDERS = ("tests/gpu", "tests/real", "tests/release", "tests/soak", "bench", "examples", "docs", "po")
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.M | re.S)


def used_names(text: str) -> Iterator[str]:
    """Dotted names below ``legroom`` that this source imports or uses, also in programs that it holds as strings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "legroom")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "legroom":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := _dotted(node)).startswith("legroom."):
            yield name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            try:
                yield from used_names(node.value)
            except SyntaxError:
                pass  # a sentence, or a template


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := _dotted(node.value)):
        return f"{inner}.{node.attr}"
    return ""


def missing(name: str) -> str | None:
    """The first part of a dotted name that does not exist; what is below a class or function is not followed."""
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not isinstance(found, ModuleType):
            return None
        whole = ".".join(parts[:number])
        if hasattr(found, part):
            found = getattr(found, part)
        elif hasattr(found, "__path__") and importlib.util.find_spec(whole):
            found = importlib.import_module(whole)
        else:
            return whole
    return None


def sources() -> dict[str, str]:
    texts = {}
    for folder in FOLDERS:
        for path in sorted((REPO / folder).rglob("*.py")):
            texts[str(path.relative_to(REPO))] = path.read_text(encoding="utf-8")
        for path in sorted((REPO / folder).rglob("*.md")):
            for number, block in enumerate(BLOCK.findall(path.read_text(encoding="utf-8"))):
                texts[f"{path.relative_to(REPO)}, block {number}"] = block
    return texts


@pytest.mark.filterwarnings("ignore")  # libraries warn at their first import
def test_every_name_of_the_package_that_programs_here_use_exists() -> None:
    wrong, known = [], dict[str, str | None]()
    for where, text in sources().items():
        try:
            names = set(used_names(text))
        except SyntaxError:
            assert where.endswith(".md") or ", block " in where, where
            continue
        for name in sorted(names):
            if name not in known:
                known[name] = missing(name)
            if known[name]:
                wrong.append(f"{where}: {name}: there is no {known[name]}")
    assert not wrong, "\n".join(wrong)
    assert {"legroom.open", "legroom.DataLoader"} <= set(known)  # the search finds names at all


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("from legroom.errors import LegroomError", None),
        ("from legroom.errors import NoSuchThing", "legroom.errors.NoSuchThing"),
        ("from legroom.no_such_module import x", "legroom.no_such_module"),
        ("import legroom.no_such_module", "legroom.no_such_module"),
        ("import legroom\nlegroom.gpu.no_such_function(1)", "legroom.gpu.no_such_function"),
        ("import legroom\nlegroom.DataLoader.anything", None),
        ("CODE = 'import legroom\\nlegroom.no_such_function()'", "legroom.no_such_function"),
    ],
)
def test_a_name_that_is_gone_is_found(text: str, gone: str | None) -> None:
    assert next(filter(None, map(missing, used_names(text))), None) == gone
