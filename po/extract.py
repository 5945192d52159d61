"""What Babel extracts from a Python file: ``say("…")``, ``phrase("…")``, and the help of commands and options.

Babel's own Python extractor knows calls only, and one literal for each.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

MARKS = frozenset({"say", "phrase"})
Message = tuple[int, None, str, list[str]]  # line, function name, message, comments


def extract_python(
    file: BinaryIO, keywords: Sequence[str], comment_tags: Sequence[str], options: Mapping[str, Any]
) -> Iterator[Message]:
    """Every message of a file, in its order: an extraction method of Babel."""
    for line, text in messages_in(ast.parse(file.read())):
        yield line, None, text, []


def messages_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, message) from top to bottom."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            if marks(node.func) in MARKS and node.args:
                yield from _literals(node.args[0])
            for keyword in node.keywords:
                if keyword.arg == "help" and name_of(node.func) == "option":
                    yield from _literals(keyword.value)
        elif isinstance(node, ast.FunctionDef) and _is_command(node) and (text := ast.get_docstring(node)):
            yield node.lineno, inspect.cleandoc(text)
        yield from messages_in(node)


def marks(function: ast.expr) -> str:
    """``say`` or ``phrase`` where it is the function of legroom.messages; another object may have a ``say`` too."""
    if isinstance(function, ast.Attribute) and name_of(function.value) != "messages":
        return ""
    return name_of(function)


def _is_command(node: ast.FunctionDef) -> bool:
    """Whether a function is a command of the command line: its docstring is its help."""
    calls = [each.func for each in node.decorator_list if isinstance(each, ast.Call)]
    return any(name_of(call) in ("command", "group") for call in calls)


def name_of(function: ast.expr) -> str:
    """The last name of what is called: ``click.option`` → ``option``."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _literals(value: ast.expr) -> Iterator[tuple[int, str]]:
    """The strings that an argument can be: a literal, or a choice between literals."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.strip():
        yield value.lineno, value.value
    elif isinstance(value, ast.IfExp):
        yield from _literals(value.body)
        yield from _literals(value.orelse)
