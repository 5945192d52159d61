"""Which lines of the source fill a holder: ``history.append(x)``, ``cache[key] = x``, ``total += loss``. Pure.

The source is parsed, not run. A name can be filled in several lines; all of them are returned.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

# Methods that add to a container or a queue; others may too, but then the object's own class is searched as well.
_ADDING = frozenset({
    "append", "appendleft", "add", "extend", "extendleft", "insert", "update", "setdefault", "put", "put_nowait",
    "push", "write", "writelines", "send", "record", "log", "store", "register", "submit",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillLine:
    """A line that fills a name."""

    word: str  # the identifier that is filled
    line: int
    function: str  # the function around it; empty at the level of the module
    itself: bool  # the new value is made from the old one: total += loss
    attribute: bool  # self.history rather than history


@lru_cache(maxsize=64)
def fill_lines(source: str) -> tuple[FillLine, ...]:
    """Every line of a source that fills something; empty if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(_in_body(tree, ""))


def lines_for(source: str, word: str, function: str = "", *, itself: bool = False) -> list[int]:
    """The lines that fill ``word``; those in the named function first, if there are any there.

    ``itself``: only lines whose new value is made from the old one, which is how sums and hidden states grow.
    """
    found = [one for one in fill_lines(source) if one.word == word and (one.itself or not itself)]
    if not itself:
        found = _through_aliases(source, word, found)
    inside = [one for one in found if function and one.function.split(".")[-1] == function]
    return sorted({one.line for one in inside or found})


def _through_aliases(source: str, word: str, found: list[FillLine]) -> list[FillLine]:
    """Also lines that fill a part under a name of its own: ``part = history.setdefault(key, [])``, ``part.append(x)``.

    The line that only gives the part its name is then not one that fills.
    """
    named = {(one.function, one.word): one.line for one in _aliases(source) if one.part_of == word}
    filled = [
        one for one in fill_lines(source)
        if (one.function, one.word) in named and not one.itself and not one.attribute
    ]  # fmt: skip
    only_named = {named[one.function, one.word] for one in filled}
    return [one for one in found if one.line not in only_named] + filled


@dataclass(frozen=True, slots=True)
class _Alias:
    """A line that gives a container, or a part of it, another name."""

    word: str
    part_of: str
    line: int
    function: str


@lru_cache(maxsize=64)
def _aliases(source: str) -> tuple[_Alias, ...]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(_aliases_in(tree, ""))


def _aliases_in(node: ast.AST, function: str) -> Iterator[_Alias]:
    for child in ast.iter_child_nodes(node):
        target = child.targets[0] if isinstance(child, ast.Assign) and len(child.targets) == 1 else None
        whole = _part_of(child.value) if isinstance(child, ast.Assign) else None
        if isinstance(target, ast.Name) and whole is not None:
            yield _Alias(target.id, whole, target.lineno, function)
        inner = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{child.name}" if function else child.name
        yield from _aliases_in(child, inner)


def _part_of(value: ast.expr) -> str | None:
    """The container of which this is a part, or which it is: history of ``self.history[key]``."""
    while True:
        if isinstance(value, ast.Subscript):
            value = value.value
        elif isinstance(value, ast.Call):
            if not isinstance(value.func, ast.Attribute) or value.func.attr not in ("setdefault", "get"):
                return None
            value = value.func.value
        else:
            return _last_word(value)


# Functions that only read what they are given.
_READING = frozenset({
    "len", "print", "sum", "min", "max", "any", "all", "iter", "enumerate", "zip", "sorted", "list", "tuple", "set",
    "str", "repr", "isinstance", "type", "id", "range", "reversed", "map", "filter", "mean", "stack", "cat",
    "concatenate", "array", "tensor", "save", "dump", "dumps", "info", "debug", "format", "join",
})  # fmt: skip


def passing_lines(source: str, word: str) -> list[int]:
    """Lines that pass ``word`` to another function, which may fill it under another name."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(_last_word(part) == word for part in node.args):
            name = _last_word(node.func)
            if name is not None and name not in _READING:
                found.add(node.lineno)
    return sorted(found)


def _last_word(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _in_body(node: ast.AST, function: str) -> Iterator[FillLine]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{child.name}" if function else child.name
        yield from _of_statement(child, function)
        yield from _in_body(child, inner)


def _of_statement(node: ast.AST, function: str) -> Iterator[FillLine]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
        yield from _filled(node.func.value, node.lineno, function, itself=False)
    elif isinstance(node, ast.AugAssign):
        yield from _filled(node.target, node.lineno, function, itself=True)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        used = set(_words(node.value))
        for target in _flat(targets):
            for one in _filled(target, node.lineno, function, itself=False):
                again = one.word in used
                if again or isinstance(target, ast.Subscript):
                    yield FillLine(one.word, one.line, function, again, one.attribute)


def _flat(targets: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from _flat(target.elts)
        elif isinstance(target, ast.Starred):
            yield from _flat([target.value])
        else:
            yield target


def _filled(target: ast.expr, line: int, function: str, *, itself: bool) -> Iterator[FillLine]:
    """The identifier that is filled: history in ``history[k].append`` and in ``self.history.append``."""
    while isinstance(target, (ast.Subscript, ast.Call)):
        target = target.value if isinstance(target, ast.Subscript) else target.func
        if isinstance(target, ast.Attribute) and target.attr in ("setdefault", "get"):
            target = target.value
    if isinstance(target, ast.Name):
        yield FillLine(target.id, line, function, itself, attribute=False)
    elif isinstance(target, ast.Attribute):
        yield FillLine(target.attr, line, function, itself, attribute=True)


def _words(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
