"""What Legroom says, read from its source: every template with the files that say it.

Covers: ``say("…")``, ``phrase("…")``, the help of commands and options. Does not cover: translations (catalogue).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "legroom"
SPEAKERS = frozenset({"say", "phrase"})


def layer_of(path: Path) -> str:
    """The layer a module belongs to: its first folder below the package, ``base`` for top-level modules."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "base"


def messages() -> dict[str, dict[str, list[str]]]:
    """Layer → template → the files that say it. A template has one home: the first layer that says it."""
    found: dict[str, dict[str, list[str]]] = {}
    homes: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py"), key=lambda path: (layer_of(path) != "base", path)):
        place = path.relative_to(SOURCE.parent.parent).as_posix()
        for text in said_in(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            home = homes.setdefault(text, layer_of(path))
            places = found.setdefault(home, {}).setdefault(text, [])
            if place not in places:
                places.append(place)
    return found


def said_in(tree: ast.AST) -> Iterator[str]:
    """Every template in one module, in the order of the file."""
    for node in in_order(tree):
        if isinstance(node, ast.Call):
            if speaks(node.func) in SPEAKERS and node.args:
                yield from literals(node.args[0])
            for keyword in node.keywords:
                if keyword.arg == "help" and name_of(node.func) == "option":
                    yield from literals(keyword.value)
        elif isinstance(node, ast.FunctionDef) and is_command(node) and ast.get_docstring(node):
            yield inspect.cleandoc(ast.get_docstring(node) or "")


def in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module from top to bottom."""
    for child in ast.iter_child_nodes(tree):
        yield child
        yield from in_order(child)


def is_command(node: ast.FunctionDef) -> bool:
    """Whether a function is a command of the command line: its docstring is its help."""
    calls = [each.func for each in node.decorator_list if isinstance(each, ast.Call)]
    return any(name_of(call) in ("command", "group") for call in calls)


def speaks(function: ast.expr) -> str:
    """``say`` or ``phrase`` where it is the one of words that is called; another object may have a ``say`` too."""
    if isinstance(function, ast.Attribute) and name_of(function.value) != "words":
        return ""
    return name_of(function)


def name_of(function: ast.expr) -> str:
    """The last name of what is called: ``click.option`` → ``option``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def literals(value: ast.expr) -> Iterator[str]:
    """The strings an argument can be, where the source says them: a literal, or a choice between literals."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.strip():
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from literals(value.body)
        yield from literals(value.orelse)
